"""The stream machine under random workers, clients and faults; see `world`."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stream.world import World


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 1 << 40), st.integers(0, 60), st.sampled_from((0.0, 0.1, 0.3, 0.6)))
def test_whatever_happens_there_is_one_end_and_the_client_has_a_prefix(
    seed: int, steps: int, faults: float
) -> None:
    World(Random(seed), faults).run(steps)


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 1 << 40), st.integers(0, 15))
def test_one_lost_connection_changes_nothing_for_the_client(seed: int, after: int) -> None:
    World(Random(seed), calm=True).run_with_one_loss(after)


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 1 << 40), st.integers(0, 15))
def test_a_client_that_leaves_and_returns_gets_all_of_it(seed: int, after: int) -> None:
    World(Random(seed), calm=True).run_with_one_return(after)
