"""What travels with a request into EngineCore, and what never does."""

from __future__ import annotations

import pytest

from relume.engine_shim.generation import IDENTITY_KEY

pytestmark = pytest.mark.full

FORGED = {"kv_transfer_params": {"x": 1}, "ec_transfer_params": {"x": 1}, IDENTITY_KEY: {}, "a": 1}


@pytest.mark.parametrize(
    "socket,kept", [("/run/agent", {"a"}), ("", {"a", "kv_transfer_params", "ec_transfer_params"})]
)
def test_a_fleets_engine_takes_no_kv_blocks_named_by_a_client(monkeypatch, socket, kept) -> None:
    """Also on routes that are relayed without an identity; plain vLLM stays as it is."""
    from vllm.sampling_params import SamplingParams

    from relume.engine_shim.engine.vllm_private import api_server as vllm_private

    monkeypatch.setenv("RELUME_AGENT_SOCKET", socket)
    params = SamplingParams(extra_args=dict(FORGED))
    vllm_private._stamp(params, None)
    assert set(params.extra_args) == kept


@pytest.mark.parametrize("uncached", [True, False])
def test_a_replay_of_a_doubted_stream_reads_no_cached_block(uncached) -> None:
    from vllm.sampling_params import SamplingParams

    from relume.engine_shim.engine.vllm_private import api_server as vllm_private
    from relume.engine_shim.generation import Generation

    params, generation = SamplingParams(), Generation("q1", 1)
    generation.uncached = uncached
    vllm_private._stamp(params, generation)
    assert bool(params.skip_reading_prefix_cache) is uncached


@pytest.mark.parametrize(("given", "kept"), [(None, None), (4, 4), (500, 16)])
def test_tokens_of_a_dispatched_request_are_not_gathered_for_long(given, kept) -> None:
    """Else a stream of a slow engine would look stuck."""
    from vllm.sampling_params import SamplingParams

    from relume.engine_shim.engine.vllm_private import api_server as vllm_private
    from relume.engine_shim.generation import Generation
    from relume.policies.liveness.overdue import OverdueConfig

    params = SamplingParams(stream_interval=given)
    vllm_private._stamp(params, Generation("q1", 1))
    assert params.stream_interval == kept
    assert OverdueConfig().steps >= 2 * vllm_private.MOST_INTERVAL
    direct = SamplingParams(stream_interval=given)
    vllm_private._stamp(direct, None)
    assert direct.stream_interval == given
