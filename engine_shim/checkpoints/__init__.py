"""KV checkpoints on the engine's side: vLLM's connector, its plan, its ranks, its links."""
