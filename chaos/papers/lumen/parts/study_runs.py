"""Runs of simulated fleets for LUMEN's results, and their measurements.

A fleet serves Poisson traffic until it is steady; then a quarter of its engines (or none, or
as many as a case says) dies at once and loads again, while traffic continues. Control plane and
gateways are the real code; `RULES` are settings of it. The measurements of a run:

- *interrupted* requests were on an engine that died; their time to first token is from its
  death to the next token. *Uninterrupted* ones are sent within `window_s` of it; their time to
  first token is from sending. `ttft` is over both. For both, `queue` is the share of that time
  until an engine gives the request blocks.
- `tpot`: time between tokens, over all decoding sequences within the window.
- `resumed`: until the last interrupted request continues.
- `series`: sums by the second, from which `returns_s` computes when TTFT and time between tokens
  are back.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from relume.chaos.runner.run_statistics import mean, quantile, real
from relume.chaos.scenario.language import (
    Fault,
    Fleet,
    FromTrace,
    Poisson,
    Scenario,
    Traffic,
    When,
)
from relume.chaos.sim import sim_fleet as simulated
from relume.chaos.sim.engine import host_types as hosts
from relume.chaos.sim.engine.draft_assist import Assist
from relume.chaos.sim.engine.speed import Drafts
from relume.chaos.sim.world.worker_machine import WorkerSettings
from relume.controlplane.replica.loop import ReplicaConfig
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import RequestOutcome
from relume.policies.admission.admission_settings import WaitingConfig
from relume.policies.checkpoints.checkpoint_settings import CheckpointConfig

if TYPE_CHECKING:
    from relume.chaos.sim.sim_fleet import SimFleet

MODEL, HARDWARE = "qwen3-32b", "rtxpro6000x2"
BLOCK_TOKENS = 64
"""Longer blocks than vLLM's default: a quarter of the messages, and at most 63 more tokens to
compute per request."""
PER_S = 2.75
"""Requests per second and worker: about three quarters of a worker's capacity."""
FAILS_S = 25.0
WINDOW_S = 40.0
LASTS_S = 75.0
SHORT_FAILS_S, SHORT_WINDOW_S, SHORT_LASTS_S = 15.0, 20.0, 36.0
"""Times of short runs, which end when an engine is back."""
LARGE = 32
RELOAD_S = 20.0
BUDGET_MB = 65536
DRAFT_SHARE, EXCHANGE_US, DRAFTS_AFTER_S = 0.05, 200, 2.0
"""A draft model of a twentieth of the weights on the loading host, half a round trip each way,
and Figure 4's time until it is there."""
SMOOTH_S = 5
NEAR = 1.1

ROUTING = "least_load"
"""Routing policy of fresh requests, under all rules but `ROUTED`."""
ROUTED = {"ours-ttft": "predicted_ttft"}
STRAIGHT = WaitingConfig(requests=0)
"""The paper's system has no admission queue: requests wait at busy workers."""
_ALWAYS = 1_000_000
LOAD_AWARE = CheckpointConfig(
    placement="load_aware",
    alpha=BLOCK_TOKENS // 16,
    beta=64,
    headroom_percent=0,
    restore_budget_ms=0,
)
"""Eq. 4's alpha is for blocks of 16 tokens. Beta is about the number of blocks of a prompt:
Algorithm 2 adds the tokens that a redirected request recomputes, and with our default of 4 all
redirected requests went to one worker. The paper has no check of KV room and no time budget."""
RULES: Mapping[str, CheckpointConfig | None] = {
    "restart": None,
    "neighbour": replace(
        LOAD_AWARE, placement="neighbour", recovery="eq6", theta_percent=_ALWAYS
    ),
    "lumen": replace(LOAD_AWARE, recovery="eq6"),
    "ours": replace(LOAD_AWARE, recovery="least_total"),
    "ours-ttft": replace(LOAD_AWARE, recovery="least_total"),
    "spread": replace(LOAD_AWARE, recovery="eq6", theta_percent=_ALWAYS),
    "neighbour-eq6": replace(LOAD_AWARE, placement="neighbour", recovery="eq6"),
}  # fmt: skip
"""Stop and restart: no checkpoints. DéjàVu: a fixed neighbour, which always restores. LUMEN:
Algorithm 1 and Eq. 6. Ours: the same placement, our default recovery; engines measure their links.
Each other rule differs in one respect."""
MEASURED = ("ours", "ours-ttft")
"""Rules under which engines measure their links."""
TITLES = {
    "none": "no failure",
    "restart": "stop and restart",
    "neighbour": "fixed neighbour",
    "lumen": "LUMEN",
    "ours": "ours",
    "ours-ttft": "ours, routing by TTFT",
    "spread": "load-aware, holder restores",
    "neighbour-eq6": "fixed neighbour, Eq. 6",
}


class Case(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One run. `fails`: engines that die, -1: a quarter. `assist`: acceptance and drafts of hosts
    whose engines load. The window of `short` runs is 20 s, not 40."""

    rules: str
    workers: int
    seed: int
    fails: int = -1
    per_s: float = PER_S
    assist: tuple[float, int] | None = None
    short: bool = False

    @property
    def fails_s(self) -> float:
        """When engines die."""
        return SHORT_FAILS_S if self.short else FAILS_S

    @property
    def lasts_s(self) -> float:
        """Duration of the arrivals."""
        return SHORT_LASTS_S if self.short else LASTS_S

    @property
    def window_s(self) -> float:
        """Duration of the window after the failure."""
        return SHORT_WINDOW_S if self.short else WINDOW_S

    @property
    def whole(self) -> Case:
        """The same traffic without a failure: no rule matters."""
        return Case(
            rules="restart",
            workers=self.workers,
            seed=self.seed,
            fails=0,
            per_s=self.per_s,
            short=self.short,
        )


ASSUMED_DRAFTS = (0.6, 4)
"""Acceptance and drafts of rules with `+drafts`."""


def case_of(rule: str, workers: int, seed: int = 0, fails: int = -1) -> Case:
    """The case of a rule, `RULE+drafts` being one with mechanism 3. Fleets of `LARGE` workers
    have short runs: one has many requests."""
    rules, _, drafts = rule.partition("+")
    assist = ASSUMED_DRAFTS if drafts else None
    return Case(
        rules=rules, workers=workers, seed=seed, fails=fails, assist=assist, short=workers >= LARGE
    )


def title(rule: str) -> str:
    """Name of a rule in tables."""
    rules, _, drafts = rule.partition("+")
    return TITLES[rules] + (" + drafts" if drafts else "")


class RunResult(Struct):
    """Result of one run. `figures` in seconds and shares; `ttft_series`: sum of seconds and
    count of requests by the second they were sent, `itl_series`: sequence-seconds and tokens;
    both from the failure on."""

    figures: dict[str, float]
    ttft_series: list[tuple[float, int]]
    itl_series: list[tuple[float, int]]
    error: str = ""


def scenario_of(case: Case) -> Scenario:
    """The case in the scenario language."""
    names = [f"w{n}" for n in range(case.workers)]
    count = case.workers // 4 if case.fails < 0 else case.fails
    random = Random(f"lumen:{case.workers}:{case.seed}")
    struck = random.sample(names, count)
    return Scenario(
        name="lumen",
        about="A part of the fleet is lost under load.",
        fleet=Fleet(
            workers=case.workers, model=MODEL, hardware=HARDWARE, domains=case.workers,
            checkpoint_mb=BUDGET_MB if RULES[case.rules] is not None else 0,
        ),
        traffic=Traffic(
            arrivals=Poisson(case.per_s * case.workers),
            lengths=FromTrace("azure-conv"),
            for_s=case.lasts_s,
        ),
        faults=tuple(
            Fault(what="engine-kill", when=When(at_s=case.fails_s), target=name) for name in struck
        ),
    )  # fmt: skip


def settings_of(case: Case, meter: Meter) -> simulated.Settings:
    """The parts of the case that a scenario cannot express."""
    spec = hosts.spec(MODEL, HARDWARE)
    blocks = spec.kv_blocks * spec.block_tokens // BLOCK_TOKENS
    spec = replace(spec, block_tokens=BLOCK_TOKENS, kv_blocks=blocks)
    config = replace(RULES[case.rules] or CheckpointConfig(), holders=1)
    drafts = None
    if case.assist is not None:
        accepted, drafted = case.assist
        drafts = Assist(
            Drafts(acceptance=accepted, count=drafted, share=DRAFT_SHARE, exchange_us=EXCHANGE_US),
            DRAFTS_AFTER_S,
        )
    return simulated.Settings(
        workers=WorkerSettings(
            reload_s=RELOAD_S,
            exact_links=True,
            measured_links=case.rules in MEASURED,
        ),
        assist=drafts,
        replica=ReplicaConfig(
            policy=ROUTED.get(case.rules, ROUTING), checkpoints=config, waiting=STRAIGHT
        ),
        spec=spec,
        watching=meter.attach,
    )


class Meter:
    """Observes a running fleet: when engines give requests blocks and first tokens, and how many
    tokens they generate. It changes nothing in the run, and keeps no reference to it afterwards."""

    def __init__(self) -> None:
        self.content_ids: dict[str, str] = {}
        self.admitted: dict[tuple[str, int], int] = {}
        self.first: dict[tuple[str, int], int] = {}
        self.attempts: dict[str, int] = {}
        self.moved_us: dict[tuple[str, int], int] = {}
        self.began_ns = 0
        self.samples: list[tuple[int, float, int]] = []
        """Time, and sequence-seconds and tokens of the second before."""
        self._made: dict[int, int] = {}

    def attach(self, fleet: SimFleet) -> None:
        """Observe `fleet` from now on."""
        self._loop = weakref.proxy(fleet.loop)
        for host in fleet.hosts.values():
            host.met = self.content_ids.__setitem__
            host.seen = self._seen
        self._again(fleet)

    def _seen(self, _worker: str, event: Any) -> None:
        now = self._loop.now_ns
        if type(event) is v.RestoreDone:
            key = event.request, event.attempt
            self.moved_us[key] = event.duration_us
        for change in getattr(event, "changes", ()):
            key = change.request, change.attempt
            if type(change) is v.RequestQueued:
                self.attempts[change.request] = change.attempt
            elif type(change) is v.RequestAdmitted:
                self.admitted.setdefault(key, now)
            elif type(change) is v.FirstToken:
                self.first.setdefault(key, now)

    def _again(self, fleet: SimFleet) -> None:
        loop, self.began_ns = fleet.loop, fleet.began_ns
        lived, tokens = 0.0, 0
        made: dict[int, int] = {}
        for host in fleet.hosts.values():
            process = host.engine
            if process is None or not process.serving or not process.process.alive:
                continue
            engine, run = process.engine, process.engine.running_run(loop.now_ns)
            made[id(process)] = engine.decoded + (run.count if run is not None else 0)
            steps = made[id(process)] - self._made.get(id(process), 0)
            lived += len(engine.running)
            tokens += steps * len(engine.running)
        self._made = made
        self.samples.append((loop.now_ns, lived, tokens))
        loop.call_at(loop.time() + 1.0, self._again, fleet)


def measure(case: Case) -> RunResult:
    """Run a case."""
    meter = Meter()
    run = simulated.run(scenario_of(case), case.seed, settings=settings_of(case, meter))
    fail_ns = meter.began_ns + round(case.fails_s * 1e9)
    until_ns = fail_ns + round(case.window_s * 1e9)
    ids = {content_id: request for request, content_id in meter.content_ids.items()}
    plain: list[tuple[float, float]] = []
    lost: list[tuple[float, float, float]] = []
    length = round(case.lasts_s - case.fails_s)
    ttft_series = [(0.0, 0)] * length
    for history in real(run):
        request = ids.get(history.request, "")
        sent = history.sent_ns + meter.began_ns
        attempt = meter.attempts.get(request, 0)
        key = request, attempt
        if attempt > 1 and key in meter.first:
            took = (meter.first[key] - fail_ns) / 1e9
            waited = (meter.admitted[key] - fail_ns) / 1e9
            lost.append((took, waited, meter.moved_us.get(key, 0) / 1e6))
        elif history.first_ns is not None and sent >= fail_ns:
            took = (history.first_ns - history.sent_ns) / 1e9
            second = min((sent - fail_ns) // 1_000_000_000, length - 1)
            total, count = ttft_series[second]
            ttft_series[second] = total + took, count + 1
            if sent < until_ns:
                plain.append((took, (meter.admitted[key] - sent) / 1e9))
    itl_series = [(0.0, 0)] * length
    for at_ns, lived, tokens in meter.samples:
        second = (at_ns - fail_ns - 1) // 1_000_000_000
        if 0 <= second < length:
            total, count = itl_series[second]
            itl_series[second] = total + lived, count + tokens
    broken = sum(history.record.outcome != RequestOutcome.COMPLETED for history in real(run))
    figures = _figures(plain, lost)
    figures["tpot"] = _ratio(itl_series[: round(case.window_s)])
    error = run.error or (f"{broken} streams broke" if broken else "")
    return RunResult(figures, ttft_series, itl_series, error)


def _figures(
    plain: Sequence[tuple[float, float]], lost: Sequence[tuple[float, float, float]]
) -> dict[str, float]:
    both = [one[0] for one in (*plain, *lost)]
    found = {
        "ttft": mean(both),
        "p99": quantile(both, 0.99),
        "plain": mean([took for took, _ in plain]),
        "plain_queue": _share(plain, 1),
        "lost_share": len(lost) / len(both) if both else None,
        "lost": mean([one[0] for one in lost]),
        "lost_queue": _share(lost, 1),
        "lost_moving": _share(lost, 2),
        "resumed": max((one[0] for one in lost), default=None),
    }
    return {name: value for name, value in found.items() if value is not None}


def _share(times: Sequence[tuple[float, ...]], part: int) -> float | None:
    whole = sum(one[0] for one in times)
    return sum(one[part] for one in times) / whole if whole else None


def _ratio(series: Sequence[tuple[float, int]]) -> float:
    return sum(one[0] for one in series) / max(sum(one[1] for one in series), 1)


def returns_s(series: Sequence[tuple[float, int]], whole: Sequence[tuple[float, int]]) -> float:
    """Seconds from the failure after which every mean over `SMOOTH_S` is within 10 % of the same
    stretch without a failure. The length of the series, if this does not happen by its end."""
    last = len(series) - SMOOTH_S
    for at in range(last, -1, -1):
        stretch = slice(at, at + SMOOTH_S)
        if _ratio(series[stretch]) > NEAR * _ratio(whole[stretch]):
            return float(len(series) if at == last else at + 1)
    return 0.0
