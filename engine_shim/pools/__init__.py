"""Memory that outlives engines (AnchorTP's state plane, section III.A): the state daemon owns pools, engines map them.

A pool is filled by one engine, sealed, and then mapped by others, or by the next life of the same one.
"""
