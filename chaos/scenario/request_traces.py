"""Trace files: arrivals and lengths of real requests.

One format is CSV with the columns prompt_tokens, output_tokens and optionally arrival_s. The other
is JSON lines like Mooncake's: timestamp (ms), input_length, output_length, hash_ids. The latter are
ids of the prompt's blocks of 512 tokens; equal leading ids are a shared prefix. Either may be
gzipped; lines that begin with # are comments.
"""

from __future__ import annotations

import csv
import functools
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

FOLDER = Path(__file__).parent / "traces"
PREFIX_BLOCK_TOKENS = 512


class Row(Struct, frozen=True):
    """A request of a trace: nanoseconds since the trace's first request, if known; tokens; ids of
    the blocks of its prompt."""

    at_ns: int | None
    prompt: int
    output: int
    prefix: tuple[int, ...] = ()


class TraceError(Exception):
    """An invalid trace file, and the remedy."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message}; {remedy}")
        self.message = message
        self.remedy = remedy


def packaged() -> dict[str, Path]:
    """The packaged traces, by name."""
    found = (path for path in sorted(FOLDER.iterdir()) if path.suffix in (".csv", ".jsonl"))
    return {path.stem.replace("_", "-"): path for path in found}


def read(name: str, folder: Path) -> tuple[Row, ...]:
    """The rows of a packaged trace, or of the file `name` relative to `folder`, ordered by
    arrival. Raises TraceError."""
    known = packaged()
    return _read(known[name] if name in known else folder / name)


@functools.lru_cache(maxsize=8)
def _read(path: Path) -> tuple[Row, ...]:
    if not path.is_file():
        remedy = f"give a file or one of {', '.join(packaged())}"
        raise TraceError(f"is no trace file: {path.name!r}", remedy)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        try:
            rows = list(_jsonl(lines) if ".jsonl" in path.suffixes else _csv(lines))
        except (ValueError, KeyError, TypeError, OSError) as error:
            message = f"cannot be read as a trace: {type(error).__name__} {error}"
            remedy = "columns: arrival_s, prompt_tokens, output_tokens; or Mooncake's .jsonl"
            raise TraceError(message, remedy) from None
    if not rows:
        raise TraceError("has no requests", "give another file")
    timed = [row.at_ns for row in rows if row.at_ns is not None]
    if timed and len(timed) != len(rows):
        raise TraceError("has arrival times in some rows only", "give all of them or none")
    return tuple(sorted(rows, key=lambda row: row.at_ns)) if timed else tuple(rows)  # type: ignore[arg-type,return-value]


def _csv(lines: Iterator[str]) -> Iterator[Row]:
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        at = row.get("arrival_s")
        at_ns = None if at is None else round(float(at) * 1e9)
        yield _row(at_ns, int(row["prompt_tokens"]), int(row["output_tokens"]))


def _jsonl(lines: Iterator[str]) -> Iterator[Row]:
    for line in lines:
        if line.startswith("#"):
            continue
        row = json.loads(line)
        at_ns = round(float(row["timestamp"]) * 1e6)
        prefix = tuple(int(block) for block in row.get("hash_ids", ()))
        yield _row(at_ns, int(row["input_length"]), int(row["output_length"]), prefix)


def _row(at_ns: int | None, prompt: int, output: int, prefix: tuple[int, ...] = ()) -> Row:
    if prompt < 1 or output < 1 or (at_ns is not None and at_ns < 0):
        raise ValueError("a request without a prompt, an output or a time")
    return Row(at_ns, prompt, output, prefix)
