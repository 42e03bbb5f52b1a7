"""What travels between gateway, scheduler and rank about a request's checkpoint. Data only.

The gateway names the holders in headers of the dispatch:

- `x-relume-checkpoint: <endpoint>[,<endpoint>]`: stream the request's blocks there;
- `x-relume-restore: <endpoint>[,<endpoint>]`: its blocks may be had from there, the first
  named first;
- `x-relume-priority: <n>`: its weight when a holder has to evict.

An endpoint is `unix:<path>` (the state daemon of this host) or `tcp://<host>:<port>`.
"""

from __future__ import annotations

import re

from msgspec import Struct

from relume.engine_shim.generation import MalformedDispatch

MAX_ENDPOINTS = 4
_ENDPOINT = re.compile(r"unix:/[A-Za-z0-9_./-]{1,100}|tcp://[A-Za-z0-9_.:\[\]-]{1,120}:[0-9]{1,5}")


def endpoints(header: str, text: str) -> tuple[str, ...]:
    """The endpoints a header names. Raises MalformedDispatch."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if len(found) > MAX_ENDPOINTS or len(set(found)) < len(found):
        raise MalformedDispatch(header, f"{len(found)} endpoints, or one twice")
    for endpoint in found:
        if not _ENDPOINT.fullmatch(endpoint):
            raise MalformedDispatch(header, f"{endpoint[:80]!r} is no endpoint")
    return found


class Key(Struct, frozen=True):
    """Whose blocks: the gateway's request and attempt, and which of its choices."""

    request: str
    attempt: int
    child: int


class SaveJob(Struct, frozen=True):
    """Blocks `first`.. of the request, full after this step, for one endpoint."""

    endpoint: str
    key: Key
    first: int
    block_ids: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    priority: int
    scope: bytes = b""


class Lender(Struct, frozen=True):
    """Another request whose first blocks are the same prefix: their chains
    (`kv_stream.prefix`)."""

    request: str
    child: int
    chains: tuple[bytes, ...]


class LoadJob(Struct, frozen=True):
    """Blocks `first`.. of the request, to be brought from one endpoint into `block_ids`.
    `engine_id`: the request as this engine calls it."""

    engine_id: str
    endpoint: str
    key: Key
    first: int
    block_ids: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    lender: Lender | None = None


class DropJob(Struct, frozen=True):
    """The blocks at the endpoint are of no more use: the request is over, or (`moved`) runs on
    and has them elsewhere."""

    endpoint: str
    request: str
    attempt: int
    moved: bool = False
