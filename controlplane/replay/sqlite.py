"""A log as an SQLite database, for questions in SQL: `relume replay --sqlite FILE`.

Tables: events, decisions, candidates, requests, workers, meta (docs/reference/sqlite.md; the
comments of `SCHEMA` are in the database too, `.schema` shows them). A value that the log does
not know (-1, an empty text) is NULL. Rows are written as the log is read, so memory does not
grow with the log.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.log.entries import Entry, entries_of
from relume.events.log.interface import RevisionGroup

SCHEMA_VERSION = "1"
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE events (
    id INTEGER PRIMARY KEY,   -- order of the log
    revision INTEGER,         -- etcd revision of its transaction
    stream TEXT,              -- w.NAME worker, r.NAME replica, fleet leader
    position INTEGER,         -- in its stream, from 1
    change INTEGER,           -- 0: the event; N: the Nth change inside this engine step
    at_ms INTEGER,            -- Unix time of its append, on the writer's clock
    type TEXT,                -- engine_died, route_decided, first_token, ...
    request TEXT,             -- NULL: about none or several
    worker TEXT,              -- NULL: about none or several
    fields TEXT               -- JSON, bytes as hex: fields ->> '$.cause'
);
CREATE TABLE decisions (
    id INTEGER PRIMARY KEY,
    event INTEGER REFERENCES events (id),
    decision TEXT,            -- its id in the log; a plan for N requests has N rows
    type TEXT,                -- route_decided, recovery_planned, holder_chosen, ...
    revision INTEGER,         -- where it was appended
    at_ms INTEGER,
    replica TEXT,             -- the replica that decided; fleet: the leader
    basis_revision INTEGER,   -- the revision that it was based on
    basis_position INTEGER,   -- and the replica's own events up to here
    request TEXT,
    attempt INTEGER,
    cause TEXT,               -- of a route, a holder, a migration
    policy TEXT,
    worker TEXT,              -- the worker it is about: failed, left, judged, the primary
    chosen TEXT,              -- the worker chosen; holders joined by commas; NULL: none
    reason TEXT               -- why not, or the outcome: refused, budget, hung, ...
);
CREATE TABLE candidates (
    decision INTEGER REFERENCES decisions (id),
    number INTEGER,           -- in the order of the record
    kind TEXT,                -- route, holder, restore, recompute
    worker TEXT,
    chosen INTEGER,           -- 1: this one was chosen
    excluded TEXT,            -- why it could not be chosen; NULL: it could
    incarnation INTEGER,
    cost INTEGER,             -- of a route: lower is better, in the policy's unit
    ttft_us INTEGER,          -- predicted time to first token
    tpot_us INTEGER,          -- predicted time per output token
    prefill_tokens INTEGER,   -- prompt tokens it had not computed yet
    requests INTEGER,         -- it had
    hit_tokens INTEGER,       -- of this prompt, in its prefix cache
    batch INTEGER,            -- requests it decoded
    context_tokens INTEGER,   -- tokens of those
    kv_free INTEGER,          -- KV blocks it would have left
    load INTEGER,             -- of a holder: expected recovery load, blocks
    free_bytes INTEGER,       -- of a holder: of its budget
    holder TEXT,              -- of a restore: the holder of the checkpoint
    restored_tokens INTEGER,
    wait_us INTEGER,          -- of a recovery or migration: until the worker is free
    move_us INTEGER,          -- moving the blocks
    compute_us INTEGER,       -- computing the rest
    done_us INTEGER           -- the end of all three
);
CREATE TABLE requests (
    request TEXT PRIMARY KEY,
    client_id TEXT,           -- x-request-id, need not be unique
    tenant TEXT,
    model TEXT,
    route TEXT,               -- /v1/completions, ...
    gateway TEXT,             -- replica it arrived at
    streamed INTEGER,
    guarantee TEXT,           -- how it survives a cut: exact, sampled, replay, ...
    prompt_tokens INTEGER,
    max_tokens INTEGER,
    arrived_revision INTEGER, -- NULL: before this log begins
    arrived_ms INTEGER,
    first_worker TEXT,
    last_worker TEXT,
    dispatches INTEGER DEFAULT 0,
    ended_revision INTEGER,   -- NULL: live when this log ends
    ended_ms INTEGER,
    outcome TEXT,             -- completed, cancelled, failed, rejected
    status INTEGER,           -- HTTP
    finish TEXT,
    tokens INTEGER,           -- delivered
    attempts INTEGER,
    ttft_us INTEGER,          -- as the gateway saw it
    longest_gap_us INTEGER,
    detail TEXT
);
CREATE TABLE workers (        -- one row per engine incarnation
    worker TEXT,
    incarnation INTEGER,
    started_revision INTEGER,
    started_ms INTEGER,
    ready_ms INTEGER,
    died_revision INTEGER,    -- NULL: alive when this log ends
    died_ms INTEGER,
    reason TEXT,              -- of its death
    detail TEXT,
    model TEXT,
    host TEXT,
    port INTEGER,
    hardware TEXT,
    kv_blocks INTEGER,
    steps INTEGER DEFAULT 0,
    step_us INTEGER DEFAULT 0, -- all its steps took together
    dispatches INTEGER DEFAULT 0,
    PRIMARY KEY (worker, incarnation)
);
"""
_INDEXES = """
CREATE INDEX events_type ON events (type);
CREATE INDEX events_request ON events (request) WHERE request IS NOT NULL;
CREATE INDEX events_revision ON events (revision);
CREATE INDEX decisions_request ON decisions (request);
CREATE INDEX decisions_chosen ON decisions (type, chosen);
CREATE INDEX candidates_decision ON candidates (decision);
"""

Row = dict[str, Any]


def export_sqlite(path: str | Path, groups: Iterable[RevisionGroup], origin: str = "") -> Row:
    """Write `groups` to a database at `path`, in place of what is there; the rows per table.

    Raises LogError for what cannot be read, OSError. The file is whole or it is not there.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.touch(mode=0o600)
        database = sqlite3.connect(aside)
        try:
            counts = _Export(database).run(groups, origin)
        finally:
            database.close()
        aside.replace(path)
    except sqlite3.Error as error:
        raise OSError(f"{path}: {error}") from None
    finally:
        aside.unlink(missing_ok=True)
    return counts


class _Export:
    """One pass over the log into an empty database."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._db = database
        self._handlers: dict[type, Callable[[int, Entry, Any], None]] = {
            v.RouteDecided: self._route,
            v.HolderChosen: self._holders,
            v.RecoveryPlanned: self._plan,
            v.MigrationPlanned: self._plan,
            v.StallJudged: self._stall,
            v.StreamJudged: self._stream_judged,
            v.RequestHeld: self._waiting,
            v.RequestShed: self._waiting,
            v.EffectsDecided: self._effects,
            v.RequestArrived: self._arrived,
            v.RequestEnded: self._ended,
            v.EngineStarted: self._started,
            v.EngineReady: self._ready,
            v.EngineDied: self._died,
            v.EngineStep: self._step,
        }

    def run(self, groups: Iterable[RevisionGroup], origin: str) -> Row:
        database = self._db
        database.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;" + SCHEMA)
        first = last = 0
        for group in groups:
            first, last = first or group.revision, group.revision
            for entry in entries_of(group):
                self._take(entry)
        meta = {"schema": SCHEMA_VERSION, "origin": origin, "first": first, "last": last}
        database.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        database.executescript(_INDEXES)
        database.commit()
        tables = ("events", "decisions", "candidates", "requests", "workers")
        return {
            table: database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in tables
        }

    def _take(self, entry: Entry) -> None:
        event_id = self._event(0, entry)
        for number, change in enumerate(getattr(entry.event, "changes", ()), 1):
            self._event(number, replace(entry, event=change))
        handler = self._handlers.get(type(entry.event))
        if handler is not None:
            handler(event_id, entry, entry.event)

    def _event(self, number: int, entry: Entry) -> int:
        fields = codec.to_json(entry.event)
        for name in ("type", "changes", "dispatch"):
            fields.pop(name, None)
        return self._insert(
            "events",
            {
                "revision": entry.revision,
                "stream": entry.stream,
                "position": entry.position,
                "change": number,
                "at_ms": entry.at_ms or None,
                "type": entry.kind,
                "request": _only(entry.requests),
                "worker": _only(entry.workers),
                "fields": msgspec.json.encode(fields).decode(),
            },
        )

    def _insert(self, table: str, row: Row) -> int:
        names = ", ".join(row)
        marks = ", ".join("?" * len(row))
        cursor = self._db.execute(
            f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(row.values())
        )
        return cursor.lastrowid or 0

    def _update(self, table: str, key: Row, row: Row, condition: str = "") -> None:
        """Set `row` where `key` is, making the row if there is none."""
        names = ", ".join(key)
        marks = ", ".join("?" * len(key))
        self._db.execute(
            f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({marks})", tuple(key.values())
        )
        changed = ", ".join(f"{name} = ?" for name in row)
        where = " AND ".join(f"{name} = ?" for name in key) + condition
        self._db.execute(
            f"UPDATE {table} SET {changed} WHERE {where}", (*row.values(), *key.values())
        )

    # --- decisions ---------------------------------------------------------------------

    def _decision(self, event_id: int, entry: Entry, event: Any, **more: Any) -> int:
        row = {
            "event": event_id,
            "decision": event.decision,
            "type": entry.kind,
            "revision": entry.revision,
            "at_ms": entry.at_ms or None,
            "replica": entry.stream.removeprefix("r."),
            "basis_revision": event.basis.revision,
            "basis_position": event.basis.position,
        }
        return self._insert("decisions", row | {k: _known(x) for k, x in more.items()})

    def _route(self, event_id: int, entry: Entry, event: v.RouteDecided) -> None:
        decision = self._decision(
            event_id, entry, event, request=event.request, attempt=event.attempt,
            cause=event.cause, policy=event.policy, chosen=event.worker, reason=event.refused,
        )  # fmt: skip
        for number, one in enumerate(event.candidates):
            chosen = (one.worker, one.incarnation) == (event.worker, event.incarnation)
            row = {name: _known(value) for name, value in _fields(one).items()}
            head = {"decision": decision, "number": number, "kind": "route", "chosen": chosen}
            self._insert("candidates", head | row)
        if event.worker:
            self._db.execute(
                "INSERT INTO requests (request, first_worker, last_worker, dispatches)"
                " VALUES (?1, ?2, ?2, 1) ON CONFLICT DO UPDATE SET dispatches = dispatches + 1,"
                " first_worker = coalesce(first_worker, ?2), last_worker = ?2",
                (event.request, event.worker),
            )
            self._db.execute(
                "INSERT INTO workers (worker, incarnation, dispatches) VALUES (?, ?, 1)"
                " ON CONFLICT DO UPDATE SET dispatches = dispatches + 1",
                (event.worker, event.incarnation),
            )

    def _holders(self, event_id: int, entry: Entry, event: v.HolderChosen) -> None:
        decision = self._decision(
            event_id, entry, event, request=event.request, attempt=event.attempt,
            cause=event.cause, policy=event.policy, worker=event.primary,
            chosen=",".join(event.holders), reason=event.reason,
        )  # fmt: skip
        for number, one in enumerate(event.candidates):
            chosen = one.worker in event.holders
            head = {"decision": decision, "number": number, "kind": "holder", "chosen": chosen}
            row = {name: _known(value) for name, value in _fields(one).items()}
            self._insert("candidates", head | row)

    def _plan(self, event_id: int, entry: Entry, event: Any) -> None:
        """A recovery or a migration: a row per request."""
        for choice in event.choices:
            there = choice.options[choice.chosen].worker if choice.chosen >= 0 else ""
            decision = self._decision(
                event_id, entry, event, request=choice.request, attempt=choice.attempt,
                cause=getattr(event, "cause", ""), policy=getattr(event, "policy", ""),
                worker=event.worker, chosen=there, reason=getattr(choice, "reason", ""),
            )  # fmt: skip
            for number, option in enumerate(choice.options):
                row = _fields(option)
                row["restored_tokens"] = row.pop("restored")
                self._insert(
                    "candidates",
                    {"decision": decision, "number": number, "chosen": number == choice.chosen}
                    | {name: _known(value) for name, value in row.items()},
                )

    def _stall(self, event_id: int, entry: Entry, event: v.StallJudged) -> None:
        reason = "hung" if event.hung else "not hung"
        self._decision(event_id, entry, event, worker=event.worker, reason=reason)

    def _stream_judged(self, event_id: int, entry: Entry, event: v.StreamJudged) -> None:
        reason, place = "stuck" if event.stuck else "not stuck", event.worker
        self._decision(event_id, entry, event, request=event.request, worker=place, reason=reason)

    def _waiting(self, event_id: int, entry: Entry, event: Any) -> None:
        reason = event.cause if type(event) is v.RequestHeld else event.reason
        self._decision(event_id, entry, event, request=event.request, reason=reason)

    def _effects(self, event_id: int, entry: Entry, event: v.EffectsDecided) -> None:
        self._decision(event_id, entry, event, cause=event.cause)

    # --- requests ----------------------------------------------------------------------

    def _arrived(self, event_id: int, entry: Entry, event: v.RequestArrived) -> None:
        row = {
            "client_id": event.client_id, "tenant": event.tenant, "model": event.model,
            "route": event.route, "gateway": entry.stream.removeprefix("r."),
            "streamed": event.stream, "guarantee": event.verdict,
            "prompt_tokens": event.prompt_tokens, "max_tokens": event.max_tokens,
            "arrived_revision": entry.revision, "arrived_ms": entry.at_ms or None,
        }  # fmt: skip
        key = {"request": event.request}
        self._update("requests", key, {name: _known(value) for name, value in row.items()})

    def _ended(self, event_id: int, entry: Entry, event: v.RequestEnded) -> None:
        """The first end in the log counts."""
        row = {
            "ended_revision": entry.revision, "ended_ms": entry.at_ms or None,
            "outcome": event.outcome, "status": event.status, "finish": event.finish,
            "tokens": event.tokens, "attempts": event.attempts, "ttft_us": event.ttft_us,
            "longest_gap_us": event.longest_gap_us, "detail": event.detail,
        }  # fmt: skip
        known = {name: _known(value) for name, value in row.items()}
        self._update("requests", {"request": event.request}, known, " AND outcome IS NULL")

    # --- workers -----------------------------------------------------------------------

    def _life(self, event: Any, **row: Any) -> None:
        key = {"worker": event.worker, "incarnation": event.incarnation}
        self._update("workers", key, {name: _known(value) for name, value in row.items()})

    def _started(self, event_id: int, entry: Entry, event: v.EngineStarted) -> None:
        self._life(event, started_revision=entry.revision, started_ms=entry.at_ms or None)

    def _ready(self, event_id: int, entry: Entry, event: v.EngineReady) -> None:
        self._life(
            event, ready_ms=entry.at_ms or None, model=event.model, host=event.host, port=event.port,
            hardware=event.hardware, kv_blocks=event.kv_blocks,
        )  # fmt: skip

    def _died(self, event_id: int, entry: Entry, event: v.EngineDied) -> None:
        self._life(
            event, died_revision=entry.revision, died_ms=entry.at_ms or None,
            reason=event.reason, detail=event.detail,
        )  # fmt: skip

    def _step(self, event_id: int, entry: Entry, event: v.EngineStep) -> None:
        self._db.execute(
            "INSERT INTO workers (worker, incarnation, steps, step_us) VALUES (?, ?, 1, ?)"
            " ON CONFLICT DO UPDATE SET steps = steps + 1, step_us = step_us + excluded.step_us",
            (entry.stream.removeprefix("w."), event.incarnation, event.duration_us),
        )


def _fields(struct: msgspec.Struct) -> Row:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def _known(value: Any) -> Any:
    """None for what the log does not know."""
    return None if value == "" or (type(value) is int and value == -1) else value


def _only(names: set[str]) -> str | None:
    return next(iter(names)) if len(names) == 1 else None
