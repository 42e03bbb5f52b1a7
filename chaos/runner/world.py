"""Runs a case, in virtual time or with real processes, and judges its outcome."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from relume.chaos.outcome import Outcome
from relume.chaos.runner import pool
from relume.chaos.runner.cases import Case
from relume.chaos.runner.judge import Verdict, judge


class JudgedRun(Struct, frozen=True, kw_only=True):
    """A run and its verdict; or neither, if the code that makes them failed: then `signature`
    names the kind of failure and `why` describes it. `took_s`: real time."""

    run: Outcome | None
    verdict: Verdict | None
    signature: tuple[str, ...]
    why: tuple[str, ...]
    took_s: float

    @property
    def result(self) -> str:
        """As `Verdict.result`."""
        return self.verdict.result if self.verdict is not None else "failed"


def simulate(case: Case) -> Outcome:
    """Run it in virtual time."""
    from relume.chaos.sim import sim_fleet as fleet

    settings = fleet.Settings(judges_calls=True)
    return fleet.run(case.scenario, case.schedule.seed, schedule=case.schedule, settings=settings)


def live(case: Case, folder: Path | None) -> Outcome:
    """Run it with real processes; their files go to `folder`."""
    from relume.chaos.live import live_fleet as fleet

    return fleet.run(
        case.scenario, case.schedule.seed, schedule=case.schedule, folder=folder, say=_say
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def judged(work: Callable[[], Outcome], limit_s: float) -> JudgedRun:
    """The outcome of `work`, judged, within `limit_s` of real time. A failure of the chaos code
    counts as a failure of the run."""
    began = time.monotonic()
    run = None
    try:
        with pool.limited(limit_s):
            run = work()
            verdict = judge(run)
    except pool.TooLong as error:
        return JudgedRun(
            run=run,
            verdict=None,
            signature=("too long",),
            why=(str(error),),
            took_s=time.monotonic() - began,
        )
    except Exception as error:  # an edge: any failure must be reported with its seed
        kind = type(error).__name__
        return JudgedRun(
            run=run,
            verdict=None,
            signature=(kind,),
            why=(pool.error_line(error),),
            took_s=time.monotonic() - began,
        )
    first = tuple(str(violation) for violation in verdict.violations[:1])
    took = time.monotonic() - began
    return JudgedRun(
        run=run,
        verdict=verdict,
        signature=verdict.signature,
        why=(*first, *verdict.why),
        took_s=took,
    )
