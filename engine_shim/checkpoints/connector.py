"""vLLM's KV connector: checkpoints out in the background, and back after a failure.

Given to vLLM as `kv_transfer_config = {kv_connector: "RelumeConnector",
kv_connector_module_path: "relume.engine_shim.checkpoints.connector", kv_role: "kv_both",
kv_load_failure_policy: "recompute", kv_connector_extra_config: {...}}`, alone or inside
`MultiConnector`. A leaf: it turns vLLM's calls into those of `block_plan` (in the
scheduler's process) and `rank_blocks` (in each worker's), which know no vLLM.

A block that fails to load is reported as such, and vLLM computes from there. Models with
several kinds of KV cache (hybrid), or whose blocks do not all stay, are refused at start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from relume.engine_shim import identity
from relume.engine_shim.checkpoints.block_plan import CheckpointPlan
from relume.engine_shim.checkpoints.cache_fingerprint import fingerprint_of, interior_of
from relume.engine_shim.checkpoints.checkpoint_spec import DropJob, Key, LoadJob, SaveJob
from relume.engine_shim.checkpoints.daemon_links import LinkConfig, Links
from relume.engine_shim.checkpoints.rank_blocks import CheckpointRank, Reached
from relume.engine_shim.checkpoints.staging.copies import Copies, HostCopies
from relume.engine_shim.checkpoints.staging.staged_cache import StagedCache
from relume.engine_shim.engine import plugin
from relume.engine_shim.generation import reported
from relume.events.log import codec
from relume.events.vocabulary import LinkMeasured, RestoreFailed
from relume.events.vocabulary.enums import RestoreFailure
from relume.events.wire.kv.kv_errors import Unshapeable
from relume.events.wire.reports import Layout, frame, layout_frame

logger = logging.getLogger(__name__)


@dataclass
class CheckpointMetadata(KVConnectorMetadata):
    """One step's work for the ranks."""

    saves: list[SaveJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    drops: list[DropJob] = field(default_factory=list)


@dataclass
class RankProgress(KVConnectorWorkerMetadata):
    """What a rank reports to the scheduler after a step."""

    reached: Reached
    lost: tuple[str, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankProgress:
        assert isinstance(other, RankProgress)
        reached = dict(self.reached)
        for place, index in other.reached.items():
            reached[place] = min(index, reached.get(place, index))
        return RankProgress(reached, tuple(sorted({*self.lost, *other.lost})))


def _copies_for(device: torch.device) -> Copies:
    """Raises Unshapeable, RuntimeError."""
    if device.type == "cpu":
        return HostCopies()
    if device.type != "cuda":
        raise Unshapeable(f"the KV cache lies on {device}; CUDA, ROCm and host memory are read")
    from relume.engine_shim.checkpoints.staging.cuda_copies import CudaCopies

    return CudaCopies(device)


class RelumeConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. Each process has one of either role."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises Unshapeable for models and parallelism it cannot checkpoint."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise Unshapeable("models with several KV cache groups are not checkpointed")
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        if not isinstance(spec, FullAttentionSpec):
            # Of a window's blocks only the last ones are there; a state is no row of blocks.
            raise Unshapeable(f"a cache of {type(spec).__name__} is not checkpointed")
        self._spec = spec
        self._blocks = kv_cache_config.num_blocks
        self._links = LinkConfig.of(self._kv_transfer_config.kv_connector_extra_config)
        self._me = identity.from_environment()
        self._plan: CheckpointPlan | None = None
        self._rank: CheckpointRank | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._plan = self._make_plan(vllm_config, kv_cache_config)

    def _make_plan(self, config: VllmConfig, caches: KVCacheConfig) -> CheckpointPlan:
        layers = len(caches.kv_cache_groups[0].layer_names)
        fingerprint = fingerprint_of(config, self._spec, layers)
        links = Links(self._links, self._me.worker, self._me.incarnation, "reader", fingerprint)
        ranks = config.parallel_config.tensor_parallel_size
        size = config.cache_config.block_size
        image = 4 * size + fingerprint.layers * fingerprint.piece_bytes
        if (reporter := plugin.reporter()) is not None:
            reporter.send(layout_frame(Layout(fingerprint.family.hex(), ranks * image)))
        # As vLLM itself: where its prefix cache is off, no request has another's blocks.
        share = bool(config.cache_config.enable_prefix_caching)
        wait_s = self._links.lookup_timeout_s
        return CheckpointPlan(links, size, ranks, wait_s, share, self._unrestored)

    def _unrestored(self, key: Key, holder: str, reason: RestoreFailure) -> None:
        """See CheckpointPlan."""
        _report(
            RestoreFailed(
                incarnation=self._me.incarnation,
                request=key.request,
                child=key.child,
                attempt=key.attempt,
                holder=holder,
                tokens=0,
                reason=reason,
            )
        )

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a save that is dropped is a block to compute, nothing more

    # --- ranks -------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        cache = self._cache_of(kv_caches)
        fingerprint = fingerprint_of(self._vllm_config, self._spec, cache.layers)
        if (cache.piece_bytes, cache.dtype) != (fingerprint.piece_bytes, fingerprint.dtype):
            raise Unshapeable(
                f"blocks of {cache.piece_bytes} bytes of {cache.dtype}, where "
                f"{fingerprint.piece_bytes} of {fingerprint.dtype} were said"
            )
        self._rank = CheckpointRank(
            cache,
            get_tensor_model_parallel_rank(),
            self._links,
            self._me.worker,
            self._me.incarnation,
            fingerprint,
            _report,
        )

    def _cache_of(self, tensors: dict[str, torch.Tensor]) -> StagedCache:
        """Raises Unshapeable."""
        cache = StagedCache(tensors, self._blocks, _copies_for, self._links.staging_bytes)
        order = cache.rows.interior
        # vLLM's CPU kernels pack a block: one piece, in no order that a shape shows.
        packed = cache.rows.device.type == "cpu"
        if len(order) > 1 if packed else order != interior_of(self._vllm_config, self._spec):
            raise Unshapeable(
                "blocks that do not lie as vLLM's layout says (the backend divides them?); "
                "another --block-size or VLLM_KV_CACHE_LAYOUT may help"
            )
        return cache

    def _metadata(self) -> CheckpointMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, CheckpointMetadata)
        return metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._rank is not None:
            for load in self._metadata().loads:
                self._rank.load(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before their request is scheduled; there is nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: `wait_for_save` copies whole blocks after the step."""

    def wait_for_save(self) -> None:
        if self._rank is None:
            return
        metadata = self._metadata()
        self._rank.save_all(metadata.saves)
        for drop in metadata.drops:
            self._rank.drop(drop)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._rank.take_loaded() if self._rank is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._rank.take_failed() if self._rank is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._rank is None:
            return None
        reached, lost = self._rank.take_progress()
        return RankProgress(reached, lost) if reached or lost else None

    def shutdown(self) -> None:
        if self._rank is not None:
            self._rank.close()

    # --- the scheduler -----------------------------------------------------------------

    def retarget(self, request: str, attempt: int, targets: tuple[str, ...]) -> bool:
        """See CheckpointPlan.retarget; on the engine core's thread."""
        return self._scheduling.retarget(request, attempt, targets)

    @property
    def _scheduling(self) -> CheckpointPlan:
        assert self._plan is not None, "called in a worker process"
        return self._plan

    def on_new_request(self, request: Request) -> None:
        self._scheduling.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._scheduling.match(request.request_id, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            ids = blocks.get_block_ids()[0]
            self._scheduling.allocated(request.request_id, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        plan = self._scheduling
        metadata = CheckpointMetadata(loads=plan.take_loads(), drops=plan.take_drops())
        state = scheduler_output.kv_connector_block_state
        drafts = scheduler_output.scheduled_spec_decode_tokens
        scheduled = scheduler_output.num_scheduled_tokens

        def block_ids(engine_id: str) -> list[int]:
            found = state.get_block_ids(engine_id) if state is not None else None
            return list(found[0]) if found else []

        for engine_id, before in _computed_before(scheduler_output):
            confirmed = before + scheduled[engine_id]
            if drafts and engine_id in drafts:
                confirmed -= len(drafts[engine_id])
            metadata.saves += plan.saves(engine_id, confirmed, block_ids)
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        progress = connector_output.kv_connector_worker_meta
        if isinstance(progress, RankProgress):
            self._scheduling.record_progress(progress.reached)
            self._scheduling.holder_lost(progress.lost)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        ended = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        self._scheduling.finished(request.request_id, ended)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if block_ids else [])


def _computed_before(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Scheduled requests, and how many of their tokens were computed before this step."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)


def _report(event: Any) -> None:
    """An event of a restore or a link for the agent; without one it is dropped."""
    reporter = plugin.reporter()
    if reporter is not None and (isinstance(event, LinkMeasured) or reported(event.request)):
        reporter.send(frame(codec.encode(event)))
