"""Faults that strike real processes from outside."""
