"""What the fold knows of the demand for a model, and of its level. Data only; part of the fleet's
state."""

from __future__ import annotations

from msgspec import Struct, field


class ModelDemand(Struct, kw_only=True):
    """One model. `level` as last decided, at tick `since`, with `usable_per_ks` of the
    `demand_per_ks` requests that arrive in 1000 seconds.

    `arrivals` and `spans_ms`: of each of the last ticks, the requests that arrived and the time that
    it took by the leader's clock, newest last; `arrived` since the last tick, which was at
    `tick_unix_ms` (0: none). `prompts` requests had `prompt_tokens` to compute, `outputs` requests
    generated `output_tokens`; old ones fade. `higher_since` and `lower_since`: tick from which on a
    higher level, or a lower one, was due at each tick (-1: it is not).
    """

    level: int = 0
    since: int = 0
    usable_per_ks: int = 0
    demand_per_ks: int = 0
    arrivals: list[int] = field(default_factory=list)
    spans_ms: list[int] = field(default_factory=list)
    arrived: int = 0
    tick_unix_ms: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    outputs: int = 0
    output_tokens: int = 0
    higher_since: int = -1
    lower_since: int = -1
