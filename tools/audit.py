"""``tokenplane audit``: how off-policy the rollouts of a store are, and what failed."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tokenplane.tools.command_frame import coded_errors, command_parser, zero_or_more
from tokenplane.tools.exit_status import EXIT_FAILED

if TYPE_CHECKING:
    from tokenplane.tools.audit_numbers import Audit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to audit, and against which version."""
    parser.add_argument("store", help="store URL or folder; servers may be writing to it")
    parser.add_argument("rollouts", nargs="*", metavar="ROLLOUT", help="only these (default: all)")
    parser.add_argument(
        "--trainer-version",
        type=zero_or_more,
        metavar="N",
        help="weight version that is to be trained (default: the newest that sampled a token)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


@coded_errors("audit")
def main(argv: list[str] | None = None) -> int:
    """0: every row verifies; 1: one does not, or the rollout is not there."""
    parser = command_parser("audit", __doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    from tokenplane.tools.audit_numbers import audit
    from tokenplane.tools.replay_segments import SegmentTexts
    from tokenplane.tools.rollout_view import load_rollout
    from tokenplane.tools.store_reading import find_rollout, find_rollouts, open_for_reading

    with open_for_reading(args.store) as store:
        found = (
            {name: find_rollout(store, name) for name in args.rollouts}
            if args.rollouts
            else find_rollouts(store)
        )
        views = [load_rollout(store, name, keys) for name, keys in found.items()]
        result = audit(views, args.trainer_version, texts=SegmentTexts(store))
    if args.json:
        print(json.dumps(to_json(result), indent=2))
    else:
        from tokenplane.tools.audit_screen import show_audit

        show_audit(result)
    sys.stdout.flush()
    return 0 if all(one.verified for one in result.rollouts) else EXIT_FAILED


def to_json(result: Audit) -> dict[str, Any]:
    """The audit as JSON values; ``totals`` sums what can be summed."""
    rollouts = result.rollouts
    totals: dict[str, int | None] = {
        name: sum(getattr(one, name) for one in rollouts)
        for name in (
            *("calls", "sampled_tokens", "carried_tokens", "trainable_tokens"),
            *("spanning_calls", "kv_stale_tokens", "kv_unknown_tokens"),
        )
    }
    splits = [one.splits_avoided for one in rollouts]
    known = [count for count in splits if count is not None]
    totals["continuations"] = sum(one.continuations for one in rollouts)
    totals["splits_avoided"] = sum(known) if len(known) == len(splits) else None
    totals["failures"] = sum(sum(one.failures.values()) for one in rollouts)
    totals["problems"] = sum(sum(one.problems.values()) for one in rollouts)
    return {
        "trainer_version": result.trainer_version,
        "rollouts": [asdict(one) | {"verified": one.verified} for one in rollouts],
        "staleness": {str(behind): count for behind, count in result.staleness.items()},
        "totals": totals | {"rollouts": len(rollouts)},
    }


if __name__ == "__main__":
    raise SystemExit(main())
