"""`relume-chaos live`: runs scenarios on real processes, one after the other, and judges them.

Exit status 0: every run passed; 1: one was broken or proves nothing; 2: no run was possible.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from relume.chaos.live import applicable, sets
from relume.chaos.live.judging import Judging
from relume.chaos.live.live_fleet import Turn, run_in
from relume.chaos.live.processes.shared_fixture import Bed
from relume.chaos.scenario.problems import ScenarioError
from relume.chaos.scenario.schedule import expand
from relume.events.log.errors import RelumeError, first_cause

MOST_SHOWN = 8


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="relume-chaos live", description=__doc__)
    parser.add_argument("scenarios", nargs="*", help="names of the library, or YAML files")
    parser.add_argument(
        "--set", choices=sets.SETS, help="ci: a few scenarios; nightly: all that can run"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument(
        "--seeds", type=int, default=1, help="number of seeds of each scenario (default 1)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write logs and report.json to this directory"
    )
    parser.add_argument(
        "--faults", action="store_true", help="list which faults can strike, and exit"
    )
    return parser.parse_args(argv)


def say(text: str) -> None:
    print(text, flush=True)


async def run_all(runs: Sequence[tuple[str, int]], out: Path | None) -> list[sets.Line]:
    """Run each scenario with its seed in one shared fixture. A fleet comes up while the one before
    it comes to rest; another process judges runs while the next ones run."""
    running: list[asyncio.Task[sets.Line]] = []
    with Judging() as judging:
        async with Bed(say) as bed, asyncio.TaskGroup() as tasks:
            before = None
            for name, seed in runs:
                turn = Turn()
                one = _one(bed, name, seed, out, before, turn, judging)
                running.append(tasks.create_task(one))
                await turn.struck.wait()
                before = turn
    return [task.result() for task in running]


async def _one(
    bed: Bed,
    name: str,
    seed: int,
    out: Path | None,
    before: Turn | None,
    turn: Turn,
    judging: Judging,
) -> sets.Line:
    began = time.monotonic()
    scenario = sets.scenario_of(name)
    title = f"{scenario.name} {seed}"
    say(f"{title}: begins")
    schedule = expand(scenario, seed, sets.schedule_folder(name))
    folder = out / f"{scenario.name}-{seed}" if out is not None else None
    run = await run_in(
        bed, scenario, seed, schedule=schedule, folder=folder,
        say=lambda text: say(f"{title}: {text}"), before=before, turn=turn,
    )  # fmt: skip
    took_s = round(time.monotonic() - max(began, before.gone_s if before else 0.0), 1)
    command = f"relume-chaos live {name} --seed {seed}"
    judged = await judging.judge(run, folder, command)
    result, wrong = judged.result, judged.wrong
    fired = tuple(f"{one.what} {one.target} at {one.at_ns / 1e9:.1f} s" for one in run.fired)
    line = sets.Line(
        scenario=scenario.name,
        seed=seed,
        result=result,
        wrong=wrong,
        fired=fired,
        outcomes=sets.outcomes_of(run),
        took_s=took_s,
    )
    shown = result if not wrong else ("inconclusive" if result == "passed" else result).upper()
    say(f"{title}: {shown}; {took_s} s, judged in {judged.took_s:.1f} s; {dict(line.outcomes)}")
    for text in wrong[:MOST_SHOWN]:
        say(f"  {text}")
    if len(wrong) > MOST_SHOWN:
        say(f"  and {len(wrong) - MOST_SHOWN} more")
    return line


def _summarise(lines: Sequence[sets.Line], took_s: float) -> None:
    failed = [line for line in lines if line.wrong]
    load = os.getloadavg()[2]
    say(f"\n{len(lines)} runs in {took_s / 60:.1f} minutes, {len(failed)} failed; load {load:.1f}")
    for name in dict.fromkeys(line.scenario for line in lines):
        times = " ".join(f"{line.took_s:.0f}" for line in lines if line.scenario == name)
        say(f"  {name:<28} {times} s")
    for line in failed:
        say(f"failed: relume-chaos live {line.scenario} --seed {line.seed}: {line.wrong[0]}")
    for name, why in sets.impossible().items():
        say(f"not applicable: {name}: {'; '.join(why)}")


def main(argv: Sequence[str]) -> int:
    """Run the command line `argv`."""
    given = _arguments(argv)
    if given.faults:
        say("\n".join(applicable.listed()))
        return 0
    names = [*given.scenarios, *(sets.names_of(given.set) if given.set else ())]
    runs = [(name, given.seed + more) for name in names for more in range(given.seeds)]
    if not runs:
        print("name scenarios, or a --set", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    try:
        lines = asyncio.run(run_all(runs, given.out))
    except (ScenarioError, RelumeError, OSError, ExceptionGroup) as error:
        if not isinstance(cause := first_cause(error), ScenarioError | RelumeError | OSError):
            raise
        print(f"relume-chaos live: {cause}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; everything is stopped", file=sys.stderr)
        return 130
    _summarise(lines, time.monotonic() - began)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "report.json").write_bytes(msgspec.json.encode(lines))
    return 1 if any(line.wrong for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
