"""Many runs in several processes: yields each result at its end, ends cleanly on Ctrl-C, and bounds
the time of each run.

A process that runs cases ignores Ctrl-C, limits the real time of each case, and ends when its
parent is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from types import FrameType
from typing import TypeVar

Given = TypeVar("Given")
Result = TypeVar("Result")

_AHEAD = 2
"""Number of cases submitted per process, so that none waits for the next."""
_PR_SET_PDEATHSIG = 1
ENDING = (signal.SIGINT, signal.SIGTERM)


class TooLong(KeyboardInterrupt):
    """A case exceeded its limit of real time. A KeyboardInterrupt, so that it ends the case wherever
    it is raised: asyncio keeps any other exception for the task that runs at that moment, and the
    case would go on without that task."""


class Crashed(RuntimeError):
    """A process that ran cases died; the case is unknown."""


def each(
    work: Callable[[Given], Result],
    given: Iterable[Given],
    jobs: int,
    stop: Callable[[], bool],
) -> Iterator[tuple[Given, Result]]:
    """`work` of every `given`, in the order in which they end; with one job, in this process.

    It begins no further case once `stop()` is true. Raises Crashed.
    """
    if jobs <= 1:
        for one in given:
            if stop():
                return
            yield one, work(one)
        return
    left = iter(given)
    pool = ProcessPoolExecutor(jobs, get_context("fork"), begin, (os.getpid(),))
    open_: dict[Future[Result], Given] = {}
    ended_in_order = False
    try:
        while True:
            while len(open_) < jobs * _AHEAD and not stop():
                try:
                    one = next(left)
                except StopIteration:
                    break
                with _uninterrupted():
                    open_[pool.submit(work, one)] = one
            if not open_:
                ended_in_order = True
                return
            ended, _ = wait(open_, return_when=FIRST_COMPLETED)
            for future in ended:
                yield open_.pop(future), future.result()
    except BrokenProcessPool:
        raise Crashed("a process that ran cases died (out of memory?)") from None
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        # Processes interrupted during their start wait for a thread that will never serve them.
        for process in () if ended_in_order else processes:
            with contextlib.suppress(OSError):
                process.kill()
        for process in processes:
            process.join()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of the body. Within the start of a process they would leave
    one that is in no list yet: nobody would end it, and the program would wait for it at its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin(parent: int) -> None:
    """Set up a process that works for `parent`: it ignores Ctrl-C and ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # it was started while they waited
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TooLong in the body after `seconds` of real time. In the main thread only."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TooLong(f"took more than {seconds:g} s of real time")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def error_line(error: BaseException) -> str:
    """An exception in one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
