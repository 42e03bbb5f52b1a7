"""The export to SQLite: questions that operators ask, answered in SQL and by other means."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relume.controlplane.cli.relume_command import main
from relume.controlplane.incidents.incident_fold import incidents_of
from relume.controlplane.replay.recorded_log import History, from_file
from relume.controlplane.replay.sqlite import SCHEMA, export_sqlite
from relume.events import vocabulary as v
from relume.events.log.codec import encode
from relume.events.log.entries import KINDS, entries
from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import GENESIS, pack, unpack
from tests.replay.decisions.test_scheduler_replay import eventful_log

ROOT = Path(__file__).parents[2]
KILLED = Path(__file__).parent / "logs" / "engine-killed.rlog"


@pytest.fixture(scope="module")
def killed() -> History:
    return from_file(KILLED)


def database(path: Path, groups: list[RevisionGroup]) -> sqlite3.Connection:
    export_sqlite(path, groups)
    return sqlite3.connect(path)


def one_group(*events: Any, stream: str = "r.r0", revision: int = 7) -> RevisionGroup:
    data = pack(stream, 1, 1, 1, GENESIS, [encode(event) for event in events], 1_700_000_000_000)
    return RevisionGroup(revision, (unpack(data),))


def route(request: str, chosen: str, ttft_us: dict[str, int], **more: Any) -> v.RouteDecided:
    candidates = tuple(
        v.Candidate(
            worker=name, incarnation=1, cost=0, prefill_tokens=0, requests=0,
            excluded="draining" if name == "drained" else "", ttft_us=ttft,
        )
        for name, ttft in ttft_us.items()
    )  # fmt: skip
    return v.RouteDecided(
        decision=f"r0-{request}", basis=v.Basis(6, 0), request=request, attempt=1,
        cause="arrival", mode="new", delivered=0, prompt_tokens=10, worker=chosen, incarnation=1,
        policy="predicted_ttft", model="tiny", candidates=candidates, **more,
    )  # fmt: skip


def test_which_requests_went_to_w0_though_another_had_a_lower_predicted_ttft(
    tmp_path: Path,
) -> None:
    group = one_group(
        route("fastest", "w0", {"w0": 5_000, "w1": 9_000}),
        route("slower", "w0", {"w0": 20_000, "w1": 9_000, "w2": 25_000}),
        route("elsewhere", "w1", {"w0": 5_000, "w1": 9_000}),
        route("other-closed", "w0", {"w0": 20_000, "drained": 1_000}),
        route("unknown", "w0", {"w0": 20_000, "w1": -1}),
    )
    found = database(tmp_path / "log.db", [group]).execute(
        """
        SELECT d.request, c.ttft_us, o.worker, o.ttft_us
        FROM decisions d
        JOIN candidates c ON c.decision = d.id AND c.chosen
        JOIN candidates o ON o.decision = d.id AND NOT o.chosen AND o.excluded IS NULL
        WHERE d.type = 'route_decided' AND d.chosen = 'w0' AND o.ttft_us < c.ttft_us
        """
    )
    assert found.fetchall() == [("slower", 20_000, "w1", 9_000)]


def test_what_became_of_requests_on_the_engine_that_died(killed: History, tmp_path: Path) -> None:
    """The same answer as the incident."""
    log = database(tmp_path / "log.db", killed.groups)
    ((worker, incarnation, reason),) = log.execute(
        "SELECT worker, incarnation, reason FROM workers WHERE died_revision IS NOT NULL"
    )
    assert (worker, incarnation, reason) == ("w0", 1, "killed")
    found = log.execute(
        """
        SELECT r.request, p.chosen, max(c.restored_tokens), r.outcome
        FROM decisions p
        JOIN requests r USING (request)
        JOIN candidates c ON c.decision = p.id AND c.chosen
        WHERE p.type = 'recovery_planned' AND p.worker = 'w0'
        GROUP BY r.request
        """
    ).fetchall()
    (incident,) = incidents_of(killed.groups)
    assert len(found) > 5
    assert {(request, chosen) for request, chosen, _, _ in found} == {
        (stream.request, stream.to[0]) for stream in incident.touched
    }
    assert {outcome for *_, outcome in found} == {"completed"}
    assert sum(restored > 0 for _, _, restored, _ in found) > 5


def test_every_event_and_change_is_a_row(killed: History, tmp_path: Path) -> None:
    counted: Counter[str] = Counter()
    for entry in entries(killed.groups):
        counted[entry.kind] += 1
        counted.update(KINDS[type(change)] for change in getattr(entry.event, "changes", ()))
    log = database(tmp_path / "log.db", killed.groups)
    assert dict(log.execute("SELECT type, count(*) FROM events GROUP BY type")) == counted
    ((gap,),) = log.execute(
        "SELECT fields ->> '$.longest_gap_us' FROM events WHERE type = 'request_ended' LIMIT 1"
    )
    assert gap > 0


def test_per_worker_and_per_request_sums_agree_with_the_events(tmp_path: Path) -> None:
    groups = asyncio.run(eventful_log(31))
    log = database(tmp_path / "log.db", groups)
    dispatched = log.execute(
        "SELECT count(*) FROM decisions WHERE type = 'route_decided' AND chosen IS NOT NULL"
    ).fetchone()
    assert dispatched[0] > 10
    assert log.execute("SELECT sum(dispatches) FROM workers").fetchone() == dispatched
    assert log.execute("SELECT sum(dispatches) FROM requests").fetchone() == dispatched
    steps = log.execute("SELECT count(*) FROM events WHERE type = 'engine_step'").fetchone()
    assert log.execute("SELECT sum(steps) FROM workers").fetchone() == steps
    ends = log.execute("SELECT count(DISTINCT request) FROM events WHERE type = 'request_ended'")
    ended = log.execute("SELECT count(*) FROM requests WHERE outcome IS NOT NULL")
    assert ended.fetchone() == ends.fetchone()


def test_the_first_end_of_a_request_counts(tmp_path: Path) -> None:
    by_leader = v.RequestEnded(
        request="a", outcome="failed", status=502, tokens=3, finish="", attempts=1, verdict="exact"
    )
    by_gateway = v.RequestEnded(
        request="a", outcome="completed", status=200, tokens=9, finish="stop", attempts=1,
        verdict="exact",
    )  # fmt: skip
    groups = [
        one_group(by_leader, stream="fleet", revision=7),
        one_group(by_gateway, stream="r.r0", revision=8),
    ]
    log = database(tmp_path / "log.db", groups)
    found = log.execute("SELECT outcome, tokens, ended_revision FROM requests").fetchall()
    assert found == [("failed", 3, 7)]


@pytest.mark.full
def test_memory_does_not_grow_with_the_log(killed: History, tmp_path: Path) -> None:
    def repeated(times: int) -> Iterator[RevisionGroup]:
        for _ in range(times):
            yield from killed.groups

    def peak(times: int) -> int:
        tracemalloc.start()
        export_sqlite(tmp_path / f"{times}.db", repeated(times))
        try:
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(1)
    assert peak(6) < 1.2 * peak(1)


def test_the_command_writes_a_database_and_says_what_is_in_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "log.db"
    assert main(["replay", "--log", str(KILLED), "--sqlite", str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    log = sqlite3.connect(path)
    for table, count in rows.items():
        assert log.execute(f"SELECT count(*) FROM {table}").fetchone() == (count,) and count > 0
    assert main(["replay", "--log", str(KILLED), "--at", "100", "--sqlite", str(path)]) == 0
    assert sqlite3.connect(path).execute("SELECT max(revision) FROM events").fetchone()[0] <= 100


def test_a_damaged_log_leaves_the_old_database(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, damaged = tmp_path / "log.db", tmp_path / "damaged.rlog"
    damaged.write_bytes(KILLED.read_bytes()[:-40])
    path.write_text("the old one")
    assert main(["replay", "--log", str(damaged), "--sqlite", str(path)]) == 1
    assert "cut short" in capsys.readouterr().err
    assert path.read_text() == "the old one"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged.rlog", "log.db"]


def test_the_document_names_every_table_and_column() -> None:
    document = (ROOT / "docs" / "reference" / "sqlite.md").read_text()
    names = re.findall(r"^(?:CREATE TABLE|   ) ([a-z_]+) ", SCHEMA, re.MULTILINE)
    assert len(names) > 80
    assert not [name for name in names if f"`{name}`" not in document]
