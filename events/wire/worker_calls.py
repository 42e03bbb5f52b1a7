"""Calls about one running attempt that a gateway or a leader makes to its worker.

Each is a POST of JSON. The worker answers 200, or an error in OpenAI's shape: 404 if the attempt
is not there, 403 for another claim, 409 for another incarnation, 400 for a body that does not
parse.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from relume.events.decode_errors import UNREADABLE
from relume.events.wire.errors import CallError, HeaderError
from relume.events.wire.headers import CHECKPOINT, parse_endpoints, parse_request

STATE_PATH = "/relume/state"
"""GET: what the engine does now, as JSON."""
PROBE_PATH = "/relume/probe"
"""GET: answered, with nothing, when the engine's loop has taken a turn; it does between two steps."""
CHECKPOINT_PATH = "/relume/checkpoint"
ATTACH_PATH = "/relume/attach"
RELEASE_PATH = "/relume/release"
ORIGIN_PATH = "/relume/origin"
"""POST, by a replica: an `OriginRequest`, answered with an `OriginAnswered`."""
HANDOVER_PATH = "/relume/handover"
CANARY_PATH = "/relume/canary"
"""POST, by the worker's agent: a `CanaryAsked`, answered with a `CanaryAnswered`."""

CROSS_CHECK_PATH = "/relume/cross-check"
"""POST, by a replica: a `CrossCheckAsked`, answered with a `CrossCheckAnswered`."""


class Retarget(msgspec.Struct, frozen=True):
    """Body of `CHECKPOINT_PATH`: from now on these endpoints hold the attempt's KV blocks."""

    request: str
    attempt: int
    incarnation: int
    holders: tuple[str, ...] = ()


class Attach(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `ATTACH_PATH` and `RELEASE_PATH`: a buffered stream, and the first token that is
    wanted of it. `also`: request, attempt and claim of others to be released. `log`: the log of the
    replica, to which the stream belongs from now on."""

    request: str
    attempt: int
    incarnation: int
    claim: str
    tokens: int = 0
    also: tuple[tuple[str, int, str], ...] = ()
    log: str = ""


class OriginRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `ORIGIN_PATH`: a stream whose client returned, and which the log does not name. `holders`:
    endpoints that may have its envelope."""

    request: str
    incarnation: int
    holders: tuple[str, ...] = ()


class OriginAnswered(msgspec.Struct, frozen=True):
    """`origin`: where the stream began (`relume.events.wire.stream_origin`), as text. `log`: the log that it
    belongs to; another one than it began in, if a replica took it over before. `attempt`: the one that is
    buffered here; 0: holders have its envelope alone."""

    origin: str
    log: str
    attempt: int = 0


class Handover(msgspec.Struct, frozen=True):
    """Body of `HANDOVER_PATH`: the worker gives the attempt up because it continues elsewhere.
    `unbegun`: only if it has not generated a token, since the request may not continue after one."""

    request: str
    attempt: int
    incarnation: int
    unbegun: bool = False


class CanaryRequest(msgspec.Struct, frozen=True):
    """Body of `CANARY_PATH`: the number of a canary in the prompt set `prompts`."""

    canary: int
    prompts: int
    incarnation: int


class CanaryAnswered(msgspec.Struct, frozen=True, kw_only=True):
    """The greedy tokens of a canary, and at each position the largest log probabilities, largest
    first. `alone`: nothing else ran or waited in the engine before or after, and nothing came
    meanwhile. `wait_us`: for how much of its time the engine waited for a CPU."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    took_us: int = 0
    alone: bool = False
    wait_us: int = 0


class CrossCheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `CROSS_CHECK_PATH`: a finished request, as its client sent it to `path`. The worker
    answers it again, without its prefix cache and without a word in the log."""

    request: str
    incarnation: int
    path: str
    body: str


class CrossCheckAnswered(msgspec.Struct, frozen=True, kw_only=True):
    """The token ids, or why there are none."""

    tokens: tuple[int, ...] = ()
    took_us: int = 0
    error: str = ""


Call = TypeVar("Call", Retarget, Attach, OriginRequest, Handover, CrossCheckRequest)

encode = msgspec.json.encode


def decode(body: bytes, kind: type[Call]) -> Call:
    """The call in `body`, with its request id and endpoints checked. Raises CallError."""
    try:
        call = msgspec.json.decode(body, type=kind)
        parse_request(call.request)
        if isinstance(call, Retarget | OriginRequest):
            parse_endpoints(CHECKPOINT, ",".join(call.holders))
    except (HeaderError, *UNREADABLE) as error:
        raise CallError(str(error)) from None
    return call
