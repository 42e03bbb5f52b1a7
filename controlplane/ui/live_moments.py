"""Moments of a live replica, built on demand."""

from __future__ import annotations

import time
from itertools import islice

from relume.controlplane.admin import models as m
from relume.controlplane.admin.request_book import RequestBook, newest_requests
from relume.controlplane.replica.loop import Replica
from relume.controlplane.ui.moment import SHOWN_REQUESTS, Head, Moment, moment_of


class LiveMoments:
    """Builds the moment of `replica`; `book` has its requests."""

    def __init__(self, replica: Replica, book: RequestBook) -> None:
        self._replica = replica
        self._book = book
        self._models: list[m.DegradationInfo] = []
        self._mode = ""
        self._models_of = -1

    def moment(self) -> Moment:
        """The fleet as this replica sees it now."""
        view, fleet = self._replica.view, self._replica.fleet
        self._weigh_models()
        return moment_of(
            view,
            self._head(),
            islice(newest_requests(self._book, fleet), SHOWN_REQUESTS),
            self._replica.incidents.incidents,
            self._models,
        )

    def _head(self) -> Head:
        replica, fleet = self._replica, self._replica.fleet
        writer = replica.writer
        return Head(
            replica=replica.config.name,
            leader=fleet.leader,
            revision=fleet.revision,
            at_ms=time.time_ns() // 1_000_000,
            serving=replica.scheduler.ready(),
            log_healthy=writer.healthy,
            log_silent_ms=int((time.monotonic() - replica.last_group_at) * 1000),
            unwritten=writer.position - writer.durable,
            live_requests=len(fleet.requests),
            arrived=fleet.arrived,
            ended=fleet.ended,
            decisions=fleet.decisions,
            degradation=self._mode,
            requests_known=len(self._book.courses),
        )

    def _weigh_models(self) -> None:
        """Demand and capacity: once per tick of the log, since they take time in a large fleet."""
        fleet = self._replica.fleet
        if self._models_of == fleet.tick:
            return
        known = m.degradation_of(fleet)
        self._models, self._mode, self._models_of = known.models, known.mode, fleet.tick
