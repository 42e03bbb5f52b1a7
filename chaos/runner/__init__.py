"""Runs scenarios, simulated or live, judges them, and stores what was found.

`cases` says what runs, `world` runs it, `judge` (with `run_statistics`) makes a verdict of the outcome, and
`artifacts` writes a run to a folder. `fuzz` runs many (`pool`, `compose`), `shrink` makes a failure small, and
`report` shows one.
"""
