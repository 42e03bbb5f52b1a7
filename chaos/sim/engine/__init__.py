"""A model of vLLM's engine, and the cost of its steps."""
