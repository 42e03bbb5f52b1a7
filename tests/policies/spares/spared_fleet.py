"""A fleet whose leader decides spares, and writes at once all that it owes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from relume.controlplane.replay.divergence import Divergence
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.policies import decision_versions
from relume.policies.leader.duties import step
from relume.policies.routing.choose_worker import Choice, decide
from relume.policies.routing.route_query import RouteQuery
from relume.policies.spares import spare_settings
from relume.policies.spares.spare_settings import SparesConfig
from relume.policies.state.overlay.view import View
from tests.policies.story import MODEL, Story, ready, replica_started, started

CONFIG = SparesConfig(share_percent=10, dwell_ticks=3)


class SparedFleet(Story):
    """Workers w0, w1 and so on, each in its own domain unless `domains` say otherwise, led by r0. The
    leader's decisions about spares get the fields in `change`; a `silent` leader writes none. While the
    leader is `slow`, what it writes is folded only by `land`."""

    def __init__(
        self,
        workers: int = 4,
        config: SparesConfig = CONFIG,
        domains: Sequence[str] = (),
        settings: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__()
        self.decisions: list[v.SparesDecided] = []
        self.change: dict[str, Any] = {}
        self.silent = False
        self.slow = False
        self._written: list[Any] = []
        recorded = (
            *spare_settings.settings_of(config), *decision_versions.settings(), *settings,
        )  # fmt: skip
        self.tell("r.r0", replica_started("r0", settings=recorded))
        self.leader("r0")
        for number in range(workers):
            name = f"w{number}"
            self.register(name, domains[number] if domains else f"host of {name}")
        self.view = View("r.r0", self.fleet)

    def register(self, name: str, domain: str, incarnation: int = 1, model: str = MODEL) -> None:
        self.tell(
            f"w.{name}",
            v.WorkerRegistered(worker=name, domain=domain, agent_pid=7),
            started(name, incarnation),
            ready(name, incarnation, model),
        )

    def tell(self, stream: str, *events: Any) -> Any:
        group = super().tell(stream, *events)
        owed: list[Any] = []
        for found in (e for event in events for e in step(self.fleet, event) if self.fleet.leader):
            if type(found) is not v.SparesDecided:
                owed.append(found)
            elif not self.silent:
                owed.append(replace(found, **self.change))
        self.decisions += [e for e in owed if type(e) is v.SparesDecided]
        if self.slow:
            self._written += owed
        elif owed:
            self.tell("fleet", *owed)
        return group

    def land(self) -> None:
        """What a slow leader wrote before is folded, an event at a time."""
        written, self._written = self._written, []
        for event in written:
            self.tell("fleet", event)

    def spares(self, model: str = MODEL) -> tuple[str, ...]:
        known = self.fleet.spares
        return known[model].workers if isinstance(known, dict) and model in known else ()

    def dies(self, name: str, incarnation: int = 1) -> None:
        self.tell(f"w.{name}", v.EngineDied(name, incarnation, "killed"))

    def returns(self, name: str, incarnation: int = 2) -> None:
        self.tell(f"w.{name}", started(name, incarnation), ready(name, incarnation))

    def choice(self, policy: str = "least_load", **query: Any) -> Choice:
        """The decision about a request of tier standard, unless `query` says otherwise."""
        self.view.landed()
        query = {"model": MODEL, "prompt_tokens": 100, "tier": "standard", **query}
        return decide(self.view, RouteQuery(**query), policy)

    def divergences(self) -> list[Divergence]:
        """Of the leader's stream: the dispatches of this log rest on nothing."""
        found = verify(self.groups, limit=1_000_000)
        assert found.answers >= len(self.decisions)
        return [d for d in found.divergences if d.stream == "fleet"]
