"""Benches of a lost engine, and of a start."""
