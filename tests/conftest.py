"""For all tests."""

import logging
import signal

import pytest
import structlog

pytest_plugins = ["tests.suite.outcomes", "tests.suite.seeds", "tests.suite.run_processes"]

# A shell that starts something in the background has it ignore SIGINT, and what it starts
# inherits that. Tests interrupt commands as a person at a terminal does.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def fresh_logging():
    """The test may set up logging; afterwards it is as before."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = before[0], before[1]
