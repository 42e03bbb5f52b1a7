"""Log lines: JSON for machines, columns for people, with what they are about bound.

A failed write of a log line (a file on a full disk) does not stop the process: the next line that
succeeds comes after a count of the lost ones.
"""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager
from typing import Any, TextIO, cast

import structlog

from relume.events.log.disk import SteadyOutput


def setup_logging(level: str = "info", form: str = "auto", stream: TextIO | None = None) -> None:
    """Configure structlog for this process; call once at the edge.

    `level`: debug, info, warning, error. `form`: json, console, or auto (console on a
    terminal). `stream`: stderr by default. Libraries' own logging goes the same way from
    warnings up. Tracebacks show no variables: prompts and keys are among them.
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
        plain = structlog.dev.plain_traceback
        last: list[Any] = [
            structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=plain)
        ]
    else:
        frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        last = [
            structlog.processors.ExceptionRenderer(frames),
            structlog.processors.JSONRenderer(ensure_ascii=False),
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


def _refused(count: int) -> str:
    return f'{{"event": "log_lines_refused", "level": "warning", "lines": {count}}}\n'


def about(**names: Any) -> AbstractContextManager[Any]:
    """Bind e.g. `request=` or `worker=` to every line logged inside, in this task."""
    return structlog.contextvars.bound_contextvars(**names)
