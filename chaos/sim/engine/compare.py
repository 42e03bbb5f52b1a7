"""Compares the simulated engine with a real vLLM run: mean TTFT, TPOT and makespan.

    python -m relume.chaos.sim.engine.compare

The run: vLLM 0.19.0, Qwen3-32B on two RTX PRO 6000, 300 requests in 29 s, more than it can
run at once. Times are seconds from the first arrival; TTFT begins when a request reaches the
engine.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections.abc import Sequence

from msgspec import Struct

from relume.chaos.sim.engine.engine_model import EngineConfig, Job, SimEngine
from relume.chaos.sim.engine.step_cost import FOLDER, Formula, StepCost, load

CONFIG = EngineConfig(kv_blocks=25_000, max_seqs=128, max_tokens=2048)
"""The run's own limits. Its record lacks the number of blocks; this is the number that 90 % of the
memory holds after the weights, twice the run's maximum use."""

BOUND = 0.10


class ServedRequest(Struct, frozen=True, kw_only=True):
    """A request of a run."""

    name: str
    prompt: int
    output: int
    queued_s: float
    first_s: float
    last_s: float


def real_run() -> list[ServedRequest]:
    """The requests of the recorded run, by arrival."""
    with gzip.open(FOLDER / "vllm_requests.csv.gz", "rt", encoding="utf-8") as file:
        found = [
            ServedRequest(
                name=row["request_id"], prompt=int(row["input_toks"]), output=int(row["output_toks"]),
                queued_s=float(row["queued_s"]), first_s=float(row["first_token_s"]), last_s=float(row["last_token_s"]),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip
    return sorted(found, key=lambda request: request.queued_s)


def simulate(formula: Formula, requests: Sequence[ServedRequest]) -> list[ServedRequest]:
    """The same arrivals and lengths in a simulated engine."""
    engine = SimEngine(CONFIG, StepCost(formula))
    first: dict[str, int] = {}
    last: dict[str, int] = {}

    def note(events: list) -> None:
        for one in events:
            if one.what == "first":
                first.setdefault(one.name, one.at_ns)
            elif one.what == "finished":
                last[one.name] = one.at_ns

    for request in requests:
        at = round(request.queued_s * 1e9)
        note(engine.advance(at))
        note(
            engine.submit(
                Job(name=request.name, prompt_tokens=request.prompt, output_tokens=request.output),
                at,
            )
        )
    while engine.next_ns is not None:
        note(engine.advance(engine.next_ns))
    return [
        ServedRequest(
            name=r.name,
            prompt=r.prompt,
            output=r.output,
            queued_s=r.queued_s,
            first_s=first[r.name] / 1e9,
            last_s=last[r.name] / 1e9,
        )
        for r in requests
    ]


def figures(run: Sequence[ServedRequest]) -> dict[str, float]:
    """Mean TTFT and TPOT in seconds, makespan in seconds."""
    return {
        "ttft_s_mean": sum(r.first_s - r.queued_s for r in run) / len(run),
        "tpot_s_mean": sum((r.last_s - r.first_s) / (r.output - 1) for r in run) / len(run),
        "makespan_s": max(r.last_s for r in run) - min(r.queued_s for r in run),
    }


def main() -> int:
    """Print both and their difference; 1 if it exceeds 10 %."""
    real = real_run()
    simulated = simulate(load("qwen3-32b_rtxpro6000x2").formula, real)
    was, found = figures(real), figures(simulated)
    worst = 0.0
    for name in was:
        off = found[name] / was[name] - 1
        worst = max(worst, abs(off))
        print(f"{name:12} real {was[name]:9.4f}  simulated {found[name]:9.4f}  {off:+.1%}")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
