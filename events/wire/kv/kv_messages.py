"""The messages between engines, agents and state daemons, and their limits.

A message is a header (msgpack of one of the structs here) and at most one chunk of raw
bytes. Both are bounded before anything is allocated for them. The state daemon answers
every message with one of its own, which repeats `seq`.

A block travels as its *image*: the token ids it covers (`block_size` uint32
little-endian), then its bytes layer by layer. Digests are over the whole image.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from relume.events.decode_errors import UNREADABLE
from relume.events.wire.kv.fingerprint import Fingerprint
from relume.events.wire.kv.kv_errors import MalformedMessage
from relume.events.wire.kv.token_chain import CHAIN_BYTES

VERSION = 2
MAX_HEADER_BYTES = 256 << 10
MAX_CHUNK_BYTES = 16 << 20
MAX_IMAGE_BYTES = MAX_CHUNK_BYTES
MAX_PIECES = 1024
MAX_NAME = 128
MAX_REQUESTS = 512
MAX_ENVELOPE_BYTES = MAX_CHUNK_BYTES
MAX_INLINE_ENVELOPE = 192 << 10
"""A larger one is a chunk."""
MAX_CHILD = 1 << 16
MAX_INDEX = 1 << 24
DIGEST_BYTES = 16


class Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base: an array headed by its tag."""


class Hello(Message, frozen=True, tag="hello", kw_only=True):
    """First of every connection. `role`: writer, reader, keeper (of envelopes; it has no
    fingerprint) or control (the host's agent).
    `epoch` and `incarnation` fence older writers of the same worker; `nonce` is the client's."""

    version: int
    worker: str
    epoch: int
    incarnation: int
    role: str
    nonce: bytes
    fingerprint: Fingerprint | None = None


class Challenge(Message, frozen=True, tag="challenge"):
    """On plaintext links: the daemon proves that it has the secret and requires the same."""

    nonce: bytes
    mac: bytes


class Proof(Message, frozen=True, tag="proof"):
    """The client's proof."""

    mac: bytes


class Welcome(Message, frozen=True, tag="welcome"):
    """The connection is open. `boot` names this life of the daemon: another one than
    before holds nothing of what was sent. `epoch` is the daemon's own fencing token."""

    boot: str
    epoch: int
    host: str


class RefusalAnswer(Message, frozen=True, tag="refused"):
    """Nothing was done; see `errors.Refusal` for the codes. `seq` 0: the connection."""

    seq: int
    code: str
    detail: str = ""


class Piece(
    Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, kw_only=True
):
    """`length` bytes at `offset` of a block's image of `total` bytes. `digest` of the
    whole image is empty while the writer has not seen all of it (layer by layer). `scope`:
    requests of equal scopes may share equal prefixes (`prefix`); empty: it shares nothing."""

    request: str
    child: int
    rank: int
    index: int
    attempt: int
    offset: int
    length: int
    total: int
    digest: bytes = b""
    priority: int = 1
    scope: bytes = b""


class Put(Message, frozen=True, tag="put"):
    """Pieces whose bytes follow each other in the chunk."""

    seq: int
    pieces: tuple[Piece, ...]


class Position(
    Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, kw_only=True
):
    """`blocks` whole blocks of (request, child, rank) are held without a gap from the
    first on: the checkpointed prefix."""

    request: str
    child: int
    rank: int
    attempt: int
    blocks: int


class Ack(Message, frozen=True, tag="ack"):
    """The positions of the sequences of a `Put`, and which pieces were refused and why."""

    seq: int
    positions: tuple[Position, ...]
    refused: tuple[tuple[int, str], ...] = ()


class Ask(Message, frozen=True, tag="ask"):
    """What is held of `requests`? Keeps them from expiring."""

    seq: int
    requests: tuple[str, ...]


class Held(Message, frozen=True, tag="held"):
    """Answer to `Ask`; a request that is not held is not listed. `usable`, one per position:
    `same`, `convert` or empty, as the caller's fingerprint fits."""

    seq: int
    positions: tuple[Position, ...]
    usable: tuple[str, ...] = ()


class Match(Message, frozen=True, tag="match"):
    """Which sequence has the longest prefix with these chains (`prefix`), CHAIN_BYTES per block?"""

    seq: int
    chains: bytes


class MatchAnswer(Message, frozen=True, tag="matched"):
    """Answer to `Match`: `blocks` of (request, child), to be had by `Get` with their chain."""

    seq: int
    request: str
    child: int
    blocks: int


class Get(Message, frozen=True, tag="get", kw_only=True):
    """`count` blocks of (request, child, rank) from `first` on. `chain`, for another request:
    only if it is block `first`'s."""

    seq: int
    request: str
    child: int
    rank: int
    first: int
    count: int
    chain: bytes = b""


class BlockAt(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One block's image: in the chunk at `offset`, or in the daemon's shared memory."""

    index: int
    offset: int
    length: int
    digest: bytes


class Blocks(Message, frozen=True, tag="blocks"):
    """Answer to `Get`: a run of blocks from `first` on, perhaps fewer than requested.
    `shared`: offsets are into the daemon's arena, pinned until `Release`."""

    seq: int
    blocks: tuple[BlockAt, ...]
    shared: bool


class Release(Message, frozen=True, tag="release"):
    """The blocks of `Get` number `get` have been copied out of the shared memory."""

    seq: int
    get: int


class Corrupt(Message, frozen=True, tag="corrupt", kw_only=True):
    """A reader of shared memory found the block damaged."""

    seq: int
    request: str
    child: int
    rank: int
    index: int


class Drop(Message, frozen=True, tag="drop"):
    """The requests ended (attempts above `attempt` are left alone). `moved`: they run on, but
    others hold them now, so more of them may come again."""

    seq: int
    requests: tuple[str, ...]
    attempt: int
    moved: bool = False


class Void(Message, frozen=True, tag="void"):
    """What these attempts (request, number) and earlier ones wrote is wrong: none of it is handed
    out, and they may write no more. What later attempts wrote stays. From the host's agent only."""

    seq: int
    attempts: tuple[tuple[str, int], ...]


class Done(Message, frozen=True, tag="done"):
    """Answer to `Release`, `Corrupt`, `Drop` and `Void`: what was freed."""

    seq: int
    blocks: int = 0
    bytes: int = 0


class Keep(Message, frozen=True, tag="keep"):
    """The request as its client sent it, at most MAX_INLINE_ENVELOPE, to be stored until it is
    dropped or expires. Answered with `Done`."""

    seq: int
    request: str
    attempt: int
    envelope: bytes


class KeepChunk(Message, frozen=True, tag="keep_chunk"):
    """The same, as the chunk, at most MAX_ENVELOPE_BYTES with this digest."""

    seq: int
    request: str
    attempt: int
    digest: bytes


class Recall(Message, frozen=True, tag="recall"):
    """The envelope of a request, please. Answered with `Envelope`."""

    seq: int
    request: str


class Envelope(Message, frozen=True, tag="envelope"):
    """Answer to `Recall`: in the chunk where `envelope` is empty."""

    seq: int
    attempt: int
    envelope: bytes


class Changes(Message, frozen=True, tag="changes"):
    """What changed since `cursor` (0: everything held)? For the host's agent."""

    seq: int
    cursor: int
    limit: int = MAX_REQUESTS


class Change(
    Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, kw_only=True
):
    """A sequence's new position, or its end: `reason` is empty, or dropped, expired,
    evicted. `worker`, which has `ranks`, wrote it; `bytes` are held of it now."""

    request: str
    child: int
    rank: int
    attempt: int
    blocks: int
    tokens: int
    bytes: int
    worker: str
    reason: str = ""
    ranks: int = 1


class ChangesAnswer(Message, frozen=True, tag="changed", kw_only=True):
    """Answer to `Changes`; continue from `cursor`. `boot`: a cursor of another boot is invalid."""

    seq: int
    cursor: int
    boot: str
    changes: tuple[Change, ...]
    more: bool = False


class StatsAsk(Message, frozen=True, tag="stats_ask"):
    """How full is it?"""

    seq: int


class Stats(Message, frozen=True, tag="stats"):
    """Statistics by name; see `state_daemon.store.BlockStore.stats`."""

    seq: int
    boot: str
    figures: dict[str, int]
    notes: tuple[str, ...] = ()


AnyMessage = (
    Hello | Challenge | Proof | Welcome | RefusalAnswer | Put | Ack | Ask | Held | Match
    | MatchAnswer | Get | Blocks | Release | Corrupt | Drop | Void | Done | Keep | KeepChunk
    | Recall | Envelope | Changes | ChangesAnswer | StatsAsk | Stats
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)

encode = _encoder.encode


def decode(header: bytes | memoryview) -> Message:
    """The message in `header`. Raises MalformedMessage."""
    if len(header) > MAX_HEADER_BYTES:
        raise MalformedMessage(f"header of {len(header)} bytes")
    try:
        message: Message = _decoder.decode(header)
    except UNREADABLE as error:
        raise MalformedMessage(str(error)) from None
    return message


def name_of(message: Message) -> str:
    """Its name in errors: the tag, as `KeepChunk` of `keep_chunk`."""
    return str(message.__struct_config__.tag).title().replace("_", "")


def check_piece(piece: Piece) -> None:
    """Raises MalformedMessage for numbers and names out of their bounds."""
    sane = (
        0 < len(piece.request) <= MAX_NAME
        and 0 <= piece.child < MAX_CHILD
        and 0 <= piece.rank < MAX_CHILD
        and 0 <= piece.index < MAX_INDEX
        and 0 < piece.total <= MAX_IMAGE_BYTES
        and 0 < piece.length <= piece.total
        and 0 <= piece.offset <= piece.total - piece.length
        and len(piece.digest) in (0, DIGEST_BYTES)
        and piece.attempt >= 0
        and 0 <= piece.priority <= 1_000_000
        and len(piece.scope) in (0, CHAIN_BYTES)
    )
    if not sane:
        raise MalformedMessage(f"piece of block {piece.index} is out of bounds")


def check_put(put: Put, chunk_bytes: int) -> None:
    """Raises MalformedMessage when the pieces are not exactly the chunk."""
    if not 0 < len(put.pieces) <= MAX_PIECES or chunk_bytes > MAX_CHUNK_BYTES:
        raise MalformedMessage(f"{len(put.pieces)} pieces, {chunk_bytes} bytes")
    for piece in put.pieces:
        check_piece(piece)
    if sum(piece.length for piece in put.pieces) != chunk_bytes:
        raise MalformedMessage("the pieces do not add up to the chunk")
