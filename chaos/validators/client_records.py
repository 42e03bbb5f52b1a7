"""Makes the validators' client records from the traffic's streams."""

from __future__ import annotations

from relume.chaos.traffic import Stream
from relume.chaos.validators.records import ClientRecord


def record_of(stream: Stream, content_id: str = "", undisturbed: bool = False) -> ClientRecord:
    """The record of `stream`. `content_id` defaults to its prompt; set it if parameters differ."""
    return ClientRecord(
        request=stream.request,
        status=stream.status,
        outcome=_outcome(stream),
        text=stream.text,
        token_count=len(stream.tokens),
        other_tokens=sum(map(len, stream.other_tokens.values())),
        finish=stream.finish,
        tokens=list(stream.tokens),
        gaps_ms=[1000 * stream.longest_gap_s] if stream.tokens else [],
        content_id=content_id or stream.prompt,
        undisturbed=undisturbed,
    )


def _outcome(stream: Stream) -> str:
    if stream.whole:
        return "completed"
    if stream.status >= 400:
        return "rejected" if stream.status < 500 else "failed"
    # An error event is a report of the server (a mapping); anything else is a broken connection.
    return "failed" if stream.status and stream.error.startswith("{") else "cut"
