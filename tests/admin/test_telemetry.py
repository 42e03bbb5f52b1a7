"""Logs and spans: what they carry, and that switched off they cost nothing."""

from __future__ import annotations

import io
import json
import logging

import pytest
import structlog

from relume.controlplane.stream.arrival import Arrival
from relume.controlplane.telemetry.logs import about, setup_logging
from relume.controlplane.telemetry.request_spans import _append, tracing
from tests.admin.scene import Scene
from tests.full_disk import full_disk


def test_log_lines_are_json_with_what_they_are_about(fresh_logging):
    out = io.StringIO()
    setup_logging("info", "json", out)
    log = structlog.get_logger("relume.test")
    with about(request="req-1", worker="w0"):
        log.info("moved", attempt=2)
        log.debug("unheard")
    log.warning("after")
    logging.getLogger("library").warning("theirs %s", 1)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["moved", "after", "theirs 1"]
    assert (lines[0]["request"], lines[0]["worker"], lines[0]["attempt"]) == ("req-1", "w0", 2)
    assert "request" not in lines[1] and lines[1]["level"] == "warning"


def test_lines_that_a_full_disk_refuses_raise_nothing_and_are_counted(fresh_logging, tmp_path):
    with (tmp_path / "log").open("w") as out:
        setup_logging("info", "json", out)
        log = structlog.get_logger("relume.test")
        with full_disk():
            for _ in range(3):
                log.error("meanwhile", padding="x" * 10_000)
                logging.getLogger("library").error("theirs")
        log.info("after")
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["event"] for line in lines[-2:]] == ["log_lines_refused", "after"]
    assert lines[-2]["lines"] == 6


@pytest.mark.parametrize("form", ["json", "console", "auto"])
def test_a_closed_stream_of_the_log_raises_nothing(fresh_logging, tmp_path, capfd, form):
    out = (tmp_path / "log").open("w")
    setup_logging("info", form, out)
    out.close()
    for _ in range(2):
        structlog.get_logger("relume.test").error("after the end")
        logging.getLogger("library").error("theirs")
    setup_logging("info", form, out)
    structlog.get_logger("relume.test").error("set up after the end")
    assert capfd.readouterr().err == "", "no traceback of a handler either"


@pytest.mark.parametrize("form", ["json", "console", "auto"])
def test_a_process_without_stderr_logs_nothing_and_raises_nothing(
    fresh_logging, monkeypatch, capfd, form
):
    monkeypatch.setattr("sys.stderr", None)
    setup_logging("info", form)
    structlog.get_logger("relume.test").error("unseen")
    logging.getLogger("library").error("theirs")
    assert capfd.readouterr() == ("", "")


def test_spans_find_room_whole_or_not_at_all(tmp_path):
    path = tmp_path / "spans"
    _append(path, b"one\n")
    for room in (0, 3):
        with full_disk(4 + room), pytest.raises(OSError):
            _append(path, b"three\n")
    _append(path, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("form", ["json", "console"])
def test_tracebacks_show_no_variables(fresh_logging, form):
    out = io.StringIO()
    setup_logging("info", form, out)
    api_key = "hush-hush"
    try:
        raise ValueError(f"bad key of length {len(api_key)}")
    except ValueError:
        structlog.get_logger("relume.test").exception("failed")
    assert "bad key of length 9" in out.getvalue() and api_key not in out.getvalue()


async def test_a_request_is_a_span_with_a_child_for_each_attempt(tmp_path):
    path = tmp_path / "traces" / "spans.jsonl"
    async with Scene() as scene:
        await scene.worker("w0")
        await scene.worker("w1")
        scheduler = scene.replica.scheduler
        with tracing(scheduler, "r0", str(path), {}):
            scheduler.arrived(
                Arrival(
                    request="req-1",
                    model="tiny",
                    route="completions",
                    stream=True,
                    prompt_tokens=5,
                    max_tokens=16,
                    verdict="exact",
                )
            )
            first = scheduler.assign("req-1", "arrival", 0)
            scheduler.observed("req-1", 1, "reset", 3)
            second = scheduler.assign("req-1", "reset", 3)
            scheduler.ended("req-1", "completed", 200, 9, "length", 11, 22)
            scheduler.arrived(
                Arrival(
                    request="req-2",
                    model="tiny",
                    route="completions",
                    stream=True,
                    prompt_tokens=5,
                    max_tokens=16,
                    verdict="exact",
                )
            )
        assert scheduler.decisions.observers == []
    spans = {s["name"]: s for s in map(json.loads, path.read_text().splitlines()) if s}
    unfinished = [s for s in map(json.loads, path.read_text().splitlines())
                  if s["attributes"].get("relume.unfinished")]  # fmt: skip
    assert [s["attributes"]["relume.request"] for s in unfinished] == ["req-2"]
    one, two = spans["attempt 1"], spans["attempt 2"]
    assert (one["attributes"]["relume.worker"], two["attributes"]["relume.worker"]) == (
        first.worker,
        second.worker,
    )
    root = next(
        s
        for s in map(json.loads, path.read_text().splitlines())
        if not s["parent_id"] and s["attributes"]["relume.request"] == "req-1"
    )
    assert one["parent_id"] == two["parent_id"] == root["span_id"]
    assert one["trace_id"] == two["trace_id"] == root["trace_id"]
    assert one["status"] == "ERROR" and two["status"] == "UNSET"
    assert one["events"][0]["name"] == "reset"
    assert two["attributes"]["relume.cause"] == "reset"
    assert two["attributes"]["relume.decision"].startswith("r0.")
    assert two["attributes"]["relume.basis.revision"] > 0
    assert root["attributes"]["gen_ai.usage.output_tokens"] == 9


async def test_a_request_that_came_with_a_trace_is_a_span_of_it(tmp_path):
    path = tmp_path / "spans.jsonl"
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    async with Scene() as scene:
        await scene.worker("w0")
        scheduler = scene.replica.scheduler
        with tracing(scheduler, "r0", str(path), {}):
            traced = f"00-{trace}-{parent}-01"
            scheduler.arrived(
                Arrival(
                    request="q",
                    model="tiny",
                    route="chat",
                    stream=True,
                    prompt_tokens=5,
                    max_tokens=16,
                    verdict="exact",
                    trace=traced,
                )
            )
            scheduler.assign("q", "arrival", 0)
            scheduler.ended("q", "completed", 200, 9, "length", 11, 22)
        await scene.until(lambda: scene.replica.fleet.ended)
    attempt, request = map(json.loads, path.read_text().splitlines())
    assert (request["name"], request["trace_id"]) == ("request chat", trace)
    assert request["parent_id"] == parent
    assert (attempt["trace_id"], attempt["parent_id"]) == (trace, request["span_id"])


async def test_tracing_off_leaves_no_observer_and_imports_no_sdk():
    async with Scene() as scene:
        with tracing(scene.replica.scheduler, "r0", "", {}):
            assert scene.replica.scheduler.decisions.observers == []
