"""The leader's effects: carried out once, refused when stale, known over a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest

from relume.engine_shim.agent.effects import judge
from relume.engine_shim.engine.progress import Progress
from relume.events import vocabulary as v
from relume.events.log.feature_levels import AboveFeatureLevel
from relume.events.log.memory import MemoryLog, MemoryWriter
from tests.agent.stage import staged
from tests.mixed_versions.next_build import WeatherReported


@pytest.mark.parametrize(
    ("effect", "incarnation", "held", "outcome"),
    [
        (v.Effect("hold", "w0"), 3, False, "applied"),
        (v.Effect("restart", "w0", 3), 3, False, "applied"),
        (v.Effect("restart", "w0", 2), 3, False, "refused: stale incarnation 2, now 3"),
        (v.Effect("restart", "w0", 4), 3, False, "refused: unknown incarnation 4, now 3"),
        (v.Effect("restart", "w0"), 3, True, "refused: the worker is held"),
        (v.Effect("canary", "w0", 3), 3, True, "applied"),
        (v.Effect("canary", "w0", 2), 3, False, "refused: stale incarnation 2, now 3"),
        (v.Effect("limit_batch", "w0", 3, "75"), 3, False, "applied"),
        (v.Effect("limit_batch", "w0", 2, "75"), 3, False, "refused: stale incarnation 2, now 3"),
        (v.Effect("limit_batch", "w0", 3, "0"), 3, False, "refused: no percentage"),
        (v.Effect("limit_batch", "w0", 3, ""), 3, False, "refused: no percentage"),
        (v.Effect("reset_prefix_cache", "w0", 3, "w1"), 3, True, "applied"),
        (v.Effect("explode", "w0"), 3, False, "refused: unknown kind explode"),
    ],
)
def test_judgement(effect: v.Effect, incarnation: int, held: bool, outcome: str) -> None:
    assert judge(effect, incarnation, held) == outcome


async def decide(log: MemoryLog, decision: str, *effects: v.Effect) -> None:
    """What a leader writes."""
    async with log.writer("fleet") as leader:
        leader.append(
            v.EffectsDecided(decision=decision, basis=v.Basis(1, 0), cause="admin", effects=effects)
        )


async def test_restart_is_carried_out_once(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await stage.nth(v.EngineReady, 1)
        await decide(stage.log, "d1", v.Effect("restart", "w1"), v.Effect("restart", "w0", 1))
        applied = await stage.nth(v.EffectApplied, 1)
        assert (applied.decision, applied.index, applied.outcome) == ("d1", 1, "applied")
        await stage.nth(v.EngineReady, 2)
        died = stage.events(v.EngineDied)[0]
        assert died.reason == "replaced"
        order = [type(e) for e in stage.events(v.EffectApplied, v.EngineDied)]
        assert order == [v.EffectApplied, v.EngineDied]
        await decide(stage.log, "d1", v.Effect("restart", "w1"), v.Effect("restart", "w0", 1))
        await decide(stage.log, "d2", v.Effect("restart", "w0", 1))
        refused = await stage.nth(v.EffectApplied, 2)
        assert (refused.decision, refused.outcome) == ("d2", "refused: stale incarnation 1, now 2")
        assert len(stage.events(v.EngineStarted)) == 2


async def test_a_limited_batch_is_what_the_engine_reads_and_ends_with_it(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await stage.nth(v.EngineReady, 1)
        assert Progress(str(stage.directory.progress)).batch_percent() == 100
        await decide(stage.log, "d1", v.Effect("limit_batch", "w0", 1, "75"))
        assert (await stage.nth(v.EffectApplied, 1)).outcome == "applied"
        assert Progress(str(stage.directory.progress)).batch_percent() == 75
        await decide(stage.log, "d2", v.Effect("restart", "w0", 1))
        await stage.nth(v.EngineReady, 2)
        assert Progress(str(stage.directory.progress)).batch_percent() == 100
        await decide(stage.log, "d3", v.Effect("limit_batch", "w0", 2, "40"))
        assert (await stage.nth(v.EffectApplied, 3)).outcome == "applied"
        assert Progress(str(stage.directory.progress)).batch_percent() == 40


async def test_the_engine_reads_that_its_prefix_cache_is_to_be_emptied(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await stage.nth(v.EngineReady, 1)
        page = Progress(str(stage.directory.progress))
        for count in (1, 2):
            await decide(stage.log, f"d{count}", v.Effect("reset_prefix_cache", "w0", 1, "w1"))
            assert (await stage.nth(v.EffectApplied, count)).outcome == "applied"
            assert page.prefix_resets() == count
        assert page.batch_percent() == 100


async def test_held_worker_stays_down_until_released(tmp_path: Path) -> None:
    async with staged(tmp_path, "--exit", "1", "--after", "0.3") as stage:
        await stage.nth(v.EngineStarted, 1)
        await decide(stage.log, "d1", v.Effect("hold", "w0"))
        await stage.nth(v.EngineDied, 1)
        await stage.until(lambda: stage.phase == "held")
        assert stage.events(v.EngineRestartScheduled) == []
        await decide(stage.log, "d2", v.Effect("release", "w0"))
        await stage.nth(v.EngineStarted, 2)


async def test_effects_are_not_repeated_after_a_restart_of_the_agent(tmp_path: Path) -> None:
    log = MemoryLog()
    async with staged(tmp_path, log=log) as stage:
        await stage.nth(v.EngineReady, 1)
        await decide(log, "d1", v.Effect("restart", "w0"), v.Effect("drain", "w0"))
        await stage.nth(v.EngineReady, 2)
    async with staged(tmp_path, log=log) as stage:
        await stage.nth(v.EngineReady, 3)
        assert stage.agent.describe()["engine"]["draining"]
        assert len(stage.events(v.EffectApplied)) == 2
        assert len(stage.events(v.EngineStarted)) == 3


async def test_a_new_host_learns_its_target_state_from_the_log(tmp_path: Path) -> None:
    log = MemoryLog()
    async with staged(tmp_path / "old", log=log) as stage:
        await stage.nth(v.EngineReady, 1)
        await decide(log, "d1", v.Effect("hold", "w0"), v.Effect("drain", "w0"))
        await stage.nth(v.EffectApplied, 2)
    async with staged(tmp_path / "new", log=log) as stage:
        await stage.until(lambda: stage.phase == "held")
        assert stage.agent.describe()["engine"]["draining"]
        assert len(stage.events(v.EffectApplied)) == 2
        assert len(stage.events(v.EngineStarted)) == 1


async def test_an_effect_cut_off_between_file_and_log_is_recorded_not_repeated(
    tmp_path: Path,
) -> None:
    log = MemoryLog()
    async with staged(tmp_path, log=log) as stage:
        await stage.nth(v.EngineReady, 1)
        stage.directory.remember_applied(("d1", 0), held=False, draining=False)
        await decide(log, "d1", v.Effect("restart", "w0"))
        await stage.nth(v.EffectApplied, 1)
        await decide(log, "d2", v.Effect("drain", "w0"))
        await stage.nth(v.EffectApplied, 2)
        assert len(stage.events(v.EngineStarted)) == 1


class SpooledLog(MemoryLog):
    """A log whose next writer of w.w0 finds `spooled` in its spool."""

    def __init__(self) -> None:
        super().__init__()
        self.spooled: list[Any] = []

    def writer(self, stream: str) -> MemoryWriter:
        return SpooledWriter(self, stream, self.spooled if stream == "w.w0" else [])


class SpooledWriter(MemoryWriter):
    def __init__(self, log: MemoryLog, stream: str, spooled: list[Any]) -> None:
        super().__init__(log, stream)
        self._spooled = spooled

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.append(*self._spooled)
        return self


@pytest.mark.parametrize("has_answer", [True, False])
async def test_an_answer_in_the_spool_of_an_earlier_life_is_not_repeated(
    tmp_path: Path, has_answer: bool
) -> None:
    log = SpooledLog()
    async with staged(tmp_path, log=log) as stage:
        await stage.nth(v.EngineReady, 1)
        stage.directory.remember_applied(("d1", 0), held=False, draining=True)
    await decide(log, "d1", v.Effect("drain", "w0"))
    log.spooled.append(v.EffectApplied("d1", 0) if has_answer else v.StateDaemonLost("w0", "b", ""))
    log.pause()
    async with staged(tmp_path, log=log) as stage:
        await stage.until(lambda: stage.phase == "ready")
        assert stage.events(v.EffectApplied) == []
        log.resume()
        await decide(log, "d2", v.Effect("undrain", "w0"))
        await stage.nth(v.EffectApplied, 2)
    assert sorted(e.decision for e in stage.events(v.EffectApplied)) == ["d1", "d2"]


async def test_effects_decided_while_no_agent_ran_are_carried_out(tmp_path: Path) -> None:
    log = MemoryLog()
    await decide(log, "d1", v.Effect("hold", "w0"))
    async with staged(tmp_path, log=log) as stage:
        assert (await stage.nth(v.EffectApplied, 1)).outcome == "applied"
        await stage.until(lambda: stage.phase == "held")
        assert stage.events(v.EngineStarted) == []


async def test_the_agent_learns_which_events_all_replicas_read(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await stage.nth(v.EngineReady, 1)
        journal = stage.agent._journal
        assert journal.feature_level == 1
        with pytest.raises(AboveFeatureLevel):
            journal.record(WeatherReported(sky="grey"))
        async with stage.log.writer("fleet") as leader:
            late = v.FeatureLevelRaised(level=2, was=2, replicas=("r0",))
            leader.append(v.FeatureLevelRaised(level=3, was=1, replicas=("r0",)), late)
        await stage.until(lambda: journal.feature_level == 3)
