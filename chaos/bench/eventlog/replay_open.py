"""Time until the debugger has opened a long log and reached its end, with and without snapshots.

The log is that of the `replay` bench. The archive has a snapshot every `--every` revisions; it
keeps the newest, as many as the leader keeps. The figures are CPU seconds of this process:

`open`  read and check the log, until the prompt appears;
`end`   the same, and reach the fleet of the last revision;
`back`  from there, step a number of transactions back.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from relume.chaos.bench.bench_figures import figure
from relume.chaos.bench.eventlog.replay_log import make_log
from relume.chaos.bench.eventlog.replay_speed import read
from relume.controlplane.history import snapshots
from relume.controlplane.history.archive import Archive
from relume.controlplane.history.history_keeper import KeeperConfig
from relume.controlplane.replay.debugger.session import Debugger
from relume.controlplane.replay.recorded_log import from_file
from relume.controlplane.replay.store import save
from relume.events.log.interface import RevisionGroup
from relume.policies.state.fleet import Fleet, dump
from relume.policies.state.fold import apply_group

GOAL_S = 5.0
BACK = 5_000
LOG_ID = "bench"
KEPT = KeeperConfig(root="")


def parser() -> argparse.ArgumentParser:
    """Arguments of the bench."""
    made = argparse.ArgumentParser(prog="relume-chaos bench replay-open", description=__doc__)
    made.add_argument("--records", type=int, default=300_000, help="records in the log")
    made.add_argument(
        "--every", type=int, default=KEPT.every_revisions, help="revisions between snapshots"
    )
    made.add_argument("--seed", type=int, default=1)
    return made


def archived(folder: Path, groups: list[RevisionGroup], every: int) -> None:
    """The log as the leader leaves it, with the snapshots that the leader retains."""
    file = Archive(folder / LOG_ID, LOG_ID).begin("bench")
    file.add([group for group in groups if group.segments])
    file.seal(groups[-1].revision)
    last = groups[-1].revision
    due = [at * every for at in range(1, last // every + 1)][-KEPT.keep_snapshots :]
    fleet = Fleet()
    for group in groups:
        apply_group(fleet, group)
        if due and group.revision >= due[0]:
            snapshots.write(folder / LOG_ID, LOG_ID, dump(fleet), group.revision)
            del due[0]


def session(path: Path) -> dict[str, float]:
    """CPU seconds from the start, and the transactions folded to get to the end."""
    began = time.process_time()
    debugger = Debugger(from_file(path))
    opened = time.process_time()
    debugger.run("at end")
    at_end, folded = time.process_time(), debugger.timeline.folded
    debugger.run(f"back {BACK}")
    back = time.process_time() - at_end
    return {"open": opened - began, "end": at_end - began, "back": back, "folded": folded}


def run(argv: list[str]) -> dict[str, Any]:
    """Run the bench; see `--help`. Met: both logs are open, at their end, within the goal."""
    args = parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="relume-bench-") as made:
        folder = Path(made)
        groups = read(make_log(args.records, args.seed))
        save(folder / "log.rlog", groups, None, "bench")
        archived(folder / "archive", groups, args.every)
        count = len(groups)
        del groups
        found = {"archive": session(folder / "archive"), "file": session(folder / "log.rlog")}
    figures = {}
    for kind, took in found.items():
        figures[f"{kind}_open_s"] = figure(took["open"], "s", GOAL_S, 2)
        figures[f"{kind}_end_s"] = figure(took["end"], "s", GOAL_S, 2)
        figures[f"{kind}_back_s"] = figure(took["back"], "s", digits=2)
        figures[f"{kind}_folded"] = figure(took["folded"], "transactions", digits=0)
    figures["log"] = figure(count, "transactions", digits=0)
    met = all(one["value"] <= one["goal"] for one in figures.values() if one["goal"])
    return {"bench": "replay-open", "met": met, "figures": figures}
