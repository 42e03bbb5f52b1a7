"""Scenarios drawn from a seed, in combinations that no one designed."""
