"""DéjàVu Eq. 1 to 7, by hand and as properties of one another."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relume.chaos.papers.dejavu.machine_split import (
    DoesNotFit,
    Footprint,
    Split,
    Work,
    choose,
    pays,
    prompt_machines_at_least,
    prompts_us,
    together_us,
    token_machines_at_least,
    token_share,
    tokens_us,
)

works = st.builds(
    Work,
    st.integers(1, 60) | st.integers(1, 10**6),
    st.integers(1, 60) | st.integers(1, 10**5),
    st.integers(1, 2000),
    st.fractions(1, 3, max_denominator=50),
)
machines = st.integers(2, 64)


def test_the_least_machines_by_hand() -> None:
    # Memory 100, 40 layers of weight 4, a microbatch's KV per layer 1 for the prompt, 0.5 after.
    size = Footprint(memory=200, layers=40, weights=8, prompt_kv=2, token_kv=1)
    assert prompt_machines_at_least(size) == 2  # Eq. 2: 40 (8 + 2) / 200
    assert token_machines_at_least(size) == 4  # Eq. 3: 40 * 8 / (200 - 40 * 3)
    with pytest.raises(DoesNotFit):
        token_machines_at_least(
            Footprint(memory=120, layers=40, weights=8, prompt_kv=2, token_kv=1)
        )


def test_throughputs_by_hand() -> None:
    work = Work(prompt_us=100, token_us=10, tokens=30, overhead=Fraction(3, 2))
    # Eq. 4 with D = 4: 3 * 90 / 4 + 100 + 300
    assert together_us(4, work) == Fraction(935, 2)
    assert prompts_us(4, 1, work) == 600  # m Y D / D_p
    assert tokens_us(4, 3, work) == 400  # N t D / D_t
    assert token_share(4, work) == Fraction(8, 3)  # Eq. 6: 4 * 300 / (150 + 300)
    assert pays(4, work)  # Eq. 5: 10 > 3 / (4 / 2 - 1)
    assert pays(4, Work(100, 33, 30, Fraction(3, 2)))  # 3.03 > 3
    assert not pays(4, Work(99, 33, 30, Fraction(3, 2)))
    # (1, 3): max(600, 400); (2, 2): max(300, 600); one pipeline is better than both.
    assert choose(4, work) == Split(0, 4, Fraction(935, 2))
    assert choose(4, Work(100, 10, 30)) == Split(1, 3, Fraction(400))


@given(machines, works)
def test_at_the_share_of_equation_6_both_pipelines_are_equally_fast(n: int, work: Work) -> None:
    token = token_share(n, work)
    prompt = n - token  # Eq. 7
    assert 0 < token < n
    assert work.overhead * work.prompt_us * n / prompt == work.tokens * work.token_us * n / token


@given(machines, works)
def test_equation_5_says_when_the_ideal_division_beats_one_pipeline(n: int, work: Work) -> None:
    ideal = work.overhead * work.prompt_us + work.tokens * work.token_us
    assert pays(n, work) == (ideal < together_us(n, work))


@given(machines, works)
def test_nothing_pays_from_an_overhead_of_two_less_a_machines_part(n: int, work: Work) -> None:
    if work.overhead >= 2 - Fraction(1, n):
        assert not pays(n, work)


@given(machines, works)
def test_the_choice_is_a_division_no_other_beats(n: int, work: Work) -> None:
    split = choose(n, work)
    every = [max(prompts_us(n, p, work), tokens_us(n, n - p, work)) for p in range(1, n)]
    assert split.inverse_us == min([together_us(n, work), *every])
    assert split.prompt + split.token == n
    ideal = work.overhead * work.prompt_us + work.tokens * work.token_us
    assert not split.prompt or split.inverse_us >= ideal


@given(machines, works, st.integers(1, 20), st.integers(1, 20))
def test_the_choice_keeps_to_what_fits(n: int, work: Work, prompt: int, token: int) -> None:
    split = choose(n, work, prompt, token)
    assert not split.prompt or (split.prompt >= prompt and split.token >= token)
    if prompt + token > n:
        assert split == Split(0, n, together_us(n, work))
