"""`relume-chaos`: scenarios, faults and measurements.

Each command becomes the module that does the work, with its own flags and help.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_COMMANDS = {
    "demo": ("relume.chaos.demo", "kill a worker under load, see that no client notices"),
    "bench": ("relume.chaos.bench", "run one bench: relume-chaos bench NAME"),
    "live": ("relume.chaos.live", "scenarios on real processes, judged: --set ci, --set nightly"),
    "list": ("relume.chaos.scenario list", "the named scenarios, and faults not yet applicable"),
    "run": ("relume.chaos.runner run", "run a scenario, simulated or --live, and judge it"),
    "fuzz": ("relume.chaos.runner fuzz", "run many seeds over many scenarios"),
    "shrink": ("relume.chaos.runner shrink", "make a failing scenario small"),
    "report": ("relume.chaos.runner report", "show a stored run as text, JSON or a page"),
    "schedule": ("relume.chaos.scenario schedule", "show the schedule of a scenario for a seed"),
    "failpoints": ("relume.chaos.failpoint_table", "the places where a test may stop a process"),
    "papers": ("relume.chaos.papers", "compute published results and compare them"),
}

_HELP = "usage: relume-chaos COMMAND ...\n\ncommands:\n" + "".join(
    f"  {name:<10} {text} (relume-chaos {name} --help)\n" for name, (_, text) in _COMMANDS.items()
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of `argv`. Returns only if there is no such command."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in ("-h", "--help"):
        sys.stdout.write(_HELP)
        return 0
    if not given or given[0] not in _COMMANDS:
        sys.stderr.write(_HELP)
        return 2
    words = _COMMANDS[given[0]][0].split()
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", *words, *given[1:]])


if __name__ == "__main__":
    sys.exit(main())
