"""A worker for a control plane under test: an agent and its engine that follow a script."""

from __future__ import annotations

import asyncio
from typing import Any

from relume.controlplane.stream.arrival import Assignment, Rejected
from relume.events import vocabulary as v

MODEL = "m"
PAUSE_S = 0.0005
BLOCK_BYTES = 1000
BUDGET = 1 << 20


class StreamCut(ConnectionResetError):
    """The engine died under an attempt, or refused it. `kind` as in TransportObserved."""

    def __init__(self, kind: str, delivered: int) -> None:
        super().__init__(kind)
        self.kind = kind
        self.delivered = delivered


class Attempt:
    """One attempt as its gateway holds it. `delivered`: the tokens its client has;
    `moved`: its streams were broken, and `given` is where it goes on; `handed`: its engine was
    asked to hand it over."""

    def __init__(self, given: Assignment, delivered: int) -> None:
        self.given: Assignment | Rejected | None = given
        self.number = given.attempt
        self.delivered = delivered
        self.moved = False
        self.handed = False


class Worker:
    """A scripted agent with its engine."""

    def __init__(self, log: Any, name: str) -> None:
        self.name = name
        self.incarnation = 0
        self.alive = False
        self.peers: dict[str, Worker] = {}
        self.boot = 0
        self.present = False
        self.port = 9
        self._log = log
        self._writer: Any = None
        self._steps = 0
        self._running = 0

    def tell(self, *events: Any) -> None:
        assert self._writer is not None
        self._writer.append(*events)

    async def register(self) -> None:
        """A new agent takes the stream."""
        self.present = True
        self._writer = self._log.writer(f"w.{self.name}")
        await self._writer.__aenter__()
        self.tell(
            v.WorkerRegistered(worker=self.name, domain=f"host-{self.name}", agent_pid=1),
            self._new_daemon(),
        )

    def start_daemon(self) -> None:
        """Its host's state daemon begins a life, with nothing in it."""
        self.tell(self._new_daemon())

    def _new_daemon(self) -> v.StateDaemonStarted:
        self.boot += 1
        address = f"tcp://{self.name}:{self.boot}"
        return v.StateDaemonStarted(
            worker=self.name,
            boot=f"b{self.boot}",
            epoch=self.boot,
            address=address,
            budget_bytes=BUDGET,
            family="f",
        )

    def kill_daemon(self) -> None:
        self.tell(v.StateDaemonLost(self.name, f"b{self.boot}", "killed"))
        self.boot += 1  # what is acknowledged from here on comes too late

    def start(self) -> None:
        self.incarnation += 1
        self._steps = self._running = 0
        self.alive = True
        self.tell(
            v.EngineStarted(self.name, self.incarnation, 1000 + self.incarnation, 1),
            self._ready(),
        )

    def _ready(self) -> v.EngineReady:
        return v.EngineReady(
            worker=self.name,
            incarnation=self.incarnation,
            host="127.0.0.1",
            port=self.port,
            model=MODEL,
            max_model_len=4096,
            block_size=16,
            kv_blocks=512,
            family="f",
            block_bytes=BLOCK_BYTES,
        )

    def hold(self, request: str, attempt: int, blocks: int) -> None:
        """Its daemon has so many blocks of a request; nothing when its host is gone."""
        if not self.present:
            return
        size = blocks * BLOCK_BYTES
        self.tell(
            v.CheckpointAcknowledged(
                holder=self.name,
                boot=f"b{self.boot}",
                request=request,
                child=0,
                attempt=attempt,
                blocks=blocks,
                tokens=blocks * 16,
                bytes=size,
            )
        )

    def _stream_out(self, given: Assignment, tokens: int) -> None:
        for endpoint in given.checkpoint:
            holder = self.peers[endpoint.removeprefix("tcp://").partition(":")[0]]
            holder.hold(given.request, given.attempt, tokens // 16)

    def _restore(self, given: Assignment) -> None:
        for endpoint in given.restore[:1]:
            which: dict[str, Any] = {
                "incarnation": self.incarnation,
                "request": given.request,
                "child": 0,
                "attempt": given.attempt,
                "holder": endpoint,
                "tokens": 32,
            }
            self.tell(
                v.RestoreStarted(**which),
                v.RestoreDone(**which, bytes=2 * BLOCK_BYTES, duration_us=900),
            )

    def die(self) -> None:
        """kill -9 of the engine, seen by its agent."""
        self.alive = False
        self.tell(v.EngineDied(self.name, self.incarnation, "killed"))

    def restart(self) -> None:
        """A death and the start after it that reach the log in one segment."""
        died = self.incarnation
        self.incarnation += 1
        self._steps = self._running = 0
        self.tell(
            v.EngineDied(self.name, died, "killed"),
            v.EngineRestartScheduled(self.name, self.incarnation, 0),
            v.EngineStarted(self.name, self.incarnation, 1000 + self.incarnation, 1),
        )
        self.tell(self._ready())

    def vanish(self) -> None:
        """The host is gone: nobody writes that the engine died, the lease lapses."""
        self.alive = self.present = False
        self._log.lapse(f"w.{self.name}")

    def step(self, *changes: Any) -> None:
        self._steps += 1
        us = 500 + 7 * (self._steps % 13) + 400 * self._running
        self.tell(
            v.EngineStep(
                incarnation=self.incarnation,
                step=self._steps,
                duration_us=us,
                batch=self._running,
                sum_context=90,
                prefill_tokens=0,
                waiting=0,
                kv_used=self._running,
                changes=changes,
            )
        )

    async def serve(self, given: Assignment, tokens: int, attempt: Attempt) -> int:
        """Generate for one attempt; returns tokens made. Raises StreamCut."""
        if given.incarnation != self.incarnation:
            raise StreamCut("stale", 0)
        if not self.alive:
            raise StreamCut("refused", 0)
        who = given.request, given.attempt
        prompt = 40 + len(given.request)
        self._running += 1
        self.step(v.RequestQueued(*who, prompt, given.dispatch), v.RequestAdmitted(*who, 8, 2))
        self._restore(given)
        await asyncio.sleep(PAUSE_S)
        self._stream_out(given, prompt)
        for made in range(tokens):
            if not self.alive or given.incarnation != self.incarnation:
                raise StreamCut("reset", made)
            if attempt.moved or attempt.handed:
                self._running -= 1
                self.step(v.EngineFinished(*who, "abort", made))
                raise StreamCut("moved", made)
            attempt.delivered += 1
            first = (v.PrefillChunkDone(*who, prompt - 8, prompt), v.FirstToken(*who))
            self.step(*(first if made == 0 else ()))
            await asyncio.sleep(PAUSE_S)
        if not self.alive or given.incarnation != self.incarnation:
            raise StreamCut("reset", tokens)
        self._running -= 1
        self._stream_out(given, prompt + tokens)
        self.step(v.EngineFinished(*who, "length", tokens))
        return tokens
