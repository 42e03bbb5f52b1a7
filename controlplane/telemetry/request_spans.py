"""Spans from the replica's own events: one per request, with a child for each attempt.

Built by an observer of `Scheduler.emit`, so the token path does not depend on it. Nothing is
imported, and nothing is called, unless `OTEL_EXPORTER_OTLP_ENDPOINT` is set (spans go to that
collector) or the setting `trace_file` (spans are appended there, a JSON object a line). Every attempt
carries its decision and the basis of it, so that a span leads to the log: `relume.decision`,
`relume.basis.revision`, `relume.basis.position`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog

from relume.controlplane.replica.scheduler import Scheduler
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import RequestOutcome, TransportKind

log = structlog.get_logger("relume.traces")

OTLP = "OTEL_EXPORTER_OTLP_ENDPOINT"
OPEN_MAX = 65_536
"""Maximum number of requests with open spans; the oldest lose theirs."""


@contextmanager
def tracing(
    scheduler: Scheduler, replica: str, file: str, environ: Mapping[str, str]
) -> Iterator[None]:
    """Trace while inside, to `file` and to the collector that `environ` names; nothing at all
    without either. Leaving flushes."""
    if not (file or environ.get(OTLP)):
        yield
        return
    provider = _provider(replica, file, environ)
    tracer = RequestTracer(provider.get_tracer("relume"))
    scheduler.decisions.observers.append(tracer.seen)
    try:
        yield
    finally:
        scheduler.decisions.observers.remove(tracer.seen)
        tracer.close()
        provider.shutdown()


def _provider(replica: str, file: str, environ: Mapping[str, str]) -> Any:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": "relume", "service.instance.id": replica})
    provider = TracerProvider(resource=resource)
    if file:
        provider.add_span_processor(BatchSpanProcessor(_file_exporter(Path(file))))
    if environ.get(OTLP):
        provider.add_span_processor(BatchSpanProcessor(_otlp_exporter(environ)))
    return provider


def _otlp_exporter(environ: Mapping[str, str]) -> Any:
    """gRPC unless OTEL_EXPORTER_OTLP_PROTOCOL says http; both read the rest themselves."""
    if environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc").startswith("http"):
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

        return over_http.OTLPSpanExporter()
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

    return over_grpc.OTLPSpanExporter()


def _file_exporter(path: Path) -> Any:
    """Appends spans as JSON lines; called from the batch processor's own thread. A batch that
    cannot be written is lost whole; this is logged once until a write succeeds."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class FileExporter(SpanExporter):
        failing = False

        def export(self, spans: Sequence[Any]) -> Any:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                _append(path, b"".join(msgspec.json.encode(_plain(s)) + b"\n" for s in spans))
            except OSError as error:
                if not self.failing:
                    log.warning("spans_not_written", reason=str(error), file=str(path))
                self.failing = True
                return SpanExportResult.FAILURE
            self.failing = False
            return SpanExportResult.SUCCESS

        def shutdown(self) -> None:
            """Nothing is held open."""

    return FileExporter()


def _append(path: Path, data: bytes) -> None:
    """All of `data` or nothing. Raises OSError."""
    with path.open("ab", buffering=0) as out:
        end = os.fstat(out.fileno()).st_size
        try:
            if out.write(data) != len(data):  # room ended within it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            os.ftruncate(out.fileno(), end)
            raise


def _plain(span: Any) -> dict[str, Any]:
    context = span.get_span_context()
    return {
        "name": span.name,
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else "",
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "status": span.status.status_code.name,
        "attributes": dict(span.attributes or {}),
        "events": [
            {"name": e.name, "at_ns": e.timestamp, "attributes": dict(e.attributes or {})}
            for e in span.events
        ],
    }


class RequestTracer:
    """Turns a replica's own events into spans. `tracer`: an OpenTelemetry tracer."""

    def __init__(self, tracer: Any) -> None:
        from opentelemetry import trace

        self._trace = trace
        self._tracer = tracer
        self._requests: dict[str, Any] = {}
        self._attempts: dict[str, Any] = {}
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            v.RequestArrived: self._arrived,
            v.RouteDecided: self._decided,
            v.TransportObserved: self._observed,
            v.RequestEnded: self._ended,
        }

    def seen(self, position: int, event: Any) -> None:
        """One event this replica has just written at `position` of its stream."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(position, event)

    def close(self) -> None:
        """End what is open, so that it is exported."""
        for span in (*self._attempts.values(), *self._requests.values()):
            span.set_attribute("relume.unfinished", True)
            span.end()
        self._attempts.clear()
        self._requests.clear()

    def _arrived(self, position: int, event: v.RequestArrived) -> None:
        self._requests[event.request] = self._tracer.start_span(
            f"request {event.route}",
            context=self._clients_span(event.trace),
            kind=self._trace.SpanKind.SERVER,
            attributes={
                "relume.request": event.request,
                "relume.position": position,
                "gen_ai.request.model": event.model,
                "gen_ai.request.max_tokens": event.max_tokens,
                "relume.stream": event.stream,
                "relume.prompt_tokens": event.prompt_tokens,
                "relume.verdict": event.verdict,
            },
        )
        if len(self._requests) > OPEN_MAX:
            oldest = next(iter(self._requests))
            self._end_attempt(oldest)
            self._requests.pop(oldest).end()

    def _clients_span(self, traceparent: str) -> Any:
        """The client's span as a context; None: a trace of its own."""
        if not traceparent:
            return None
        _, trace_id, span_id, flags = traceparent.split("-")
        context = self._trace.SpanContext(
            int(trace_id, 16), int(span_id, 16), True, self._trace.TraceFlags(int(flags, 16))
        )
        return self._trace.set_span_in_context(self._trace.NonRecordingSpan(context))

    def _decided(self, position: int, event: v.RouteDecided) -> None:
        parent = self._requests.get(event.request)
        if parent is None:
            return
        facts = {
            "relume.decision": event.decision,
            "relume.position": position,
            "relume.basis.revision": event.basis.revision,
            "relume.basis.position": event.basis.position,
            "relume.cause": event.cause,
            "relume.mode": event.mode,
            "relume.delivered": event.delivered,
            "relume.candidates": len(event.candidates) + sum(n for _, n in event.others),
        }
        if not event.worker:
            parent.add_event("no worker could take it", facts)
            return
        self._end_attempt(event.request)
        self._attempts[event.request] = self._tracer.start_span(
            f"attempt {event.attempt}",
            context=self._trace.set_span_in_context(parent),
            kind=self._trace.SpanKind.CLIENT,
            attributes={
                **facts,
                "relume.request": event.request,
                "relume.attempt": event.attempt,
                "relume.worker": event.worker,
                "relume.incarnation": event.incarnation,
            },
        )

    def _observed(self, position: int, event: v.TransportObserved) -> None:
        attempt = self._attempts.get(event.request)
        if attempt is None:
            return
        facts = {"relume.delivered": event.delivered, "relume.detail": event.detail}
        attempt.add_event(event.kind, {**facts, "relume.position": position})
        if event.kind != TransportKind.MOVED:
            attempt.set_status(self._trace.Status(self._trace.StatusCode.ERROR, event.kind))
        self._end_attempt(event.request)

    def _ended(self, position: int, event: v.RequestEnded) -> None:
        self._end_attempt(event.request)
        span = self._requests.pop(event.request, None)
        if span is None:
            return
        span.set_attributes(
            {
                "relume.outcome": event.outcome,
                "http.response.status_code": event.status,
                "gen_ai.usage.output_tokens": event.tokens,
                "relume.finish": event.finish,
                "relume.attempts": event.attempts,
                "relume.ttft_us": event.ttft_us,
                "relume.longest_gap_us": event.longest_gap_us,
            }
        )
        if event.outcome == RequestOutcome.FAILED:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, event.detail))
        span.end()

    def _end_attempt(self, request: str) -> None:
        attempt = self._attempts.pop(request, None)
        if attempt is not None:
            attempt.end()
