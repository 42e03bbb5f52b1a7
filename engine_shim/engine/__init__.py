"""What runs inside vLLM's processes: plugin, scheduler, HTTP middleware, self-test."""
