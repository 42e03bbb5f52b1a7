"""An incident as one OpenTelemetry trace, in the JSON encoding of OTLP.

The root span lasts from the beginning until capacity is back. Its children are the phases (notice,
decide, the streams, capacity, first token and peak of the next engine), and under the streams one span
for each that is listed. The causal chain is the events of the root. Ids are made of the incident's, so
an incident that is exported twice is one trace. A span that is not over ends at the last time that the
record has.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from relume.controlplane.incidents.incident import Incident, TouchedStream
from relume.controlplane.incidents.sentences import summary
from relume.events.vocabulary.enums import RequestState

SPAN_KIND_INTERNAL = 1
STATUS_ERROR = 2

Attributes = dict[str, str | int | bool]


def trace(record: Incident) -> dict[str, Any]:
    """The body of an OTLP export request: `TracesData` of one trace."""
    resource: Attributes = {"service.name": "relume"}
    spans = list(_spans(record))
    scope = {"scope": {"name": "relume.incidents"}, "spans": spans}
    return {
        "resourceSpans": [
            {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}
        ]
    }


def _spans(record: Incident) -> Iterator[dict[str, Any]]:
    began, end = record.began_ms, _end(record)
    noticed = max(record.noticed_ms, began)
    decided = max(record.decided_ms, noticed)
    facts: Attributes = {
        "relume.incident": record.id,
        "relume.part": record.part,
        "relume.name": record.name,
        "relume.incarnation": record.incarnation,
        "relume.failure": record.failure,
        "relume.reason": record.reason,
        "relume.open": record.open,
        "relume.streams": record.streams,
        "relume.continued": record.continued,
        "relume.failed": record.failed,
        "relume.left": record.left,
        "relume.longest_gap_us": record.longest_gap_us,
        "relume.longest_ttft_us": record.longest_ttft_us,
        "relume.tier": record.tier,
        "relume.reloaded_bytes": record.reloaded_bytes,
        "relume.reused_bytes": record.reused_bytes,
        "relume.moved_bytes": record.moved_bytes,
        "relume.served": record.served,
        "relume.trusted_by": record.trusted_by,
        "relume.not_released": record.not_released,
    }
    root = _span(record, "incident", summary(record), (began, end), facts)
    root["events"] = [
        {
            "timeUnixNano": _nanoseconds(event.at_ms),
            "name": event.type,
            "attributes": _attributes(
                {
                    "relume.event": event.id,
                    "relume.stream": event.stream,
                    "relume.request": event.request,
                    "relume.text": event.text,
                }
            ),
        }
        for event in record.events
    ]
    root["status"] = {"code": STATUS_ERROR, "message": str(record.failure)}
    yield root
    yield _span(record, "notice", "notice", (began, noticed), {}, "incident")
    if record.decided_ms >= 0:
        yield _span(record, "decide", "decide", (noticed, decided), {}, "incident")
    if record.streams:
        last = max(record.last_stream_on_ms, decided)
        yield _span(record, "streams", "continue streams", (decided, last), {}, "incident")
    for stream in record.touched:
        yield _of_stream(record, stream)
    if record.capacity_back_ms >= 0:
        back = max(record.capacity_back_ms, began)
        yield _span(record, "capacity", "restore capacity", (began, back), {}, "incident")
    if record.first_token_ms >= 0:
        first = max(record.first_token_ms, began)
        yield _span(record, "first token", "first token", (began, first), {}, "incident")
    if record.peak_ms >= 0:
        times = record.first_token_ms, record.peak_ms
        yield _span(record, "peak", "reach peak", times, {}, "incident")


def _of_stream(record: Incident, stream: TouchedStream) -> dict[str, Any]:
    until = stream.on_ms if stream.on_ms >= 0 else max(stream.touched_ms, record.last_stream_on_ms)
    facts: Attributes = {
        "relume.request": stream.request,
        "relume.delivered": stream.delivered,
        "relume.to": ", ".join(stream.to),
        "relume.restored": stream.restored,
        "relume.state": stream.state,
        "relume.longest_gap_us": stream.longest_gap_us,
    }
    key = f"stream {stream.request}"
    span = _span(record, key, key, (stream.touched_ms, until), facts, "streams")
    if stream.state in (RequestState.FAILED, RequestState.REJECTED):
        span["status"] = {"code": STATUS_ERROR, "message": str(stream.state)}
    return span


def _end(record: Incident) -> int:
    """When the last thing that the record knows happened."""
    return max(
        record.began_ms,
        record.noticed_ms,
        record.decided_ms,
        record.last_stream_on_ms,
        record.capacity_back_ms,
        record.first_token_ms,
        record.peak_ms,
    )


def _span(
    record: Incident,
    key: str,
    name: str,
    times_ms: tuple[int, int],
    facts: Attributes,
    parent: str = "",
) -> dict[str, Any]:
    return {
        "traceId": _id(record, "", 16),
        "spanId": _id(record, key, 8),
        **({"parentSpanId": _id(record, parent, 8)} if parent else {}),
        "name": name,
        "kind": SPAN_KIND_INTERNAL,
        "startTimeUnixNano": _nanoseconds(times_ms[0]),
        "endTimeUnixNano": _nanoseconds(times_ms[1]),
        "attributes": _attributes(facts),
    }


def _id(record: Incident, key: str, size: int) -> str:
    """The same for the same incident, in every process."""
    name = f"{record.id} {record.subject} {record.noticed_ms} {key}"
    return blake2b(name.encode(), digest_size=size).hexdigest()


def _nanoseconds(at_ms: int) -> str:
    """64-bit numbers are strings in OTLP's JSON."""
    return str(at_ms * 1_000_000)


def _attributes(facts: Attributes) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in facts.items() if value != ""]


def _value(value: str | int | bool) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"stringValue": str(value)}
