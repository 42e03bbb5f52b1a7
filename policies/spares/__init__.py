"""Spares: warm workers that get no requests until another worker of their model fails."""
