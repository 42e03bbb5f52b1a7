"""Many runs in several processes: each result as it comes, clean on Ctrl-C, and no run that
never ends.

A process that runs cases ignores Ctrl-C, gives each case so much real time, and ends when the
one that asked for it is gone.
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
"""Cases handed out for each process, so that none waits for the next."""
_PR_SET_PDEATHSIG = 1


class TooLong(BaseException):
    """A case took more real time than it was given. No handler of exceptions on the way may
    keep it."""


class Crashed(RuntimeError):
    """A process that ran cases died; which case it was is unknown."""


def each(
    work: Callable[[Given], Result],
    given: Iterable[Given],
    jobs: int,
    stop: Callable[[], bool],
) -> Iterator[tuple[Given, Result]]:
    """`work` of every `given`, in the order in which they end; with one job, in this process.

    Nothing more is begun once `stop()` says so. Raises Crashed.
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
        # Interrupted while they start, they wait for a thread that will never serve them.
        for process in () if ended_in_order else processes:
            with contextlib.suppress(OSError):
                process.kill()
        for process in processes:
            process.join()


def begin(parent: int) -> None:
    """In a process that works for `parent`: it ignores Ctrl-C and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TooLong in the body after so much real time. In the main thread only."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TooLong(f"took more than {seconds:g} s of real time")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def told(error: BaseException) -> str:
    """An exception in one line, with the place it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
