"""A rank's paged KV cache as rows: one block's bytes in the order in which it travels.

vLLM's model runner hands over a tensor a layer. Which of its dimensions counts blocks, whether
tokens or heads come first within a block, whether a block of a layer is one piece of memory or
several (keys apart from values, heads apart), whether all layers of a block lie together: the
attention backend decides that, and shape and strides show it. A row is the block layer by layer,
and within a layer in the order of its addresses. So layouts that differ in where blocks and layers
lie give the same rows, and those with another order inside a block give others: `interior`
distinguishes these.

Layers whose blocks lie at even distances are one *region*: one strided view
`[block][layer]...[run]`, of which many blocks are read or written by one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import gcd, prod
from typing import NamedTuple

import torch

from relume.events.wire.kv.kv_errors import Unshapeable

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
Interior = tuple[tuple[int, int], ...]
APART = (0, 0)
"""In an `Interior`: keys come before values, and blocks are counted after that."""


class _Dim(NamedTuple):
    """`stride`: bytes in memory. `place`: elements, in the row-major order of the shape."""

    size: int
    stride: int
    place: int


class _Layer(NamedTuple):
    """A layer's bytes: where block 0 begins, how far the next one is, and the inside in the
    order of its addresses; the last `run` bytes of it are one piece."""

    storage: torch.UntypedStorage
    at: int
    step: int
    outer: tuple[tuple[int, int], ...]
    run: int
    interior: Interior

    @property
    def bytes(self) -> int:
        return prod(size for size, _ in self.outer) * self.run


class Region:
    """Consecutive layers that lie evenly. `width`: bytes of them in a block."""

    def __init__(self, layers: Sequence[_Layer], blocks: int, device: torch.device) -> None:
        first = layers[0]
        apart = layers[1].at - first.at if len(layers) > 1 else first.bytes
        strides = (first.step, apart, *(stride for _, stride in first.outer))
        unit = max(u for u in _UNITS if not gcd(first.at, first.run, *strides) % u)
        self.dtype = _UNITS[unit]
        self.width = len(layers) * first.bytes
        self._shape = (len(layers), *(size for size, _ in first.outer), first.run // unit)
        size, stride = (blocks, *self._shape), (*(s // unit for s in strides), 1)
        empty = torch.empty(0, dtype=self.dtype, device=device)
        self._blocks = empty.set_(first.storage, first.at // unit, size, stride)

    def read(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Blocks `ids` into `rows`, `[len(ids)][width]` bytes."""
        torch.index_select(self._blocks, 0, ids, out=self._shaped(rows))

    def write(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """The reverse."""
        shaped = self._shaped(rows)
        if self._blocks.device.type != "cpu":
            self._blocks.index_copy_(0, ids, shaped)
            return
        # There index_copy_ copies element by element, at half the speed.
        for at, first, count in _runs(ids.tolist()):
            self._blocks[first : first + count].copy_(shaped[at : at + count])

    def _shaped(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(self.dtype).view(len(rows), *self._shape)


class BlockRows:
    """All layers of a rank. `interior`: what the order of bytes within a block's layer is."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], blocks: int) -> None:
        """Raises Unshapeable if a layer's blocks cannot be recognised, or layers differ."""
        layers: list[_Layer] = []
        seen: set[int] = set()
        devices: set[torch.device] = set()
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise Unshapeable(f"{name} is no tensor of blocks but {type(tensor).__name__}")
            if tensor.data_ptr() in seen:
                continue  # shares another layer's blocks
            seen.add(tensor.data_ptr())
            layers.append(_layer(name, tensor, blocks))
            devices.add(tensor.device)
            self.dtype = str(tensor.dtype).removeprefix("torch.")
        if not layers:
            raise Unshapeable("no KV cache")
        if len({(layer.bytes, layer.interior) for layer in layers}) > 1:
            raise Unshapeable("layers whose blocks differ in size or inner order")
        if len(devices) > 1:
            raise Unshapeable(f"layers on several devices: {sorted(map(str, devices))}")
        self.device = devices.pop()
        self.layers = len(layers)
        self.piece_bytes = layers[0].bytes
        self.interior = layers[0].interior
        self.regions = [Region(run, blocks, self.device) for run in _even(layers)]

    @property
    def row_bytes(self) -> int:
        return self.layers * self.piece_bytes


def interior(dims: Sequence[tuple[int, int]]) -> Interior:
    """Dimensions within a block in the order of their addresses, as (size, distance of two
    neighbours in the row-major order of the shape), without those that change nothing: what is
    stored in that very order is one dimension."""
    merged: list[tuple[int, int]] = []
    for size, place in dims:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * place:
            size *= merged.pop()[0]
        merged.append((size, place))
    return tuple(merged)


def _layer(name: str, tensor: torch.Tensor, blocks: int) -> _Layer:
    shape = tuple(tensor.shape)
    counted = next((axis for axis in (0, 1) if shape[axis : axis + 1] == (blocks,)), -1)
    inner = list(reversed(range(tensor.dim())))  # axes from the innermost on
    if counted >= 0:
        inner.remove(counted)
    elif shape and shape[0] and not shape[0] % blocks and len(shape) > 2:
        # The backend's blocks are parts of ours: it divides the tokens, the last axis but one.
        tensor, counted = tensor.unflatten(0, (blocks, -1)), 0
        inner = [tensor.dim() - 1, tensor.dim() - 2, 1, *range(tensor.dim() - 3, 1, -1)]
    else:
        raise Unshapeable(f"{name}: nothing in shape {shape} counts {blocks} blocks")
    width, place, dims = tensor.element_size(), 1, []
    for axis in inner:
        dims.append(_Dim(tensor.shape[axis], tensor.stride(axis) * width, place))
        place *= tensor.shape[axis]
    dims = sorted((d for d in dims if d.size > 1), key=lambda d: (-d.stride, -d.place))
    step, run = tensor.stride(counted) * width, width
    outer = [(d.size, d.stride) for d in dims]
    while outer and outer[-1][1] == run:
        run *= outer.pop()[0]
    if step < run or any(stride < run for _, stride in outer):
        raise Unshapeable(f"{name}: blocks overlap (shape {shape}, strides {tensor.stride()})")
    order = interior([(d.size, d.place) for d in dims])
    if counted:
        order = (APART, *order)
    at = tensor.storage_offset() * width
    return _Layer(tensor.untyped_storage(), at, step, tuple(outer), run, order)


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Ids that follow each other, as (where in `ids`, first id, how many)."""
    for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0]):
        (at, first), *more = run
        yield at, first, 1 + len(more)


def _even(layers: Sequence[_Layer]) -> list[list[_Layer]]:
    """Consecutive layers that one strided view shows, longest first come."""
    found: list[list[_Layer]] = []
    for layer in layers:
        run = found[-1] if found else []
        if run and _continues(run, layer):
            run.append(layer)
        else:
            found.append([layer])
    return found


def _continues(run: list[_Layer], layer: _Layer) -> bool:
    last = run[-1]
    if layer.storage.data_ptr() != last.storage.data_ptr():
        return False
    if (layer.step, layer.outer, layer.run) != (last.step, last.outer, last.run):
        return False
    apart = layer.at - last.at
    return apart > 0 and (len(run) == 1 or apart == last.at - run[-2].at)
