"""`relume-chaos live`: scenarios on real processes, one after the other, judged.

Exit status 0: every run passed; 1: one was broken or proves nothing; 2: nothing could be run.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from chaos.live import applicable, sets
from chaos.live.bed import Bed
from chaos.live.fleet import run_in
from chaos.runner.artifacts import keep
from chaos.runner.judge import judge
from chaos.scenario.problems import ScenarioError
from chaos.scenario.schedule import expand
from events.errors import RelumeError

MOST_TOLD = 8


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="relume-chaos live", description=__doc__)
    parser.add_argument("scenarios", nargs="*", help="names of the library, or YAML files")
    parser.add_argument("--set", choices=sets.SETS, help="ci: a few; nightly: all that can run")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seeds", type=int, default=1, help="so many seeds of each (default 1)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep logs and report.json here")
    parser.add_argument("--faults", action="store_true", help="which faults can strike, and stop")
    return parser.parse_args(argv)


def say(text: str) -> None:
    print(text, flush=True)


async def run_all(names: Sequence[str], seeds: Sequence[int], out: Path | None) -> list[sets.Line]:
    """Run every scenario with every seed in one bed."""
    lines: list[sets.Line] = []
    async with Bed(say) as bed:
        for name in names:
            for seed in seeds:
                lines.append(await _one(bed, name, seed, out))
    return lines


async def _one(bed: Bed, name: str, seed: int, out: Path | None) -> sets.Line:
    began = time.monotonic()
    scenario = sets.scenario_of(name)
    say(f"--- {name}, seed {seed}")
    schedule = expand(scenario, seed, sets.schedule_folder(name))
    folder = out / f"{scenario.name}-{seed}" if out is not None else None
    run = await run_in(bed, scenario, seed, schedule=schedule, folder=folder, say=say)
    verdict = judge(run)
    wrong = sets.wrong_of(run, verdict)
    if folder is not None:
        keep(folder, run, verdict, f"relume-chaos live {name} --seed {seed}")
    took_s = round(time.monotonic() - began, 1)
    fired = tuple(f"{one.what} {one.target} at {one.at_ns / 1e9:.1f} s" for one in run.fired)
    line = sets.Line(
        scenario.name, seed, verdict.result, wrong, fired, sets.outcomes_of(run), took_s
    )
    result = (
        "passed"
        if not wrong
        else ("inconclusive" if verdict.result == "passed" else verdict.result).upper()
    )
    say(f"{result} in {took_s} s; {dict(line.outcomes)}")
    for text in wrong[:MOST_TOLD]:
        say(f"  {text}")
    if len(wrong) > MOST_TOLD:
        say(f"  and {len(wrong) - MOST_TOLD} more")
    return line


def _told(lines: Sequence[sets.Line], took_s: float) -> None:
    failed = [line for line in lines if line.wrong]
    say(f"\n{len(lines)} runs in {took_s / 60:.1f} minutes, {len(failed)} failed")
    for name in dict.fromkeys(line.scenario for line in lines):
        times = " ".join(f"{line.took_s:.0f}" for line in lines if line.scenario == name)
        say(f"  {name:<28} {times} s")
    for line in failed:
        say(f"failed: relume-chaos live {line.scenario} --seed {line.seed}: {line.wrong[0]}")
    for name, why in sets.impossible().items():
        say(f"not applicable: {name}: {'; '.join(why)}")


def main(argv: Sequence[str]) -> int:
    """Run what `argv` asks for."""
    given = _arguments(argv)
    if given.faults:
        say("\n".join(applicable.listed()))
        return 0
    names = [*given.scenarios, *(sets.names_of(given.set) if given.set else ())]
    if not names:
        print("name scenarios, or a --set", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seeds = range(given.seed, given.seed + given.seeds)
    began = time.monotonic()
    try:
        lines = asyncio.run(run_all(names, seeds, given.out))
    except (ScenarioError, RelumeError, OSError) as error:
        print(f"relume-chaos live: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; everything is stopped", file=sys.stderr)
        return 130
    _told(lines, time.monotonic() - began)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "report.json").write_bytes(msgspec.json.encode(lines))
    return 1 if any(line.wrong for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
