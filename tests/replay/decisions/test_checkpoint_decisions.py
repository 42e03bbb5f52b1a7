"""Holders and recovery plans are decided again in replay, and changes to them are found by
the policies: the logs end before a hash could tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from relume.controlplane.replay.rendering import lines_of
from relume.controlplane.replay.verify import verify
from relume.controlplane.replay.why import why
from relume.events import vocabulary as v
from relume.events.log.codec import decode, encode
from relume.events.log.interface import RevisionGroup
from relume.policies.checkpoints import decisions, placement
from relume.policies.checkpoints.checkpoint_settings import CheckpointConfig
from relume.policies.recovery import plan as recovery_plan
from relume.policies.recovery.recovery_options import Estimates
from tests.replay.scene import Scene
from tests.replay.tamper import Place, places, replaced


async def log_with_plans(
    enough: Callable[[list[RevisionGroup]], object] | None = None, **config: Any
) -> list[RevisionGroup]:
    """A small log in which deaths interrupted requests of which there were checkpoints, until
    there is `enough` of it."""
    async with Scene(5, replicas=1, checkpoints=CheckpointConfig(**config)) as scene:
        held = scene.replicas["r0"].fleet
        for victim in ("w0", "w1", "w2") * 5:
            traffic = asyncio.create_task(scene.traffic(9, f"to-{victim}-{held.decisions}-"))
            while not traffic.done() and not scene.clients["r0"].running_covered(victim):
                await asyncio.sleep(0.001)
            if not traffic.done():
                scene.workers[victim].die()
                await traffic
                scene.workers[victim].start()
            await scene.settled()
            if (enough or restored)(scene.log.groups):
                break
    return scene.log.groups


def recorded(groups: list[RevisionGroup], kind: type) -> list[tuple[Place, Any]]:
    """Events of one kind with their places."""
    events = [(p, decode(groups[p[0]].segments[p[1]].records[p[2]])) for p, _ in places(groups)]
    return [(place, event) for place, event in events if type(event) is kind]


def planned(groups: list[RevisionGroup]) -> list[tuple[Place, Any]]:
    return recorded(groups, v.RecoveryPlanned)


def restored(groups: list[RevisionGroup]) -> list[str]:
    """Requests that went where their plan had them, and were restored there."""
    done = {e.request for _, e in recorded(groups, v.RestoreDone)}
    chosen = [c for _, e in planned(groups) for c in e.choices if c.chosen >= 0]
    meant = {c.request for c in chosen if c.options[c.chosen].kind == "restore"}
    kept = {e.request for _, e in recorded(groups, v.RouteDecided) if e.policy == "planned"}
    return sorted(done & meant & kept)


@pytest.fixture(scope="module")
def groups() -> list[RevisionGroup]:
    groups = asyncio.run(log_with_plans())
    assert restored(groups), "nothing was restored, so nothing is tested"
    return groups


def divergence(groups: list[RevisionGroup], place: Place, event: Any) -> Any:
    """What is found when the log has `event` there, and ends with it."""
    tampered = replaced(groups, place, encode(event))
    (found,) = verify(tampered[: place[0] + 1], limit=1).divergences
    assert found.what == "decision"
    return found


def test_holders_and_plans_replay(groups: list[RevisionGroup]) -> None:
    verdict = verify(groups)
    assert verdict.divergences == []
    assert verdict.holders > 8 and verdict.plans > 0
    routes = [e for _, e in recorded(groups, v.RouteDecided)]
    assert any(e.policy == "planned" for e in routes), "plans are kept by the dispatches"
    tiers = {e.request: e.tier for e in routes}
    for _, event in planned(groups):
        assert [c.tier for c in event.choices] == [tiers[c.request] for c in event.choices]


@pytest.mark.parametrize(
    "config", [{"placement": "neighbour"}, {"recovery": "eq6"}, {"holders": 2}]
)
def test_other_policies_replay_too(config: dict[str, Any]) -> None:
    groups = asyncio.run(log_with_plans(**config))
    verdict = verify(groups)
    assert verdict.divergences == []
    assert verdict.holders > 8
    chosen = [e for _, e in recorded(groups, v.HolderChosen)]
    assert max(len(e.holders) for e in chosen) == config.get("holders", 1)


@pytest.mark.full
def test_no_checkpoints_leave_no_trace() -> None:
    groups = asyncio.run(log_with_plans(placement="none"))
    assert verify(groups).divergences == []
    assert not recorded(groups, v.HolderChosen) and not planned(groups)


def test_another_holder_or_load_is_found(groups: list[RevisionGroup]) -> None:
    place, event = recorded(groups, v.HolderChosen)[3]
    other = next(w for w in ("w0", "w1", "w2") if w not in (*event.holders, event.primary))
    assert (
        other
        in divergence(groups, place, msgspec.structs.replace(event, holders=(other,))).expected
    )
    first, *rest = event.candidates
    lie = msgspec.structs.replace(first, load=first.load + 1)
    told = divergence(groups, place, msgspec.structs.replace(event, candidates=(lie, *rest)))
    assert f"load of {first.load + 1}," in told.expected and f"load of {first.load}," in told.actual


def test_another_plan_is_found(groups: list[RevisionGroup]) -> None:
    place, event = planned(groups)[0]
    choice = event.choices[0]
    lie = msgspec.structs.replace(choice, chosen=(choice.chosen + 1) % len(choice.options))
    divergence(groups, place, msgspec.structs.replace(event, choices=(lie, *event.choices[1:])))
    option = msgspec.structs.replace(choice.options[0], move_us=choice.options[0].move_us + 1)
    lie = msgspec.structs.replace(choice, options=(option, *choice.options[1:]))
    divergence(groups, place, msgspec.structs.replace(event, choices=(lie, *event.choices[1:])))


@pytest.mark.parametrize(
    "name, value",
    [
        ("checkpoints.beta", "5"),
        ("checkpoints.prefill_ns", "7"),
        ("checkpoints.headroom_percent", "100"),
    ],
)
def test_one_changed_weight_is_found(groups: list[RevisionGroup], name: str, value: str) -> None:
    place, event = recorded(groups, v.ReplicaStarted)[0]
    settings = tuple((n, value if n == name else old) for n, old in event.settings)
    assert settings != event.settings
    altered = replaced(groups, place, encode(msgspec.structs.replace(event, settings=settings)))
    found = verify(altered, limit=10_000).divergences
    assert [d for d in found if d.what == "decision" and d.stream == "r.r0"]


def test_a_changed_policy_is_found(
    groups: list[RevisionGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(placement, "load", lambda site, weights: site.blocks)
        assert verify(groups, limit=1).divergences[0].what == "decision"
    with monkeypatch.context() as patch:
        patch.setitem(recovery_plan._ORDERS, "least_total", recovery_plan._ORDERS["eq6"])
        patch.setattr(decisions, "prefill_ns", lambda fleet, worker, unknown: 1)
        assert verify(groups, limit=1).divergences[0].what == "decision"


@pytest.mark.parametrize(
    ("config", "word", "rule", "without"),
    [
        ({"headroom_percent": 99}, "no KV room", "_full", lambda *_: ""),
        (
            {"restore_budget_ms": 1, "latency_us": 5_000},
            "over the time budget",
            "_timely",
            lambda state, options, home: options,
        ),
    ],
)
def test_limits_of_plans_are_decided_again(
    config: dict[str, Any], word: str, rule: str, without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(groups: list[RevisionGroup]) -> bool:
        choices = [c for _, e in planned(groups) for c in e.choices]
        return any(o.excluded == word for c in choices for o in c.options)

    groups = asyncio.run(log_with_plans(limited, **config))
    assert limited(groups) and verify(groups).divergences == []
    monkeypatch.setattr(Estimates, rule, without)
    assert verify(groups, limit=1).divergences[0].what == "decision"


def test_why_shows_holders_and_how_it_continued(groups: list[RevisionGroup]) -> None:
    request = restored(groups)[0]
    choices = [c for _, e in planned(groups) for c in e.choices if c.request == request]
    found = why(groups, request)
    assert found is not None
    text = "\n".join(lines_of(found))
    assert "its checkpoint goes to w" in text and "has a recovery load of" in text
    options = [c.options[c.chosen] for c in choices if c.chosen >= 0]
    option = next(o for o in options if o.kind == "restore")
    assert f"restored on {option.worker} from {option.holder} in" in text
    assert "recompute all on" in text and "tokens were restored from" in text
    assert f", tier {choices[0].tier}" in text
    plans = [s.event for s in found.steps if type(s.event) is v.RecoveryPlanned]
    shown = {c.request for plan in plans for c in plan.choices}
    assert shown == {request}, "not the story of the others"
