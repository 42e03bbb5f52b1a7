"""The life of an engine, as a table.

Theory of operation. A worker runs one engine at a time. Each engine process is an *incarnation*;
the agent numbers them upwards and never uses a number twice. Every record about an engine names its
incarnation. The total order may bring records late, so a record may concern an incarnation that is
over. The table says for each kind of record, for each age of its incarnation (older than the one
the fold knows, the same, newer) and for each state, what follows:

- Only a start and a death may bring a newer incarnation. Whatever else names one has lost its
  start, and without it nothing is known of that engine.
- A record of an older incarnation changes nothing: that engine is over.
- A repeated start changes nothing. A death without a start counts: the process died too early to
  say that it started.
- A step never revives a dead engine. It counts from the start on, because an engine computes before
  it says that it is ready.
- A dispatch counts only if the engine is ready: a replica that sends to another one is behind, and
  its request fails.
- A worker that registers has a new agent. An engine of the agent before is taken for dead, because
  an agent ends what it finds before it starts an engine of its own.
- A lost worker keeps the state of its engine, which may live on and write again. What it holds is
  not counted any longer.

`clears`: what the engine held is gone, with its account and its prefix cache.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EnginePhase
from relume.policies.state.fleet import Worker

NONE, STARTING, READY, DEAD = STATES = tuple(EnginePhase)


class Age(Enum):
    """The incarnation of a record beside the one the fold knows."""

    OLDER = "older"
    SAME = "same"
    NEWER = "newer"
    NOT_NAMED = "not named"


OLDER, SAME, NEWER, NOT_NAMED = Age


class Step(Struct, frozen=True):
    """What follows from a record: the state afterwards, and whether what the engine held is gone."""

    state: EnginePhase
    clears: bool = False


IGNORED = None

Row = tuple[Step | None, Step | None, Step | None, Step | None]

_NONE, _STARTING, _READY, _DEAD = Step(NONE), Step(STARTING), Step(READY), Step(DEAD)
_STARTS, _DIES, _LEAVES = Step(STARTING, True), Step(DEAD, True), Step(NONE, True)
_STAYS: Row = (_NONE, _STARTING, _READY, _DEAD)
_CLEARED: Row = (_LEAVES, _STARTS, Step(READY, True), _DIES)
_NOTHING: Row = (IGNORED, IGNORED, IGNORED, IGNORED)

_ROWS: dict[tuple[type, Age], Row] = {
    # record, age of its incarnation:      none      starting   ready      dead
    (v.EngineStarted, OLDER): _NOTHING,
    (v.EngineStarted, SAME): _NOTHING,
    (v.EngineStarted, NEWER):             (_STARTS,  _STARTS,   _STARTS,   _STARTS),
    (v.EngineReady, OLDER): _NOTHING,
    (v.EngineReady, SAME):                (IGNORED,  _READY,    _READY,    IGNORED),
    (v.EngineReady, NEWER): _NOTHING,
    (v.EngineDied, OLDER): _NOTHING,
    (v.EngineDied, SAME):                 (_DIES,    _DIES,     _DIES,     IGNORED),
    (v.EngineDied, NEWER):                (_DIES,    _DIES,     _DIES,     _DIES),
    (v.EngineStep, OLDER): _NOTHING,
    (v.EngineStep, SAME):                 (IGNORED,  _STARTING, _READY,    IGNORED),
    (v.EngineStep, NEWER): _NOTHING,
    (v.PrefixBlocksChanged, OLDER): _NOTHING,
    (v.PrefixBlocksChanged, SAME):        (IGNORED,  _STARTING, _READY,    IGNORED),
    (v.PrefixBlocksChanged, NEWER): _NOTHING,
    (v.StreamsReported, OLDER): _NOTHING,
    (v.StreamsReported, SAME):            (IGNORED,  IGNORED,   _READY,    IGNORED),
    (v.StreamsReported, NEWER): _NOTHING,
    (v.RouteDecided, OLDER): _NOTHING,
    (v.RouteDecided, SAME):               (IGNORED,  IGNORED,   _READY,    IGNORED),
    (v.RouteDecided, NEWER): _NOTHING,
    (v.EngineRestartScheduled, NOT_NAMED): _STAYS,
    (v.WorkerRegistered, NOT_NAMED):      (_NONE,    _DIES,     _DIES,     _DEAD),
    (v.WorkerDeregistered, NOT_NAMED):    (_LEAVES,  _LEAVES,   _LEAVES,   _LEAVES),
    (v.WorkerLost, NOT_NAMED): _CLEARED,
}  # fmt: skip

LIFE: dict[tuple[type, Age], dict[str, Step | None]] = {
    key: dict(zip(STATES, row, strict=True)) for key, row in _ROWS.items()
}
"""The table. `None`: the record is ignored in that state."""


def age_of(worker: Worker, incarnation: int) -> Age:
    """The age of `incarnation` for the worker."""
    if incarnation == worker.incarnation:
        return SAME
    return NEWER if incarnation > worker.incarnation else OLDER


def taken_in(kind: type) -> frozenset[str]:
    """The states in which a record about the present incarnation is not ignored."""
    return frozenset(state for state, step in LIFE[kind, SAME].items() if step is not None)
