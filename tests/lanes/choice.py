"""Pytest plugin: run the tests of one lane, and say at the end which of them failed.

A test's lane follows from its markers (pyproject.toml), so every test has exactly one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

UNIT = "unit"
FLEETS = "fleets"
PARTS = "parts"
REAL = ("engine", "serve", "etcd", "slow")


def lane_of(item: pytest.Item) -> str:
    """`fleets`: whole fleets; `parts`: real engines and etcd; `unit`: all others."""
    if item.get_closest_marker("live"):
        return FLEETS
    return PARTS if any(item.get_closest_marker(name) for name in REAL) else UNIT


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", help="run the tests of this lane only")
    parser.addoption(
        "--lane-part", default="1/1", help="and of these every n-th from the k-th: k/n"
    )
    parser.addoption(
        "--lane-report", type=Path, help="write the ids of failed tests there, as JSON"
    )


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--lane-report"):
        config.pluginmanager.register(_Failed(path))


# Behind the conftests that mark tests by their place.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if lane := config.getoption("--lane"):
        first, parts = map(int, config.getoption("--lane-part").split("/"))
        kept = [i for i in items if lane_of(i) == lane][first - 1 :: parts]
        chosen = {id(item) for item in kept}
        config.hook.pytest_deselected(items=[i for i in items if id(i) not in chosen])
        items[:] = kept


class _Failed:
    """What failed, written when the session ends in order: a lane without it broke off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids: dict[str, bool] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._ids[report.nodeid] = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._ids[report.nodeid] = True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._ids))
