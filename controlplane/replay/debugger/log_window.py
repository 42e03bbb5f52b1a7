"""A window of a log as a separate file, without data of clients and operators.

The window continues from the fold before it, so it can be verified alone. Prompts and answers
are never in the log, but hashes of prompts' prefixes are, which would confirm a guessed prompt:
numbers replace them. Numbers also replace all names of people, consistently: clients' request ids
and resume tokens, tenants, principals, ids of commands. Traces and free texts of gateways and
agents are removed. Sessions stay digests, since routing depends on the digest. The segments are
packed and chained again, and the state hashes in the log are those of the fold as it now is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UnsetType

from relume.controlplane.replay.debugger.folded_log import Timeline
from relume.controlplane.replay.recorded_log import History
from relume.controlplane.replay.store import Footer, save
from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.log.entries import entries
from relume.events.log.errors import LogError
from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import GENESIS, Segment, pack, unpack
from relume.events.wire import prefix
from relume.policies.decision_versions import shape_name
from relume.policies.degradation import batch_limits
from relume.policies.health import prefix_caches
from relume.policies.health.judgement import ENDED_BY_OPERATOR
from relume.policies.leader.duties import DISPUTE, QUARANTINE
from relume.policies.state.fleet import Fleet, dump, load, state_hash
from relume.policies.state.fold import apply_group

replace = msgspec.structs.replace


def export_window(
    timeline: Timeline, path: str | Path, first: int, last: int, note: str = ""
) -> Footer:
    """Store revisions `first` to `last`, redacted, in `path`. The cursor stays.

    Raises LogError for a log that does not fold, OSError.
    """
    window = redacted(cut(timeline, first, last))
    origin = f"revisions {first} to {last} of a log, redacted"
    return save(path, window.groups, window.base, origin, note)


def cut(timeline: Timeline, first: int, last: int) -> History:
    """Revisions `first` to `last` unchanged, after the fold before them."""
    start, end = timeline.place(first - 1), timeline.place(last)
    base = timeline.copy(timeline.revision_at(start)) if start else None
    return History(groups=timeline.groups[start:end], origin="", base=base)


def redacted(history: History) -> History:
    """The history without clients and operators, chained again. The argument is unchanged. Raises
    LogError for a log that does not fold."""
    names = _Pseudonyms()
    base = names.state(load(dump(history.base))) if history.base is not None else None
    groups = list(_rewritten(history.groups, base, names))
    return History(groups=groups, origin=f"{history.origin}, redacted", base=base)


def _rewritten(
    groups: list[RevisionGroup], base: Fleet | None, names: _Pseudonyms
) -> Iterator[RevisionGroup]:
    fleet = load(dump(base)) if base is not None else Fleet()
    heads = {s: (h.seq, h.hash, h.position + 1) for s, h in fleet.streams.items()}
    states: dict[int, tuple[bytes, bytes]] = {}
    pending = sorted((r for r in _hashed(groups) if r >= fleet.revision), reverse=True)
    for group in groups:
        while pending and pending[-1] < group.revision:
            states[pending.pop()] = state_hash(fleet), fleet.order
        segments = []
        for old in group.segments:
            records = [
                codec.encode(_rehashed(names.event(old.stream, event), states))
                for event in codec.decode_all(old.records)
            ]
            segments.append(_chained(old, records, heads))
        new = RevisionGroup(group.revision, tuple(segments), group.owners)
        apply_group(fleet, new)
        yield new


def _chained(
    old: Segment, records: list[bytes], heads: dict[str, tuple[int, bytes, int]]
) -> Segment:
    seq, previous, first = heads.get(old.stream, (old.seq - 1, GENESIS, old.first))
    packed = pack(old.stream, old.epoch, seq + 1, first, previous, records, old.at_ms)
    segment = unpack(packed)
    heads[old.stream] = segment.seq, segment.hash, segment.last + 1
    return segment


def _hashed(groups: list[RevisionGroup]) -> set[int]:
    """The revisions for which the window has a state hash."""
    return {
        entry.event.revision
        for entry in entries(groups, "fleet")
        if type(entry.event) is v.StateHashed
    }


def _rehashed(event: Any, states: dict[int, tuple[bytes, bytes]]) -> Any:
    if type(event) is not v.StateHashed or event.revision not in states:
        return event
    state, order = states[event.revision]
    return v.StateHashed(event.revision, state, order, shape_name())


class _Pseudonyms:
    """Pseudonyms: the first client is client-1 throughout."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}
        self._marks: dict[int, int] = {}

    def of(self, kind: str, name: str) -> str:
        """Another name for `name`; none for none."""
        if not name:
            return ""
        known = self._known.get((kind, name))
        if known is None:
            count = self._counts[kind] = self._counts.get(kind, 0) + 1
            known = self._known[kind, name] = f"{kind}-{count}"
        return known

    def event(self, stream: str, event: Any) -> Any:
        """The event without people in it."""
        kind = type(event)
        if kind is v.RequestArrived:
            return replace(
                event,
                client_id=self.of("client", event.client_id),
                tenant=self.of("tenant", event.tenant),
                resumable=self.of("resumable", event.resumable),
                trace="",
            )
        if kind is v.RouteDecided:
            return self._decided(event)
        if kind is v.PrefixBlocksChanged:
            stored, removed = self._prefix(event.stored), self._prefix(event.removed)
            return replace(event, stored=stored, removed=removed)
        if kind is v.EngineStep:
            changes = [self._queued(c) if type(c) is v.RequestQueued else c for c in event.changes]
            return replace(event, changes=tuple(changes))
        if kind in (v.RequestHeld, v.RequestShed):
            return replace(event, tenant=self.of("tenant", event.tenant))
        if kind is v.AdminCommanded:
            return replace(
                event,
                command_id=self.of("command", event.command_id),
                principal=self.of("principal", event.principal),
                reason=self.of("reason", event.reason),
            )
        if kind in (v.EffectsDecided, v.ConfigChanged, v.EffectApplied):
            changed = replace(event, decision=self._decision(event.decision))
            return replace(changed, cause=self._cause(event.cause)) if _caused(event) else changed
        if kind is v.RolloutDecided:
            return replace(event, rollout=self.of("command", event.rollout))
        if kind is v.HealthDecided:
            return replace(event, evidence=self._evidence(event.evidence))
        if kind is v.LeaderResigned:
            before, _, who = event.reason.partition("asked by ")
            return event if before else replace(event, reason=self._reason_of(who, event.reason))
        if kind in (v.TransportObserved, v.RequestEnded, v.EngineDied) and stream != "fleet":
            return replace(event, detail="")
        return event

    def state(self, fleet: Fleet) -> Fleet:
        """The fold before the window without people in it. Changes and returns `fleet`."""
        fleet.commands = {
            self.of("command", name): earlier for name, earlier in fleet.commands.items()
        }
        for command in fleet.open_commands.values():
            command.principal = self.of("principal", command.principal)
            if not isinstance(order := command.drain, UnsetType):
                order.reason = self.of("reason", order.reason)
        fleet.open_commands = {
            self.of("command", name): command for name, command in fleet.open_commands.items()
        }
        if not isinstance(rollout := fleet.rollout, UnsetType):
            rollout.rollout = self.of("command", rollout.rollout)
            rollout.principal = self.of("principal", rollout.principal)
        for request in fleet.requests.values():
            request.client_id = self.of("client", request.client_id)
            request.tenant = self.of("tenant", request.tenant)
            request.resumable = self.of("resumable", request.resumable)
        for worker in fleet.workers.values():
            if not isinstance(health := worker.health, UnsetType):
                health.evidence = self._evidence(health.evidence)
                if not isinstance(health.released_by, UnsetType):
                    health.released_by = self.of("principal", health.released_by)
            if not isinstance(drain := worker.drain, UnsetType):
                drain.principal = self.of("principal", drain.principal)
                drain.reason = self.of("reason", drain.reason)
            cached = worker.cached
            cached.marks = dict.fromkeys(map(self._mark, cached.marks))
            cached.expected = {key: self._prefix(p) for key, p in cached.expected.items()}
        pending = {}
        for effect in fleet.pending_effects.values():
            effect.decision = self._decision(effect.decision)
            effect.cause = self._cause(effect.cause)
            pending[f"{effect.decision}#{effect.index}"] = effect
        fleet.pending_effects = pending
        return fleet

    def _decided(self, event: v.RouteDecided) -> v.RouteDecided:
        return replace(event, prefix=self._prefix(event.prefix)) if event.prefix else event

    def _queued(self, change: v.RequestQueued) -> v.RequestQueued:
        """With its copy of the dispatch, if that is one."""
        try:
            decided = codec.decode(change.dispatch)
        except LogError:
            return replace(change, dispatch=b"")
        encoded = codec.encode(self._decided(decided)) if type(decided) is v.RouteDecided else b""
        return replace(change, dispatch=encoded)

    def _prefix(self, packed: bytes) -> bytes:
        return prefix.pack([self._mark(one) for one in prefix.unpack(packed)])

    def _mark(self, one: int) -> int:
        """Another name for the hash of a prompt's prefix."""
        return self._marks.setdefault(one, len(self._marks) + 1)

    def _decision(self, decision: str) -> str:
        """What answers a command bears its id, what a rolling restart does begins with it; what the
        leader decides by itself has a name of its own."""
        if decision.startswith(
            (QUARANTINE, DISPUTE, prefix_caches.DECISION, batch_limits.DECISION)
        ):
            return decision
        if ("command", decision) in self._known:
            return self.of("command", decision)
        for begun in [name for kind, name in self._known if kind == "command"]:
            if decision.startswith(f"{begun}."):
                return self.of("command", begun) + decision[len(begun) :]
        return self.of("command", decision)

    def _evidence(self, evidence: str) -> str:
        principal, ended, rest = evidence.partition(ENDED_BY_OPERATOR)
        return f"{self.of('principal', principal)}{ended}" if ended and not rest else evidence

    def _cause(self, cause: str) -> str:
        principal, found, what = cause.partition(": ")
        return f"{self.of('principal', principal)}: {what}" if found else cause

    def _reason_of(self, who: str, reason: str) -> str:
        return f"asked by {self.of('principal', who)}" if who else reason


def _caused(event: Any) -> bool:
    return type(event) is v.EffectsDecided
