"""Recorded series: their names, their values as Prometheus computes them, and the alerts on them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.docs.monitoring.alert_table import ALERTS
from deploy.docs.monitoring.dashboard_table import DASHBOARDS
from deploy.docs.monitoring.recorded_series import FAILED_RATIO, RECORDED, quantile_series
from relume.controlplane.telemetry.metric_table import FLEET, TABLE
from tests.deploy.test_alerts import RULES, promtool  # noqa: F401  a fixture

GAPS, WAITS = quantile_series("longest_gap_seconds"), quantile_series("room_wait_seconds")


def test_each_series_is_read() -> None:
    """One that neither a dashboard nor an alert reads costs for nothing."""
    rows = [panel for of in DASHBOARDS.values() for row in of.rows.values() for panel in row]
    read = " ".join([*(q for panel in rows for q, _ in panel.queries), *(a.expr for a in ALERTS)])
    assert [series.name for series in RECORDED if series.name not in read] == []


def test_a_series_is_named_after_its_labels_and_adds_replicas_up_as_its_metric_needs() -> None:
    metrics = {name: metric for metric in TABLE.values() for name in metric.exported}
    for series in RECORDED:
        labels = {*re.findall(r"by \(([^)]*)\)", series.expr)[0].split(", ")} - {"le"}
        labels |= {name for name, _ in series.labels}
        assert {*series.name.partition(":")[0].split("_")} == labels
        for found in re.finditer(r"\brelume_\w+", series.expr):
            nearest = re.findall(r"\b(sum|max)\b", series.expr[: found.start()])[-1]
            assert nearest == ("max" if metrics[found[0]].scope == FLEET else "sum"), series.name


def requests(instance: str, outcome: str, per_step: float) -> dict[str, str]:
    of = f'job="relume", instance="{instance}", outcome="{outcome}"'
    return {"series": f"relume_requests_total{{{of}}}", "values": f"0+{per_step}x120"}


def histogram(metric: str, counts: dict[str, float], **labels: str) -> list[dict[str, str]]:
    """Buckets of one replica that grow by `counts` each step."""
    of = "".join(f', {name}="{value}"' for name, value in labels.items())
    return [
        {
            "series": f'relume_{metric}_bucket{{job="relume", instance="r0"{of}, le="{le}"}}',
            "values": f"0+{count}x120",
        }
        for le, count in counts.items()
    ]


CASES: dict[str, tuple[list[dict[str, str]], dict[str, float], str]] = {
    "two replicas, one in fifty fails": (
        [
            requests("r0", "completed", 97),
            requests("r0", "failed", 3),
            requests("r1", "completed", 99),
            requests("r1", "failed", 1),
        ],
        {f'{FAILED_RATIO}{{job="relume"}}': 0.02},
        "RelumeRequestsFail",
    ),
    "one in two hundred fails": (
        [requests("r0", "completed", 199), requests("r0", "failed", 1)],
        {f'{FAILED_RATIO}{{job="relume"}}': 0.005},
        "",
    ),
    "none has failed yet": (
        [requests("r0", "completed", 100)],
        {f'{FAILED_RATIO}{{job="relume"}}': 0},
        "",
    ),
    "no request ends": ([requests("r0", "completed", 0), requests("r0", "failed", 0)], {}, ""),
    "two streams in a hundred pause for long": (
        histogram("longest_gap_seconds", {"1": 98, "5": 98, "10": 100, "+Inf": 100}),
        {
            f'{GAPS}{{job="relume", quantile="0.5"}}': 50 / 98,
            f'{GAPS}{{job="relume", quantile="0.95"}}': 95 / 98,
            f'{GAPS}{{job="relume", quantile="0.99"}}': 7.5,
        },
        "RelumeLongGaps",
    ),
    "requests wait by tier": (
        histogram("room_wait_seconds", {"1": 100, "+Inf": 100}, tier="batch"),
        {
            f'{WAITS}{{job="relume", quantile="{quantile}", tier="batch"}}': quantile
            for quantile in (0.5, 0.95, 0.99)
        },
        "",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_prometheus_computes_the_series_and_the_alert_on_them(
    promtool: str,  # noqa: F811
    case: str,
    tmp_path: Path,
) -> None:
    given, values, alert = CASES[case]
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = {rule["alert"]: rule for of in groups for rule in of["rules"] if "alert" in rule}
    for rule in rules.values():
        rule.pop("annotations")  # whose text is not what is tested
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    reads = [
        {
            "expr": f"round({series}, 1e-6)",  # sums of rates are not exact
            "eval_time": "20m",
            "exp_samples": [
                {"labels": name.removeprefix(series), "value": round(value, 6)}
                for name, value in values.items()
                if name.startswith(series)
            ],
        }
        for series in dict.fromkeys(series.name for series in RECORDED)
    ]
    fires: list[dict[str, Any]] = [
        {
            "eval_time": "20m",
            "alertname": name,
            "exp_alerts": [{"exp_labels": {**rules[name]["labels"], **labels}}]
            if name == alert
            else [],
        }
        for name, labels in (
            ("RelumeRequestsFail", {"job": "relume"}),
            ("RelumeLongGaps", {"job": "relume", "quantile": "0.99"}),
        )
    ]
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "10s",
        "tests": [
            {
                "interval": "10s",
                "input_series": given,
                "promql_expr_test": reads,
                "alert_rule_test": fires,
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
