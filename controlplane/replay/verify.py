"""Verification of a log: each recorded decision is repeated and compared (I7).

Theory of operation. The log is folded once, group by group. Each control plane replica has a view
on that fold. The view gets the replica's own events up to its next decision. When the fold is at
the revision R of that decision's basis, the policy is *called* on the recorded question and its
answer compared with the recorded one. What the leader owes (`relume.policies.leader.duties`) is
worked out again too and compared with what its stream holds. The log is never compared with itself.

The leader records the state hash with each tick, and beside it a digest of all segments
in their order. Events that no decision depended on are covered by these: a dropped,
swapped or altered event changes both from there on. Events after the last of them are counted as
`unanchored`.

The log says which version of each kind of decision its writers had, and of which shape
of the state a hash is (`relume.policies.decision_versions`). A decision of a version that this build does
not have is not repeated: it is counted by kind and version. Of a hash of another shape only the
digest of the order is compared.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from msgspec.structs import replace

from relume.controlplane.replay.checks.decision_checks import CHECKS, Check
from relume.controlplane.replay.checks.leader_replay import LeaderReplay
from relume.controlplane.replay.checks.verify_checkpoints import (
    Doubts,
)
from relume.controlplane.replay.checks.verify_waiting import AdmissionReplay
from relume.controlplane.replay.divergence import Verdict
from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.log.errors import BrokenChain, LogError
from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import Chain
from relume.events.vocabulary.enums import AttemptMode, ProbeResult
from relume.policies.decision_versions import (
    kind_of,
    missing,
    missing_shape,
    version_of,
)
from relume.policies.liveness import stall
from relume.policies.recovery.lineage import CorruptEngines
from relume.policies.recovery.resume_mode import mode_of
from relume.policies.state import unreadable
from relume.policies.state.fleet import Fleet, dump, load, state_hash
from relume.policies.state.fold import apply_group
from relume.policies.state.overlay.view import View

NEVER = 1 << 63
"""A revision after every revision."""


def verify(
    groups: Iterable[RevisionGroup],
    base: Fleet | None = None,
    limit: int = 20,
    end: v.StateHashed | None = None,
) -> Verdict:
    """Replay `groups` (in order, whole) from `base` (a snapshot; default: the beginning).

    Stops after `limit` divergences. `end` is the state the log must end with, where another source
    has it (a stored file's footer). Raises nothing for a bad log: each defect is one of the
    divergences. `base` is unchanged.
    """
    with no_cyclic_garbage():
        replay = Replay(list(map(_read_once, groups)), load(dump(base or Fleet())))
        replay.run(limit, end)
    return replay.verdict


@contextmanager
def no_cyclic_garbage() -> Iterator[None]:
    """A fold makes no cycles, and walking a million live events to find none is slow."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _read_once(group: RevisionGroup) -> RevisionGroup:
    """The group, whose events are kept when they are decoded first where they are needed twice:
    for the view of the replica that wrote them, and for the fold."""
    if all(segment.stream[0] == "w" for segment in group.segments):
        return group
    if all(type(segment.records) is codec.CachedRecords for segment in group.segments):
        return group
    segments = tuple(replace(s, records=codec.CachedRecords(s.records)) for s in group.segments)
    return RevisionGroup(group.revision, segments, group.owners)


class Replay:
    """One pass over the log. `checks` say what is done with each kind of decision, `view`
    makes a replica's view of its stream and the fold; `verdict` collects the result. `queues`:
    whether admission queues are rebuilt and verified."""

    def __init__(
        self,
        groups: list[RevisionGroup],
        fleet: Fleet,
        checks: Mapping[type, Check] | None = None,
        view: Callable[[str, Fleet], View] = View,
        verdict: Verdict | None = None,
        queues: bool = True,
    ) -> None:
        self.groups = groups
        self.fleet = fleet
        self.verdict = Verdict() if verdict is None else verdict
        self.verdict.segments = sum(len(g.segments) for g in groups)
        self.chain = Chain()
        for stream, head in fleet.streams.items():
            self.chain.heads[stream] = (head.seq, head.hash, head.position + 1)
        names = {s.stream for g in groups for s in g.segments}
        own = {n: list(_events(groups, n)) for n in sorted(names) if n.startswith("r.")}
        claims = {
            (name, event.request)
            for name, events in own.items()
            for _, event in events
            if type(event) is v.ClientReturned
        }
        self.corrupt = CorruptEngines()
        self.replicas = {
            name: _ReplicaReplay(
                view(name, fleet),
                events,
                self.verdict,
                checks or CHECKS,
                queues,
                Doubts(self.corrupt, {request for other, request in claims if other != name}),
            )
            for name, events in own.items()
        }
        self.leader = LeaderReplay(fleet, self.verdict)
        self.hashes = deque(
            (position, event)
            for position, event in _events(groups, "fleet")
            if type(event) is v.StateHashed and event.revision >= fleet.revision
        )

    def run(self, limit: int, end: v.StateHashed | None) -> None:
        """To the end of the log, or `limit` divergences."""
        fleet, verdict = self.fleet, self.verdict
        changes = fleet.changes
        at = fleet.revision
        for group in self.groups:
            if group.revision <= at and at:
                verdict.differ(group.revision, "", 0, "order", f"later than {at}", group.revision)
                break
            self._settle(group.revision)
            if len(verdict.divergences) >= limit or not self._fold(group):
                break
            at = group.revision
        else:
            if end is not None:
                self.hashes.append((0, end))
            self._settle(NEVER)
        verdict.revision = fleet.revision
        verdict.unreadable = unreadable.in_words(fleet)
        verdict.changes = fleet.changes - changes
        del verdict.divergences[limit:]

    def _fold(self, group: RevisionGroup) -> bool:
        verdict = self.verdict
        only_workers = True
        for segment in group.segments:
            only_workers = only_workers and segment.stream[0] == "w"
            try:
                self.chain.check(segment)
            except BrokenChain as error:
                verdict.differ(group.revision, error.stream, error.seq, "chain", "whole", error)
                return False
            verdict.events += len(segment.records)
            verdict.unanchored += len(segment.records)
        try:
            apply_group(self.fleet, group, None if only_workers else self._seen)
            if only_workers:
                self.leader.landed()
        except LogError as error:
            verdict.differ(group.revision, "", 0, "record", "readable", error)
            return False
        for segment in group.segments:
            if segment.stream in self.replicas:
                self.replicas[segment.stream].view.landed()
        return True

    def _seen(self, stream: str, position: int, event: Any) -> None:
        if type(event) is v.HealthDecided:
            self.corrupt.on_decided(event)
        self.leader.seen(stream, position, event)

    def _settle(self, before: int) -> None:
        """Check all that was decided on, or says something of, the present state: the one
        from the last group on, until `before`."""
        for replica in self.replicas.values():
            if replica.due < before:
                replica.proceed(before)
        while self.hashes and self.hashes[0][1].revision < before:
            self._compare(*self.hashes.popleft())

    def _compare(self, position: int, recorded: v.StateHashed) -> None:
        verdict, fleet = self.verdict, self.fleet
        verdict.hashes += 1
        verdict.unanchored = 0
        place = recorded.revision, "fleet", position
        if recorded.order and recorded.order != fleet.order:
            verdict.differ(*place, "order", recorded.order.hex(), fleet.order.hex())
        elif shape := missing_shape(recorded.shape):
            verdict.foreign += 1
            verdict.shapes[shape] = verdict.shapes.get(shape, 0) + 1
        elif (actual := state_hash(fleet)) != recorded.hash:
            verdict.differ(*place, "state", recorded.hash.hex(), actual.hex())


class _ReplicaReplay:
    """One replica's own events and its view."""

    def __init__(
        self,
        view: View,
        events: list[tuple[int, Any]],
        verdict: Verdict,
        checks: Mapping[type, Check],
        queues: bool,
        doubts: Doubts,
    ) -> None:
        self.stream = view.stream
        self.view = view
        self.view.landed()
        self._queue = AdmissionReplay(view, verdict) if queues else None
        self.due = 0
        """Revision of the basis of its next decision."""
        self._began = view.fleet.revision
        self._events = deque(events)
        self._verdict = verdict
        self._checks = checks
        self._doubts = doubts
        self._arrivals: dict[str, v.RequestArrived] = {}
        """Own requests whose arrival the fold may not have."""

    def proceed(self, before: int) -> None:
        """Take own events up to the first decision on a state from revision `before` on."""
        events = self._events
        while events:
            position, event = events[0]
            check = self._checks.get(type(event))
            founded = False
            if check is not None:
                if event.basis.revision >= before:
                    self.due = event.basis.revision
                    return
                founded = self._founded(position, event)
                if founded and (lacking := missing(self.view, kind_of(event))):
                    self._verdict.cannot_take(lacking)
                elif founded:
                    check(self.view, self.stream, position, event, self._verdict)
            elif (follow := self._FOLLOW.get(type(event))) is not None:
                follow(self, position, event)
            if founded and type(event) is v.RouteDecided:
                self._check_mode(position, event)
            if self._queue is not None:
                self._queue.seen(position, event, founded and not missing(self.view, "admission"))
            events.popleft()
            self.view.own(position, event)
            self._doubts.own(self.view, event)
        self.due = NEVER

    def _arrived(self, position: int, event: v.RequestArrived) -> None:
        self._arrivals[event.request] = event

    def _ended(self, position: int, event: v.RequestEnded) -> None:
        self._arrivals.pop(event.request, None)

    def _cleared(self, position: int, event: v.WorkerCleared) -> None:
        """The suspicion of a worker ended, for what two probes showed."""
        verdict = self._verdict
        if event.probe == ProbeResult.NONE:
            return
        if lacking := missing(self.view, "stall"):
            verdict.cannot_take(lacking)
            return
        verdict.decisions += 1
        look = stall.ProbeEvidence(
            probe=event.probe,
            steps=event.steps,
            cpu_us=event.cpu_us,
            held=event.held,
            step_age_us=event.step_age_us,
            expected_us=event.expected_us,
            turns=event.turns,
        )
        expected = stall.evidence_of(look) if stall.recovered(look) else "suspected still"
        if event.evidence != expected:
            place = self.view.fleet.revision, self.stream, position
            verdict.differ(*place, "decision", event.evidence, expected)

    def _check_mode(self, position: int, event: v.RouteDecided) -> None:
        """How the attempt continues follows from the request and from what its client has."""
        request = self._arrivals.get(event.request) or self.view.fleet.requests.get(event.request)
        if request is None:
            return
        if lacking := missing(self.view, "mode"):
            self._verdict.cannot_take(lacking)
            return
        place = event.basis.revision, self.stream, position
        doubted = event.doubted
        if version_of(self.view, "mode") > 1:
            found = self._doubts.of(self.view, event)
            doubted = doubted if found is None else found and event.mode != AttemptMode.NEW
        if doubted != event.doubted:
            texts = f"doubted: {event.doubted}", f"doubted: {doubted}"
            self._verdict.differ(*place, "decision", *texts)
            return
        mode = mode_of(request.verdict, request.stream, event.delivered, doubted)
        if mode != event.mode:
            self._verdict.differ(*place, "decision", f"mode {event.mode}", f"mode {mode}")

    _FOLLOW: ClassVar[dict[type, Callable[[_ReplicaReplay, int, Any], None]]] = {
        v.RequestArrived: _arrived,
        v.RequestEnded: _ended,
        v.WorkerCleared: _cleared,
    }

    def _founded(self, position: int, event: Any) -> bool:
        """Whether the view is at the basis of the decision."""
        basis, view = event.basis, self.view
        if basis.revision < self._began:
            self._verdict.skipped += 1
            return False
        # The basis may name a transaction that only touched leases and is missing from a
        # log read later; what is too late for it was folded already.
        if (
            basis.position == view.position == position - 1
            and basis.revision >= view.fleet.revision
        ):
            return True
        self._verdict.decisions += 1
        self._verdict.differ(basis.revision, self.stream, position, "decision", basis, view.basis)
        return False


def _events(groups: list[RevisionGroup], stream: str) -> Iterator[tuple[int, Any]]:
    """(position, event) of one stream, as far as it can be read."""
    for group in groups:
        for segment in group.segments:
            if segment.stream == stream:
                try:
                    yield from enumerate(codec.decode_all(segment.records), segment.first)
                except LogError:
                    return
