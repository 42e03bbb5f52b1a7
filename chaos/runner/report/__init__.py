"""A kept run shown as text, JSON or a page."""
