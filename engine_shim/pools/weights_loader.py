"""vLLM's model loader of the load format `relume`: weights outlive the engine in a pool of its host.

The first engine reads the files as always, and leaves the tensors in a pool. Each next one with the
same files, build and share of the tensors maps the pool, checks its digest, and reads no file. Whatever
goes wrong with pools, an engine loads from the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Generator, Iterator
from hashlib import blake2b
from pathlib import Path

import torch
import vllm
from torch import nn
from vllm.config import ModelConfig, get_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.distributed import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from relume.engine_shim.agent.canaries.weights_digest import stamp_of
from relume.engine_shim.pools import tensor_image
from relume.engine_shim.pools.pool_client import PoolClient, PoolsAway
from relume.engine_shim.pools.pool_messages import Busy, Filling, Opened
from relume.engine_shim.pools.read_pace import ReadPace
from relume.engine_shim.pools.tensor_image import TensorImage, Unimageable
from relume.events.wire.reports import Weights

logger = init_logger("vllm.relume.weights_loader")  # others than those of vLLM are not shown

FORMAT = "relume"
WAIT_S = 60.0
"""Maximum time that an engine waits for another one that fills the pool; then it reads the files itself."""
LOOK_S = 0.1
MAX_WHY = 300
_socket = ""
_anew = False
_report: Callable[[Weights], None] | None = None
_load_mb_s = 0
_progress: Callable[[int, int], None] | None = None
_open: list[PoolClient] = []
"""What this process has open; each as long as the process lives."""


def install(
    socket: str,
    anew: bool,
    report: Callable[[Weights], None],
    load_mb_s: int,
    progress: Callable[[int, int], None],
) -> None:
    """Makes vLLM know the load format. `socket`: of the host's pools. `anew`: what they have of this
    engine's weights is dropped, since it may be wrong, and the files are read. `report` gets what each
    load of weights did, `progress` how far the first rank is that reads files (see `ReadPace`)."""
    global _socket, _anew, _report, _load_mb_s, _progress
    _socket, _anew, _report = socket, anew, report
    _load_mb_s, _progress = load_mb_s, progress
    register_model_loader(FORMAT)(PooledModelLoader)


class PooledModelLoader(DefaultModelLoader):
    """See the module."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="auto"))

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """See the module. Raises what vLLM's own loader raises."""
        began = time.perf_counter()
        image: TensorImage | None = None
        pool: _Pool | None = None
        why = ""
        try:
            image = TensorImage(model.state_dict(keep_vars=True))
            pool = _Pool(_socket, self._name(image, model_config), image)
        except (Unimageable, PoolsAway, OSError) as error:
            why = str(error)
        was_read = pool is None or not pool.adopted()
        if was_read:
            super().load_weights(model, model_config)
        if pool is not None and was_read:
            why = pool.fill()
        size = image.size if image is not None else 0
        took_s = time.perf_counter() - began
        if pool is not None and not why:
            _open.append(pool.client)
            how = "read, and left in" if was_read else "found, without reading a file, in"
            logger.info("weights: %d bytes %s pool %s, %.3f s", size, how, pool.name, took_s)
        else:
            logger.error("weights are in no pool: %s", why)
        if _report is not None:
            read_bytes, took_us = size if was_read else 0, round(took_s * 1e6)
            rank = get_tp_group().rank_in_group
            _report(
                Weights(
                    rank=rank, bytes=size, read_bytes=read_bytes, took_us=took_us, why=why[:MAX_WHY]
                )
            )

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Tensors of the files, at the rate that is permitted."""
        size = sum(os.path.getsize(file) for file in self._files(model_config))
        is_first = not (get_tp_group().rank_in_group or get_pp_group().rank_in_group)
        pace = ReadPace(size, _load_mb_s, _progress if is_first else None)
        for name, tensor in super().get_all_weights(model_config, model):
            yield name, tensor
            pace.read(tensor.nbytes)
        pace.done()

    def _files(self, model_config: ModelConfig) -> list[str]:
        _, files, _, _ = self._prepare_weights(
            model_config.model, None, model_config.revision, True, None
        )
        return sorted(files)

    def _name(self, image: TensorImage, model_config: ModelConfig) -> str:
        """Two images of one name have the same bytes: the files, the build and this rank's share decide."""
        files = self._files(model_config)
        stamps = [(os.path.realpath(f), stamp_of(Path(f))) for f in files]
        tp, pp = get_tp_group(), get_pp_group()
        ranks = (tp.rank_in_group, tp.world_size, pp.rank_in_group, pp.world_size)
        parallel = get_current_vllm_config().parallel_config
        experts = (parallel.enable_expert_parallel, parallel.enable_eplb)
        build = (vllm.__version__, torch.__version__)
        more = (model_config.quantization, str(model_config.dtype), type(self).__name__)
        parts = (stamps, build, ranks, experts, more, image.table)
        return f"weights-{blake2b(repr(parts).encode(), digest_size=16).hexdigest()}"


class _Pool:
    """The pool of one image: adopted, or filled, or neither. Raises PoolsAway."""

    def __init__(self, socket: str, name: str, image: TensorImage) -> None:
        self.name = name
        self.client = PoolClient(socket)
        self._image = image
        self._fd = -1
        self._answer: Filling | Opened | Busy
        try:
            self._answer = self._opened()
        except PoolsAway:
            self.client.close()
            raise

    def _opened(self) -> Filling | Opened | Busy:
        until = time.monotonic() + WAIT_S
        if _anew:
            self.client.drop(self.name)
        while True:
            answer, self._fd = self.client.open(self.name, self._image.size)
            if not isinstance(answer, Busy) or time.monotonic() > until:
                return answer
            time.sleep(LOOK_S)

    def adopted(self) -> bool:
        """Whether the model has the pool's tensors now. One that does not have its digest is dropped, and
        this engine is to fill another."""
        if not isinstance(self._answer, Opened):
            return False
        with self._descriptor() as fd:
            if tensor_image.digest(fd, self._image.size) == self._answer.digest:
                self._image.use(fd)
                return True
        logger.error("pool %s does not have its digest: its memory is damaged", self.name)
        with contextlib.suppress(PoolsAway):
            self.client.drop(self.name)
            self._answer, self._fd = self.client.open(self.name, self._image.size)
        return False

    def fill(self) -> str:
        """Leaves the model's tensors in the pool, and has the model use them there; why not, or empty."""
        if not isinstance(self._answer, Filling):
            self.client.close()
            return "another engine fills the pool, and has not finished"
        try:
            with self._descriptor() as fd:
                self._image.write(fd)
                self.client.seal(self.name, tensor_image.digest(fd, self._image.size))
                self._image.use(fd)
        except (PoolsAway, OSError) as error:
            self.client.close()
            return str(error)
        return ""

    @contextlib.contextmanager
    def _descriptor(self) -> Iterator[int]:
        try:
            yield self._fd
        finally:
            os.close(self._fd)
            self._fd = -1
