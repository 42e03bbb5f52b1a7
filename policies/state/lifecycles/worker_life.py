"""The life of a worker, as a table: whether the fold knows it, and whether its host is there.

Theory of operation. A worker is *unknown* until its agent or its engine writes the first record.
It is *present* from its registration until it deregisters or its loss is declared, and *away*
otherwise. Its engine has a life of its own (`engine_life`): a worker that is away may have an
engine that still runs.

- The agent's own records (it registers, it resumes its stream) make the worker present.
- A loss is declared of one epoch, the number of an ownership of the worker's stream. If the agent
  took the stream again meanwhile, the declaration is void.
- A departed worker is removed by the leader's word, again for one epoch, and only if the worker is
  away and nothing of it is left that anybody waits for (`departed_workers`).
- Records about an engine's life make its worker known, but not present. Records about its load need
  a known worker: without the engine's start they mean nothing.
"""

from __future__ import annotations

from enum import Enum

from relume.events import vocabulary as v
from relume.policies.state.fleet import Fleet, Worker

UNKNOWN, AWAY, PRESENT = STATES = ("unknown", "away", "present")


class Concerns(Enum):
    """The worker that a record concerns."""

    IT = "its present epoch, or any"
    ANOTHER_EPOCH = "another epoch"


IT, ANOTHER_EPOCH = Concerns
IGNORED = None

Row = tuple[str | None, str | None, str | None]

_KNOWN: Row = (AWAY, AWAY, PRESENT)
_NOTHING: Row = (IGNORED, IGNORED, IGNORED)

_ROWS: dict[tuple[type, Concerns], Row] = {
    # record, and its target:           unknown   away      present
    (v.WorkerRegistered, IT):          (PRESENT,  PRESENT,  PRESENT),
    (v.StreamResumed, IT):             (PRESENT,  PRESENT,  PRESENT),
    (v.WorkerLeaving, IT):             (IGNORED,  AWAY,     PRESENT),
    (v.WorkerDeregistered, IT):        (AWAY,     AWAY,     AWAY),
    (v.WorkerLost, IT):                (IGNORED,  AWAY,     AWAY),
    (v.WorkerLost, ANOTHER_EPOCH): _NOTHING,
    (v.WorkerForgotten, IT):           (IGNORED,  UNKNOWN,  IGNORED),
    (v.WorkerForgotten, ANOTHER_EPOCH): _NOTHING,
    (v.EngineStarted, IT): _KNOWN,
    (v.EngineReady, IT): _KNOWN,
    (v.EngineDied, IT): _KNOWN,
    (v.EngineRestartScheduled, IT): _KNOWN,
    (v.EngineStep, IT):                (IGNORED,  AWAY,     PRESENT),
    (v.PrefixBlocksChanged, IT):       (IGNORED,  AWAY,     PRESENT),
    (v.StreamsReported, IT):           (IGNORED,  AWAY,     PRESENT),
    (v.RouteDecided, IT):              (IGNORED,  AWAY,     PRESENT),
}  # fmt: skip

LIFE: dict[tuple[type, Concerns], dict[str, str | None]] = {
    key: dict(zip(STATES, row, strict=True)) for key, row in _ROWS.items()
}
"""The table. `None`: the record is ignored in that state."""


def state_of(fleet: Fleet, name: str) -> str:
    """The state of worker `name`."""
    worker = fleet.workers.get(name)
    if worker is None:
        return UNKNOWN
    return PRESENT if worker.present else AWAY


def worker_of(fleet: Fleet, stream: str) -> Worker:
    """The worker whose stream this is; the fold knows it from now on."""
    name = stream[2:]
    worker = fleet.workers.get(name)
    if worker is None:
        worker = fleet.workers[name] = Worker(name=name)
    return worker


def declared_away(fleet: Fleet, event: v.WorkerLost | v.WorkerForgotten) -> Worker | None:
    """The worker that the leader's word concerns, away from now on; None if the word is to be
    ignored."""
    worker = fleet.workers.get(event.worker)
    if worker is None:
        return None
    concerns = IT if event.epoch == worker.epoch else ANOTHER_EPOCH
    if LIFE[type(event), concerns][state_of(fleet, event.worker)] is None:
        return None
    worker.present = False
    return worker
