"""Histories of one key of etcd that are possible, and such that are not."""

from __future__ import annotations

import asyncio
import itertools
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from relume.chaos.call_recorder import CallRecorder
from relume.chaos.sim.etcd.key_store import Done, Header, Txn
from relume.chaos.sim.etcd.members import SimEtcd
from relume.chaos.sim.world.network import Wires
from relume.chaos.sim.world.virtual_loop import VirtualLoop
from relume.chaos.validators.linearizability import (
    NEVER,
    KeyCall,
    Value,
    _after,
    judge,
    without_implied,
)
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.keys import Keys
from tests.validators.histories.contenders import Contenders

A, B = b"a", b"b"


def put(value: bytes, begun: float, answered: float = NEVER, revision: int = 0) -> KeyCall:
    known = True if answered < NEVER else None
    return KeyCall(
        client="c", begun=begun, answered=answered, put=value, succeeded=known, revision=revision
    )


def create(value: bytes, begun: float, answered: float, revision: int) -> KeyCall:
    return replace(put(value, begun, answered, revision), compares=((0, False),))


def read(begun: float, answered: float, created: int = 0, value: bytes | None = None) -> KeyCall:
    seen = Value(created, value) if created else None
    return KeyCall(
        client="c", begun=begun, answered=answered, succeeded=True, reads=True, seen=seen
    )


POSSIBLE = {
    "reads of what was written": [put(A, 0, 1, 2), read(2, 3, 2, A)],
    "a read beside a write sees either": [put(A, 0, 1, 2), put(B, 2, 9, 3), read(3, 4, 2, A),
                                          read(5, 6, 2, B)],
    "a write without an answer took effect": [put(A, 0), read(5, 6, 7, A)],
    "a write without an answer had none": [put(A, 0), read(5, 6)],
    "it takes effect late": [put(A, 0), read(5, 6), read(7, 8, 9, A)],
    "one of two creators": [create(A, 0, 9, 2),
                            replace(create(B, 1, 8, 2), succeeded=False)],
}  # fmt: skip
IMPOSSIBLE = {
    "a stale read": [put(A, 0, 1, 2), put(B, 2, 3, 3), read(4, 5, 2, A)],
    "a lost write": [put(A, 0, 1, 2), read(4, 5)],
    "a read before its write": [read(0, 1, 2, A), put(A, 2, 3, 2)],
    "two creators": [create(A, 0, 1, 2), create(B, 2, 3, 3)],
    "no creator": [replace(create(A, 0, 1, 2), succeeded=False), read(2, 3)],
    "reads that go back": [put(A, 0, 1, 2), put(B, 2), read(3, 4, 2, B), read(5, 6, 2, A)],
}


@pytest.mark.parametrize("name", POSSIBLE)
def test_a_history_that_some_order_explains_is_possible(name: str) -> None:
    assert judge(POSSIBLE[name], is_leased=False).is_possible


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_history_that_no_order_explains_is_not(name: str) -> None:
    found = judge(IMPOSSIBLE[name], is_leased=False)
    assert found.is_possible is False and found.stuck in IMPOSSIBLE[name]


def test_a_key_with_a_lease_may_vanish_and_does_not_come_back() -> None:
    gone = [create(A, 0, 1, 2), read(2, 3), create(B, 4, 5, 4), read(6, 7, 4, B)]
    assert judge(gone, is_leased=True).is_possible
    assert judge(gone, is_leased=False).is_possible is False
    assert judge([*gone, read(8, 9, 2, A)], is_leased=True).is_possible is False


def test_the_search_gives_up_at_its_limit() -> None:
    calls = [put(b"%d" % number, 0, 100, number + 2) for number in range(12)]
    calls.append(read(101, 102, 2, b"none"))
    assert judge(calls, is_leased=False, most=500).is_possible is None


times = st.integers(0, 12)


@st.composite
def histories(draw: Any) -> list[KeyCall]:
    """A few calls, with answers that may or may not fit each other."""
    calls = []
    for number in range(draw(st.integers(1, 5))):
        begun = draw(times)
        answered = draw(st.one_of(st.just(NEVER), st.integers(begun + 1, 14)))
        if draw(st.booleans()):
            call = put(draw(st.sampled_from((A, B))), begun, answered, number + 2)
            if draw(st.booleans()):
                call = replace(call, compares=((0, False),))
            if answered < NEVER and call.compares and draw(st.booleans()):
                call = replace(call, succeeded=False)
            calls.append(call)
        elif answered < NEVER:
            created = draw(st.sampled_from((0, 2, 3, 4, 5, 6)))
            calls.append(read(begun, answered, created, draw(st.sampled_from((A, B)))))
    return calls


def brute_force(calls: list[KeyCall]) -> bool:
    """Try every order of every choice of calls that includes those with an answer."""
    known = [call for call in calls if call.answered < NEVER]
    unknown = [call for call in calls if call.answered == NEVER]
    for count in range(len(unknown) + 1):
        for some in itertools.combinations(unknown, count):
            for order in itertools.permutations([*known, *some]):
                later = itertools.combinations(order, 2)
                if any(second.answered < first.begun for first, second in later):
                    continue
                states: list[Value | None] = [None]
                for call in order:
                    states = [after for s in states for after in _after(call, s, False)]
                if states:
                    return True
    return False


@settings(deadline=None, max_examples=300)
@given(histories())
def test_the_search_finds_what_every_order_finds(calls: list[KeyCall]) -> None:
    assert judge(calls, is_leased=False).is_possible is brute_force(calls)


@st.composite
def epochs_found(draw: Any) -> list[KeyCall]:
    """A history in which most calls find that the key has one create revision, as appends do."""
    calls = draw(histories())
    for _ in range(draw(st.integers(1, 8))):
        begun = draw(times)
        answered = draw(st.integers(begun + 1, 14))
        call = KeyCall(client="c", begun=begun, answered=answered, succeeded=True)
        calls.append(replace(call, compares=((draw(st.sampled_from((2, 3, 4))), False),)))
    return calls


@settings(deadline=None, max_examples=1500)
@given(epochs_found(), st.booleans())
def test_implied_calls_change_no_judgement(calls: list[KeyCall], is_leased: bool) -> None:
    whole = judge(calls, is_leased=is_leased)
    assert judge(without_implied(calls), is_leased=is_leased).is_possible is whole.is_possible


def test_of_the_appends_of_an_epoch_the_outer_ones_remain() -> None:
    one = KeyCall(client="c", begun=0, succeeded=True, compares=((2, False),))
    appends = [replace(one, begun=n, answered=n + 0.5) for n in range(1000)]
    assert without_implied(appends) == [appends[0], appends[-1]]
    beside = replace(one, begun=0.1, answered=2000.0)
    assert beside in without_implied([*appends, beside])


# --- recorded histories ---------------------------------------------------------------------


class World:
    """A simulated cluster of three members, with contenders."""

    def __init__(self, seed: int) -> None:
        self.loop = VirtualLoop(seed)
        self.config = EtcdConfig(lease_ttl_s=2, call_timeout_ms=500, close_timeout_ms=200)
        names = ["e0", "e1", "e2"]
        self.etcd = SimEtcd(self.loop, Wires(self.loop), names, self.config)
        self.recorder = CallRecorder(self.loop.time, self.etcd.config.prefix)
        self.contenders = Contenders(self.etcd.config, self.recorder, seed)

    def run(self, faults: int = 8) -> dict[bytes, Any]:
        random = Random(self.loop.random.random())

        async def main() -> None:
            tasks = []
            for name in ("c0", "c1", "c2"):
                process = self.loop.process(name)
                log = self.etcd.log(process)
                tasks.append(process.spawn(self.contenders.fight(log, name, 3.0 * faults)))
            for _ in range(faults):
                await asyncio.sleep(random.random())
                member = random.choice(self.etcd.members)
                fault = random.choice(("isolate", "kill", "stop", "jump"))
                if fault == "jump":
                    self.etcd.jump(random.random() * 4)
                else:
                    getattr(self.etcd, fault)(member)
                    await asyncio.sleep(random.random() * 3)
                    undo = {"isolate": "rejoin", "kill": "start", "stop": "go_on"}[fault]
                    getattr(self.etcd, undo)(member)
            await asyncio.gather(*tasks)

        try:
            self.loop.run(main(), 3600.0)
        finally:
            self.etcd.close()
        return self.recorder.judge_keys()


@pytest.mark.parametrize("seed", range(4))
def test_simulated_etcd_is_linearizable_under_faults(seed: int) -> None:
    world = World(seed)
    found = world.run()
    assert len(found) == 4 and all(one.is_possible for one in found.values())
    assert any(call.answered == NEVER for call in world.recorder.calls)


def test_a_member_that_answers_reads_from_its_own_past_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    propose = SimEtcd._propose

    def stale(self: SimEtcd, member: Any, method: str, request: Any, reply: Any) -> None:
        if method == "Range" and not request.revision and member.applied > 40:
            reply(self.store.range(replace(request, revision=member.applied - 20)))
        else:
            propose(self, member, method, request, reply)

    monkeypatch.setattr(SimEtcd, "_propose", stale)
    found = World(1).run()
    assert any(one.is_possible is False for one in found.values())


def test_a_write_that_is_acknowledged_and_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, lost = SimEtcd._answer, []

    def losing(self: SimEtcd, method: str, request: Any) -> Any:
        manifests = Keys(self.config.prefix).snap
        is_one = type(request) is Txn and any(key.startswith(manifests) for key, *_ in request.puts)
        if is_one and not lost and self.store.revision > 30:
            lost.append(request)
            return Done(True, [], Header(self.store.revision + 1))
        return answer(self, method, request)

    monkeypatch.setattr(SimEtcd, "_answer", losing)
    found = World(1).run()
    assert lost and any(one.is_possible is False for one in found.values())
