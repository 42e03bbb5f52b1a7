"""The agent's own log lines: JSON on stderr, by structlog where it is installed.

structlog is not a dependency of a worker host; the standard library writes the same
shape without it: `{"event": ..., "level": ..., "timestamp": ..., <fields>}`. A line that
stderr does not take (its file's disk is full) ends nothing.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Protocol, TextIO, cast

from relume.events.log.disk import SteadyOutput

try:
    import structlog
except ImportError:
    structlog = None  # type: ignore[assignment]  # a worker host may be without it


class Logger(Protocol):
    """What both kinds of logger offer: a message, and fields by name."""

    def debug(self, event: str, **fields: Any) -> Any: ...
    def info(self, event: str, **fields: Any) -> Any: ...
    def warning(self, event: str, **fields: Any) -> Any: ...
    def error(self, event: str, **fields: Any) -> Any: ...


class _PlainLogger:
    """structlog's calls on the standard library alone."""

    def __init__(self, level: int, bound: dict[str, Any], output: SteadyOutput) -> None:
        self._level = level
        self._bound = bound
        self._output = output

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if level < self._level:
            return
        record = {**self._bound, **fields}
        self._output.write(_line(event, logging.getLevelName(level).lower(), record))

    def debug(self, event: str, **fields: Any) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write(logging.ERROR, event, fields)


def _line(event: str, level: str, fields: dict[str, Any]) -> str:
    at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    record = {**fields, "event": event, "level": level, "timestamp": at}
    return json.dumps(record, default=str) + "\n"


def make_logger(level: str = "info", **bound: Any) -> Logger:
    """A logger whose lines all carry `bound`."""
    number = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    output = SteadyOutput(
        sys.stderr,
        lambda count: _line("log lines were refused", "warning", {**bound, "lines": count}),
    )
    if structlog is None:
        return _PlainLogger(number, bound, output)
    return structlog.wrap_logger(
        structlog.WriteLogger(cast(TextIO, output)),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
    ).bind(**bound)
