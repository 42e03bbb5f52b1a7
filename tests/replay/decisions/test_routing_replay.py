"""Every routing policy replays to the same decisions, also when it changes while requests run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.log.codec import decode
from relume.events.log.interface import RevisionGroup
from relume.policies.routing import selection
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group
from tests.replay.decisions.test_scheduler_replay import assert_same, eventful_log
from tests.replay.scene import Scene


def routes(groups: list[RevisionGroup]) -> Iterator[v.RouteDecided]:
    for group in groups:
        for segment in group.segments:
            for record in segment.records:
                event = decode(record)
                if type(event) is v.RouteDecided:
                    yield event


@pytest.mark.parametrize(
    ("policy", "workers"), [*((name, 3) for name in selection.POLICIES), ("predicted_ttft", 20)]
)
async def test_an_eventful_log_of_each_policy_replays(policy: str, workers: int) -> None:
    groups = await eventful_log(1, 40, policy=policy, workers=workers)
    verdict = verify(groups)
    assert_same(verdict, 1)
    assert verdict.contested > 100
    decided = [event for event in routes(groups) if event.policy == policy]
    assert len(decided) > 100
    assert all(event.at_us >= 0 for event in decided)


async def test_predicted_times_replay_from_any_snapshot() -> None:
    groups = await eventful_log(4, 40, policy="predicted_ttft")
    fleet = Fleet()
    cuts = {len(groups) // 4, len(groups) // 2, len(groups) * 3 // 4}
    for index, group in enumerate(groups):
        apply_group(fleet, group)
        if index in cuts:
            assert_same(verify(groups[index + 1 :], fleet), 4)


async def test_a_changed_policy_decides_from_there_on() -> None:
    """By an operator's command, in the log with its principal; limits come into force alike."""
    async with Scene(7) as scene:
        await scene.traffic(30, "before")
        scheduler = scene.replicas["r0"].scheduler
        for number, (key, value) in enumerate(
            (("routing.policy", "predicted_ttft"), ("routing.slo_standard_ms", "1"),
             ("routing.shed", "on"), ("routing.policy", "nonsense"))
        ):  # fmt: skip
            command = f"op:{number}"
            scheduler.emit(
                v.AdminCommanded(
                    command_id=command, principal="op", command="config", target=key, value=value
                )
            )
            await scene.until(lambda command=command: command in _answered(scene))
        await scene.traffic(30, "after")
        await scene.settled()
    decided = list(routes(scene.log.groups))
    policies = [event.policy for event in decided if event.policy != "planned"]
    assert policies == sorted(policies), "least_load, then predicted_ttft"
    assert set(policies) == {"least_load", "predicted_ttft"}
    assert {event.refused for event in decided} == {"", "too late"}
    assert_same(verify(scene.log.groups), 7)


def _answered(scene: Scene) -> set[str]:
    """Commands that the leader carried out or refused, in the fold of every replica."""
    folds = [replica.fleet for replica in scene.replicas.values()]
    return set.intersection(*({*f.commands} - {*f.open_commands} for f in folds))
