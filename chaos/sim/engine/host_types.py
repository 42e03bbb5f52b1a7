"""Properties of a worker's host, by model and hardware class: the engine's settings, the size of
its KV cache, its loading time, and the bandwidth of its links."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from relume.chaos.sim.engine.engine_model import EngineConfig
from relume.chaos.sim.engine.step_cost import FOLDER

TOKEN_ID_BYTES = 4


class HostSpec(Struct, frozen=True, kw_only=True):
    """`reload_s`: from the start of an engine's process until it answers. `link_bytes_s`: bandwidth
    of the host's network each way, for checkpoints and restores together; `local_bytes_s`:
    bandwidth from a daemon of the same machine. `source`: origin of the figures."""

    source: str
    kv_blocks: int
    block_tokens: int
    max_seqs: int
    max_tokens: int
    max_model_len: int
    kv_bytes_per_token: int
    reload_s: float
    link_bytes_s: float
    local_bytes_s: float

    @property
    def block_bytes(self) -> int:
        """A block's bytes in a checkpoint: its token ids, then the layers' KV."""
        return self.block_tokens * (TOKEN_ID_BYTES + self.kv_bytes_per_token)

    def engine(self, prefix_cache: bool = True) -> EngineConfig:
        """The engine's settings."""
        return EngineConfig(
            kv_blocks=self.kv_blocks,
            max_seqs=self.max_seqs,
            max_tokens=self.max_tokens,
            block_tokens=self.block_tokens,
            prefix_cache=prefix_cache,
        )


def spec(model: str, hardware: str) -> HostSpec:
    """The host type of a model on a hardware class. Raises FileNotFoundError."""
    text = (FOLDER / "hosts" / f"{model}_{hardware}.json").read_bytes()
    return msgspec.json.decode(text, type=HostSpec)
