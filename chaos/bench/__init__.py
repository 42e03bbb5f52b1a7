"""Benches: one module each, `python -m chaos.bench NAME`."""
