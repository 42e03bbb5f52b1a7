"""I26, deaths: each replica knows by a notice, within `BOUND_MS`, that an engine was killed.

The agent of a killed engine announces the death to every replica. The replica records that it
suspects the engine: at once, before the log says that the engine died and whether it has streams
there or not. A replica that waits for the log or for its connections is slower, and blind where the
log is away.

Nor does a replica believe a notice of a death that was none (`believed_lies`).

Exceptions: something else struck the worker or the replica shortly before, or until the bound is
over; the log was away; the engine was not known as ready, or the replica had only just started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from relume.chaos.validators.records import Log, events_of
from relume.chaos.validators.strikes import FELT_MS, THE_LOG, Strike, is_struck
from relume.controlplane.replica.death_notices import SEEN_DEAD
from relume.events import vocabulary as v

BOUND_MS = 1000
"""A notice takes a message over the network, and its record the next segment."""
KNOWN_MS = 3000
"""Time after the start of a replica or an engine in which the connection for notices may be new."""
KILLS = frozenset(("engine-kill", "primary-and-holder-kill"))
NEVER = 1 << 62
ABSURD = "notice-absurd"
"""A fault that disturbs nothing: replicas refuse such notices."""
Engine = tuple[str, int]


def late_deaths(
    log: Log, strikes: Sequence[Strike], late_ms: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """Workers whose deaths a replica noticed too late, and how. Records of a stream in `late_ms` come so
    much later."""
    kills = [strike for strike in strikes if strike.what in KILLS]
    if not kills:
        return
    known = _Known(log)
    for kill in kills:
        at_ms = kill.since_ms
        for worker in kill.targets:
            engine = known.killed(worker, at_ms)
            if engine is None or _is_disturbed(strikes, kill, worker):
                continue
            for stream, since_ms in known.started.items():
                if since_ms > at_ms - KNOWN_MS or _is_disturbed(strikes, kill, stream[2:]):
                    continue
                known_ms = known.suspected.get((stream, engine), NEVER)
                if known_ms > at_ms + BOUND_MS + late_ms.get(stream, 0):
                    took = f"after {known_ms - at_ms} ms" if known_ms < NEVER else "never"
                    yield worker, f"its engine {engine[1]} was killed; {stream} suspected it {took}"


def believed_lies(log: Log) -> Iterator[tuple[str, str]]:
    """Workers whose engine a replica suspected by a notice, although it did not die and reported steps
    more than `BOUND_MS` later."""
    suspected: dict[Engine, tuple[str, int]] = {}
    died: set[Engine] = set()
    lied: dict[Engine, str] = {}
    for at in events_of(log):
        event, kind = at.event, type(at.event)
        if kind is v.WorkerSuspected and event.reason == SEEN_DEAD:
            suspected.setdefault((event.worker, event.incarnation), (at.stream, at.at_ms))
        elif kind is v.EngineDied:
            died.add((event.worker, event.incarnation))
        elif kind is v.EngineStep and suspected:
            engine = at.stream[2:], event.incarnation
            stream, since_ms = suspected.get(engine, ("", NEVER))
            if at.at_ms > since_ms + BOUND_MS:
                lied[engine] = stream
    for engine, stream in lied.items():
        if engine not in died:
            yield (
                engine[0],
                f"its engine {engine[1]} did not die; {stream} believed a notice that it had",
            )


class _Known:
    """Times in the log: when engines were ready and died, when the present lives of replicas started,
    and when they first suspected an engine."""

    def __init__(self, log: Log) -> None:
        self.started: dict[str, int] = {}
        self.suspected: dict[tuple[str, Engine], int] = {}
        self._ready: dict[Engine, int] = {}
        self._died: dict[Engine, int] = {}
        for at in events_of(log):
            event, kind = at.event, type(at.event)
            if kind is v.EngineReady:
                self._ready[at.stream[2:], event.incarnation] = at.at_ms
            elif kind is v.EngineDied:
                self._died[event.worker, event.incarnation] = at.at_ms
            elif kind is v.ReplicaStarted:
                self.started[at.stream] = at.at_ms
            elif kind is v.WorkerSuspected:
                engine = event.worker, event.incarnation
                self.suspected.setdefault((at.stream, engine), at.at_ms)

    def killed(self, worker: str, at_ms: int) -> Engine | None:
        """The engine of that worker that served when the fault struck, and died by it."""
        for engine, since_ms in self._ready.items():
            if engine[0] == worker and since_ms <= at_ms - KNOWN_MS:
                if at_ms - BOUND_MS <= self._died.get(engine, 0) <= at_ms + FELT_MS:
                    return engine
        return None


def _is_disturbed(strikes: Sequence[Strike], kill: Strike, name: str) -> bool:
    """Whether something else struck this process, or the log, about then."""
    others = [strike for strike in strikes if strike is not kill and strike.what != ABSURD]
    since_ms, until_ms = kill.since_ms - FELT_MS, kill.since_ms + BOUND_MS
    return is_struck(others, (name, THE_LOG), since_ms, until_ms)
