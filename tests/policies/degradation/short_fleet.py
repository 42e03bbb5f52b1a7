"""A fleet with measured step times whose leader decides levels at once."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from relume.controlplane.replay.divergence import Divergence
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.policies import decision_versions
from relume.policies.degradation import degradation_settings, effects
from relume.policies.degradation.capacity import capacity_of
from relume.policies.degradation.degradation_settings import DegradationConfig
from relume.policies.degradation.degradation_state import ModelDemand
from relume.policies.degradation.demand import workload_of
from relume.policies.leader.duties import step
from relume.policies.state.overlay.view import View
from tests.policies.story import MODEL, Story, arrived, decided, replica_started

ON = DegradationConfig(mode="on", window_ticks=4, rise_ticks=2, fall_ticks=3, max_tokens=100)
SETTLED = 9


class ShortFleet(Story):
    """Workers with measured step times, led by r0, and clients that send `rate` requests a tick."""

    def __init__(self, workers: int = 4, config: DegradationConfig = ON, **more: Any) -> None:
        super().__init__()
        self.decisions: list[v.DegradationDecided] = []
        self.change: dict[str, Any] = {}
        self.silent = False
        self.sent = 0
        settings = (
            *degradation_settings.settings_of(config),
            *decision_versions.settings(),
        )
        for name in more.get("replicas", ("r0",)):
            self.tell(f"r.{name}", replica_started(name, settings=settings))
        self.leader("r0")
        for number in range(workers):
            self.worker(f"w{number}")
        if more.get("measured", True):
            self.measure()
        self.ticks(SETTLED)
        self.learn()

    def tell(self, stream: str, *events: Any) -> Any:
        group = super().tell(stream, *events)
        owed: list[Any] = []
        for found in (e for event in events for e in step(self.fleet, event) if self.fleet.leader):
            if type(found) is not v.DegradationDecided:
                owed.append(found)
            elif not self.silent:
                owed.append(replace(found, **self.change))
        self.decisions += [e for e in owed if type(e) is v.DegradationDecided]
        if owed:
            self.tell("fleet", *owed)
        return group

    def measure(self) -> None:
        """The engine of w0 makes enough steps for its class to be measured."""
        for number in range(1, 41):
            batch = 1 + number % 8
            made = v.EngineStep(
                incarnation=1, step=number, duration_us=9000 + 500 * batch, batch=batch,
                sum_context=100 * batch, prefill_tokens=0, waiting=0, kv_used=8,
            )  # fmt: skip
            self.tell("w.w0", made)

    def learn(self) -> None:
        """Enough requests for a mean request of 100 prompt tokens and 64 output tokens."""
        for _ in range(16):
            self.request(routed=True)

    def request(self, routed: bool = False) -> None:
        self.sent += 1
        name = f"q{self.sent}"
        self.tell("r.r0", arrived(name))
        if routed:
            self.tell("r.r0", decided(name), self.end(name))

    def end(self, name: str) -> v.RequestEnded:
        return v.RequestEnded(
            request=name, outcome="completed", status=200, tokens=64, finish="stop",
            attempts=1, verdict="exact",
        )  # fmt: skip

    def ticks(self, count: int, rate: int = 0) -> None:
        for _ in range(count):
            for _ in range(rate):
                self.request()
            self.healthy_ticks(1)

    def demand(self) -> ModelDemand:
        assert isinstance(self.fleet.demand, dict)
        return self.fleet.demand[MODEL]

    def level(self) -> int:
        return effects.level_of(View("r.r0", self.fleet), MODEL)

    def divergences(self) -> list[Divergence]:
        """Of the leader's stream: the dispatches of this log rest on nothing."""
        found = verify(self.groups, limit=1_000_000)
        assert found.answers >= len(self.decisions)
        return [d for d in found.divergences if d.stream == "fleet"]

    def lose(self, *names: str) -> None:
        for name in names:
            self.tell(f"w.{name}", v.EngineDied(name, 1, "killed"))

    def rate(self) -> int:
        """Requests a tick: nine tenths of what all workers serve together."""
        return self.usable_per_ks() * 9 // 10_000

    def usable_per_ks(self) -> int:
        """What counts as capacity of all workers together."""
        workload = workload_of(self.demand())
        assert workload is not None
        found = capacity_of(self.fleet, MODEL, workload)
        assert found is not None
        return found.requests_per_ks * ON.usable_percent // 100
