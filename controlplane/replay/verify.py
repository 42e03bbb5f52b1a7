"""Verification of a log: each recorded decision is taken again and compared (I7).

Theory of operation. The log is folded once, group by group. Each control plane replica
has a view on that fold; its own events are given to the view up to its next decision,
and when the fold stands at the revision R of that decision's basis, the policy is
*called* on the recorded question and its answer compared with the recorded one. What
the leader owes (`policies.step`) is worked out again too and compared with what its
stream holds. The log is never compared with itself.

The leader records the state hash with each tick, and beside it a digest of all segments
in their order. Events that no decision depended on are covered by these: a dropped,
swapped or altered event changes both from there on. What stands behind the last of them
is counted as `unanchored`. A build that keeps other state than the one that wrote the
log compares the digest of the order alone.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from relume.controlplane.replay.verify_checkpoints import check_holders, check_migration, check_plan
from relume.controlplane.replay.verify_waiting import RoomReplay
from relume.events import codec
from relume.events import vocabulary as v
from relume.events.errors import BrokenChain, LogError
from relume.events.log import RevisionGroup
from relume.events.segment import Chain
from relume.policies import routing, shedding, stall
from relume.policies.fleet import apply_group
from relume.policies.state import SHAPE, Fleet, dump, load, state_hash
from relume.policies.step import step
from relume.policies.view import View

NEVER = 1 << 63
"""A revision after every revision."""


class Divergence(Struct, frozen=True):
    """A place where replay and record differ. `what`: decision, prediction (of a first token),
    answer (of the leader), state, order, chain, record."""

    revision: int
    stream: str
    position: int
    what: str
    expected: str
    actual: str


class Verdict(Struct):
    """The outcome.

    `contested` counts decisions that had at least two open candidates: a log without
    such decisions proves nothing about the policy. `stalls`, `holders`, `plans`, `migrations`
    are those of their kinds, `waits` what was decided about the waiting room. `answers` are the
    leader's. `skipped` decisions were taken on a state older than the snapshot replay began
    with. Of the
    `hashes`, `foreign` ones are of a state that this build does not keep: only the order
    of events was compared there. `unanchored` events stand behind the last state hash.
    """

    decisions: int = 0
    contested: int = 0
    stalls: int = 0
    holders: int = 0
    plans: int = 0
    migrations: int = 0
    answers: int = 0
    skipped: int = 0
    hashes: int = 0
    foreign: int = 0
    unanchored: int = 0
    waits: int = 0
    events: int = 0
    changes: int = 0
    segments: int = 0
    revision: int = 0
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No divergence, and something was really decided between alternatives."""
        return not self.divergences and self.contested > 0

    def differ(
        self, revision: int, stream: str, position: int, what: str, expected: Any, actual: Any
    ) -> None:
        """Note a divergence."""
        self.divergences.append(
            Divergence(revision, stream, position, what, str(expected), str(actual))
        )


def verify(
    groups: Iterable[RevisionGroup],
    base: Fleet | None = None,
    limit: int = 20,
    end: v.StateHashed | None = None,
) -> Verdict:
    """Replay `groups` (in order, whole) from `base` (a snapshot; default: the beginning).

    Stops after `limit` divergences. `end` is the state the log must end with, where
    somebody else knows it (a stored file's footer). Raises nothing for a bad log: what is
    wrong with it is among the divergences. `base` is left as it is.
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
    if all(type(segment.records) is codec.Kept for segment in group.segments):
        return group
    segments = tuple(replace(s, records=codec.Kept(s.records)) for s in group.segments)
    return RevisionGroup(group.revision, segments, group.owners)


Check = Callable[[View, str, int, Any, Verdict], None]
"""Takes a recorded decision again, on the view that stands at its basis: (view, stream,
position, event, verdict)."""


class Room(Protocol):
    """Follows the waiting room of one replica."""

    def seen(self, position: int, event: Any, founded: bool) -> None:
        """See RoomReplay.seen."""
        ...


class Replay:
    """One pass over the log. `checks` say what is done with each kind of decision, `view`
    makes a replica's view of its stream and the fold, `rooms` what follows its waiting room."""

    def __init__(
        self,
        groups: list[RevisionGroup],
        fleet: Fleet,
        checks: Mapping[type, Check] | None = None,
        view: Callable[[str, Fleet], View] = View,
        rooms: Callable[[View, Verdict], Room | None] = RoomReplay,
    ) -> None:
        self.groups = groups
        self.fleet = fleet
        self.verdict = Verdict(segments=sum(len(g.segments) for g in groups))
        self.chain = Chain()
        for stream, head in fleet.streams.items():
            self.chain.heads[stream] = (head.seq, head.hash, head.position + 1)
        names = {s.stream for g in groups for s in g.segments}
        self.replicas = {
            name: _ReplicaReplay(
                view(name, fleet),
                list(_events(groups, name)),
                self.verdict,
                checks or _CHECKS,
                rooms,
            )
            for name in sorted(names)
            if name.startswith("r.")
        }
        self.leader = _LeaderReplay(fleet, self.verdict)
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
            apply_group(self.fleet, group, None if only_workers else self.leader.seen)
        except LogError as error:
            verdict.differ(group.revision, "", 0, "record", "readable", error)
            return False
        for segment in group.segments:
            if segment.stream in self.replicas:
                self.replicas[segment.stream].view.landed()
        return True

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
        elif recorded.shape not in ("", SHAPE):
            verdict.foreign += 1
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
        rooms: Callable[[View, Verdict], Room | None],
    ) -> None:
        self.stream = view.stream
        self.view = view
        self.view.landed()
        self._room = rooms(view, verdict)
        self.due = 0
        """Revision of the state its next decision was taken on."""
        self._began = view.fleet.revision
        self._events = deque(events)
        self._verdict = verdict
        self._checks = checks

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
                if founded:
                    check(self.view, self.stream, position, event, self._verdict)
            if self._room is not None:
                self._room.seen(position, event, founded)
            events.popleft()
            self.view.own(position, event)
        self.due = NEVER

    def _founded(self, position: int, event: Any) -> bool:
        """Whether the view stands at the basis of the decision."""
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


def _check_route(
    view: View, stream: str, position: int, event: v.RouteDecided, verdict: Verdict
) -> None:
    verdict.decisions += 1
    revision = event.basis.revision
    policy = routing.RECORDED.get(event.policy)
    if policy is None:
        verdict.differ(revision, stream, position, "decision", event.policy, "unknown policy")
        return
    query = query_of(event)
    view.now_us = event.at_us
    choice = routing.decide(view, query, event.policy) if event.others else policy(view, query)
    if len([c for c in choice.candidates if not c.excluded]) > 1:
        verdict.contested += 1
    expected = event.worker, event.incarnation, event.candidates, event.others
    actual = choice.worker, choice.incarnation, choice.candidates, choice.others
    if actual != expected:
        verdict.differ(revision, stream, position, "decision", _told(expected), _told(actual))
    elif event.at_us >= 0:
        ttft_us = routing.first_token_us(view, query, event.policy, choice)
        if ttft_us != event.ttft_us:
            verdict.differ(revision, stream, position, "prediction", event.ttft_us, ttft_us)


def query_of(event: v.RouteDecided) -> routing.Query:
    """What the policy was asked."""
    return routing.Query(
        event.request,
        event.model,
        event.prompt_tokens,
        event.delivered,
        event.avoid,
        event.attempt - 1 if event.worker else event.attempt,
        event.prefix,
        session=event.session,
        tier=event.tier,
    )


def _told(choice: tuple[str, int, tuple[v.Candidate, ...], tuple[tuple[str, int], ...]]) -> str:
    worker, incarnation, candidates, others = choice
    costs = ", ".join(
        f"{c.worker}:{c.incarnation} costs {c.cost}"
        + f" ({c.prefill_tokens} tokens, {c.requests} requests)"
        + (f", {c.excluded}" if c.excluded else "")
        for c in candidates
    )
    more = "".join(f", {count} more {why or 'open'}" for why, count in others)
    return f"{worker or 'nobody'}:{incarnation} of [{costs}{more}]"


def _check_stall(
    view: View, stream: str, position: int, event: v.StallJudged, verdict: Verdict
) -> None:
    verdict.decisions += 1
    verdict.stalls += 1
    config = stall.config_of(view)
    worker = view.fleet.workers.get(event.worker)
    bound = stall.bound_us(worker, config) if worker is not None else -1
    look = stall.Look(event.probe, event.probe_steps, event.step_age_us, event.cpu_us, event.held)
    hung = stall.hung(event.silent_us, look, bound, config)
    expected = f"hung={event.hung} bound={event.bound_us}us"
    actual = f"hung={hung} bound={bound}us"
    if expected != actual:
        verdict.differ(event.basis.revision, stream, position, "decision", expected, actual)


def _counted(view: View, stream: str, position: int, event: Any, verdict: Verdict) -> None:
    """What `RoomReplay` looks at."""
    verdict.decisions += 1


_CHECKS = {
    v.RouteDecided: _check_route,
    v.StallJudged: _check_stall,
    v.HolderChosen: check_holders,
    v.RecoveryPlanned: check_plan,
    v.MigrationPlanned: check_migration,
    v.RequestHeld: _counted,
    v.RequestShed: _counted,
}

_ANSWERS = (v.RequestEnded, v.EffectsDecided, v.ConfigChanged)
"""What a leader writes because of the log alone. `WorkerLost` and `ReplicaLost` tell of
leases, whose history the log does not keep: they are facts to replay."""


class _LeaderReplay:
    """What the leader owes, against what it wrote."""

    def __init__(self, fleet: Fleet, verdict: Verdict) -> None:
        self._fleet = fleet
        self._verdict = verdict
        self._acting = False
        self._owed: deque[Any] = deque()

    def seen(self, stream: str, position: int, event: Any) -> None:
        """An event was folded. A leader answers from the fold of its election on."""
        if stream == "fleet":
            if type(event) is v.LeaderElected:
                # What its predecessor still owed when it died, this one works out anew.
                self._acting = True
                self._owed.clear()
            elif self._acting and type(event) in _ANSWERS:
                self._answered(stream, position, event)
            elif type(event) is v.DetailDecided:
                self._detailed(position, event)
        if self._acting:
            owed = step(self._fleet, event)
            if owed:
                self._owed.extend(e for e in owed if type(e) in _ANSWERS)

    def _detailed(self, position: int, event: v.DetailDecided) -> None:
        verdict = self._verdict
        verdict.decisions += 1
        detail = shedding.detail(
            event.was, event.database_bytes, event.quota_bytes, event.shed_percent
        )
        if detail != event.detail:
            place = self._fleet.revision, "fleet", position
            verdict.differ(*place, "decision", event.detail, detail)

    def _answered(self, stream: str, position: int, event: Any) -> None:
        self._verdict.answers += 1
        expected = self._owed[0] if self._owed else "nothing owed"
        if expected != event:
            self._verdict.differ(self._fleet.revision, stream, position, "answer", event, expected)
        while self._owed and self._owed.popleft() != event:
            pass


def _events(groups: list[RevisionGroup], stream: str) -> Iterator[tuple[int, Any]]:
    """(position, event) of one stream, as far as it can be read."""
    for group in groups:
        for segment in group.segments:
            if segment.stream == stream:
                try:
                    yield from enumerate(codec.decode_all(segment.records), segment.first)
                except LogError:
                    return
