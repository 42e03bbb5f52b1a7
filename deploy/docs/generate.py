"""Writes the generated documents: `python -m deploy.docs.generate`; with `--check` it only compares.

tests/docs/test_generated.py fails when one is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from deploy.docs import (
    admin_page,
    benchmarks_page,
    events_page,
    metrics_page,
    promises_page,
    settings_page,
)
from deploy.docs.monitoring import alerts_page, grafana_model, prometheus_rules
from deploy.docs.monitoring.dashboard_table import DASHBOARDS
from deploy.docs.site import CHECKOUT

PAGES: Mapping[str, Callable[[], str]] = {
    "BENCHMARKS.md": benchmarks_page.page,
    "docs/testing/promises.md": promises_page.page,
    "docs/reference/events.md": events_page.page,
    "docs/reference/admin-api.md": admin_page.page,
    "docs/operations/settings.md": settings_page.page,
    "docs/operations/metrics.md": metrics_page.page,
    "docs/operations/alerts.md": alerts_page.page,
    "deploy/prometheus/relume-rules.yaml": prometheus_rules.page,
    **{f"deploy/grafana/dashboards/{name}.json": grafana_model.page(name) for name in DASHBOARDS},
}


def stale() -> list[str]:
    """Documents whose text is not what the code says."""
    found = []
    for name, make in PAGES.items():
        path = CHECKOUT / name
        if not path.exists() or path.read_text(encoding="utf-8") != make():
            found.append(name)
    return found


def main(argv: list[str]) -> int:
    if argv not in ([], ["--check"]):
        print("usage: python -m deploy.docs.generate [--check]", file=sys.stderr)
        return 2
    names = stale()
    for name in names:
        if argv:
            print(f"{name} is stale: run `make docs`", file=sys.stderr)
        else:
            (CHECKOUT / name).write_text(PAGES[name](), encoding="utf-8")
            print(f"wrote {name}")
    return 1 if argv and names else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
