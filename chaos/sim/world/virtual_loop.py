"""An asyncio event loop in virtual time, with processes that can be killed and stopped.

The loop never sleeps: if no process can run, time advances to the next timer. Code of the control
plane runs on it unchanged. Each callback belongs to the `Process` in whose context it was made, as
asyncio passes contexts on. Callbacks of a killed process never run again (nor do `finally` clauses,
as after kill -9); those of a stopped one wait until it continues.

`patched` replaces the standard library's clocks, process ids and sources of randomness by the
loop's, so a run is a function of its seed.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import time
from asyncio.base_events import BaseEventLoop
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from typing import Any, TypeVar
from unittest import mock

Result = TypeVar("Result")

_PROCESS: ContextVar[Process | None] = ContextVar("sim_process", default=None)
EPOCH_S = 1_700_000_000
"""Wall clocks begin here (Unix time)."""
NS = 1_000_000_000
MOST_CLAUSES = 100


class Stuck(RuntimeError):
    """No process can run and no timer is set: the run is deadlocked."""


class Late(RuntimeError):
    """The run passed its limit of virtual time."""


class Process:
    """One process of the simulated fleet. `clock_s`: seconds by which its wall clock is ahead."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.pid = loop.next_pid()
        self.alive = True
        self.stopped = self.halted = self.paused = False
        self.clock_s = 0.0
        self.at_death: list[Callable[[], None]] = []
        """Called when it is killed: actions of its kernel, not of the process."""
        self.tasks: set[asyncio.Task[Any]] = set()
        self._loop = loop
        self._parked: list[asyncio.Handle] = []
        self.own_context = copy_context()
        """Context for callbacks of the loop, one of which runs at a time; nothing is set in it."""
        self.own_context.run(_PROCESS.set, self)

    @property
    def context(self) -> Context:
        """A context of this process, for code that enters it within a callback."""
        return self.own_context.copy()

    def spawn(self, work: Coroutine[Any, Any, Result], name: str = "") -> asyncio.Task[Result]:
        """Run `work` as a task of this process."""
        task = self._loop.create_task(work, name=name or self.name, context=self.context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def call_soon(self, work: Callable[..., object], *args: Any) -> asyncio.Handle:
        """Run `work` in this process, at once."""
        return self._loop.call_soon(work, *args, context=self.own_context)

    def call_at(
        self, when_s: float, work: Callable[..., object], *args: Any
    ) -> asyncio.TimerHandle:
        """Run `work` in this process at a time of the loop, seconds."""
        return self._loop.call_at(when_s, work, *args, context=self.own_context)

    def kill(self) -> None:
        """End it like SIGKILL: none of its callbacks ever runs again."""
        if not self.alive:
            return
        self.alive = False
        self._parked.clear()
        for task in self.tasks:
            # Their results stay unread: suppress warnings about unretrieved exceptions and pending tasks.
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._loop.bury(self.tasks)
        self.tasks = set()
        at_death, self.at_death = self.at_death, []
        for tell in at_death:
            self._loop.root.copy().run(tell)  # its killer may be dead by then

    def stop(self) -> None:
        """SIGSTOP: due callbacks wait until `go_on`."""
        self.stopped = self.halted = True

    def go_on(self) -> None:
        """SIGCONT."""
        self.halted = False
        self._release()

    def pause(self) -> None:
        """It has used up its share of a core: like `stop`, until `resume`."""
        self.stopped = self.paused = True

    def resume(self) -> None:
        """It may use the core again, unless it is stopped."""
        self.paused = False
        self._release()

    def _release(self) -> None:
        self.stopped = self.halted or self.paused
        if self.stopped:
            return
        parked, self._parked = self._parked, []
        if self.alive:
            self._loop._ready.extend(parked)

    def park(self, handle: asyncio.Handle) -> None:
        self._parked.append(handle)


def current() -> Process | None:
    """The process whose callback runs now."""
    return _PROCESS.get()


def _let_go(task: asyncio.Task[Any]) -> None:
    """End a task's coroutine; ignore the effects of its `finally` clauses."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    work: Any = task.get_coro()
    for _ in range(MOST_CLAUSES):
        if work.cr_frame is None:
            return
        with suppress(Exception, asyncio.CancelledError, BaseExceptionGroup):
            work.close()


class _Numbered:
    """Objects whose sets have the same order in every run."""

    __slots__ = ()
    _number: int

    def __hash__(self) -> int:
        return self._number


class _Task(_Numbered, asyncio.Task):
    def __new__(cls, *args: Any, loop: VirtualLoop, **how: Any) -> _Task:
        self = super().__new__(cls)
        self._number = loop.next_number()
        return self


class _Future(_Numbered, asyncio.Future):
    def __init__(self, loop: VirtualLoop) -> None:
        self._number = loop.next_number()
        super().__init__(loop=loop)


class _Call(asyncio.TimerHandle):
    """A handle that costs little to make and to cancel: most are never run."""

    __slots__ = ()
    _source_traceback = None

    def __init__(
        self, when: float, callback: Callable[..., object], args: Any, context: Context | None
    ) -> None:
        self._when = when
        self._callback = callback
        self._args = args
        self._context = context if context is not None else copy_context()
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]


class VirtualLoop(BaseEventLoop):
    """See the module. No sockets, no threads, no subprocesses."""

    # Attributes of BaseEventLoop that its stubs lack.
    _ready: deque[Any]
    _closed: bool
    _stopping: bool

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.until_s = float("inf")
        self._now_s = 0.0
        self._pids = 1000
        self.connector: Callable[[Any, str, int], Coroutine[Any, Any, Any]] | None = None
        """Makes connections; see `relume.chaos.sim.world.http_transport`."""
        self.stand_ins: dict[str, Callable[[], AbstractContextManager[None]]] = {}
        """Further replacements while it runs, by name."""
        self._buried: list[set[asyncio.Task[Any]]] = []
        self._numbers = 0
        self._order = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.set_exception_handler(self._failed)
        self.set_task_factory(lambda loop, work, **how: _Task(work, loop=loop, **how))
        self.root = copy_context()
        """A context of no process."""
        self.failures: list[BaseException] = []
        """Unhandled exceptions; `run` raises the first."""

    get_debug = staticmethod(bool)  # every future calls it: False, without a Python function

    def time(self) -> float:
        return self._now_s

    @property
    def now_ns(self) -> int:
        """Virtual time in nanoseconds."""
        return round(self._now_s * NS)

    def next_number(self) -> int:
        """A number for a task or future."""
        self._numbers += 1
        return self._numbers

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def next_pid(self) -> int:
        """A unique process id."""
        self._pids += 1
        return self._pids

    def process(self, name: str) -> Process:
        """A new process."""
        return Process(self, name)

    def bury(self, tasks: set[asyncio.Task[Any]]) -> None:
        """Hold references to tasks of killed processes: a released coroutine would run its
        `finally` clauses."""
        self._buried.append(tasks)

    def close(self) -> None:
        """Release all tasks, also live ones, without warnings."""
        if self.is_closed():
            return
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            left = [t for tasks in self._buried for t in tasks]
            for task in (*asyncio.all_tasks(self), *left):
                _let_go(task)
            super().close()
            self._buried.clear()
            self._ready.clear()
            self._timers.clear()
            gc.collect()
        finally:
            sys.unraisablehook = hook

    def run(self, main: Coroutine[Any, Any, Result], until_s: float = float("inf")) -> Result:
        """Run `main` to its end, with clocks and randomness patched.

        Raises Stuck, Late (past `until_s` of virtual time), what `main` raises, and the first
        unhandled exception of a callback.
        """
        self.until_s = until_s
        with self.patched():
            result = self.run_until_complete(main)
        if self.failures:
            raise self.failures[0]
        return result

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Replaces clocks, process ids and randomness by the loop's."""

        def wall() -> float:
            process = _PROCESS.get()
            return EPOCH_S + self._now_s + (process.clock_s if process is not None else 0.0)

        def pid() -> int:
            process = _PROCESS.get()
            return process.pid if process is not None else 1000

        def real_bits(count: int) -> int:
            return self.random.getrandbits(count)

        state = random.getstate()
        random.seed(self.random.random())
        stand_ins = ExitStack()
        patches: tuple[tuple[Any, str, Any], ...] = (
            (time, "time", wall),
            (time, "time_ns", lambda: round(wall() * NS)),
            (time, "monotonic", self.time),
            (time, "monotonic_ns", lambda: self.now_ns),
            (time, "perf_counter", self.time),
            (time, "perf_counter_ns", lambda: self.now_ns),
            (os, "getpid", pid),
            (os, "urandom", self.random.randbytes),
            (random.SystemRandom, "getrandbits", lambda _, count: real_bits(count)),
        )
        try:
            with mock.patch.multiple(time, **{n: f for m, n, f in patches if m is time}):
                with mock.patch.multiple(os, **{n: f for m, n, f in patches if m is os}):
                    with mock.patch.object(*patches[-1]), stand_ins:
                        for name in sorted(self.stand_ins):
                            stand_ins.enter_context(self.stand_ins[name]())
                        yield
        finally:
            random.setstate(state)

    def _failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failures.append(error or RuntimeError(str(context.get("message"))))

    # --- hooks of BaseEventLoop -----------------------------------------------------------

    def call_at(  # type: ignore[override]  # the stubs tie arguments to callbacks
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = _Call(when, callback, args, context)
        self._order = order = self._order + 1
        heappush(self._timers, (when, order, handle))
        return handle

    def call_later(  # type: ignore[override]  # the stubs tie arguments to callbacks
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_soon(  # type: ignore[override]  # the stubs tie arguments to callbacks
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle = _Call(self._now_s, callback, args, context)
        self._ready.append(handle)
        return handle

    def _run_once(self) -> None:
        """Run all callbacks until the loop is stopped."""
        ready, timers, failures, pop = self._ready, self._timers, self.failures, heappop
        while not self._stopping:
            if failures:
                raise failures[0]
            while timers and timers[0][2]._cancelled:
                pop(timers)
            now = self._now_s
            if not ready:
                if not timers:
                    raise Stuck(f"at {now:.6f} s no process can run any more")
                if timers[0][0] > now:
                    now = self._now_s = timers[0][0]
                if now > self.until_s:
                    raise Late(f"not over after {self.until_s} s of virtual time")
            while timers and timers[0][0] <= now:
                due = pop(timers)[2]
                if not due._cancelled:
                    ready.append(due)
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle._cancelled:
                    continue
                context = handle._context
                process = context.get(_PROCESS)
                if process is not None and (process.stopped or not process.alive):
                    if process.alive:
                        process.park(handle)
                    continue
                try:
                    context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    failures.append(error)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # they leave the heap when they are due

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def call_soon_threadsafe(  # type: ignore[override]  # the stubs tie arguments to callbacks
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]  # the stubs tie arguments to callbacks
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        """Run it at once, here: there are no threads."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    async def create_connection(  # type: ignore[override]  # all that its users pass
        self, factory: Any, host: Any = None, port: Any = None
    ) -> Any:
        """Connect over the simulated network."""
        if self.connector is None:
            raise ConnectionRefusedError(f"there is no network: {host}:{port}")
        return await self.connector(factory, host, port)

    async def shutdown_default_executor(self, *_: Any) -> None:
        pass
