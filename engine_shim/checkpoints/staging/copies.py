"""Copies between a rank's KV cache and host memory, ordered as a device orders them.

What runs in the background runs on one of three side streams, in the order in which it was
started there; events say when. The engine computes on its own stream: a side stream waits for the
work queued there so far (`computed`), and it waits for a side stream where it must not overtake
(`hold`). `cuda_copies` has the implementation for devices. The one here is for caches in host
memory: the engine's stream is the engine's thread, and a side stream is a thread or that one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection
from enum import Enum
from typing import Protocol

import torch


class Way(Enum):
    """The side streams: out of the cache, on to the host, and all the way back."""

    READ = "read"
    OUT = "out"
    BACK = "back"


class Event(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Waits until it is reached. Raises RuntimeError when something before it failed."""


class Copies(Protocol):
    """See the module. Raises RuntimeError, as torch does, where a device fails."""

    def staging(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that is copied to and from without the processor."""

    def beside(self, staging: torch.Tensor) -> torch.Tensor:
        """Memory of the same shape beside the cache; `staging` itself where that lies there."""

    def computed(self) -> Event:
        """An event after all work queued on the engine's stream so far; on the engine's thread."""

    def start(self, way: Way, work: Callable[[], None], after: Event | None = None) -> Event:
        """Queues `work` after `after` and after all that was started on this side stream; returns
        the event after it. Any thread."""

    def hold(self, event: Event) -> None:
        """The engine's stream continues only after `event`; on the engine's thread."""

    def close(self) -> None:
        """Waits for what was started, and lets go."""


class _Done:
    """An event of a thread."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._error: Exception | None = None

    def reach(self, error: Exception | None = None) -> None:
        self._error = error
        self._reached.set()

    def synchronize(self) -> None:
        self._reached.wait()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error


@torch.inference_mode()
def _do(work: Callable[[], None], after: Event | None, done: _Done) -> None:
    try:
        if after is not None:
            after.synchronize()
        work()
    except Exception as error:  # reported by the event
        done.reach(error)
    else:
        done.reach()


class _SideThread:
    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], None], Event | None, _Done] | None]
        self._work = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], None], after: Event | None) -> _Done:
        done = _Done()
        self._work.put((work, after, done))
        return done

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            _do(*item)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(5.0)


class HostCopies:
    """For a cache in host memory. What goes a way of `at_once` is done by the thread that starts it:
    the engine waits for reads anyway, and what is read is on the host already."""

    def __init__(self, at_once: Collection[Way] = (Way.READ, Way.OUT)) -> None:
        self._sides = {
            way: _SideThread(f"relume-kv-{way.value}") for way in Way if way not in at_once
        }

    def staging(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((rows, width), dtype=dtype)

    def beside(self, staging: torch.Tensor) -> torch.Tensor:
        return staging  # torch copies nothing from a view to the same view

    def computed(self) -> Event:
        done = _Done()
        done.reach()  # this thread has computed what it was given
        return done

    def start(self, way: Way, work: Callable[[], None], after: Event | None = None) -> Event:
        if (side := self._sides.get(way)) is not None:
            return side.start(work, after)
        done = _Done()
        _do(work, after, done)
        return done

    def hold(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # for the thread that waits for the copy
            event.synchronize()

    def close(self) -> None:
        for side in self._sides.values():
            side.close()
