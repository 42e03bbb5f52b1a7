"""A stretch of a log as a file of its own, with nothing of clients and operators in it.

The window goes on from the fold before it, so it verifies by itself. Prompts and answers
are never in the log, but hashes of prompts' prefixes are, by which a prompt that somebody
guesses could be recognised: they are replaced by numbers. So is what names people, the same
throughout: clients' request ids and claims, tenants, principals, ids of commands; traces and
free texts of gateways and agents go. Sessions stay digests, since who takes one follows from
its digest. The segments are packed and chained anew, and the state hashes in the log are those
of the fold as it now is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from relume.controlplane.replay.debugger_fold import Timeline
from relume.controlplane.replay.history import History
from relume.controlplane.replay.store import Footer, save
from relume.events import codec, prefix
from relume.events import vocabulary as v
from relume.events.errors import LogError
from relume.events.log import RevisionGroup
from relume.events.segment import GENESIS, Segment, pack, unpack
from relume.policies.fleet import apply_group
from relume.policies.state import SHAPE, Fleet, dump, load, state_hash

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
    """Revisions `first` to `last` as they are, going on from the fold before them."""
    start, end = timeline.place(first - 1), timeline.place(last)
    base = timeline.copy(timeline.revision_at(start)) if start else None
    return History(timeline.groups[start:end], "", base)


def redacted(history: History) -> History:
    """The history without clients and operators, chained anew. What was given is left as
    it is. Raises LogError for a log that does not fold."""
    names = _Names()
    base = names.state(load(dump(history.base))) if history.base is not None else None
    groups = list(_rewritten(history.groups, base, names))
    return History(groups, f"{history.origin}, redacted", base)


def _rewritten(
    groups: list[RevisionGroup], base: Fleet | None, names: _Names
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
    """The revisions of which the window tells a state hash."""
    return {
        event.revision
        for group in groups
        for segment in group.segments
        if segment.stream == "fleet"
        for event in codec.decode_all(segment.records)
        if type(event) is v.StateHashed
    }


def _rehashed(event: Any, states: dict[int, tuple[bytes, bytes]]) -> Any:
    if type(event) is not v.StateHashed or event.revision not in states:
        return event
    state, order = states[event.revision]
    return v.StateHashed(event.revision, state, order, SHAPE)


class _Names:
    """Who is called what: the first client is client-1, and stays it."""

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
            )
        if kind in (v.EffectsDecided, v.ConfigChanged, v.EffectApplied):
            changed = replace(event, decision=self._decision(event.decision))
            return replace(changed, cause=self._cause(event.cause)) if _caused(event) else changed
        if kind is v.LeaderResigned:
            asked, _, who = event.reason.partition("asked by ")
            return event if asked else replace(event, reason=self._asked(who, event.reason))
        if kind in (v.TransportObserved, v.RequestEnded, v.EngineDied) and stream != "fleet":
            return replace(event, detail="")
        return event

    def state(self, fleet: Fleet) -> Fleet:
        """The fold before the window without people in it. Changes and returns `fleet`."""
        fleet.commands = {self.of("command", name): kept for name, kept in fleet.commands.items()}
        for command in fleet.open_commands.values():
            command.principal = self.of("principal", command.principal)
        fleet.open_commands = {
            self.of("command", name): command for name, command in fleet.open_commands.items()
        }
        for request in fleet.requests.values():
            request.client_id = self.of("client", request.client_id)
            request.tenant = self.of("tenant", request.tenant)
            request.resumable = self.of("resumable", request.resumable)
        for worker in fleet.workers.values():
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
        told = codec.encode(self._decided(decided)) if type(decided) is v.RouteDecided else b""
        return replace(change, dispatch=told)

    def _prefix(self, packed: bytes) -> bytes:
        return prefix.pack([self._mark(one) for one in prefix.unpack(packed)])

    def _mark(self, one: int) -> int:
        """Another name for the hash of a prompt's prefix."""
        return self._marks.setdefault(one, len(self._marks) + 1)

    def _decision(self, decision: str) -> str:
        """What answers a command bears its id."""
        return self.of("command", decision)

    def _cause(self, cause: str) -> str:
        principal, found, what = cause.partition(": ")
        return f"{self.of('principal', principal)}: {what}" if found else cause

    def _asked(self, who: str, reason: str) -> str:
        return f"asked by {self.of('principal', who)}" if who else reason


def _caused(event: Any) -> bool:
    return type(event) is v.EffectsDecided
