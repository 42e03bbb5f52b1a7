"""Common parts of LUMEN's results: cases of a comparison, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from relume.chaos.papers.lumen.parts.study_runs import RunResult, case_of, returns_s, title
from relume.chaos.papers.sampling import Estimate, Sampling, average, ratio

RESAMPLED = 200
COMPARED = ("restart", "neighbour", "lumen", "ours")
WITHOUT_DRAFTS = (
    "Speculation-assisted recovery (mechanism 3) is no feature of the control plane. Rows with "
    "drafts have it in the simulated engines: from 2 s after its engine died until the next one "
    "is there, a host drafts for the survivor with most requests. It drafts 4 tokens, each accepted "
    "with 0.6, by a model of a twentieth, 0.2 ms to and fro, verified in steps of any kind. "
    "All other rows are without it."
)
TRAFFIC = (
    "Lengths are drawn from Splitwise-Conv's first 512 rows (the packaged part), "
    "arrivals are Poisson, 2.75 per second and worker, about three quarters of the simulated "
    "engine's capacity. Engine: Qwen3-32B on two RTX PRO 6000, fitted to profiles; the paper's GPUs "
    "are slower. Blocks of 64 tokens, 64 GiB for checkpoints a host, 100 Gbit/s."
)
RELOAD = (
    "An engine is back 20 s after its death: Figure 4's bar and the prototype's 20 s. The text "
    "also says 10 to 12 minutes, in which a fleet at this load has no steady state."
)
INPUTS = (TRAFFIC, RELOAD, WITHOUT_DRAFTS)
QUEUE = (
    "here, survivors run at their capacity for 20 s; a queue grows while their load exceeds it, for "
    "a time that the paper does not give. Engines here have places left (up to 128 sequences), so "
    "part of the load shows as longer steps."
)
REPLAY = (
    "a replayed request waits for the queue of prompts and its own, 2 to 4 s at 11,000 prompt "
    "tokens per second. 24 to 29 s is the paper's whole recovery time, as if they waited for the "
    "restarted worker."
)
"""Reasons why figures differ."""


class RuleComparison:
    """Rules over the same seeds, one size of fleet."""

    def __init__(
        self, sampling: Sampling, workers: int, rules: Sequence[str], fails: int = -1
    ) -> None:
        self.rules = rules
        fails = -1 if fails == workers // 4 else fails
        cases = {
            rule: [case_of(rule, workers, seed, fails) for seed in sampling.seeds] for rule in rules
        }
        whole = [case.whole for case in cases[rules[0]]]
        found = sampling.run(case for of in zip(whole, *cases.values(), strict=True) for case in of)
        self.runs: dict[str, list[RunResult]] = {
            rule: [found[case] for case in of] for rule, of in cases.items()
        }
        self.runs["none"] = [found[case] for case in whole]

    def values(self, rule: str, figure: str) -> list[float]:
        """The figure of every seed."""
        return [run.figures[figure] for run in self.runs[rule]]

    def ratio(self, figure: str, rule: str, to: str) -> Estimate:
        """The figure under one rule over that under another."""
        return ratio(self.values(rule, figure), self.values(to, figure))

    def mean(self, figure: str, rule: str) -> Estimate:
        """The figure's mean over the seeds."""
        return average(self.values(rule, figure))

    def back_s(self, kind: str, rule: str, seeds: Sequence[int] | None = None) -> float:
        """Seconds until TTFT (`ttft`) or the time between tokens (`itl`) is back, of all seeds
        together: five seconds of one run are too few."""
        chosen = range(len(self.runs[rule])) if seeds is None else seeds

        def pooled(runs: Sequence[RunResult]) -> list[tuple[float, int]]:
            series = [getattr(runs[seed], f"{kind}_series") for seed in chosen]
            return [
                (sum(s[0] for s in at), sum(s[1] for s in at)) for at in zip(*series, strict=True)
            ]

        return returns_s(pooled(self.runs[rule]), pooled(self.runs["none"]))

    def back_ratio(self, kind: str, rule: str, to: str) -> Estimate:
        """The same under one rule over that under another, of resampled seeds."""
        count, random = len(self.runs[rule]), Random(0)

        def of(seeds: Sequence[int]) -> float:
            under = self.back_s(kind, to, seeds)
            return self.back_s(kind, rule, seeds) / under if under else 1.0

        every = range(count)
        drawn = sorted(of(random.choices(every, k=count)) for _ in range(RESAMPLED))
        low, high = drawn[round(0.025 * RESAMPLED)], drawn[round(0.975 * RESAMPLED) - 1]
        return Estimate(of(every), low, high, count)

    def table(self) -> list[str]:
        """Every rule's figures, for people."""
        lines = [
            f"{'':34}{'TTFT':>7}{'p99':>7}{'TPOT':>6} | back after: {'streams':>7}{'TTFT':>6}"
            f"{'ITL':>6} | {'uninterrupted':>13}{'queued':>7} | {'interrupted':>11}{'queued':>7}"
            f"{'moved':>6}",
            f"{'':34}{'s':>7}{'s':>7}{'ms':>6} | {'s':>19}{'s':>6}{'s':>6} | {'s':>13}{'%':>7} "
            f"| {'s':>11}{'%':>7}{'%':>6}",
        ]
        for rule in ("none", *self.rules):

            def of(figure: str, rule: str = rule) -> float:
                values = self.values(rule, figure)
                return sum(values) / len(values)

            line = f"{title(rule):34}{of('ttft'):7.3f}{of('p99'):7.2f}{of('tpot') * 1e3:6.0f} | "
            if rule == "none":
                line += f"{'':31} | {of('plain'):13.3f}{of('plain_queue') * 100:7.0f} |"
            else:
                line += (
                    f"{of('resumed'):19.2f}{self.back_s('ttft', rule):6.0f}"
                    f"{self.back_s('itl', rule):6.0f} | "
                    f"{of('plain'):13.3f}{of('plain_queue') * 100:7.0f} | {of('lost'):11.3f}"
                    f"{of('lost_queue') * 100:7.0f}{of('lost_moving') * 100:6.0f}"
                )
            lines.append(line.rstrip())
        return lines
