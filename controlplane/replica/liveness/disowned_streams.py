"""Own streams that the leader ended in the log, because it took this replica for lost.

A gateway that stood still may return, and its clients and engines may have waited for it. Its
streams continue, but the fold forgot their requests: it cannot say any more that an engine is done
with one, and without that a stream that got stuck would be taken for one that waits.

So this remembers it, by the same reports of the engines: those that the fold still had when the
replica was declared lost, and those that came later.
"""

from __future__ import annotations

from typing import Any

from relume.controlplane.replica.scheduler import Scheduler
from relume.events import vocabulary as v
from relume.policies.liveness import overdue


class DisownedStreams:
    """One for a replica; an observer of the folded log."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._finished: dict[str, set[int]] = {}
        """By request: attempts with which their engines are done."""

    def seen(self, stream: str, position: int, event: Any) -> None:
        """Called with each event folded."""
        kind = type(event)
        if kind is v.ReplicaLost:
            if event.replica == self._scheduler.view.replica:
                self._disown()
        elif not self._finished:
            return
        elif kind is v.EngineStep:
            for change in event.changes:
                if type(change) is v.EngineFinished and change.request in self._finished:
                    self._finished[change.request].add(change.attempt)
        elif kind is v.RequestEnded and stream == self._scheduler.view.stream:
            self._finished.pop(event.request, None)

    def is_finished(self, request: str, attempt: int) -> bool:
        """Whether the request is one of these, and its engine is done with the attempt."""
        return attempt in self._finished.get(request, ())

    def _disown(self) -> None:
        """The leader ends the open requests next: the fold still has them."""
        fleet, live_requests = self._scheduler.view.fleet, self._scheduler.live
        self._finished = {request: self._finished.get(request, set()) for request in live_requests}
        for request, live in live_requests.items():
            worker = fleet.workers.get(live.worker)
            if live.running and worker is not None and worker.incarnation == live.incarnation:
                if overdue.is_finished(fleet, worker, request, live.attempt):
                    self._finished[request].add(live.attempt)
