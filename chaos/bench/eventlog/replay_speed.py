"""Replay bench: how fast one core reads and checks a log and repeats its decisions.

`relume.chaos.bench.eventlog.replay_log` makes the log (not part of the time): three engines that
step, a replica that places and ends requests, deaths, state hashes. Each repetition times two
things in CPU seconds of this process:

`replay`  unpack (crc, hash), check the hash chain, decode, fold, check state hashes;
`verify`  the same, and repeat every decision (`relume replay --verify`).

Figures are medians. The bench also counts state changes (those inside engine steps).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from relume.chaos.bench.bench_figures import figure
from relume.chaos.bench.eventlog.replay_log import make_log
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.log.entries import entries
from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import Chain, unpack
from relume.policies.state.fleet import Fleet, state_hash
from relume.policies.state.fold import apply_group

GOAL = 200_000

Packed = list[tuple[int, list[bytes], tuple[tuple[str, int], ...]]]


class BenchFailed(RuntimeError):
    """The log did not replay as it must, so no figure counts."""


def parser() -> argparse.ArgumentParser:
    """Arguments of the bench."""
    made = argparse.ArgumentParser(prog="relume-chaos bench replay", description=__doc__)
    made.add_argument("--records", type=int, default=300_000, help="records in the log")
    made.add_argument("--repeat", type=int, default=5)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--quick", action="store_true", help="100,000 records, 3 repetitions")
    return made


def read(packed: Packed) -> list[RevisionGroup]:
    """The groups; checks each segment's crc and computes its hash."""
    return [
        RevisionGroup(revision, tuple(map(unpack, segments)), owners)
        for revision, segments, owners in packed
    ]


def replay(groups: list[RevisionGroup]) -> Fleet:
    """Fold the log; check its hash chain and the recorded state hashes."""
    fleet, chain = Fleet(), Chain()
    hashed = (e.event for e in entries(groups, "fleet") if type(e.event) is v.StateHashed)
    hashes = {event.revision: event.hash for event in hashed}
    for group in groups:
        for segment in group.segments:
            chain.check(segment)
        apply_group(fleet, group)
        if group.revision in hashes and state_hash(fleet) != hashes[group.revision]:
            raise BenchFailed(f"another state at revision {group.revision}")
    return fleet


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(CPU seconds, result), with the garbage collector off."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        begun = time.process_time()
        result = work()
        return time.process_time() - begun, result
    finally:
        gc.enable()
        gc.unfreeze()


def run(argv: list[str]) -> dict[str, Any]:
    """Run the bench; see `--help`. Raises `BenchFailed` when the log does not verify."""
    args = parser().parse_args(argv)
    records, repeat = (100_000, 3) if args.quick else (args.records, args.repeat)
    packed = make_log(records, args.seed)
    folds, verifications = [], []
    for _ in range(repeat):
        seconds, fleet = timed(lambda: replay(read(packed)))
        folds.append(seconds)
        seconds, verdict = timed(lambda: verify(read(packed)))
        verifications.append(seconds)
        if not verdict.ok:
            raise BenchFailed(f"divergences: {verdict.divergences[:3]}")
    fold_s, verify_s = statistics.median(folds), statistics.median(verifications)
    rate = verdict.events / fold_s
    figures = {
        "records_per_s": figure(rate, "records/s", GOAL, 0),
        "changes_per_s": figure(fleet.changes / fold_s, "changes/s", digits=0),
        "verified_records_per_s": figure(verdict.events / verify_s, "records/s", digits=0),
        "decisions_per_s": figure(verdict.decisions / verify_s, "decisions/s", digits=0),
        "records": figure(verdict.events, "records", digits=0),
        "segments": figure(verdict.segments, "segments", digits=0),
    }
    return {"bench": "replay", "met": rate >= GOAL, "figures": figures}
