"""Benches: one module each, `python -m relume.chaos.bench NAME`."""
