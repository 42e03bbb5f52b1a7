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

from relume.controlplane.replay.answers import judged, routed, stream_judged
from relume.controlplane.replay.divergence import Verdict
from relume.controlplane.replay.verify_checkpoints import (
    Doubts,
    check_holders,
    check_migration,
    check_plan,
)
from relume.controlplane.replay.verify_waiting import AdmissionReplay
from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.log.errors import BrokenChain, LogError
from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import Chain
from relume.events.vocabulary.enums import AttemptMode, ProbeResult
from relume.policies.crosscheck.choice import CheckChoice, FinishedRequest, choose
from relume.policies.decision_versions import (
    kind_of,
    missing,
    missing_of_leader,
    missing_shape,
    version_of,
)
from relume.policies.health import evidence
from relume.policies.leader import feature_level, log_detail
from relume.policies.leader.duties import step
from relume.policies.liveness import overdue, stall
from relume.policies.recovery.lineage import CorruptEngines
from relume.policies.recovery.resume_mode import mode_of
from relume.policies.routing import choose_worker
from relume.policies.routing.route_query import RouteQuery
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


Check = Callable[[View, str, int, Any, Verdict], None]
"""Repeats a recorded decision, on the view at its basis: (view, stream,
position, event, verdict)."""


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


def check_route(
    view: View, stream: str, position: int, event: v.RouteDecided, verdict: Verdict,
    policy: str = "",
) -> None:  # fmt: skip
    """The question is the request and what failed it; the recorded policy, or `policy`, answers
    with a worker."""
    verdict.decisions += 1
    policy = policy or event.policy
    whole = choose_worker.RECORDED.get(policy)
    if whole is None:
        revision, unknown = event.basis.revision, "unknown policy"
        verdict.differ(revision, stream, position, "decision", event.policy, unknown)
        return
    query = query_of(event)
    view.now_us = event.at_us
    if event.others:
        version = version_of(view, kind_of(event)) if policy == event.policy else 0
        choice = choose_worker.decide(view, query, policy, version)
    else:
        choice = whole(view, query)
    if len([c for c in choice.candidates if not c.excluded]) > 1:
        verdict.contested += 1
    expected = event.worker, event.incarnation, event.candidates, event.others
    actual = choice.worker, choice.incarnation, choice.candidates, choice.others
    place = event, stream, position
    found = event.cached_tokens, event.refused
    if policy == event.policy and found != (choice.cached_tokens, choice.refused):
        verdict.differ(
            event.basis.revision,
            stream,
            position,
            "decision",
            "{} cached tokens, refused: {}".format(*found),
            f"{choice.cached_tokens} cached tokens, refused: {choice.refused}",
        )
    if actual != expected:
        verdict.changed("route", event.request, *place, routed(*expected), routed(*actual))
    elif event.at_us < 0:
        return
    elif lacking := missing(view, "first_token"):
        verdict.cannot_take(lacking)
    else:
        first_token_us = choose_worker.FIRST_TOKEN[version_of(view, "first_token")]
        ttft_us = first_token_us(view, query, policy, choice)
        if ttft_us != event.ttft_us:
            recorded, other = (
                (routed(*actual)[0], (f"predicted TTFT {us} us",))
                for us in (event.ttft_us, ttft_us)
            )
            verdict.changed("route", event.request, *place, recorded, other, "prediction")


def query_of(event: v.RouteDecided) -> RouteQuery:
    """The question to the policy."""
    return RouteQuery(
        request=event.request,
        model=event.model,
        prompt_tokens=event.prompt_tokens,
        delivered=event.delivered,
        avoid=event.avoid,
        lost=event.attempt - 1 if event.worker else event.attempt,
        prefix=event.prefix,
        session=event.session,
        tier=event.tier,
    )


def _check_stall(
    view: View, stream: str, position: int, event: v.StallJudged, verdict: Verdict
) -> None:
    verdict.decisions += 1
    verdict.stalls += 1
    config = stall.config_of(view)
    worker = view.fleet.workers.get(event.worker)
    bound = stall.bound_us(worker, config) if worker is not None else -1
    look = stall.ProbeEvidence(
        probe=event.probe,
        steps=event.probe_steps,
        step_age_us=event.step_age_us,
        cpu_us=event.cpu_us,
        held=event.held,
        expected_us=event.expected_us,
        wait_us=event.wait_us,
        turns=event.turns,
    )
    hung = stall.HUNG[version_of(view, "stall")](event.silent_us, look, bound, config)
    if (hung, bound) != (event.hung, event.bound_us):
        engine = f"{event.worker}:{event.incarnation}"
        recorded = judged(event.hung, event.silent_us, event.bound_us)
        other = judged(hung, event.silent_us, bound)
        verdict.changed("stall", engine, event, stream, position, recorded, other)


def _check_stream(
    view: View, stream: str, position: int, event: v.StreamJudged, verdict: Verdict
) -> None:
    verdict.decisions += 1
    seen = overdue.Silence(
        silent_us=event.silent_us, from_step=event.from_step, probe=event.probe, held=event.held
    )
    of = event.request, event.attempt
    place, config = (event.worker, event.incarnation), overdue.config_of(view)
    rule = overdue.RULES[version_of(view, "overdue")]
    found = overdue.judge(view.fleet, place, of, seen, config, rule)
    recorded = overdue.Judgement(
        steps=event.steps,
        decodes=event.decodes,
        finished=event.finished,
        bound_us=event.bound_us,
        stuck=event.stuck,
    )
    if found != recorded:
        answers = stream_judged(seen, recorded), stream_judged(seen, found)
        verdict.changed("overdue", event.request, event, stream, position, *answers)


def _check_cross_check(
    view: View, stream: str, position: int, event: v.CrossCheckDecided, verdict: Verdict
) -> None:
    verdict.decisions += 1
    finished = FinishedRequest(
        request=event.request,
        worker=event.worker,
        incarnation=event.incarnation,
        tokens=event.tokens,
        answer=event.answer,
    )
    recorded = CheckChoice(event.by, event.by_incarnation, event.cause)
    if (found := choose(view, finished)) != recorded:
        place = event.basis.revision, stream, position
        verdict.differ(*place, "decision", recorded, found)


def _counted(view: View, stream: str, position: int, event: Any, verdict: Verdict) -> None:
    """What `RoomReplay` looks at."""
    verdict.decisions += 1


CHECKS: dict[type, Check] = {
    v.RouteDecided: check_route,
    v.StallJudged: _check_stall,
    v.StreamJudged: _check_stream,
    v.CrossCheckDecided: _check_cross_check,
    v.HolderChosen: check_holders,
    v.RecoveryPlanned: check_plan,
    v.MigrationPlanned: check_migration,
    v.RequestHeld: _counted,
    v.RequestShed: _counted,
}

_ANSWERS = (
    v.RequestEnded,
    v.EffectsDecided,
    v.ConfigChanged,
    v.CheckpointsReleased,
    v.CheckpointsVoided,
    v.HealthDecided,
    v.VerdictsWithheld,
    v.CanaryValuesDecided,
    v.DegradationDecided,
    v.RolloutDecided,
    v.SparesDecided,
)
"""What a leader writes because of the log alone. `WorkerLost` and `ReplicaLost` follow from leases,
whose history is not in the log: they are facts to replay."""


_KINDS: dict[type, str] = {
    v.HealthDecided: "health",
    v.VerdictsWithheld: "health",
    v.CanaryValuesDecided: "health",
    v.DegradationDecided: "degradation",
    v.SparesDecided: "spares",
    v.RolloutDecided: "rollout",
}
"""By which version a leader decides what is not among its duties (`leader`)."""


class _LeaderReplay:
    """What the leader owes, against what it wrote."""

    def __init__(self, fleet: Fleet, verdict: Verdict) -> None:
        self._fleet = fleet
        self._verdict = verdict
        self._acting = False
        self._owed: deque[tuple[int, Any]] = deque()
        """What it has to write, and the tick before which it does."""

    def seen(self, stream: str, position: int, event: Any) -> None:
        """An event was folded. A leader answers from the fold of its election on."""
        if stream == "fleet":
            if type(event) is v.LeaderElected:
                # This one works out again what its predecessor had not finished.
                self._acting = True
                self._owed.clear()
            elif self._acting and type(event) in _ANSWERS:
                self._answered(stream, position, event)
            elif type(event) is v.DetailDecided:
                self._detailed(position, event)
            elif type(event) is v.FeatureLevelRaised:
                self._raised(position, event)
            elif type(event) is v.Tick:
                self._overdue(position, event)
        if self._acting:
            self._owes(step(self._fleet, event), type(event) is v.Tick)

    def landed(self) -> None:
        """A group of workers' records was folded without a call for each."""
        if self._acting:
            self._owes(evidence.owed(self._fleet), False)

    def _owes(self, owed: list[Any], at_tick: bool) -> None:
        if owed:
            # It ticks once it folded the tick before, and answered all up to there.
            by = self._fleet.tick + (1 if at_tick else 2)
            self._owed.extend((by, e) for e in owed if type(e) in _ANSWERS)

    def _overdue(self, position: int, event: v.Tick) -> None:
        while self._owed and self._owed[0][0] <= event.number:
            _, expected = self._owed.popleft()
            if not missing_of_leader(self._fleet, "leader"):
                place = self._fleet.revision, "fleet", position
                self._verdict.differ(*place, "answer", "not written", expected)

    def _detailed(self, position: int, event: v.DetailDecided) -> None:
        verdict = self._verdict
        if lacking := missing_of_leader(self._fleet, "detail"):
            verdict.cannot_take(lacking)
            return
        verdict.decisions += 1
        detail = log_detail.detail(
            event.was, event.database_bytes, event.quota_bytes, event.shed_percent
        )
        if detail != event.detail:
            place = self._fleet.revision, "fleet", position
            verdict.differ(*place, "decision", event.detail, detail)

    def _raised(self, position: int, event: v.FeatureLevelRaised) -> None:
        """When it is raised depends on owners too, whose history is not in the log."""
        if lacking := missing_of_leader(self._fleet, "leader"):
            self._verdict.cannot_take(lacking)
            return
        self._verdict.decisions += 1
        most = max(feature_level.read_by_all(self._fleet), event.was)
        if event.level > most:
            place = self._fleet.revision, "fleet", position
            self._verdict.differ(*place, "decision", event.level, most)

    def _answered(self, stream: str, position: int, event: Any) -> None:
        kind = _KINDS.get(type(event), "leader")
        if lacking := missing_of_leader(self._fleet, kind):
            self._verdict.cannot_take(lacking)
            self._owed.clear()
            return
        self._verdict.answers += 1
        expected = self._owed[0][1] if self._owed else "nothing owed"
        if expected != event:
            self._verdict.differ(self._fleet.revision, stream, position, "answer", event, expected)
        while self._owed and self._owed.popleft()[1] != event:
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
