"""The pages of the protocols name everything that the codecs have."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest

from relume.events.wire import frames, headers, notices, reports, worker_calls
from relume.events.wire.kv import kv_messages

REFERENCE = Path(__file__).resolve().parents[2] / "docs/reference"


def named(page: str) -> set[str]:
    """What stands in code marks on a page, word by word."""
    text = (REFERENCE / page).read_text()
    return {word for mark in re.findall(r"`([^`\n]+)`", text) for word in re.split(r"[ ,]+", mark)}


def test_every_header_stands_on_the_page_of_the_worker_protocol() -> None:
    names = {
        value
        for name, value in vars(headers).items()
        if isinstance(value, str) and value.startswith(headers.PREFIX) and name != "PREFIX"
    } - {headers.ROLE_FIELD}
    assert len(names) > 15
    known = {word for word in named("worker-protocol.md") if word.startswith(headers.PREFIX)}
    assert known - {frames.CONTENT_TYPE.decode()} == names


def test_every_call_and_kind_of_failure_stands_there_too() -> None:
    paths = {value for name, value in vars(worker_calls).items() if name.endswith("_PATH")}
    known = named("worker-protocol.md")
    assert paths <= known and len(paths) == 9
    assert set(map(str, frames.FailureKind)) <= known
    fields = set(worker_calls.Attach.__struct_fields__ + worker_calls.Retarget.__struct_fields__)
    assert fields <= known


def test_limits_of_frames_are_those_of_the_page() -> None:
    text = (REFERENCE / "worker-protocol.md").read_text()
    assert f"at most {frames.MAX_HEADER_BYTES >> 20} MiB, a payload at most" in text
    assert f"a payload at most {frames.MAX_PAYLOAD_BYTES >> 20} MiB" in text
    assert f"at most {frames.MAX_WORD_BYTES} printable" in text


@pytest.mark.parametrize("message", [reports.Hello, reports.Ready, reports.Layout])
def test_every_control_message_stands_on_the_page_of_the_report_socket(message: type) -> None:
    known = named("report-socket.md")
    assert {message.__name__.lower(), *message.__struct_fields__} <= known


def test_notices_stand_there_too() -> None:
    text = (REFERENCE / "report-socket.md").read_text()
    greeting = notices.hello_line("<worker>").decode().strip()
    assert greeting in text
    assert f"at most {notices.MAX_LINE_BYTES} bytes" in text


def test_every_kv_message_stands_on_the_page_of_the_kv_protocol() -> None:
    kinds = typing.get_args(kv_messages.AnyMessage)
    tags = {kind.__struct_config__.tag for kind in kinds}
    assert len(tags) == len(kinds) > 20
    assert tags <= named("kv-protocol.md")
