"""Decode steps of a simulated engine, stored as runs: the time of each token of a stream."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple


class Run(NamedTuple):
    """Consecutive steps that gave each decoding sequence a token: decode steps
    `before + 1 .. before + count`, from `began_ns` on, which lasted first, first + more, ... ns."""

    before: int
    began_ns: int
    first_ns: int
    more_ns: int
    count: int  # type: ignore[assignment]  # a field hides the method of tuples

    def end_ns(self, step: int) -> int:
        """End of decode step `step` of it."""
        steps = step - self.before
        return self.began_ns + self.first_ns * steps + self.more_ns * (steps * (steps - 1) // 2)

    def took_ns(self, step: int) -> int:
        """Duration of decode step `step` of it."""
        return self.first_ns + self.more_ns * (step - self.before - 1)


class Runs:
    """Completed runs, in order. `ends`: the last step of each."""

    __slots__ = ("_all", "_slowest", "ends")

    def __init__(self) -> None:
        self.ends: list[int] = []
        self._all: list[Run] = []
        self._slowest: list[int] = []

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, at: int) -> Run:
        return self._all[at]

    def add(self, run: Run) -> None:
        """Add a completed run."""
        end = run.before + run.count
        self._all.append(run)
        self.ends.append(end)
        self._slowest.append(run.took_ns(end))

    @property
    def over_ns(self) -> int:
        """End of the last run; 0: there is none."""
        return self._all[-1].end_ns(self.ends[-1]) if self._all else 0

    def times(self, first: int, last: int, now: Run | None) -> tuple[int, int, int]:
        """Ends of decode steps `first` and `last`, and the longest step after `first`, ns. `now`:
        the completed part of the current run. Covers only completed steps."""
        ends, runs = self.ends, self._all
        at = bisect_left(ends, first)
        begun = runs[at] if at < len(runs) else now
        if begun is None:
            return 0, 0, 0
        behind = bisect_left(ends, last, at)
        if behind < len(runs):
            shown = runs[behind]
        elif now is not None:
            shown = now
        else:
            behind -= 1
            shown = runs[behind]
        last = min(last, shown.before + shown.count)
        slowest = self._slowest[at + 1 : behind]
        if shown.before >= first:
            slowest.append(shown.took_ns(last))
            if ends[at] > first:
                slowest.append(self._slowest[at])
        elif last > first:
            slowest.append(shown.took_ns(last))
        return begun.end_ns(first), shown.end_ns(last), max(slowest, default=0)
