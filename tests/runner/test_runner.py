"""Cases, fuzzing and shrinking, over a world made of a stored run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from relume.chaos.outcome import Outcome
from relume.chaos.runner import __main__ as command
from relume.chaos.runner import artifacts, fuzz, fuzz_progress, pool, shrink, world
from relume.chaos.runner.cases import Case, case_of, fixed_yaml, parse_fixed, scenario_yaml
from relume.chaos.runner.composed.compose import NOT_DRAWN, compose
from relume.chaos.runner.judge import judge
from relume.chaos.scenario import scenario_reader
from relume.chaos.scenario.catalogue import FAULTS, PHASES, applicable
from relume.chaos.scenario.problems import ScenarioError
from relume.chaos.sim.world.virtual_loop import VirtualLoop
from relume.policies.routing.routing_settings import POLICIES, RoutingConfig
from tests.runner.conftest import GOOD

# --- cases -----------------------------------------------------------------------------


@pytest.mark.full
def test_composed_scenarios_are_sound_and_reach_every_applicable_fault() -> None:
    had, steps, policies = set(), set(), set()
    for seed in range(300):
        scenario = compose(seed)
        assert scenario_reader.parse(scenario_yaml(scenario)) == scenario
        had |= {fault.what for fault in scenario.faults}
        policies.add(scenario.fleet.settings.get("routing.policy", RoutingConfig().policy))
        steps |= {fault.when.during for fault in scenario.faults}
    assert had == {name for name in FAULTS if applicable(name) and name not in NOT_DRAWN}
    assert steps == {None, *PHASES}
    assert policies == {*POLICIES}
    assert compose(7) == compose(7) != compose(8)


@pytest.mark.parametrize("name", scenario_reader.named())
def test_the_library_survives_being_written(name: str) -> None:
    path = scenario_reader.find(name)
    scenario = scenario_reader.load(path)
    assert scenario_reader.parse(scenario_yaml(scenario), folder=path.parent) == scenario


def test_a_fixed_case_is_what_it_was(tmp_path: Path) -> None:
    case = case_of("cascade", 3)
    path = tmp_path / "small.yaml"
    path.write_text(fixed_yaml(case, "a note\nof two lines"))
    back = case_of(str(path), 99)
    assert (back.scenario, back.schedule, back.fixed) == (case.scenario, case.schedule, True)
    assert back.command == f"relume-chaos run {path}"
    with pytest.raises(ScenarioError, match="no fixed case"):
        parse_fixed("a: 1\nschedule: {}\n", "x")
    whole = fixed_yaml(case).partition("\nschedule:")[0]
    at = whole.count("\n") + 2
    with pytest.raises(ScenarioError, match=f"x:{at}: schedule"):
        parse_fixed(f"{whole}\nschedule: {{seed: 1}}\n", "x")
    at = whole.partition("workers:")[0].count("\n") + 1
    with pytest.raises(ScenarioError, match=f"x:{at}: fleet.workers"):
        parse_fixed(fixed_yaml(case).replace("workers: 4", "workers: many", 1), "x")
    with pytest.raises(ScenarioError, match="x:2: "):
        parse_fixed("scenario: 1\n  schedule: [\n", "x")


# --- fuzz ------------------------------------------------------------------------------


def tried(given: fuzz.PlannedRun) -> fuzz.Ran:
    return fuzz.one(given)


@pytest.mark.full
@pytest.mark.parametrize("jobs", [1, 2])
def test_fuzz_tells_who_failed_and_keeps_only_that(played: None, tmp_path: Path, jobs: int) -> None:
    others = ["rank-killed"]
    names, waiting = fuzz.usable(["calm", "engine-killed-in-decode", *others])
    assert waiting == others
    everything, _ = fuzz.usable()
    assert {name for name in scenario_reader.named() if name != "rank-killed"} >= set(
        everything
    ) - {"composed"}
    assert everything[3::4] == ["composed"] * (len(everything) // 4)
    runs = fuzz.planned_runs(names, 0, 6, 30.0, tmp_path)
    seen: list[int] = []
    tallies, early = fuzz.fuzz(runs, jobs, None, lambda given, ran, _: seen.append(given.seed))
    assert early == "" and sorted(seen) == list(range(6))
    calm, killed = tallies["calm"], tallies["engine-killed-in-decode"]
    assert (calm.runs, calm.passed, calm.failed) == (3, 3, 0)
    assert (killed.failed, sorted(seed for seed, *_ in killed.failing)) == (3, [1, 3, 5])
    assert killed.failing[0][1] == ("I10",)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"engine-killed-in-decode-{seed}" for seed in (1, 3, 5)
    ]
    back, run = artifacts.outcome_in(tmp_path / "engine-killed-in-decode-3")
    assert judge(back).signature == ("I10",)
    assert run.command == "relume-chaos run engine-killed-in-decode --seed 3"


def test_fuzz_tells_which_faults_found_nothing_to_strike(played: None) -> None:
    planned = fuzz.PlannedRun("engine-killed-in-decode", 1, 30.0, None)
    ran = fuzz.one(planned)
    assert ran.faults == (("engine-kill", True),)
    tally = fuzz.Tally()
    for struck in (True, False, True):
        faults = (("engine-kill", struck), ("client-gone", True))
        tally.add(0, replace(ran, result="passed", faults=faults))
    lines = list(fuzz_progress.summary_lines({"composed": tally}, [], "", 1.0, Path("out")))
    assert "faults of composed that did not strike: engine-kill 1 of 3" in lines


def test_a_composed_run_is_judged_by_the_half_of_its_faults_that_struck() -> None:
    """Composed 5027: one of seven found no blocks to damage."""
    case = case_of("composed", 5027)
    planned = case.schedule.faults
    assert len(planned) == 7
    good = replace(GOOD, scenario=case.scenario, schedule=case.schedule, histories=())

    def says(struck: int) -> tuple[str, ...]:
        fired = tuple(replace(GOOD.fired[0], name=p.name) for p in planned[:struck])
        return tuple(why for why in judge(replace(good, fired=fired)).why if "fault" in why)

    assert says(7) == says(4) == ()
    assert says(3) == ("faults_fired is 3, not at least 4",)
    calm = compose(5027, without=FAULTS)
    assert not calm.faults and [bound.figure for bound in calm.expect] == ["requests"]


def test_fuzz_ends_when_its_time_is_over(played: None) -> None:
    runs = fuzz.planned_runs(["calm"], 0, 10_000, 30.0, None)
    tallies, early = fuzz.fuzz(runs, 1, 0.3, lambda *_: None)
    assert early == "time is over" and 0 < tallies["calm"].runs < 10_000


def test_fuzz_stops_at_the_first_failure(
    played: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scenarios = "calm,engine-killed-in-decode"
    argv = ["fuzz", "--stop", "--scenarios", scenarios, "--jobs", "1", "--out", str(tmp_path)]
    assert command.main(argv) == 1
    out = capsys.readouterr().out
    assert "2 runs in" in out and "1 failed" in out and fuzz.FIRST_FAILURE in out


def test_a_failure_of_the_simulator_is_a_failure_of_its_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(case: Case) -> Outcome:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(world, "simulate", broken)
    ran = fuzz.one(fuzz.PlannedRun("calm", 1, 30.0, None))
    assert (ran.result, ran.signature) == ("failed", ("RuntimeError",))
    assert "no such thing (test_runner.py:" in ran.why[0]


def test_a_run_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(case: Case) -> Outcome:
        while True:
            try:
                time.sleep(0.01)
            except Exception:  # not even this keeps it
                pass

    monkeypatch.setattr(world, "simulate", endless)
    ran = fuzz.one(fuzz.PlannedRun("calm", 1, 0.2, None))
    assert (ran.result, ran.signature) == ("failed", ("too long",))


def slowly(number: int) -> int:
    Path(os.environ["RELUME_TEST_PIDS"], str(os.getpid())).touch()
    time.sleep(0.05)
    return number


@pytest.mark.full
def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    code = (
        "import itertools, sys\n"
        "from relume.chaos.runner import pool\n"
        "from tests.runner.test_runner import slowly\n"
        "try:\n"
        "    for given, _ in pool.each(slowly, itertools.count(), 2, lambda: False):\n"
        "        print(given, flush=True)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "RELUME_TEST_PIDS": str(tmp_path)},
    )  # fmt: skip
    assert child.stdout is not None
    for _ in range(3):
        assert child.stdout.readline().strip().isdecimal()
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=200)
    assert out.endswith("interrupted\n") and child.returncode == 0
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.timeout(60)
def test_an_interrupt_while_processes_start_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pool.ProcessPoolExecutor._launch_processes

    def interrupted(executor: pool.ProcessPoolExecutor) -> None:
        launch(executor)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool.ProcessPoolExecutor, "_launch_processes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(pool.each(slowly, itertools.count(), 2, lambda: False))
    assert multiprocessing.active_children() == []


def test_fuzz_ends_in_order_when_it_is_asked_to(tmp_path: Path) -> None:
    """SIGTERM, as Ctrl-C: the summary of what was run is printed."""
    words = ["fuzz", "--seeds", "9999", "--scenarios", "calm", "--jobs", "2"]
    child = subprocess.Popen(
        [sys.executable, "-m", "relume.chaos.runner", *words, "--out", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
    until = time.monotonic() + 60
    try:
        while len(children.read_text().split()) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    assert "ended early: interrupted" in out and child.returncode in (0, 2)


INTERRUPTED_AT_START = """
import signal, sys
from multiprocessing.process import BaseProcess
from relume.chaos.runner.__main__ import main

start = BaseProcess.start

def interrupted(self):
    start(self)
    signal.raise_signal(signal.SIGTERM)

BaseProcess.start = interrupted
sys.exit(main(sys.argv[1:]))
"""


def test_fuzz_ends_when_it_is_asked_to_while_a_process_starts(tmp_path: Path) -> None:
    """The process was in no list yet: nobody ended it, and fuzz waited for it for ever."""
    words = ["fuzz", "--seeds", "9999", "--scenarios", "calm", "--jobs", "2"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT_START, *words, "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "ended early: interrupted" in done.stdout and done.returncode in (0, 2), done.stderr


def test_fuzz_ends_though_a_run_keeps_the_interrupt_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clean-up of a simulated process may swallow whatever is raised in it."""

    def swallows(given: fuzz.PlannedRun) -> fuzz.Ran:
        if given.seed == 3:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        return fuzz.Ran(result="passed")

    monkeypatch.setattr(fuzz, "one", swallows)
    before = signal.getsignal(signal.SIGTERM)
    runs = fuzz.planned_runs(["calm"], 0, 50, 1.0, None)
    tallies, early = fuzz.fuzz(runs, 1, None, lambda *_: None)
    assert (tallies["calm"].runs, early) == (3, "interrupted")
    assert signal.getsignal(signal.SIGTERM) is before


def dies(number: int) -> int:
    os._exit(3)


def test_a_process_that_dies_is_reported() -> None:
    with pytest.raises(pool.Crashed):
        list(pool.each(dies, range(5), 2, lambda: False))


@pytest.mark.parametrize(
    ("early", "status"), [("", 0), (fuzz.INTERRUPTED, 0), (fuzz.TIME_OVER, 0), ("it crashed", 2)]
)
def test_fuzz_that_broke_off_by_itself_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], early: str, status: int
) -> None:
    tallies = {"calm": fuzz.Tally(runs=1, passed=1)}
    monkeypatch.setattr(fuzz_progress, "fuzz", lambda *_: (tallies, early))
    assert command.main(["fuzz", "--scenarios", "calm"]) == status
    assert early in capsys.readouterr().out


# --- shrink ----------------------------------------------------------------------------


def test_minimal_lists_are_minimal() -> None:
    for wanted in ({3}, {0, 19}, {2, 7, 11}, set()):
        found = shrink.minimal(range(20), lambda kept, wanted=wanted: wanted <= set(kept))
        assert set(found) == wanted


@pytest.mark.full
def test_a_failure_shrinks_to_what_it_needs(played: None) -> None:
    case = case_of("cascade", 3)
    tries: list[Case] = []

    def attempt(smaller: Case) -> world.JudgedRun:
        tries.append(smaller)
        return world.judged(lambda: world.simulate(smaller), 30.0)

    found = shrink.shrink(case, attempt, time.monotonic() + 240)
    assert found.complete and found.target == "I10"
    small = found.case.schedule
    assert [request.name for request in small.requests] == ["q00003"]
    assert len(small.faults) == 1 and small.faults[0].what == "engine-kill"
    assert len(small.workers) == found.case.scenario.fleet.workers == 2
    assert len(found.case.scenario.faults) == 1
    assert small.requests[0].prompt_tokens <= 4 >= small.requests[0].output_tokens
    assert len(tries) < 120
    # A file of it fails the same way.
    back = parse_fixed(fixed_yaml(found.case), "x")
    assert judge(world.simulate(back)).signature == ("I10",)


def test_who_followed_a_request_that_is_gone_follows_the_one_before() -> None:
    case = case_of("cascade", 3)
    requests = case.schedule.requests
    last = requests[-1]
    assert last.after is not None
    kept = [requests[0], last]
    joined = shrink.with_requests(case, kept).schedule.requests
    chain = [last.after]
    while (at := next(r for r in requests if r.name == chain[-1])).after:
        chain.append(at.after)
    if requests[0].name in chain:
        assert joined[1].after == requests[0].name
    else:
        assert joined[1].after is None and joined[1].at_ns is not None


def test_what_passes_is_not_shrunk(played: None) -> None:
    with pytest.raises(shrink.NotFailing, match="passed"):
        attempt = lambda case: world.judged(lambda: world.simulate(case), 30.0)  # noqa: E731
        shrink.shrink(case_of("calm"), attempt, time.monotonic() + 60)


def test_a_limit_ends_a_case_whatever_task_runs_at_that_moment() -> None:
    """Runs on a busy machine went on without the replica that the limit had met (I17 and I22 broken)."""

    async def spins() -> None:
        while True:
            sum(range(100_000))  # the limit comes here
            await asyncio.sleep(0)

    async def case() -> None:
        spinning = asyncio.create_task(spins())
        await asyncio.sleep(1e6)
        spinning.cancel()

    loop = VirtualLoop(1)
    try:
        with pytest.raises(pool.TooLong, match="took more than"), pool.limited(0.2):
            loop.run(case())
    finally:
        loop.close()


def test_a_simulated_run_judges_its_calls_to_etcd() -> None:
    """I5 has something to judge in each run of `relume-chaos`."""
    outcome = world.simulate(case_of("two-leaders", 0))
    assert outcome.truth is not None and outcome.truth.etcd_keys is not None
    assert {"/relume/v1/own/fleet", "/relume/v1/own/w.w0"} <= {*outcome.truth.etcd_keys}
    assert not any(why != "" for why in outcome.truth.etcd_keys.values())
