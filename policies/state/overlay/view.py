"""The view a replica decides on: the canonical fold plus its own events the fold lacks.

Theory of operation. A decision acts before it is in etcd, so the next decision must see
it already. The view shows what the fold would show if the replica's own events above
the durable position of its stream were folded on top of it. Folding them for real would
need a copy of the fleet for each decision; instead the overlay remembers, for each
worker, which attempts its own events open and close, and applies that on a query.

What it shows is a function of the basis (R, p) alone: nothing is read from the fold when
an own event comes in, only when a question is asked. So replay may bring groups and own
events in another order than life did, and gets the same answer at the same basis.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from msgspec import Struct

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EnginePhase, RequestOutcome
from relume.policies.health.health_settings import MOST_ERRORS
from relume.policies.liveness.suspicious import OVERLOADED, SUSPICIOUS, WRONG
from relume.policies.state.account import key_of
from relume.policies.state.dirty_set import DirtySet
from relume.policies.state.dirty_set import of as dirty_set_of
from relume.policies.state.fleet import Attempt, Fleet, Receipts, Worker
from relume.policies.state.fold import places_of
from relume.policies.state.overlay import receive_clock
from relume.policies.state.overlay.own_checkpoints import PLACEMENT_VERSION, OwnCheckpoints
from relume.policies.state.overlay.own_prefixes import OwnPrefixes


class _Own(Struct, gc=False, kw_only=True):
    """What pending own events say of one attempt: `placed` and `closed` are their
    positions (0: none pending); it was sent `at_us`."""

    incarnation: int = 0
    tokens: int = 0
    placed: int = 0
    closed: int = 0
    at_us: int = -1


class _Pending(Struct, gc=False):
    """An own event above the durable position, and the attempts it closes."""

    position: int
    event: Any
    closes: list[tuple[str, str]]


class View:
    """`fleet` is the canonical fold; the rest is the overlay of stream `stream`; `checkpoints`
    is its part about holders and planned moves, `expected` about blocks of prefixes."""

    def __init__(self, stream: str, fleet: Fleet) -> None:
        self.stream = stream
        self.replica = stream[2:]
        self.fleet = fleet
        self.checkpoints = OwnCheckpoints(fleet, lambda: self.setting(PLACEMENT_VERSION, ""))
        self.expected = OwnPrefixes()
        self.position = 0
        self._pending: deque[_Pending] = deque()
        self._own: dict[str, dict[str, _Own]] = {}
        self._places: dict[str, dict[tuple[str, str], int]] = {}
        """By request: where its pending dispatches go, with their positions."""
        self._ended: dict[str, tuple[int, int]] = {}
        """Requests with a pending end, with its position and number of attempts."""
        self._suspicion: dict[str, list[tuple[int, bool, int]]] = {}
        self.failed: dict[str, dict[str, tuple[int, int]]] = {}
        """By worker: requests that failed on it, by own events that the fold does not hold, with
        position and incarnation."""
        self._started: tuple[int, dict[str, str]] | None = None
        self._decided = 0
        self._salt = sum(self.replica.encode())
        self.now_us = -1
        """Time of the current query, on the replica's clock; -1: unknown."""
        self.receipts = Receipts()
        """When this replica received what, up to `position`."""
        if (known := fleet.replicas.get(self.replica)) is not None:
            known_times = known.receipts
            self.receipts = Receipts(
                list(known_times.revisions), list(known_times.times), known_times.clock_us
            )
        self.moved = DirtySet()
        """Workers whose load in the overlay may have changed."""
        self.indexes: dict[str, Any] = {}
        """A cache of `relume.policies.routing.cost_index`, by model; no part of the view's
        answers."""
        self.grounds: tuple[Any, dict[Any, Any]] = (None, {})
        """What `recovery.grounded` keeps here."""

    @property
    def basis(self) -> v.Basis:
        """The basis of a decision made now."""
        return v.Basis(self.fleet.revision, self.position)

    # --- what comes in ---------------------------------------------------------------

    def own(self, position: int, event: Any) -> None:
        """The replica itself wrote `event` at `position`; the fold may not hold it yet."""
        self.position = position
        if type(event) is v.GroupsReceived:
            receive_clock.take(self.receipts, event)
            return
        handler = _OWN.get(type(event))
        if handler is not None:
            self._pending.append(_Pending(position, event, handler(self, position, event)))

    def reach(self, position: int) -> None:
        """The stream is at `position`; events in between (`StreamResumed`, written by the log
        itself) do not concern the view."""
        self.position = max(self.position, position)

    def landed(self) -> None:
        """The fold has advanced: drop what it now holds of this stream."""
        head = self.fleet.streams.get(self.stream)
        if head is None:
            return
        self.reach(head.position)
        pending = self._pending
        while pending and pending[0].position <= head.position:
            self._forget(pending.popleft())

    def _forget(self, pending: _Pending) -> None:
        position, event = pending.position, pending.event
        kind = type(event)
        if kind is v.RouteDecided:
            self._decided -= 1
            if event.worker and event.prefix:
                self.expected.forget(event)
            self._forget_dispatch(position, event)
        elif kind is v.ReplicaStarted:
            if self._started is not None and self._started[0] == position:
                self._started = None
        elif kind is v.HolderChosen or kind is v.RequestEnded:
            self.checkpoints.forget(position, event)
            if self._ended.get(event.request, (0, 0))[0] == position:
                del self._ended[event.request]
        elif kind is v.RecoveryPlanned or kind is v.MigrationPlanned:
            self.checkpoints.forget_plan(position, event)
        else:
            self._forget_folded(event, position)
        for worker, key in pending.closes:
            own = self._own.get(worker, {}).get(key)
            if own is not None and own.closed == position:
                own.closed = 0
                self._tidy(worker, key, own)

    def _forget_dispatch(self, position: int, event: v.RouteDecided) -> None:
        place = worker, key = event.worker, key_of(event.request, event.attempt)
        own = self._own.get(worker, {}).get(key)
        if own is not None and own.placed == position:
            own.placed = 0
            self._tidy(worker, key, own)
        places = self._places.get(event.request)
        if places is not None and places.get(place) == position:
            del places[place]
            if not places:
                del self._places[event.request]

    def _forgive(self, request: str) -> None:
        """Its client was at fault, no worker."""
        for worker in [name for name, here in self.failed.items() if request in here]:
            del self.failed[worker][request]
            if not self.failed[worker]:
                del self.failed[worker]
            self.moved.note(worker)

    def _forget_folded(self, event: Any, position: int) -> None:
        """What was held against a worker."""
        known_times = self._suspicion.get(event.worker)
        if known_times and known_times[0][0] == position:
            del known_times[0]
            if not known_times:
                del self._suspicion[event.worker]
        here = self.failed.get(event.worker)
        if here and here.get(getattr(event, "request", ""), (0, 0))[0] == position:
            del here[event.request]
            if not here:
                del self.failed[event.worker]
            self.moved.note(event.worker)

    def _tidy(self, worker: str, key: str, own: _Own) -> None:
        self.moved.note(worker)
        if not own.placed and not own.closed:
            del self._own[worker][key]
            if not self._own[worker]:
                del self._own[worker]

    def _on_started(self, position: int, event: v.ReplicaStarted) -> list[tuple[str, str]]:
        self._started = (position, dict(event.settings))
        self.receipts = Receipts()
        self._suspicion.clear()
        self.failed.clear()
        self.moved.everything()
        return []

    def _on_decided(self, position: int, event: v.RouteDecided) -> list[tuple[str, str]]:
        self._decided += 1
        if event.worker:
            key = key_of(event.request, event.attempt)
            tokens = event.prompt_tokens + event.delivered - event.cached_tokens
            own = _Own(
                incarnation=event.incarnation, tokens=tokens, placed=position, at_us=event.at_us
            )
            self._own.setdefault(event.worker, {})[key] = own
            self.moved.note(event.worker)
            self._places.setdefault(event.request, {})[event.worker, key] = position
            if event.prefix:
                self.expected.decided(event)
        return []

    def _on_observed(self, position: int, event: v.TransportObserved) -> list[tuple[str, str]]:
        if event.kind in SUSPICIOUS:
            self._on_suspected(position, event)
        elif event.kind in WRONG and event.status not in OVERLOADED:
            here = self.failed.setdefault(event.worker, {})
            here.pop(event.request, None)
            here[event.request] = position, event.incarnation
            if len(here) > MOST_ERRORS:
                del here[next(iter(here))]
        return self._close(position, [(event.worker, key_of(event.request, event.attempt))])

    def _on_chosen(self, position: int, event: v.HolderChosen) -> list[tuple[str, str]]:
        self.checkpoints.chosen(position, event)
        return []

    def _on_planned(
        self, position: int, event: v.RecoveryPlanned | v.MigrationPlanned
    ) -> list[tuple[str, str]]:
        self.checkpoints.planned(position, event)
        return []

    def _on_ended(self, position: int, event: v.RequestEnded) -> list[tuple[str, str]]:
        self.checkpoints.ended(position, event.request)
        if self.failed and event.outcome == RequestOutcome.REJECTED:
            self._forgive(event.request)
        self._ended[event.request] = position, event.attempts
        # What the fold has now is for `moved` and `overlaid`; `load` looks at the fold of its basis.
        places = self._places.pop(event.request, {})
        places.update(dict.fromkeys(places_of(self.fleet, event), 0))
        return self._close(position, list(places))

    def _on_suspected(
        self, position: int, event: v.WorkerSuspected | v.TransportObserved
    ) -> list[tuple[str, str]]:
        known_times = self._suspicion.setdefault(event.worker, [])
        known_times.append((position, True, event.incarnation))
        return []

    def _on_cleared(self, position: int, event: v.WorkerCleared) -> list[tuple[str, str]]:
        known_times = self._suspicion.setdefault(event.worker, [])
        known_times.append((position, False, event.incarnation))
        return []

    def _close(self, position: int, places: list[tuple[str, str]]) -> list[tuple[str, str]]:
        for worker, key in places:
            here = self._own.setdefault(worker, {})
            own = here.get(key)
            if own is None:
                own = here[key] = _Own()
            own.closed = position
            self.moved.note(worker)
        return places

    # --- what it shows ---------------------------------------------------------------

    @property
    def turn(self) -> int:
        """Counts this replica's route decisions, from a start of its own: for ties."""
        replica = self.fleet.replicas.get(self.replica)
        return self._salt + self._decided + (replica.decisions if replica is not None else 0)

    def setting(self, name: str, default: str) -> str:
        """A setting decisions depend on: the operator's, else what the replica started
        with, else `default`."""
        changed = self.fleet.config.get(name)
        if changed is not None:
            return changed
        if self._started is not None:
            return self._started[1].get(name, default)
        replica = self.fleet.replicas.get(self.replica)
        return replica.settings.get(name, default) if replica is not None else default

    @property
    def settings_mark(self) -> tuple[int, int]:
        """While it stays as it is, so do all settings."""
        started = self._started[0] if self._started is not None else 0
        return dirty_set_of(self.fleet).whole, started

    def suspect(self, worker: str) -> int:
        """The incarnation of `worker` this replica suspects; 0 for none."""
        replica = self.fleet.replicas.get(self.replica)
        suspect = 0
        if replica is not None and self._started is None:
            suspect = replica.suspects.get(worker, 0)
        if not self._suspicion:
            return suspect
        for _, begins, incarnation in self._suspicion.get(worker, ()):
            if begins:
                suspect = max(suspect, incarnation)
            elif suspect == incarnation:
                suspect = 0
        return suspect

    def suspects(self) -> list[tuple[str, int]]:
        """(worker, incarnation) this replica suspects, in the fleet's order."""
        suspected = self.suspected()
        if not suspected:
            return []
        return [(name, suspected[name]) for name in self.fleet.workers if name in suspected]

    def suspected(self) -> dict[str, int]:
        """The same, in no order, of workers the fleet may not know too."""
        replica = self.fleet.replicas.get(self.replica)
        known_times = replica.suspects if replica is not None and self._started is None else {}
        if not known_times and not self._suspicion:
            return {}
        return {
            name: seen for name in (*known_times, *self._suspicion) if (seen := self.suspect(name))
        }

    def failed_on(self, worker: Worker) -> Collection[str]:
        """Requests that failed on the worker's engine, by own events that the fold does not
        hold."""
        here = self.failed.get(worker.name) if self.failed else None
        if not here:
            return ()
        return [name for name, (_, seen) in here.items() if seen == worker.incarnation]

    def overlaid(self) -> Collection[str]:
        """Workers whose load own events concern that the fold does not hold."""
        return self._own.keys()

    def load(self, worker: Worker) -> tuple[int, int]:
        """(uncomputed prompt tokens, requests) of `worker`, own events included."""
        prefill, requests = worker.prefill_left, len(worker.attempts)
        here = self._own.get(worker.name)
        if here:
            for key, own in here.items():
                attempt = worker.attempts.get(key)
                if own.closed:
                    if attempt is not None and not attempt.queued:
                        prefill -= attempt.left
                        requests -= 1
                elif attempt is None and _opens(worker, key, own.incarnation):
                    prefill += own.tokens
                    requests += 1
        if self._ended and worker.flights:
            for key, attempt in _unconfirmed(worker):
                if self._is_over(attempt) and not (here and key in here and here[key].closed):
                    prefill -= attempt.left
                    requests -= 1
        return prefill, requests

    def _is_over(self, attempt: Attempt) -> bool:
        """Whether a pending end closes what the fold has of it. Another replica's dispatch may be
        folded after the end came in: which attempts there are is known only at the basis."""
        if (ended := self._ended.get(attempt.request)) is None:
            return False
        return attempt.attempt <= ended[1] or attempt.request in self.fleet.requests

    def unfolded(self, worker: Worker) -> int:
        """Own dispatches to `worker` that the fold does not hold, and that are not over."""
        here = self._own.get(worker.name)
        return sum(bool(own.placed and not own.closed) for own in here.values()) if here else 0

    def sent_us(self, worker: Worker) -> int:
        """When the latest dispatch to `worker` that the view knows of was made, on the replica's
        clock, or, of another replica's, when its record arrived; -1 for none, or if that was
        dropped."""
        last = worker.sent_us if worker.sent_by == self.replica else -1
        if worker.sent_revision and worker.sent_by != self.replica:
            known, last = self.receipts.revisions, -1
            if known and worker.sent_revision >= known[0]:
                last = receive_clock.received_us(self.receipts, worker.sent_revision)
        for own in self._own.get(worker.name, {}).values():
            if own.placed and own.at_us > last:
                last = own.at_us
        return last


def _unconfirmed(worker: Worker) -> list[tuple[str, Attempt]]:
    """The attempts that the engine has not reported: usually the latest, of many."""
    found = []
    for place in reversed(worker.attempts.items()):
        if not place[1].queued:
            found.append(place)
            if len(found) == worker.flights:
                break
    return found


def _opens(worker: Worker, key: str, incarnation: int) -> bool:
    """Whether folding the dispatch would open an account entry (relume.policies.state.account)."""
    return (
        worker.incarnation == incarnation
        and worker.engine == EnginePhase.READY
        and key not in worker.finished_early
    )


_OWN: dict[type, Callable[[View, int, Any], list[tuple[str, str]]]] = {
    v.ReplicaStarted: View._on_started,
    v.RouteDecided: View._on_decided,
    v.TransportObserved: View._on_observed,
    v.WorkerSuspected: View._on_suspected,
    v.WorkerCleared: View._on_cleared,
    v.RequestEnded: View._on_ended,
    v.HolderChosen: View._on_chosen,
    v.RecoveryPlanned: View._on_planned,
    v.MigrationPlanned: View._on_planned,
}
