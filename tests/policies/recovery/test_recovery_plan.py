"""Recovery: restore where that ends first, nobody flooded, all alternatives kept."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from relume.policies.recovery.plan import POLICIES, plan
from relume.policies.recovery.recovery_options import (
    InterruptedRequest,
    Links,
    Rules,
    StoredBlocks,
    Target,
)

LINKS = Links(local=10_000_000, remote=1_000_000, latency_us=100)


def target(name: str, load: int = 0, wait_us: int = 0, **options: object) -> Target:
    return Target(
        worker=name,
        load=load,
        wait_us=wait_us,
        prefill_ns_per_token=100_000,
        model="m",
        family="f",
        **options,
    )  # type: ignore[arg-type]


def request(name: str, tokens: int, *stored: StoredBlocks) -> InterruptedRequest:
    return InterruptedRequest(
        request=name, attempt=1, tokens=tokens, stored=stored, model="m", family="f"
    )


def taken(choice: object) -> tuple[str, str]:
    option = choice.options[choice.chosen]  # type: ignore[attr-defined]
    return option.kind, option.worker


def test_a_long_prefix_is_restored_and_a_short_one_computed_elsewhere() -> None:
    targets = [target("w1", wait_us=60_000), target("w2")]
    long = request("long", 2000, StoredBlocks("w1", 1984, 1_000_000))
    short = request("short", 200, StoredBlocks("w1", 192, 100_000))
    a, b = plan([long, short], targets, Links(10_000_000, 100_000, latency_us=100))
    assert taken(a)[0] == "restore"
    assert taken(b) == ("restore", "w2"), "its blocks travel: less than waiting, or computing"
    busy = [target("w1", wait_us=600_000), target("w2")]
    slow = Links(10_000_000, 10, latency_us=100)
    assert taken(plan([short], busy, slow)[0]) == ("recompute", "w2")


def test_a_holder_is_not_flooded() -> None:
    targets = [target(f"w{i}") for i in range(1, 4)]
    many = [request(f"r{i}", 2000, StoredBlocks("w1", 1000, 50_000)) for i in range(6)]
    workers = [taken(c)[1] for c in plan(many, targets, LINKS)]
    assert {w: workers.count(w) for w in set(workers)} == {"w1": 2, "w2": 2, "w3": 2}


def test_eq6_as_published() -> None:
    """Not overloaded: holder. Overloaded: holder for a long prefix, else least loaded."""
    targets = [target("w1", load=100), target("w2", load=1), target("w3", load=2)]
    long = request("long", 2000, StoredBlocks("w1", 513, 1))
    short = request("short", 600, StoredBlocks("w1", 512, 1))
    rules = Rules(theta=50, tau=512)
    assert taken(plan([long], targets, LINKS, rules, "eq6")[0]) == ("restore", "w1")
    assert taken(plan([short], targets, LINKS, rules, "eq6")[0]) == ("recompute", "w2")
    assert taken(plan([short], targets, LINKS, Rules(theta=100), "eq6")[0]) == ("restore", "w1")


def test_eq6_does_not_send_all_redirected_to_one() -> None:
    targets = [target("w1", load=1000), target("w2", load=0), target("w3", load=3)]
    many = [request(f"r{i}", 600, StoredBlocks("w1", 16, 1)) for i in range(4)]
    workers = [taken(c)[1] for c in plan(many, targets, LINKS, Rules(theta=50), "eq6")]
    assert workers == ["w2", "w3", "w2", "w3"]


def test_a_worker_that_cannot_use_the_blocks_computes() -> None:
    targets = [
        Target(
            worker="w1", load=0, wait_us=0, prefill_ns_per_token=100_000, model="m", family="other"
        ),
        Target(worker="w2", load=0, wait_us=0, prefill_ns_per_token=100_000, model="n", family="f"),
    ]
    (choice,) = plan([request("r", 500, StoredBlocks("w1", 400, 10))], targets, LINKS)
    assert taken(choice) == ("recompute", "w1")
    reasons = {(o.kind, o.worker): o.excluded for o in choice.options}
    assert reasons["restore", "w1"] == "fingerprint"
    assert reasons["recompute", "w2"] == "other model"


def test_no_worker_left_is_an_answer() -> None:
    (choice,) = plan([request("r", 5)], [target("w1", excluded="suspected")], LINKS)
    assert choice.chosen == -1 and choice.options[0].excluded == "suspected"
    assert plan([request("r", 5)], [], LINKS)[0].chosen == -1


requests = st.lists(
    st.tuples(
        st.integers(1, 3000),
        st.lists(st.tuples(st.sampled_from(("w0", "w1", "w9")), st.integers(0, 3000)), max_size=2),
    ),
    max_size=7,
)
workers = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 10**6), st.sampled_from(("", "", "draining"))),
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(requests, workers, st.sampled_from(POLICIES))
def test_every_request_gets_an_open_way_if_there_is_one(
    asked: list, offered: list, policy: str
) -> None:
    interrupted = [
        request(f"r{i}", tokens, *(StoredBlocks(h, min(n, tokens), n * 10) for h, n in stored))
        for i, (tokens, stored) in enumerate(asked)
    ]
    targets = [
        target(f"w{i}", load, wait, excluded=why) for i, (load, wait, why) in enumerate(offered)
    ]
    choices = plan(interrupted, targets, LINKS, policy=policy)
    assert [c.request for c in choices] == [r.request for r in interrupted]
    open_exists = any(not t.excluded for t in targets)
    for choice in choices:
        assert (choice.chosen >= 0) == open_exists
        if choice.chosen >= 0:
            assert not choice.options[choice.chosen].excluded
        for option in choice.options:
            assert option.done_us == option.move_us + option.wait_us + option.compute_us
    if policy == "completion":
        for choice in choices:
            open_ = [o.done_us for o in choice.options if not o.excluded]
            assert not open_ or choice.options[choice.chosen].done_us == min(open_)
    assert plan(interrupted, targets, LINKS, policy=policy) == choices


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(100, 3000), min_size=1, max_size=5), st.integers(0, 200_000))
def test_joint_completion_is_near_the_best_of_all_assignments(
    sizes: list[int], wait_us: int
) -> None:
    """LPT on two workers: within 4/3 of the best makespan (Graham 1969), plus the wait."""
    targets = [target("w0", wait_us=wait_us), target("w1")]
    choices = plan([request(f"r{i}", n) for i, n in enumerate(sizes)], targets, LINKS)
    ended = max(c.options[c.chosen].done_us for c in choices)
    best = min(
        max(
            wait_us * (0 in where)
            + sum(n * 100 for n, w in zip(sizes, where, strict=True) if w == 0),
            sum(n * 100 for n, w in zip(sizes, where, strict=True) if w == 1),
        )
        for where in itertools.product((0, 1), repeat=len(sizes))
    )
    assert ended <= best * 4 // 3 + max(sizes) * 100 // 3 + 1


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(KeyError):
        plan([], [], LINKS, policy="best")


def test_least_delay_counts_what_computing_costs_others() -> None:
    """On an empty worker what is done first is best; on a crowded one computing waits."""
    slow = Links(local=1_000_000, remote=1_000_000)
    short = request("r", 1000, StoredBlocks("w0", 990, 150_000_000))
    for policy, requests, kind in (
        ("completion", 80, "recompute"),
        ("least_delay", 0, "recompute"),
        ("least_delay", 80, "restore"),
    ):
        targets = [target("w0", requests=requests), target("w1", requests=requests)]
        assert taken(plan([short], targets, slow, policy=policy)[0])[0] == kind, policy


def test_least_delay_spreads_what_comes_from_other_hosts() -> None:
    """Restored requests leave nothing to compute: only the receiving link tells that a worker
    has had enough."""
    gone = [target("w0", excluded="lost"), target("w1", excluded="lost")]
    targets = [*gone, target("w2"), target("w3")]
    many = [request(f"r{n}", 1000, StoredBlocks(f"w{n % 2}", 999, 20_000_000)) for n in range(6)]

    def spread(policy: str) -> list[int]:
        workers = [taken(c)[1] for c in plan(many, targets, LINKS, policy=policy)]
        return [workers.count("w2"), workers.count("w3")]

    assert spread("least_delay") == [3, 3]
    assert max(spread("completion")) > 3


def test_least_delay_reads_the_workers_own_host_beside_the_network() -> None:
    targets = [target("w0", excluded="lost"), target("w1")]
    far = request("far", 1000, StoredBlocks("w0", 999, 50_000_000))
    near = request("near", 900, StoredBlocks("w1", 899, 50_000_000))
    first, second = plan([far, near], targets, LINKS, policy="least_delay")
    assert taken(first) == taken(second) == ("restore", "w1")
    assert second.options[second.chosen].move_us < first.options[first.chosen].move_us


def test_least_total_keeps_long_computing_from_those_who_wait_for_a_token() -> None:
    """Three restored requests have a home at w1; what nobody holds is computed elsewhere, though
    w2 is behind, as all of a step wait for it."""
    targets = [target("w0", excluded="lost"), target("w1"), target("w2", wait_us=60_000)]
    held = [request(f"r{n}", 1000, StoredBlocks("w1", 990, 1_000_000)) for n in range(3)]
    asked = [request("anew", 900), *held]
    anew, *others = plan(asked, targets, LINKS, policy="least_total")
    assert taken(anew) == ("recompute", "w2")
    assert {taken(one) for one in others} == {("restore", "w1")}
    assert taken(plan(asked, targets, LINKS, policy="least_delay")[0]) == ("recompute", "w1")


def test_least_total_counts_who_waits_there_already() -> None:
    targets = [target("w1", requests=9, waiting=8), target("w2", requests=9, wait_us=20_000)]
    one = request("r", 500)
    assert taken(plan([one], targets, LINKS, policy="least_total")[0])[1] == "w2"
    assert taken(plan([one], targets, LINKS, policy="least_delay")[0])[1] == "w1"


def test_least_total_knows_that_an_engine_restores_one_after_the_other() -> None:
    """Four lie at w1, whose link is as quick as its own memory: two of them move."""
    even = Links(local=1_000_000, remote=1_000_000)
    targets = [target("w1"), target("w2")]
    many = [request(f"r{n}", 1000, StoredBlocks("w1", 999, 20_000_000)) for n in range(4)]
    near = [request(f"n{n}", 1000, StoredBlocks("w2", 999, 20_000_000)) for n in range(4)]
    workers = [taken(c)[1] for c in plan([*many, *near], targets, even, policy="least_total")]
    assert workers == ["w1"] * 4 + ["w2"] * 4, "nothing is gained by exchanging them"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_sends_no_request_back_to_the_engine_that_failed_it(policy: str) -> None:
    targets = [target("w1", incarnation=3), target("w2", wait_us=900_000)]
    failed = replace(request("r", 2000, StoredBlocks("w1", 1984, 1000)), avoid=("w1:3",))
    assert taken(plan([failed], targets, LINKS, policy=policy)[0])[1] == "w2"
    restarted = [target("w1", incarnation=4), target("w2", wait_us=900_000)]
    assert taken(plan([failed], restarted, LINKS, policy=policy)[0])[1] == "w1"
