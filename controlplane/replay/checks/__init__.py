"""How each kind of recorded decision is taken again and compared."""
