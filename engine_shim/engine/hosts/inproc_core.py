"""EngineCore on a thread of the API process, behind vLLM's own client interface.

vLLM's AsyncLLM insists on an EngineCore in another process. For an engine that starts in
seconds and dies as one, `ThreadedCoreClient` runs the same core loop on a thread here:
requests go in through a queue, outputs come back with `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

logger = logging.getLogger(__name__)

TELL_TIMEOUT_S = 1.0
STOP_TIMEOUT_S = 5.0
IDLE_YIELD_S = 0.001
"""Pause after a step that ran no model but left work (a KV transfer), to free the GIL."""


def _forwarded(method: str) -> Callable[..., Awaitable[Any]]:
    """A method of vLLM's client that calls the core's method of that name, between two steps."""

    async def forward(client: ThreadedCoreClient, *args: Any, **kwargs: Any) -> Any:
        return await client._call(method, *args, **kwargs)

    return forward


class ThreadedCoreClient(EngineCoreClient):
    """Replaces `AsyncMPClient` when engine and HTTP server share a process."""

    def __init__(self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool):
        self._core = EngineCore(vllm_config, executor_class, log_stats)
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._inputs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self._informed = threading.Event()
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()

    def shutdown(self, timeout: float | None = None) -> None:
        """Breaks what still runs and stops the loop. The core itself is not torn down:
        the process is about to end. Returns at once when called a second time."""
        if self.resources.engine_dead:
            return
        self.resources.engine_dead = True
        self._inputs.put(None)
        self._deliver(EngineDeadError())
        if threading.get_ident() != self._loop_thread:
            # AsyncLLM cancels its output handler next; first it must have passed the
            # error on, or streams would wait for ever.
            self._informed.wait(TELL_TIMEOUT_S)
            self._thread.join(timeout or STOP_TIMEOUT_S)

    # --- the core's thread ---------------------------------------------------------

    def _run(self) -> None:
        try:
            self._step_until_informed()
        except Exception:  # thread edge: the loop must hear of it
            logger.exception("engine core failed")
            self.resources.engine_dead = True
            self._deliver(EngineDeadError())

    def _step_until_informed(self) -> None:
        core = self._core
        while self._take_inputs():
            outputs, executed = core.step_fn()
            core.post_step(executed)
            for part in (outputs or {}).values():
                if part.outputs or part.scheduler_stats:
                    self._deliver(part)
            if not executed and core.scheduler.has_requests():
                threading.Event().wait(IDLE_YIELD_S)

    def _take_inputs(self) -> bool:
        """Runs what is queued; waits while there is nothing to step. False: stop."""
        core = self._core
        while True:
            idle = not (core.scheduler.has_requests() or core.batch_queue)
            try:
                job = self._inputs.get(block=idle)
            except queue.Empty:
                return True
            if job is None:
                return False
            job()

    def _deliver(self, outputs: EngineCoreOutputs | Exception) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, outputs)

    # --- the client interface, on the event loop -----------------------------------

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await self._outputs.get()
        if isinstance(outputs, Exception):
            self._loop.call_soon(self._informed.set)
            raise outputs
        # A queue with items returns at once; let handlers run between two steps' outputs.
        await asyncio.sleep(0)
        return outputs

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        if self.resources.engine_dead:
            raise EngineDeadError()
        request.client_index = 0
        job = self._core.preprocess_add_request(request)
        self._inputs.put(lambda: self._core.add_request(*job))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids and not self.resources.engine_dead:
            # Both ways, as vLLM does: the first is seen inside a running step.
            self._core.aborts_queue.put(request_ids)
            self._inputs.put(lambda: self._core.abort_requests(request_ids))

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """`method` of the core, between two steps. Raises what it raises."""
        if self.resources.engine_dead:
            raise EngineDeadError()
        done: Future[Any] = Future()

        def call() -> None:
            try:
                done.set_result(getattr(self._core, method)(*args, **kwargs))
            except Exception as error:  # handed to the caller
                done.set_exception(error)

        self._inputs.put(call)
        return await asyncio.wrap_future(done)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        return await self._call(method, *args)

    get_supported_tasks_async = _forwarded("get_supported_tasks")
    pause_scheduler_async = _forwarded("pause_scheduler")
    resume_scheduler_async = _forwarded("resume_scheduler")
    is_scheduler_paused_async = _forwarded("is_scheduler_paused")
    profile_async = _forwarded("profile")
    reset_mm_cache_async = _forwarded("reset_mm_cache")
    reset_prefix_cache_async = _forwarded("reset_prefix_cache")
    reset_encoder_cache_async = _forwarded("reset_encoder_cache")
    sleep_async = _forwarded("sleep")
    wake_up_async = _forwarded("wake_up")
    is_sleeping_async = _forwarded("is_sleeping")
    add_lora_async = _forwarded("add_lora")
    remove_lora_async = _forwarded("remove_lora")
    list_loras_async = _forwarded("list_loras")
    pin_lora_async = _forwarded("pin_lora")
    collective_rpc_async = _forwarded("collective_rpc")
    compute_weight_checksums_async = _forwarded("compute_weight_checksums")
    set_weight_version_async = _forwarded("set_weight_version")
    get_weight_version_async = _forwarded("get_weight_version")

    def dp_engines_running(self) -> bool:
        return False
