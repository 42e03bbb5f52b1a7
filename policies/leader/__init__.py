"""What the leader owes the fleet: ends, losses, commands, the detail of the log."""
