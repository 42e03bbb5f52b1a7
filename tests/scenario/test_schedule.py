"""A seed decides all of a scenario, the same each time, and each part for itself."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from relume.chaos import cli
from relume.chaos.runner import shrink
from relume.chaos.runner.cases import Case
from relume.chaos.scenario import __main__ as command
from relume.chaos.scenario import catalogue, printing, request_traces
from relume.chaos.scenario.language import Scenario
from relume.chaos.scenario.problems import ScenarioError
from relume.chaos.scenario.scenario_reader import load, named, parse
from relume.chaos.scenario.schedule import NS, UNUSUAL, Request, Schedule, expand
from relume.chaos.sim.sim_faults import Faults
from relume.chaos.validators import CHECKS

TEXT = """\
name: parts
about: Everything the seed draws.
fleet: {workers: 8, domains: 4}
traffic:
  arrivals: {kind: poisson, per_s: 10}
  lengths: {kind: uniform, prompt: [100, 200], output: [1, 50]}
  tiers: [{name: gold, share: 0.25, priority: -1}, {name: plain, share: 0.75}]
  sampling: [{share: 0.5}, {share: 0.5, temperature: 0.8, seeded: false}]
  prefixes: {groups: 3, tokens: 64}
  requests: 2000
faults:
  - what: engine-kill
    when: {at_s: [1, 9]}
  - what: engine-stop
    when: {during: decode, nth: [2, 60]}
    target: subject
    for_s: [5, 10]
"""


@pytest.fixture(scope="module")
def library() -> dict[str, Scenario]:
    return {name: load(path) for name, path in named().items()}


def arrivals(how: str, **more: str) -> Schedule:
    text = TEXT.replace("{kind: poisson, per_s: 10}", how)
    for before, after in more.items():
        text = text.replace(before.replace("_", ": "), after)
    return expand(parse(text), 1)


def test_requests_name_the_models_of_the_fleet_by_their_workers() -> None:
    """Nothing else of the schedule changes."""
    one = expand(parse(TEXT), 1)
    two = expand(parse(TEXT.replace("domains: 4", "domains: 4, others: {second: 2}")), 1)
    assert two.models == {"w6": "second", "w7": "second"} and not one.models
    of_second = sum(request.model == "second" for request in two.requests)
    assert 400 < of_second < 600 and {r.model for r in two.requests} == {"tiny", "second"}
    unnamed = [replace(request, model="") for request in two.requests]
    assert replace(two, models={}, requests=tuple(unnamed)) == one
    case = shrink.with_fleet(Case("parts", parse(TEXT), two), 7)
    assert case.scenario.fleet.others == {"second": 1} and case.schedule.models == {"w6": "second"}


def test_a_seed_gives_one_schedule_in_every_process() -> None:
    script = (
        "import sys; from relume.chaos.scenario.scenario_reader import parse\n"
        "from relume.chaos.scenario.schedule import expand\n"
        "print(expand(parse(sys.stdin.read()), 7).digest())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script], input=TEXT, capture_output=True, text=True, check=True,
            env=dict(os.environ, PYTHONHASHSEED=seed),
        ).stdout.strip()
        for seed in ("0", "1")
    }  # fmt: skip
    assert said == {expand(parse(TEXT), 7).digest()}
    assert expand(parse(TEXT), 8).digest() not in said


def test_leaving_out_a_fault_or_requests_changes_nothing_else() -> None:
    whole = expand(parse(TEXT), 5)
    without = expand(parse(TEXT[: TEXT.index("  - what: engine-stop")]), 5)
    assert without.faults == whole.faults[:1] and without.requests == whole.requests
    fewer = expand(parse(TEXT.replace("requests: 2000", "requests: 50")), 5)
    assert fewer.requests == whole.requests[:50] and fewer.faults == whole.faults


def test_unusual_requests_are_a_share_of_the_streams_and_change_nothing_else() -> None:
    def requests(more: str) -> tuple[Request, ...]:
        return expand(parse(TEXT.replace("requests: 2000", f"requests: 2000\n{more}")), 3).requests

    plain, kinds = requests("  whole: 0.5"), requests("  whole: 0.5\n  unusual: 0.5")
    assert {r.client for r in plain} == {"whole", "streaming"}
    assert {r.client for r in kinds} == {"whole", "streaming", *UNUSUAL}
    assert 400 < sum(r.client in UNUSUAL for r in kinds) < 600
    for one, other in zip(plain, kinds, strict=True):
        assert replace(one, client=other.client) == other
        assert (one.client == "whole") == (other.client == "whole")


@pytest.mark.full
def test_draws_keep_their_bounds_and_shares() -> None:
    seen = [expand(parse(TEXT.replace("2000", "1")), seed).faults for seed in range(200)]
    assert {kill.target for kill, _ in seen} == {f"w{index}" for index in range(8)}
    assert all(1 * NS <= (kill.at_ns or 0) <= 9 * NS for kill, _ in seen)
    assert all(5 * NS <= (stop.for_ns or 0) <= 10 * NS for _, stop in seen)
    assert min(stop.nth for _, stop in seen) <= 4 and max(stop.nth for _, stop in seen) >= 58
    assert all(stop.event == "FirstToken" and 0.1 <= stop.fraction <= 0.9 for _, stop in seen)
    requests = expand(parse(TEXT), 3).requests
    assert {r.prompt_tokens for r in requests} == set(range(100, 201))
    assert {r.output_tokens for r in requests} == set(range(1, 51))
    gold = sum(r.tier == "gold" for r in requests)
    assert 400 < gold < 600 and all((r.priority == -1) == (r.tier == "gold") for r in requests)
    assert all((r.seed is None) == (r.temperature == 0.8) for r in requests)
    assert {r.prefix for r in requests} == {(0,), (1,), (2,)}
    assert 180 < (requests[-1].at_ns or 0) / NS < 220  # 2,000 requests at 10 a second


def test_closed_clients_follow_their_own_answers() -> None:
    requests = arrivals("{kind: closed, clients: 3, think_s: [1, 2]}").requests
    assert [r.after for r in requests[:5]] == [None, None, None, "q00000", "q00001"]
    assert all(r.at_ns is None and NS <= r.think_ns <= 2 * NS for r in requests[3:])


def test_bursts_come_together() -> None:
    requests = arrivals("{kind: burst, size: 4, every_s: 0.5}").requests
    assert [r.at_ns for r in requests[:6]] == [0, 0, 0, 0, NS // 2, NS // 2]


def test_a_time_limit_ends_arrivals() -> None:
    requests = arrivals("{kind: burst, size: 2, every_s: 1}", requests_2000="for_s: 3").requests
    assert len(requests) == 8  # at 0, 1, 2 and 3 seconds


def test_a_trace_is_followed_row_by_row(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 500, "input_length": 600, "output_length": 3, "hash_ids": [4, 9]},
        {"timestamp": 0, "input_length": 20, "output_length": 7, "hash_ids": [4]},
    ]
    with gzip.open(tmp_path / "own.jsonl.gz", "wb") as file:
        file.write(b"\n".join(map(msgspec.json.encode, lines)))
    text = TEXT.replace("kind: poisson, per_s: 10", "kind: trace, file: own.jsonl.gz, speed: 2")
    text = text.replace("  prefixes: {groups: 3, tokens: 64}\n", "")
    text = text.replace(
        "kind: uniform, prompt: [100, 200], output: [1, 50]",
        "kind: trace, file: own.jsonl.gz, output_most: 5",
    )
    first, second = expand(parse(text, folder=tmp_path), 0, tmp_path).requests
    assert (first.at_ns, first.prompt_tokens, first.output_tokens) == (0, 20, 5)
    assert (second.at_ns, second.prompt_tokens, second.prefix) == (NS // 4, 600, (4, 9))
    assert second.prefix_block == 512
    with pytest.raises(ScenarioError, match="is no trace file"):
        parse(text)


def test_a_broken_trace_says_what_is_wrong(tmp_path: Path) -> None:
    for content, said in (("a,b\n1,2\n", "columns"), ("", "no requests"),
                          ("prompt_tokens,output_tokens\n0,1\n", "without a prompt")):  # fmt: skip
        file = tmp_path / f"{len(content)}.csv"
        file.write_text(content)
        with pytest.raises(request_traces.TraceError, match=said):
            request_traces.read(file.name, tmp_path)


def test_packaged_traces_tell_their_licence() -> None:
    for name, path in request_traces.packaged().items():
        assert "Licence:" in path.read_text()[:600]
        assert request_traces.read(name, Path())[0].at_ns == 0


def uncovered(scenarios: dict[str, Scenario]) -> list[str]:
    """Applicable faults that no scenario has."""
    had = {fault.what for scenario in scenarios.values() for fault in scenario.faults}
    return [n for n in catalogue.FAULTS if catalogue.applicable(n) and n not in had]


def unjudged() -> list[str]:
    """Promises that no validator judges."""
    return [name for name in catalogue.PROMISES if name not in CHECKS]


def test_the_library_is_sound_and_covers_every_applicable_fault(
    library: dict[str, Scenario],
) -> None:
    for name, scenario in library.items():
        assert scenario.name == name
        assert expand(scenario, 1).requests
        figures = {bound.figure for bound in scenario.expect if bound.least}
        wanted = {"requests", "faults_fired"} if scenario.faults else {"requests"}
        assert wanted <= figures, f"{name} asserts no least traffic or faults"
    assert uncovered(library) == []


def test_a_feature_that_appears_without_a_scenario_is_found(
    library: dict[str, Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {name: s for name, s in library.items() if name != "rank-killed"}
    assert uncovered(kept) == []
    monkeypatch.setattr(
        catalogue, "exists", lambda module: module == "relume.engine_shim.elastic_tp"
    )
    assert uncovered(kept) == ["rank-kill"]
    assert uncovered(library) == []


def test_a_feature_that_appears_without_its_fault_in_the_simulator_is_found() -> None:
    """Live has a test of its own."""
    missing = [
        what for what in catalogue.FAULTS if not hasattr(Faults, f"_{what.replace('-', '_')}")
    ]
    assert [what for what in missing if catalogue.applicable(what)] == []
    assert "rank-kill" in missing or catalogue.applicable("rank-kill")


def test_a_promise_without_a_validator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unjudged() == []
    monkeypatch.setattr(catalogue, "PROMISES", (*catalogue.PROMISES, "I99"))
    assert unjudged() == ["I99"]


def test_what_is_not_applicable_is_marked(
    library: dict[str, Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "exists", lambda module: False)
    assert not expand(library["rank-killed"], 0).faults[0].applicable
    said = "\n".join(printing.listed(named()))
    assert "rank-kill: needs relume.engine_shim.elastic_tp" in said
    for promise in catalogue.PROMISES:
        assert (promise in CHECKS) or f"{promise}" in said.splitlines()[-1]
    monkeypatch.setattr(catalogue, "exists", lambda module: True)
    assert expand(library["rank-killed"], 0).faults[0].applicable
    assert "not yet applicable" not in "\n".join(printing.listed(named()))


def test_phases_are_made_of_events_there_are() -> None:
    for begin, end in catalogue.PHASES.values():
        assert begin in catalogue.EVENTS and end in catalogue.EVENTS


def test_the_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.main(["list"]) == 0
    assert "engine-killed-in-decode" in capsys.readouterr().out
    assert command.main(["schedule", "cascade", "--seed", "3"]) == 0
    text = capsys.readouterr().out
    assert "on RouteDecided #1 mode=continue" in text and "144 requests" in text
    assert command.main(["schedule", "cascade", "--seed", "3", "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=Schedule)
    assert found.digest() in text
    (tmp_path / "bad.yaml").write_text("name: 3\n")
    assert command.main(["schedule", str(tmp_path / "bad.yaml")]) == 2
    assert "bad.yaml:1: " in capsys.readouterr().err


def test_the_commands_of_relume_chaos_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "schedule" in capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, "-m", "relume.chaos.cli", "schedule", "calm", "--requests", "1"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "127 more requests" in done.stdout
