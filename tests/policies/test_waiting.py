"""The waiting room: bounds, order, fairness, and that nothing of anybody is left."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.policies.admission.admission_queue import (
    AGED_PART,
    DEADLINE,
    EXPIRED,
    FULL,
    SHARE,
    AdmissionQueue,
    QueueDecision,
    by_tier,
    cost,
    rank_of,
)
from relume.policies.admission.admission_settings import WaitingConfig
from relume.policies.admission.fair_queue import MOST_COST, QUANTUM, Entry
from relume.policies.routing.routing_settings import TIERS

CONFIG = WaitingConfig(requests=8, mb=1, age_ms=1000, most_ms=30_000)
WIDE = WaitingConfig(requests=100_000, mb=65_536, tenant_percent=100, age_ms=3_600_000)


def entry(
    name: str,
    tier: str = "standard",
    tenant: str = "",
    tokens: int = 100,
    at_us: int = 0,
    **more: Any,
) -> Entry:
    told = {"size": 10, "until_us": at_us + 30_000_000, **more}
    return Entry(
        request=name,
        model="m",
        rank=rank_of(tier),
        tenant=tenant,
        tokens=tokens,
        entered_us=at_us,
        **told,
    )


def taken(
    room: AdmissionQueue, count: int, config: WaitingConfig = CONFIG, at_us: int = 0
) -> list[str]:
    """Whoever goes next, `count` times."""
    found = []
    for _ in range(count):
        chosen = room.next("m", at_us, config)
        assert chosen is not None
        room.take(chosen.request, at_us, -1, config)
        found.append(chosen.request)
    return found


def empty(room: AdmissionQueue) -> None:
    """Nothing is left of anybody."""
    assert not room.entries
    assert room.size == 0
    assert room.next_end_us() == -1
    assert not room.models()
    assert room.depths() == [(tier, 0, 0) for tier in TIERS]
    assert not room._shares


def test_higher_tiers_go_first_and_a_tenant_keeps_its_order() -> None:
    room = AdmissionQueue()
    for name, tier in (
        ("b", "batch"),
        ("s1", "standard"),
        ("i", "interactive"),
        ("s2", "standard"),
    ):
        assert not room.enter(entry(name, tier), 0, CONFIG).refused
    assert taken(room, 4) == ["i", "s1", "s2", "b"]
    empty(room)


def test_a_flood_of_one_tenant_does_not_keep_another_waiting() -> None:
    room = AdmissionQueue()
    for number in range(1000):
        room.enter(entry(f"a{number}", tenant="a", tokens=QUANTUM), 0, WIDE)
    for number in range(10):
        room.enter(entry(f"b{number}", tenant="b", tokens=QUANTUM), 0, WIDE)
    first = taken(room, 20, WIDE)
    assert sum(name[0] == "b" for name in first) == 10


def test_a_full_room_gives_the_place_of_who_is_worth_least() -> None:
    room = AdmissionQueue()
    for number in range(4):
        room.enter(entry(f"b{number}", "batch", "big" if number else "small"), 0, CONFIG)
    for number in range(4):
        room.enter(entry(f"s{number}"), 0, CONFIG)
    judged = room.enter(entry("i", "interactive"), 0, CONFIG)
    assert (judged.refused, judged.evicted) == ("", ("b3",)), "newest of the largest, lowest tier"
    assert room.enter(entry("b9", "batch", "big"), 0, CONFIG).refused == FULL
    judged = room.enter(entry("b9", "batch", "other", tokens=10), 0, CONFIG)
    assert judged.evicted == ("b2",), "who has less than the largest takes its place"
    assert len(room.entries) == CONFIG.requests


def test_bytes_count_too_and_a_refused_newcomer_displaces_none() -> None:
    room = AdmissionQueue()
    for number in range(4):
        room.enter(entry(f"b{number}", "batch", size=200_000), 0, CONFIG)
    for number in range(3):
        room.enter(entry(f"i{number}", "interactive", size=80_000), 0, CONFIG)
    kept = set(room.entries)
    assert room.enter(entry("s", size=(1 << 20) - 1000), 0, CONFIG).refused == FULL
    assert set(room.entries) == kept
    judged = room.enter(entry("s", size=400_000), 0, CONFIG)
    assert judged.evicted == ("b3", "b2")
    assert room.size <= CONFIG.mb << 20
    assert taken(room, 6) == ["i0", "i1", "i2", "s", "b0", "b1"]


def test_a_named_tenant_has_its_share_and_its_own_lower_tier_goes_for_a_higher() -> None:
    room = AdmissionQueue()
    for number in range(4):
        assert not room.enter(entry(f"b{number}", "batch", "t"), 0, CONFIG).refused
    assert room.enter(entry("b4", "batch", "t"), 0, CONFIG).refused == SHARE
    assert room.enter(entry("i", "interactive", "t"), 0, CONFIG).evicted == ("b3",)
    assert not room.enter(entry("x"), 0, CONFIG).refused, "nobody's requests are no tenant's"


def test_who_would_come_too_late_is_refused_at_once_and_told_when_to_come_back() -> None:
    room, config = AdmissionQueue(), WIDE
    for number in range(40):
        room.enter(entry(f"q{number}"), 0, config)
    assert room.retry_s("m", 0, 5) == 5, "nothing is foretold yet"
    for second in range(1, 11):  # 100 tokens a second
        taken(room, 1, config, second * 1_000_000)
    now_us = 10_000_000
    judged = room.enter(
        entry("late", at_us=now_us, deadline_us=now_us + 20_000_000), now_us, config
    )
    assert judged == QueueDecision(
        refused=DEADLINE, evicted=(), ahead_requests=30, ahead_tokens=3000, predicted_us=30_000_000
    )
    judged = room.enter(entry("fit", at_us=now_us, deadline_us=now_us + 31_000_000), now_us, config)
    assert not judged.refused
    judged = room.enter(
        entry("high", "interactive", at_us=now_us, deadline_us=now_us + 1), now_us, config
    )
    assert (judged.refused, judged.predicted_us) == ("", 0), "who goes first waits for nobody"
    assert room.enter(entry("over", deadline_us=1), now_us, config).refused == EXPIRED
    assert 30 <= room.retry_s("m", now_us, 5) <= 34


def test_a_deadline_that_passes_ends_the_wait_and_so_does_the_longest_wait() -> None:
    room = AdmissionQueue()
    room.enter(entry("soon", deadline_us=5_000_000), 0, CONFIG)
    room.enter(entry("later"), 0, CONFIG)
    assert room.next_end_us() == 5_000_000
    assert room.over(4_999_999, 99) == []
    assert [e.request for e in room.over(5_000_000, 99)] == ["soon"]
    room.leave("soon")
    assert room.next_end_us() == 30_000_000
    assert [e.request for e in room.over(30_000_000, 99)] == ["later"]
    room.leave("later")
    empty(room)


def test_low_tiers_do_not_starve_and_take_no_more_than_their_part() -> None:
    """An endless flood of higher requests, and one of the lowest that is aged."""
    room, config = (
        AdmissionQueue(),
        WaitingConfig(requests=1 << 20, age_ms=1000, tenant_percent=100),
    )
    for number in range(50):
        room.enter(entry(f"b{number}", "batch", tokens=200), 0, config)
    order: list[str] = []
    for number in range(2000):
        room.enter(entry(f"i{number}", "interactive", at_us=1_000_000), 1_000_000, config)
        order += taken(room, 1, config, 1_000_000)
    low = [at for at, name in enumerate(order) if name[0] == "b"]
    assert len(low) == 50
    each = AGED_PART * 200 // 100 + 1
    assert all(abs(after - before - each) <= 1 for before, after in itertools.pairwise(low))


def test_no_request_ages_before_the_time() -> None:
    room = AdmissionQueue()
    room.enter(entry("b", "batch", tokens=1), 0, CONFIG)
    for number in range(7):
        room.enter(entry(f"i{number}", "interactive", tokens=1000), 0, CONFIG)
    assert taken(room, 8, CONFIG, 999_999)[-1] == "b"


def test_costs_and_tiers() -> None:
    assert cost(100, 50) == 150
    assert cost(100, 0) == 356
    assert cost(100, 1 << 20) == 1124
    assert cost(1 << 30, 1) == MOST_COST
    assert rank_of("interactive") < rank_of("nobody knows") == rank_of("standard")


def test_higher_tiers_come_first_and_those_of_one_tier_stay_in_order() -> None:
    given = [("a", "batch"), ("b", "standard"), ("c", "nobody knows"), ("d", "interactive")]
    ordered = by_tier(given, lambda item: item[1])
    assert [name for name, _ in ordered] == ["d", "b", "c", "a"]


class Steps:
    """A room that random callers come to and leave."""

    def __init__(self, config: WaitingConfig) -> None:
        self.room, self.config, self.now_us = AdmissionQueue(), config, 0
        self.order: list[Any] = []

    def act(self, act: tuple[Any, ...], number: int) -> None:
        kind, room = act[0], self.room
        if kind == "enter":
            _, tier, tenant, tokens, size, patience_us = act
            one = entry(
                f"q{number}", tier, tenant, tokens, self.now_us,
                size=size, deadline_us=self.now_us + patience_us if patience_us else 0,
            )  # fmt: skip
            before = set(room.entries)
            judged = room.enter(one, self.now_us, self.config)
            expected = before if judged.refused else before - set(judged.evicted) | {one.request}
            assert set(room.entries) == expected
            self.order.append(judged)
        elif kind == "take":
            found = room.next("m", self.now_us, self.config)
            assert found is room.next("m", self.now_us, self.config)
            if found is not None:
                room.take(found.request, self.now_us, 1000, self.config)
                self.order.append(found.request)
        elif kind == "leave" and room.entries:
            names = list(room.entries)
            room.leave(names[act[1] % len(names)])
        elif kind == "wait":
            self.now_us += act[1]
            while late := room.over(self.now_us, 3):
                for over in late:
                    assert over.end_us <= self.now_us
                    room.leave(over.request)
            assert all(e.end_us > self.now_us for e in room.entries.values())

    def holds(self) -> None:
        room, config = self.room, self.config
        entries = room.entries.values()
        assert len(room.entries) <= config.requests
        assert room.size == sum(e.size for e in entries) <= config.mb << 20
        assert sum(requests for _, requests, _ in room.depths()) == len(room.entries)
        assert sum(tokens for _, _, tokens in room.depths()) == sum(e.tokens for e in entries)
        named = Counter(e.tenant for e in entries if e.tenant)
        most = max(config.requests * config.tenant_percent // 100, 1)
        assert all(count <= most for count in named.values())
        assert room.next_end_us() == min((e.end_us for e in entries), default=-1)


ACTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("enter"),
            st.sampled_from(TIERS),
            st.sampled_from(("", "a", "b", "c")),
            st.integers(1, 3 * QUANTUM),
            st.integers(0, 1 << 19),
            st.sampled_from((0, 1_000, 10_000_000)),
        ),
        st.tuples(st.just("take")),
        st.tuples(st.just("leave"), st.integers(0, 100)),
        st.tuples(st.just("wait"), st.integers(0, 3_000_000)),
    ),
    max_size=120,
)


@given(ACTS, st.integers(1, 12), st.integers(10, 100))
@settings(max_examples=150, deadline=None)
def test_bounds_hold_nothing_leaks_and_the_order_is_the_same_again(
    acts: list[Any], requests: int, percent: int
) -> None:
    config = WaitingConfig(requests=requests, mb=1, tenant_percent=percent, age_ms=500)
    told = []
    for _ in range(2):
        steps = Steps(config)
        for number, act in enumerate(acts):
            steps.act(act, number)
            steps.holds()
        for name in list(steps.room.entries):
            steps.room.leave(name)
        empty(steps.room)
        told.append(steps.order)
    assert told[0] == told[1]


@given(
    st.lists(st.lists(st.integers(1, 3 * QUANTUM), min_size=1, max_size=60), min_size=2, max_size=5)
)
@settings(max_examples=80, deadline=None)
def test_tenants_that_wait_get_the_same_but_for_a_quantum_and_two_requests(
    costs: list[list[int]],
) -> None:
    room = AdmissionQueue()
    for tenant, own in enumerate(costs):
        for number, tokens in enumerate(own):
            room.enter(entry(f"{tenant}.{number}", tenant=f"t{tenant}", tokens=tokens), 0, WIDE)
    got: Counter[str] = Counter()
    left = [len(own) for own in costs]
    largest = max(max(own) for own in costs)
    while all(left):
        found = room.next("m", 0, WIDE)
        assert found is not None
        room.take(found.request, 0, -1, WIDE)
        got[found.tenant] += found.tokens
        left[int(found.tenant[1:])] -= 1
        served = [got[f"t{tenant}"] for tenant in range(len(costs))]
        assert max(served) - min(served) <= QUANTUM + 2 * largest


@pytest.mark.parametrize("tenants", [1, 500])
def test_a_storm_costs_each_of_its_requests_the_same(tenants: int) -> None:
    """Ten times the requests take far less than a hundred times as long."""

    def took_s(count: int) -> float:
        room = AdmissionQueue()
        config = WaitingConfig(requests=count, mb=65_536, tenant_percent=100)
        began = time.process_time()
        for number in range(count + count // 2):
            tier, tenant = TIERS[number % 3], f"t{number % tenants}"
            room.enter(entry(f"q{number}", tier, tenant, 100 + number % 900), number, config)
        for number in range(count):
            if number % 4:
                found = room.next("m", 0, config)
                if found is not None:
                    room.take(found.request, 0, 1000, config)
            else:
                room.leave(next(iter(room.entries)))
        return time.process_time() - began

    small = min(took_s(1_000) for _ in range(3))
    assert took_s(10_000) < 40 * small
