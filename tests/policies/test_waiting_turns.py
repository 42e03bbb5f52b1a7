"""The waiting room: what a tenant and a tier that waited long may take, and what is predicted."""

from __future__ import annotations

from relume.policies.admission.admission_queue import AGED_PART, ENOUGH, AdmissionQueue, rank_of
from relume.policies.admission.admission_settings import WaitingConfig
from relume.policies.admission.fair_queue import QUANTUM
from tests.policies.test_waiting import WIDE, entry, taken

AGES = WaitingConfig(requests=1 << 20, age_ms=1000, tenant_percent=100)


def test_grants_of_a_request_that_left_without_its_turn_serve_no_others_of_its_tenant() -> None:
    room = AdmissionQueue()
    room.enter(entry("large", tenant="a", tokens=20 * QUANTUM), 0, WIDE)
    for number in range(20):
        room.enter(entry(f"a{number}", tenant="a", tokens=QUANTUM), 0, WIDE)
    for number in range(40):
        room.enter(entry(f"b{number}", tenant="b", tokens=QUANTUM), 0, WIDE)
    assert all(name[0] == "b" for name in taken(room, 15, WIDE))
    room.leave("large")
    turns = [name[0] for name in taken(room, 12, WIDE)]
    assert turns.count("b") >= 5, "they share from here on"


def test_the_tier_of_the_request_that_waits_longest_is_served_first() -> None:
    room = AdmissionQueue()
    room.enter(entry("older", "standard"), 0, AGES)
    room.enter(entry("younger", "batch", at_us=500_000), 500_000, AGES)
    now_us = 9_000_000
    for number in range(3 * AGED_PART):
        room.enter(entry(f"i{number}", "interactive", at_us=now_us), now_us, AGES)
    order = [name for name in taken(room, 3 * AGED_PART, AGES, now_us) if name[0] != "i"]
    assert order == ["older", "younger"]


def test_what_goes_out_of_turn_costs_the_aged_of_another_tier_nothing() -> None:
    """As a spare takes it, which serves only the lowest tier."""
    orders = []
    for goes in (False, True):
        room, order = AdmissionQueue(), list[str]()
        room.enter(entry("older", "standard"), 0, AGES)
        room.enter(entry("b", "batch", at_us=500_000, tokens=5), 500_000, AGES)
        now_us = 9_000_000
        for number in range(2 * AGED_PART):
            room.enter(entry(f"i{number}", "interactive", at_us=now_us), now_us, AGES)
        order += taken(room, AGED_PART // 2, AGES, now_us)
        if goes:
            chosen = room.next("m", now_us, AGES, rank_of("batch"))
            assert chosen is not None and chosen.request == "b"
            room.take("b", now_us, -1, AGES)
            assert room.next("m", now_us, AGES, rank_of("batch")) is None
        order += taken(room, len(room.entries), AGES, now_us)
        orders.append([name for name in order if name != "b"])
    without, with_one = orders
    assert without == with_one and "older" in without[:-1]


def test_a_time_without_requests_does_not_make_the_queue_look_slow() -> None:
    room, second = AdmissionQueue(), 1_000_000

    def fill(since_us: int) -> None:
        """A request leaves each second, so that one more waits for each one ahead."""
        for number in range(4 * ENOUGH):
            room.enter(entry(f"{since_us}.{number}", at_us=since_us), since_us, AGES)
        for number in range(1, 2 * ENOUGH):
            taken(room, 1, AGES, since_us + number * second)

    fill(0)
    taken(room, len(room.entries), AGES, 2 * ENOUGH * second)
    fill(3600 * second)
    at_us = (3600 + 2 * ENOUGH) * second
    judged = room.enter(entry("one more", at_us=at_us), at_us, AGES)
    assert judged.ahead_requests == 2 * ENOUGH + 1
    assert judged.predicted_us < 2 * judged.ahead_requests * second
