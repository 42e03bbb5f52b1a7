"""Benches of what runs beside vLLM: reports, checkpoints, restores."""
