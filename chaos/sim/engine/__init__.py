"""vLLM's engine as a model, and what its steps cost."""
