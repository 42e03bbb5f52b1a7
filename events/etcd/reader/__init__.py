"""Reading the log: every stream's segments, then one watch, as whole revision groups."""
