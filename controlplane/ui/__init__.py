"""The page that shows the fleet: live on the admin port, or of a stored log at any moment."""
