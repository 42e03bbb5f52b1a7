"""Workers join, leave, drain and die without pause while requests flow: each request is answered,
and at the end nothing is left of anybody who is gone."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import Struct

from relume.chaos.scenario.language import (
    Burst,
    Fleet,
    Prefixes,
    Scenario,
    Tenant,
    Tier,
    Traffic,
    Uniform,
)
from relume.chaos.sim.sim_fleet import Settings, SimFleet, run
from relume.chaos.sim.sim_operator import Operator
from relume.chaos.sim.worker_host import Host
from relume.chaos.sim.world.worker_machine import WorkerSettings
from relume.chaos.validators import check_all
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.log.codec import decode_all
from relume.policies.checkpoints import decisions
from relume.policies.state.account import FLIGHT_TICKS, TOMBSTONE_TICKS
from relume.policies.state.lifecycles import departed_workers
from relume.policies.state.prefix_cache import index_of
from tests.policies.state.test_account_histories import nothing_left

WORKERS, OPEN = 5, 2
ACTS = ("leave", "come", "join", "join", "engine", "agent", "host", "drain", "undrain")
GUEST = "guest"
"""Names of those who come once begin so."""


def scenario(requests: int) -> Scenario:
    traffic = Traffic(
        arrivals=Burst(24, 2.0), lengths=Uniform((16, 400), (8, 120)), requests=requests,
        tiers=(Tier("interactive", 0.5), Tier("batch", 0.5)), prefixes=Prefixes(4, 128),
        tenants=(Tenant("a", 0.5), Tenant("b", 0.5)),
    )  # fmt: skip
    room = {"waiting.queued": 2, "waiting.most_ms": 120_000}
    fleet = Fleet(workers=WORKERS, domains=5, control_planes=2, checkpoint_mb=64, settings=room)
    return Scenario(name="churn", about="Workers come and go.", fleet=fleet, traffic=traffic)


class Churning(SimFleet):
    """Something happens to some worker every quarter of a second, as long as `OPEN` others could
    take requests."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.acts: Counter[str] = Counter()
        self.found: list[str] = []
        self._guests = 0

    async def prepare(self) -> None:
        self.orders = Operator(list(self.planes.values()), {})
        self.churning = asyncio.create_task(self._churn())

    async def _churn(self) -> None:
        random = self.loop.random
        while not self._answered.is_set():
            await asyncio.sleep(0.05 + 0.2 * random.random())
            act = random.choice(ACTS)
            off = [name for name, host in self.hosts.items() if host.off]
            away = [name for name in off if not name.startswith(GUEST)]
            there = [name for name in self.hosts if name not in off]
            name = random.choice((away if act == "come" else there) or ["w0"])
            if act in ("come", "join", "undrain") or self._spared(name):
                self.acts[act] += bool(getattr(self, f"_{act}")(name))
        for name, host in self.hosts.items():
            if name.startswith(GUEST):
                host.leave()
            else:
                self.orders.give("undrain", name)
                host.come()

    def _spared(self, name: str) -> bool:
        workers = next(iter(self._folds())).workers.values()
        able = [w for w in workers if w.present and w.engine == "ready" and not w.draining]
        living = [w for w in able if self._serves(w.name)]
        return len(living) - (name in [w.name for w in living]) >= OPEN

    def _serves(self, name: str) -> bool:
        host = self.hosts[name]
        return not host.off and host.engine is not None and host.engine.process.alive

    def _leave(self, name: str) -> bool:
        there = not self.hosts[name].off
        self.hosts[name].leave()
        return there

    def _come(self, name: str) -> bool:
        away = self.hosts[name].off
        self.hosts[name].come()
        return away

    def _join(self, name: str) -> bool:
        like = next(iter(self.hosts.values()))
        self._guests += 1
        new = f"{GUEST}{self._guests}x"
        host = self.hosts[new] = Host(
            loop=self.loop,
            name=new,
            domain=f"d{self._guests}",
            model=like.model,
            spec=like.spec,
            cost=like.cost,
            wires=like.wires,
            etcd=like.etcd,
            settings=like.settings,
            budget_bytes=like.budget_bytes,
            holders=like.holders,
            feed=like.feed,
        )
        host.start()
        return True

    def _engine(self, name: str) -> bool:
        if (engine := self.hosts[name].engine) is None or not engine.process.alive:
            return False
        engine.kill()
        return True

    def _agent(self, name: str) -> bool:
        if (agent := self.hosts[name].agent) is None or not agent.process.alive:
            return False
        self.hosts[name].end(agent.process)
        return True

    def _host(self, name: str) -> bool:
        """Lost, without a word; a guest does not come back."""
        host = self.hosts[name]
        host.off = host.off or name.startswith(GUEST)
        host.lose()
        return True

    def _drain(self, name: str) -> bool:
        return self.orders.give("drain", name)

    def _undrain(self, name: str) -> bool:
        return self.orders.give("undrain", name)

    async def main(self) -> None:
        await super().main()
        await asyncio.sleep(FLIGHT_TICKS + TOMBSTONE_TICKS)
        for plane in self.planes.values():
            assert plane.replica is not None
            self.found += left_of_guests(plane)
            self.found += left_at_rest(plane)


def left_at_rest(plane: Any) -> Iterator[str]:
    """What a replica still has of requests or of engines."""
    scheduler = plane.replica.scheduler
    view, room, gateway = scheduler.view, scheduler.waiting.queue, plane.gateway
    fleet = view.fleet
    for worker in fleet.workers.values():
        nothing_left(worker)
    kept = {
        "requests": fleet.requests, "placed": fleet.placed, "ending": fleet.ending,
        "planned": fleet.planned, "unheard": fleet.unacknowledged, "effects": fleet.pending_effects,
        "live": scheduler.live, "overlay": view._own, "places": view._places, "ended": view._ended,
        "pending": view._pending, "expected": bool(view.expected), "connections": gateway._connections,
        "attempts": [key for key, found in gateway._attempts.items() if found],
        "waiting": room.entries, "bytes": room.size, "shares": room._shares,
        "lines": room.models(), "callers": scheduler.waiting._held,
        "expected of caches": [c for c in index_of(fleet).counts.values() if c],
    }  # fmt: skip
    yield from (f"{plane.name}: {what} {found}" for what, found in kept.items() if found)
    live = {(w.name, w.incarnation) for w in fleet.workers.values()}
    yield from (f"{plane.name}: activity of {key}" for key in gateway.activity if key not in live)
    for index in view.indexes.values():
        if index.requests or len(index.workers) > len(fleet.workers):
            yield f"{plane.name}: index has {index.requests} requests, {len(index.workers)} workers"


SKIPPED = (
    "_endpoint",
    "streams",
    "writer",
    "_writer",
    "_open_writer",
    "_reader",
    "_groups",
    "_loop",
    "_wires",
)
"""The ends of all streams are kept with the log; what belongs to the simulator is not looked at."""
BOUNDED = (
    ".view.moved._recent",
    ".fleet.dirty.steps._recent",
    ".scheduler.checkpoints._planned",
    ".incidents._fold._book",
)
"""The last few of something: names there make way by themselves."""


def left_of_guests(plane: Any) -> list[str]:
    """Where in a replica the name of a worker is that came once and left."""
    found: list[str] = []
    seen: dict[int, Any] = {}
    if (kept := plane.replica.view.checkpoints.cached_index) is not None:
        decisions.index_of(plane.replica.view, kept.index.weights)  # as the next one asked will
    todo: deque[tuple[str, Any]] = deque(((plane.name, plane.replica), ("gateway", plane.gateway)))
    while todo:
        path, here = todo.popleft()
        if type(here) is str:
            if GUEST in here and not path.removeprefix(plane.name).startswith(BOUNDED):
                found.append(f"{path}: {here}")
        elif id(here) not in seen:
            seen[id(here)] = here
            todo.extend((f"{path}{name}", child) for name, child in parts_of(here))
    return found


def parts_of(here: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(here, dict):
        for key, value in list(here.items()):
            yield "[]", key
            yield f"[{key!r:.40}]", value
    elif isinstance(here, list | tuple | set | frozenset | deque):
        yield from (("[]", one) for one in list(here))
    elif isinstance(here, asyncio.Task):
        yield ".name", here.get_name()
    elif (of := getattr(here, "__self__", None)) is not None:
        yield ".__self__", of
    elif type(here).__module__.startswith("relume."):
        names = [*getattr(here, "__dict__", ())]
        if isinstance(here, Struct):
            names += here.__struct_fields__
        for kind in type(here).__mro__:
            slots = getattr(kind, "__slots__", ())
            names += (slots,) if isinstance(slots, str) else slots
        for name in names:
            if name not in SKIPPED and "sim.world" not in type(here).__module__:
                yield f".{name}", getattr(here, name, None)


@pytest.mark.full
def test_nothing_is_left_of_workers_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departed_workers, "FORGET_TICKS", 15)
    monkeypatch.setattr(departed_workers, "REMEMBER_TICKS", 30)
    made: list[Churning] = []

    def make(*given: Any) -> Churning:
        made.append(Churning(*given))
        return made[-1]

    settings = Settings(workers=WorkerSettings(lease_ttl_s=4, reload_s=0.6))
    outcome = run(scenario(216), 3, settings=settings, make=make)
    (fleet,) = made
    assert not outcome.error
    assert outcome.drained
    assert fleet.found == []
    records = [history.record for history in outcome.histories]
    ends = Counter(record.outcome for record in records if not record.undisturbed)
    assert ends == {"completed": 216}
    assert check_all(outcome.groups, records) == []
    replayed = verify(outcome.groups)
    assert not replayed.divergences, replayed.divergences[:3]
    assert replayed.contested > 80
    assert replayed.waits > 10
    assert all(fleet.acts[act] >= 2 for act in ACTS), fleet.acts
    told = Counter(type(event) for event in events_in(outcome.groups))
    assert told[v.WorkerForgotten] > 5
    assert told[v.WorkerLost] and told[v.WorkerDeregistered] and told[v.EngineDied]


def events_in(groups: Any) -> Iterator[Any]:
    for group in groups:
        for segment in group.segments:
            yield from decode_all(segment.records)
