"""What a client saw becomes the record that the checkers read."""

from __future__ import annotations

from typing import Any

import pytest

from relume.chaos.traffic import Stream
from relume.chaos.validators.client_records import record_of


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"status": 200, "done": True, "finish": "length"}, "completed"),
        ({"status": 200, "done": True, "finish": "length", "error": "{'code': 500}"}, "failed"),
        ({"status": 200, "error": "ClientPayloadError: cut"}, "cut"),
        ({"status": 200}, "cut"),
        ({"status": 404, "error": "{}"}, "rejected"),
        ({"status": 503, "error": "{}"}, "failed"),
        ({"error": "ClientConnectorError: refused"}, "cut"),
    ],
)
def test_streams_become_records(fields: Any, outcome: str) -> None:
    stream = Stream(request="r", prompt="p", tokens=[1, 2], text="ab", **fields)
    record = record_of(stream)
    assert (record.outcome, record.token_count, record.content_id) == (outcome, 2, "p")
