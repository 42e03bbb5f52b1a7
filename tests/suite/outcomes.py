"""Pytest plugin: two outcomes beside passed and failed, both counted and printed.

*Repeated*: a test of the core (mark `core`) that failed runs once more, after all others. A second
failure fails it, and more than `MAX_REPEATED` repeated tests of the core fail the run. No other test
that failed is repeated. Where several processes share the tests (pytest-xdist), none is.

*Inconclusive*: the test called `inconclusive(reason)`, because its precondition was not met: the
stream ended before the fault struck, or the machine stood still. In a run of one process it runs
once more; if it is inconclusive again it counts as inconclusive. More of them than `--inconclusive-limit` fail
the run.

`--tally FILE` adds what is counted to a file, for a run of several commands (`tests/suite/tiers.py`).
`--runs FILE` adds each test to a file as soon as it has run, and none runs a second time: each run
counts as it is (`tests/suite/soak.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import pytest
from _pytest.runner import runtestprotocol

from tests.suite import tiers

MAX_REPEATED = 2
"""Maximum number of repeated tests of the core of a run that passes."""
DEFAULT_LIMIT = 5
INCONCLUSIVE, REPEATED = "inconclusive", "repeated"
WORST_FIRST = ("failed", INCONCLUSIVE, "skipped", "passed")
LOST = "its process ended before the test did"
RAN: pytest.StashKey[bool] = pytest.StashKey()
"""Whether the test ran before in this run."""


class Inconclusive(Exception):
    """The precondition of a test was not met: it proves nothing."""


def inconclusive(reason: str) -> NoReturn:
    """End this test without a verdict. For preconditions only, never for what is tested."""
    raise Inconclusive(reason)


def reason_of(error: BaseException | None) -> str:
    """Why a test that raised `error` proves nothing; empty when it failed.

    A task group wraps what its tasks raise: inconclusive only if all of it is.
    """
    if isinstance(error, BaseExceptionGroup):
        reasons = [reason_of(one) for one in error.exceptions]
        return reasons[0] if all(reasons) else ""
    return str(error) or "no reason given" if isinstance(error, Inconclusive) else ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--inconclusive-limit",
        type=int,
        default=DEFAULT_LIMIT,
        help="maximum number of inconclusive tests of a run that passes (default: %(default)s)",
    )
    parser.addoption("--tally", metavar="FILE", help="add counts and times of this run to FILE")
    parser.addoption(
        "--runs", metavar="FILE", help="add each test that ran to FILE, and repeat no test"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not _is_worker(config):
        limit, tally = config.getoption("--inconclusive-limit"), config.getoption("--tally")
        config.pluginmanager.register(Tally(limit, tally))
        if runs := config.getoption("--runs"):
            config.pluginmanager.register(Recorder(runs))


def _is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests that another one (pytest-xdist) hands out."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if report.failed and call.excinfo and (why := reason_of(call.excinfo.value)):
        report.outcome, report.why = INCONCLUSIVE, why
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run one test, as pytest does; one that may run again is put behind all others."""
    hooks = item.ihook
    hooks.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports: list[Any] = runtestprotocol(item, nextitem=nextitem, log=False)
    if not item.stash.get(RAN, False) and _repeats(item, {r.outcome for r in reports}):
        item.stash[RAN] = True
        for report in reports:
            if report.outcome in ("failed", INCONCLUSIVE):
                report.was, report.outcome = report.outcome, REPEATED
        item.session.items.append(item)  # the session goes through this very list
    for report in reports:
        hooks.pytest_runtest_logreport(report=report)
    hooks.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _repeats(item: pytest.Item, outcomes: set[str]) -> bool:
    """Whether a test with these outcomes of its phases runs once more."""
    if item.config.getoption("--runs") or _is_worker(item.config):
        return False
    if "failed" in outcomes:
        return item.get_closest_marker("core") is not None
    return INCONCLUSIVE in outcomes


def pytest_report_teststatus(report: Any) -> tuple[str, str, Any] | None:
    if report.outcome == REPEATED:
        return REPEATED, "R", ("REPEATED", {"yellow": True})
    if report.outcome == INCONCLUSIVE:
        return INCONCLUSIVE, "I", ("INCONCLUSIVE", {"yellow": True})
    return None


class Tally:
    """Both outcomes of a run, counted where it is reported."""

    def __init__(self, limit: int, tally: str | None) -> None:
        self._limit = limit
        self._tally = tally
        self._repeated: list[tuple[str, str]] = []
        self._core: set[str] = set()
        self._inconclusive: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome == REPEATED:
            self._repeated.append((report.nodeid, f"{report.was}: {_crash(report)}"))
            if "core" in report.keywords:
                self._core.add(report.nodeid)
        elif report.outcome == INCONCLUSIVE:
            self._inconclusive.append((report.nodeid, report.why))

    @property
    def _too_many(self) -> list[str]:
        """Why a run without a failed test fails."""
        out = []
        if len(self._inconclusive) > self._limit:
            out.append(f"{len(self._inconclusive)} inconclusive tests, limit {self._limit}")
        if len(self._core) > MAX_REPEATED:
            out.append(f"{len(self._core)} tests of the core were repeated, limit {MAX_REPEATED}")
        return out

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._too_many and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for heading, found in (
            ("tests were repeated", self._repeated),
            ("tests were inconclusive", self._inconclusive),
        ):
            if found:
                terminalreporter.write_sep("-", f"{len({name for name, _ in found})} {heading}")
                for name, why in found:
                    terminalreporter.write_line(f"{name}: {why}")
        for reason in self._too_many:
            terminalreporter.write_line(f"FAILED: {reason}")
        if self._tally:
            tiers.record(self._tally, terminalreporter.stats)


class Run(NamedTuple):
    """A test that ran once. `text`: why it did not pass."""

    test: str
    outcome: str
    seconds: float
    text: str


class Recorder:
    """Writes each test to a file: as lost when it starts, and as it is when it has ended. So a
    process that crashes leaves all runs in the file; the last line of a test counts."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._running: dict[str, Run] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = Run(nodeid, "passed", 0.0, "")
        self._write(Run(nodeid, "failed", 0.0, LOST))

    def pytest_runtest_logreport(self, report: Any) -> None:
        run = self._running[report.nodeid]
        seconds = run.seconds + report.duration
        if WORST_FIRST.index(report.outcome) < WORST_FIRST.index(run.outcome):
            text = report.why if report.outcome == INCONCLUSIVE else _crash(report)
            run = run._replace(outcome=report.outcome, text=text)
        self._running[report.nodeid] = run._replace(seconds=seconds)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(self._running.pop(nodeid))

    def _write(self, run: Run) -> None:
        with open(self._file, "a") as file:
            file.write(json.dumps(run) + "\n")


def _crash(report: Any) -> str:
    """Where and how a test failed, on one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return report.longreprtext.strip().rpartition("\n")[2]
    return f"{crash.path}:{crash.lineno}: {crash.message.partition(chr(10))[0]}"
