"""Shows a stored run as text, JSON or a page."""
