"""deploy/grafana/dashboards/*.json: the JSON model that Grafana loads, of each dashboard of the table."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from deploy.docs.monitoring.dashboard_table import DASHBOARDS
from deploy.docs.monitoring.panels import Panel


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    about = ". ".join(
        filter(None, (panel.about.rstrip("."), panel.when and f"Empty until {panel.when}"))
    )
    return {
        "id": number,
        "title": panel.title,
        "description": about,
        "type": panel.kind,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": 8, "h": 8},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": source,
                "expr": expr,
                "legendFormat": legend,
            }
            for at, (expr, legend) in enumerate(panel.queries)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "job",
            "label": "Job",
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": {"query": "label_values(relume_leader, job)", "refId": "job"},
            "refresh": 2,
        },
    ]


def dashboard(name: str) -> dict[str, Any]:
    """The JSON model of Grafana (schema 39) of one of `DASHBOARDS`."""
    given = DASHBOARDS[name]
    panels: list[dict[str, Any]] = []
    y = 0
    for row, members in given.rows.items():
        panels.append(
            {
                "id": len(panels) + 1, "title": row, "type": "row", "collapsed": False, "panels": [],
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            }
        )  # fmt: skip
        y += 1
        for at, panel in enumerate(members):
            panels.append(_panel(len(panels) + 1, panel, at % 3 * 8, y + at // 3 * 8))
        y += (len(members) + 2) // 3 * 8
    return {
        "uid": f"relume-{name}",
        "title": given.title,
        "description": given.about,
        "tags": ["relume"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "links": [
            {
                "title": "Relume",
                "type": "dashboards",
                "tags": ["relume"],
                "asDropdown": True,
                "keepTime": True,
            }
        ],
        "panels": panels,
    }


def page(name: str) -> Callable[[], str]:
    """What writes the file of that name."""
    return lambda: json.dumps(dashboard(name), indent=1) + "\n"
