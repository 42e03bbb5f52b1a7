"""Models of 7B to 405B: the time of a step, by the formula of Qwen3-32B and a roofline.

Each model runs on as many of the same GPUs as hold it. The time of dense layers and of exchange
between GPUs scales with weights per GPU, that of prompt attention with layers x heads per GPU, that
of decode attention with KV bytes per GPU. The host's part of a step is constant. Loading and KV
memory follow from the weights, checkpoints from layers and KV heads. Published profiles of
CodeLlama-34B and Llama-2-70B, on other GPUs, show that the dense part scales with weights per GPU
(`MEASURED_MS`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from relume.chaos.sim.engine import host_types as hosts
from relume.chaos.sim.engine import step_cost as cost
from relume.chaos.sim.engine.host_types import HostSpec
from relume.chaos.sim.engine.step_cost import StepCost

GPU_BYTES, USED = 96e9, 0.9
HEAD = 128
RELOAD_S_A_BYTE = 20.0 / 65.6e9
"""Loading time per byte on a host: 20 s for Qwen3-32B."""
LEAST_DRAFT_SHARE = 0.02
"""Minimum share of a step: smaller draft models need as long for their kernel launches."""


class Size(Struct, frozen=True, kw_only=True):
    """A model: `params`, of its draft model too, in thousand millions; KV heads and heads of 128;
    `gpus` in `hosts`."""

    name: str
    params: float
    layers: int
    heads: int
    kv_heads: int
    gpus: int
    draft: float
    hosts: int = 1


QWEN = Size(name="Qwen3-32B", params=32.8, layers=64, heads=64, kv_heads=8, gpus=2, draft=1.7)
SIZES: Mapping[str, Size] = {
    "7B": Size(name="Mistral-7B", params=7.2, layers=32, heads=32, kv_heads=8, gpus=1, draft=0.5),
    "14B": Size(name="Qwen3-14B", params=14.8, layers=40, heads=40, kv_heads=8, gpus=1, draft=0.6),
    "32B": QWEN,
    "70B": Size(
        name="Llama-3-70B", params=70.6, layers=80, heads=64, kv_heads=8, gpus=4, draft=1.2
    ),
    "405B": Size(
        name="Llama-3.1-405B",
        params=405.9,
        layers=126,
        heads=128,
        kv_heads=8,
        gpus=16,
        draft=8.0,
        hosts=2,
    ),
}
TOKENS = (1, 64, 256, 512, 1024, 2048)
MEASURED_MS: Mapping[tuple[float, str, int], tuple[float, ...]] = {
    (34, "H100", 1): (24.36, 25.08, 30.53, 53.42, 113.88, 206.42),
    (34, "H100", 2): (12.86, 13.87, 18.00, 29.28, 57.19, 107.33),
    (34, "H100", 4): (7.06, 7.61, 10.01, 16.94, 30.14, 55.94),
    (70, "H100", 4): (14.32, 15.28, 19.20, 30.00, 62.08, 110.56),
    (70, "H100", 8): (8.36, 8.96, 11.52, 17.68, 32.64, 63.72),
}
"""By parameters, GPU and number of GPUs: ms of the dense layers of `TOKENS` tokens. Sums of the
operators' medians times layers, from microsoft/vidur `data/profiling/compute` (7d475133, MIT)."""


class Model(Struct, frozen=True, kw_only=True):
    """A size in the simulator's terms. `per_s`: requests per second that load it as one per second
    loads Qwen3-32B."""

    size: Size
    spec: HostSpec
    cost: StepCost
    reload_s: float
    draft_share: float
    per_s: float


@functools.cache
def of(name: str) -> Model | None:
    """The size called `name`; None for an empty one. Raises KeyError."""
    if not name:
        return None
    size, known = SIZES[name], hosts.spec("qwen3-32b", "rtxpro6000x2")
    weights = 2e9 * size.params
    kv_bytes = 4 * size.layers * size.kv_heads * HEAD
    free = size.gpus * GPU_BYTES * USED - weights
    spec = replace(
        known,
        source=f"{size.name}: weights, layers and KV heads; the rest as {QWEN.name}'s",
        kv_blocks=int(free / kv_bytes) // known.block_tokens,
        kv_bytes_per_token=kv_bytes,
        link_bytes_s=known.link_bytes_s * size.hosts,
        local_bytes_s=known.local_bytes_s * size.hosts,
    )
    base = cost.load("qwen3-32b_rtxpro6000x2")
    scaled = _scaled(base, size)
    share = max(size.draft / size.params, LEAST_DRAFT_SHARE)
    reload_s = RELOAD_S_A_BYTE * weights / size.hosts
    return Model(
        size=size,
        spec=spec,
        cost=scaled,
        reload_s=reload_s,
        draft_share=share,
        per_s=_request_ns(base) / _request_ns(scaled),
    )


def _scaled(base: StepCost, size: Size) -> StepCost:
    f = base.formula
    dense = _a_gpu(size.params, size) / _a_gpu(QWEN.params, QWEN)
    heads = _a_gpu(size.heads, size) / _a_gpu(QWEN.heads, QWEN)
    # A GPU has at least one KV head: with more GPUs than heads, heads are copied.
    kv = max(_a_gpu(size.kv_heads, size), 1.0) / _a_gpu(QWEN.kv_heads, QWEN)
    d, p, m = f.decode, f.prefill, f.mixed
    return StepCost(
        replace(
            f,
            source=f"{size.name}, scaled from {QWEN.name}",
            layers=size.layers,
            knots=tuple((tokens, us * dense) for tokens, us in f.knots),
            decode=(d[0], d[1] * heads, d[2] * kv),
            prefill=(p[0], p[1] * heads, p[2] * heads, p[3] * heads),
            mixed=(
                m[0], m[1] * heads, m[2] * heads, m[3] * heads, m[4] * heads, m[5] * kv, m[6] * kv,
            ),
            collective=f.collective * dense if size.gpus > 1 else 0.0,
        )
    )  # fmt: skip


def _a_gpu(amount: float, size: Size) -> float:
    return amount / size.gpus


def _request_ns(steps: StepCost) -> float:
    """Engine time of a request of the trace's mean lengths, if the engine decodes 40 at once."""
    prompt, output, batch = 1155, 211, 40
    alone = steps.step([(prompt, 0)], 0, 0) - steps.step([(1, 0)], 0, 0)
    return alone + output / batch * steps.decode(batch, batch * (prompt + output // 2))[0]


def checked() -> float:
    """Maximum relative deviation of published profiles from the roofline: ms of the dense layers
    over weights per GPU, for each pair of sizes or numbers of GPUs."""
    off = 0.0
    known = list(MEASURED_MS.items())
    for at, ((size, _, gpus), one) in enumerate(known):
        for (other, _, others), two in known[at + 1 :]:
            said = (size / gpus) / (other / others)
            off = max(off, *(abs(a / b / said - 1) for a, b in zip(one, two, strict=True)))
    return off
