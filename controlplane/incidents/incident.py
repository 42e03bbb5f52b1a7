"""The record of one failure: what failed and when, and what clients felt of it."""

from __future__ import annotations

from msgspec import Struct, field

from relume.events.vocabulary.enums import FailedPart, FailureClass, RecoveryTier, RequestState

MOST_STREAMS = 50
"""Touched streams that a record lists; it counts all of them."""
MOST_EVENTS = 250
"""Events of its causal chain that a record lists; it counts those that it leaves out."""
MOST_OF_STREAMS = 200
"""Of these, at most so many are about single streams, so that the worker's own find room."""
MOST_OF_FACTS = 200
"""Of an unreadable stream, at most so many are about what cannot be read: a trust finds room."""
MOST_SERVED = 5_000
"""Requests served by a corrupt worker that a record lists; it counts all of them."""


class TouchedStream(Struct, kw_only=True):
    """What a failure did to one stream. `delivered` tokens were with the client. `to`: the workers
    where it was sent next (of a daemon's incident: the new holders of its checkpoint). `on_ms`: when it
    continued (-1: not yet); `restored` counts tokens had from a holder. `longest_gap_us` is that of
    the whole request, known when it has ended."""

    request: str
    touched_ms: int
    delivered: int = 0
    to: list[str] = field(default_factory=list)
    on_ms: int = -1
    restored: int = 0
    state: RequestState = RequestState.LIVE
    longest_gap_us: int = -1


class ServedRequest(Struct, kw_only=True):
    """A request that got tokens from a corrupt worker. `state`: what became of it."""

    request: str
    state: RequestState = RequestState.LIVE


class CausalEvent(Struct, frozen=True, kw_only=True):
    """One event of the causal chain. `id` is its place in the log, `revision.index`; `request`: the
    stream that it is about, if it is about one of those touched."""

    id: str
    at_ms: int
    stream: str
    type: str
    request: str
    text: str


class IncidentInfo(Struct, kw_only=True):
    """One failure. `summary` says it in a sentence. `id` is the place in the log of the first event
    that tells of it. `name`: the worker, or the gateway; `incarnation` of its engine (0: not about
    an engine). `reason` as the log gives it. `open`: capacity is not back.

    Times are the writers' wall clocks in milliseconds, -1: not happened, or not known. `began_ms`;
    `noticed_ms`, the first event; `decided_ms`, the first decision because of it;
    `first_stream_on_ms` and `last_stream_on_ms`: a touched stream had its next token;
    `capacity_back_ms`: the engine, the daemon or the gateway serves again, or an operator trusts the
    worker whose stream could not be read; `first_token_ms` and `peak_ms`: the engine that followed
    generated its first token, and was as fast as it became within a minute.

    Of the `streams` touched, `continued` had a next token, `failed` ended before, `left` lost their
    client before. `workers` continued them, with the number of streams. `longest_gap_us`: the
    longest gap between tokens that the client of a touched stream saw; `longest_ttft_us`: the longest
    TTFT of those touched before their first token (both -1: no such stream has ended).

    Of an engine that followed: `reloaded_bytes` of its weights came from files, `reused_bytes` from the
    memory of its host (both -1: it has not said so); `tier` names that. `moved_bytes` of KV blocks were
    restored for the streams touched.

    Of a corruption: `served` requests got tokens from the worker since its last right answers, or
    more, if `served_at_least`: the record remembers a bounded number. `not_released`: why its quarantine
    does not end although it answers canaries rightly (empty: nothing holds it). Of a stream that could not be
    read: `trusted_by`, the operator who trusted its worker again."""

    summary: str = ""
    id: str
    part: FailedPart
    name: str
    incarnation: int
    failure: FailureClass
    reason: str
    open: bool = True
    began_ms: int
    noticed_ms: int
    decided_ms: int = -1
    first_stream_on_ms: int = -1
    last_stream_on_ms: int = -1
    capacity_back_ms: int = -1
    first_token_ms: int = -1
    peak_ms: int = -1
    streams: int = 0
    continued: int = 0
    failed: int = 0
    left: int = 0
    longest_gap_us: int = -1
    longest_ttft_us: int = -1
    tier: RecoveryTier = RecoveryTier.UNKNOWN
    reloaded_bytes: int = -1
    reused_bytes: int = -1
    moved_bytes: int = 0
    served: int = 0
    served_at_least: bool = False
    not_released: str = ""
    trusted_by: str = ""
    workers: dict[str, int] = field(default_factory=dict)


class Incident(IncidentInfo, kw_only=True):
    """The whole record. `touched`, `events` and `served_requests` are bounded; `events_left_out`
    counts what is not in the chain."""

    touched: list[TouchedStream] = field(default_factory=list)
    served_requests: list[ServedRequest] = field(default_factory=list)
    events: list[CausalEvent] = field(default_factory=list)
    events_left_out: int = 0

    @property
    def subject(self) -> str:
        """The name by which people ask for it: w0:1, daemon:w0, stream:w0, r0."""
        if self.part in (FailedPart.DAEMON, FailedPart.STREAM):
            return f"{self.part}:{self.name}"
        return f"{self.name}:{self.incarnation}" if self.incarnation else self.name
