"""How wrong a view of one engine is that hears of it every so often.

The engine is a rule: chunked prefill and decoding in steps that cost what they hold, requests
that arrive at random. What it reports waits for its writer's linger; the fold, the receive times
and the forecast are the control plane's own. Asked at random times: prompt tokens not computed
yet and the sum of decoding contexts, against the engine's truth, as told last and as forecast.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import deque
from typing import Any

from msgspec import Struct

from relume.events import vocabulary as v
from relume.events.codec import encode
from relume.events.log import RevisionGroup
from relume.events.segment import GENESIS, pack, unpack
from relume.policies.fleet import apply_group
from relume.policies.predict import forecast
from relume.policies.state import Fleet
from relume.policies.view import View

BASE_US, PROMPT_US, REQUEST_US = 24_000, 90, 150
"""Of a step, of a prompt token in it, of a decoding request: some 30 steps a second."""
BUDGET = 2048
ARRIVALS_PER_S, PROMPT_TOKENS, OUTPUT_TOKENS = 2.0, 1100.0, 200.0
HOP_US = 2_000
"""From the end of a transaction to the replica."""
WARM_US = 20_000_000


class Running(Struct):
    """A request in the engine."""

    name: str
    prompt: int
    left: int
    to_come: int
    context: int = 0


class Truth(Struct):
    """The engine between two moments at which its load changed."""

    at_us: int
    prefill: int
    context: int


class Engine:
    """`events`: (when, what) it reports; `dispatches`: (when, name, prompt) a replica sent it, a
    moment before; `truths` in order of time."""

    def __init__(self, seed: int, seconds: float) -> None:
        self.events: list[tuple[int, Any]] = []
        self.truths: list[Truth] = []
        self.dispatches: list[tuple[int, str, int]] = []
        self._requests: deque[Running] = deque()
        self._rng = random.Random(seed)
        self._number = 0
        self._arrival = self._later(0)
        until, now, steps = int(seconds * 1e6), 0, 0
        while now < until:
            if not self._requests:
                now = self._arrival
            self._arrivals(now)
            steps += 1
            now = self._step(now, steps)
            self._note(now)

    def _arrivals(self, until: int) -> None:
        """All that arrive by then."""
        while self._arrival <= until:
            self._arrive(self._arrival)
            self._arrival = self._later(self._arrival)

    def _later(self, now: int) -> int:
        return now + int(self._rng.expovariate(ARRIVALS_PER_S) * 1e6)

    def _arrive(self, now: int) -> None:
        self._number += 1
        prompt = int(self._rng.expovariate(1 / PROMPT_TOKENS)) + 1
        output = int(self._rng.expovariate(1 / OUTPUT_TOKENS)) + 1
        name = f"q{self._number}"
        self._requests.append(Running(name, prompt, prompt, output))
        self.dispatches.append((now, name, prompt))
        self._tell(now, v.RequestQueued(name, 1, prompt))
        self._note(now)

    def _tell(self, now: int, *changes: Any) -> None:
        self.events.append((now, v.EngineStep(1, 0, 0, 0, 0, 0, 0, 0, changes)))

    def _step(self, now: int, number: int) -> int:
        """One step; its end."""
        decoding = [r for r in self._requests if not r.left]
        context = sum(r.context for r in decoding)
        room, chunks, admitted = BUDGET - len(decoding), [], []
        for one in self._requests:
            if one.left and room > 0:
                if one.left == one.prompt:
                    admitted.append(v.RequestAdmitted(one.name, 1, 0))
                chunks.append((one, min(one.left, room)))
                room -= chunks[-1][1]
        if admitted:
            self._tell(now, *admitted)
        prompt = sum(tokens for _, tokens in chunks)
        took = BASE_US + PROMPT_US * prompt + REQUEST_US * len(decoding)
        took = int(took * self._rng.uniform(0.95, 1.05))
        end, changes = now + took, []
        self._arrivals(end - 1)
        for one, tokens in chunks:
            one.left -= tokens
            changes.append(v.PrefillChunkDone(one.name, 1, tokens, one.prompt - one.left))
            if not one.left:
                one.context = one.prompt + 1
                one.to_come -= 1
                changes.append(v.FirstToken(one.name, 1))
        for one in decoding:
            one.context += 1
            one.to_come -= 1
        for one in [r for r in self._requests if not r.left and r.to_come <= 0]:
            self._requests.remove(one)
            changes.append(v.EngineFinished(one.name, 1, "stop", one.context - one.prompt))
        told = v.EngineStep(
            1, number, took, len(decoding), context + len(decoding), prompt, 0, 0, tuple(changes)
        )
        self.events.append((end, told))
        return end

    def _note(self, now: int) -> None:
        prefill = sum(r.left for r in self._requests)
        self.truths.append(Truth(now, prefill, sum(r.context for r in self._requests)))

    def at(self, when_us: int) -> Truth:
        """What it held then."""
        found = bisect_right(self.truths, when_us, key=lambda t: t.at_us) - 1
        return self.truths[max(found, 0)]


class Errors(Struct):
    """Mean absolute errors in tokens: of what was told last, with the replica's own dispatches
    added, and of the forecast; and the true means."""

    told_prefill: float
    counted_prefill: float
    prefill: float
    told_context: float
    context: float
    mean_prefill: float
    mean_context: float


def errors(linger_ms: float, seconds: float = 120.0, asked: int = 4000, seed: int = 0) -> Errors:
    """What a replica is wrong by that hears of the engine every `linger_ms` at most."""
    engine = Engine(seed, seconds)
    replica = _Replica()
    rng = random.Random(seed + 1)
    times = sorted(rng.randrange(WARM_US, int(seconds * 1e6)) for _ in range(asked))
    heard = deque(_batches(engine.events, int(linger_ms * 1000)))
    sent = deque(engine.dispatches)
    rows = []
    for when in times:
        while (heard and heard[0][0] <= when) or (sent and sent[0][0] <= when):
            if sent and (not heard or sent[0][0] <= heard[0][0]):
                replica.dispatch(*sent.popleft())
            else:
                replica.hear(*heard.popleft())
        true = engine.at(when)
        told, counted, context = replica.told()
        prefill, grown = replica.forecast(when)
        rows.append(
            (
                abs(told - true.prefill), abs(counted - true.prefill),
                abs(prefill - true.prefill), abs(context - true.context),
                abs(grown - true.context), true.prefill, true.context,
            )
        )  # fmt: skip
    return Errors(*(sum(column) / asked for column in zip(*rows, strict=True)))


def _batches(events: list[tuple[int, Any]], linger_us: int) -> list[tuple[int, list[Any]]]:
    """Segments: when they arrive, and what is in them."""
    found: list[tuple[int, list[Any]]] = []
    sent, due = -linger_us, -1
    waiting: list[Any] = []
    for when, event in sorted(events, key=lambda pair: pair[0]):
        if waiting and when >= due:
            found.append((due + HOP_US, waiting))
            sent, waiting = due, []
        if not waiting:
            due = max(when, sent + linger_us)
        waiting.append(event)
    return found


class _Replica:
    """The control plane's fold and view of one worker, w0, as replica r0 has them."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self._heads: dict[str, tuple[int, bytes, int]] = {}
        self._revision = 0
        for stream in ("w.w0", "r.r0"):
            self._commit(RevisionGroup(self._next(), owners=((stream, 1),)))
        ready = v.EngineReady(
            "w0", 1, "h", 1, "m", 1 << 20, 16, 1 << 20, hardware="bench", step_tokens=BUDGET
        )
        self._land("w.w0", [v.WorkerRegistered("w0", "host", 7), v.EngineStarted("w0", 1, 7, 1)])
        self._land("w.w0", [ready])
        self._land("r.r0", [v.ReplicaStarted("r0", "b", "127.0.0.1", 8000, 11)])
        self.view = View("r.r0", self.fleet)
        self.view.landed()
        self._own: list[Any] = []

    def _next(self) -> int:
        self._revision += 1
        return self._revision

    def _commit(self, group: RevisionGroup) -> None:
        apply_group(self.fleet, group)

    def _land(self, stream: str, events: list[Any]) -> None:
        seq, previous, first = self._heads.get(stream, (0, GENESIS, 1))
        records = [encode(event) for event in events]
        segment = unpack(pack(stream, 1, seq + 1, first, previous, records))
        self._heads[stream] = segment.seq, segment.hash, segment.last + 1
        self._commit(RevisionGroup(self._next(), (segment,)))

    def _say(self, event: Any) -> None:
        self._own.append(event)
        self.view.own(self.view.position + 1, event)

    def dispatch(self, at_us: int, name: str, prompt: int) -> None:
        """The replica sends a request there."""
        self._say(v.RequestArrived(name, "m", "completions", True, prompt, 64, "exact"))
        basis = self.view.basis
        self._say(
            v.RouteDecided(
                f"r0.b.{name}.1", basis, name, 1, "arrival", "new", 0, prompt, "w0", 1,
                "least_load", "m", at_us=at_us,
            )
        )  # fmt: skip

    def hear(self, at_us: int, events: list[Any]) -> None:
        """A segment of the worker arrives; what the replica said has landed before it."""
        own, self._own = self._own, []
        if own:
            self._land("r.r0", own)
        self._land("w.w0", events)
        self.view.landed()
        self._say(v.GroupsReceived(self._revision, (0, at_us - self.view.receipts.clock_us)))

    def told(self) -> tuple[int, int, int]:
        """Prompt tokens as told, the same with dispatches on their way, context as told."""
        worker = self.fleet.workers["w0"]
        counted, _ = self.view.load(worker)
        return worker.prefill_left - worker.flight_left, counted, worker.context

    def forecast(self, when_us: int) -> tuple[int, int]:
        """Prompt tokens and context at that time."""
        self.view.now_us = when_us
        found = forecast(self.view, self.fleet.workers["w0"])
        return found.prefill_tokens, found.context
