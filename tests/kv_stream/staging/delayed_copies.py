"""A staged cache whose copies a test can delay or let fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from relume.engine_shim.checkpoints.staging.copies import Event, HostCopies, Way
from relume.engine_shim.checkpoints.staging.cuda_copies import CudaCopies
from relume.engine_shim.checkpoints.staging.staged_cache import StagedCache
from tests.kv_stream import layouts
from tests.kv_stream.layouts import BLOCKS, image

LAYOUT = "LBNHC"
ROW = len(image(LAYOUT, 0))
WAIT_S = 30.0
SLOW_CYCLES = 50_000_000


class Held:
    """Work on the ways in `shut` waits, on the host until they are opened (`open`), on a
    device for a while. `overtaken`: nobody waits for side streams, as if `hold` were not."""

    def __init__(self, *shut: Way, overtaken: bool = False) -> None:
        self.shut = shut
        self.overtaken = overtaken
        self.opened = threading.Event()
        self.started: list[Way] = []
        self.fails: RuntimeError | None = None
        self.step: Callable[[], None] | None = None
        self.under_way: list[UnderWay] = []

    def late(self, way: Way, work: Callable[[], None], device: str) -> Callable[[], None]:
        """`work`, started: as this has it."""
        if self.fails is not None:
            raise self.fails
        self.started.append(way)

        def held() -> None:
            self.delay(way, device)
            work()

        return held

    def computes(self, device: str, work: Callable[[], None]) -> None:
        """The engine's step does `work`, a while from now."""
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(SLOW_CYCLES)
            work()
        else:
            self.step = lambda: (time.sleep(0.1), work())[1]

    def wait(self, device: str) -> None:
        """Until the step is over."""
        if device == "cuda":
            torch.cuda.synchronize()
        for step in self.under_way:
            step.synchronize()

    def open(self) -> None:
        self.opened.set()

    def delay(self, way: Way, device: str) -> None:
        if way not in self.shut:
            return
        if device == "cuda":
            torch.cuda._sleep(SLOW_CYCLES)
        elif not self.opened.wait(WAIT_S):
            raise AssertionError("nobody opened")

    def copies_for(self, device: torch.device) -> Any:
        return HeldCuda(self, device) if device.type == "cuda" else HeldHost(self)


class UnderWay:
    """A step that the engine's stream still computes."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work)
        self._thread.start()

    def synchronize(self) -> None:
        self._thread.join(WAIT_S)


class HeldHost(HostCopies):
    """As a device has it: all side streams run beside the engine, and memory beside the cache is
    not the staging memory."""

    def __init__(self, held: Held) -> None:
        super().__init__(at_once=())
        self.held = held

    def beside(self, staging: torch.Tensor) -> torch.Tensor:
        return torch.full_like(staging, 0x55)

    def start(self, way: Way, work: Callable[[], None], after: Event | None = None) -> Event:
        return super().start(way, self.held.late(way, work, "cpu"), after)

    def computed(self) -> Event:
        if self.held.step is None:
            return super().computed()
        self.held.under_way.append(UnderWay(self.held.step))
        return self.held.under_way[-1]

    def hold(self, event: Event) -> None:
        if not self.held.overtaken:
            if Way.READ in self.held.shut:
                self.held.open()
            super().hold(event)


class HeldCuda(CudaCopies):
    def __init__(self, held: Held, device: torch.device) -> None:
        super().__init__(device)
        self.held = held

    def start(self, way: Way, work: Callable[[], None], after: Event | None = None) -> Event:
        return super().start(way, self.held.late(way, work, "cuda"), after)

    def hold(self, event: Event) -> None:
        if not self.held.overtaken:
            super().hold(event)


def staged(
    device: str, held: Held, rows: int = 4, layout: str = LAYOUT
) -> tuple[StagedCache, dict[str, torch.Tensor]]:
    """Buffers of so many rows."""
    tensors = layouts.cache(layout, device)
    return StagedCache(tensors, BLOCKS, held.copies_for, rows * ROW), tensors


def show(tensors: dict[str, torch.Tensor], layout: str = LAYOUT) -> list[bytes]:
    """All blocks of the cache as they are now."""
    copy = {name: tensor.cpu() for name, tensor in tensors.items()}
    cache = StagedCache(copy, BLOCKS, Held().copies_for, BLOCKS * ROW)
    buffer = cache.take()
    assert buffer is not None
    for block in range(BLOCKS):
        buffer.place(block)
    cache.begin([buffer])
    buffer.wait()
    found = [b"".join(map(bytes, buffer.pieces(row))) for row in range(BLOCKS)]
    cache.close()
    return found


def free(cache: StagedCache) -> int:
    return cache._free.qsize()
