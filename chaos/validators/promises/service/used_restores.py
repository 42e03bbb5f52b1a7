"""I26, restores: where a holder has the blocks of a lost stream, the next engine restores them.

An opportunity is a dispatch that continues a stream, if by its basis a living holder covers at least
`PART` of what must be in a cache, and moving that takes at most half of the time of computing it. The
arithmetic is plain: bytes at `LINK_BYTES_S`, against the time that this run's engines took for each
prompt token. It is used if the engine then reports a restore for that attempt. Of `LEAST`
opportunities or more in a run, half must be used: the plan may have a reason in one case, as an
engine that is free now beside one that can restore.

Exceptions: a fault struck the holder before or after, or the engine after, or the log was away; the
engine never reported the attempt, or reports of it were lost; the engine before had generated all of it,
and had its blocks dropped; the leader had ended the request, whose replica stood still, and had its blocks
dropped; weights were damaged, so that blocks may not be used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relume.chaos.validators.known_facts import Dispatch, KnownFacts
from relume.chaos.validators.records import Log, courses, events_of
from relume.chaos.validators.strikes import FELT_MS, THE_LOG, WRONG_WEIGHTS, Strike, is_struck
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import AttemptMode, RouteCause

PART = 0.5
LEAST = 4
"""With fewer, one reason that this does not see would be half of them."""
LINK_BYTES_S = 100e6
"""A tenth of the slowest link of the simulated hosts."""
LATENCY_US = 1000
"""Of one restore: to find the blocks, and to begin."""
AFTER_MS = 500
"""Time in which the engine that gets the attempt must begin the restore."""
WRITTEN_MS = 100
"""Time from a decision until its segment at most. An engine that dies meanwhile gets no attempt."""
NEVER = 1 << 62
WHOLE = ("stop", "length")
"""Finish reasons of an engine that generated all."""
KILLS = frozenset(("engine-kill", "agent-kill", "agent-spool-torn", "agent-spool-corrupt"))
"""Faults that leave the blocks which the host holds for others."""
STAYS = frozenset((RouteCause.ARRIVAL, RouteCause.MOVED, RouteCause.CORRUPT))
"""Causes of dispatches without a dead engine before them."""


def unused_restores(log: Log, strikes: Sequence[Strike]) -> Iterator[str]:
    """How many restores were missed, if they are too many."""
    if any(strike.what in WRONG_WEIGHTS for strike in strikes):
        return
    known = log.known
    open_to = [at for at in known.dispatches if _continues(at)]
    if len(open_to) < LEAST:
        return
    token_us = _token_us(log)
    sent = {
        (event.request, event.attempt): at.at_ms
        for at in events_of(log, "r.")
        if type(event := at.event) is v.RouteDecided
    }
    restored = {
        (event.request, event.attempt)
        for at in events_of(log, "w.")
        if type(event := at.event) is v.RestoreStarted
    }
    queued = {
        (change.request, change.attempt)
        for course in courses(log).values()
        for _, change in course.queued
    }
    ends = _Ends(log)
    over = {name: min(at.revision for at in c.ends) for name, c in courses(log).items() if c.ends}
    missed, count = [], 0
    for at in open_to:
        name = at.event.request, at.event.attempt
        holder = _worthwhile(known, at, token_us)
        if not holder or name not in queued or _is_disturbed(strikes, at, holder, sent[name]):
            continue
        if (name[0], name[1] - 1) in ends.whole or ends.has_lost(at):
            continue
        if over.get(name[0], NEVER) < at.revision:
            continue
        count += 1
        if name not in restored:
            missed.append(f"{name[0]}/{name[1]} from {holder}")
    if count >= LEAST and 2 * len(missed) > count:
        yield f"{len(missed)} of {count} streams were not restored: {', '.join(missed[:3])}"


class _Ends:
    """What engines reported of ends. `whole`: attempts (request, number) that an engine generated to
    the end; it had their holders drop the blocks."""

    def __init__(self, log: Log) -> None:
        self.whole: set[tuple[str, int]] = set()
        self._ended: dict[tuple[str, int], int] = {}
        self._lost: dict[str, list[int]] = {}
        for at in events_of(log, "w."):
            if type(at.event) is not v.EngineStep:
                continue
            if at.event.lost:
                self._lost.setdefault(at.stream.removeprefix("w."), []).append(at.revision)
            for change in at.event.changes:
                if type(change) is v.EngineFinished:
                    attempt = change.request, change.attempt
                    self._ended[attempt] = at.revision
                    if change.reason in WHOLE:
                        self.whole.add(attempt)

    def has_lost(self, at: Dispatch) -> bool:
        """Whether its engine lost reports while it had the attempt: its restore may be among them."""
        ended = self._ended.get((at.event.request, at.event.attempt), NEVER)
        return any(at.revision < lost <= ended for lost in self._lost.get(at.event.worker, ()))


def _continues(at: Dispatch) -> bool:
    event = at.event
    return event.mode == AttemptMode.CONTINUE and event.attempt > 1 and event.cause not in STAYS


def _token_us(log: Log) -> float:
    """Time of a prompt token in the steps of this run that had prompts alone; 0: unknown."""
    took_us = tokens = 0
    for at in events_of(log, "w."):
        event = at.event
        if type(event) is v.EngineStep and event.prefill_tokens and not event.sum_context:
            took_us += event.duration_us
            tokens += event.prefill_tokens
    return took_us / tokens if tokens else 0.0


def _worthwhile(known: KnownFacts, at: Dispatch, token_us: float) -> str:
    """A holder from which a restore takes less than half of the time of computing; empty: none."""
    event, revision = at.event, at.event.basis.revision
    needed = event.prompt_tokens + event.delivered
    for name, holder in known.holders.items():
        tokens, size = holder.has_of(event.request, revision)
        if not holder.up.at(revision) or tokens < PART * needed:
            continue
        move_us = LATENCY_US + 1e6 * size / LINK_BYTES_S
        if 2 * move_us <= tokens * token_us:
            return name
    return ""


def _is_disturbed(strikes: Sequence[Strike], at: Dispatch, holder: str, at_ms: int) -> bool:
    """Whether a fault may keep the engine from the blocks."""
    lasting = [strike for strike in strikes if strike.what not in KILLS]
    return is_struck(lasting, (holder, THE_LOG), at_ms - FELT_MS, at_ms + AFTER_MS) or is_struck(
        strikes, (at.event.worker,), at_ms - WRITTEN_MS, at_ms + AFTER_MS
    )
