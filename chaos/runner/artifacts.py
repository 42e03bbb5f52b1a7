"""A run in a folder: everything that is needed to judge and show it again.

scenario.yaml   the scenario, every value
schedule.json   its expansion by the seed
run.json        seed, commit, command, time, duration, error
former.rlog     the log that ended in the middle of the run, if one did
log.rlog        the log, as `relume replay --log FILE [--debug]` opens it
clients.jsonl   one client's history per line
fired.json      the faults that struck
verdict.json
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
from msgspec import Struct

from relume.chaos.outcome import FiredFault, History, Kind, Outcome
from relume.chaos.runner.cases import scenario_yaml
from relume.chaos.runner.judge import Verdict
from relume.chaos.scenario import scenario_reader as reading
from relume.chaos.scenario.schedule import Schedule
from relume.controlplane.replay.store import StoredLog, relume_version, save
from relume.events.log.errors import LogError
from relume.events.log.interface import LandedSegment, RevisionGroup

ROOT = Path(__file__).resolve().parents[2]
LOG, FORMER = "log.rlog", "former.rlog"


class BadRun(Exception):
    """A folder that holds no run, or a damaged one."""


class Run(Struct, frozen=True, kw_only=True):
    """`run.json`. `log_error`: why the log is not stored; empty: it is."""

    kind: Kind
    seed: int
    digest: str
    commit: str
    dirty: bool
    relume: str
    command: str
    began_ms: int
    ended_ns: int
    drained: bool
    error: str
    log_error: str = ""
    landed: tuple[LandedSegment, ...] = ()
    commands: tuple[tuple[str, str], ...] = ()


def keep(folder: Path, run: Outcome, verdict: Verdict, command: str) -> None:
    """Write `run` into `folder`; creates the folder and replaces its files.

    It leaves out a log that does not fold; then run.json says why. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scenario.yaml").write_text(scenario_yaml(run.scenario), encoding="utf-8")
    _write(folder / "schedule.json", run.schedule)
    lines = b"".join(msgspec.json.encode(history) + b"\n" for history in run.histories)
    (folder / "clients.jsonl").write_bytes(lines)
    _write(folder / "fired.json", run.fired)
    _write(folder / "verdict.json", verdict)
    note = f"{run.scenario.name}, seed {run.schedule.seed}, {verdict.result}"
    failure = ""
    try:
        save(folder / LOG, run.groups, None, f"chaos {run.kind}", note)
    except LogError as error:
        failure = f"{type(error).__name__}: {error}"
    if run.former:
        save(folder / FORMER, run.former, None, f"chaos {run.kind}", note)
    commit, dirty = checkout()
    record = Run(
        kind=run.kind,
        seed=run.schedule.seed,
        digest=run.schedule.digest(),
        commit=commit,
        dirty=dirty,
        relume=relume_version(),
        command=command,
        began_ms=run.began_ms,
        ended_ns=run.ended_ns,
        drained=run.drained,
        error=run.error,
        log_error=failure,
        landed=run.landed,
        commands=run.commands,
    )
    _write(folder / "run.json", record)


def outcome_in(folder: Path) -> tuple[Outcome, Run]:
    """The outcome stored in `folder`. Raises BadRun, ScenarioError, LogError, OSError."""
    if not (folder / "run.json").is_file():
        raise BadRun(f"{folder}: holds no run; give a folder that `relume-chaos run --out` wrote")
    try:
        run = msgspec.json.decode((folder / "run.json").read_bytes(), type=Run)
        schedule = msgspec.json.decode((folder / "schedule.json").read_bytes(), type=Schedule)
        fired = msgspec.json.decode(
            (folder / "fired.json").read_bytes(), type=tuple[FiredFault, ...]
        )
        lines = (folder / "clients.jsonl").read_bytes().splitlines()
        histories = tuple(msgspec.json.decode(line, type=History) for line in lines)
    except msgspec.MsgspecError as error:
        raise BadRun(f"{folder}: is damaged: {error}") from None
    groups: tuple[RevisionGroup, ...] = ()
    if not run.log_error:
        with StoredLog(folder / LOG) as log:
            groups = tuple(log.groups())
    former: tuple[RevisionGroup, ...] = ()
    if (folder / FORMER).is_file():
        with StoredLog(folder / FORMER) as log:
            former = tuple(log.groups())
    scenario = reading.load(folder / "scenario.yaml")
    outcome = Outcome(
        kind=run.kind,
        scenario=scenario,
        schedule=schedule,
        groups=groups,
        histories=histories,
        fired=fired,
        began_ms=run.began_ms,
        ended_ns=run.ended_ns,
        drained=run.drained,
        error=run.error,
        landed=run.landed,
        commands=run.commands,
        former=former,
    )
    return outcome, run


def checkout() -> tuple[str, bool]:
    """The commit of this code, and whether files differ from it; empty: unknown."""
    head = _git("rev-parse", "HEAD")
    return head, bool(head and _git("status", "--porcelain", "--untracked-files=no"))


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _write(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
