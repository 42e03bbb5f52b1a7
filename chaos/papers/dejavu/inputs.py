"""Models, machines and lengths for DéjàVu's studies, and substitutes for measurements that the
paper does not print.

The paper plans with prompt and token times measured for each batch size, and with output lengths
of LMSys-Chat-1M; neither is in its text or its repository. Here:

- Times are a roofline: a prompt does 2 FLOP per weight and token, a token step reads the weights
  and the microbatch's KV cache. Two efficiencies come from two figures of the text: 3.1 s per
  prompt stage (Table 6), and prompts that last 14 token steps. The latter are two requests of
  OPT-66B on two A100 (Appendix H.3, of another engine); their 1,000 tokens are assumed.
- Lengths have the distribution of the Azure conversation trace and one mean, chosen so that
  Eq. 1 halves the machines as Table 3 does. As in the authors' public simulator: 2 to 1,000
  tokens, a length for each 64 requests, so repeated 64 / b times for microbatches of b.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path

from msgspec import Struct, structs

from relume.chaos.scenario import request_traces as traces

PROMPT_TOKENS = 1000
CONTEXT_TOKENS = 2000
"""Tokens that KV memory is reserved for: prompt and up to 1,000 generated tokens."""

BATCHES = (4, 8, 16, 32)
"""Microbatch sizes tried; Tables 2 to 5 also name 2, once."""

LARGEST = 64
"""Number of requests per length of the trace, so 64 / b microbatches of b."""

ROWS = 256


class Model(Struct, frozen=True, kw_only=True):
    """`weights`: bytes in half precision. `token_factor`: its token steps by the roofline's."""

    name: str
    weights: int
    layers: int
    hidden: int
    token_factor: float = 1.0

    @property
    def kv_bytes(self) -> int:
        """KV cache of one token: keys and values, two bytes each."""
        return 4 * self.layers * self.hidden


class Machine(Struct, frozen=True):
    """`gpus` of one kind: dense half-precision FLOP/s, bytes/s, bytes of each."""

    gpus: int
    flops: float
    bandwidth: float
    memory: int

    @property
    def bytes(self) -> int:
        return self.gpus * self.memory


OPT_30B = Model(name="OPT-30B", weights=60 * 10**9, layers=48, hidden=7168)
OPT_66B = Model(name="OPT-66B", weights=132 * 10**9, layers=64, hidden=9216)
BLOOM_176B = Model(name="BLOOM-176B", weights=352 * 10**9, layers=70, hidden=14336)


def a100(gpus: int) -> Machine:
    """A100-80GB: 312 TFLOP/s, 2.04 TB/s."""
    return Machine(gpus, 312e12, 2.039e12, 80 * 10**9)


def v100(gpus: int) -> Machine:
    """V100-16GB: 125 TFLOP/s, 0.9 TB/s."""
    return Machine(gpus, 125e12, 0.9e12, 16 * 10**9)


def _ideal_prompt_s(model: Model, machine: Machine, batch: int, prompt: int) -> float:
    return model.weights * batch * prompt / (machine.gpus * machine.flops)


def _ideal_token_s(model: Model, machine: Machine, batch: int, context: int) -> float:
    read = model.weights + batch * context * model.kv_bytes
    return read / (machine.gpus * machine.bandwidth)


TABLE_6_PROMPT_S = 3.1
TENSORRT_RATIO = 14.0
PROMPT_EFFICIENCY = _ideal_prompt_s(BLOOM_176B, a100(2), 8, PROMPT_TOKENS) / 3 / TABLE_6_PROMPT_S
TOKEN_EFFICIENCY = (
    TENSORRT_RATIO
    * _ideal_token_s(OPT_66B, a100(2), 2, PROMPT_TOKENS)
    / _ideal_prompt_s(OPT_66B, a100(2), 2, PROMPT_TOKENS)
    * PROMPT_EFFICIENCY
)


def prompt_ns(model: Model, machine: Machine, batch: int, prompt: int = PROMPT_TOKENS) -> int:
    """Time of a microbatch's prompt on the whole model with one machine's GPUs, in ns; one of d
    stages needs a d-th."""
    return round(_ideal_prompt_s(model, machine, batch, prompt) / PROMPT_EFFICIENCY * 1e9)


def token_ns(model: Model, machine: Machine, batch: int, context: int = 1100) -> int:
    """One token step likewise; `context` tokens a request in the KV cache on average."""
    ideal_s = _ideal_token_s(model, machine, batch, context)
    return round(ideal_s * model.token_factor / TOKEN_EFFICIENCY * 1e9)


def fits(
    model: Model, machine: Machine, stages: int, batch: int, context: int = CONTEXT_TOKENS
) -> bool:
    """Eq. 3 at `stages`: a share of the weights, and the KV cache of `stages` microbatches in
    that share of the layers."""
    return model.weights / stages + batch * context * model.kv_bytes <= machine.bytes


MEAN_TOKENS = prompt_ns(OPT_66B, a100(4), 32) / token_ns(OPT_66B, a100(4), 32)
"""Table 3 gives both pipelines the same number of machines: N t = Y by Eq. 1."""

BLOOM_FITTED = structs.replace(
    BLOOM_176B,
    token_factor=6
    / 10
    * prompt_ns(BLOOM_176B, a100(4), 32)
    / (MEAN_TOKENS * token_ns(BLOOM_176B, a100(4), 32)),
)
"""BLOOM with token steps such that Eq. 1 gives Table 5's 10 + 6 of 16 machines, for comparison."""


@functools.lru_cache(maxsize=8)
def sampled(seed: int) -> tuple[int, ...]:
    """`ROWS` output lengths with mean `MEAN_TOKENS`: the trace's first ones, or those that a
    seed other than 0 draws."""
    raw = [row.output for row in traces.read("azure-conv", Path())]
    chosen = raw[:ROWS] if seed == 0 else random.Random(f"{seed}:lengths").sample(raw, ROWS)
    scale = MEAN_TOKENS * len(chosen) / sum(chosen)
    return tuple(min(max(round(output * scale), 2), 1000) for output in chosen)


def lengths(batch: int, seed: int = 0) -> list[int]:
    """Generated tokens of each microbatch of `batch` requests, `ROWS * LARGEST` requests in all."""
    return [tokens for tokens in sampled(seed) for _ in range(LARGEST // batch)]
