"""Pytest plugin: two outcomes beside passed and failed, both counted and printed.

*Repeated*: a test marked `@pytest.mark.flaky(reason="...")` that failed runs once more (with
`repeats=2` twice). No other test that failed is repeated.

*Inconclusive*: the test called `inconclusive(reason)`, because its precondition was not met: the
stream ended before the fault struck, or the machine stood still. The test runs once more; if it
is inconclusive again it counts as inconclusive. More of them than `--inconclusive-limit` fail
the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import pytest_timeout
from _pytest.runner import runtestprotocol

MAX_REPEATS = 2
DEFAULT_LIMIT = 5
INCONCLUSIVE, REPEATED = "inconclusive", "repeated"


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


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "flaky(reason, repeats=1): may fail on a busy machine; runs once more then"
    )
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Tally(config.getoption("--inconclusive-limit")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        allowed_repeats(item)


def allowed_repeats(item: pytest.Item) -> int:
    """How often a test that failed runs again. Raises UsageError for a mark without a reason."""
    mark = item.get_closest_marker("flaky")
    if mark is None:
        return 0
    repeats = mark.kwargs.get("repeats", 1)
    if mark.args or set(mark.kwargs) - {"reason", "repeats"} or not mark.kwargs.get("reason"):
        raise pytest.UsageError(f"{item.nodeid}: write @pytest.mark.flaky(reason=...)")
    if not 1 <= repeats <= MAX_REPEATS:
        raise pytest.UsageError(f"{item.nodeid}: flaky repeats at most {MAX_REPEATS} times")
    return repeats


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if report.failed and call.excinfo and (why := reason_of(call.excinfo.value)):
        report.outcome, report.why = INCONCLUSIVE, why
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run one test, as pytest does, and again where that is allowed."""
    hooks = item.ihook
    left = {"failed": allowed_repeats(item), INCONCLUSIVE: 1}
    hooks.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    while True:
        reports: list[Any] = runtestprotocol(item, nextitem=nextitem, log=False)
        outcomes = {report.outcome for report in reports}
        outcome = next((one for one in ("failed", INCONCLUSIVE) if one in outcomes), "")
        if not left.get(outcome):
            break
        left[outcome] -= 1
        for report in reports:
            if report.outcome in left:
                report.was, report.outcome = report.outcome, REPEATED
                hooks.pytest_runtest_logreport(report=report)
        _new_timeout(item)
    for report in reports:
        hooks.pytest_runtest_logreport(report=report)
    hooks.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _new_timeout(item: pytest.Item) -> None:
    """The repetition has the whole timeout of the test: pytest-timeout sets it only once."""
    hooks = item.config.pluginmanager.hook
    settings = pytest_timeout._get_item_settings(item)
    hooks.pytest_timeout_cancel_timer(item=item)
    if settings.timeout and settings.timeout > 0 and not settings.func_only:
        hooks.pytest_timeout_set_timer(item=item, settings=settings)


def pytest_report_teststatus(report: Any) -> tuple[str, str, Any] | None:
    if report.outcome == REPEATED:
        return REPEATED, "R", ("REPEATED", {"yellow": True})
    if report.outcome == INCONCLUSIVE:
        return INCONCLUSIVE, "I", ("INCONCLUSIVE", {"yellow": True})
    return None


class Tally:
    """Both outcomes of a run, counted where it is reported."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._repeated: list[tuple[str, str]] = []
        self._inconclusive: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome == REPEATED:
            self._repeated.append((report.nodeid, f"{report.was}: {_crash(report)}"))
        elif report.outcome == INCONCLUSIVE:
            self._inconclusive.append((report.nodeid, report.why))

    @property
    def _too_many(self) -> bool:
        return len(self._inconclusive) > self._limit

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
        if self._too_many:
            terminalreporter.write_line(
                f"FAILED: {len(self._inconclusive)} inconclusive tests, limit {self._limit}"
            )


def _crash(report: Any) -> str:
    """Where and how a test failed, on one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return report.longreprtext.strip().rpartition("\n")[2]
    return f"{crash.path}:{crash.lineno}: {crash.message.partition(chr(10))[0]}"
