"""Benches of load, prediction and routing."""
