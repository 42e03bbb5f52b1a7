"""Benches of engine loss and fleet start."""
