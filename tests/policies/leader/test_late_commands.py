"""A command that waited for the log is refused: what its operator wanted then may be wrong by now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.policies import decision_versions
from relume.policies.leader import duties
from relume.policies.leader.duties import LATE, MOST_SILENT_MS, step
from tests.policies.story import MODEL, Story, replica_started

COMMANDS = {
    "drain": ("w0", ""),
    "restart": ("w0", ""),
    "config": ("stall.factor", "9"),
    "rollout": (MODEL, ""),
    "cancel_rollout": ("", ""),
}


class Led(Story):
    """Three workers, led by r0; `r1` is another replica. `older`: replicas whose build carries out all
    commands. `answers` of the leader, which are written. `is_away`: whether the log was away, by the
    leader's clock."""

    def __init__(self, *older: str) -> None:
        super().__init__()
        self.answers: list[Any] = []
        self.is_away = False
        for name in ("r0", "r1"):
            settings = decision_versions.settings()
            if name in older:
                settings += (("version.leader", "2"),)
            self.tell(f"r.{name}", replica_started(name, settings=settings))
        for name in ("w0", "w1", "w2"):
            self.worker(name)
        self.leader()
        self.healthy_ticks(2)

    def tell(self, stream: str, *events: Any) -> Any:
        group = super().tell(stream, *events)
        owed = [
            e for event in events if self.fleet.leader
            for e in step(self.fleet, event, self.is_away)
        ]  # fmt: skip
        self.answers += owed
        if owed:
            self.tell("fleet", *owed)
        return group

    def command(self, command: str = "drain", name: str = "c") -> list[Any]:
        """r1 writes it; what the leader answers."""
        before, (target, value) = len(self.answers), COMMANDS[command]
        self.tell("r.r1", commanded(command, name, target, value))
        return self.answers[before:]


def commanded(command: str, name: str, target: str, value: str) -> v.AdminCommanded:
    return v.AdminCommanded(
        command_id=name, principal="olga", command=command, target=target, value=value
    )


def is_refused(answers: list[Any], name: str = "c") -> bool:
    return answers == [v.ConfigChanged("", LATE, name)]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_lands_under_a_new_epoch_is_refused_until_the_replica_is_back(command: str) -> None:
    led = Led()
    before = led.epochs["r.r1"]
    if command == "cancel_rollout":
        led.command("rollout", "first")
    led.own("r.r1")
    assert is_refused(led.command(command))
    led.tell("r.r1", v.StreamResumed(before, led.epochs["r.r1"], 1))
    answers = led.command(command, "again")
    assert answers and not is_refused(answers, "again")
    assert led.fleet.open_commands == {} and verify(led.groups).divergences == []


def test_what_a_killed_replica_left_in_its_spool_is_refused_by_the_next_leader_too() -> None:
    led = Led()
    led.fleet.leader = ""  # none answers
    led.own("r.r1")
    led.command()
    led.tell("r.r1", v.StreamResumed(1, led.epochs["r.r1"], 1))
    led.leader()
    assert is_refused(led.answers[-1:])


def test_a_replica_that_begins_anew_without_a_spool_is_not_late() -> None:
    led = Led()
    led.own("r.r1")
    settings = decision_versions.settings()
    led.tell("r.r1", replica_started("r1", "b2", settings=settings))
    assert type(led.command()[0]) is v.EffectsDecided


def test_a_worker_is_not_trusted_by_a_command_that_waited() -> None:
    states = []
    for is_late in (False, True):
        led = Led()
        led.tell("w.w0", b"\xc1")  # no record
        assert led.fleet.unreadable
        if is_late:
            led.own("r.r1")
        led.tell("r.r1", commanded("trust", "c", "w0", ""))
        states.append(led.fleet.unreadable["w.w0"].acknowledged)
        assert is_refused(led.answers[-1:]) == is_late
    assert states[0] and not states[1]


@pytest.mark.parametrize("older", ["r0", "r1"])
def test_one_living_replica_of_an_earlier_build_is_enough_to_carry_it_out(older: str) -> None:
    """It folds no more than that it is open."""
    led = Led(older)
    led.own("r.r1")
    assert type(led.command()[0]) is v.EffectsDecided and led.fleet.landing is UNSET
    assert verify(led.groups).divergences == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_leader_refuses_what_lands_after_a_time_without_ticks(command: str) -> None:
    """The stream may have the same epoch: after etcd itself was stopped, leases are as they were."""
    led = Led()
    if command == "cancel_rollout":
        led.command("rollout", "first")
    led.is_away = True
    assert is_refused(led.command(command))
    led.is_away = False
    ticked(led, after_ms=MOST_SILENT_MS)
    assert verify(led.groups).divergences == []


def test_an_elected_leader_refuses_what_waited_for_one() -> None:
    led = Led()
    led.fleet.leader = ""
    led.command()
    led.command("config", "d")
    led.is_away = True
    led.leader()
    assert led.answers[-2:] == [v.ConfigChanged("", LATE, name) for name in ("c", "d")]
    led.is_away = False
    ticked(led, after_ms=MOST_SILENT_MS)
    assert verify(led.groups).divergences == []


def test_a_leader_that_is_to_resign_and_trust_that_the_fold_has_given_are_not_late() -> None:
    led = Led()
    led.tell("w.w0", b"\xc1")
    led.is_away = True
    led.tell("r.r1", commanded("trust", "c", "w0", ""))
    assert [type(e) for e in led.answers[-1:]] == [v.EffectsDecided]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda e: e, []),
        (lambda e: replace(e, value="it waited for me"), ["answer"]),
        (lambda e: replace(e, decision="other"), ["answer"]),
    ],
)
def test_replay_takes_the_refusal_of_a_leader_only_for_a_command_and_as_it_is(
    change: Callable[[Any], Any], wrong: list[str]
) -> None:
    led = Led()
    led.is_away = True
    refused = duties._refused
    try:
        duties._refused = lambda name, why: [change(e) for e in refused(name, why)]
        led.command()
    finally:
        duties._refused = refused
    led.is_away = False
    ticked(led, after_ms=MOST_SILENT_MS)
    assert [d.what for d in verify(led.groups).divergences] == wrong


@pytest.mark.parametrize(("seconds", "wrong"), [(1, 1), (20, 1), (40, 0), (3600, 0)])
def test_replay_finds_a_refusal_without_a_time_of_silence(seconds: int, wrong: int) -> None:
    """Half of the time is enough: leaders that follow one another have different clocks."""
    led = Led()
    led.is_away = True
    assert is_refused(led.command())
    led.is_away = False
    ticked(led, after_ms=1000 * seconds)
    found = verify(led.groups).divergences
    assert [d.actual for d in found] == ["the log was not away"] * wrong


@pytest.mark.parametrize(("ahead_ms", "wrong"), [(4_664_000, 0), (0, 1)])
def test_the_clock_of_a_leader_that_led_on_says_why_it_refused(ahead_ms: int, wrong: int) -> None:
    """Composed 186728: its clock had jumped ahead; the next leader's had not."""
    led = Led()
    led.is_away = True
    assert is_refused(led.command())
    led.is_away = False
    tick, unix_ms = led.fleet.tick, led.fleet.tick_unix_ms
    for number, more_ms in enumerate((ahead_ms + 1000, 9000, 10_000), 1):
        led.tell("fleet", v.Tick(tick + number, unix_ms + more_ms))
    assert len(verify(led.groups).divergences) == wrong


@pytest.mark.parametrize(("ahead_ms", "wrong"), [(5_828_000, 0), (1000, 1)])
def test_a_refusal_may_land_with_the_tick_that_shows_why(ahead_ms: int, wrong: int) -> None:
    """Composed 187727: the leader refused by the tick before, and wrote both at once."""
    led = Led()
    tick, unix_ms = led.fleet.tick, led.fleet.tick_unix_ms
    led.tell("fleet", v.Tick(tick + 1, unix_ms + ahead_ms))
    led.is_away = True
    assert is_refused(led.command())
    led.is_away = False
    for number in (2, 3):
        led.tell("fleet", v.Tick(tick + number, unix_ms + ahead_ms + 1000 * number))
    assert len(verify(led.groups).divergences) == wrong


def ticked(led: Led, after_ms: int) -> None:
    """One tick was under way when the log was lost; the next ones come when it is back."""
    tick, unix_ms = led.fleet.tick, led.fleet.tick_unix_ms
    for number, more_ms in enumerate((1000, after_ms + 1000, after_ms + 2000), 1):
        led.tell("fleet", v.Tick(tick + number, unix_ms + more_ms))
