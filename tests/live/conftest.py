"""Whole fleets of real processes: etcd, zygote, agents, vLLM engines, control plane.

One zygote serves the whole session (importing vLLM takes most of a start); each test
module gets a fleet of its own, and every fleet checks at its end that nothing is left.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from relume.chaos import validators
from relume.chaos.traffic import Stream, complete, prompts
from relume.chaos.validators.client_records import record_of
from relume.chaos.validators.records import ClientRecord, events_of
from relume.controlplane.local.child_processes import Child
from relume.controlplane.local.local_fleet import ENGINE_ENV, FleetOptions, LocalFleet
from relume.controlplane.replay.divergence import Verdict
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.log import codec
from relume.events.log.errors import LogUnavailable
from relume.events.log.interface import RevisionGroup
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group
from tests.processes import CpuTime, cpu_time, starved
from tests.signals import let_run, stop
from tests.suite.outcomes import inconclusive

HANG_S = 120.0
"""A wait that takes longer hangs. This bounds waits and measures nothing: on a busy machine an
engine takes many times as long to restart as beside nothing."""
EVENLY = ("--policy", "least_load")
"""Replica's arguments: a worker that seems slow on a busy machine gets as many streams as others."""
MODEL = Path(os.environ.get("RELUME_TEST_MODEL", ".relume/models/tiny")).absolute()


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("core") is None:
        item.add_marker(pytest.mark.full)


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Socket of a zygote shared by all fleets."""
    if not MODEL.exists():
        pytest.fail(f"no model at {MODEL}: run `make env`")
    folder = tmp_path_factory.mktemp("zygote")
    socket = str(folder / "z.sock")
    import sys

    child = Child.start(
        "zygote",
        [sys.executable, "-m", "relume.engine_shim.engine.hosts.zygote", "--socket", socket],
        folder / "zygote.log",
        ENGINE_ENV,
    )
    try:
        deadline = time.monotonic() + HANG_S
        while not Path(socket).exists():
            assert child.alive, child.tail(40)
            assert time.monotonic() < deadline, "zygote did not come up"
            time.sleep(0.1)
        yield socket
    finally:
        asyncio.run(child.stop())


RECOVERY_MS = 10_000


async def read_log(etcd: EtcdLog, after: int = 0) -> list[RevisionGroup]:
    """The log after revision `after`. Where a busy machine lets etcd or this process be late, a call
    can fail: it is made again."""
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            return await etcd.reader().read(after)
        except LogUnavailable:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.2)


class Scene:
    """A running fleet and what tests do with it. `records`: every request sent so far, as
    its client saw it, for the validators. `held_ms`: the longest time for which a test kept an
    engine stopped while requests recovered on it."""

    def __init__(self, fleet: LocalFleet, etcd: EtcdLog) -> None:
        self.fleet = fleet
        self.etcd = etcd
        self.records: list[ClientRecord] = []
        self.held_ms = 0
        self._began = {name: cpu_time([child.pid]) for name, child in self._replicas()}
        self._reading = asyncio.Lock()
        self._groups: list[RevisionGroup] = []
        self._events: list[tuple[str, Any]] = []
        self._fleet, self._folded = Fleet(), 0

    @property
    def url(self) -> str:
        return self.fleet.gateways[0]

    def _replicas(self) -> list[tuple[str, Child]]:
        children = self.fleet.children.items()
        return [(name, child) for name, child in children if name.startswith("r")]

    def _starved(self) -> bool:
        """Whether a replica got less than half of the processor time it was ready to use."""
        now = {name: cpu_time([child.pid]) for name, child in self._replicas()}
        return any(starved(self._began.get(name, CpuTime()), now[name]) for name in now)

    async def streams(
        self,
        count: int,
        max_tokens: int,
        tag: str,
        on_start: Callable[[dict[str, Stream]], Awaitable[None]] | None = None,
        url: str = "",
        padding: str = "",
        **extra: Any,
    ) -> dict[str, Stream]:
        """Run `count` streams at once; `on_start` acts on them while they run. `padding`
        goes behind each prompt. A tag that begins with "calm" names the undisturbed run
        that others are compared with."""
        found: dict[str, Stream] = {}
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            async with asyncio.TaskGroup() as tasks:
                for index, text in enumerate(prompts(count)):
                    stream = found[f"{tag}-{index}"] = Stream(
                        request=f"{tag}-{index}", prompt=text + padding
                    )
                    tasks.create_task(
                        complete(session, url or self.url, stream, max_tokens, **extra)
                    )
                if on_start is not None:
                    tasks.create_task(on_start(found))  # type: ignore[arg-type]
        for stream in found.values():
            self.note(stream, f"{max_tokens} {extra} {stream.prompt}", tag.startswith("calm"))
        return found

    def note(self, stream: Stream, asked: str, undisturbed: bool = False) -> None:
        """Keep what a client saw. Requests with equal `asked` must get equal answers."""
        self.records.append(record_of(stream, asked, undisturbed))

    async def ripe(self, streams: dict[str, Stream], tokens: int) -> None:
        """Wait until every stream has at least `tokens` tokens."""
        deadline = time.monotonic() + HANG_S
        while any(len(s.tokens) < tokens for s in streams.values()):
            assert time.monotonic() < deadline, [len(s.tokens) for s in streams.values()]
            await asyncio.sleep(0.005)

    async def paced(self, streams: dict[str, Stream], tokens: int, worker: str, pid: int) -> None:
        """Let engine process `pid` of `worker` run a moment at a time, so that clients keep
        pace with it on a busy machine, until each of `streams` that is on it has at least
        `tokens` tokens. The process is left stopped, for the caller to kill or continue. When all
        have a worker, every worker takes requests again (`only`)."""
        stop(pid)
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 15)
        deadline = time.monotonic() + HANG_S
        places = await self.until_routed(streams)
        held = [s for name, s in streams.items() if places[name][-1].worker == worker]
        if not held:
            inconclusive(f"no stream was routed to {worker}")
        for other in await self.fleet.workers():
            if other["state"] in ("draining", "drained"):
                await self.drain(other["name"], "undrain")
        while any(len(s.tokens) < tokens and not s.done and not s.error for s in held):
            assert time.monotonic() < deadline, [len(s.tokens) for s in held]
            await asyncio.to_thread(let_run, pid)
            await _read_up(held)

    async def worker(self, name: str) -> dict[str, Any]:
        return next(w for w in await self.fleet.workers() if w["name"] == name)

    async def until_ready(self, name: str, incarnation: int = 0) -> dict[str, Any]:
        """Wait until worker `name` is ready with at least that incarnation."""
        deadline = time.monotonic() + HANG_S
        while True:
            found = [w for w in await self.fleet.workers() if w["name"] == name]
            if found and found[0]["engine"] == "ready" and found[0]["incarnation"] >= incarnation:
                return found[0]
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.05)

    async def died(self, worker: str) -> None:
        """Wait until the log has a death of an engine of `worker`."""
        deadline = time.monotonic() + HANG_S
        while not any(type(e) is v.EngineDied for e in await self.events(f"w.{worker}")):
            assert time.monotonic() < deadline, f"no engine of {worker} died"
            await asyncio.sleep(0.1)

    async def until_idle(self, name: str) -> dict[str, Any]:
        """Wait until worker `name` serves, trusted, and has nothing to do."""
        deadline = time.monotonic() + HANG_S
        while (found := await self.worker(name))["state"] != "serving" or found["requests"]:
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.1)
        return found

    async def hung(self) -> list[v.StallJudged | v.EngineHung]:
        """Where an engine was found hung, by a replica or by its agent."""
        return [
            e
            for e in await self.events()
            if type(e) is v.EngineHung or (type(e) is v.StallJudged and e.hung)
        ]

    async def until_serving(self, name: str) -> None:
        """Wait until worker `name`, found hung, is trusted again."""
        deadline = time.monotonic() + HANG_S
        while (found := await self.worker(name))["state"] != "serving":
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.1)

    async def only(self, name: str) -> None:
        """Every worker is up, and new requests go to worker `name` alone, until `paced`."""
        workers = [worker["name"] for worker in await self.fleet.workers()]
        for worker in workers:
            await self.until_ready(worker)
            await self.drain(worker, "undrain" if worker == name else "drain")

    async def drain(self, name: str, command: str = "drain") -> None:
        """Tell the fleet to give worker `name` nothing new (`undrain`: to go on)."""
        order = {"force": True} if command == "drain" else None
        answer = await self.fleet.admin(f"workers/{name}/{command}", "POST", body=order)
        assert answer.get("state") == "decided", answer

    async def log(self) -> list[RevisionGroup]:
        """The whole log as it stands. Reads what came since it was last read."""
        async with self._reading:
            last = self._groups[-1].revision if self._groups else 0
            for group in await read_log(self.etcd, last):
                self.take(group)
            return list(self._groups)

    async def fold(self) -> Fleet:
        """What the log says of the fleet by now: one state, which changes with each call."""
        for group in (await self.log())[self._folded :]:
            apply_group(self._fleet, group)
            self._folded += 1
        return self._fleet

    def take(self, group: RevisionGroup) -> None:
        """The next group of the log was read."""
        self._groups.append(group)
        for segment in group.segments:
            events = codec.decode_all(segment.records)
            self._events += [(segment.stream, event) for event in events]

    async def until_told(self, kind: type) -> None:
        """Wait until the log has an event of that kind."""
        deadline = time.monotonic() + HANG_S
        while not any(type(e) is kind for e in await self.events()):
            assert time.monotonic() < deadline, f"no {kind.__name__}"
            await asyncio.sleep(0.05)

    async def events(self, stream: str = "") -> list[Any]:
        """Every event of the log (of one stream) in order."""
        await self.log()
        return [event for name, event in self._events if name == stream or not stream]

    async def routes(self, client_ids: Iterable[str]) -> dict[str, list[v.RouteDecided]]:
        """The dispatches of the requests that came with those x-request-ids."""
        found: dict[str, list[v.RouteDecided]] = {name: [] for name in client_ids}
        names: dict[str, str] = {}
        for event in await self.events():
            if type(event) is v.RequestArrived and event.client_id in found:
                names[event.request] = event.client_id
            elif type(event) is v.RouteDecided and event.request in names:
                found[names[event.request]].append(event)
        return found

    async def until_routed(self, client_ids: Iterable[str]) -> dict[str, list[v.RouteDecided]]:
        """Wait until the log has a dispatch of each of the requests; their dispatches."""
        names, deadline = list(client_ids), time.monotonic() + HANG_S
        while not all((found := await self.routes(names)).values()):
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.01)
        return found

    async def ended(self) -> dict[str, v.RequestEnded]:
        """Terminal events by x-request-id."""
        events = await self.events()
        ids = {e.request: e.client_id for e in events if type(e) is v.RequestArrived}
        return {ids.get(e.request, ""): e for e in events if type(e) is v.RequestEnded}

    async def until_ended(self, client_ids: Iterable[str]) -> None:
        """Wait until the log has the end of each: a client has its last token before the log does."""
        names, deadline = set(client_ids), time.monotonic() + HANG_S
        while left := names - set(await self.ended()):
            assert time.monotonic() < deadline, f"no end in the log: {left}"
            await asyncio.sleep(0.02)

    async def sound(self, but: tuple[str, ...] = ()) -> Verdict:
        """Wait until the log says that all is done, and check every promise but `but` on it
        and on what the clients saw. No recovery may have taken longer than `RECOVERY_MS`, not
        counting time without any ready engine, and time for which the test held one."""
        deadline = time.monotonic() + HANG_S / 2
        while True:
            groups = await self.log()
            # An arrival and its end may still gather in a replica's writer (I1).
            left = validators.i12_drained.check(groups, self.records)
            left += validators.check_all(groups, self.records, ["I1"])
            verdict = verify(groups)
            if (not left and verdict.hashes) or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        names = [n for n in validators.CHECKS if n not in ("I10", *but)]
        found = validators.check_all(groups, self.records, names)
        if "I10" not in but:
            late = validators.i10_recovery_bound.check(
                groups,
                self.records,
                RECOVERY_MS + self.held_ms,
                unserved_ms=without_engine_ms(groups),
            )
            if late and not found and verdict.divergences == [] and self._starved():
                inconclusive(f"replicas waited for processors, and recoveries for them: {late}")
            found += late
        assert not found, "\n".join(map(str, found))
        assert verdict.divergences == []
        return verdict

    async def unharmed(self) -> list[Any]:
        """What the log holds against workers: suspicions, judgements, failed attempts,
        deaths. Empty when nothing that happened counted against any of them."""
        kinds = (v.WorkerSuspected, v.TransportObserved, v.EngineDied, v.WorkerLost)
        return [
            e
            for e in await self.events()
            if type(e) in kinds or (type(e) is v.StallJudged and e.hung)
        ]


@asynccontextmanager
async def scene_of(
    options: FleetOptions, kind: type[LocalFleet] = LocalFleet
) -> AsyncIterator[Scene]:
    """A fleet and its log, both gone afterwards."""
    async with kind(options, lambda text: print(text, flush=True)) as fleet:
        config = EtcdConfig(endpoints=(fleet.etcd_endpoint,))
        async with EtcdLog(config) as etcd:
            yield Scene(fleet, etcd)
        pids = [child.pid for child in fleet.children.values()]
        engines = [w["engine_pid"] for w in await fleet.workers() if w["engine_pid"]]
    left = [pid for pid in pids + engines if Path(f"/proc/{pid}").exists()]
    deadline = time.monotonic() + 30
    while left and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        left = [pid for pid in left if Path(f"/proc/{pid}").exists()]
    assert not left, f"processes left behind: {left}"


def small_fleet(state_dir: Path, **more: Any) -> FleetOptions:
    """Two workers, one replica, all on free ports under `state_dir`."""
    base = FleetOptions(
        workers=2,
        replicas=1,
        state_dir=str(state_dir),
        model=str(MODEL),
        port=0,
        admin_port=0,
        lease_ttl_s=4,
    )
    return msgspec.structs.replace(base, **more)


@pytest.fixture
def options(zygote: str, tmp_path: Path) -> FleetOptions:
    """A small fleet whose engines come from the session's zygote."""
    return small_fleet(tmp_path, zygote=zygote)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that a test stops is not judged hung, however long a busy machine takes for what
    the test waits for meanwhile."""
    for bound in ("FLOOR", "CAP"):
        monkeypatch.setenv(f"RELUME_STALL_{bound}_MS", str(int(HANG_S * 1000)))


def without_engine_ms(groups: Sequence[RevisionGroup]) -> int:
    """The time after the first engine was ready in which none was."""
    ready: set[tuple[str, int]] = set()
    total_ms, since_ms = 0, 0
    for at in events_of(groups, "w."):
        event = at.event
        if type(event) is v.EngineReady:
            if not ready and since_ms:
                total_ms += max(0, at.at_ms - since_ms)
            ready.add((event.worker, event.incarnation))
        elif type(event) is v.EngineDied and ready:
            ready.discard((event.worker, event.incarnation))
            since_ms = at.at_ms
    return total_ms


async def _read_up(streams: list[Stream]) -> None:
    """Wait until the clients have what a stopped engine gave: nothing new for a moment."""
    known, seen = -1, 0
    while seen > known:
        await asyncio.sleep(0.02)
        known, seen = seen, sum(len(s.tokens) for s in streams)


def same(a: dict[str, Stream], b: dict[str, Stream]) -> list[str]:
    """What differs between two runs of the same prompts; empty when identical."""
    differences = []
    for left, right in zip(a.values(), b.values(), strict=True):
        for name in ("tokens", "text", "finish", "usage"):
            if getattr(left, name) != getattr(right, name):
                differences.append(f"{right.request}: {name} differs")
    return differences


def whole(streams: dict[str, Stream]) -> list[str]:
    """What is broken; empty when every stream ended as it should."""
    return [f"{s.request}: {s.status} {s.error}" for s in streams.values() if not s.whole]
