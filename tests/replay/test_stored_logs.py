"""Frozen logs of real runs: every build reads, folds and explains them, and takes their
decisions again, on any CPU, under any hash seed."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relume.chaos.validators import check_all
from relume.controlplane.replay.recorded_log import History
from relume.controlplane.replay.rendering import lines_of
from relume.controlplane.replay.verify import verify
from relume.controlplane.replay.why import why
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import AttemptMode
from relume.policies.canary import answers
from relume.policies.checkpoints import placement
from relume.policies.health import canary_pace, judgement
from relume.policies.liveness import overdue, stall
from relume.policies.migration import moves
from relume.policies.rollout import rollout_steps
from relume.policies.routing import choose_worker
from relume.policies.state.fleet import Worker
from relume.policies.state.lifecycles import stream_resumption
from relume.policies.weights import comparison
from tests.replay import frozen
from tests.replay.tamper import dropped, places, swapped

ROOT = Path(__file__).parents[2]
NAMES = sorted(frozen.FROZEN)

NO_FEATURES = {
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-AVX,-FMA,-BMI2,-ERMS,-SSE4_2,-SSSE3",
    "OPENSSL_ia32cap": "~0x200000200000000:~0x20000000",
    "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F",
}
SETTINGS = {
    "seed 0": {"PYTHONHASHSEED": "0"},
    "seed 4242, CPU features off": {"PYTHONHASHSEED": "4242", **NO_FEATURES},
}


@pytest.fixture(scope="module")
def logs() -> dict[str, History]:
    return {name: frozen.read(name) for name in NAMES}


def test_the_files_are_those_that_were_recorded() -> None:
    present = sorted(path.stem for path in frozen.FOLDER.glob("*.rlog"))
    assert present == NAMES, "add a new log to frozen.FROZEN; never remove one"
    recorded = {name: digest for name, (digest, _) in frozen.FROZEN.items()}
    found = {name: frozen.digest_of(name) for name in NAMES}
    assert found == recorded, "a frozen log is never recorded anew: raise a version instead"


@pytest.mark.full
def test_every_environment_makes_the_same_of_them() -> None:
    answers = {}
    for name, settings in SETTINGS.items():
        done = subprocess.run(
            [sys.executable, "-m", "tests.replay.frozen"],
            cwd=ROOT,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{name}: {done.stderr}"
        answers[name] = json.loads(done.stdout)
    first = answers["seed 0"]
    assert all(answer == first for answer in answers.values())
    assert sorted(first) == NAMES
    for name, found in first.items():
        verdict = found["verdict"]
        assert verdict["divergences"] == [], name
        assert verdict["contested"] > 0 and verdict["hashes"] > 0, name
        assert verdict["unanchored"] == verdict["foreign"] == verdict["skipped"] == 0, name
        missing = [k.__name__ for k in frozen.FROZEN[name][1] if not found["kinds"].get(k.__name__)]
        assert not missing, f"{name} has no {missing}"
        arrived = found["kinds"]["RequestArrived"]
        assert arrived >= found["explained"] >= min(arrived, frozen.MOST_EXPLAINED // 2) > 5, name
    totals = {
        kind: sum(found["verdict"][kind] for found in first.values())
        for kind in ("contested", "stalls", "holders", "plans", "migrations", "waits", "answers")
    }
    assert totals["contested"] > 800 and totals["waits"] > 300 and totals["holders"] > 500, totals
    assert totals["plans"] > 10 and totals["migrations"] > 4 and totals["answers"] > 50, totals
    assert totals["stalls"] == 22, totals


@pytest.mark.parametrize("name", NAMES)
def test_promises_held_in_it(logs: dict[str, History], name: str) -> None:
    assert check_all(logs[name].groups, []) == []


def test_the_command_verifies_a_log() -> None:
    command = [
        sys.executable,
        "-m",
        "relume.controlplane.cli.relume_command",
        "replay",
        "--verify",
        "--json",
    ]
    done = subprocess.run(
        [*command, "--log", str(frozen.path_of("admission").relative_to(ROOT))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert json.loads(done.stdout)["waits"] == 72


def imbalanced(old: Callable[..., int]) -> Callable[..., int]:
    return lambda moving: old(moving) + 1


def heavier(old: Callable[..., int]) -> Callable[..., int]:
    return lambda site, weights: old(site, weights) + site.queue


def patient(old: Callable[..., int]) -> Callable[..., int]:
    return lambda worker, config: old(worker, config) + 1


def hasty(old: Callable[..., int]) -> Callable[..., int]:
    return lambda worker, config, is_answered=True: old(worker, config, True)


def strict(old: Callable[..., bool]) -> Callable[..., bool]:
    return lambda silent, look, *given, **more: (
        old(silent, look, *given, **more) or look.cpu_us >= 0
    )


def starting_anew(old: dict[Any, Any]) -> dict[Any, Any]:
    return dict.fromkeys(old, AttemptMode.NEW)


def by_total(old: Callable[..., tuple[str, ...]]) -> Callable[..., tuple[str, ...]]:
    def withheld_of(review: judgement.Review, model: str) -> tuple[str, ...]:
        review.by_kind = False
        return old(review, model)

    return withheld_of


def lenient(old: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *_: True


def unpriced(_: property) -> property:
    return property(lambda worker: 100)


def lonely(old: Callable[..., set[str]]) -> Callable[..., set[str]]:
    return lambda *_: set()


def nowhere(old: Callable[..., list[str]]) -> Callable[..., list[str]]:
    return lambda *_: []


def idle(old: Callable[..., set[str]]) -> Callable[..., set[str]]:
    return lambda fleet: set()


def forgetful(old: Callable[..., None]) -> Callable[..., None]:
    return lambda *_: None


def nothing(old: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *_: ("", ())


def unnamed(old: Callable[..., str]) -> Callable[..., str]:
    return lambda *_: ""


def tolerant(old: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *_: False


def forgiving(old: Callable[..., bool]) -> Callable[..., bool]:
    return choose_worker._may_return_v1


def refusing(old: Callable[..., str]) -> Callable[..., str]:
    return lambda *_: "too long a pause"


ALTERED: dict[str, tuple[Any, str, Any, str]] = {
    "routing weight": ("routing.choose_worker", "REQUEST_TOKENS", 31, "engine-killed"),
    "routing shortlist": ("routing.choose_worker", "NAMED", 7, "churn"),
    "estimate of a first token, version 1": (
        "routing.first_token_v1",
        "REPORT_US",
        2700,
        "routing",
    ),
    "estimate of a first token": ("routing.worker_estimate", "SLOWNESS_PARTS", 2, "one-estimate"),
    "digits of an estimate": ("routing.worker_estimate", "TOKEN_DIGITS", 3, "routing"),
    "recovery weight": ("recovery.plan", "AWAY", 3, "engine-killed"),
    "recovery weight of those who wait": ("recovery.plan", "HELD_UP", 1, "recoveries"),
    "placement load": (placement, "load", heavier, "restores"),
    "migration share": (moves._Imbalance, "_share", imbalanced, "migration"),
    "migration pause": (moves._Drain, "refuses", refusing, "detached-moves"),
    "share of the aged": ("admission.admission_queue", "AGED_PART", 7, "admission-steady"),
    "waits foretold": ("admission.admission_queue", "WINDOW", 32, "admission-steady"),
    "turns of tenants": ("admission.fair_queue", "QUANTUM", 512, "admission-deadlines"),
    "who waits": (judgement.Review, "_with_probes_for", lonely, "who-probes"),
    "who ends a quarantine": (answers, "is_witnessed", lenient, "damaged-weights"),
    "files that hold a worker": (comparison, "is_held", tolerant, "damaged-files"),
    "which files are right": (comparison, "_majority", nothing, "damaged-files"),
    "quarantines on their way": (judgement, "PENDING_VERSION", 99, "quarantined-as-it-left"),
    "which idle worker is slow": (canary_pace, "SLOW_CANARIES", 2, "slow-canaries"),
    "hold of the only worker": (judgement, "open_without", lenient, "only-worker"),
    "what a check needs": ("crosscheck.check_budget", "MARGIN_PERCENT", 600, "saved-checks"),
    "hosts that hold up a rollout": (rollout_steps, "_away", nowhere, "rollout-host-lost"),
    "what gives up a step": (rollout_steps, "_uncovered", unnamed, "rollout-step-given-up"),
    "who may use a spare": ("routing.saturation", "takes_spares", lenient, "batch-passes"),
    "what a spare takes": ("routing.saturation", "BATCH_RANK", 0, "batch-spares"),
    "recovery mode": ("recovery.resume_mode", "MODES", starting_anew, "recoveries"),
    "release of blocks": ("state.coverage", "RELEASED_AT_ONCE", 1, "recoveries"),
    "later release": ("state.coverage", "RELEASE_TICKS", 4, "restores"),
    "earlier release": ("state.coverage", "RELEASE_TICKS", 2, "restores"),
    "blocks of a former log's streams": ("state.coverage", "_running", idle, "log-begun"),
    "where a former log's streams run": (stream_resumption, "_place", forgetful, "log-begun"),
    "stall bound": (stall, "bound_us", patient, "stall"),
    "stall judgement": (stall, "_hung", strict, "stall-spared"),
    "silence without an answer": (overdue, "bound_us", hasty, "out-of-reach"),
    "what a step may take": (stall, "STRETCH", 10_000, "hangs"),
    "slow workers": ("health.pace", "SLOW_TICKS", 2, "breaker"),
    "turns of a suspect": (Worker, "price_percent", unpriced, "slow-steps"),
    "what is usual of steps": ("health.pace", "ENOUGH_MEASURES", 99, "slow-steps"),
    "guard of wrong results": (judgement.Review, "_withheld_of", by_total, "wrong-beside-errors"),
    "return to a drained worker": (choose_worker, "_may_return", forgiving, "unhealthy-drained"),
    "unreadable reports": (judgement, "_has_no_reports", tolerant, "unreadable-reports"),
    "failures before the window": ("health.evidence", "FADE_WINDOWS", 1, "rare-failures"),
    "levels of degradation": (
        "degradation.levels",
        "THRESHOLDS",
        (1000, 750, 500, 50),
        "degradation",
    ),
    "retries while degraded": ("degradation.effects", "MOST_RETRY_S", 30, "degradation"),
    "what agents are told": ("leader.duties", "AGENT_COMMANDS", ("drain", "undrain"), "leader"),
    "commands that waited": ("state.operator_commands", "LATE_VERSION", 99, "late-command"),
    "what the fold learns": ("state.step_times", "OVERHEAD_US", 2500, "stall"),
}
"""Changes of what is decided: the module or class, the name, its new value or what wraps it, and
a log that must not take it."""


@pytest.mark.parametrize("change", ALTERED)
def test_a_changed_decision_fails(
    logs: dict[str, History], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, value, log = ALTERED[change]
    owner = importlib.import_module(f"relume.policies.{where}") if type(where) is str else where
    old = getattr(owner, name)
    monkeypatch.setattr(owner, name, value(old) if callable(value) else value)
    assert frozen.verdict_of(logs[log], limit=1).divergences, f"{log} does not notice"


@pytest.mark.parametrize("name", NAMES)
def test_dropped_and_swapped_events_are_found(logs: dict[str, History], name: str) -> None:
    history = logs[name]
    assert history.footer is not None
    rng = random.Random(name)
    everything = [place for place, _ in places(history.groups)]
    for place in rng.sample(everything, 12 if name == "engine-killed" else 4):
        found = verify(dropped(history.groups, place), limit=1, end=history.footer.end)
        assert found.divergences, f"dropped at {place}"
        records = history.groups[place[0]].segments[place[1]].records
        if place[2] + 1 < len(records) and records[place[2]] != records[place[2] + 1]:
            found = verify(swapped(history.groups, place), limit=1, end=history.footer.end)
            assert found.divergences, f"swapped at {place}"


def test_moved_request_of_the_kill_run_is_explained(logs: dict[str, History]) -> None:
    history = logs["engine-killed"]
    restored = moved = 0
    for number in range(56):
        found = why(history.groups, f"hit-{number}")
        assert found is not None
        if len(found.decisions) > 1:
            text = "\n".join(lines_of(found))
            assert "died (killed)" in text
            assert "mode continue" in text
            assert "planned with all running requests of w0:1" in text
            moved += 1
            restored += "tokens were restored from" in text
    assert moved >= restored > 5


@pytest.mark.parametrize("name", NAMES)
def test_why_names_worker_and_outcome_of_requests(logs: dict[str, History], name: str) -> None:
    texts, seen = frozen.explained(logs[name]), 0
    for event in frozen.events_of(logs[name]):
        if type(event) is v.RequestEnded and event.outcome == "completed":
            if event.request not in texts:
                continue  # of a log with many requests some are explained
            seen += 1
            text = texts[event.request]
            assert re.search(r"\b[wp]\d+:\d+\b", text), text
            assert "completed" in text, text
    assert seen, len(texts)
