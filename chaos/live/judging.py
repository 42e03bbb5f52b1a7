"""Runs judged in a process of its own, behind everything else, while the next ones run."""

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


class Judged(Struct, frozen=True):
    """`wrong`: what keeps a run from having passed; `took_s`: to say so."""

    result: str
    wrong: tuple[str, ...]
    took_s: float


class Judging:
    """A context manager; leaving it waits for the run that is being judged."""

    def __enter__(self) -> Self:
        # A fork would have our threads' locks.
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _begin, (os.getpid(),))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    async def judge(self, run: Outcome, folder: Path | None, command: str) -> Judged:
        """Also kept in `folder`, if given, with the `command` that repeats it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _judged, run, folder, command)


def _begin(parent: int) -> None:
    pool.begin(parent)
    os.nice(NICE)


def _judged(run: Outcome, folder: Path | None, command: str) -> Judged:
    began = time.monotonic()
    try:
        verdict = judge(run)
    except RelumeError as error:
        return Judged("failed", (f"cannot be judged: {error}",), time.monotonic() - began)
    if folder is not None:
        keep(folder, run, verdict, command)
    return Judged(verdict.result, sets.wrong_of(run, verdict), time.monotonic() - began)
