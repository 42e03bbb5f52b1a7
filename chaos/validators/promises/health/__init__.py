"""Promises about the health of workers: who is excluded, and why."""
