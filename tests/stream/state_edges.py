"""Where each event leads, as 20,000 random runs of the stream machine show it.

python -m tests.stream.state_edges     write docs/reference/stream-states.md anew
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

from relume.controlplane.stream.table import TABLE
from tests.stream.world import World

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "stream-states.md"
RUNS = 20_000
Edges = dict[tuple[str, str], set[str]]
"""Names of states to which an event leads in a state."""

HEAD = """# States of a stream

<!-- Written by `python -m tests.stream.state_edges`; do not edit. -->

A client's request is in one of these states. `controlplane/stream/table.py` says what a state waits for, and which
events it takes. Here is where each event leads, as 20,000 random runs with faults show it. A test fails if a run takes
another way. `tests/stream/test_stories.py` has six lives of a request, event by event.
"""


def walk(runs: int = RUNS) -> Edges:
    """The edges of the first `runs` random runs, which are always the same."""
    found: Edges = {}
    for seed in range(runs):
        rng = Random(seed)
        world = World(rng, rng.choice((0.1, 0.3, 0.6)))
        world.run(rng.randint(0, 60))
        for state, event, following in world.seen:
            place = state.__name__, event.__name__
            found.setdefault(place, set()).add(following.__name__)
    return found


def page(edges: Edges) -> str:
    """The document, states in the order of the table."""
    lines = [HEAD]
    for state in [state.__name__ for state in TABLE]:
        events = sorted(event for at, event in edges if at == state)
        if not events:
            continue
        lines += [f"## {state}\n", "| Event | Leads to |", "|---|---|"]
        for event in events:
            following = ", ".join(f"`{name}`" for name in sorted(edges[state, event]))
            lines.append(f"| `{event}` | {following} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def read(text: str) -> Edges:
    """The edges of a document."""
    found: Edges = {}
    state = ""
    for line in text.splitlines():
        if line.startswith("## "):
            state = line.removeprefix("## ")
        elif line.startswith("| `"):
            event, *following = re.findall(r"`(\w+)`", line)
            found[state, event] = set(following)
    return found


if __name__ == "__main__":
    PAGE.write_text(page(walk()))
