"""What one simulated engine reports of its steps.

The reports are those of the real scheduler (`engine_shim/engine/reporting_scheduler.py`), merged
between changes of a request's state as the agent merges them when it sheds detail. So the cost of a
run of decode steps does not depend on its length. An engine that pauses before its steps makes few:
it reports each, as a real one does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import structs

from relume.chaos.sim.engine import prefix_model as prefixes
from relume.chaos.sim.engine.engine_model import SimEngine, Step
from relume.chaos.sim.world.virtual_loop import NS, Process
from relume.events import vocabulary as v
from relume.events.log.codec import encode

SAMPLE_NS = 5 * NS
"""Interval at which two steps are reported one by one, for readers that estimate step times."""

PULSE_NS = NS
"""Maximum interval between reports of an engine with work. A real one reports each step."""

PROBED_S = 1.0
"""Time after which an idle engine is probed by its agent, and reports what was dropped."""


class ReportedEngine(Protocol):
    """The engine that reports: its model, its process, and what leads it to the present."""

    engine: SimEngine
    process: Process
    incarnation: int

    def step(self) -> None:
        """Advance the engine to now."""
        ...


class StepReports:
    """Reports of one engine. `send` passes an encoded event to the agent (False: it was dropped),
    `observe` sees each event before that, and `now_ns` is the loop's time."""

    def __init__(
        self,
        of: ReportedEngine,
        send: Callable[[bytes], bool],
        observe: Callable[[v.Event], None],
        now_ns: Callable[[], int],
    ) -> None:
        self._of = of
        self._send = send
        self._observe = observe
        self._now_ns = now_ns
        self._changes: list[v.AnyChange] = []
        self._urgent = False
        self._prompt = 0
        self._longest_us = 0
        self._reported_steps = 0
        self._sampled_ns = -SAMPLE_NS
        self._pulse_ns = 0
        self._pulsing = False
        self._dropped = 0
        self._anew = True  # cached segments must be reported from the beginning

    def change(self, change: v.AnyChange, urgent: bool = False) -> None:
        """Report a change of a request's state with the next step; `urgent`: at the next `write`."""
        self._changes.append(change)
        self._urgent = self._urgent or urgent

    def chunk(self, tokens: int, took_ns: int) -> None:
        """Count prompt tokens that a step computed, and its duration."""
        self._prompt += tokens
        self._longest_us = max(self._longest_us, took_ns // 1000)

    def paused(self) -> None:
        """Report the last step, before which the engine paused, at the next `write`."""
        if self._of.engine.steps > self._reported_steps:
            self._urgent = True

    def write(self) -> None:
        """Send due reports: progress alone waits for the next change of a request's state."""
        if not self._urgent:
            return
        self.write_prefixes()
        engine, now = self._of.engine, self._now_ns()
        self._pulse_ns = now + PULSE_NS
        if not self._pulsing:
            self._pulse()
        self._urgent = False
        if engine.steps <= self._reported_steps:
            self._between_steps()
            return
        if now - self._sampled_ns >= SAMPLE_NS and engine.steps - self._reported_steps > 2:
            self._sample(now)
        self._steps(engine.steps, engine.last)

    def write_prefixes(self) -> None:
        """Report additions to and removals from the prefix cache."""
        kv = self._of.engine.kv
        if kv.moves is None or not (kv.moves or self._anew):
            return
        anew, size = self._anew, self._of.engine.config.block_tokens
        moves, kv.moves = kv.cached() if anew else kv.moves, []
        stored, removed = prefixes.changed(moves)
        event = v.PrefixBlocksChanged(
            incarnation=self._of.incarnation,
            stored=stored,
            removed=removed,
            reset=anew,
            block_tokens=size if anew else 0,
        )
        self._observe(event)
        self._anew = not self._send(encode(event))

    def state_again(self, statement: tuple[v.AnyChange, ...]) -> None:
        """Report all requests once more, in a log that knows none of them. What waited to be reported
        comes first."""
        self._urgent = self._urgent or bool(self._changes)
        self.write()
        if statement:
            self._pass_on(self._progress(statement))

    def emit(self, event: v.Event) -> None:
        """Send an event for the log. If the agent drops it, the next step says so."""
        self._observe(event)
        self._pass_on(event)

    def _pass_on(self, event: v.Event) -> None:
        if self._dropped and isinstance(event, v.EngineStep):
            event = structs.replace(event, lost=self._dropped)
            if self._send(encode(event)):
                self._dropped = 0
                return
        elif self._send(encode(event)):
            return
        if not self._dropped:
            self._after(PROBED_S, self._probed)
        self._dropped += 1

    def _probed(self) -> None:
        """The agent probes the engine: if it is idle, no step will say that records were dropped."""
        if self._dropped and not self._of.engine.running:
            self._between_steps()
        if self._dropped:
            self._after(PROBED_S, self._probed)

    def _after(self, seconds: float, work: Callable[[], None]) -> None:
        self._of.process.call_at(self._now_ns() / NS + seconds, work)

    def _between_steps(self) -> None:
        """Report changes since the last step, and what waits and is held now."""
        changes, self._changes = tuple(self._changes), []
        self.emit(self._progress(changes))

    def _progress(self, changes: tuple[v.AnyChange, ...]) -> v.EngineStep:
        """No step, but changes, and what waits and is held now."""
        return v.EngineStep(
            incarnation=self._of.incarnation,
            step=self._reported_steps,
            duration_us=0,
            batch=0,
            sum_context=0,
            prefill_tokens=0,
            waiting=len(self._of.engine.waiting),
            kv_used=self._of.engine.kv_used,
            changes=changes,
        )

    def _steps(self, steps: int, last: Step) -> None:
        """Report the steps since the last report."""
        engine = self._of.engine
        changes, self._changes, self._reported_steps = tuple(self._changes), [], steps
        took_us = max(last.took_ns // 1000, self._longest_us, 1)
        prompt, self._prompt, self._longest_us = self._prompt, 0, 0
        self.emit(
            v.EngineStep(
                incarnation=self._of.incarnation,
                step=steps,
                duration_us=took_us,
                batch=last.batch,
                sum_context=last.context,
                prefill_tokens=prompt,
                waiting=len(engine.waiting),
                kv_used=engine.kv_used,
                changes=changes,
                gap_us=last.gap_ns // 1000,
            )
        )

    def _pulse(self) -> None:
        """Report steps after an interval without a report, while there is work."""
        engine, now = self._of.engine, self._now_ns()
        self._pulsing = bool(engine.running)
        if not self._pulsing:
            return
        if now >= self._pulse_ns:
            self._pulse_ns = now + PULSE_NS
            self._of.step()
            steps, last = engine.under_way(now)
            if steps > self._reported_steps:
                self._steps(steps, last)
        self._of.process.call_at(self._pulse_ns / NS, self._pulse)

    def _sample(self, now: int) -> None:
        """Report two of the steps before the last one singly, if they only decoded."""
        engine, runs, behind = self._of.engine, self._of.engine.runs, 0
        if len(runs) > 1 and runs[-1].count == 1:
            behind = 1
        if not runs or runs[-1 - behind].count < 3:
            return
        run, last = runs[-1 - behind], engine.last
        if not run.more_ns and engine.cost.given > 1:
            return  # a step with prompts that gave several tokens
        self._sampled_ns = now
        for before in (2, 1):
            took = run.took_ns(run.before + run.count + behind - before)
            self.emit(
                v.EngineStep(
                    incarnation=self._of.incarnation,
                    step=engine.steps - before,
                    duration_us=max(took // 1000, 1),
                    batch=last.batch,
                    sum_context=last.context,
                    prefill_tokens=0,
                    waiting=len(engine.waiting),
                    kv_used=engine.kv_used,
                )
            )
