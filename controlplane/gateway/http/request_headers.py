"""What the head of a request says, and of a relayed one the body."""

from __future__ import annotations

import re
from hashlib import blake2b

import msgspec

from relume.controlplane.gateway.errors import ClientError
from relume.controlplane.gateway.http.reading import Request
from relume.events.decode_errors import UNREADABLE
from relume.events.vocabulary.enums import Tier
from relume.events.wire.headers import RESUMABLE_BYTES, TIER, TIER_BYTES
from relume.policies.routing.routing_settings import TIERS

_TRACEPARENT = re.compile(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}").fullmatch
_TENANT = re.compile(rb"[A-Za-z0-9._:@/+-]{1,64}").fullmatch
MOST_TTFT_MS = 86_400_000
_JSON_TYPE = re.compile(rb"application/json\s*(;.*)?", re.IGNORECASE).fullmatch


def trace_of(request: Request) -> str:
    """Its traceparent, if that is one of version 00."""
    given = request.headers.get(b"traceparent", b"")
    return given.decode() if _TRACEPARENT(given) else ""


def require_json(request: Request) -> None:
    if not _JSON_TYPE(request.headers.get(b"content-type", b"")):
        raise ClientError(
            415, "content-type must be application/json", code="unsupported_media_type"
        )
    if request.headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ClientError(415, "compressed bodies are not supported", code="unsupported_media_type")


def wants_resumable(request: Request) -> bool:
    """Whether the client asks for a resumable stream: by Relume's header, or with the id of an event.
    An Accept header does not: libraries for event streams send one, and close to cancel."""
    headers = request.headers
    return headers.get(RESUMABLE_BYTES) == b"1" or b"last-event-id" in headers


def session_of(request: Request, tenant: str) -> str:
    """Digest of `x-session-id`, a tenant's own; empty without one."""
    given = request.headers.get(b"x-session-id", b"").strip()
    if not given:
        return ""
    return blake2b(tenant.encode() + b"\n" + given, digest_size=8).hexdigest()


def tier_of(request: Request) -> Tier:
    """`TIER`, empty without one. Raises ClientError for one that is not known."""
    given = request.headers.get(TIER_BYTES, b"").strip().lower().decode("latin-1")
    if given and given not in TIERS:
        raise ClientError(400, f"{TIER} must be one of {', '.join(TIERS)}", TIER)
    return Tier(given)


def share_of(request: Request, tenant: str) -> str:
    """The tenant in whose share it waits: its API key's, else the value of `x-tenant-id` or
    `x-gateway-inference-fairness-id`. Raises ClientError for a name that is none."""
    if tenant:
        return tenant
    for header in (b"x-tenant-id", b"x-gateway-inference-fairness-id"):
        given = request.headers.get(header, b"").strip()
        if given and not _TENANT(given):
            name = header.decode()
            raise ClientError(400, f"{name} must be 1 to 64 of A-Z a-z 0-9 . _ : @ / + -", name)
        if given:
            return given.decode()
    return ""


def ttft_of(request: Request) -> int:
    """Milliseconds in which it wants its first token (`x-slo-ttft-ms`); 0: it does not say. Raises
    ClientError."""
    given = request.headers.get(b"x-slo-ttft-ms", b"").strip()
    if not given:
        return 0
    if not given.isdigit() or len(given) > 9 or not 1 <= int(given) <= MOST_TTFT_MS:
        error = f"x-slo-ttft-ms must be whole milliseconds from 1 to {MOST_TTFT_MS}"
        raise ClientError(400, error, "x-slo-ttft-ms")
    return int(given)


def may_be_json(request: Request) -> bool:
    """Whether a worker may read the body as JSON; without a type FastAPI does."""
    kind = request.headers.get(b"content-type", b"").lower()
    return not kind.strip() or b"json" in kind


class _RequestedModel(msgspec.Struct):
    model: str = ""


_named = msgspec.json.Decoder(_RequestedModel).decode


def model_of(request: Request) -> str:
    """The model a relayed body names, if it is JSON that names one."""
    try:
        return _named(request.body).model if request.body else ""
    except UNREADABLE:
        return ""
