"""The page that shows the fleet: live on the admin port."""
