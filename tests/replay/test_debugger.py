"""The debugger on a stored log of real workers, and on logs of scenes."""

from __future__ import annotations

import asyncio
import io
import json
import random
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from relume.controlplane.cli.relume_command import main
from relume.controlplane.history import snapshots
from relume.controlplane.history.archive import Archive
from relume.controlplane.replay.debugger.debug_commands import COMMANDS, BadQuestion
from relume.controlplane.replay.debugger.folded_log import Timeline
from relume.controlplane.replay.debugger.screen import _SHOWN
from relume.controlplane.replay.debugger.session import Debugger
from relume.controlplane.replay.debugger.state_diff import diff
from relume.controlplane.replay.debugger.stop_conditions import match
from relume.controlplane.replay.recorded_log import History, from_file
from relume.events.log.entries import Entry
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary import AnyEvent
from relume.policies.state.fleet import Fleet, dump
from relume.policies.state.fold import apply_group
from tests.replay.decisions.test_scheduler_replay import eventful_log

KILLED = Path(__file__).parent / "logs" / "engine-killed.rlog"


@pytest.fixture(scope="module")
def killed() -> History:
    return from_file(KILLED)


@pytest.fixture(scope="module")
def eventful() -> History:
    return History(groups=asyncio.run(eventful_log(31)), origin="a scene")


@pytest.fixture(params=["killed", "eventful"])
def history(request: pytest.FixtureRequest) -> History:
    return request.getfixturevalue(request.param)


def folded(groups: list[RevisionGroup], place: int) -> bytes:
    fleet = Fleet()
    for group in groups[:place]:
        apply_group(fleet, group)
    return dump(fleet)


# --- the fold ------------------------------------------------------------------------


@pytest.mark.full
def test_every_place_is_the_fold_from_scratch(history: History) -> None:
    """However one comes to a place: by steps, jumps, back and forth."""
    timeline, rng = Timeline(history, spacing=37), random.Random(7)
    fleet, whole = Fleet(), [dump(Fleet())]
    for group in history.groups:
        apply_group(fleet, group)
        whole.append(dump(fleet))
    place = 0
    for _ in range(400):
        move = rng.choice((1, 1, -1, -1, 5, -5, rng.randint(-len(whole), len(whole))))
        place = max(0, min(place + move, timeline.end))
        assert dump(timeline.seek(place)) == whole[place], f"seed 7, place {place}"
    for place in range(timeline.end, 0, -1):
        before = whole[place]
        assert dump(timeline.seek(place)) == before
        timeline.seek(place - 1)
        assert dump(timeline.seek(place)) == before, "back and forward is nothing"


def test_a_step_back_does_not_fold_from_the_start(killed: History) -> None:
    timeline = Timeline(killed, spacing=50)
    timeline.seek(timeline.end)
    before = timeline.folded
    assert before == timeline.end
    for place in range(timeline.end - 1, timeline.end - 21, -1):
        timeline.seek(place)
    assert timeline.folded - before < 20 * timeline.end / 5


def test_states_kept_are_bounded(killed: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relume.controlplane.replay.debugger.folded_log.MOST", 8)
    timeline = Timeline(killed, spacing=1)
    timeline.seek(timeline.end)
    assert len(timeline._states) <= 9
    assert dump(timeline.seek(41)) == folded(killed.groups, 41)


def test_known_snapshots_spare_the_fold(killed: History) -> None:
    fleet = Fleet()
    for group in killed.groups[:200]:
        apply_group(fleet, group)
    timeline = Timeline(killed, known=[fleet])
    assert dump(timeline.seek(204)) == folded(killed.groups, 204)
    assert timeline.folded == 4


def test_snapshots_of_an_archive_are_used(killed: History, tmp_path: Path) -> None:
    groups = [g for g in killed.groups if g.segments]
    archive = Archive(tmp_path / "log-1", "log-1")
    file = archive.begin("1")
    file.add(groups)
    file.seal(groups[-1].revision)
    fleet = Fleet()
    for group in groups[:250]:
        apply_group(fleet, group)
    snapshots.write(tmp_path / "log-1", "log-1", dump(fleet), fleet.revision)
    (tmp_path / "log-1" / f"{7:016x}{snapshots.SUFFIX}").write_bytes(b"damaged")
    debugger = Debugger(from_file(tmp_path))
    debugger.run(f"at {groups[251].revision}")
    assert debugger.timeline.folded == 2
    assert dump(debugger.timeline.fleet) == folded(groups, 252)


# --- moving ----------------------------------------------------------------------------


def test_breakpoints_stop_forward_and_back(killed: History) -> None:
    debugger = Debugger(killed)
    debugger.run("break type engine_died")
    debugger.run("break type recovery_planned")
    stops = [debugger.run("continue")[1] for _ in range(3)]
    assert {s["reason"] for s in stops[:2]} == {"type recovery_planned", "type engine_died"}
    assert stops[0]["revision"] < stops[1]["revision"]
    assert (stops[2]["reason"], stops[2]["found"]) == ("end of the log", False)
    back = [debugger.run("reverse")[1] for _ in range(3)]
    assert [b["revision"] for b in back[:2]] == [stops[1]["revision"], stops[0]["revision"]]
    assert back[2]["place"] == 0
    debugger.run("delete 2")
    assert debugger.run("c")[1]["reason"] == "type engine_died"


def test_stops_at_requests_workers_and_changes_in_steps(killed: History) -> None:
    debugger = Debugger(killed)
    _, first = debugger.run("continue type first_token")
    (token, *_) = first["events"]
    assert token["event"]["type"] == "first_token"
    request = token["event"]["request"]
    _, ended = debugger.run("continue type request_ended")
    _, found = debugger.run(f"reverse request {request}")
    assert found["revision"] < ended["revision"]
    assert all(request in e["about"] for e in found["events"])
    _, worker = debugger.run("continue worker w3")
    assert worker["found"]


@pytest.mark.full
def test_searches_agree_with_a_walk(eventful: History) -> None:
    wanted = match("type", "route_decided")
    debugger, timeline = Debugger(eventful), Timeline(eventful)
    places = range(1, timeline.end + 1)
    walked = [place for place in places if any(map(wanted.event, timeline.entries(place)))]
    assert len(walked) > 5
    command = f"continue {wanted.text}"
    assert [debugger.run(command)[1]["place"] for _ in walked] == walked
    assert not debugger.run(command)[1]["found"]
    assert debugger.timeline.at == timeline.end
    back = f"reverse {wanted.text}"
    found = [debugger.run(back)[1]["place"] for _ in walked]
    assert found == [place for place in walked[::-1] if place < timeline.end] + [0] * (
        walked[-1] == timeline.end
    )


@pytest.mark.parametrize(
    "line, why",
    [
        ("continue type engine_dyed", "engine_died"),
        ("continue where delivered > 0", "--sqlite"),
        ("at yesterday", "no revision"),
        ("frobnicate", "help"),
        ("why nobody", "no request"),
        ("incident w7", "w0:1"),
        ("what-if checkpoints.recover=eq6", "checkpoints.recovery"),
        ("what-if checkpoints.recovery=magic", "eq6"),
        ("what-if stall.factor=x", "whole number"),
        ("next x", "no number"),
        ("", "help"),
    ],
)
def test_bad_questions_say_what_would_be_good(killed: History, line: str, why: str) -> None:
    with pytest.raises(BadQuestion, match=why):
        Debugger(killed).run(line)


# --- looking, causes -------------------------------------------------------------------


def test_diff_of_revisions(killed: History) -> None:
    debugger = Debugger(killed)
    _, died = debugger.run("continue type engine_died")
    changes = debugger.run(f"diff {died['revision'] - 1}")[1]["changes"]
    told = {c["path"]: (c["before"], c["after"]) for c in changes}
    assert told["workers.w0.engine"] == ("ready", "dead")
    assert told["workers.w0.deaths"] == (0, 1)
    assert not [path for path in told if path.startswith("workers.w1")]
    assert debugger.timeline.revision == died["revision"], "the cursor stays"
    assert debugger.run("diff here here")[1]["changes"] == []
    there = [c["path"] for c in debugger.run("diff 100 200")[1]["changes"]]
    swapped = debugger.run("diff 200 100")[1]["changes"]
    assert sorted(c["path"] for c in swapped) == sorted(there)


@pytest.mark.full
def test_diff_is_empty_only_for_equal_states(eventful: History) -> None:
    timeline = Timeline(eventful)
    for revision in timeline.revisions[:: max(1, timeline.end // 20)]:
        one, two = timeline.copy(revision - 1), timeline.copy(revision)
        two.order, two.revision = one.order, one.revision
        assert bool(diff(one, two)) == (dump(one) != dump(two))


def test_incident_of_a_dead_engine(killed: History) -> None:
    debugger = Debugger(killed)
    (died,) = debugger.run("incidents")[1]["incidents"]
    assert (died["subject"], died["reason"]) == ("w0:1", "killed")
    told = debugger.run("incident 1")[1]
    assert told == debugger.run("incident w0:1")[1] == debugger.run(f"incident {told['id']}")[1]
    assert told == debugger.run("failure w0")[1], "by its former name"
    assert len(told["touched"]) == told["streams"] == told["continued"] > 5
    assert {s["state"] for s in told["touched"]} == {"completed"}
    assert all(s["to"] for s in told["touched"])
    assert sum(s["restored"] > 0 for s in told["touched"]) > 5
    kinds = [e["type"] for e in told["events"]]
    for kind in ("recovery_planned", "engine_died", "restore_done", "engine_ready"):
        assert kind in kinds


def test_incident_of_a_dead_gateway(eventful: History) -> None:
    debugger = Debugger(eventful)
    lost = [r for r in debugger.run("incidents")[1]["incidents"] if r["part"] == "gateway"]
    assert lost
    told = debugger.run(f"incident {lost[0]['number']}")[1]
    kinds = {e["type"] for e in told["events"]}
    assert kinds & {"replica_lost", "replica_started"}
    assert any(s["state"] == "failed" for s in told["touched"]), "the leader ended orphans"


# --- the terminal ----------------------------------------------------------------------


def test_commands_from_arguments_print_tables(capsys: pytest.CaptureFixture[str]) -> None:
    commands = ["incidents", "incident 1", "continue type engine_died", "state", "requests"]
    commands += ["diff 200", "break worker w1", "help continue"]
    commands += ["what-if policy=round_robin", "help", "why hit-3"]
    arguments = [word for command in commands for word in ("--do", command)]
    assert main(["replay", "--log", str(KILLED), "--debug", *arguments]) == 0
    out = capsys.readouterr().out
    for text in ("w0:1", "14 streams continued", "the engine w0:1 died (killed)"):
        assert text in out
    assert "decisions repeated with routing.policy=round_robin" in out
    assert "\x1b[" not in out, "no colour where there is no terminal"


def test_commands_from_a_pipe_answer_in_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("# where\nat 20\n\nstate w0\nbogus\nat 1\n"))
    assert main(["replay", "--log", str(KILLED), "--debug", "--json"]) == 1
    here, state, error = map(json.loads, capsys.readouterr().out.splitlines())
    assert here["answer"]["revision"] == 20
    assert state["answer"]["worker"]["name"] == "w0"
    assert "bogus" in error["error"]


def test_prompt_steps_and_repeats(
    capsys: pytest.CaptureFixture[str], killed: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relume.controlplane.replay.debugger.prompt import Prompt

    prompt = Prompt(Debugger(killed))
    for line in ("at 100", "next", "", "", "nonsense"):
        assert not prompt.onecmd(line)
    assert prompt.prompt == "(103) "
    assert "no command 'nonsense'" in capsys.readouterr().out
    assert "continue" in prompt.completenames("con")
    assert "recovery_planned" in prompt.completedefault("recov", "break type recov")
    assert prompt.onecmd("quit")


def test_every_command_is_shown_and_explained() -> None:
    assert set(_SHOWN) == set(COMMANDS)
    for command in COMMANDS.values():
        assert callable(getattr(Debugger, command.method))


@pytest.mark.parametrize("kind", get_args(AnyEvent))
def test_every_subject_of_an_event_is_shown(kind: type[Struct]) -> None:
    @settings(max_examples=5, deadline=None, derandomize=True)
    @given(st.from_type(kind))
    def told(event: Struct) -> None:
        entry = Entry(revision=1, index=0, stream="r.r0", epoch=1, position=1, at_ms=0, event=event)
        assert entry.kind
        assert "" not in entry.requests | entry.workers

    told()
