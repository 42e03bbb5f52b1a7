"""Spares."""
