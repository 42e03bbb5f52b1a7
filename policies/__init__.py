"""Pure functions and tables: the fold of the log and every choice made from it.

No I/O, clock, environment or randomness. Costs are integers, ties are broken by rule,
nothing iterates over a set, so a log replays to the same decisions on another machine.
"""
