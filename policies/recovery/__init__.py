"""How an interrupted request continues, and where."""
