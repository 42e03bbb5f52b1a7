"""`copies.Copies` for CUDA devices (and ROCm's, which torch calls the same)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from relume.engine_shim.checkpoints.staging.copies import Event, Way


class CudaCopies:
    """Pinned staging memory; side streams, of the lowest priority where the engine's does not
    wait for them."""

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError."""
        self._device = device
        with torch.cuda.device(device):
            lowest, _ = torch.cuda.Stream.priority_range()
        self._streams = {
            way: torch.cuda.Stream(device, priority=0 if way is Way.READ else lowest) for way in Way
        }

    def staging(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((rows, width), dtype=dtype, pin_memory=True)

    def beside(self, staging: torch.Tensor) -> torch.Tensor:
        return torch.empty(staging.shape, dtype=staging.dtype, device=self._device)

    def computed(self) -> Event:
        return self._recorded(torch.cuda.current_stream(self._device))

    def start(self, way: Way, work: Callable[[], None], after: Event | None = None) -> Event:
        stream = self._streams[way]
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            work()
            return self._recorded(stream)

    def _recorded(self, stream: torch.cuda.Stream) -> Event:
        event = torch.cuda.Event(blocking=True)  # the waiting thread sleeps
        event.record(stream)
        return event

    def hold(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
