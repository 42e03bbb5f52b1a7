"""Runs scenarios, simulated or live, judges what they leave, and keeps what was found.

`cases` says what is to be run, `world` runs it, `judge` (with `figures`) makes a verdict of the
outcome, `artifacts` keeps a run in a folder, `fuzz` runs many (`pool`, `compose`), `shrink`
makes a failure small, `timeline` and `page` (`drawing`) show one, `telling` is the text of it
all.
"""
