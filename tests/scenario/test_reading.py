"""Scenarios are read strictly: each error has its line and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from relume.chaos.scenario.language import Closed, Poisson, Uniform
from relume.chaos.scenario.problems import ScenarioError
from relume.chaos.scenario.scenario_reader import find, load, named, parse

GOOD = """\
name: good
about: Two workers and nothing else.
fleet: {workers: 2, domains: 2, control_planes: 2, etcd: 3}
traffic:
  arrivals: {kind: poisson, per_s: 2}
  lengths: {kind: uniform, prompt: [10, 20], output: [1, 5]}
  requests: 8
faults:
  - what: engine-kill
    when: {during: decode, nth: [2, 6]}
    target: subject
expect:
  - {figure: broken_streams, most: 0}
"""


def problems(text: str) -> list[tuple[int, str, str]]:
    with pytest.raises(ScenarioError) as caught:
        parse(text)
    assert all(problem.remedy for problem in caught.value.problems)
    return [(p.line, p.place, str(p)) for p in caught.value.problems]


def only(before: str, after: str) -> tuple[int, str, str]:
    """The one problem that GOOD has with `before` replaced."""
    assert before in GOOD
    found = problems(GOOD.replace(before, after))
    assert len(found) == 1, found
    return found[0]


def test_a_scenario_is_typed() -> None:
    scenario = parse(GOOD)
    assert scenario.fleet.workers == 2 and scenario.fleet.model == "tiny"
    assert scenario.traffic.arrivals == Poisson(2.0)
    assert scenario.traffic.lengths == Uniform((10, 20), (1, 5))
    assert scenario.faults[0].when.nth == (2, 6)


@pytest.mark.parametrize(
    ("before", "after", "line", "place", "remedy"),
    [
        ("workers: 2", "workers: two", 3, "fleet.workers", "whole number"),
        ("workers: 2", "workrs: 2, workers: 2", 3, "fleet.workrs", "did you mean `workers`?"),
        ("domains: 2", "domains: 3", 3, "fleet.domains", "at most 2"),
        ("etcd: 3", "etcd: 2", 3, "fleet.etcd", "give 1"),
        ("etcd: 3", "disorder: {late_writer: r2}", 3, "fleet.disorder.late_writer", "r1"),
        ("etcd: 3", "limits: {checkpoint_kb: 9}", 3, "fleet.limits.checkpoint_kb", "checkpoint_mb"),
        ("etcd: 3", "operator: {each: [[restrt]]}", 3, "fleet.operator.each", "did you mean restart?"),
        ("etcd: 3", "settings: {health.errs: 2}", 3, "fleet.settings.health.errs", "health.errors?"),
        ("etcd: 3", "settings: {health.errors: 0}", 3, "fleet.settings.health.errors", "1 to 100"),
        ("etcd: 3", "settings: {waiting.queued: '2'}", 3, "fleet.settings.waiting.queued", "a whole number"),
        ("etcd: 3", "settings: {degradation.mode: on}", 3, "fleet.settings.degradation.mode", "in quotes"),
        ("etcd: 3", "waiting: {queued: 2}", 3, "fleet.waiting", "settings"),
        ("etcd: 3", "settings: {routing.policy: best}", 3, "fleet.settings.routing.policy", "least_load"),
        ("etcd: 3", "others: {second: 2}", 3, "fleet.others", "at most 1"),
        ("etcd: 3", "others: {tiny: 1}", 3, "fleet.others", "another name"),
        ("etcd: 3", "model: tinny", 3, "fleet.model", "did you mean tiny?"),
        ("etcd: 3", "hardware: h100", 3, "fleet.hardware", "cpu"),
        ("kind: poisson", "kind: poison", 5, "traffic.arrivals.kind", "did you mean `poisson`?"),
        ("kind: poisson", "kind: burst, size: 3", 5, "traffic.arrivals.per_s", "every_s"),
        ("per_s: 2", "per_s: .nan", 5, "traffic.arrivals.per_s", "above 0"),
        ("per_s: 2", "per_s: .inf", 5, "traffic.arrivals.per_s", "at most"),
        ("[10, 20]", "[20, 10]", 6, "traffic.lengths.prompt", "[10, 20]"),
        ("  requests: 8\n", "", 4, "traffic", "requests"),
        ("requests: 8", "for_s: 900000", 4, "traffic", "requests"),
        ("requests: 8", "tiers: [{name: a, share: 0.5}]\n  requests: 8", 7, "traffic.tiers", "1"),
        ("engine-kill", "engine-kil", 9, "faults[0].what", "did you mean engine-kill?"),
        ("engine-kill", "engine-stop", 9, "faults[0]", "for_s"),
        ("engine-kill", "holder-kill", 9, "faults[0]", "checkpoint_mb"),
        ("decode", "decod", 10, "faults[0].when.during", "did you mean decode?"),
        ("during: decode", "event: EngineRedy", 10, "faults[0].when.event", "EngineReady"),
        ("nth: [2, 6]", "where: {colour: 1}", 10, "faults[0].when.where.colour", "request"),
        ("nth: [2, 6]", "nth: [0, 6]", 10, "faults[0].when.nth", "give 1 to"),
        ("nth: [2, 6]", "at_s: 4", 10, "faults[0].when", "exactly one"),
        ("{during: decode, nth: [2, 6]}", "{at_s: 3}", 11, "faults[0].target", "w0, w1"),
        ("{during: decode, nth: [2, 6]}", "{at_s: -3}", 10, "faults[0].when.at_s", "0"),
        ("target: subject", "target: w2", 11, "faults[0].target", "w0, w1"),
        ("target: subject", "peer: etcd", 11, "faults[0].peer", "delete"),
        ("target: subject", "amount: 2", 11, "faults[0].amount", "delete"),
        ("target: subject", "pause_ms: 2", 11, "faults[0].pause_ms", "delete"),
        ("broken_streams", "broken", 13, "expect[0].figure", "broken_streams"),
        (", most: 0", "", 13, "expect[0]", "least"),
        ("expect:", "promises: [I99]\nexpect:", 12, "promises[0]", "I9"),
        ("name: good", "name: good\nname: better", 2, "name", "delete"),
    ],
)  # fmt: skip
def test_an_error_has_its_line_and_a_remedy(
    before: str, after: str, line: int, place: str, remedy: str
) -> None:
    found = problems(GOOD.replace(before, after, 1))
    assert (line, place) in [(at, where) for at, where, _ in found], found
    assert any(remedy in said for at, where, said in found if (at, where) == (line, place)), found


def test_all_errors_are_reported_together() -> None:
    text = GOOD.replace("workers: 2", "workers: no").replace("per_s: 2", "per_s: 0")
    text = text.replace("most: 0", "most: all").replace("about: Two", "abuot: Two")
    found = problems(text)
    assert [line for line, _, _ in found] == [1, 2, 3, 5, 13]
    assert "is missing" in found[0][2] and "did you mean `about`?" in found[1][2]


def test_a_file_that_is_not_yaml_is_refused_with_its_line() -> None:
    assert problems("name: x\nfleet: [1, 2\ntraffic: 3\n")[0][0] >= 2
    assert problems("")[0][0] == 1
    assert problems("- 1\n")[0][:2] == (1, "")


def test_what_is_no_text_is_refused_with_its_line(tmp_path: Path) -> None:
    assert problems("name: x\nabout: \x01\n")[0][0] == 2
    file = tmp_path / "bytes.yaml"
    file.write_bytes(b"name: x\n\nabout: \xff\n")
    with pytest.raises(ScenarioError, match=r"bytes\.yaml:3: is no text"):
        load(file)


def test_an_alias_within_itself_ends() -> None:
    assert "too deep" in problems("name: &a [*a]\n")[0][2]


def test_a_closed_loop_needs_a_number_of_requests() -> None:
    closed = GOOD.replace("{kind: poisson, per_s: 2}", "{kind: closed, clients: 3, think_s: 0.5}")
    assert parse(closed).traffic.arrivals == Closed(3, 0.5)
    assert problems(closed.replace("requests: 8", "for_s: 60"))[0][1] == "traffic"


def test_a_scenario_is_found_by_name_or_by_file(tmp_path: Path) -> None:
    assert find("calm") == named()["calm"]
    own = tmp_path / "own.yaml"
    own.write_text(GOOD)
    assert find(str(own)) == own
    with pytest.raises(ScenarioError, match="did you mean calm"):
        find("clam")
