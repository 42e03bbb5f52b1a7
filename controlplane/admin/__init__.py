"""The admin API of a replica: what the fleet is, what the log says, and changes to it."""
