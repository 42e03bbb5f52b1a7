"""Validators bench: what judging a log costs, promise by promise, from 10^4 to 10^6 events.

The log is that of a fleet that loses engines (`relume.chaos.bench.eventlog.replay_log`), with
checkpoints, restores and a client's record for each request. The bench times each promise in CPU
time of this process, as `check_all` runs it. The first promise that needs it decodes and folds
the log and groups it by request, once, so only the sum counts. The bench times `decoding`
separately before. Linear means: an event costs no more in a long log than in a short one.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

from relume.chaos.bench.bench_figures import figure
from relume.chaos.bench.eventlog.replay_log import FleetLog
from relume.chaos.bench.eventlog.replay_speed import read
from relume.chaos.validators import CHECKS, untracked
from relume.chaos.validators.records import ClientRecord, Log, events_of
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import DropReason, RequestOutcome

DESCRIPTION = "judging logs of 10^4 to 10^6 events: time per event, promise by promise"
SIZES = (10_000, 100_000, 1_000_000)
MOST_GROWTH = 1.5
"""Maximum cost of an event in the longest log, as a multiple of that in the shortest."""
BUDGET = 1 << 40


class WithCheckpoints(FleetLog):
    """A log in which each attempt also restores something and has a checkpoint holder."""

    def write(self, records: int) -> None:
        """Like the parent's, until the traffic has ended."""
        super().write(records)
        self._concurrent = 0
        while self._open:
            self._round()

    def _begin(self) -> None:
        super()._begin()
        for engine in self._engines:
            started = v.StateDaemonStarted(
                worker=engine.name, boot="b", epoch=1, address="", budget_bytes=BUDGET
            )
            self._tell(f"w.{engine.name}", started)

    def _place(
        self,
        request: str,
        attempt: int,
        cause: str,
        prompt: int,
        delivered: int,
        marks: tuple[int, ...],
    ) -> None:
        super()._place(request, attempt, cause, prompt, delivered, marks)
        worker = self._open[request].worker
        engine = next(e for e in self._engines if e.name == worker)
        life = engine.incarnation
        started = v.RestoreStarted(
            incarnation=life, request=request, child=0, attempt=attempt, holder="unix:/s", tokens=16
        )
        done = v.RestoreDone(
            incarnation=life,
            request=request,
            child=0,
            attempt=attempt,
            holder="unix:/s",
            tokens=prompt,
            bytes=999,
            duration_us=9,
        )
        held = v.CheckpointAcknowledged(
            holder=worker,
            boot="b",
            request=request,
            child=0,
            attempt=attempt,
            blocks=1,
            tokens=16,
            bytes=640,
        )
        dropped = v.CheckpointDropped(
            holder=worker, boot="b", request=request, child=0, reason=DropReason.FINISHED
        )
        self._tell(f"w.{worker}", started, done, held, dropped)


def clients_of(log: Log) -> list[ClientRecord]:
    """Client records of the completed requests of `log`."""
    found: list[ClientRecord] = []
    for at in events_of(log, "r."):
        if type(at.event) is v.RequestEnded:
            tokens = list(range(at.event.tokens))
            record = ClientRecord(
                request=at.event.request,
                status=200,
                outcome=RequestOutcome.COMPLETED,
                text="",
                token_count=len(tokens),
                finish="length",
            )
            record.tokens = record.starts = tokens
            record.asked, record.undisturbed = "the same", len(found) < 3
            found.append(record)
    return found


class NotJudged(RuntimeError):
    """A sound log broke promises, so no figure counts."""


def judge(records: int, seed: int = 1) -> tuple[int, dict[str, float]]:
    """Number of events of a log of about `records`, and CPU seconds of each promise on it.

    Raises NotJudged.
    """
    made = WithCheckpoints(seed, 3, 16, 48)
    made.write(records)
    groups = read(made.data)
    del made
    clients = clients_of(Log(groups))
    took: dict[str, float] = {}
    gc.collect()
    with untracked():
        began = time.process_time()
        log = Log(groups)
        events = sum(1 for _ in events_of(log))
        took["decoding"] = time.process_time() - began
        for promise, check in CHECKS.items():
            began = time.process_time()
            found = check(log, clients)
            took[promise] = time.process_time() - began
            if found:
                raise NotJudged(f"{found[0]}")
    return events, took


def run(argv: list[str]) -> dict[str, Any]:
    """Run it as the docstring says; `--quick`: up to 10^5 events."""
    parser = argparse.ArgumentParser(prog="relume-chaos bench validators", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 10^5 events")
    sizes = SIZES[:2] if parser.parse_args(argv).quick else SIZES
    each: dict[int, dict[str, float]] = {}
    figures: dict[str, Any] = {}
    for size in sizes:
        events, took = judge(size)
        each[size] = {name: 1e6 * seconds / events for name, seconds in took.items()}
        each[size]["all"] = sum(each[size].values())
        figures[f"all_at_{size}"] = figure(each[size]["all"], "us/event", None, 2)
    for name, us in each[sizes[-1]].items():
        figures[f"{name}_at_{sizes[-1]}"] = figure(us, "us/event", None, 3)
    grown = {name: us / max(each[sizes[0]][name], 0.05) for name, us in each[sizes[-1]].items()}
    worst = max(grown, key=lambda name: grown[name])
    figures["growth"] = figure(grown["all"], "ratio", MOST_GROWTH, 2)
    figures[f"growth_of_{worst}"] = figure(grown[worst], "ratio", None, 2)
    return {"bench": "validators", "met": grown["all"] <= MOST_GROWTH, "figures": figures}
