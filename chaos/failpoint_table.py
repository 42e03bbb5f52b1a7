"""`relume-chaos failpoints`: the failpoints there are."""

from __future__ import annotations

import argparse
import json

from relume.events.failpoints.points import PLACES, Action


def main() -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="relume-chaos failpoints",
        description="List the named places where a test may pause, delay, fail or end a process.",
        epilog="Actions: " + ", ".join(Action) + ". How to use them: docs/testing/failpoints.md.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    if parser.parse_args().json:
        print(json.dumps({name: place._asdict() for name, place in PLACES.items()}, indent=1))
        return 0
    for name, place in PLACES.items():
        print(f"{name:<17} {place.process:<17} facts: {', '.join(place.facts)}")
        print(f"{'':<17} {place.meaning}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
