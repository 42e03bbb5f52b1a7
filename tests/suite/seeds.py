"""Pytest plugin: one seed for all random tests of a run, printed at its head and in failures.

`--seed N` (or `RELUME_TEST_SEED`) draws other cases. Without it the seed is 0 and hypothesis tries
the same examples in each run, so that a change is not blamed for a case that is older.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import hypothesis.core
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        type=int,
        default=int(os.environ.get("RELUME_TEST_SEED", "0")),
        help="seed of random tests (environment: RELUME_TEST_SEED; default: 0)",
    )


def pytest_configure(config: pytest.Config) -> None:
    seed = config.getoption("--seed")
    hypothesis.settings.register_profile("relume", derandomize=not seed, print_blob=True)
    hypothesis.settings.load_profile("relume")
    if seed:
        hypothesis.core.global_force_seed = seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed of random tests: {config.getoption('--seed')}"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run, for a test that draws its cases."""
    return request.config.getoption("--seed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    drawn = "seed" in getattr(item, "fixturenames", ()) or item.get_closest_marker("hypothesis")
    if report.failed and drawn:
        report.sections.append(("seed", f"repeat with --seed {item.config.getoption('--seed')}"))
    return report
