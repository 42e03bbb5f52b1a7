"""`relume-chaos what-if LOG KEY=VALUE ...`: a log under other settings, and its continuation.

The first decision that differs is exact, as with `relume replay --what-if`. From there the
simulator continues twice, with the recorded settings and with the changed ones. It compares the
continuation under the recorded settings with the log.

Exit status 0: no decision differs; 1: one does; 2: invalid input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import msgspec

from relume.chaos.sim.engine.step_cost import names
from relume.chaos.whatif.asking import ask
from relume.chaos.whatif.costs import NoCost
from relume.chaos.whatif.start import NoStart
from relume.chaos.whatif.whatif_text import show
from relume.controlplane.replay.debugger.prompt import console_of
from relume.controlplane.replay.debugger.screen import show_outcome
from relume.controlplane.replay.debugger.session import outcome_of
from relume.controlplane.replay.recorded_log import from_file
from relume.controlplane.replay.what_if import BadSetting, parse
from relume.events.log.errors import LogError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison, and print it."""
    parser = argparse.ArgumentParser(
        prog="relume-chaos what-if",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", help="a log as `relume replay --export` writes it, or an archive")
    parser.add_argument("settings", nargs="+", metavar="KEY=VALUE", help="settings to change")
    parser.add_argument("--from", dest="since", type=int, default=0, metavar="REVISION",
                        help="apply the changes from this revision on")  # fmt: skip
    parser.add_argument("--cost", default="", metavar="NAME",
                        help=f"formula for the cost of steps: log, {', '.join(names())}")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the simulation (default 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(argv)
    try:
        history = from_file(given.log)
        words = parse(given.settings)
        answer = ask(history, words, given.since, given.cost, given.seed, _say)
    except (BadSetting, NoCost, NoStart, LogError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    outcome, continuation = answer.outcome, answer.continuation
    if given.json:
        print(
            msgspec.json.encode(
                {
                    "origin": history.origin,
                    **outcome_of(outcome, given.since),
                    "continuation": continuation,
                }
            ).decode()
        )
    else:
        console = console_of()
        show_outcome(console, outcome_of(outcome, given.since))
        if continuation is not None:
            show(console, continuation)
    return 0 if outcome.first is None and outcome.broken is None else 1


def _say(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
