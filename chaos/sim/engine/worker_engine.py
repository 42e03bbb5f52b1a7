"""The process of one simulated engine: requests in, tokens out, and reports of its steps.

The engine sends streams when their state changes, and on a read (`flush`): a token's time does not
depend on when it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Protocol

from msgspec import convert
from msgspec.structs import asdict

from relume.chaos.sim import second_answers
from relume.chaos.sim.canary_answers import first_wrong
from relume.chaos.sim.engine.engine_model import Job, JobEvent, SimEngine
from relume.chaos.sim.engine.manners import BROKEN, LATE, break_off, errs, refusal
from relume.chaos.sim.engine.step_reports import StepReports
from relume.chaos.sim.engine.stream_buffers import StreamBuffers
from relume.chaos.sim.message_ports import Answer, Dispatch, Stretch
from relume.chaos.sim.world.virtual_loop import NS
from relume.chaos.sim.world.worker_machine import Machine
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import AttemptMode
from relume.events.wire.worker_calls import (
    CHECKPOINT_PATH,
    HANDOVER_PATH,
    ORIGIN_PATH,
    PROBE_PATH,
    RELEASE_PATH,
    STATE_PATH,
    Attach,
    OriginRequest,
)

EXACT = ("greedy", "seeded", "penalties", "logprobs", "structured", "parsers", "choices")


class Track:
    """One attempt in the engine. `sent_tokens`: number of tokens of its stream that were sent.
    Decode step `joined + n` gives token `base + n` (`joined` < 0: it does not decode). `stuck`: what
    it generates from now on does not leave the engine. `place`: its number among all that came."""

    __slots__ = (
        "answer", "base", "blocks", "joined", "last_ns", "late", "leaving", "name", "place", "pump",
        "sent_tokens", "stuck", "what",
    )  # fmt: skip

    def __init__(self, name: str, what: Dispatch, answer: Answer, place: int) -> None:
        self.name = name
        self.what = what
        self.place = place
        self.answer = answer
        self.sent_tokens = what.delivered
        self.base = 0
        self.joined = -1
        self.blocks = 0
        self.last_ns = 0
        self.leaving = ""
        self.late = ""  # how its end is lost
        self.stuck = False
        self.pump: Any = None

    @property
    def given(self) -> int:
        """Tokens of its stream that the engine got with the attempt; it makes all others."""
        return self.what.delivered if self.what.mode == AttemptMode.CONTINUE else 0

    def by(self, decoded: int) -> int:
        """Tokens of its stream after a number of decode steps of the engine, with those that
        existed before the attempt."""
        if self.joined < 0:
            return self.sent_tokens
        return min(self.base + decoded - self.joined, self.what.output_tokens)


Submit = Callable[[Track, int], None]


class Checkpoints(Protocol):
    """The engine's part in checkpoints, if it has one."""

    def arrived(self, track: Track, submit: Submit) -> bool:
        """Add an attempt; True: it waits for its blocks, then calls `submit` with the restored ones."""
        ...

    def restoring(self, track: Track) -> bool:
        """Whether a restore of its blocks is in progress."""
        ...

    def finished(self, track: Track, ended: bool) -> None:
        """The attempt left the engine; `ended`: by itself."""
        ...

    def retarget(self, track: Track, endpoints: tuple[str, ...]) -> None:
        """Change the holders of a running attempt."""
        ...

    def has_envelope(self, endpoint: str) -> bool:
        """Whether the state daemon there has the requests of its blocks."""
        ...


class EngineProcess:
    """`ports.Endpoint` of one incarnation. `report` passes encoded events to the agent."""

    def __init__(self, machine: Machine, incarnation: int, report: Callable[[bytes], bool]) -> None:
        self.machine = machine
        self.incarnation = incarnation
        self.process = machine.loop.process(f"{machine.name}.engine")
        self.engine = SimEngine(machine.spec.engine(machine.settings.prefix_cache), machine.cost)
        self.address = f"{machine.name}:{9000 + incarnation}"
        self.tracks: dict[str, Track] = {}
        self.buffers = StreamBuffers(self._after, self._released, lambda: machine.loop.now_ns)
        self.checkpoints: Checkpoints | None = None
        self.serving = False
        self._loop = machine.loop
        self.reports = StepReports(self, report, self._observed, lambda: machine.loop.now_ns)
        self._armed: int | None = None
        self._sent_ns = 0
        self._came = 0
        if machine.settings.prefix_cache:
            self.engine.kv.moves = []

    # --- its life --------------------------------------------------------------------------

    def serve(self) -> None:
        """It has loaded and answers."""
        self.serving = True
        self._note_serving(True)
        self.process.at_death.append(lambda: self._note_serving(False))
        self.reports.write_prefixes()
        self.machine.net.serve(self.address, self.process, self)

    def _note_serving(self, serving: bool) -> None:
        if self.machine.truth is not None:
            self.machine.truth.engine_serves(self.machine.name, serving)

    died_of, died_how = "killed", "signal 9"

    def kill(self) -> None:
        """SIGKILL. Its messages so far are on their way."""
        if self.process.alive:
            if not self.process.stopped:
                self.process.context.run(self.flush_all)
            self.machine.end(self.process)

    def exit(self, why: str) -> None:
        """It ends by itself."""
        if self.process.alive:
            self.died_of, self.died_how = "exit", why
            self.kill()

    def stop(self) -> None:
        """SIGSTOP."""
        if self.process.alive and not self.process.stopped:
            self.process.context.run(self.flush_all)
            self.engine.hold(self._loop.now_ns)
            self.process.stop()
            self._note_serving(False)

    def go_on(self) -> None:
        """SIGCONT."""
        if self.process.alive and self.process.stopped:
            self.engine.release(self._loop.now_ns)
            self.process.go_on()
            self._note_serving(self.serving)
            self.process.call_soon(self.step)

    def pace(self) -> None:
        """Use the machine's cost of steps from the next one on."""
        if self.process.alive and not self.process.stopped:
            self.process.context.run(self._pace)

    def _pace(self) -> None:
        self.step()
        self.engine.paced(self.machine.steps, self._loop.now_ns)
        self._arm()

    # --- ports.Endpoint --------------------------------------------------------------------

    def dispatch(self, what: Dispatch, answer: Answer) -> None:
        """See ports.Endpoint."""
        if what.incarnation != self.incarnation:
            answer.lost("stale", f"incarnation {self.incarnation}")
            return
        name = f"{what.request}/{what.attempt}"
        if name in self.tracks:
            answer.lost("engine_error", "this attempt is here already")
            return
        if not self._serves(what.model):
            answer.refused(404)
            return
        if what.envelope and not (
            self.checkpoints and any(map(self.checkpoints.has_envelope, what.envelope))
        ):
            answer.refused(424)
            return
        if errs(name, self.machine.erring):
            answer.refused(500)
            return
        if status := refusal(name, self.machine.refusing):
            answer.refused(status)
            return
        self.step()
        if self.machine.met is not None:
            self.machine.met(what.request, what.content_id)
        self._came += 1
        track = self.tracks[name] = Track(name, what, answer, self._came)
        tokens = what.prompt_tokens + track.given
        self.reports.change(v.RequestQueued(what.request, what.attempt, tokens, what.record), True)
        if what.claim:
            self.buffers.keep(track)
        kind, seconds = break_off(name, what.mode, self.machine.breaking)
        if kind in LATE:
            track.late = kind
        elif kind:
            self._after(seconds, self._break_off, track, kind)
        if self.checkpoints is not None and self.checkpoints.arrived(track, self._submit):
            self.reports.write()
        else:
            self._submit(track, 0)

    def _serves(self, model: str) -> bool:
        """Whether requests of the model are for this engine; empty: the fleet has but one."""
        return model in ("", self.machine.model)

    def _submit(self, track: Track, restored: int) -> None:
        """Submit to the scheduler, with `restored` tokens of its KV present."""
        if self.tracks.get(track.name) is not track:
            return  # it has left
        what = track.what
        generated = track.given
        if generated >= what.output_tokens:
            self._finish(track, "length", generated)
        else:
            job = Job(
                name=track.name,
                prompt_tokens=what.prompt_tokens,
                output_tokens=what.output_tokens,
                generated=generated,
                prefix=what.prefix,
                prefix_block=what.prefix_block,
                restored=restored,
                place=track.place,  # vLLM passes over a request whose blocks are on their way
            )
            try:
                self.step(self.engine.submit(job, self._loop.now_ns))
            except ValueError as error:
                del self.tracks[track.name]
                self.reports.change(v.EngineFinished(what.request, what.attempt, "error", 0), True)
                track.answer.lost("engine_error", str(error))
        self.reports.write()
        self._arm()

    def flush(self, request: str, attempt: int) -> None:
        """See ports.Endpoint."""
        track = self.tracks.get(f"{request}/{attempt}")
        if track is not None and not self.process.stopped:
            self._tell(track)

    def last_ns(self, request: str, attempt: int) -> int:
        """See ports.Endpoint."""
        track = self.tracks.get(f"{request}/{attempt}")
        if track is None:
            return 0
        if track.joined < 0 or track.stuck:
            return track.last_ns
        return max(track.last_ns, self._decoded_ns())

    def newest_ns(self) -> int:
        """See ports.Endpoint."""
        return max(self._sent_ns, self._decoded_ns())

    def _decoded_ns(self) -> int:
        """End of the last decode step."""
        run = self.engine.running_run(self._loop.now_ns)
        return self.engine.runs.over_ns if run is None else run.end_ns(run.before + run.count)

    def flush_all(self) -> None:
        """Send all streams up to now, and all due reports."""
        if self.process.stopped:
            return
        self.step()
        decoded = self.decoded()
        for track in self.tracks.values():
            self._stretch(track, track.by(decoded))
        self.reports.write()

    def is_restoring(self, track: Track) -> bool:
        """Whether the attempt waits for its blocks."""
        return self.checkpoints is not None and self.checkpoints.restoring(track)

    def stick(self, random: Random) -> str:
        """Lose all further output of one stream that decodes; its request, empty if there is
        none."""
        self.flush_all()
        found = [t for t in self.tracks.values() if t.joined >= 0 and not (t.stuck or t.leaving)]
        if not found:
            return ""
        track = random.choice(found)
        track.stuck = True
        return track.what.request

    def drop(self, request: str, attempt: int, answer: Answer) -> None:
        """See ports.Endpoint."""
        name = f"{request}/{attempt}"
        track = self.tracks.get(name)
        begun = track is None or track.joined >= 0 or track.sent_tokens > 0
        if self.buffers.left(name, answer, begun):
            return
        if track is not None and track.answer is answer and not track.leaving:
            self._abort(track, "abort")

    def attach(self, what: Attach, answer: Answer) -> None:
        """See ports.Endpoint."""
        if what.incarnation != self.incarnation:
            answer.refused(409)
            return
        self.flush(what.request, what.attempt)
        self.buffers.attach(what, answer, self.wrong, self.machine.breaking)

    def _after(self, seconds: float, work: Callable[..., object], *args: Any) -> None:
        self.process.call_at(self._loop.time() + seconds, work, *args)

    def _released(self, name: str) -> None:
        track = self.tracks.get(name)
        if track is not None and not track.leaving:
            self._abort(track, "abort")

    def _break_off(self, track: Track, kind: str) -> None:
        if self.tracks.get(track.name) is track and not track.leaving:
            self._abort(track, kind)

    def _abort(self, track: Track, why: str) -> None:
        """Remove it from the engine after the current step."""
        self.step()
        if track.name not in self.tracks:
            return  # it ended at that moment
        waiting = track.name not in self.engine.running
        track.leaving = why
        if self.checkpoints is not None and self.checkpoints.restoring(track):
            self._gone(track, 0)  # vLLM ends it now; only its blocks wait for what is to arrive
        elif self.engine.abort(track.name, self._loop.now_ns) and waiting:
            self._gone(track, 0)
        self.reports.write()
        self._arm()

    def call(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """See ports.Endpoint."""
        if path == STATE_PATH:
            return 200, self.state()
        if path == PROBE_PATH:
            return 204, {}
        if body.get("incarnation", self.incarnation) != self.incarnation:
            return 409, {"error": "stale incarnation", "incarnation": self.incarnation}
        if path == RELEASE_PATH:
            self.buffers.release(convert(body, Attach))
            return 200, {"released": True}
        if path == ORIGIN_PATH:
            return self._origin(convert(body, OriginRequest))
        track = self.tracks.get(f"{body.get('request')}/{body.get('attempt')}")
        if path == HANDOVER_PATH:
            if track is None or track.leaving or track.what.is_stock:
                return 404, {"error": "not here, or at its end"}
            if body.get("unbegun") and track.name in self.engine.running:
                return 409, {"error": "it has generated a token"}  # at the end of this step
            self._abort(track, "moved")
            return 200, {"request": track.what.request, "attempt": track.what.attempt}
        if path == CHECKPOINT_PATH:
            if track is None or self.checkpoints is None:
                return 404, {"error": "not here, or without checkpoints"}
            self.checkpoints.retarget(track, tuple(body.get("holders", ())))
            return 200, {"holders": body.get("holders", ())}
        return 404, {"error": "no such path"}

    def _origin(self, what: OriginRequest) -> tuple[int, dict[str, Any]]:
        """Where a stream began, for a replica whose log does not name it. It reads no envelopes."""
        found = self.buffers.origin(what.request)
        if found is None:
            return 404, {"error": "this stream is not here"}
        return 200, asdict(found)

    def cross_check(self, body: dict[str, Any], reply: second_answers.Reply) -> Callable[[], None]:
        """See ports.Endpoint."""
        call, request = second_answers.request_of(body)
        if call.incarnation != self.incarnation:
            reply(409, {"error": "stale incarnation", "incarnation": self.incarnation})
            return lambda: None
        if not self._serves(request.model):
            reply(404, {"error": f"this is no engine of {request.model}"})
            return lambda: None
        ns = second_answers.took_ns(self.machine.steps, request)

        def done() -> None:
            reply(200, second_answers.answer(request, self.wrong, self.flipped, ns))

        return self.process.call_at((self._loop.now_ns + ns) / NS, done).cancel

    def state(self) -> dict[str, Any]:
        """The answer to `GET /relume/state`."""
        self.step()
        steps, age_ns, busy_ns = self.engine.progress(self._loop.now_ns)
        return {
            "worker": self.machine.name,
            "incarnation": self.incarnation,
            "pid": self.process.pid,
            "steps": steps,
            "step_age_us": age_ns // 1000,
            "running": len(self.engine.running),
            "waiting": len(self.engine.waiting),
            "kv_used": self.engine.kv_used,
            "expected_us": self.engine.expected_us(),
            "turns": steps,
            "cpu_us": busy_ns // 1000,
            "wait_us": 0,
            "unfinished": len(self.tracks),
        }

    # --- steps -----------------------------------------------------------------------------

    def step(self, first: list[JobEvent] | None = None) -> None:
        """Advance the engine to now; send the resulting reports and tokens."""
        events = self.engine.advance(self._loop.now_ns)
        for event in (*first, *events) if first else events:
            _HANDLERS[event.what](self, self.tracks[event.name], event)
        if self.engine.last.gap_ns:
            self.reports.paused()
        self.reports.write()
        self._arm()

    def _arm(self) -> None:
        due = self.engine.next_ns
        if due is not None and (self._armed is None or due < self._armed):
            self._armed = due
            self.process.call_at(due / NS, self._due, due)

    def _due(self, due: int) -> None:
        if self._armed == due:
            self._armed = None
            self.step()

    def _admitted(self, track: Track, event: JobEvent) -> None:
        what, sequence = track.what, self.engine.running[track.name]
        blocks = sequence.blocks + sequence.segments
        track.blocks = 0
        self.reports.change(
            v.RequestAdmitted(what.request, what.attempt, event.amount, blocks), True
        )

    def _chunk(self, track: Track, event: JobEvent) -> None:
        what = track.what
        self.reports.chunk(event.amount, self.engine.last.took_ns)
        self.reports.change(
            v.PrefillChunkDone(what.request, what.attempt, event.amount, event.tokens)
        )
        full = event.tokens // self.machine.spec.block_tokens
        if full > track.blocks:
            track.blocks = full
            self.reports.change(v.KvBlocksFilled(what.request, what.attempt, full))

    def _first(self, track: Track, event: JobEvent) -> None:
        what = track.what
        self.reports.change(v.FirstToken(what.request, what.attempt), True)
        track.base, track.joined = event.tokens, self.engine.decoded
        if event.tokens > track.sent_tokens:
            self._send(track, event.tokens, event.at_ns, event.at_ns, 0)

    def _preempted(self, track: Track, event: JobEvent) -> None:
        what, output = track.what, event.tokens
        self._stretch(track, output)
        track.joined = -1
        tokens, generated = what.prompt_tokens + output, max(output - track.given, 0)
        self.reports.change(v.RequestPreempted(what.request, what.attempt, tokens, generated), True)

    def _finished(self, track: Track, event: JobEvent) -> None:
        self._stretch(track, event.tokens)
        self._finish(track, "length", event.tokens)

    def _finish(self, track: Track, reason: str, tokens: int) -> None:
        what = track.what
        del self.tracks[track.name]
        self.reports.change(
            v.EngineFinished(what.request, what.attempt, reason, tokens - track.given), True
        )
        if self.checkpoints is not None:
            self.checkpoints.finished(track, ended=True)
        if not track.stuck:
            track.answer.end(track.late or reason)
        self.buffers.finished(track.name, reason)

    def _aborted(self, track: Track, event: JobEvent) -> None:
        if track.leaving in BROKEN:
            self._stretch(track, event.tokens)
        self._gone(track, max(event.tokens - track.given, 0))

    def _gone(self, track: Track, tokens: int) -> None:
        """It left without its end: aborted, or handed over."""
        what = track.what
        del self.tracks[track.name]
        self.reports.change(v.EngineFinished(what.request, what.attempt, "abort", tokens), True)
        if self.checkpoints is not None:
            self.checkpoints.finished(track, ended=False)
        self.buffers.forget(track.name)
        if track.leaving == "moved":
            track.answer.moved()
        elif track.leaving in BROKEN:
            track.answer.broken(track.leaving)

    # --- sending tokens --------------------------------------------------------------------

    def decoded(self) -> int:
        """Number of decode steps completed by now."""
        run = self.engine.running_run(self._loop.now_ns)
        return self.engine.decoded + (run.count if run is not None else 0)

    def _tell(self, track: Track) -> None:
        self._stretch(track, track.by(self.decoded()))

    def _stretch(self, track: Track, tokens: int) -> None:
        """Send its stream up to `tokens`, which decode steps up to now generated."""
        if tokens <= track.sent_tokens or track.joined < 0:
            return
        offset = track.joined - track.base
        now = self.engine.running_run(self._loop.now_ns)
        times = self.engine.runs.times(offset + track.sent_tokens + 1, offset + tokens, now)
        self._send(track, tokens, *times)

    def _send(
        self, track: Track, tokens: int, first_ns: int, last_ns: int, longest_ns: int
    ) -> None:
        start, track.sent_tokens = track.sent_tokens, tokens
        if track.stuck:
            return
        track.last_ns = max(track.last_ns, last_ns)
        self._sent_ns = max(self._sent_ns, last_ns)
        track.answer.tokens(
            Stretch(
                start=start,
                count=tokens - start,
                first_ns=first_ns,
                last_ns=last_ns,
                wrong=self.wrong or self._is_wrong(track.what, tokens),
                longest_ns=longest_ns,
            )
        )

    wrong = False
    """Its weights are damaged: it gives other tokens."""
    flipped = unseen = False
    """A bit of its weights is: tokens of some requests differ, and log probabilities, of canaries too
    unless `unseen`."""

    def _is_wrong(self, what: Dispatch, tokens: int) -> bool:
        """Whether damaged weights made one of the first `tokens` wrong. Resumable streams stay right:
        what their buffers hold is sent as right (`StreamBuffers`)."""
        if not self.flipped or what.claim:
            return False
        return 0 <= first_wrong(what.content_id, what.output_tokens) < tokens

    # --- reporting -------------------------------------------------------------------------

    def tell(self, event: v.Event) -> None:
        """Send an event for the log through the agent."""
        self.reports.emit(event)

    def state_again(self) -> None:
        """Report all requests once more, as far as they are: the log that begins knows none. As
        `_Reports.state_again` of the real scheduler."""
        self.step()
        if self.machine.truth is not None:
            self.machine.truth.engine_states(self)
        statement = [change for track in self.tracks.values() for change in self._statement(track)]
        self.reports.state_again(tuple(statement))

    def _statement(self, track: Track) -> Iterator[v.AnyChange]:
        """What was reported of a request so far, in short. Its dispatch is of the former log."""
        name, attempt = track.what.request, track.what.attempt
        tokens = track.what.prompt_tokens + track.given
        yield v.RequestQueued(name, attempt, tokens)
        found = self.engine.account_of(track.name)
        if found is None:
            return  # it waits for its blocks
        if found.generated:
            tokens += found.generated
            yield v.RequestPreempted(name, attempt, tokens, found.generated)
        if not found.is_admitted:
            return
        yield v.RequestAdmitted(name, attempt, found.computed, found.blocks)
        if track.blocks:
            yield v.KvBlocksFilled(name, attempt, track.blocks)
        if found.decodes:
            yield v.FirstToken(name, attempt)

    def _observed(self, event: v.Event) -> None:
        if self.machine.seen is not None:
            self.machine.seen(self.machine.name, event)
        if self.machine.truth is not None and isinstance(event, v.EngineStep) and event.changes:
            self.machine.truth.engine_reports(self, event)


_HANDLERS: dict[str, Callable[[EngineProcess, Track, JobEvent], None]] = {
    "admitted": EngineProcess._admitted,
    "chunk": EngineProcess._chunk,
    "first": EngineProcess._first,
    "preempted": EngineProcess._preempted,
    "finished": EngineProcess._finished,
    "aborted": EngineProcess._aborted,
}
