"""I14 about the blocks that a corrupt engine wrote: checkpoints, and the caches of engines that restored them."""

from __future__ import annotations

from relume.chaos.validators.promises.workers import i14_prefix_caches
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind
from tests.chaos.test_corrupt_workers import RIGHT, WrongWorker
from tests.policies.story import (
    Story,
    decided,
    died,
    ready,
    replica_started,
    started,
)


class WithHolder(WrongWorker):
    """The state daemon of w1 holds a block of q."""

    def __init__(self) -> None:
        super().__init__()
        self.worker("w2")
        daemon = v.StateDaemonStarted(
            worker="w1", boot="b1", epoch=1, address="tcp://w1", budget_bytes=9999, family="f"
        )
        self.tell("w.w1", daemon)
        self.written(1)

    def written(self, attempt: int) -> None:
        held = v.CheckpointAcknowledged(
            holder="w1", boot="b1", request="q", child=0, attempt=attempt, blocks=1, tokens=16,
            bytes=10,
        )  # fmt: skip
        self.tell("w.w1", held)

    def restored(self, attempt: int, worker: str) -> None:
        restore = v.RestoreStarted(
            incarnation=1, request="q", child=0, attempt=attempt, holder="tcp://w1", tokens=16
        )
        self.tell(f"w.{worker}", restore)

    def of_blocks(self) -> list[str]:
        found = self.violations(RIGHT, "failed")
        return [f"{one.about} {one.detail}" for one in found if "restored" in one.detail]


def test_blocks_that_it_wrote_are_not_restored() -> None:
    log = WithHolder()
    verdict = log.quarantined()
    log.left()
    log.sent_on("replay", verdict)
    log.restored(2, "w1")
    assert log.of_blocks() == ["q/2 restored 16 tokens that w0 wrote, which is corrupt"]


def test_nor_those_that_another_attempt_restored_before_and_wrote_again() -> None:
    log = WithHolder()
    log.left(0)
    log.sent_on("continue", 0, 0)
    log.restored(2, "w1")
    log.written(2)
    verdict = log.quarantined()
    route = decided("q", 3, "w2", basis=v.Basis(verdict, 0))
    log.tell("r.r0", route)
    assert log.of_blocks() == []
    log.restored(3, "w2")
    assert log.of_blocks() == ["q/3 restored 16 tokens that w0 wrote, which is corrupt"]


class Borrowers(Story):
    """w3 restores blocks at tick 40; w0, which is corrupt, w1 and w2, which has another model, at 60."""

    def __init__(self, version: int = 11) -> None:
        super().__init__()
        self.tell("r.r0", replica_started(settings=(("version.health", str(version)),)))
        self.leader()
        for name in ("w0", "w1", "w2", "w3"):
            self.worker(name)
        self.tell("w.w2", started("w2", 2), ready("w2", 2, model="other"))
        self.healthy_ticks(40)
        self.restores("w3")
        self.healthy_ticks(20)
        for name in ("w0", "w1", "w2"):
            self.restores(name)

    def restores(self, worker: str) -> None:
        incarnation = self.fleet.workers[worker].incarnation
        event = v.RestoreStarted(
            incarnation=incarnation, request="q", child=0, attempt=2, holder="h", tokens=64
        )
        self.tell(f"w.{worker}", event)

    def convicted(self, good_tick: int) -> None:
        event = v.HealthDecided(
            worker="w0", incarnation=1, state="quarantined", failure="corruption",
            evidence="wrong", since=60, good_tick=good_tick,
        )  # fmt: skip
        self.tell("fleet", event)

    def empties(
        self,
        worker: str,
        kind: EffectKind = EffectKind.RESET_PREFIX_CACHE,
        again: int = -1,
        incarnation: int = 1,
    ) -> None:
        effects = (v.Effect(kind, worker, incarnation, "w0"),)
        event = v.EffectsDecided(
            decision="prefixes.w0.1.60",
            basis=v.Basis(1, 0),
            cause="wrong",
            effects=effects,
            again=again,
        )
        self.tell("fleet", event)

    def late(self) -> list[str]:
        """Whose cache is not emptied, after enough time."""
        self.healthy_ticks(30)
        found = [*i14_prefix_caches.check(self.groups)]
        assert {one.about for one in found} <= {"w0"}
        return [one.detail.split()[0] for one in found]


def test_engines_that_restored_since_the_last_right_answers_must_empty_their_caches() -> None:
    for good_tick, late in ((50, {"w1"}), (30, {"w3", "w1"}), (-1, {"w3", "w1"}), (61, set())):
        log = Borrowers()
        log.convicted(good_tick)
        assert set(log.late()) == late, good_tick


def test_an_emptied_cache_and_that_of_an_engine_that_ended_hold_nothing_wrong() -> None:
    log = Borrowers()
    log.convicted(-1)
    log.healthy_ticks(10)
    log.empties("w1")
    log.tell("w.w3", died("w3", 1))
    assert log.late() == []
    log = Borrowers()
    log.convicted(50)
    log.empties("w1")
    assert log.late() == ["w1"], "a restore was perhaps under way"
    log = Borrowers()
    log.empties("w1")
    log.tell("w.w3", died("w3", 1), started("w3", 2), ready("w3", 2))
    log.convicted(-1)
    assert log.late() == [], "before the verdict"


def test_only_an_order_to_the_engine_that_runs_counts_and_no_restatement() -> None:
    for more in ({"again": 0}, {"incarnation": 2}):
        log = Borrowers()
        log.convicted(50)
        log.healthy_ticks(6)
        log.empties("w1", **more)
        assert log.late() == ["w1", "w1"], more


def test_an_order_that_comes_late_or_is_another_one_empties_nothing() -> None:
    log = Borrowers()
    log.convicted(50)
    log.empties("w1", EffectKind.CANARY)
    log.healthy_ticks(11)
    log.empties("w1")
    assert log.late() == ["w1"]


def test_replicas_of_an_earlier_version_have_no_caches_emptied() -> None:
    log = Borrowers(version=10)
    log.convicted(-1)
    assert log.late() == []
