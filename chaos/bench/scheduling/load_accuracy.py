"""Error of a scheduler's view of load, by the source of that view.

The bench records one run of real engines under bursts (`relume.chaos.bench.scheduling.load_run`). From
the same record it computes what each source knows of the load: prompt tokens not computed yet, and the
decode load (requests, and their tokens). It does so at the arbitrary times at which it read the
engines' own state.

`reconciled`   the log's statuses, and dispatches that the engine has not confirmed
`predicted`    and advanced to the decision's time by the estimate that routing uses (prompt tokens alone)
`gateway`      what a plain backend shows: dispatches, streamed tokens, ends

The truth is the requests in the engine and those on their way to it: dispatched, but not accepted,
which an engine does between two steps. `at_decisions` has the times of decisions separately. Only
loaded times count: every source knows an idle worker.
`linger_*`: the same run with writers that gather records for that time.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from relume.chaos.bench.bench_figures import figure, percentile
from relume.chaos.bench.failover.failover_parts import wide_model
from relume.chaos.bench.scheduling.load_run import Load, Run, Sample, Seen, record
from relume.events import vocabulary as v
from relume.events.log.entries import entries_of
from relume.events.log.interface import RevisionGroup
from relume.policies.routing.worker_estimate import estimate_of
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.fold import apply_group
from relume.policies.state.overlay.receive_clock import take
from relume.policies.state.overlay.view import View

DESCRIPTION = "error of a worker's load as known by accounts, prediction, gateways"
SOURCES = ("reconciled", "predicted", "gateway")
QUANTITIES = ("prefill", "batch", "context")
LINGERS_MS = (100, 300)
"""Linger of writers in fleets of 256 and of 1,000 workers (`log-scale`)."""

Known = tuple[int, int, int]
"""Prompt tokens not computed, requests that decode, their tokens."""


class Errors(Struct):
    """Absolute errors of one source, by quantity."""

    of: dict[str, list[int]] = field(default_factory=lambda: {q: [] for q in QUANTITIES})

    def note(self, known: Known, true: Known) -> None:
        """One comparison."""
        for quantity, a, b in zip(QUANTITIES, known, true, strict=True):
            self.of[quantity].append(abs(a - b))

    def mean(self, quantity: str) -> float:
        """Mean over all comparisons."""
        found = self.of[quantity]
        return sum(found) / max(len(found), 1)

    def p99(self, quantity: str) -> float:
        """99th percentile over all comparisons."""
        found = self.of[quantity]
        return percentile(found, 0.99) if found else 0


class LogView:
    """A replica's view of the log: the fold, and its own events."""

    def __init__(self) -> None:
        self.view = View("r.r0", Fleet())

    def receive(self, at_us: int, group: RevisionGroup) -> None:
        """A group arrived."""
        apply_group(self.view.fleet, group)
        self.view.landed()
        times = self.view.receipts
        take(times, v.GroupsReceived(group.revision, (0, max(at_us - times.clock_us, 0))))

    def own(self, position: int, event: Any) -> None:
        """The replica writes an event now."""
        if type(event) is v.GroupsReceived:
            self.view.reach(position)
        else:
            self.view.own(position, event)

    def known(self, source: str, worker: str, at_us: int) -> Known:
        """The load of a worker by this source now."""
        found: Worker | None = self.view.fleet.workers.get(worker)
        if found is None:
            return 0, 0, 0
        if source == "predicted":
            return predicted_prefill(self.view, found, at_us), found.decoding, found.context
        return self.view.load(found)[0], found.decoding, found.context


def predicted_prefill(view: View, worker: Worker, at_us: int) -> int:
    """Prompt tokens left at `at_us` by the estimate that routing uses. Of the confirmed ones, it
    counts those that its time covers; it counts all unconfirmed ones. The estimate predicts
    nothing else of the load."""
    estimate = estimate_of(view, worker)
    confirmed = worker.prefill_left - worker.flight_left
    left = max(estimate.free_at_us - at_us, 0) * 1000 // estimate.token_ns
    return min(left, confirmed) + estimate.prefill_tokens - confirmed


class Gateway:
    """A gateway's own account of the requests that it sent to a worker."""

    def __init__(self) -> None:
        self.open: dict[str, dict[str, Seen]] = {}
        self._sent: dict[str, str] = {}

    def sent(self, request: Seen, worker: str) -> None:
        """A dispatch."""
        self.open.setdefault(worker, {})[request.request] = request
        self._sent[request.request] = worker

    def known(self, worker: str, at_us: int) -> Known:
        """The load now; a prompt counts whole until its first token."""
        prefill = batch = context = 0
        here = self.open.get(worker, {})
        for name, request in list(here.items()):
            if request.ended_us and request.ended_us <= at_us:
                del here[name]
                continue
            tokens = bisect_right(request.token_us, at_us)
            if tokens:
                batch += 1
                context += request.prompt + tokens
            else:
                prefill += request.prompt
        return prefill, batch, context


def offset_us(run: Run, boot: list[Any]) -> int:
    """Start time of the replica's clock, from the revisions that both received."""
    received = {group.revision: at for at, group in run.groups}
    clock, found = 0, []
    for event in boot:
        if type(event) is v.GroupsReceived:
            for at in range(0, len(event.deltas), 2):
                clock += event.deltas[at + 1]
                here = received.get(event.revision + event.deltas[at])
                if here is not None and here > run.began_us:
                    found.append(here - clock)
    found.sort()
    return found[len(found) // 2]


def own_events(run: Run) -> Iterator[tuple[int, int, Any]]:
    """(when, position, event) of the replica's own stream."""
    recorded = [
        (at, entry.position, entry.event)
        for at, group in run.groups
        for entry in entries_of(group, "r.r0")
    ]
    began = offset_us(run, [event for _, _, event in recorded])
    last = 0
    for at, position, event in recorded:
        if type(event) is v.RouteDecided and event.at_us >= 0:
            at = began + event.at_us
        last = max(last, at if type(event) is v.RouteDecided else last)
        yield last, position, event


def _timed(worker: str, samples: list[Sample]) -> Iterator[tuple[int, int, tuple[str, Sample]]]:
    for sample in samples:
        yield sample.at_us, 2, (worker, sample)


class ErrorsBySource(Struct):
    """Errors by source: at any time, at decisions; number of loaded samples."""

    anytime: dict[str, Errors] = field(default_factory=lambda: {s: Errors() for s in SOURCES})
    deciding: dict[str, Errors] = field(default_factory=lambda: {s: Errors() for s in SOURCES})
    loaded: int = 0


def gathered(
    groups: list[tuple[int, RevisionGroup]], linger_us: int
) -> list[tuple[int, RevisionGroup]]:
    """The groups as a replica would receive them if writers gathered records for `linger_us`."""
    found: list[tuple[int, RevisionGroup]] = []
    sent, due = -linger_us, 0
    waiting: list[RevisionGroup] = []
    for at, group in [*groups, (1 << 62, None)]:
        if waiting and at >= due:
            segments = tuple(segment for one in waiting for segment in one.segments)
            owners = tuple(owner for one in waiting for owner in one.owners)
            found.append((due, RevisionGroup(waiting[-1].revision, segments, owners)))
            sent, waiting = due, []
        if not waiting:
            due = max(at, sent + linger_us)
        if group is not None:
            waiting.append(group)
    return found


def compare(run: Run, linger_us: int = 0) -> ErrorsBySource:
    """Compare all sources at all times; log records are gathered for `linger_us`."""
    found = ErrorsBySource()
    sent: dict[str, int] = {}
    view, gateway = LogView(), Gateway()
    names: dict[str, str] = {}
    heard = gathered(run.groups, linger_us) if linger_us else run.groups
    timeline: Iterator[tuple[int, int, Any]] = heapq.merge(
        ((at, 0, group) for at, group in heard),
        ((at, 1, (position, event)) for at, position, event in own_events(run)),
        *(_timed(*entry) for entry in run.samples.items()),
        key=lambda entry: entry[:2],
    )
    latest: dict[str, Sample] = {}
    for at, kind, what in timeline:
        if kind == 0:
            view.receive(at, what)
        elif kind == 1:
            position, event = what
            if type(event) is v.RequestArrived:
                names[event.request] = event.client_id
            if type(event) is v.RouteDecided and event.worker:
                if run.began_us <= at <= run.ended_us and event.worker in latest:
                    true = _true(latest[event.worker], sent.get(event.worker, 0))
                    for source in SOURCES:
                        known = _known(source, view, gateway, event.worker, at)
                        found.deciding[source].note(known, true)
                request = run.seen.get(names.get(event.request, ""))
                if request is not None:
                    gateway.sent(request, event.worker)
                tokens = event.prompt_tokens + event.delivered
                sent[event.worker] = sent.get(event.worker, 0) + tokens
            view.own(position, event)
        else:
            worker, sample = what
            latest[worker] = sample
            true = _true(sample, sent.get(worker, 0))
            every = [_known(source, view, gateway, worker, at) for source in SOURCES]
            if any(true) or any(map(any, every)):
                found.loaded += 1
                for source, known in zip(SOURCES, every, strict=True):
                    found.anytime[source].note(known, true)
    return found


def _true(sample: Sample, sent: int) -> Known:
    """The true load, with requests that were sent and have not arrived."""
    return sample.uncomputed + max(sent - sample.arrived, 0), sample.decoding, sample.context


def _known(source: str, view: LogView, gateway: Gateway, worker: str, at_us: int) -> Known:
    if source == "gateway":
        return gateway.known(worker, at_us)
    return view.known(source, worker, at_us)


def figures_of(run: Run) -> tuple[dict[str, Any], bool]:
    """Figures by source, and whether every request was answered."""
    found = compare(run)
    figures: dict[str, Any] = {
        "samples": figure(found.loaded, "loaded"),
        "requests": figure(sum(s.sent_us >= run.began_us for s in run.seen.values()), "requests"),
        "failed": figure(run.failed, "requests", 0),
    }
    for source in SOURCES:
        errors = found.anytime[source]
        for quantity, unit in zip(QUANTITIES, ("tokens", "requests", "tokens"), strict=True):
            figures[f"{source}_{quantity}_mean"] = figure(errors.mean(quantity), unit, digits=2)
            figures[f"{source}_{quantity}_p99"] = figure(errors.p99(quantity), unit)
        errors = found.deciding[source]
        figures[f"{source}_at_decisions_mean"] = figure(errors.mean("prefill"), "tokens", digits=1)
        figures[f"{source}_at_decisions_p99"] = figure(errors.p99("prefill"), "tokens")
    for linger_ms in LINGERS_MS:
        late = compare(run, linger_ms * 1000)
        for source in ("reconciled", "predicted"):
            for quantity in QUANTITIES:
                value = late.anytime[source].mean(quantity)
                name = f"linger_{linger_ms}_{source}_{quantity}_mean"
                figures[name] = figure(value, "", digits=2)
    return figures, not run.failed


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(
        prog="relume-chaos bench load-accuracy", description=DESCRIPTION
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--together", action="store_true", help="all processes on all cores")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--every-s", type=float, default=2.5, help="mean seconds between two bursts"
    )
    parser.add_argument("--each", type=float, default=5.0, help="mean number of requests per burst")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, default=Path(".relume/models/wide"))
    parser.add_argument("--keep", type=Path, help="write the recorded run to this file (pickle)")
    args = parser.parse_args(argv)
    load = Load(seconds=args.seconds, every_s=args.every_s, each=args.each)
    model, apart = wide_model(args.model), not args.together
    recorded = asyncio.run(record(model, args.workers, load, args.seed, apart))
    if args.keep:
        import pickle

        args.keep.write_bytes(pickle.dumps(recorded))
    figures, met = figures_of(recorded)
    return {"bench": "load-accuracy", "met": met, "figures": figures}
