"""One client request's life as a pure machine: events in, effects out (see `table`)."""
