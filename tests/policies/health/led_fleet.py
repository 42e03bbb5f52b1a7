"""A fleet whose leader decides at once: what `step` owes lands in stream `fleet` directly."""

from __future__ import annotations

from typing import Any

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import HealthState, TransportKind
from relume.policies import decision_versions
from relume.policies.health import health_settings
from relume.policies.health.health_settings import HealthConfig
from relume.policies.health.health_state import WorkerHealth
from relume.policies.leader.duties import step
from relume.policies.routing.eligibility import excluded_at
from relume.policies.state.fleet import Fleet
from relume.policies.state.overlay.view import View
from tests.policies.story import Story, arrived, decided, replica_started

OF_HEALTH = (v.HealthDecided, v.VerdictsWithheld, v.CanaryValuesDecided, v.WeightsCompared)


class LedFleet(Story):
    """Workers w0, w1, ... and replicas r0, r1, ..., led by r0. `decisions` are about health."""

    def __init__(
        self,
        workers: int = 3,
        replicas: int = 1,
        config: HealthConfig | None = None,
        version: int = decision_versions.DECISION_VERSIONS["health"],
    ) -> None:
        super().__init__()
        self.decisions: list[v.HealthDecided | v.VerdictsWithheld] = []
        self.values: list[v.CanaryValuesDecided] = []
        self.compared: list[v.WeightsCompared] = []
        self._count = 0
        settings = (
            *health_settings.settings_of(config or HealthConfig()),
            *decision_versions.settings(),
            ("version.health", str(version)),
        )
        for number in range(replicas):
            self.tell(f"r.r{number}", replica_started(f"r{number}", settings=settings))
        self.leader("r0")
        for number in range(workers):
            self.worker(f"w{number}")
        self.ticks(1)

    def tell(self, stream: str, *events: Any) -> Any:
        group = super().tell(stream, *events)
        if self.fleet.leader:
            owed = [e for event in events for e in step(self.fleet, event)]
            about_health = [e for e in owed if type(e) in (v.HealthDecided, v.VerdictsWithheld)]
            self.decisions += about_health
            self.values += [e for e in owed if type(e) is v.CanaryValuesDecided]
            self.compared += [e for e in owed if type(e) is v.WeightsCompared]
            if told := [e for e in owed if type(e) in OF_HEALTH]:
                self.tell("fleet", *told)
        return group

    def ticks(self, count: int) -> None:
        """Time passes."""
        self.healthy_ticks(count)

    def health(self, worker: str = "w0") -> WorkerHealth:
        """Of a worker about which something is known."""
        health = self.fleet.workers[worker].health
        assert isinstance(health, WorkerHealth)
        return health

    def state(self, worker: str = "w0") -> HealthState:
        """As decided."""
        health = self.fleet.workers[worker].health
        return health.state if isinstance(health, WorkerHealth) else HealthState.HEALTHY

    def excluded(self, worker: str = "w0", replica: str = "r0") -> str:
        """Why `replica` sends the worker nothing."""
        view = View(f"r.{replica}", self.fleet)
        return excluded_at(view, self.fleet.workers[worker])

    def request(self, worker: str = "w0", replica: str = "r0", name: str = "") -> str:
        """A request is dispatched to the worker; returns its name."""
        self._count += 1
        name = name or f"q{self._count}"
        incarnation = self.fleet.workers[worker].incarnation
        self.tell(
            f"r.{replica}",
            arrived(name),
            decided(name, worker=worker, incarnation=incarnation),
        )
        return name

    def fails(
        self,
        worker: str = "w0",
        kind: str = "engine_error",
        status: int = 500,
        replica: str = "r0",
        name: str = "",
    ) -> str:
        """A request fails there."""
        name = self.request(worker, replica, name)
        self.saw(name, worker, kind, status, replica)
        return name

    def saw(self, name: str, worker: str, kind: str, status: int = 0, replica: str = "r0") -> None:
        """`replica` saw the request's connection fail."""
        self.tell(
            f"r.{replica}",
            v.TransportObserved(
                request=name,
                attempt=1,
                worker=worker,
                incarnation=self.fleet.workers[worker].incarnation,
                kind=TransportKind(kind),
                delivered=0,
                status=status,
            ),
        )

    def ends(
        self, name: str, outcome: str = "completed", status: int = 200, replica: str = "r0"
    ) -> None:
        """The request ends."""
        self.tell(
            f"r.{replica}",
            v.RequestEnded(
                request=name,
                outcome=outcome,
                status=status,
                tokens=4,
                finish="stop",
                attempts=1,
                verdict="exact",
            ),
        )


def folded_again(fleet: LedFleet) -> Fleet:
    """The same log, folded once more."""
    again = Story()
    for group in fleet.groups:
        again._commit(group)
    return again.fleet
