"""From a finished rollout to training rows: terminal, receipt, verification."""
