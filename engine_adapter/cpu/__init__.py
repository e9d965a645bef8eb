"""The engine over a real Megatron model on the CPU: batching, KV cache, weights."""
