"""What only a terminal has: the fleet as it changes, and completion of commands."""
