"""What the review of LUMEN asks and the paper leaves open: thresholds, lost holders, links,
host memory, drafts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from msgspec.structs import replace

from chaos.papers.lumen_runs import HARDWARE, MODEL, Case
from chaos.papers.lumen_tables import INPUTS
from chaos.papers.result import Found, Published, Result
from chaos.papers.sampling import Sampling, average
from chaos.sim import cost, hosts
from chaos.sim.speed import Speculative

GIB = 1 << 30
THETAS, TAUS = (50, 100, 200), (128, 512, 2048)
"""Eq. 6's: per cent of the mean load, tokens."""
ACCEPTED, DRAFTED, BATCHES = (0.3, 0.6, 0.8, 0.9), (2, 4, 8), (1, 16, 64, 128)
CONTEXT = 1200
LONG = (4000, 12000)
STORAGE_BYTES_S = 1.25e9
"""Of storage behind 10 Gbit/s a host; DRAM of another host is behind 100."""


def cases() -> Mapping[str, Case]:
    """Each way of the fleet and its failure that is asked about, by what it is."""
    found: dict[str, Case] = {}
    for theta, tau in product(THETAS, TAUS):
        case = Case("lumen", 4, 0, theta_percent=theta, tau=tau)
        found[f"LUMEN, theta {theta} % of the mean load, tau {tau}"] = case
    for rule, whom, holders in product(("lumen", "ours"), ("any", "neighbours"), (1, 2)):
        where = "any two of 8" if whom == "any" else "two neighbours of 8"
        named = f"{rule}, {where} lost with their daemons, holders: {holders}"
        found[named] = Case(rule, 8, 0, whom=whom, daemons=True, holders=holders)
    for rule, budget in product(("lumen", "ours"), (2, 8, 64)):
        named = f"{rule}, prompts of 8,000 on average at 0.4 a second, {budget} GiB a host"
        found[named] = Case(rule, 4, 0, per_s=0.4, prompts=LONG, budget_mb=budget << 10)
    for rule, rate in product(("lumen", "ours"), (STORAGE_BYTES_S, 0.0)):
        link = "10 Gbit/s" if rate else "100 Gbit/s"
        found[f"{rule}, {link} a host"] = Case(rule, 4, 0, link_bytes_s=rate)
    return found


def drafts() -> list[str]:
    """How much sooner a token comes with drafts, verification counted."""
    plain = cost.load(f"{MODEL}_{HARDWARE}")
    lines = ["decoding with drafts, times as fast: by acceptance, drafts, sequences"]
    lines.append(f"{'':18}" + "".join(f"{batch:>8}" for batch in BATCHES))
    for accepted, count in product(ACCEPTED, DRAFTED):
        with_drafts = Speculative(plain, accepted, count)
        ratios = [
            plain.decode(batch, batch * CONTEXT)[0] / with_drafts.decode(batch, batch * CONTEXT)[0]
            for batch in BATCHES
        ]
        lines.append(f"  {accepted:.1f}, {count} drafts   " + "".join(f"{r:8.2f}" for r in ratios))
    return lines


def run(sampling: Sampling) -> Found:
    """Runs of the fleets that are asked for, and what needs none."""
    spec = hosts.spec(MODEL, HARDWARE)
    asked = {name: one for name, one in cases().items() if one.workers <= sampling.most}
    runs = sampling.run(
        replace(one, seed=seed) for one in asked.values() for seed in sampling.seeds
    )
    lines = [f"{sampling.count} seeds: mean TTFT s, p99 s, TTFT of the interrupted s"]
    for name, one in asked.items():
        of = [runs[replace(one, seed=seed)].figures for seed in sampling.seeds]
        shown = "  ".join(str(average([f[key] for f in of])) for key in ("ttft", "p99", "lost"))
        lines.append(f"  {name:72} {shown}")
    figures = {
        "kv": spec.kv_bytes_per_token * 32768 / GIB,
        "gain": Speculative(cost.load(f"{MODEL}_{HARDWARE}"), 0.8, 4).gain,
    }
    return Found(figures, (*lines, "", *drafts()))


TWICE = "Table A is twice what Eq. 1 gives, in every row."

RESULT = Result(
    name="lumen-questions",
    about="thresholds, lost holders, host memory, links and drafts",
    source="LUMEN, open questions of the review",
    published=(
        Published("gain", "tokens a step, acceptance 0.8, 4 drafts (Eq. 3)", 3.4, "", 0.02),
        Published("kv", "KV cache of 32K tokens (Table A)", 16.0, "GiB", 0.05, TWICE),
    ),
    run=run,
    sample=True,
    inputs=INPUTS,
)
