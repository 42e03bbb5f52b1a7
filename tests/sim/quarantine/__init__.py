"""Whole simulated fleets, and what one feature does to them."""
