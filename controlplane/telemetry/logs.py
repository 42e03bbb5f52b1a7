"""Log lines: JSON for machines, columns for people, with what they are about bound.

A failed write of a log line (a file on a full disk) does not stop the process: the next line that
succeeds comes after a count of the lost ones.
"""

from __future__ import annotations

import io
import logging
import sys
from contextlib import AbstractContextManager
from typing import Any, TextIO, cast

import structlog

from relume.controlplane.telemetry.visible_text import visible, visible_data, visible_json
from relume.events.log.disk import SteadyOutput


def setup_logging(level: str = "info", form: str = "auto", stream: TextIO | None = None) -> None:
    """Configure structlog for this process; call once at the edge.

    `level`: debug, info, warning, error. `form`: json, console, or auto (console on a
    terminal). `stream`: stderr by default. Libraries' own logging goes the same way from
    warnings up. Tracebacks show no variables: prompts and keys are among them. No line has characters
    that a terminal obeys: texts of clients are among the values.
    """
    out = SteadyOutput(stream or sys.stderr, _refused)
    number = getattr(logging, level.upper())
    people = form == "console" or (form == "auto" and out.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if people:
        last: list[Any] = [
            _visible_fields,
            structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=_traceback),
        ]
    else:
        frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        last = [
            structlog.processors.ExceptionRenderer(frames),
            structlog.processors.JSONRenderer(ensure_ascii=False),
            lambda _logger, _level, line: visible_json(line),
        ]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, out)),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
            foreign_pre_chain=shared,
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))


def _visible_fields(_logger: Any, _level: str, fields: Any) -> Any:
    return {
        name: value if name == "exc_info" else visible_data(value) for name, value in fields.items()
    }


def _traceback(out: TextIO, error: Any) -> None:
    plain = io.StringIO()
    structlog.dev.plain_traceback(plain, error)
    lines = plain.getvalue().rstrip("\n").split("\n")
    out.write("\n".join(f"  {visible(line)}" for line in lines))  # none begins as a log line does


def _refused(count: int) -> str:
    return f'{{"event": "log_lines_refused", "level": "warning", "lines": {count}}}\n'


def about(**names: Any) -> AbstractContextManager[Any]:
    """Bind e.g. `request=` or `worker=` to every line logged inside, in this task."""
    return structlog.contextvars.bound_contextvars(**names)
