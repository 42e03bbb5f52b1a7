"""A model's tensors as one piece of memory: where each lies, and its bytes in and out.

The image has the tensors as the files fill them, before kernels arrange them anew. So it does not
depend on what a kernel makes of them; it does depend on the rank, and on the number of ranks.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

ALIGNED = 256
CHUNK_BYTES = 16 << 20
HASH_THREADS = 8


class Place(NamedTuple):
    """A tensor in the image. `tensor`: the model's own."""

    name: str
    at: int
    tensor: torch.Tensor

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


class Unimageable(ValueError):
    """Why the model's tensors have no image."""


class TensorImage:
    """`tensors`: by name. One that occurs twice is one. Raises Unimageable."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.places: list[Place] = []
        seen: set[int] = set()
        at = 0
        for name, tensor in tensors.items():
            if tensor.is_meta:
                raise Unimageable(f"{name} has no memory before it is loaded")
            if id(tensor) in seen or not tensor.numel():
                continue
            seen.add(id(tensor))
            self.places.append(Place(name, at, tensor))
            at += -(-self.places[-1].bytes // ALIGNED) * ALIGNED
        if not self.places:
            raise Unimageable("the model has no tensors")
        self.size = at

    @property
    def table(self) -> list[tuple[str, int, tuple[int, ...], str]]:
        """What says which image it is: name, place, shape and type of each."""
        return [(p.name, p.at, tuple(p.tensor.shape), str(p.tensor.dtype)) for p in self.places]

    def write(self, fd: int) -> None:
        """The tensors' bytes into the memory of `fd`. Raises OSError."""
        for place in self.places:
            flat = place.tensor.detach().cpu().contiguous().reshape(-1)
            _write(fd, place.at, memoryview(flat.view(torch.uint8).numpy()))

    def use(self, fd: int) -> None:
        """The tensors are those of `fd` from now on: on CPUs they lie there, and what an engine writes to
        one is its own (MAP_PRIVATE); others are copied. Raises OSError."""
        flags, access = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        mapped = torch.frombuffer(mmap.mmap(fd, self.size, flags, access), dtype=torch.uint8)
        for place in self.places:
            view = mapped[place.at : place.at + place.bytes].view(place.tensor.dtype)
            shaped = view.view(place.tensor.shape)
            if place.tensor.device.type == "cpu" and place.tensor.is_contiguous():
                place.tensor.data = shaped
            else:
                place.tensor.data.copy_(shaped)


def digest(fd: int, size: int) -> bytes:
    """Of the memory's bytes: a hash of the hashes of its chunks. Raises OSError."""
    with (
        mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped,
        memoryview(mapped) as whole,
    ):
        starts = range(0, size, CHUNK_BYTES)

        def hashed(at: int) -> bytes:
            with whole[at : at + CHUNK_BYTES] as chunk:
                return hashlib.blake2b(chunk, digest_size=32).digest()

        with ThreadPoolExecutor(_threads(len(starts))) as pool:
            parts = list(pool.map(hashed, starts))
    return hashlib.blake2b(b"".join(parts), digest_size=32).digest()


def _threads(chunks: int) -> int:
    return max(min(chunks, HASH_THREADS, len(os.sched_getaffinity(0))), 1)


def _write(fd: int, at: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        at, data = at + written, data[written:]
