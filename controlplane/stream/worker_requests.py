"""The bytes that go to a worker: dispatches, attachments, relayed requests, and calls."""

from __future__ import annotations

from relume.controlplane.stream.arrival import Assignment, arrived_event
from relume.controlplane.stream.stream_data import Stream
from relume.controlplane.stream.stream_effects import Send
from relume.events.wire import headers as h
from relume.events.wire import worker_calls
from relume.events.wire.stream_origin import StreamOrigin

JSON = "application/json"
RESUMING_MODES = ("continue", "replay")


def dispatch_request(stream: Stream, to: Assignment, envelope_at: tuple[str, ...]) -> Send:
    """A protected request, with what the client has of its answer if `to` continues it."""
    extra, tail = "", b""
    if to.mode in RESUMING_MODES:
        resume, tail = stream.answer.resumption(to.mode)
        extra = f"{h.RESUME}: {resume}\r\n"
        if (number := stream.answer.next_event) >= 0:
            extra += f"{h.NEXT_EVENT}: {number}\r\n"
        if stream.cached:
            extra += f"{h.CACHED}: {stream.cached.decode('latin-1')}\r\n"
    if to.doubted:  # blocks in its cache may come from the corrupt worker
        extra += f"{h.UNCACHED}: 1\r\n"
    extra += _checkpoint_headers(to) + _resumable_headers(stream, envelope_at)
    if stream.created:
        extra += f"{h.CREATED}: {stream.created.decode()}\r\n"
    head = (
        f"POST {stream.path} HTTP/1.1\r\nhost: {to.host}:{to.port}\r\ncontent-type: {JSON}\r\n"
        f"content-length: {len(stream.body) + len(tail)}\r\n"
        f"{h.REQUEST}: {to.request}\r\n{h.ATTEMPT}: {to.attempt}\r\n"
        f"{h.INCARNATION}: {to.incarnation}\r\n"
        f"{h.DISPATCH}: {to.dispatch.decode()}\r\n"
        f"x-request-id: {stream.response_id}\r\n{_trace_header(stream)}{extra}\r\n"
    )
    return Send(head.encode("latin-1"), stream.body, tail)


def _checkpoint_headers(to: Assignment) -> str:
    lines = ""
    if to.checkpoint:
        lines = f"{h.CHECKPOINT}: {h.format_endpoints(to.checkpoint)}\r\n"
        lines += f"{h.PRIORITY}: {to.priority}\r\n"
    if to.restore:
        lines += f"{h.RESTORE}: {h.format_endpoints(to.restore)}\r\n"
    return lines


def _resumable_headers(stream: Stream, envelope_at: tuple[str, ...]) -> str:
    if stream.stamp is None or not stream.is_resumable:
        return ""
    bounds = stream.limits.resume
    found = ""
    if stream.again:
        found = f"{h.ENVELOPE}: {h.format_endpoints(envelope_at)}\r\n"
    arrival = stream.arrival
    if arrival.log:
        origin = StreamOrigin(arrival.log, arrived_event(arrival))
        found += f"{h.ORIGIN}: {origin.format()}\r\n"
    grace = h.Grace(bounds.grace_s, bounds.stream_bytes, bounds.total_bytes, bounds.streams)
    return f"{found}{h.GRACE}: {grace.format()}\r\n{h.CLAIM}: {stream.resume_token}\r\n"


def _trace_header(stream: Stream) -> str:
    """The client's trace context, as a line of the head."""
    trace = stream.arrival.trace
    return f"traceparent: {trace}\r\n" if trace else ""


def relayed_request(stream: Stream, to: Assignment) -> Send:
    """A request to a relayed route, as its client sent it."""
    relayed = stream.relayed
    assert relayed is not None
    extra = "".join(f"{name}: {value}\r\n" for name, value in relayed.headers)
    # A parser of responses cannot know that the answer to HEAD has no body: ask with GET.
    method = "GET" if relayed.method == "HEAD" else relayed.method
    head = (
        f"{method} {stream.path} HTTP/1.1\r\nhost: {to.host}:{to.port}\r\n"
        f"content-length: {len(stream.body)}\r\nx-request-id: {stream.response_id}\r\n"
        f"{_trace_header(stream)}{extra}\r\n"
    )
    return Send(head.encode("latin-1"), stream.body, generates=False)


def attach_request(stream: Stream, to: Assignment) -> Send:
    """Attaches to a stream that runs already."""
    claim = resume_claim(to, stream.resume_token, stream.have[0], stream.arrival.log)
    return Send(*worker_call(to, worker_calls.ATTACH_PATH, claim))


def resume_claim(
    to: Assignment, resume_token: str, tokens: int, log: str = ""
) -> worker_calls.Attach:
    """Names the stream of an attempt to its worker; the client has `tokens`. `log`: that of the replica,
    if it attaches."""
    return worker_calls.Attach(
        request=to.request,
        attempt=to.attempt,
        incarnation=to.incarnation,
        claim=resume_token,
        tokens=tokens,
        log=log,
    )


def worker_call(to: Assignment, path: str, call: worker_calls.Attach) -> tuple[bytes, bytes]:
    """Head and body of a call about a running attempt."""
    content = worker_calls.encode(call)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {to.host}:{to.port}\r\n"
        f"content-type: {JSON}\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode(), content
