"""Which worker takes a request: policies, worker indexes, estimates and limits."""
