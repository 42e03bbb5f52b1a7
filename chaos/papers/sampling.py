"""Results that are samples: many seeded runs of whole fleets, paired by seed, with intervals.

If a file is named, it stores the runs, and later calls do not repeat them: several results share
them, and a command that runs for hours can be interrupted. The file is only valid for the code
that wrote it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random

import msgspec
from msgspec import Struct

from relume.chaos.papers.lumen.parts.study_runs import Case, RunResult, measure
from relume.chaos.runner import pool

RESAMPLES = 2000


class Sampling(Struct, frozen=True, kw_only=True):
    """Extent of the runs: `count` seeds from `seed` on, fleets of at most `most` workers, in
    `jobs` processes. `stored_runs`: the file that stores them. `tell` receives progress, a line
    each."""

    seed: int = 0
    count: int = 1
    most: int = 8
    jobs: int = 1
    stored_runs: Path | None = None
    tell: Callable[[str], None] = lambda _: None

    @property
    def seeds(self) -> range:
        """The seeds."""
        return range(self.seed, self.seed + self.count)

    def sizes(self, sizes: Iterable[int]) -> list[int]:
        """Those of `sizes` that are within `most`."""
        return [size for size in sizes if size <= self.most]

    def run(self, cases: Iterable[Case]) -> dict[Case, RunResult]:
        """The measurements of each case. Raises RuntimeError if a run failed."""
        wanted = list(dict.fromkeys(cases))
        found = self._stored()
        left = [case for case in wanted if case not in found]
        began = time.perf_counter()
        for done, (case, measured) in enumerate(
            pool.each(measure, left, self.jobs, lambda: False), 1
        ):
            if measured.error:
                raise RuntimeError(f"{case.rules}, seed {case.seed}: {measured.error}")
            found[case] = measured
            if self.stored_runs is not None:
                with self.stored_runs.open("ab") as file:
                    file.write(msgspec.json.encode((case, measured)) + b"\n")
            took = time.perf_counter() - began
            self.tell(
                f"{done}/{len(left)} runs, {took:.0f} s, about "
                f"{took / done * (len(left) - done):.0f} s left"
            )
        return {case: found[case] for case in wanted}

    def _stored(self) -> dict[Case, RunResult]:
        if self.stored_runs is None or not self.stored_runs.exists():
            return {}
        lines = self.stored_runs.read_bytes().splitlines()
        return dict(msgspec.json.decode(line, type=tuple[Case, RunResult]) for line in lines)


class Estimate(Struct, frozen=True):
    """A figure and its 95 % interval; equal bounds when there is one sample."""

    value: float
    low: float
    high: float
    samples: int

    def __str__(self) -> str:
        if self.samples < 2:
            return f"{self.value:.3f} [one seed]"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Mean of `above` over mean of `below`, whose samples belong together; the interval is the
    percentile one of resampled pairs."""
    pairs = list(zip(above, below, strict=True))
    random = Random(0)

    def of(some: Sequence[tuple[float, float]]) -> float:
        under = sum(one[1] for one in some)
        return sum(one[0] for one in some) / under if under else float("inf")

    if not pairs:
        raise ValueError("no samples")
    drawn = sorted(of(random.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    low, high = drawn[round(0.025 * RESAMPLES)], drawn[round(0.975 * RESAMPLES) - 1]
    return Estimate(of(pairs), low, high, len(pairs))


def average(values: Sequence[float]) -> Estimate:
    """The mean of `values`."""
    return ratio(values, [1.0] * len(values))
