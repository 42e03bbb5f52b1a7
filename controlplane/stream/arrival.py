"""A request as it arrives, the target of an attempt, and a rejection: the data that gateway,
scheduler and stream machine exchange."""

from __future__ import annotations

from msgspec import Struct

from relume.events.vocabulary import RequestArrived
from relume.events.vocabulary.enums import Guarantee, Tier


class Arrival(Struct, frozen=True, kw_only=True):
    """What the gateway read from a request before accepting it.

    `verdict` is the resume guarantee; `reason` why it is not better. `needs` names the features
    that engines must pass in their self-test for it, `fallback` is the guarantee without them.
    `prompt_tokens` is estimated from bytes unless `estimated` is False. `trace`: its W3C
    traceparent, if it came with one. `protected`: its route is one on which engines keep
    checkpoints. `priority`: the weight of its checkpoint when a holder must evict. `resumable`:
    digest of the resume token with which its client may continue after a lost connection,
    `grace_ticks` after its gateway's death; empty: it may not. `prefix`: marks of its prompt
    (`relume.events.wire.prefix`), empty if it was not tokenised. `session`: digest of its client's
    session id. `tier`: how soon it wants its first token. `countable`: its prompt is text or token
    ids. `share`: the tenant in whose share it waits. `ttft_ms`: deadline of its first token; 0:
    none. `may_keep`: its prompt may be kept after its end, until another engine has answered it too.
    `output_limit`: what its `max_tokens` was lowered to, because capacity is short; 0: it was not.
    `log`: id of the log in which it may be resumed; empty: unknown, or it may not.
    """

    request: str
    model: str
    route: str
    stream: bool
    prompt_tokens: int
    max_tokens: int
    verdict: Guarantee
    reason: str = ""
    estimated: bool = True
    tenant: str = ""
    client_id: str = ""
    trace: str = ""
    protected: bool = True
    needs: tuple[str, ...] = ()
    fallback: Guarantee = Guarantee.NONE
    priority: int = 1
    resumable: str = ""
    grace_ticks: int = 0
    prefix: bytes = b""
    session: str = ""
    tier: Tier = Tier.NONE
    countable: bool = False
    share: str = ""
    ttft_ms: int = 0
    may_keep: bool = False
    output_limit: int = 0
    log: str = ""


def arrived_event(arrival: Arrival) -> RequestArrived:
    """What the log has of it."""
    return RequestArrived(
        request=arrival.request,
        model=arrival.model,
        route=arrival.route,
        stream=arrival.stream,
        prompt_tokens=arrival.prompt_tokens,
        max_tokens=arrival.max_tokens,
        verdict=arrival.verdict,
        reason=arrival.reason,
        estimated=arrival.estimated,
        tenant=arrival.tenant,
        client_id=arrival.client_id,
        trace=arrival.trace,
        resumable=arrival.resumable,
        grace_ticks=arrival.grace_ticks,
        output_limit=arrival.output_limit,
    )


def arrival_of(event: RequestArrived, log: str) -> Arrival:
    """As a replica takes it over that has only what a log had of it."""
    fields = {name: getattr(event, name) for name in RequestArrived.__struct_fields__}
    return Arrival(**fields, log=log)


class Assignment(Struct, frozen=True, kw_only=True):
    """Where one attempt goes. `mode`: new, continue, replay; attach: where one runs already.
    `dispatch` is the
    value of the header `DISPATCH`: the encoded decision in base64url. `checkpoint`
    and `restore`: endpoints of state daemons that are to hold its blocks, or may have them;
    `priority` is its checkpoint's weight. `alone`: nothing else ran on the worker, and no other
    request failed there lately. `doubted`: some tokens that its client has come from a worker that
    computes wrong results."""

    request: str
    attempt: int
    worker: str
    incarnation: int
    host: str
    port: int
    mode: str
    dispatch: bytes
    checkpoint: tuple[str, ...] = ()
    restore: tuple[str, ...] = ()
    priority: int = 1
    alone: bool = False
    doubted: bool = False


class Rejected(Struct, frozen=True):
    """The request cannot continue; `status` and `message` are for the client, and, if known, when
    it may retry and the error's code."""

    status: int
    message: str
    retry_after_s: int = 0
    code: str = ""
