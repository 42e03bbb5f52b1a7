"""Alerts fire on the fault and are quiet otherwise: Prometheus itself evaluates the rules."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus/relume-rules.yaml"
WORKERS = ("w0", "w1", "w2")
STATES = ("healthy", "suspect", "unhealthy", "probing", "draining", "dead", "quarantined")


@pytest.fixture(scope="module")
def promtool() -> str:
    """The program, which the script finds or takes from the distribution's package."""
    script = DEPLOY / "dev/get-prometheus.sh"
    done = subprocess.run([str(script), "promtool"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    return done.stdout.strip()


def fleet(
    health: dict[str, str] | None = None, suspected: tuple[str, ...] = (), withheld: int = 0
) -> list[dict[str, str]]:
    """Series of one replica over three ready workers, unchanged for an hour."""
    values: dict[str, float] = {}
    for worker in WORKERS:
        state = (health or {}).get(worker, "healthy")
        for one in STATES:
            of = f'worker="{worker}", state="{one}"'
            values[f"relume_worker_health{{{of}}}"] = int(state == one)
        for one in ("ready", "dead"):
            of = f'worker="{worker}", state="{one}"'
            values[f"relume_worker_engine_state{{{of}}}"] = int(one == "ready")
        of = f'worker="{worker}"'
        values[f"relume_worker_suspected{{{of}}}"] = int(worker in suspected)
    if withheld:
        values['relume_verdicts_withheld{model="m"}'] = withheld
    return [
        {"series": name.replace("{", '{instance="r0", ', 1), "values": f"{value}x240"}
        for name, value in values.items()
    ]


CASES: dict[str, tuple[list[dict[str, str]], dict[str, list[str]]]] = {
    "all is well": (fleet(), {}),
    "one breaker is open": (
        fleet({"w1": "unhealthy"}),
        {"RelumeWorkerUnhealthy": ["w1"]},
    ),
    "one worker is slow": (fleet({"w1": "suspect"}), {"RelumeWorkerSuspected": ["w1"]}),
    "one replica suspects a worker": (
        fleet(suspected=("w2",)),
        {"RelumeWorkerSuspected": ["w2"]},
    ),
    "all are suspected": (
        fleet(suspected=WORKERS),
        {"RelumeNoWorkerEligible": [""], "RelumeWorkerSuspected": [*WORKERS]},
    ),
    "none is eligible": (
        fleet({"w0": "unhealthy", "w1": "draining"}, ("w2",)),
        {
            "RelumeNoWorkerEligible": [""],
            "RelumeWorkerUnhealthy": ["w0"],
            "RelumeWorkerSuspected": ["w2"],
        },
    ),
    "a worker computes wrong results": (
        fleet({"w1": "quarantined"}),
        {"RelumeWorkerUnhealthy": ["w1"]},
    ),
    "a record cannot be read": (
        [
            *fleet(),
            {
                "series": 'relume_unreadable_records_total{instance="r0", stream="w.w1"}',
                "values": "0x20 1x219",
            },
        ],
        {"RelumeUnreadableRecords": ["w.w1"]},
    ),
    "verdicts are withheld": (fleet(withheld=3), {"RelumeVerdictsWithheld": [""]}),
}
ALERTS = sorted({name for _, found in CASES.values() for name in found})


def expected(rule: dict[str, Any], case: str) -> list[dict[str, Any]]:
    """The alerts of a rule that must fire, with all their labels."""
    out = []
    for worker in CASES[case][1].get(rule["alert"], []):
        labels = dict(rule["labels"])
        if rule["alert"] == "RelumeNoWorkerEligible":
            labels["instance"] = "r0"
        elif rule["alert"] == "RelumeVerdictsWithheld":
            labels["model"] = "m"
        elif rule["alert"] == "RelumeUnreadableRecords":
            labels["stream"] = worker
        else:
            labels["worker"] = worker
        out.append({"exp_labels": labels})
    return out


@pytest.mark.parametrize("case", CASES)
def test_health_alerts_fire_on_the_fault_and_on_nothing_else(
    promtool: str, case: str, tmp_path: Path
) -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}
    for rule in rules.values():
        rule.pop("annotations")  # whose text is not what is tested
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": CASES[case][0],
                "alert_rule_test": [
                    {
                        "eval_time": "10m",
                        "alertname": name,
                        "exp_alerts": expected(rules[name], case),
                    }
                    for name in (*ALERTS, "RelumeNoWorker")
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        [promtool, "test", "rules", "test.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_rules(promtool: str) -> None:
    done = subprocess.run(
        [promtool, "check", "rules", str(RULES)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
