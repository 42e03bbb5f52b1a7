"""Faults on real processes, struck from outside."""
