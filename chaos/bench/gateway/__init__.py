"""Benches of the token path."""
