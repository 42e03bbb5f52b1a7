"""Judges runs in a separate process of low priority, while the next ones run."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Self

from msgspec import Struct

from relume.chaos.live import sets
from relume.chaos.outcome import Outcome
from relume.chaos.runner import pool
from relume.chaos.runner.artifacts import keep
from relume.chaos.runner.judge import judge
from relume.events.log.errors import RelumeError

NICE = 19


class JudgingResult(Struct, frozen=True):
    """`wrong`: reasons why the run did not pass; `took_s`: time spent on judging."""

    result: str
    wrong: tuple[str, ...]
    took_s: float


class Judging:
    """A context manager; its exit waits until the current run is judged."""

    def __enter__(self) -> Self:
        # A forked child would inherit the locks of this process's threads.
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _begin, (os.getpid(),))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    async def judge(self, run: Outcome, folder: Path | None, command: str) -> JudgingResult:
        """Judge a run; store it in `folder`, if given, with the `command` that repeats it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _judged, run, folder, command)


def _begin(parent: int) -> None:
    pool.begin(parent)
    os.nice(NICE)


def _judged(run: Outcome, folder: Path | None, command: str) -> JudgingResult:
    began = time.monotonic()
    try:
        verdict = judge(run)
    except RelumeError as error:
        return JudgingResult("failed", (f"cannot be judged: {error}",), time.monotonic() - began)
    if folder is not None:
        keep(folder, run, verdict, command)
    return JudgingResult(verdict.result, sets.wrong_of(run, verdict), time.monotonic() - began)
