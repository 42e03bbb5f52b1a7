"""I21: what the fold holds is what engines, state daemons, gateways and etcd have.

In every log, the fold's own sums and indexes must hold (`relume.policies.state.invariants`). Of a
simulated run the truth is known (`relume.chaos.validators.ground_truth`):

- At each report of an engine: the attempts it has, those that decode, their context, and the prompt
  tokens left to compute.
- At each report of a state daemon: the tokens that it holds of each request, and its bytes.
- While the run lasts: the fold of each replica, its live requests and the owners of streams.
- At the end: all of these once more, and each attempt by its name.

Replicas of two builds have the same fold only if each reads what the other writes: no record is above
the feature level in force (`relume.chaos.validators.feature_levels`).

Permitted differences, each with its reason:

- An engine that lost reports, or whose agent could not read some: the account goes by its replicas
  from then on (`account.doubt`). If the engine then becomes idle, the account may keep a request of
  the batch of its last step until the next step.
- An engine that writes again after its worker was declared lost: the declaration cleared its
  account, so attempts from before are unknown. If the engine then ends all of them, the account keeps the
  batch of its last step (`decoding`, `context`) until the next step.
- A stream whose writer had unwritten events at the end (`GroundTruth.unwritten`).
- A holder that the log declared lost while its daemon lived: its records count for nothing.
- Requests that a replica serves although the leader ended them: it was declared lost and came back.
- Requests that another replica took while their last bytes were on their way to the client.
- Blocks of requests with voided attempts: the fold drops them ahead of the daemon, also where that has
  them until after the request's end (`CheckpointsVoided`).
- Bytes of a daemon beyond a gap: a change behind the gap alone is not reported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from relume.chaos.validators.feature_levels import LevelWatch
from relume.chaos.validators.ground_truth import EngineLoad, GroundTruth, HeldBlocks, ReportKey
from relume.chaos.validators.records import ClientRecord, Log, Violation, log_of
from relume.events import vocabulary as v
from relume.events.log.codec import decode_all
from relume.events.log.interface import RevisionGroup
from relume.policies.state.fleet import Fleet, Holder, Worker
from relume.policies.state.invariants import (
    WITHOUT_ENGINE,
    of_holder,
    of_worker,
    void_attempt,
)
from relume.policies.state.invariants import check as broken_invariants

PROMISE = "I21"
EVERY = 2
"""Of groups that hold only an engine's steps, each such one has its worker's sums checked."""
MOST = 200
"""Maximum number of differences reported."""


def check(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    truth: GroundTruth | None = None,
) -> list[Violation]:
    """Differences between the fold and itself, and between the fold and `truth`."""
    log = log_of(groups)
    return judge(log, begin(log, truth))


def begin(log: Log, truth: GroundTruth | None) -> FoldWatch:
    """Have the next fold of the log compared, so that validators share one fold."""
    watch = FoldWatch(truth)
    log.watch(watch.folded)
    return watch


def judge(log: Log, watch: FoldWatch) -> list[Violation]:
    """What was found while the log was folded, and at its end."""
    fleet, truth = log.end, watch.truth
    for about, text in truth.found:
        watch.add(about, text)
    for text in broken_invariants(fleet):
        watch.add("the fold", text)
    ended = {
        name
        for name, course in log.courses.items()
        if any(e.stream == "fleet" for e in course.ends)
    }
    for stream, name in sorted(truth.unknown):
        if name not in ended:
            watch.add(stream, f"its gateway has {name}, which the fold does not have as its own")
    if watch.is_simulated:
        for about, text in _at_end(fleet, truth, watch, ended):
            watch.add(about, f"at the end: {text}")
    return watch.found


class FoldWatch:
    """Compares the fold with the truth, group by group. `doubted`: (worker, incarnation) that lost
    reports, or were declared lost; `voided`: requests of which an attempt was."""

    def __init__(self, truth: GroundTruth | None) -> None:
        self.is_simulated = truth is not None
        self.truth = truth or GroundTruth()
        self.found: list[Violation] = []
        self.doubted: set[tuple[str, int]] = set()
        self.voided: set[str] = set()
        self._turn = 0
        self._revision = 0
        self._levels = LevelWatch()

    def add(self, about: str, text: str) -> None:
        """Report a difference."""
        if len(self.found) < MOST:
            self.found.append(Violation(PROMISE, about, text, self._revision))

    def folded(self, fleet: Fleet, group: RevisionGroup) -> None:
        """The group was folded."""
        self._revision = group.revision
        for about, text in self._levels.folded(group):
            self.add(about, text)
        for segment in group.segments:
            stream, events = segment.stream, decode_all(segment.records)
            if stream == "fleet":
                self._of_leader(fleet, events)
            if not stream.startswith("w."):
                continue
            worker = fleet.workers.get(stream[2:])
            if worker is not None:
                self._of_steps(worker, events)
            place = stream, segment.first + len(events) - 1
            if (held := self.truth.held.get(place)) is not None and held.event == events[-1]:
                holder = fleet.holders.get(stream[2:])
                if holder is not None:
                    self._of_holder(fleet, holder, held)

    def _of_leader(self, fleet: Fleet, events: Sequence[v.Event]) -> None:
        for event in events:
            if type(event) is v.WorkerLost and (worker := fleet.workers.get(event.worker)):
                self.doubted.add((worker.name, worker.incarnation))
                for text in of_worker(worker):
                    self.add(worker.name, text)
            elif type(event) is v.CheckpointsVoided:
                self.voided.update(request for request, _ in event.attempts)

    def _of_steps(self, worker: Worker, events: Sequence[v.Event]) -> None:
        last, steps = None, 0
        for event in events:
            if type(event) is v.EngineStep:
                last, steps = event, steps + 1
                if event.lost:
                    self.doubted.add((worker.name, event.incarnation))
            elif type(event) is v.ReportsDropped:
                self.doubted.add((worker.name, event.incarnation))
        self._turn += 1
        if steps < len(events) or not self._turn % EVERY:
            for text in of_worker(worker):
                self.add(worker.name, text)
        if last is None or not last.changes or last.incarnation != worker.incarnation:
            return
        if worker.engine in WITHOUT_ENGINE or (worker.name, last.incarnation) in self.doubted:
            return
        change = last.changes[-1]
        key = ReportKey(last.incarnation, last.step, type(change), change.request, change.attempt)
        load = self.truth.reports.get(worker.name, {}).get(key)
        if load is not None and (text := different_load(worker, load)):
            self.add(worker.name, f"after {type(change).__name__} of {change.request}: {text}")

    def _of_holder(self, fleet: Fleet, holder: Holder, held: HeldBlocks) -> None:
        differences = different_blocks(fleet, holder, held, self.voided)
        for text in (*of_holder(fleet, holder), *differences):
            self.add(f"holder {holder.name}", text)


def different_load(worker: Worker, load: EngineLoad) -> str:
    """How the account differs from what the engine has; empty: it does not."""
    folded = EngineLoad(
        len(worker.attempts) - worker.flights,
        worker.decoding,
        worker.context,
        worker.prefill_left - worker.flight_left,
        worker.waiting,
        worker.kv_used,
    )
    return "" if folded == load else f"the fold has {folded}, its engine {load}"


def different_blocks(
    fleet: Fleet, holder: Holder, held: HeldBlocks, voided: Collection[str] = ()
) -> Iterator[str]:
    """How the coverage of a holder differs from what its daemon holds, apart from `voided` requests."""
    if not holder.alive or holder.boot != held.boot:
        return
    covered = {name: sum(found.tokens.values()) for name, found in holder.covered.items()}
    for name in covered.keys() | held.requests.keys():
        tokens, _ = held.requests.get(name, (0, 0))
        if name in voided or void_attempt(fleet, name):
            continue
        if covered.get(name, 0) != tokens:
            yield f"covers {covered.get(name, 0)} tokens of {name}; its daemon holds {tokens}"


def _at_end(
    fleet: Fleet, truth: GroundTruth, watch: FoldWatch, ended: set[str]
) -> Iterator[tuple[str, str]]:
    if truth.owners is not None and fleet.owners != truth.owners:
        yield "leases", f"the fold has owners {fleet.owners}, etcd {truth.owners}"
    for name, engine in truth.engines.items():
        worker = fleet.workers.get(name)
        if worker is None or worker.incarnation != engine.incarnation:
            yield name, f"its engine is incarnation {engine.incarnation}, not in the fold"
        elif (name, engine.incarnation) not in watch.doubted:
            attempts = {key for key, attempt in worker.attempts.items() if attempt.queued}
            if attempts != engine.attempts:
                yield name, f"the fold has {sorted(attempts)}, its engine {sorted(engine.attempts)}"
            if not engine.attempts and (worker.decoding or worker.context):
                left = f"{worker.decoding} that decode, with {worker.context} tokens"
                yield name, f"its engine is idle; the fold has {left}"
    for name, held in truth.daemons.items():
        if (holder := fleet.holders.get(name)) is None:
            yield name, "its state daemon is not in the fold"
        else:
            for text in different_blocks(fleet, holder, held, watch.voided):
                yield f"holder {name}", text
    for stream, live in truth.gateways.items():
        folded = {name for name, request in fleet.requests.items() if request.owner == stream}
        if folded ^ (live - ended):
            yield stream, f"the fold has requests {sorted(folded)}, its gateway {sorted(live)}"
