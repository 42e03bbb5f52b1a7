"""`make demo ARGS=--health`: engines that are wrong, that fail and that stand still are found and mended.

Three workers serve a constant load. One after another:

1. A bit of a weight flips in the memory of w1's engine. Its canaries have the right tokens and wrong
   log probabilities. It is quarantined, the requests that it served are named, its engine is
   restarted, and it comes back when its canaries are right.
2. w2 answers every request with 500. Its circuit breaker opens, and closes when the fault is over.
3. The engine of w0 is stopped while it has nothing to do. Its agent finds it, stores its stacks and
   restarts it.
4. Clients send invalid requests, and other processes burn CPU: nothing is held against a worker.

Every answer is compared with that of an undisturbed run. At the end all decisions of the log are
taken again. The last line is one JSON object; exit 1 if anything failed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import Struct, UnsetType, structs
from rich.console import Console
from rich.table import Table

from relume.chaos.bench.failover.detection import Log
from relume.chaos.bench.failover.false_verdicts import BURN, verdict_of
from relume.chaos.live.failpoint_server import FailpointServer
from relume.chaos.live.faults import flipped_weights
from relume.chaos.traffic import Stream, complete, prompts
from relume.controlplane.local.local_fleet import FleetFailed, FleetOptions, LocalFleet
from relume.controlplane.replay.divergence import Verdict
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.failpoints.failpoint_client import ENVIRONMENT
from relume.events.failpoints.points import Action, Failpoint
from relume.events.vocabulary.enums import EnginePhase, HealthState, TransportKind

CLIENTS = 16
TOKENS = 64
PAUSE_S = (0.0, 0.1)
"""Of a client, between two requests."""
CANARY_S = 5.0
"""Time between two canaries; by default it is 30 s, too long for a demo."""
BUDGET_PPM = 20_000
HANG_RESTART_S = 5.0
"""Time that a hung engine has to return; by default it is 30 s."""
STEP_S = 60.0
"""Maximum time of each step of the demo."""
CALM_S = 20.0
BEFORE_S = 3.0
FLIPPED = (29, 18)
"""Element and bit of it. With this one the tiny model's canaries keep their tokens."""
console = Console(highlight=False)


class Result(Struct, kw_only=True):
    """The result, which the last line has. Times are seconds from the fault. Of the `streams`,
    `identical` ones have the tokens of the undisturbed run, `corrupt_answers` ended with an error
    that says that a worker was corrupt, `unnamed` have wrong tokens that no incident names, `broken`
    are the rest."""

    streams: int = 0
    identical: int = 0
    corrupt_answers: int = 0
    unnamed: int = 0
    broken: int = 0
    canary_ids_equal: bool = False
    canary_logprobs_differ: bool = False
    quarantined_after_s: float = -1.0
    requests_named: int = 0
    streams_moved: int = 0
    w1_back_after_s: float = -1.0
    breaker_after_failures: int = 0
    w2_back_after_s: float = -1.0
    stop_found_after_s: float = -1.0
    stacks_stored: bool = False
    w0_back_after_s: float = -1.0
    refused: int = 0
    verdicts_when_calm: int = -1
    incidents: int = 0
    health_decisions: int = 0
    replayed_decisions: int = 0
    divergences: int = 0


class Fleet(LocalFleet):
    """Its agents send canaries more often, and restart hung engines sooner."""

    def agent_flags(self, index: int) -> list[str]:
        canaries = ["--canary-interval-s", str(CANARY_S), "--canary-budget-ppm", str(BUDGET_PPM)]
        return [*canaries, "--hang-restart-s", str(HANG_RESTART_S)]


class Load:
    """Clients that ask and pause in turn while it is entered. Leaving it lets their streams end."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ending = False
        self._tasks: list[asyncio.Task[None]] = []
        self._random = random.Random("health demo")
        self._runs = 0
        self.streams: list[Stream] = []

    async def calm(self) -> dict[str, list[int]]:
        """The tokens of each prompt, asked once."""
        async with aiohttp.ClientSession() as session:
            found = {}
            for number, text in enumerate(prompts(CLIENTS)):
                stream = Stream(request=f"calm-{number}", prompt=text)
                await complete(session, self._url, stream, TOKENS, ignore_eos=True)
                if not stream.whole:
                    raise FleetFailed(f"an undisturbed stream broke: {stream.error}")
                found[text] = stream.tokens
        return found

    async def __aenter__(self) -> Load:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._ending, self._runs = False, self._runs + 1
        texts = enumerate(prompts(CLIENTS))
        self._tasks = [asyncio.create_task(self._ask(n, text)) for n, text in texts]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ending = True
        try:
            async with asyncio.timeout(STEP_S):
                await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await self._session.close()

    async def _ask(self, number: int, text: str) -> None:
        sent = 0
        while not self._ending:
            sent += 1
            stream = Stream(request=f"load-{self._runs}-{number}-{sent}", prompt=text)
            self.streams.append(stream)
            await complete(self._session, self._url, stream, TOKENS, ignore_eos=True)
            await asyncio.sleep(self._random.uniform(*PAUSE_S))


class HealthDemo:
    """The steps of the demo on one fleet."""

    def __init__(self, fleet: LocalFleet, log: Log, failpoints: FailpointServer) -> None:
        self._fleet = fleet
        self._log = log
        self._failpoints = failpoints
        self.load = Load(fleet.gateways[0])
        self.result = Result()

    async def corrupt(self) -> None:
        """A bit flips in w1."""
        await self._until("w1 has right answers to canaries", lambda: self._answers("w1"))
        worker = self._log.fleet.workers["w1"]
        name, incarnation, known = worker.name, worker.incarnation, len(self._log.happened)
        copies = await asyncio.to_thread(
            flipped_weights.flip, worker.engine_pid, self._fleet.options.model, *FLIPPED
        )
        began = time.monotonic()
        self._say(f"a bit of a weight flips in the memory of w1's engine ({copies} copies)")
        at = await self._first(began, _decided(name, incarnation, HealthState.QUARANTINED))
        self.result.quarantined_after_s = round(at - began, 2)
        self._show_canary(name, known)
        self._say(f"w1 is quarantined after {at - began:.1f} s; its engine is restarted")
        at = await self._first(at, _decided(name, incarnation + 1, HealthState.HEALTHY))
        self.result.w1_back_after_s = round(at - began, 2)
        self._say(f"w1 is back after {at - began:.1f} s: the canaries of its new engine are right")

    def _answers(self, name: str) -> bool:
        """Whether all workers of its class agree on all canaries."""
        records = [worker.canary for worker in self._log.fleet.workers.values()]
        return all(getattr(record, "good", 0) >= 4 for record in records) and bool(records)

    def _show_canary(self, name: str, known: int) -> None:
        """The wrong answer beside the golden values."""
        fleet, result = self._log.fleet, self.result
        for _, event in self._log.happened[known:]:
            if type(event) is not v.CanaryReported or event.worker != name:
                continue
            known_values = {} if isinstance(fleet.canaries, UnsetType) else fleet.canaries
            classes = [c for c in known_values.values() if event.canary in c.values]
            for golden in (c.values[event.canary] for c in classes):
                pairs = zip(event.logprobs, golden.low, golden.high, strict=False)
                wrong = [(x, low) for x, low, high in pairs if not low <= x <= high]
                if not wrong:
                    continue
                result.canary_ids_equal = event.tokens == golden.tokens
                result.canary_logprobs_differ = True
                ids = "equal" if result.canary_ids_equal else "not equal"
                self._say(
                    f"canary {event.canary} of w1: its {len(event.tokens)} tokens are {ids}, "
                    f"{len(wrong)} of {len(event.logprobs)} log probabilities differ, "
                    f"such as {wrong[0][0]:.6f} instead of {wrong[0][1]:.6f}"
                )
                return

    async def fail(self) -> None:
        """w2 answers with 500."""
        known, began = len(self._log.happened), time.monotonic()
        self._say("w2 answers every request with 500")
        async with self._failpoints.armed(
            Failpoint.ENGINE_REQUEST, Action.FAIL, process="engine w2", times=0
        ):
            at = await self._first(began, _decided("w2", 0, HealthState.UNHEALTHY))
        failed = [
            event
            for when, event in self._log.happened[known:]
            if type(event) is v.TransportObserved
            and (event.worker, event.kind) == ("w2", TransportKind.ENGINE_ERROR)
            and when <= at
        ]
        self.result.breaker_after_failures = len(failed)
        self._say(f"its circuit breaker is open after {len(failed)} requests; the fault ends")
        at = await self._first(at, _decided("w2", 0, HealthState.HEALTHY))
        self.result.w2_back_after_s = round(at - began, 2)
        self._say(f"w2 is back after {at - began:.1f} s, by probes")

    async def stop(self) -> None:
        """The idle w0 is stopped."""
        fleet = self._log.fleet
        await self._until("no request is left", lambda: not fleet.requests)
        worker = fleet.workers["w0"]
        incarnation, pid, began = worker.incarnation, worker.engine_pid, time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        self._say("the engine of w0 is stopped (SIGSTOP) while it has nothing to do")
        at = await self._first(began, _is_of(v.EngineHung, "w0", incarnation))
        hung = next(e for t, e in self._log.happened if t == at and type(e) is v.EngineHung)
        self.result.stop_found_after_s = round(at - began, 2)
        self.result.stacks_stored = bool(hung.stacks) and Path(hung.stacks).is_file()
        stored = "are stored" if self.result.stacks_stored else "could not be had"
        self._say(f"its agent found it after {at - began:.1f} s; stacks of its threads {stored}")
        await self._first(at, _is_of(v.CanaryReported, "w0", incarnation + 1))
        await self._until("w0 is healthy", lambda: self._is_well("w0", incarnation + 1))
        took = time.monotonic() - began
        self.result.w0_back_after_s = round(took, 2)
        self._say(f"w0 is back after {took:.1f} s, with right answers to canaries")

    async def calm(self) -> None:
        """Nothing is wrong with any worker."""
        known, until = len(self._log.happened), time.monotonic() + CALM_S
        self._say(f"for {CALM_S:.0f} s clients send invalid requests, and two processes burn CPU")
        burners = [
            await asyncio.create_subprocess_exec(sys.executable, "-c", BURN) for _ in range(2)
        ]
        try:
            self.result.refused = await self._refused(until)
        finally:
            for burner in burners:
                burner.kill()
                await burner.wait()
        found = [e for _, e in self._log.happened[known:] if verdict_of(e)]
        self.result.verdicts_when_calm = len(found)
        self._say(f"{self.result.refused} requests refused, {len(found)} verdicts against workers")
        for event in found:
            console.print(f"  {event}")

    async def _refused(self, until: float) -> int:
        body = {"model": "tiny", "prompt": "too much", "max_tokens": 1_000_000}
        refused = 0
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < until:
                url = f"{self._fleet.gateways[0]}/v1/completions"
                async with session.post(url, json=body) as answer:
                    refused += 400 <= answer.status < 500
                await asyncio.sleep(0.05)
        return refused

    async def end(self, right: dict[str, list[int]], verdict: Verdict) -> None:
        """Count, and show the incidents."""
        result, happened = self.result, [event for _, event in self._log.happened]
        names = await self._incidents()
        ids = {e.client_id: e.request for e in happened if type(e) is v.RequestArrived}
        for stream in self.load.streams:
            result.streams += 1
            if stream.whole and stream.tokens == right[stream.prompt]:
                result.identical += 1
            elif "corrupt_answer" in stream.error:
                result.corrupt_answers += 1
            elif stream.whole:
                result.unnamed += ids.get(stream.request, "") not in names
            else:
                result.broken += 1
                console.print(f"broken: {stream.request}: {stream.status} {stream.error}")
        result.requests_named = len(names)
        result.streams_moved = sum(
            type(e) is v.TransportObserved and e.kind == TransportKind.CORRUPT for e in happened
        )
        result.health_decisions = sum(type(e) is v.HealthDecided for e in happened)
        result.replayed_decisions = verdict.decisions + verdict.answers
        result.divergences = len(verdict.divergences) + sum(verdict.untaken.values())
        for found in verdict.divergences[:5]:
            console.print(f"divergence: {found}")
        _table(result)

    async def _incidents(self) -> set[str]:
        """Shows them; returns the requests that they name as served by a corrupt worker."""
        incidents = (await self._fleet.admin("incidents"))["incidents"]
        self.result.incidents = len(incidents)
        console.print("\nrelume incidents:")
        names: set[str] = set()
        for one in reversed(incidents):
            console.print(f"  {one['id']}  {one['summary']}")
            whole = await self._fleet.admin(f"incidents/{one['id']}")
            names |= {request["request"] for request in whole["served_requests"]}
        return names

    def _is_well(self, name: str, incarnation: int) -> bool:
        worker = self._log.fleet.workers[name]
        state = getattr(worker.health, "state", HealthState.HEALTHY)
        good = getattr(worker.canary, "good", 0) > 0
        ready = worker.engine == EnginePhase.READY and worker.incarnation == incarnation
        return ready and good and state == HealthState.HEALTHY

    async def _first(self, since: float, seen: Callable[[Any], bool]) -> float:
        try:
            async with asyncio.timeout(STEP_S):
                return await self._log.first(since, seen)
        except TimeoutError:
            raise FleetFailed(f"not seen within {STEP_S:.0f} s: {seen.__doc__}") from None

    async def _until(self, what: str, seen: Callable[[], bool]) -> None:
        latest = time.monotonic() + STEP_S
        while not seen():
            if time.monotonic() > latest:
                raise FleetFailed(f"not within {STEP_S:.0f} s: {what}")
            await asyncio.sleep(0.02)

    def _say(self, text: str) -> None:
        self._fleet.say(text)


def _decided(worker: str, incarnation: int, state: HealthState) -> Callable[[Any], bool]:
    def seen(event: Any) -> bool:
        return (
            type(event) is v.HealthDecided
            and (event.worker, event.state) == (worker, state)
            and incarnation in (0, event.incarnation)
        )

    seen.__doc__ = f"{worker} is {state}"
    return seen


def _is_of(kind: type[Any], worker: str, incarnation: int) -> Callable[[Any], bool]:
    def seen(event: Any) -> bool:
        return isinstance(event, kind) and (event.worker, event.incarnation) == (
            worker,
            incarnation,
        )

    seen.__doc__ = f"{kind.__name__} of {worker}"
    return seen


async def demo(options: FleetOptions) -> Result:
    """The whole demo. Raises FleetFailed."""
    socket = Path(options.state_dir).absolute() / "run" / "failpoints.sock"
    socket.parent.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        failpoints = await stack.enter_async_context(FailpointServer(socket))
        os.environ[ENVIRONMENT] = str(failpoints.path)
        # Otherwise a suspect gets too few requests, at its price, for its breaker to open.
        options = structs.replace(options, workers=3, replica_args=("--policy", "round_robin"))
        fleet = await stack.enter_async_context(Fleet(options, console.print))
        config = EtcdConfig(endpoints=(fleet.etcd_endpoint,))
        etcd = await stack.enter_async_context(EtcdLog(config))
        log = Log(etcd.reader())
        following = asyncio.create_task(log.run())
        stack.callback(following.cancel)
        steps = HealthDemo(fleet, log, failpoints)
        fleet.say(f"while this runs, watch it in a browser: {fleet.page}")
        fleet.say("undisturbed run, for comparison")
        right = await steps.load.calm()
        async with steps.load:
            await asyncio.sleep(BEFORE_S)
            await steps.corrupt()
            await steps.fail()
        await steps.stop()
        async with steps.load:
            await steps.calm()
        await steps.end(right, verify(await etcd.reader().read()))
    return steps.result


def passed(result: Result) -> bool:
    """Whether the demo met all its conditions."""
    return (
        result.streams > 0
        and result.identical > 0
        and result.broken == 0
        and result.unnamed == 0
        and result.canary_ids_equal
        and result.canary_logprobs_differ
        and result.requests_named > 0
        and result.streams_moved > 0
        and min(result.w0_back_after_s, result.w1_back_after_s, result.w2_back_after_s) > 0
        and 0 < result.breaker_after_failures <= 5
        and result.stacks_stored
        and result.refused > 0
        and result.verdicts_when_calm == 0
        and result.incidents >= 3
        and result.health_decisions > 0
        and result.replayed_decisions > 0
        and result.divergences == 0
    )


def _table(result: Result) -> None:
    table = Table(title="Engines that were wrong, failed and stood still", show_header=False)
    rows = [
        ("streams", str(result.streams)),
        ("identical to the undisturbed run", str(result.identical)),
        ("ended with an error that names the corruption", str(result.corrupt_answers)),
        ("wrong tokens that no incident names", str(result.unnamed)),
        ("broken", str(result.broken)),
        ("w1, one bit flipped: quarantined after", f"{result.quarantined_after_s} s"),
        ("requests named that it had served", str(result.requests_named)),
        ("streams that left it", str(result.streams_moved)),
        ("w1 was back after", f"{result.w1_back_after_s} s"),
        ("w2, answers of 500: breaker open after", f"{result.breaker_after_failures} requests"),
        ("w2 was back after", f"{result.w2_back_after_s} s"),
        ("w0, stopped while idle: found after", f"{result.stop_found_after_s} s"),
        ("w0 was back after", f"{result.w0_back_after_s} s"),
        ("verdicts when nothing was wrong", str(result.verdicts_when_calm)),
        ("incidents", str(result.incidents)),
        ("decisions about health", str(result.health_decisions)),
        ("recorded decisions repeated in replay", str(result.replayed_decisions)),
        ("divergences", str(result.divergences)),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
