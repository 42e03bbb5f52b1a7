"""What-if with other settings of the waiting room: what becomes of whom first."""

from __future__ import annotations

from msgspec.structs import replace

from relume.controlplane.replay.recorded_log import History
from relume.controlplane.replay.verify import verify
from relume.controlplane.replay.what_if import Outcome, parse, what_if
from relume.events.log.interface import RevisionGroup
from relume.policies.admission.admission_settings import settings_of
from tests.controlplane.test_waiting import USUAL, plane


def asked(groups: list[RevisionGroup], *words: str) -> Outcome:
    return what_if(History(groups=groups, origin="a plane"), parse(list(words)))


def first(groups: list[RevisionGroup], *words: str) -> tuple[str, str, str, bool]:
    """(request, recorded, instead, whether the log has the question) of the first difference."""
    outcome = asked(groups, *words)
    assert outcome.broken is None
    found = outcome.first
    assert found is not None
    assert found.kind == "waiting"
    assert outcome.by_kind["waiting"] == outcome.different
    return found.about, found.recorded, found.other, found.asked


async def turns() -> list[RevisionGroup]:
    """`a` and `b` go on, `s`, `low`, `s2` and `high` wait and are called by tier, as long as
    there are any."""
    async with plane() as p:
        for name, tier in (
            ("a", ""), ("b", ""), ("s", ""), ("low", "batch"), ("s2", ""), ("high", "interactive"),
        ):  # fmt: skip
            p.ask(name, tier=tier)
        for _ in range(4):
            p.now_us += 100_000
            p.decodes(*p.sent)
            await p.settle()
        assert p.sent == ["a", "b", "high", "s", "s2", "low"]
    return p.log.groups


async def test_what_was_in_force_changes_nothing() -> None:
    groups = await turns()
    outcome = asked(groups, *(f"{key}={value}" for key, value in settings_of(USUAL)))
    assert outcome.first is None
    assert outcome.decisions == verify(groups).decisions >= 10


async def test_a_wider_bound_sends_the_first_that_waited() -> None:
    groups = await turns()
    assert first(groups, "waiting-queued=3") == ("s", "waits", "is sent immediately", True)
    assert first(groups, "waiting.requests=0") == ("s", "waits", "is sent immediately", True)


async def test_a_narrower_bound_queues_one_without_a_recorded_decision() -> None:
    groups = await turns()
    assert first(groups, "waiting.queued=1") == (
        "b",
        "is sent immediately",
        "waits: saturated",
        False,
    )


async def test_a_bound_in_time_is_asked_too() -> None:
    groups = await turns()
    held = first(groups, "waiting.queued=0", "waiting.ahead_ms=1")
    assert held[0] in ("b", "s")


async def test_a_smaller_room_refuses_the_first_that_finds_none() -> None:
    groups = await turns()
    assert first(groups, "waiting.requests=1") == ("low", "waits", "is refused: room full", True)
    assert first(groups, "waiting.requests=3") == ("high", "waits", "waits in place of low", True)


async def test_a_larger_room_keeps_who_was_refused_and_who_gave_its_place() -> None:
    async with plane() as p:
        for name in ("a", "b", *(f"low{n}" for n in range(6))):
            p.ask(name, tier="batch")
        p.ask("low9", tier="batch")
        p.ask("high", tier="interactive")
    groups = p.log.groups
    outcome = asked(groups, "waiting.requests=7")
    assert outcome.first is not None
    told = outcome.first
    assert (told.about, told.recorded, told.other) == ("low9", "is refused: room full", "waits")
    assert outcome.different == 2, "and nobody makes way for `high`"


async def test_a_longer_patience_is_seen_where_one_ended() -> None:
    async with plane() as p:
        for name in ("a", "b", "x"):
            p.ask(name)
        p.now_us = 30_000_000
        p.follow()
        await p.settle()
        assert p.refused == ["x"]
    longer = first(p.log.groups, "waiting.most_ms=60000")
    assert longer == ("x", "is refused: too long", "waits on", True)


async def test_a_shorter_patience_would_have_refused_who_was_called_later() -> None:
    groups = await turns()
    told = first(groups, "waiting.most_ms=150")
    assert told == ("s2", "its turn", "is refused: too long", True), "others waited 100 ms only"
    assert asked(groups, "waiting.most_ms=29000").first is None


async def test_a_tenant_with_a_smaller_share_is_refused() -> None:
    async with plane(replace(USUAL, tenant_percent=100)) as p:
        for name in ("a", "b", "t1", "t2", "t3"):
            p.ask(name, share="t")
    told = first(p.log.groups, "waiting.tenant_percent=34")
    assert told == ("t3", "waits", "is refused: tenant share", True)
