"""Time to first token of each routing policy in the simulator.

The bench runs the real control plane on simulated engines, with arrivals and lengths of a trace:
Azure's conversations, which share no prefixes, or with `--trace mooncake-conversation`
Mooncake's with their common prefixes, where prefix-aware policies differ from the others.

Load on the machine has no effect, and the same seed gives the same figures. So the bench resolves
differences that real workers on two cores hide. Figures are means over seeds. Arrivals are the
trace's; seeds change the links, and with them every tie.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from relume.chaos.bench.bench_figures import figure
from relume.chaos.bench.scheduling.routing_quality import BEATEN, POLICIES
from relume.chaos.runner.run_statistics import quantile, real
from relume.chaos.scenario.language import Fleet, FromTrace, Scenario, Trace, Traffic
from relume.chaos.sim.sim_fleet import Settings
from relume.chaos.sim.sim_fleet import run as simulate
from relume.controlplane.replica.loop import ReplicaConfig

DESCRIPTION = "time to first token of each routing policy on a trace's arrivals, simulated"
TRACE = "azure-conv"
MODEL, HARDWARE = "qwen3-32b", "rtxpro6000x2"
LONGEST = 16_384
"""Maximum length of a prompt in tokens; longer ones are cut."""


def ttft_ms(policy: str, scenario: Scenario, seed: int) -> list[float]:
    """TTFT of all requests of one run. Raises RuntimeError if the run breaks."""
    outcome = simulate(scenario, seed, settings=Settings(replica=ReplicaConfig(policy=policy)))
    if outcome.error:
        raise RuntimeError(outcome.error)
    histories = real(outcome)
    return [(h.first_ns - h.sent_ns) / 1e6 for h in histories if h.first_ns is not None]


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(
        prog="relume-chaos bench routing-simulated", description=DESCRIPTION
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0, 3.0, 6.0])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trace", default=TRACE)
    args = parser.parse_args(argv)
    lengths = FromTrace(args.trace, prompt_most=LONGEST)
    figures, met = {}, True
    for speed in args.speeds:
        scenario = Scenario(
            name="trace",
            about="Conversations as they came to a cloud's service.",
            fleet=Fleet(
                workers=args.workers, model=MODEL, hardware=HARDWARE, control_planes=args.replicas
            ),
            traffic=Traffic(
                arrivals=Trace(args.trace, speed), lengths=lengths, requests=args.requests
            ),
        )
        p99 = {}
        for policy in args.policies:
            runs = [ttft_ms(policy, scenario, seed) for seed in range(1, args.seeds + 1)]
            p99[policy] = statistics.mean(quantile(run, 0.99) or 0.0 for run in runs)
            mean = statistics.mean(map(statistics.mean, runs))
            for name, value in (("mean", mean), ("p99", p99[policy])):
                figures[f"x{speed:g}_{policy}_ttft_{name}"] = figure(value, "ms", digits=1)
        ours = p99.get("predicted_ttft", 0.0)
        met = met and all(ours < p99[policy] for policy in BEATEN if policy in p99)
    return {"bench": "routing-simulated", "met": met, "figures": figures}
