"""Flips a bit in the weights of a running engine, in its memory, as failing hardware does.

A small tensor is read from the model's file and searched for in the process's writable memory. All
copies of it get the bit, because the engine may have some that it does not use. The bit is one of a
mantissa: with the default one a weight differs by a few percent, so greedy tokens often stay, and
logits do not.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

TENSOR = "self_attn.q_norm.weight"
"""Ending of the name of the tensor. Normalisations are in no packed form in any engine."""
CHUNK_BYTES = 16 << 20


def flip(pid: int, model: str | Path, element: int = 0, bit: int = 18) -> int:
    """Flip that bit of that element (of a mantissa: 0 the lowest, 22 the highest) in the engine
    `pid`, which serves `model` in float32; returns the number of copies that were changed. Raises
    OSError."""
    wanted = tensor(model)
    found = list(_find(pid, wanted))
    byte, shift = divmod(bit, 8)
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for first in found:
            at = first + 4 * element + byte
            memory.seek(at)
            (old,) = memory.read(1)
            memory.seek(at)
            memory.write(bytes((old ^ 1 << shift,)))
    return len(found)


def tensor(model: str | Path) -> bytes:
    """The first tensor of that name in the model's files. Raises LookupError."""
    for path in sorted(Path(model).glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            for name in sorted(header):
                if name.endswith(TENSOR) and header[name]["dtype"] == "F32":
                    first, last = header[name]["data_offsets"]
                    file.seek(8 + length + first)
                    return file.read(last - first)
    raise LookupError(f"{model} has no tensor {TENSOR} in float32")


def _find(pid: int, wanted: bytes) -> Iterator[int]:
    """Addresses of `wanted` in writable memory."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for first, last in _writable(pid):
            for begin in range(first, last, CHUNK_BYTES):
                try:
                    memory.seek(begin)
                    data = memory.read(min(CHUNK_BYTES + len(wanted), last - begin))
                except (OSError, ValueError, OverflowError):
                    break  # not mapped any more, or a device's
                at = data.find(wanted)
                while 0 <= at < CHUNK_BYTES:
                    yield begin + at
                    at = data.find(wanted, at + len(wanted))


def _writable(pid: int) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split()
        if fields[1].startswith("rw") and not (len(fields) > 5 and fields[5].startswith("/dev/")):
            first, last = (int(part, 16) for part in fields[0].split("-"))
            yield first, last
