"""The engine over megatron-core's dynamic inference: direct, or through its coordinator."""
