"""Resharding: nothing is lost or held twice, no more is loaded than was lost, nobody is made to
load or copy more than the best layout needs."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from relume.chaos.papers.anchortp.reshard import (
    BadLayout,
    Held,
    Plan,
    after_failure,
    continuous,
    divide,
    even,
    full_reload,
    keep_in_place,
    lost,
    own_only,
)
from relume.chaos.papers.anchortp.reshard_time import Links, busiest_us
from relume.chaos.papers.anchortp.spans import common, cut, normal, size, without


@st.composite
def layouts(draw: st.DrawFn, most: int = 60) -> tuple[Held, list[int], int]:
    """Living ranks with arbitrary disjoint units, some lost; targets, some of them new."""
    total = draw(st.integers(1, most))
    ranks = draw(st.integers(1, 6))
    owner = draw(st.lists(st.integers(-1, ranks - 1), min_size=total, max_size=total))
    held = {
        rank: normal([(unit, unit + 1) for unit in range(total) if owner[unit] == rank])
        for rank in range(ranks)
    }
    targets = draw(st.lists(st.integers(0, ranks + 2), min_size=1, max_size=6, unique=True))
    return held, targets, total


def units_of(plan: Plan) -> list[int]:
    return sorted(unit for move in plan.moves for unit in range(move.start, move.end))


def check(plan: Plan, held: Held, targets: list[int], total: int) -> None:
    """Every unit ends on one target, from where it was said to be."""
    assert units_of(plan) == list(range(total))
    for move in plan.moves:
        assert move.target in targets
        assert move.start < move.end
        if move.kind == "reload":
            assert move.source == -1
        else:
            assert common([(move.start, move.end)], held[move.source]) == ((move.start, move.end),)
            assert (move.kind == "keep") == (move.source == move.target)
    assert size(span for spans in plan.layout().values() for span in spans) == total


@given(layouts())
def test_every_unit_ends_on_one_rank_and_comes_from_where_it_was(
    case: tuple[Held, list[int], int],
) -> None:
    held, targets, total = case
    for plan in (
        continuous(held, targets, total),
        own_only(held, targets, total),
        full_reload(targets, total),
        keep_in_place(held, targets, total),
    ):
        check(plan, held, targets, total)


@given(layouts())
def test_the_published_plan_and_ours_reload_what_was_lost_and_nothing_more(
    case: tuple[Held, list[int], int],
) -> None:
    held, targets, total = case
    bound = total - sum(size(spans) for spans in held.values())  # Eq. 1
    assert size(lost(held, total)) == bound
    assert continuous(held, targets, total).units("reload") == bound
    assert keep_in_place(held, targets, total).units("reload") == bound
    assert own_only(held, targets, total).units("reload") >= bound
    assert full_reload(targets, total).units("reload") == total


@given(layouts())
def test_ours_copies_no_more_than_the_published_plan_and_makes_no_shard_larger(
    case: tuple[Held, list[int], int],
) -> None:
    held, targets, total = case
    ours, published = keep_in_place(held, targets, total), continuous(held, targets, total)
    assert ours.units("peer") <= published.units("peer")

    def largest(plan: Plan) -> int:
        return max(size(spans) for spans in plan.layout().values())

    assert largest(ours) <= largest(published)


@given(layouts(most=9), st.data())
@settings(max_examples=60, deadline=None)
def test_ours_is_best_among_all_layouts_of_a_small_axis(
    case: tuple[Held, list[int], int], data: st.DataObject
) -> None:
    held, targets, total = case
    assume(len(targets) <= 3)
    weights = {rank: data.draw(st.integers(1, 3)) for rank in targets}
    plan = keep_in_place(held, targets, total, weights=weights)
    where = {unit: rank for rank, spans in held.items() for a, b in spans for unit in range(a, b)}

    def cost(layout: tuple[int, ...]) -> tuple[Fraction, int, int]:
        shards = [Fraction(layout.count(rank), weights[rank]) for rank in targets]
        reloads = [0] * len(targets)
        copied = 0
        for unit, rank in enumerate(layout):
            if unit not in where:
                reloads[targets.index(rank)] += 1
            elif where[unit] != rank:
                copied += 1
        return max(shards), copied, max(reloads)

    after = plan.layout()
    made = tuple(
        next(rank for rank, spans in after.items() if common([(unit, unit + 1)], spans))
        for unit in range(total)
    )
    best = min(cost(layout) for layout in product(targets, repeat=total))
    assert cost(made)[:2] == best[:2]


@given(
    st.integers(2, 12).flatmap(
        lambda ranks: st.tuples(
            st.just(ranks),
            st.integers(ranks, 400),
            st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks - 1),
        )
    )
)
def test_after_a_failure_of_equal_shards_nothing_is_copied_and_loads_are_level(
    case: tuple[int, int, set[int]],
) -> None:
    ranks, total, dead = case
    held = after_failure(total, ranks, sorted(dead))
    plan = keep_in_place(held, sorted(held), total)
    gone = size(lost(held, total))
    assert plan.units("peer") == 0
    loads = [plan.units("reload", rank) for rank in held]
    assert sum(loads) == gone
    # Shards of the old layout differ by one unit, and so does the level they fill up to.
    assert max(loads) <= -(-gone // len(held)) + 1


def test_figure_3_row_by_row() -> None:
    held = after_failure(1024, 4, [1])
    moves = continuous(held, [0, 2, 3], 1024).moves
    assert [(m.kind, m.target, m.source, m.start, m.end) for m in moves] == [
        ("keep", 0, 0, 0, 256),
        ("reload", 0, -1, 256, 341),
        ("reload", 2, -1, 341, 512),
        ("keep", 2, 2, 512, 682),
        ("peer", 3, 2, 682, 768),
        ("keep", 3, 3, 768, 1024),
    ]


def test_targets_of_algorithm_1_are_cut_where_it_says() -> None:
    assert even(1024, 3) == ((0, 341), (341, 682), (682, 1024))
    assert even(2, 4) == ((0, 0), (0, 1), (1, 1), (1, 2))


def test_a_new_rank_gets_its_share_from_those_that_have_more() -> None:
    held = {0: ((0, 6),), 1: ((6, 12),)}
    plan = keep_in_place(held, [0, 1, 2], 12)
    assert {rank: size(spans) for rank, spans in plan.layout().items()} == {0: 4, 1: 4, 2: 4}
    assert plan.units("peer", 2) == 4
    assert plan.units("reload") == 0


def test_a_leaving_rank_that_lives_is_copied_from_not_reloaded() -> None:
    held = {0: ((0, 4),), 1: ((4, 8),), 2: ((8, 12),)}
    plan = keep_in_place(held, [0, 1], 12)
    assert (plan.units("keep"), plan.units("peer"), plan.units("reload")) == (8, 4, 0)


def test_a_rank_twice_as_fast_gets_twice_as_much() -> None:
    plan = keep_in_place({}, [0, 1], 9, weights={0: 2, 1: 1})
    assert {rank: size(spans) for rank, spans in plan.layout().items()} == {0: 6, 1: 3}


def test_a_rank_with_a_faster_link_loads_more_of_what_was_lost() -> None:
    held = {0: ((0, 2),), 1: ((2, 4),)}
    plan = keep_in_place(held, [0, 1], 10, host={0: 2, 1: 1})
    assert plan.units("reload", 0) == 3  # shards of five: no room for four
    assert plan.units("reload", 1) == 3
    plan = keep_in_place({0: ((0, 1),), 1: ((1, 2),)}, [0, 1, 2], 5, host={0: 9, 1: 1, 2: 1})
    assert plan.units("reload", 0) == 1
    assert plan.busiest("reload") <= 2


def test_capacity_moves_what_does_not_fit_and_refuses_what_fits_nowhere() -> None:
    held = {0: ((0, 6),), 1: ((6, 8),)}
    plan = keep_in_place(held, [0, 1], 8, capacity={0: 3, 1: 5})
    assert size(plan.layout()[0]) == 3
    assert plan.units("peer", 1) == 3
    with pytest.raises(BadLayout):
        keep_in_place(held, [0, 1], 8, capacity={0: 3, 1: 4})


def test_copies_stay_within_a_domain_while_they_can() -> None:
    held = {0: ((0, 6),), 1: (), 2: (), 3: ((6, 12),)}
    plan = keep_in_place(held, [0, 1, 2, 3], 12, domains={0: 0, 1: 1, 2: 0, 3: 1})
    copies = [(m.source, m.target) for m in plan.moves if m.kind == "peer"]
    assert sorted(set(copies)) == [(0, 2), (3, 1)]


@pytest.mark.parametrize(
    "held",
    [{0: ((0, 3),), 1: ((2, 4),)}, {0: ((0, 5),)}, {0: ((-1, 1),)}],
)
def test_a_layout_that_cannot_be_is_refused(held: Held) -> None:
    for plan in (continuous, keep_in_place):
        with pytest.raises(BadLayout):
            plan(held, [0, 1], 4)
    with pytest.raises(BadLayout):
        continuous({}, [], 4)
    with pytest.raises(BadLayout):
        keep_in_place({}, [], 4)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4),
    st.integers(0, 14),
)
@settings(max_examples=200, deadline=None)
def test_shares_fill_caps_and_keep_the_slowest_as_early_as_can_be(
    ranks: list[tuple[int, int]], count: int
) -> None:
    speeds, caps = [speed for speed, _ in ranks], [cap for _, cap in ranks]
    assume(sum(caps) >= count)
    shares = divide(count, speeds, caps)
    assert sum(shares) == count
    assert all(0 <= share <= cap for share, cap in zip(shares, caps, strict=True))

    def slowest(given: tuple[int, ...] | list[int]) -> Fraction:
        return max(Fraction(n, speed) for n, speed in zip(given, speeds, strict=True))

    every = product(*(range(cap + 1) for cap in caps))
    assert slowest(shares) == min(slowest(each) for each in every if sum(each) == count)


def test_a_speed_of_nothing_is_refused() -> None:
    with pytest.raises(BadLayout):
        divide(3, [1, 0], [3, 3])


def test_the_slowest_link_decides_how_long_a_plan_takes() -> None:
    held = after_failure(1024, 4, [1])
    plan = continuous(held, [0, 2, 3], 1024)  # reloads 85, 171, 0; copies 86 from 2 to 3
    assert busiest_us(plan, 1000, Links(host=1_000_000)) == 171_000
    assert busiest_us(plan, 1000, Links(host=0, source=1_000_000)) == 256_000
    assert busiest_us(plan, 1000, Links(host=0, near=100_000)) == 860_000
    apart = {0: 0, 2: 0, 3: 1}
    assert busiest_us(plan, 1000, Links(host=0, near=1, far=200_000), apart) == 430_000
    assert busiest_us(plan, 1000, Links(host=0, domain=1_000_000), {0: 0, 2: 1}) == 171_000
    assert busiest_us(plan, 1000, Links(host=0)) == 0


units = st.sets(st.integers(0, 30)).map(
    lambda numbers: normal([(number, number + 1) for number in numbers])
)


def numbers(spans: tuple[tuple[int, int], ...]) -> set[int]:
    return {number for start, end in spans for number in range(start, end)}


@given(units, units, st.integers(0, 12))
def test_spans_behave_as_sets(
    a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...], count: int
) -> None:
    assert numbers(common(a, b)) == numbers(a) & numbers(b)
    assert numbers(without(a, b)) == numbers(a) - numbers(b)
    assert size(a) == len(numbers(a))
    head, tail = cut(a, count)
    assert size(head) == min(count, size(a))
    assert normal([*head, *tail]) == a
    assert not common(normal(head), normal(tail))
