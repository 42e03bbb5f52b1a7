"""The host's state daemon as the agent sees it."""
