"""What two processes must agree on: formats and names, without I/O, clock or state of a process."""
