"""vLLM's scheduler, reporting what changes the load, as it changes.

One `EngineStep` an engine step carries that step's changes. Arrivals, admissions and
preemptions do not wait for the end of the step, which a long prefill can delay by
seconds: they leave at once in a record of `duration_us` 0. Given to vLLM by
`--scheduler-cls relume.engine_shim.engine.reporting_scheduler.relume_scheduler`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from relume.engine_shim import identity
from relume.engine_shim.engine import plugin
from relume.engine_shim.engine.step_estimate import StepEstimate
from relume.engine_shim.engine.step_waits import StepWaits
from relume.engine_shim.engine.vllm_private import prefix_cache, prefix_marks, resume_state
from relume.engine_shim.generation import IDENTITY_KEY, reported
from relume.events.failpoints import failpoint_client
from relume.events.failpoints.points import Failpoint
from relume.events.log import codec
from relume.events.vocabulary import (
    AnyChange,
    EngineFinished,
    EngineStep,
    FirstToken,
    KvBlocksFilled,
    PrefillChunkDone,
    RequestAdmitted,
    RequestPreempted,
    RequestQueued,
)
from relume.events.wire.reports import STATED_AT_ONCE, frame, with_lost


def relume_scheduler(*, vllm_config: Any, **options: Any) -> Scheduler:
    """Makes the reporting form of the scheduler that vLLM would use."""
    plugin.register("core")
    resume_state.patch_runner()
    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return _reporting(base)(vllm_config=vllm_config, **options)


class _Track:
    """What has been reported of one request the scheduler holds; `left` prompt tokens of it are
    in no step yet."""

    __slots__ = ("attempt", "blocks", "delivered", "first_token", "left", "name", "target")

    def __init__(self, name: str, attempt: int, delivered: int, left: int) -> None:
        self.name = name
        self.attempt = attempt
        self.delivered = delivered
        self.left = left
        self.target = 0
        self.blocks = 0
        self.first_token = False


class _StepInFlight:
    """Statistics of a scheduled step until its outputs are there; `joining` requests with `context`
    tokens decode after it. `gap_ns`: see `EngineStep.gap_us`. `unreported`: prompt tokens of requests
    that are not reported, of the self-test for example."""

    __slots__ = (
        "batch",
        "began_ns",
        "changes",
        "gap_ns",
        "joining",
        "joining_context",
        "number",
        "prefill_tokens",
        "reported",
        "sum_context",
        "unreported",
    )

    def __init__(self, number: int, began_ns: int, gap_ns: int) -> None:
        self.number = number
        self.began_ns = began_ns
        self.gap_ns = gap_ns
        self.batch = 0
        self.sum_context = 0
        self.prefill_tokens = 0
        self.joining = 0
        self.joining_context = 0
        self.reported = False
        self.unreported = 0
        self.changes: list[AnyChange] = []

    @property
    def prompt_tokens(self) -> int:
        """All that it computes."""
        return self.prefill_tokens + self.unreported


class _Reports:
    """The scheduler's side of the report socket. One thread: the engine core's."""

    def __init__(self) -> None:
        self._incarnation = identity.from_environment().incarnation
        self._reporter = plugin.reporter()
        self._progress = plugin.progress()
        self._resets = self._progress.prefix_resets()
        self._statements = self._progress.statements()
        self._tracks: dict[str, _Track] = {}
        self._names: dict[tuple[str, int], int] = {}
        self._in_flight: deque[_StepInFlight] = deque()
        self._ended_ns = 0
        self._waits = StepWaits(self._progress)
        self._waits_since_ns = 0
        """End of the last step, if requests have waited for the next one since; else 0."""
        self._uncomputed = self._decoding = self._context = self._arrived = 0
        self._kv_reported = 0
        self._prefixes: prefix_marks.PrefixReport | None = None
        self.changes: list[AnyChange] = []
        self.steps = 0
        self.turns = 0
        self._expected = StepEstimate()

    def watch_prefixes(self, scheduler: Scheduler) -> None:
        """From here on it also reports what its prefix cache gains and loses."""
        if self._reporter is not None:
            self._prefixes = prefix_marks.of_scheduler(
                scheduler, self._incarnation, self._reporter.send
            )

    def queued(self, request: Request) -> None:
        params = request.sampling_params
        mark = (params.extra_args or {}).get(IDENTITY_KEY) if params is not None else None
        # Stock traffic loads the engine as well; it is known by vLLM's own id.
        name, attempt, dispatch = request.request_id[:64], 0, b""
        if mark:
            name, attempt, dispatch = mark["r"], mark["a"], mark["d"]
            if not reported(name):
                return
            # Children of n>1 and prompts of one body share an identity.
            count = self._names.get((name, attempt), 0)
            self._names[name, attempt] = count + 1
            if count:
                name = f"{name}#{count}"
        tokens = request.num_tokens
        self._tracks[request.request_id] = _Track(name, attempt, request.num_output_tokens, tokens)
        self._uncomputed += tokens
        self._arrived += tokens
        self.changes.append(RequestQueued(name, attempt, tokens, dispatch))

    def admitted(self, request: Request, cached_tokens: int, blocks: int) -> None:
        track = self._tracks.get(request.request_id)
        if track is None:
            return
        track.target = request.num_tokens
        track.blocks = 0
        left = track.target - cached_tokens
        if left <= 1 and track.first_token:  # nothing of what it lost is computed again
            left = 0
            self._decoding += 1
            self._context += track.target - 1
        self._owe(track, left)
        self.changes.append(RequestAdmitted(track.name, track.attempt, cached_tokens, blocks))

    def preempted(self, request: Request) -> None:
        if track := self._tracks.get(request.request_id):
            if track.first_token and not track.left:
                self._leaves_batch(request.num_tokens - 1)
            self._owe(track, request.num_tokens)
            tokens, generated = request.num_tokens, request.num_output_tokens - track.delivered
            self.changes.append(RequestPreempted(track.name, track.attempt, tokens, generated))

    def finished(self, request: Request) -> None:
        track = self._tracks.pop(request.request_id, None)
        if track is None:
            return
        root = (track.name.partition("#")[0], track.attempt)
        if (left := self._names.get(root, 1) - 1) > 0:
            self._names[root] = left
        else:
            self._names.pop(root, None)
        if track.first_token and not track.left:
            self._leaves_batch(request.num_computed_tokens)
        self._owe(track, 0)
        reason = request.get_finished_reason()
        tokens = request.num_output_tokens - track.delivered
        self.changes.append(EngineFinished(track.name, track.attempt, str(reason), tokens))

    def _owe(self, track: _Track, left: int) -> None:
        self._uncomputed += left - track.left
        track.left = left

    def _leaves_batch(self, context: int) -> None:
        self._decoding -= 1
        self._context -= context

    def begin(self, began_ns: int) -> _StepInFlight:
        self.steps += 1
        since_ns, self._waits_since_ns = self._waits_since_ns, 0
        if not since_ns and not self._in_flight:
            self._waits.lap_us(0)  # it was idle
        step = _StepInFlight(self.steps, began_ns, began_ns - since_ns if since_ns else 0)
        self._in_flight.append(step)
        return step

    def no_step(self) -> None:
        """The scheduler found nothing to compute: its requests wait for something else, for example
        for KV blocks from another host. That is no gap."""
        self._waits_since_ns = 0

    def computed(self, step: _StepInFlight, request: Request, tokens: int, block: int) -> None:
        """`tokens` of `request` are computed in `step` (num_computed_tokens counts them)."""
        track = self._tracks.get(request.request_id)
        after = request.num_computed_tokens
        if track is None:
            if after - tokens < request.num_prompt_tokens - 1:
                step.unreported += tokens
            return
        step.reported = True
        if after - tokens < track.target - 1 or not track.first_token:
            step.prefill_tokens += tokens
            step.changes.append(PrefillChunkDone(track.name, track.attempt, tokens, after))
            track.left = max(track.target - after, 0)
            if not track.left:
                step.joining += 1
                step.joining_context += after
                if not track.first_token:
                    track.first_token = True
                    step.changes.append(FirstToken(track.name, track.attempt))
        else:
            step.batch += 1
            step.sum_context += after
        if (full := after // block) > track.blocks:
            track.blocks = full
            step.changes.append(KvBlocksFilled(track.name, track.attempt, full))

    def end(self, running: int, waiting: int, kv_used: int) -> None:
        """The oldest step in flight is done: its record goes out."""
        step = self._in_flight.popleft()
        step.changes += self.changes
        self.changes = []
        if self._prefixes is not None:
            self._prefixes.step(step.prefill_tokens > 0, running + waiting)
        # With async scheduling a step is scheduled while the one before it runs.
        began_ns = max(step.began_ns, self._ended_ns)
        self._ended_ns = time.monotonic_ns()
        duration_us = max(1, (self._ended_ns - began_ns) // 1000)
        waited_us = self._waits.lap_us(duration_us + step.gap_ns // 1000)
        self._expected.learn(duration_us, step.prompt_tokens)
        if not self._in_flight:
            self._waits_since_ns = self._ended_ns
        self._uncomputed -= step.prefill_tokens
        self._decoding += step.joining
        self._context += step.joining_context + step.batch
        if step.reported or step.changes:
            self._send(
                EngineStep(
                    incarnation=self._incarnation,
                    step=step.number,
                    duration_us=duration_us,
                    batch=step.batch,
                    sum_context=step.sum_context,
                    prefill_tokens=step.prefill_tokens,
                    waiting=waiting,
                    kv_used=kv_used,
                    changes=tuple(step.changes),
                    gap_us=step.gap_ns // 1000,
                    wait_us=waited_us,
                )
            )
        elif not running and not waiting and kv_used != self._kv_reported:
            self._tell(waiting, kv_used)  # unreported requests had blocks when it was told last
        self.show(running, waiting, kv_used)

    def pass_prefills(self, requests: Iterable[Request]) -> None:
        """Failpoints of a step that computed tokens of `requests`, before any of it is reported."""
        for request in requests:
            track = self._tracks.get(request.request_id)
            if track and (track.left or request.num_output_tokens == track.delivered):
                point, tokens = Failpoint.ENGINE_PREFILL, request.num_computed_tokens
                failpoint_client.reach(point, request=track.name, tokens=tokens)

    def pass_decodes(self, requests: Iterable[Request]) -> None:
        """The same after it was reported, before its outputs leave."""
        for request in requests:
            track = self._tracks.get(request.request_id)
            if track and not track.left and request.num_output_tokens > track.delivered:
                point, tokens = Failpoint.ENGINE_DECODE, request.num_output_tokens
                failpoint_client.reach(point, request=track.name, tokens=tokens)

    def flush(self, waiting: int, kv_used: int) -> None:
        """Changes so far go out at once, between steps."""
        if self.changes:
            self._tell(waiting, kv_used)

    def tell_loss(self, waiting: int, kv_used: int) -> None:
        """The engine is idle: if records were dropped, no step will say so."""
        if self._reporter is not None and self._reporter.has_lost:
            self._tell(waiting, kv_used)

    def _tell(self, waiting: int, kv_used: int) -> None:
        changes, self.changes = tuple(self.changes), []
        self._send(
            EngineStep(
                incarnation=self._incarnation,
                step=self.steps,
                duration_us=0,
                batch=0,
                sum_context=0,
                prefill_tokens=0,
                waiting=waiting,
                kv_used=kv_used,
                changes=changes,
            )
        )

    def show(self, running: int, waiting: int, kv_used: int) -> None:
        """Updates the page `/relume/state` reads."""
        if not running and not waiting:
            self._waits_since_ns = 0
        began_ns, expected_us = 0, self._expected.of(0)
        if self._in_flight:
            step = self._in_flight[0]
            began_ns, expected_us = step.began_ns, self._expected.of(step.prompt_tokens)
        done = self.steps - len(self._in_flight)
        self._progress.write(
            steps=done, began_ns=began_ns, running=running, waiting=waiting, kv_used=kv_used,
            uncomputed=self._uncomputed, decoding=self._decoding, context=self._context, arrived=self._arrived,
            expected_us=expected_us, turns=self.turns,
        )  # fmt: skip

    def limited(self, requests: int) -> int:
        """The part of this number of requests that may run at once."""
        percent = self._progress.batch_percent()
        return requests if percent == 100 else max(requests * percent // 100, 1)

    def is_reset_due(self) -> bool:
        """Whether the agent has said once more that the prefix cache is to be emptied."""
        before, self._resets = self._resets, self._progress.prefix_resets()
        return self._resets != before

    def is_statement_due(self) -> bool:
        """Whether the agent has requested one more statement of all requests."""
        before, self._statements = self._statements, self._progress.statements()
        return self._statements != before

    def state_again(self, requests: Mapping[str, Request], waiting: int, kv_used: int) -> None:
        """Report each request as far as it is: the log that begins knows none. Their dispatches are
        decisions of the former log, and not repeated."""
        self.flush(waiting, kv_used)
        for req_id, track in self._tracks.items():
            if req_id in requests:
                self.changes += _statement_of(track, requests[req_id])
            if len(self.changes) >= STATED_AT_ONCE:
                self.flush(waiting, kv_used)
        self.flush(waiting, kv_used)

    @property
    def stepping(self) -> bool:
        return bool(self._in_flight)

    def _send(self, step: EngineStep) -> None:
        self._kv_reported = step.kv_used
        if self._reporter is None:
            return
        lost = self._reporter.take_lost()
        self._reporter.send(frame(codec.encode(with_lost(step, lost))), lost)


def _statement_of(track: _Track, request: Request) -> Iterator[AnyChange]:
    """What was reported of a request so far, in short."""
    name, attempt = track.name, track.attempt
    generated = request.num_output_tokens - track.delivered
    tokens = request.num_tokens - generated
    yield RequestQueued(name, attempt, tokens)
    if track.first_token and track.left:
        tokens = request.num_tokens
        yield RequestPreempted(name, attempt, tokens, generated)
    if track.left == tokens:
        return  # it waits
    yield RequestAdmitted(name, attempt, tokens - track.left, track.blocks)
    if track.blocks:
        yield KvBlocksFilled(name, attempt, track.blocks)
    if track.first_token and not track.left:
        yield FirstToken(name, attempt)


@cache
def _reporting(base: type[Scheduler]) -> type[Scheduler]:
    class RelumeScheduler(base):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._reports = _Reports()
            self._most_active: int = self.max_num_active_reqs
            self._reports.watch_prefixes(self)

        def add_request(self, request: Request) -> None:
            known = request.request_id in self.requests
            if not known:
                resume_state.take_up(request)
            super().add_request(request)
            if not known:
                self._reports.queued(request)
                self._reports.flush(*self._pressure())
                self._show()

        def schedule(self, *args: Any, **options: Any) -> Any:
            reports = self._reports
            if failpoint_client.active:
                failpoint_client.reach(Failpoint.ENGINE_STEP, step=reports.steps + 1)
            began_ns = time.monotonic_ns()
            self.max_num_active_reqs = reports.limited(self._most_active)
            if reports.is_reset_due():
                prefix_cache.empty(self)
            if reports.is_statement_due():
                reports.state_again(self.requests, *self._pressure())
            output = super().schedule(*args, **options)
            reports.turns += 1
            for new in output.scheduled_new_reqs:
                self._report_admission(new.req_id, output.num_scheduled_tokens[new.req_id])
            for req_id in output.scheduled_cached_reqs.resumed_req_ids:
                self._report_admission(req_id, output.num_scheduled_tokens[req_id])
            reports.flush(*self._pressure())
            if output.total_num_scheduled_tokens:
                step = reports.begin(began_ns)
                for req_id, tokens in output.num_scheduled_tokens.items():
                    reports.computed(step, self.requests[req_id], tokens, self.block_size)
            else:
                reports.no_step()
                reports.tell_loss(*self._pressure())
            self._show()
            return output

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            if failpoint_client.active:
                self._reports.pass_prefills(self._scheduled(scheduler_output))
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            if scheduler_output.total_num_scheduled_tokens:
                running, waiting = self.get_request_counts()
                self._reports.end(running, waiting, self._kv_used())
            if failpoint_client.active:
                self._reports.pass_decodes(self._scheduled(scheduler_output))
            return outputs

        def _scheduled(self, output: Any) -> list[Request]:
            """The requests of a step that have not left meanwhile."""
            names = output.num_scheduled_tokens
            return [self.requests[name] for name in names if name in self.requests]

        def finish_requests(self, *args: Any, **options: Any) -> Any:
            finished = super().finish_requests(*args, **options)
            if not self._reports.stepping:
                self._reports.flush(*self._pressure())
                self._show()
            return finished

        def _handle_blocked_waiting_request(self, request: Request) -> bool:
            waited = resume_state.waits_for_grammar(request)
            if not super()._handle_blocked_waiting_request(request):
                return False
            return not waited or resume_state.advance_grammar(self, request)

        def _preempt_request(self, request: Request, *args: Any, **options: Any) -> None:
            super()._preempt_request(request, *args, **options)
            self._reports.preempted(request)

        def _free_request(self, request: Request, *args: Any, **options: Any) -> Any:
            result = super()._free_request(request, *args, **options)
            self._reports.finished(request)
            return result

        def _report_admission(self, req_id: str, scheduled: int) -> None:
            request = self.requests[req_id]
            cached = request.num_computed_tokens - scheduled
            blocks = len(self.kv_cache_manager.get_block_ids(req_id)[0])
            self._reports.admitted(request, cached, blocks)

        def _kv_used(self) -> int:
            pool = self.kv_cache_manager.block_pool
            # One block is vLLM's placeholder and never free.
            return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

        def _pressure(self) -> tuple[int, int]:
            return self.get_request_counts()[1], self._kv_used()

        def _show(self) -> None:
            running, waiting = self.get_request_counts()
            self._reports.show(running, waiting, self._kv_used())

    RelumeScheduler.__name__ = RelumeScheduler.__qualname__ = f"Relume{base.__name__}"
    return RelumeScheduler
