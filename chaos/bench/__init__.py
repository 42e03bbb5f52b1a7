"""Benches: one module each, `relume-chaos bench NAME`."""
