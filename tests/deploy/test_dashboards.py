"""Dashboards ask for what the control plane exports, and add replicas up as each metric needs it."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.docs.monitoring import recorded_series
from deploy.docs.monitoring.dashboard_table import DASHBOARDS
from deploy.docs.monitoring.grafana_model import dashboard
from deploy.docs.monitoring.panels import Panel
from relume.controlplane.telemetry.metric_table import FLEET, HISTOGRAM, TABLE, Metric
from tests.deploy.test_alerts import DEPLOY, promtool  # noqa: F401  a fixture

RECORDED = {series.name for series in recorded_series.RECORDED}
METRICS: dict[str, Metric] = {name: m for m in TABLE.values() for name in m.exported}
PANELS: list[tuple[str, Panel]] = [
    (name, panel) for name, of in DASHBOARDS.items() for row in of.rows.values() for panel in row
]
REPLACED = {"$__rate_interval": "1m", "$job": "relume"}


def query(expr: str) -> str:
    """As Grafana asks it."""
    for variable, value in REPLACED.items():
        expr = expr.replace(variable, value)
    return expr


@pytest.mark.parametrize("panel", [p for _, p in PANELS], ids=lambda panel: panel.title)
def test_a_query_has_metrics_that_exist_and_adds_replicas_up_as_they_need(panel: Panel) -> None:
    for expr, legend in panel.queries:
        assert 'job="$job"' in expr
        if recorded := re.findall(r"\w+:relume_\w+:\w+", expr):
            labels = recorded[0].partition(":")[0].split("_")
            assert recorded[0] in RECORDED and set(re.findall(r"\{\{(\w+)\}\}", legend)) <= {
                *labels
            }
            continue
        names = re.findall(r"\brelume_\w+", expr)
        assert names and set(names) <= METRICS.keys(), names
        labels = {label for name in names for label in METRICS[name].labels} | {"instance", "le"}
        grouped = re.findall(r"by \(([^)]*)\)", expr)
        assert {label for by in grouped for label in by.split(", ")} <= labels
        shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
        assert shown <= set(grouped[0].split(", ") if grouped else ()), "the outermost aggregation"
        for name in names:
            metric = METRICS[name]
            before = expr[: expr.index(name)]
            nearest = re.findall(r"\b(sum|max)\b", before)[-1]
            is_own = metric.scope != FLEET and not name.startswith("relume_etcd_")
            own_maximum = name.endswith("_revision")
            assert nearest == ("sum" if is_own and not own_maximum else "max"), name
            is_counter = name.endswith("_total") or metric.kind == HISTOGRAM
            assert ("rate(" in expr) == is_counter or "sum (" in expr, name


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_whole(name: str) -> None:
    given = json.loads((DEPLOY / f"grafana/dashboards/{name}.json").read_text())
    assert given == dashboard(name)
    panels: list[dict[str, Any]] = given["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels if panel["type"] != "row"}) > 5
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
    for panel in panels:
        references = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(references)) == len(references)


def test_prometheus_reads_every_query(promtool: str, tmp_path: Path) -> None:  # noqa: F811
    rules = [
        {"record": f"panel_{at}", "expr": query(expr)}
        for at, expr in enumerate(expr for _, panel in PANELS for expr, _ in panel.queries)
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_the_scrape_configuration_is_one(promtool: str, tmp_path: Path) -> None:  # noqa: F811
    text = (DEPLOY / "prometheus/prometheus.yaml").read_text()
    (tmp_path / "viewer-token").write_text("token")
    for name in ("relume-rules.yaml",):
        (tmp_path / name).write_text((DEPLOY / "prometheus" / name).read_text())
    path = tmp_path / "prometheus.yaml"
    path.write_text(text.replace("/etc/relume/viewer-token", str(tmp_path / "viewer-token")))
    done = subprocess.run([promtool, "check", "config", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    own, engines = yaml.safe_load(text)["scrape_configs"]
    assert own["job_name"] == REPLACED["$job"] and own["metrics_path"] == "/metrics"
    assert engines["metrics_path"] == "/metrics/engines"
