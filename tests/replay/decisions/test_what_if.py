"""What-if: no divergence without a change, the right first decision with one; and windows
that go out as replay tests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relume.chaos.bench.eventlog import replay_log, replay_speed
from relume.controlplane.cli.relume_command import main
from relume.controlplane.replay.checks.decision_checks import query_of
from relume.controlplane.replay.debugger.folded_log import Timeline
from relume.controlplane.replay.debugger.log_window import cut, export_window, redacted
from relume.controlplane.replay.debugger.session import Debugger
from relume.controlplane.replay.recorded_log import History, from_file
from relume.controlplane.replay.verify import verify
from relume.controlplane.replay.what_if import DEFAULTS, BadSetting, Outcome, parse, what_if
from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.log.interface import RevisionGroup
from relume.events.wire import prefix
from relume.policies.liveness import stall
from relume.policies.routing import choose_worker
from relume.policies.state.fleet import dump
from tests.replay.decisions.test_checkpoint_decisions import log_with_plans, planned, recorded
from tests.replay.decisions.test_migration_decisions import drained
from tests.replay.decisions.test_scheduler_replay import eventful_log
from tests.replay.scene import Scene

KILLED = Path(__file__).parents[1] / "logs" / "engine-killed.rlog"


@pytest.fixture(scope="module")
def killed() -> History:
    return from_file(KILLED)


@pytest.fixture(scope="module")
def eventful() -> History:
    return History(groups=asyncio.run(eventful_log(33)), origin="a scene")


def asked(history: History, *words: str, since: int = 0) -> Outcome:
    return what_if(history, parse(list(words)), since)


def settings_in(history: History) -> list[str]:
    """The settings the log was made with, as KEY=VALUE."""
    (started, *_) = [e for _, e in recorded(history.groups, v.ReplicaStarted)]
    told = {**DEFAULTS, **dict(started.settings), "routing.policy": started.policy}
    return [f"{key}={told[key]}" for key in DEFAULTS]


@pytest.mark.full
def test_unchanged_settings_change_nothing(killed: History, eventful: History) -> None:
    for history in (killed, eventful):
        verdict = verify(history.groups, history.base)
        outcome = asked(history, *settings_in(history))
        assert outcome.decisions == verdict.decisions > 100
        assert (outcome.different, outcome.estimates) == (0, 0)
        assert outcome.first is None and outcome.broken is None


def test_first_route_by_another_policy(killed: History) -> None:
    """The first one is what a walk over all recorded decisions finds by hand."""
    outcome = asked(killed, "policy=round_robin")
    first = outcome.first
    assert first is not None and first.kind == "route"
    routes = [e for _, e in recorded(killed.groups, v.RouteDecided)]
    earlier = [r for r in routes if (r.basis.revision, r.basis.position) < _basis(first)]
    (here,) = [r for r in routes if (r.basis.revision, r.basis.position) == _basis(first)]
    assert f"{here.worker}:{here.incarnation}" == first.recorded != first.other
    turn = sum(b"r0")
    for number, event in enumerate([*earlier, here]):
        open_ = [c for c in event.candidates if not c.excluded]
        chosen = open_[(turn + number) % len(open_)]
        assert (chosen.worker == event.worker) == (event is not here)
    assert first.other == f"{chosen.worker}:{chosen.incarnation}"
    assert len(first.recorded_estimates) == 4 == len(first.other_estimates)


def _basis(found: Any) -> tuple[int, int]:
    return found.revision, found.after


def test_another_recovery_differs_first_in_the_plan(killed: History) -> None:
    (_, plan), *_ = planned(killed.groups)
    outcome = asked(killed, "checkpoint-recovery=eq6")
    first = outcome.first
    assert first is not None and first.kind == "plan"
    assert _basis(first) == (plan.basis.revision, plan.basis.position)
    assert set(outcome.by_kind) == {"plan"}
    assert first.recorded in " ".join(first.recorded_estimates)
    none = asked(killed, "checkpoints.recovery=recompute")
    assert none.first is not None and none.first.other == "no plan"
    assert none.different == len([c for c in plan.choices if c.chosen >= 0])


def test_another_placement_differs_first_in_a_holder(killed: History) -> None:
    outcome = asked(killed, "checkpoints.placement=none")
    chosen = [e for _, e in recorded(killed.groups, v.HolderChosen)]
    assert outcome.by_kind == {"holders": len([e for e in chosen if e.holders])}
    assert outcome.first is not None
    assert (outcome.first.about, outcome.first.other) == (chosen[0].request, "no holder")


def test_changed_estimates_without_effect_are_counted_separately(killed: History) -> None:
    outcome = asked(killed, "routing.request_tokens=64")
    assert outcome.first is None and outcome.estimates > 50
    assert choose_worker.REQUEST_TOKENS == 32, "only for the question"


def test_settings_from_a_revision_on(killed: History) -> None:
    whole = asked(killed, "policy=round_robin")
    assert whole.first is not None
    late = asked(killed, "policy=round_robin", since=whole.first.revision + 1)
    assert late.first is None or late.first.revision > whole.first.revision
    assert late.different < whole.different
    told = Debugger(killed).run(f"what-if policy=round_robin from {whole.first.revision + 1}")[1]
    assert told["different"] == late.different


async def silent() -> list[RevisionGroup]:
    """A log in which an engine was silent a little longer than it may be."""
    async with Scene(3, replicas=1) as scene:
        await scene.traffic(10)
        scheduler = scene.replicas["r0"].scheduler
        name, basis = scheduler.decisions.decision_id(), scheduler.decisions.basis()
        worker = scheduler.view.fleet.workers["w1"]
        config = stall.config_of(scheduler.view)
        bound = stall.bound_us(worker, config)
        scheduler.emit(
            v.StallJudged(
                decision=name,
                basis=basis,
                worker="w1",
                incarnation=worker.incarnation,
                silent_us=config.cap_us + 1,
                probe="silent",
                probe_steps=-1,
                step_age_us=0,
                bound_us=bound,
                hung=True,
            )
        )
        await scene.settled()
    return scene.log.groups


def test_silence_judged_by_another_bound() -> None:
    """A stall that the log holds is no stall under a longer bound."""
    history = History(groups=asyncio.run(silent()), origin="a scene")
    assert verify(history.groups).divergences == []
    outcome = asked(history, "stall.floor_us=600000000", "stall.cap_us=600000000")
    assert outcome.by_kind == {"stall": 1}
    assert outcome.first is not None
    assert (outcome.first.recorded, outcome.first.other) == ("hung", "not hung")


def test_moves_that_other_settings_would_not_make() -> None:
    history = History(groups=asyncio.run(drained()), origin="a scene")
    assert asked(history, *settings_in(history)).different == 0
    moves = [c for _, e in recorded(history.groups, v.MigrationPlanned) for c in e.choices]
    gone = [c for c in moves if c.chosen >= 0]
    outcome = asked(history, "migration.moves=off")
    assert outcome.by_kind == {"migration": len(gone)}
    assert outcome.first is not None and outcome.first.other == "it stays"
    assert outcome.first.about in {c.request for c in gone}


def test_a_broken_log_is_no_ground(killed: History) -> None:
    groups = [*killed.groups[:100], *killed.groups[101:]]
    assert asked(History(groups=groups, origin="cut"), "policy=round_robin").broken is not None


def test_question_of_a_route_is_as_it_was_asked(killed: History) -> None:
    event = recorded(killed.groups, v.RouteDecided)[0][1]
    assert query_of(event).lost == event.attempt - 1 == 0


def test_what_if_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    log = ["--log", str(KILLED)]
    assert main(["replay", "--what-if", "checkpoints.recovery=least_total", *log]) == 0
    assert "no decision in this log" in capsys.readouterr().out
    assert main(["replay", "--json", "--what-if", "checkpoint_recovery=eq6", *log]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["first"]["kind"] == "plan" and told["settings"] == {"checkpoints.recovery": "eq6"}
    assert main(["replay", "--what-if", "nonsense=1", *log]) == 2
    assert "no setting" in capsys.readouterr().err
    assert main(["replay", "--what-if", "waiting-queued=3", *log]) == 2
    assert "admission queue" in capsys.readouterr().err


def test_settings_without_a_recorded_decision_are_refused() -> None:
    history = History(groups=asyncio.run(log_with_plans(placement="none")), origin="a scene")
    assert asked(history, "checkpoints.placement=none").first is None
    with pytest.raises(BadSetting, match=r"placement was none here.*no such decision"):
        asked(history, "checkpoints.placement=load_aware")


# --- windows ---------------------------------------------------------------------------


@pytest.mark.parametrize("part", [(0.0, 1.0), (0.0, 0.6), (0.3, 0.9), (0.55, 1.0)])
def test_windows_verify_by_themselves(
    killed: History, eventful: History, tmp_path: Path, part: tuple[float, float]
) -> None:
    for number, history in enumerate((killed, eventful)):
        timeline = Timeline(history, spacing=100)
        first, last = (timeline.revisions[int(share * (timeline.end - 1))] for share in part)
        timeline.seek(17)
        path = tmp_path / f"{number}.rlog"
        footer = export_window(timeline, path, first, last, "a test")
        assert (footer.first, footer.last) == (first, last)
        assert timeline.at == 17
        assert main(["replay", "--verify", "--log", str(path)]) == 0
        stored = from_file(path)
        verdict = verify(stored.groups, stored.base, end=footer.end)
        assert verdict.ok and verdict.unanchored == 0
        assert verdict.decisions > 10


async def commanded() -> list[RevisionGroup]:
    """A log with clients that have names, and operators that do things."""
    async with Scene(9, replicas=1) as scene:
        scheduler = scene.replicas["r0"].scheduler
        await scene.traffic(20, "first")
        scheduler.emit(
            v.AdminCommanded(
                command_id="olga:key-17", principal="olga", command="drain", target="w1"
            )
        )
        scheduler.emit(
            v.AdminCommanded(
                command_id="olga:key-18",
                principal="olga",
                command="config",
                target="stall.factor",
                value="9",
            )
        )
        await scene.settled()
        await scene.traffic(30, "then")
        scheduler.emit(
            v.AdminCommanded(
                command_id="piet:key-19", principal="piet", command="undrain", target="w1"
            )
        )
        await scene.settled()
        await scene.traffic(20, "last")
        await scene.settled()
    return scene.log.groups


def named(groups: list[RevisionGroup]) -> list[RevisionGroup]:
    """The log with clients, tenants and traces in it, hashed and chained anew."""
    from tests.replay.tamper import rechained

    def told(record: bytes) -> bytes:
        event = codec.decode(record)
        if type(event) is v.RequestArrived:
            owner = f"secret-client-{event.request}"
            event = msgspec.structs.replace(
                event,
                client_id=owner,
                tenant="secret-tenant",
                resumable=f"secret-claim-{event.request}",
                trace="00-secret-trace",
            )
        if type(event) is v.RequestEnded and event.outcome == "completed":
            event = msgspec.structs.replace(event, detail="secret detail")
        if type(event) is v.StateHashed:
            return codec.encode(v.StateHashed(0, b""))
        return codec.encode(event)

    contents = [[[told(r) for r in s.records] for s in g.segments] for g in groups]
    return rechained(groups, contents)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_nothing_of_people_goes_out(tmp_path: Path, share: float) -> None:
    history = History(groups=named(asyncio.run(commanded())), origin="secret place")
    timeline = Timeline(history)
    first = timeline.revisions[int(share * timeline.end)]
    path = tmp_path / "window.rlog"
    export_window(timeline, path, first, timeline.revisions[-1])
    stored = from_file(path)
    everything = b"".join(r for g in stored.groups for s in g.segments for r in s.records)
    everything += dump(stored.base) if stored.base is not None else b""
    everything += path.read_bytes().splitlines()[0]
    for secret in (b"secret", b"olga", b"piet", b"key-1"):
        assert secret not in everything
    assert b"client-1" in everything and b"principal-1" in everything
    verdict = verify(stored.groups, stored.base, end=stored.footer.end if stored.footer else None)
    assert verdict.divergences == []
    if not share:
        assert verdict.answers >= 3, "the leader's answers to commands are worked out again"


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_no_hash_of_a_prompt_goes_out(tmp_path: Path, share: float) -> None:
    """And what workers hold of which prompt is the same as before, so decisions are."""
    history = History(groups=replay_speed.read(replay_log.make_log(1500, 4)), origin="")
    timeline = Timeline(history)
    first, last = timeline.revisions[int(share * timeline.end)], timeline.revisions[-1]
    path = tmp_path / "window.rlog"
    footer = export_window(timeline, path, first, last)
    before, after = cut(timeline, first, last), from_file(path)
    named = dict(zip(marks_of(before), marks_of(after), strict=True))
    assert len(named) > 500 and len(set(named.values())) == len(named)
    assert sum(b == a for b, a in named.items()) == 0
    verdict = verify(after.groups, after.base, end=footer.end)
    assert verdict.ok and verdict.contested > 50
    assert [e.candidates for _, e in recorded(after.groups, v.RouteDecided)] == [
        e.candidates for _, e in recorded(before.groups, v.RouteDecided)
    ]


def marks_of(history: History) -> list[int]:
    """Hashes of prefixes, as often as they stand there."""
    found: list[int] = []
    for worker in history.base.workers.values() if history.base is not None else ():
        found += worker.cached.marks
        found += (m for packed in worker.cached.expected.values() for m in prefix.unpack(packed))
    for group in history.groups:
        for segment in group.segments:
            for event in codec.decode_all(segment.records):
                if type(event) is v.PrefixBlocksChanged:
                    found += prefix.unpack(event.stored) + prefix.unpack(event.removed)
                elif type(event) is v.RouteDecided:
                    found += prefix.unpack(event.prefix)
    return found


def test_a_name_stays_the_same_name() -> None:
    history = History(groups=named(asyncio.run(commanded())), origin="")
    before = [e for _, e in recorded(history.groups, v.RequestArrived)]
    after = [e for _, e in recorded(redacted(history).groups, v.RequestArrived)]
    names = {b.client_id: a.client_id for b, a in zip(before, after, strict=True)}
    assert len(set(names.values())) == len(names)
    assert {a.tenant for a in after} == {"tenant-1"}
    assert [a.request for a in after] == [b.request for b in before]


def test_cut_alone_keeps_every_byte(killed: History) -> None:
    timeline = Timeline(killed)
    window = cut(timeline, 100, 200)
    assert window.groups == [g for g in killed.groups if 100 <= g.revision <= 200]
    assert verify(window.groups, window.base).divergences == []


def test_export_refuses_an_empty_window(killed: History, tmp_path: Path) -> None:
    debugger = Debugger(killed)
    with pytest.raises(ValueError, match="nothing in revisions"):
        debugger.run(f"export {tmp_path / 'x.rlog'} 200 100")
    whole = debugger.run(f"export {tmp_path / 'x.rlog'}")[1]
    assert (whole["first"], whole["last"]) == (
        killed.groups[0].revision,
        killed.groups[-1].revision,
    )
    told = debugger.run(f"export {tmp_path / 'x.rlog'} 100 end")[1]
    assert told["verified"] and told["divergences"] == 0
