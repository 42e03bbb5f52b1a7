"""The pipeline simulation: against one that takes every pass by itself, and by hand."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.chaos.papers.dejavu.dejavu_study import (
    Run,
    _batches,
    _work_s,
    disaggregated,
    one_pipeline,
    two_pipelines,
)
from relume.chaos.papers.dejavu.dejavu_tables import SETTINGS
from relume.chaos.papers.dejavu.inputs import OPT_66B, a100, fits, token_ns
from relume.chaos.papers.dejavu.machine_split import Work, together_us
from relume.chaos.papers.dejavu.pipeline import Job, apart, ends, together

jobs_ = st.lists(
    st.builds(Job, st.integers(0, 300), st.integers(0, 40), st.integers(1, 30)),
    min_size=1,
    max_size=12,
)


def pass_by_pass(jobs: list[Job], stages: int, token_ns: int) -> list[int]:
    """The same without skipping: stage by stage, as events in the order of time."""
    done = [0] * len(jobs)
    free = [0] * stages
    left = [job.tokens for job in jobs]
    todo = list(range(len(jobs)))
    events: list[tuple[int, int, bool]] = []

    def enter(at: int) -> None:
        if todo:
            job = todo.pop(0)
            heapq.heappush(events, (max(at, jobs[job].ready_ns), job, jobs[job].prompt_ns > 0))

    for _ in range(stages):
        enter(0)
    while events:
        at, job, prompt = heapq.heappop(events)
        for stage in range(stages):
            begins = max(at, free[stage])
            at = free[stage] = begins + (jobs[job].prompt_ns if prompt else token_ns)
        if not prompt:
            left[job] -= 1
        if left[job]:
            heapq.heappush(events, (at, job, False))
        else:
            done[job] = at
            enter(at)
    return done


@settings(max_examples=400, deadline=None)
@given(jobs_, st.integers(1, 6), st.integers(1, 9))
def test_skipped_rounds_change_nothing(jobs: list[Job], stages: int, token_ns: int) -> None:
    assert ends(jobs, stages, token_ns) == pass_by_pass(jobs, stages, token_ns)


def test_a_microbatch_alone() -> None:
    assert ends([Job(5, 100, 3)], 4, 10) == [5 + 4 * 100 + 3 * 4 * 10]


def test_equal_microbatches_take_what_figure_23_says() -> None:
    """D at once: S1 = D Y, S2 = (D - 1) Y, S3 = (N - 1) D t + t, with the first token of N
    from the prompt (Eq. 4). The simulation's tokens come after the prompt's."""
    for stages, prompt, token, tokens in ((3, 100, 10, 30), (5, 70, 7, 12)):
        last = max(together([tokens - 1] * stages, stages, prompt, token))
        inverse = together_us(stages, Work(prompt, token, tokens))
        # Eq. 4 counts one t more than the last end.
        by_hand = stages * prompt + (stages - 1) * prompt + (tokens - 1) * stages * token
        assert last == by_hand
        assert inverse * stages == by_hand + token


def test_a_prompt_holds_up_the_others_by_the_whole_pipeline() -> None:
    """Three stages; one stops early and another's prompt comes in: everybody waits for it."""
    long = 20
    without = max(together([long, long, long], 3, 50, 5))
    done = together([2, long, long, long], 3, 50, 5)
    assert done[1] >= without + 3 * (50 - 5) - 2 * 5
    assert done[1] <= without + 3 * 50


def test_separate_prompts_hold_up_no_microbatch() -> None:
    done = apart([2, 20, 20, 20], 1, 3, 50, 5)
    assert done[1] == 2 * 50 + 20 * 3 * 5


def test_unhidden_streaming_delays_one_microbatch_at_each_stage() -> None:
    plain = apart([4, 4], 3, 2, 50, 5)
    slow = apart([4, 4], 3, 2, 50, 5, extra_ns=1000)
    assert [b - a for a, b in zip(plain, slow, strict=True)] == [3000, 3000]


def test_no_schedule_beats_the_work_of_its_busiest_stage() -> None:
    """What the search leaves out by this bound could not have been best."""
    machine = a100(2)
    for batch, tokens in _batches(0)[2:]:
        some = tokens[:60]
        least = _work_s(OPT_66B, machine, batch, some) / 4
        assert least <= one_pipeline(OPT_66B, machine, 4, batch, some)
        tokens_s = sum(some) * token_ns(OPT_66B, machine, batch) / 2e9
        assert tokens_s - 0.01 <= two_pipelines(OPT_66B, machine, 2, 2, batch, some)


@pytest.mark.full
def test_the_search_finds_what_trying_everything_finds() -> None:
    setting = SETTINGS[0]
    found = disaggregated(setting.model, setting.machine, 6, 0)
    every = [
        Run(two_pipelines(setting.model, setting.machine, p, 6 - p, b, tokens), (p, 6 - p, b))
        for p in range(1, 6)
        for b, tokens in _batches(0)
        if fits(setting.model, setting.machine, p, b, 1000)
        and fits(setting.model, setting.machine, 6 - p, b)
    ]
    assert found == min(every)
