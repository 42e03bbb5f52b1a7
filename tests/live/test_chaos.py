"""A scenario on real processes, from its text to what it leaves."""

from __future__ import annotations

from pathlib import Path

from relume.chaos.live import sets
from relume.chaos.live.live_fleet import run_in
from relume.chaos.live.processes.shared_fixture import Bed
from relume.chaos.runner.judge import judge
from relume.chaos.scenario import scenario_reader
from relume.chaos.validators.records import courses
from tests.live.conftest import MODEL
from tests.suite.outcomes import inconclusive

SMALL = """
name: small
about: An engine dies, a client leaves, blocks are damaged, and a replica that does not lead stops.
fleet: {workers: 2, domains: 2, control_planes: 2, checkpoint_mb: 64}
traffic:
  arrivals: {kind: closed, clients: 8}
  lengths: {kind: uniform, prompt: [40, 300], output: [500, 900]}
  requests: 32
faults:
  - what: block-corrupt
    when: {event: CheckpointsAcknowledged, nth: 2}
    target: all
    amount: 4
  - what: engine-kill
    when: {event: FirstToken, nth: 6}
    target: subject
  - what: client-gone
    when: {during: decode, nth: 12}
    target: subject
  - what: leader-stop
    when: {during: decode, nth: 14}
    target: follower
    for_s: 2
expect:
  - {figure: requests, least: 32}
  - {figure: broken_streams, most: 1}
"""


SPOOLS = """
name: spools
about: etcd stops. An agent and a replica die meanwhile, and the ends of their spools are damaged.
fleet: {workers: 2, domains: 2, control_planes: 2}
traffic:
  arrivals: {kind: closed, clients: 8}
  lengths: {kind: uniform, prompt: [40, 300], output: [100, 300]}
  requests: 32
faults:
  - what: etcd-stop
    when: {at_s: 2}
    target: all
    for_s: 14
  - what: agent-spool-torn
    when: {at_s: 6}
    target: w0
  - what: agent-spool-corrupt
    when: {at_s: 6}
    target: w1
  - what: replica-spool-corrupt
    when: {at_s: 7}
    target: r1
expect:
  - {figure: requests, least: 32}
"""


async def test_processes_whose_spools_are_damaged_return_and_lose_nothing_that_landed(
    zygote: str, tmp_path: Path
) -> None:
    said: list[str] = []
    scenario = scenario_reader.parse(SPOOLS)
    async with Bed(said.append, MODEL, zygote) as bed:
        run = await run_in(bed, scenario, 1, folder=tmp_path / "kept", say=said.append)
    told = "\n".join(said)
    verdict = judge(run)
    assert (verdict.result, sets.wrong_of(run, verdict)) == ("passed", ()), told
    assert len(run.fired) == 4 and run.drained and run.landed, told
    logs = "".join(path.read_text() for path in (tmp_path / "kept" / "logs").glob("*.log"))
    assert logs.count("part of the spool set aside") == 2 and logs.count("spool_set_aside") >= 1


async def test_a_scenario_runs_on_real_processes_and_breaks_nothing(
    zygote: str, tmp_path: Path
) -> None:
    said: list[str] = []
    scenario = scenario_reader.parse(SMALL)
    async with Bed(said.append, MODEL, zygote) as bed:
        run = await run_in(bed, scenario, 1, folder=tmp_path / "kept", say=said.append)
        assert not bed.directory.joinpath("1").exists()
    told = "\n".join(said)
    verdict = judge(run)
    assert (verdict.result, sets.wrong_of(run, verdict)) == ("passed", ()), told
    assert run.kind == "live" and run.drained and run.ended_ns > 0 and run.landed
    assert {f.what for f in run.fired} == {
        "block-corrupt", "engine-kill", "client-gone", "leader-stop"
    }, told  # fmt: skip
    ends = sets.outcomes_of(run)
    assert ends["cancelled"] == 1 and ends["completed"] >= 31 and len(ends) == 2
    undisturbed = [h for h in run.histories if h.record.undisturbed]
    assert len(undisturbed) == 32 and all(h.sent_ns < 0 for h in undisturbed)
    assert all(h.sent_ns >= 0 for h in run.histories if not h.record.undisturbed)
    moved = [course for course in courses(run.groups).values() if len(course.decisions) > 1]
    if not moved:
        inconclusive("the engine that died had nothing to do")
    assert "times of faults" in run.scenario.about
    assert list((tmp_path / "kept" / "logs").glob("w0.log"))
