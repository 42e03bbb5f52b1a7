"""The rules of seed 004 for moving requests, with its figures where it has some
(docs/concepts/migration.md has the table)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.events import vocabulary as v
from relume.events.vocabulary import RecoveryChoice, RecoveryOption
from relume.events.vocabulary.enums import Tier
from relume.policies.checkpoints import decisions
from relume.policies.recovery.plan import POLICIES, plan
from relume.policies.recovery.recovery_options import (
    InterruptedRequest,
    Links,
    Rules,
    StoredBlocks,
    Target,
)
from relume.policies.state.overlay.view import View
from tests.policies.checkpoints.test_checkpoints import fleet_of, lost_two
from tests.policies.story import Story, arrived, decided, engine_step, queued, replica_started

BYTES_PER_TOKEN = 40 << 10
"""Of Llama 70B on one of eight ranks: 40 MB for 1,024 tokens."""
PREFILL_NS = 200_000
"""5,000 tokens a second."""
RULES = ("completion", "least_delay", "least_total")
GONE = Target(
    worker="w0", load=0, wait_us=0, prefill_ns_per_token=PREFILL_NS, excluded="lost"
)  # fmt: skip


def target(name: str, **more: object) -> Target:
    options: dict = {"load": 0, "wait_us": 0, "prefill_ns_per_token": PREFILL_NS, **more}
    return Target(worker=name, **options)


def held(name: str, tokens: int, holder: str = "w0", missing: int = 16) -> InterruptedRequest:
    """A request of which `holder` has all but the last `missing` tokens."""
    stored = StoredBlocks(holder, tokens - missing, (tokens - missing) * BYTES_PER_TOKEN)
    return InterruptedRequest(request=name, attempt=1, tokens=tokens, stored=(stored,))


def way(choice: RecoveryChoice) -> RecoveryOption:
    assert choice.chosen >= 0
    return choice.options[choice.chosen]


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize(
    ("gb_s", "kind"),
    [
        (900, "restore"), (600, "restore"), (50, "restore"), (28, "restore"), (10, "restore"),
        (0.1, "recompute"),
    ],
)  # fmt: skip
def test_no_length_turns_restoring_into_computing_again(
    policy: str, gb_s: float, kind: str
) -> None:
    """The text has a crossover at 168K tokens for 28 GB/s. Its costs do not give one."""
    links = Links(1, int(gb_s * 1e6))
    for tokens in (256, 4096, 65_536, 131_072, 168_000, 500_000, 2_000_000):
        (choice,) = plan([held("q", tokens)], [GONE, target("w1")], links, policy=policy)
        assert way(choice).kind == kind, f"{tokens} tokens"


# --- room for KV blocks


def busy(name: str, available_blocks: int, **more: object) -> Target:
    """A worker with requests, and room for so many blocks of 16 tokens."""
    return target(name, requests=3, available_blocks=available_blocks, block_tokens=16, **more)


FAST = Links(100_000_000, 100_000_000)


@pytest.mark.parametrize("policy", POLICIES)
def test_target_without_room_is_passed_over(policy: str) -> None:
    targets = [GONE, busy("w1", 256), busy("w2", 257, wait_us=50_000, load=9)]
    (choice,) = plan([held("q", 4096)], targets, FAST, policy=policy)
    assert way(choice).worker == "w2" and not way(choice).excluded
    assert {o.excluded for o in choice.options if o.worker == "w1"} == {"no KV room"}
    (choice,) = plan([held("q", 4095)], targets, FAST, policy=policy)
    assert way(choice).worker == "w1", "256 blocks do"


@pytest.mark.parametrize("policy", POLICIES)
def test_streams_of_a_dead_worker_scatter_when_no_target_has_room_for_all(policy: str) -> None:
    """All are held beside w1, which would take all if it had the room."""
    many = [held(f"q{n}", 1000, "w1") for n in range(6)]
    slow = Links(100_000_000, 1_000)

    def shares(room: int) -> list[int]:
        others = [busy(name, room, wait_us=10_000_000, load=99) for name in ("w2", "w3")]
        targets = [GONE, busy("w1", room), *others]
        choices = plan(many, targets, slow, policy=policy)
        assert not any(way(choice).excluded for choice in choices)
        workers = [way(choice).worker for choice in choices]
        return [workers.count(t.worker) for t in targets]

    assert shares(6 * 63) == [0, 6, 0, 0]
    assert shares(2 * 63) == [0, 2, 2, 2]
    assert shares(3 * 63)[1] == 3


def test_without_room_anywhere_the_worker_with_most_room_computes() -> None:
    many = [held(f"q{n}", 1000, "w9") for n in range(3)]
    targets = [GONE, busy("w1", 50, wait_us=9_000_000), busy("w2", 40), busy("w3", -20)]
    for policy in POLICIES:
        choices = plan(many, targets, FAST, policy=policy)
        assert [way(c).worker for c in choices] == ["w1", "w2", "w1"], policy
        assert {way(c).excluded for c in choices} == {"no KV room"}


def test_want_of_room_hides_no_other_reason() -> None:
    targets = [busy("w1", 1, family="other"), busy("w2", 2, excluded="draining")]
    (choice,) = plan([held("q", 500, "w1")], targets, FAST)
    assert (way(choice).worker, way(choice).kind) == ("w1", "recompute")
    said = {(o.worker, o.kind): o.excluded for o in choice.options}
    assert said["w1", "restore"] == "fingerprint" and said["w2", "recompute"] == "draining"


def test_an_empty_worker_has_room_for_the_first() -> None:
    empty = target("w1", available_blocks=10, block_tokens=16)
    one, two = plan([held("q1", 1000), held("q2", 1000)], [GONE, empty, busy("w2", 99)], FAST)
    assert sorted((way(one).worker, way(two).worker)) == ["w1", "w2"]


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.sampled_from(("w1", "w2", "w9"))), max_size=8),
    st.lists(st.tuples(st.integers(-50, 400), st.integers(0, 2)), min_size=1, max_size=4),
    st.sampled_from(POLICIES),
)
@settings(max_examples=150, deadline=None)
def test_no_worker_gets_more_blocks_than_it_has_room_for_while_another_has(
    sizes: list[tuple[int, str]], rooms: list[tuple[int, int]], policy: str
) -> None:
    many = [
        held(f"q{n}", tokens, holder, missing=min(16, tokens))
        for n, (tokens, holder) in enumerate(sizes)
    ]
    targets = [
        target(f"w{n}", available_blocks=room, block_tokens=16, requests=requests)
        for n, (room, requests) in enumerate(rooms, 1)
    ]
    choices = plan(many, targets, FAST, policy=policy)
    left = {t.worker: t.available_blocks for t in targets}
    first = {t.worker: not t.requests for t in targets}
    taken_by = {t.worker: [c for c in choices if way(c).worker == t.worker] for t in targets}
    for worker, taken in taken_by.items():
        need = [c.tokens // 16 + 1 for c in taken if not way(c).excluded]
        alone = first[worker] and bool(need)
        assert sum(need) - (max(need) if alone else 0) <= max(left[worker], 0)
    for choice in choices:
        if way(choice).excluded:
            assert all(o.excluded for o in choice.options)
    assert plan(many, targets, FAST, policy=policy) == choices


def fill(story: Story, worker: str, kv_used: int) -> None:
    """A request of its own decodes there; all KV that its engine uses is `kv_used` blocks."""
    name = f"at-{worker}"
    story.tell("r.r0", arrived(name, 100), decided(name, worker=worker))
    changes = queued(name), v.RequestAdmitted(name, 1, 0, 7), v.FirstToken(name, 1)
    step = msgspec.structs.replace(engine_step(*changes), kv_used=kv_used)
    story.tell(f"w.{worker}", step)


def said_of(story: Story, worker: str) -> set[str]:
    """What excludes the options of a lost request of 2,100 tokens on `worker`."""
    lost = [decisions.Lost("q1", 1, 2100, ("w0:1",))]
    (choice,) = decisions.plan(View("r.r0", story.fleet), "w0", 1, lost)
    return {o.excluded for o in choice.options if o.worker == worker}


def filled(kv_used: int) -> Story:
    """w0 failed with requests; w2 uses so many of its 512 blocks, w1 is empty."""
    story = fleet_of("w0", "w1", "w2")
    lost_two(story)
    fill(story, "w2", kv_used)
    return story


def test_room_is_what_the_log_says_less_the_margin() -> None:
    """The request needs 132 blocks, and 5 % of 512 are 25."""
    assert said_of(filled(512 - 25 - 132), "w2") == {""}
    story = filled(512 - 25 - 131)
    assert said_of(story, "w2") == {"no KV room"}
    story.leader()
    story.tell("fleet", v.ConfigChanged("checkpoints.headroom_percent", "1", "c"))
    assert said_of(story, "w2") == {""}
    story.tell("fleet", v.ConfigChanged("checkpoints.headroom_percent", "100", "c"))
    assert said_of(story, "w2") == {"no KV room"}
    assert said_of(story, "w1") == {""}, "it is empty"


def test_logs_that_tell_no_headroom_decided_without_it() -> None:
    story = filled(512)
    assert said_of(story, "w2") == {"no KV room"}
    story.tell("r.r0", replica_started(settings=(("checkpoints.recovery", "least_total"),)))
    assert said_of(story, "w2") == {""}


# --- tiers


def with_tier(request: InterruptedRequest, tier: str) -> InterruptedRequest:
    return msgspec.structs.replace(request, tier=Tier(tier))


@pytest.mark.parametrize("policy", POLICIES)
def test_higher_tiers_choose_first(policy: str) -> None:
    """One of the three has room at w1, where the checkpoints are; the text sorts by priority."""
    targets = [GONE, busy("w1", 63), busy("w2", 999, wait_us=10_000_000, load=99)]
    names = "batch", "standard", "interactive"

    def at_home(*tiers: str) -> list[str]:
        many = [with_tier(held(f"q{n}", 1000, "w1"), tier) for n, tier in enumerate(tiers)]
        choices = plan(many, targets, Links(100_000_000, 1_000), policy=policy)
        assert [c.tier for c in choices] == list(tiers)
        return [c.request for c in choices if way(c).worker == "w1"]

    assert at_home(*names) == ["q2"]
    assert at_home("batch", "", "batch") == ["q1"], "one without a tier is of the standard tier"
    assert at_home("", "standard", "") == ["q0"], "as without tiers"


tiered = st.lists(
    st.tuples(
        st.integers(1, 3000),
        st.sampled_from(("w1", "w2", "w9")),
        st.sampled_from(("", "interactive", "batch")),
    ),
    max_size=8,
)


@given(tiered, st.integers(0, 400), st.sampled_from(POLICIES))
@settings(max_examples=100, deadline=None)
def test_lower_tiers_cost_a_higher_one_nothing(
    drawn: list[tuple[int, str, str]], room: int, policy: str
) -> None:
    many = [
        with_tier(held(f"q{n}", tokens, holder, missing=min(16, tokens)), tier)
        for n, (tokens, holder, tier) in enumerate(drawn)
    ]
    targets = [GONE, busy("w1", room), busy("w2", 2 * room, wait_us=5_000), target("w3")]
    choices = plan(many, targets, FAST, policy=policy)
    first = [r for r in many if r.tier == "interactive"]
    alone = plan(first, targets, FAST, policy=policy)
    assert [c for c in choices if c.tier == "interactive"] == list(alone)


# --- the time budget

BUDGET = Rules(budget_us=500_000)
OVER = "over the time budget"


def crowd(count: int, tiers: dict[int, str] | None = None) -> list[InterruptedRequest]:
    """Each takes w1 100 ms to restore, and 200 ms to compute again."""
    many = [held(f"q{n}", 1000, "w1") for n in range(count)]
    return [with_tier(r, (tiers or {}).get(n, "")) for n, r in enumerate(many)]


LINE = Links(local=984 * BYTES_PER_TOKEN // 100, remote=1, latency_us=0)
CROWDED = [GONE, *(target(f"w{n}", requests=40, waiting=32) for n in range(1, 5))]
"""Much waits everywhere: computing costs others more than a long wait for blocks costs one."""


@pytest.mark.parametrize("policy", ["least_delay", "least_total"])
def test_request_whose_blocks_come_after_the_budget_is_computed_again(policy: str) -> None:
    """Blocks arrive one request after the other: the sixth is 600 ms after the failure."""

    def away(tiers: dict[int, str] | None = None, rules: Rules = BUDGET) -> list[str]:
        choices = plan(crowd(7, tiers), CROWDED, LINE, rules, policy)
        gone = [c for c in choices if way(c).kind == "recompute"]
        for choice in gone:
            (home,) = [o for o in choice.options if o.worker == o.holder]
            assert home.excluded == OVER and home.move_us > 500_000
        return [c.request for c in gone]

    assert away(rules=Rules()) == [], "the rule alone lets the last wait for 700 ms"
    assert away() == ["q5", "q6"]
    assert away({6: "interactive"}) == ["q4", "q5"], "a higher tier is restored first"
    assert away(rules=Rules(budget_us=700_000)) == []


@pytest.mark.parametrize("policy", RULES)
def test_budget_makes_nobody_wait_longer(policy: str) -> None:
    """As the text has it, 131,072 tokens at 10 GB/s are computed again: their transfer takes 537 ms,
    and computing 26 s."""
    links = Links(1, 10_000_000)
    (choice,) = plan([held("q", 131_072)], [GONE, target("w1")], links, BUDGET, policy)
    assert way(choice).kind == "restore" and way(choice).move_us > 500_000


@given(tiered, st.integers(0, 400), st.integers(1, 50_000), st.sampled_from(POLICIES))
@settings(max_examples=150, deadline=None)
def test_late_blocks_are_chosen_only_if_computing_again_is_no_sooner(
    drawn: list[tuple[int, str, str]], room: int, budget_us: int, policy: str
) -> None:
    many = [
        with_tier(held(f"q{n}", tokens, holder, missing=min(16, tokens)), tier)
        for n, (tokens, holder, tier) in enumerate(drawn)
    ]
    targets = [GONE, busy("w1", room), busy("w2", 2 * room, wait_us=5_000), target("w3")]
    links = Links(10_000_000, 1_000_000)
    choices = plan(many, targets, links, Rules(budget_us=budget_us), policy)
    for choice in choices:
        computed = [o.done_us for o in choice.options if o.kind == "recompute" and not o.excluded]
        assert way(choice).excluded != OVER
        for option in choice.options:
            if option.excluded == OVER:
                assert option.kind == "restore" and computed and option.move_us > budget_us
        late = way(choice).kind == "restore" and way(choice).move_us > budget_us
        if late and computed and policy != "least_total":  # there others may leave the queue
            assert way(choice).done_us <= min(computed)
    unlimited = plan(many, targets, links, Rules(budget_us=1 << 40), policy)
    assert unlimited == plan(many, targets, links, Rules(), policy)


def test_budget_is_a_recorded_setting_and_moves_have_none() -> None:
    story = filled(100)
    story.leader()
    for name in ("w1", "w2"):  # 166 kB/s
        story.tell(f"w.{name}", v.LinkMeasured(1, "tcp://w1:1", 100_000, 600_000))
    assert said_of(story, "w1") == {"", OVER}
    lost = [decisions.Lost("q1", 1, 2100, ("w0:1",))]
    (request,), estimates = decisions.estimates(View("r.r0", story.fleet), "w0", 1, lost)
    assert OVER not in {o.excluded for o in estimates.options(request)}
    for value, expected in (("0", {""}), ("700", {""}), ("599", {"", OVER})):
        story.tell("fleet", v.ConfigChanged("checkpoints.restore_budget_ms", value, "c"))
        assert said_of(story, "w1") == expected, value


def test_logs_that_tell_no_budget_decided_without_it() -> None:
    story = filled(100)
    story.tell("w.w1", v.LinkMeasured(1, "tcp://w1:1", 100_000, 600_000))
    assert OVER in said_of(story, "w1")
    story.tell("r.r0", replica_started(settings=(("checkpoints.recovery", "least_total"),)))
    assert said_of(story, "w1") == {""}
