"""What travels between gateway, scheduler and rank about a request's checkpoint. Data only.

The gateway names the holders in headers of the dispatch: `CHECKPOINT` (stream the request's
blocks there), `RESTORE` (its blocks may be had from there, the first named first) and `PRIORITY`
(its weight when a holder has to evict); see `relume.events.wire.headers`.
"""

from __future__ import annotations

from msgspec import Struct


class Key(Struct, frozen=True):
    """The owner of blocks: the gateway's request and attempt, and which of its choices."""

    request: str
    attempt: int
    child: int


class SaveJob(Struct, frozen=True, kw_only=True):
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


class LoadJob(Struct, frozen=True, kw_only=True):
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
    """The blocks at the endpoint are no longer useful: the request is over, or (`moved`) has them
    elsewhere."""

    endpoint: str
    request: str
    attempt: int
    moved: bool = False
