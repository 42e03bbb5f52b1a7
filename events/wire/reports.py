"""What an engine process reports to its agent over the report socket.

A frame is a uint32 little-endian length and that many bytes of msgpack. A msgpack
array is an encoded event of `relume.events.vocabulary` and goes into a segment as it is; a
map is about the process itself: `{"hello": ...}` first, `{"weights": ...}` when a rank has loaded
them by way of pools, `{"layout": ...}` when it takes part in checkpoints, `{"ready": ...}` once the
HTTP server listens. Nothing travels the other way; EOF there ends the engine.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec

from relume.events.decode_errors import UNREADABLE
from relume.events.vocabulary import EngineStep
from relume.events.vocabulary.enums import EngineKind
from relume.events.wire.errors import ReportError

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 16 << 20
STATED_AT_ONCE = 512
"""Changes after which a record ends, where an engine states all requests that it has."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
"""What becomes a field of a record: readers of the log refuse larger integers."""


class Hello(msgspec.Struct, frozen=True):
    """First frame of every connection. `role`: core, api or worker (a rank)."""

    pid: int
    role: str
    incarnation: int


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP server listens on `port`. `exact` maps a way to continue to its result: true, or the
    reason it is not exact. `hardware` it computes on; `step_tokens`: the most tokens of one step.
    `kind`: empty for an engine with our plugin, `plain` for a server without it. `max_seqs`: the most
    requests that run at once; 0: unknown."""

    port: Count
    max_model_len: Count
    block_size: Count
    kv_blocks: Count
    model: str
    vllm: str
    exact: dict[str, bool | str]
    hardware: str = ""
    step_tokens: Count = 0
    kind: EngineKind = EngineKind.VLLM
    max_seqs: Count = 0


class Layout(msgspec.Struct, frozen=True):
    """What KV blocks the engine writes and can use: their fingerprint's family in hex, and
    a block's bytes in a checkpoint, all ranks together."""

    family: str
    block_bytes: Count


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's weights are loaded: `bytes`, of which `read_bytes` came from files and the rest from a
    pool. `why`: why they are in no pool; empty: they are."""

    rank: Count
    bytes: Count
    read_bytes: Count
    took_us: Count
    why: str = ""


class Control(msgspec.Struct, frozen=True, omit_defaults=True):
    """A map frame; exactly one member is set."""

    hello: Hello | None = None
    ready: Ready | None = None
    layout: Layout | None = None
    weights: Weights | None = None


_encoder = msgspec.msgpack.Encoder()
_control = msgspec.msgpack.Decoder(Control)


def frame(payload: bytes) -> bytes:
    """`payload` (one msgpack value) with its length in front."""
    return HEADER.pack(len(payload)) + payload


def with_lost(step: EngineStep, lost: int) -> EngineStep:
    """`step`, which also counts `lost` records that the agent never got."""
    return msgspec.structs.replace(step, lost=lost) if lost else step


def hello_frame(hello: Hello) -> bytes:
    return frame(_encoder.encode(Control(hello=hello)))


def ready_frame(ready: Ready) -> bytes:
    return frame(_encoder.encode(Control(ready=ready)))


def layout_frame(layout: Layout) -> bytes:
    return frame(_encoder.encode(Control(layout=layout)))


def weights_frame(weights: Weights) -> bytes:
    return frame(_encoder.encode(Control(weights=weights)))


def parse(payload: bytes) -> Hello | Ready | Layout | Weights | bytes:
    """What one frame holds: a control message, or the bytes of an encoded event.

    Raises ReportError for a map that is none of these.
    """
    if not _is_map(payload):
        return payload
    try:
        control = _control.decode(payload)
    except UNREADABLE as error:
        raise ReportError(f"control frame does not decode: {error}") from None
    message = control.hello or control.ready or control.layout or control.weights
    if message is None:
        raise ReportError("control frame without hello, ready, layout or weights")
    return message


def _is_map(payload: bytes) -> bool:
    """fixmap, map16 and map32 of msgpack."""
    return bool(payload) and (payload[0] & 0xF0 == 0x80 or payload[0] in (0xDE, 0xDF))


class ReportReader:
    """Cuts a byte stream into payloads. Not thread-safe."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def incomplete_bytes(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads completed by `data`. Raises ReportError for an absurd length, once what
        came before it has been returned."""
        buffer = self._buffer
        buffer += data
        payloads: list[bytes] = []
        at = 0
        while len(buffer) - at >= HEADER.size:
            (length,) = HEADER.unpack_from(buffer, at)
            if length > MAX_FRAME_BYTES:
                if payloads:
                    break
                raise ReportError(f"report frame of {length} bytes")
            end = at + HEADER.size + length
            if len(buffer) < end:
                break
            payloads.append(bytes(buffer[at + HEADER.size : end]))
            at = end
        del buffer[:at]
        return payloads
