"""Where models come from: the tiny random one, SmolLM2, conversion to Megatron."""
