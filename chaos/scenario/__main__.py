"""`relume-chaos list` and `relume-chaos schedule`: the library, and the schedule of a scenario for
a seed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import msgspec

from relume.chaos.scenario import scenario_reader as reading
from relume.chaos.scenario.printing import listed, shown
from relume.chaos.scenario.problems import ScenarioError
from relume.chaos.scenario.schedule import expand


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="relume-chaos")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the named scenarios, and faults not yet applicable")
    schedule = commands.add_parser("schedule", help="show the schedule of a scenario for a seed")
    schedule.add_argument("scenario", help="a name of the library, or a YAML file")
    schedule.add_argument("--seed", type=int, default=0, help="a whole number (default 0)")
    schedule.add_argument(
        "--json", action="store_true", help="print the whole schedule as one JSON object"
    )
    schedule.add_argument(
        "--requests", type=int, default=20, help="number of requests shown (default 20)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run a command; 2 if the scenario has errors, which go to stderr."""
    given = _arguments(argv)
    try:
        if given.command == "list":
            print("\n".join(listed(reading.named())))
            return 0
        path = reading.find(given.scenario)
        schedule = expand(reading.load(path), given.seed, path.parent)
    except BrokenPipeError:
        raise
    except (ScenarioError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if given.json:
        print(msgspec.json.encode(schedule, order="deterministic").decode())
    else:
        print("\n".join(shown(schedule, max(given.requests, 0))))
    return 0


def _printed(argv: Sequence[str]) -> int:
    try:
        status = main(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # `relume-chaos schedule NAME | head`: not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


if __name__ == "__main__":
    sys.exit(_printed(sys.argv[1:]))
