"""The wire's codecs: what was written is read, in any pieces; anything else is a typed error."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from relume.events.wire import (
    envelope,
    frames,
    headers,
    notices,
    reports,
    resumption,
    stream_origin,
    worker_calls,
)
from relume.events.wire.kv import kv_messages, local_frames
from tests.wire import frame_codec
from tests.wire import message_codecs as m

PROPERTIES: dict[ModuleType, tuple[Callable[[Any], None], ...]] = {
    frames: frame_codec.PROPERTIES,
    headers: (
        m.header_values_read_as_they_were_written,
        m.malformed_header_values_raise_header_error,
    ),
    resumption: (
        m.a_resumption_reads_as_it_was_written,
        m.malformed_resumptions_raise_header_error,
    ),
    reports: (m.reports_survive_any_cut, m.malformed_reports_raise_report_error),
    notices: (m.notices_survive_any_cut, m.malformed_notices_raise_notice_error),
    envelope: (m.an_envelope_reads_as_it_was_packed, m.malformed_envelopes_raise_envelope_error),
    stream_origin: (m.origins_read_as_they_were_written, m.malformed_origins_raise_header_error),
    worker_calls: (m.calls_read_as_they_were_written, m.malformed_calls_raise_call_error),
    kv_messages: (
        m.kv_messages_read_as_they_were_written,
        m.malformed_kv_messages_raise_a_wire_error,
        m.pieces_are_the_chunk_and_within_bounds,
    ),
    local_frames: (m.local_frames_read_as_they_were_packed,),
}


@pytest.mark.parametrize(
    ("codec", "holds"),
    [
        pytest.param(codec, holds, id=f"{codec.__name__.rpartition('.')[2]}-{holds.__name__}")
        for codec, properties in PROPERTIES.items()
        for holds in properties
    ],
)
def test_codec(codec: ModuleType, holds: Callable[[Any], None]) -> None:
    holds(codec)
