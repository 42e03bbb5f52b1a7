"""A log as a busy fleet writes it, made without one: input of the `replay` bench.

Engines step and report. Requests arrive; the real policy places them on the real view; they
run and end. Now and then an engine dies and its requests continue elsewhere. The leader
ticks and records the state hash. The log verifies, including decisions between alternatives.
"""

from __future__ import annotations

import random

import msgspec
from msgspec import Struct

from relume.events import vocabulary as v
from relume.events.log.codec import encode
from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import GENESIS, Segment, pack, unpack
from relume.events.vocabulary.enums import (
    AttemptMode,
    DeathReason,
    Guarantee,
    RequestOutcome,
    RouteCause,
    TransportKind,
)
from relume.events.wire import prefix
from relume.policies import decision_versions
from relume.policies.decision_versions import shape_name
from relume.policies.health import evidence
from relume.policies.routing import choose_worker as routing
from relume.policies.routing.route_query import RouteQuery
from relume.policies.state.fleet import Fleet, state_hash
from relume.policies.state.fold import apply_group
from relume.policies.state.overlay.view import View

MODEL = "m"
BLOCK = 16
CACHED = 4096
"""Marks an engine's prefix cache holds."""
SHARED = 40
"""Number of common prefixes of prompts; the first ones are the most frequent."""
RECEIPT_US = 1500


class Running(Struct, kw_only=True):
    """One attempt in an engine: prompt tokens left to compute, tokens left to make."""

    request: str
    attempt: int
    prompt: int
    left: int
    tokens: int
    computed: int = 0
    admitted: bool = False
    marks: tuple[int, ...] = ()


class Engine(Struct, kw_only=True):
    """A scripted engine: continuous batching with a prefill budget per step."""

    name: str
    incarnation: int = 1
    step: int = 0
    running: dict[str, Running] = {}
    cached: dict[int, None] = {}

    def record(self, rng: random.Random) -> v.EngineStep:
        """One step: everything admitted decodes a token, one prefill continues."""
        self.step += 1
        changes: list[v.AnyChange] = []
        prefill = batch = context = 0
        for key, r in list(self.running.items()):
            if not r.admitted:
                r.admitted = True
                cached = min(r.prompt - 1, BLOCK * rng.randrange(3))
                r.left -= cached
                r.computed = cached
                changes.append(v.RequestAdmitted(r.request, r.attempt, cached, r.left // BLOCK + 1))
            if r.left > 0:
                chunk = min(r.left, 512 - prefill)
                if chunk > 0:
                    prefill += chunk
                    r.left -= chunk
                    r.computed += chunk
                    done = v.PrefillChunkDone(r.request, r.attempt, chunk, r.computed)
                    changes.append(done)
                    if r.left == 0:
                        changes.append(v.FirstToken(r.request, r.attempt))
                continue
            batch += 1
            r.computed += 1
            context += r.computed
            r.tokens -= 1
            if r.computed % BLOCK == 0:
                changes.append(v.KvBlocksFilled(r.request, r.attempt, r.computed // BLOCK))
            if r.tokens <= 0:
                del self.running[key]
                changes.append(v.EngineFinished(r.request, r.attempt, "length", r.computed))
        blocks = sum(r.computed // BLOCK + 1 for r in self.running.values())
        us = 900 + 40 * batch + 6 * prefill + rng.randrange(300)
        waiting = sum(not r.admitted for r in self.running.values())
        return v.EngineStep(
            incarnation=self.incarnation,
            step=self.step,
            duration_us=us,
            batch=batch,
            sum_context=context,
            prefill_tokens=prefill,
            waiting=waiting,
            kv_used=blocks,
            changes=tuple(changes),
        )


def records_of(engine: Engine, rng: random.Random) -> list[v.Event]:
    """One step, after the record of what the prefix cache gained and lost in it."""
    fresh = [r for r in engine.running.values() if not r.admitted and r.marks]
    step = engine.record(rng)
    stored = dict.fromkeys(m for r in fresh for m in r.marks if m not in engine.cached)
    if not stored:
        return [step]
    engine.cached |= stored
    over = len(engine.cached) - CACHED
    removed = list(engine.cached)[:over] if over > 0 else []
    for one in removed:
        del engine.cached[one]
    prefixes = v.PrefixBlocksChanged(
        incarnation=engine.incarnation, stored=prefix.pack([*stored]), removed=prefix.pack(removed)
    )
    return [prefixes, step]


class FleetLog:
    """Writes the log. `data` has (revision, packed segments, owners) as etcd would."""

    def __init__(self, seed: int, workers: int, steps_a_segment: int, concurrent: int) -> None:
        self.rng = random.Random(seed)
        self.data: list[tuple[int, list[bytes], tuple[tuple[str, int], ...]]] = []
        self.records = 0
        self._revision = 0
        self._fleet = Fleet()
        self._heads: dict[str, tuple[int, bytes, int]] = {}
        self._epochs: dict[str, int] = {}
        self._view = View("r.r0", self._fleet)
        self._engines = [Engine(name=f"w{n}", running={}, cached={}) for n in range(workers)]
        self._steps = steps_a_segment
        self._concurrent = concurrent
        self._open: dict[str, v.RouteDecided] = {}
        self._made = 0
        self._unsent: list[v.Event] = []
        self._tick = 0
        self._received: list[int] = []
        self._now_us = 0

    def write(self, records: int) -> None:
        """Continue until the log has at least `records` records."""
        if not self._epochs:
            self._begin()
        while self.records < records:
            self._round()

    def _begin(self) -> None:
        for engine in self._engines:
            name = engine.name
            self._own(f"w.{name}")
            self._tell(
                f"w.{name}",
                v.WorkerRegistered(worker=name, domain=f"host-{name}", agent_pid=1),
                v.EngineStarted(name, 1, 2, 3),
                self._empty(engine),
                self._ready(engine),
            )
        self._own("r.r0")
        self._tell(
            "r.r0",
            v.ReplicaStarted(
                replica="r0",
                boot="b",
                host="127.0.0.1",
                port=8000,
                pid=1,
                settings=decision_versions.settings(),
            ),
        )
        self._own("fleet")
        self._tell("fleet", v.LeaderElected("r0", "b"))

    def _round(self) -> None:
        """One segment of each worker, and the replica's decisions meanwhile."""
        for engine in self._engines:
            if engine.running:
                steps = [records_of(engine, self.rng) for _ in range(self._steps)]
                self._tell(f"w.{engine.name}", *(r for step in steps for r in step))
        held = {key for engine in self._engines for key in engine.running}
        for request, event in list(self._open.items()):
            if f"{request}/{event.attempt}" not in held:
                del self._open[request]
                self._emit(
                    v.RequestEnded(
                        request=request,
                        outcome=RequestOutcome.COMPLETED,
                        status=200,
                        tokens=64,
                        finish="length",
                        attempts=event.attempt,
                        verdict=Guarantee.EXACT,
                        ttft_us=50_000,
                    )
                )
        while len(self._open) < self._concurrent:
            self._arrive()
        if self.rng.random() < 0.002:
            self._kill(self.rng.choice(self._engines))
        self._flush()
        if self.rng.random() < 0.05:
            self._tick += 1
            fleet = self._fleet
            hashed = v.StateHashed(fleet.revision, state_hash(fleet), fleet.order, shape_name())
            self._tell("fleet", v.Tick(self._tick, 1000 * self._tick), hashed)

    def _arrive(self) -> None:
        self._made += 1
        request = f"req-{self._made:08x}"
        prompt = self.rng.randrange(16, 1500)
        self._emit(
            v.RequestArrived(
                request=request,
                model=MODEL,
                route="completions",
                stream=True,
                prompt_tokens=prompt,
                max_tokens=64,
                verdict=Guarantee.EXACT,
            )
        )
        self._place(request, 1, "arrival", prompt, 0, self._marks(prompt))

    def _marks(self, prompt: int) -> tuple[int, ...]:
        """A prompt's marks: the beginning is shared, the rest is its own."""
        rng, count = self.rng, prefix.marks_in((prompt - 1) // BLOCK)
        shared = min(count, rng.randrange(8, 48))
        first = int(SHARED * rng.random() ** 3) << 16
        return (
            *range(first, first + shared),
            *(rng.getrandbits(64) for _ in range(count - shared)),
        )

    def _place(
        self,
        request: str,
        attempt: int,
        cause: str,
        prompt: int,
        delivered: int,
        marks: tuple[int, ...],
    ) -> None:
        view = self._view
        self._receive()
        basis = view.basis
        view.now_us = self._now_us
        query = RouteQuery(
            request=request,
            model=MODEL,
            prompt_tokens=prompt,
            delivered=delivered,
            prefix=prefix.pack(marks),
        )
        choice = routing.least_load(view, query)
        event = v.RouteDecided(
            decision=f"r0.b.{request}.{attempt}",
            basis=basis,
            request=request,
            attempt=attempt,
            cause=RouteCause(cause),
            mode=AttemptMode.CONTINUE if delivered else AttemptMode.NEW,
            delivered=delivered,
            prompt_tokens=prompt,
            worker=choice.worker,
            incarnation=choice.incarnation,
            policy="least_load",
            model=MODEL,
            candidates=choice.candidates,
            prefix=query.prefix,
            at_us=view.now_us,
            ttft_us=routing.first_token_us(view, query, "least_load", choice),
        )
        self._emit(event)
        self._open[request] = event
        engine = next(e for e in self._engines if e.name == choice.worker)
        tokens = self.rng.randrange(8, 160)
        whole = prompt + delivered
        running = Running(
            request=request, attempt=attempt, prompt=whole, left=whole, tokens=tokens, marks=marks
        )
        engine.running[f"{request}/{attempt}"] = running
        copy = encode(msgspec.structs.replace(event, prefix=b""))
        queued = v.RequestQueued(request, attempt, whole, copy)
        self._flush()
        waiting = sum(not r.admitted for r in engine.running.values())
        self._tell(
            f"w.{engine.name}",
            v.EngineStep(
                incarnation=engine.incarnation,
                step=engine.step,
                duration_us=0,
                batch=0,
                sum_context=0,
                prefill_tokens=0,
                waiting=waiting,
                kv_used=0,
                changes=(queued,),
            ),
        )

    def _kill(self, engine: Engine) -> None:
        moved, engine.running = engine.running, {}
        name = engine.name
        self._tell(f"w.{name}", v.EngineDied(name, engine.incarnation, DeathReason.KILLED))
        for run in moved.values():
            if run.request not in self._open:
                continue
            seen = v.TransportObserved(
                request=run.request,
                attempt=run.attempt,
                worker=name,
                incarnation=engine.incarnation,
                kind=TransportKind.RESET,
                delivered=8,
            )
            self._emit(seen)
            self._place(run.request, run.attempt + 1, "reset", run.prompt, 8, run.marks)
        engine.incarnation += 1
        engine.step = 0
        engine.cached.clear()
        self._tell(
            f"w.{name}",
            v.EngineStarted(name, engine.incarnation, 2, 3),
            self._empty(engine),
            self._ready(engine),
        )

    def _empty(self, engine: Engine) -> v.PrefixBlocksChanged:
        return v.PrefixBlocksChanged(incarnation=engine.incarnation, reset=True, block_tokens=BLOCK)

    def _ready(self, engine: Engine) -> v.EngineReady:
        return v.EngineReady(
            worker=engine.name,
            incarnation=engine.incarnation,
            host="127.0.0.1",
            port=9000,
            model=MODEL,
            max_model_len=4096,
            block_size=BLOCK,
            kv_blocks=8192,
            hardware="scripted",
            step_tokens=512,
        )

    def _receive(self) -> None:
        """Record the groups that the replica received since its last decision, and when."""
        if self._received:
            base, deltas = self._received[0], []
            for revision in self._received:
                deltas += [revision - base, RECEIPT_US]
            self._now_us += RECEIPT_US * len(self._received)
            self._received = []
            self._emit(v.GroupsReceived(base, tuple(deltas)))

    def _emit(self, event: v.Event) -> None:
        self._view.own(self._view.position + 1, event)
        self._unsent.append(event)

    def _flush(self) -> None:
        if self._unsent:
            unsent, self._unsent = self._unsent, []
            self._tell("r.r0", *unsent)

    def _own(self, stream: str) -> None:
        epoch = self._epochs[stream] = self._revision + 1
        self._commit([], ((stream, epoch),))

    def _tell(self, stream: str, *events: v.Event) -> None:
        seq, previous, first = self._heads.get(stream, (0, GENESIS, 1))
        records = [encode(e) for e in events]
        data = pack(stream, self._epochs[stream], seq + 1, first, previous, records)
        segment = self._commit([data], ())[0]
        self._heads[stream] = (segment.seq, segment.hash, segment.last + 1)
        self.records += len(records)
        if verdicts := evidence.owed(self._fleet):  # the leader's answer
            self._tell("fleet", *verdicts)

    def _commit(
        self, packed: list[bytes], owners: tuple[tuple[str, int], ...]
    ) -> tuple[Segment, ...]:
        self._revision += 1
        self._received.append(self._revision)
        self.data.append((self._revision, packed, owners))
        segments = tuple(unpack(p) for p in packed)
        apply_group(self._fleet, RevisionGroup(self._revision, segments, owners))
        self._view.landed()
        return segments


def make_log(
    records: int, seed: int = 1, workers: int = 3, steps_a_segment: int = 16, concurrent: int = 48
) -> list[tuple[int, list[bytes], tuple[tuple[str, int], ...]]]:
    """A log of at least `records` records: (revision, packed segments, owner changes)."""
    log = FleetLog(seed, workers, steps_a_segment, concurrent)
    log.write(records)
    return log.data
