"""An exact model of a pipeline that serves microbatches in virtual time, for DéjàVu's studies.

`stages` machines in a row, each first come first served. A microbatch passes all of them once
for its prompt and once for every token, and returns to the first stage after the last. As many
microbatches as there are stages run at once; when one ends, the next one gets its slot.

The stages serve passes in the order in which they reach the first stage, so none overtakes. While
all microbatches generate tokens and none waits, every round is like the one before; the model then
skips rounds up to the next end. Times are whole nanoseconds.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from msgspec import Struct


class Job(Struct, frozen=True):
    """A microbatch: its earliest entry, its prompt's time at a stage (0: computed elsewhere), its
    token passes."""

    ready_ns: int
    prompt_ns: int
    tokens: int


def ends(jobs: Sequence[Job], stages: int, token_ns: int, slots: int = 0) -> list[int]:
    """Time of the last token of each of `jobs`, which enter in this order. `slots`: microbatches
    in the pipeline at once (default: as many as stages)."""
    done = [0] * len(jobs)
    free = [0] * stages
    upcoming = iter(range(len(jobs)))
    # (when it reaches the first stage, job, passes left, whether the prompt is still to come)
    queue: list[tuple[int, int, int, bool]] = []

    def enter(at: int) -> None:
        job = next(upcoming, -1)
        if job >= 0:
            given = jobs[job]
            entry = (max(at, given.ready_ns), job, given.tokens, given.prompt_ns > 0)
            heapq.heappush(queue, entry)

    for _ in range(slots or stages):
        enter(0)
    since = 0
    while queue:
        if since >= len(queue):
            since = 0
            _skip(queue, free, stages, token_ns)
        at, job, left, prompt = heapq.heappop(queue)
        took = jobs[job].prompt_ns if prompt else token_ns
        for stage, idle in enumerate(free):
            at = (at if at > idle else idle) + took
            free[stage] = at
        since = 0 if prompt else since + 1
        left -= not prompt
        if left > 0:
            heapq.heappush(queue, (at, job, left, False))
        else:
            done[job] = at
            enter(at)
    return done


def _skip(
    queue: list[tuple[int, int, int, bool]], free: list[int], stages: int, token_ns: int
) -> None:
    """Advance everything by whole rounds when no pass of the next round would wait."""
    order = sorted(queue)
    first, last = order[0][0], order[-1][0]
    round_ns = stages * token_ns
    if any(entry[3] for entry in order) or first + round_ns < last + token_ns:
        return
    if any(b[0] - a[0] < token_ns for a, b in itertools.pairwise(order)):
        return
    if any(idle > first + stage * token_ns for stage, idle in enumerate(free)):
        return
    rounds = min(entry[2] for entry in order) - 1
    if rounds > 0:
        ahead = rounds * round_ns
        queue[:] = [(at + ahead, job, left - rounds, p) for at, job, left, p in order]
        free[:] = [idle + ahead for idle in free]


def together(lengths: Sequence[int], stages: int, prompt_ns: int, token_ns: int) -> list[int]:
    """Ends of microbatches that all wait from the start, prompts and tokens in one pipeline."""
    return ends([Job(0, prompt_ns, n) for n in lengths], stages, token_ns)


def apart(
    lengths: Sequence[int],
    prompt_stages: int,
    token_stages: int,
    prompt_ns: int,
    token_ns: int,
    arrivals: Sequence[int] = (),
    extra_ns: int = 0,
) -> list[int]:
    """Ends with prompts in a pipeline of their own. `arrivals`: none means all wait from the
    start. `extra_ns`: time that streaming the KV cache adds at a stage of the prompt; it delays
    that microbatch alone."""
    jobs: list[Job] = []
    begins = 0
    for i, tokens in enumerate(lengths):
        begins = max(begins, arrivals[i] if arrivals else 0)
        jobs.append(Job(begins + prompt_stages * (prompt_ns + extra_ns), 0, tokens))
        begins += prompt_ns
    return ends(jobs, token_stages, token_ns)
