"""An outcome made of a stored log of real workers: 56 streams, one engine killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from relume.chaos.outcome import FiredFault, History, Outcome
from relume.chaos.scenario.language import (
    Bound,
    Burst,
    Fault,
    Fixed,
    Fleet,
    Scenario,
    Traffic,
    When,
)
from relume.chaos.scenario.schedule import expand
from relume.chaos.validators.records import ClientRecord, Log, events_of
from relume.controlplane.replay.recorded_log import from_file
from relume.events import vocabulary as v
from relume.events.log.codec import encode
from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import GENESIS, pack, unpack

PATH = Path(__file__).parents[1] / "replay" / "logs" / "engine-killed.rlog"
MS = 1_000_000

SCENARIO = Scenario(
    name="recorded",
    about="Streams over four workers, one engine killed.",
    fleet=Fleet(workers=4, domains=4, checkpoint_mb=64),
    traffic=Traffic(arrivals=Burst(56, 1.0), lengths=Fixed(100, 150), requests=56),
    faults=(Fault(what="engine-kill", when=When(at_s=1.0), target="w0"),),
    expect=(
        Bound("requests", least=56),
        Bound("faults_fired", least=1),
        Bound("broken_streams", most=0),
    ),
)


def outcome(**changes: Any) -> Outcome:
    """What such a run left; `changes` to it."""
    groups = tuple(from_file(PATH).groups)
    log = Log(groups)
    times = [s.at_ms for g in groups for s in g.segments]
    arrivals = [at for at in events_of(log, "r.") if type(at.event) is v.RequestArrived]
    ends = {at.event.request: at for at in events_of(log) if type(at.event) is v.RequestEnded}
    dead = next(at for at in events_of(log) if type(at.event) is v.EngineDied)
    schedule = expand(SCENARIO, 7)
    histories = []
    for request, at in zip(schedule.requests, arrivals, strict=True):
        end = ends[at.event.request]
        tokens = list(range(end.event.tokens))
        record = ClientRecord(
            request=at.event.client_id,
            status=200,
            outcome="completed",
            text="x",
            token_count=len(tokens),
            finish="length",
        )
        record.tokens = record.starts = tokens
        record.content_id = "the same"
        record.gaps_ms = [end.event.longest_gap_us / 1000]
        sent = (at.at_ms - times[0]) * MS
        first = sent + end.event.ttft_us * 1000
        last = (end.at_ms - times[0]) * MS
        histories.append(
            History(request=request.name, record=record, sent_ns=sent, first_ns=first, last_ns=last)
        )
    calm = ClientRecord(
        request="fault-free",
        status=0,
        outcome="completed",
        text="x",
        token_count=len(tokens),
        finish="length",
        tokens=tokens,
    )
    calm.content_id, calm.undisturbed = "the same", True
    histories.append(History(request="fault-free", record=calm, sent_ns=0))
    struck = FiredFault(
        name="f0", what="engine-kill", target=dead.event.worker, at_ns=(dead.at_ms - times[0]) * MS
    )
    made = Outcome(
        kind="sim",
        scenario=SCENARIO,
        schedule=schedule,
        groups=groups,
        histories=tuple(histories),
        fired=(struck,),
        began_ms=times[0],
        ended_ns=(times[-1] - times[0]) * MS,
        drained=True,
    )
    return replace(made, **changes)


def told(groups: tuple[RevisionGroup, ...], stream: str, *events: Any) -> tuple[RevisionGroup, ...]:
    """The log with one transaction more: `events` in `stream`, under its owner's epoch."""
    last = [s for g in groups for s in g.segments if s.stream == stream]
    epoch = last[-1].epoch if last else groups[-1].revision + 1
    seq, first, previous = (
        (last[-1].seq + 1, last[-1].last + 1, last[-1].hash) if last else (1, 1, GENESIS)
    )
    records = [encode(event) for event in events]
    at_ms = max(s.at_ms for g in groups for s in g.segments)
    segment = unpack(pack(stream, epoch, seq, first, previous, records, at_ms))
    revision = groups[-1].revision + 1
    owners = () if last else ((stream, epoch),)
    return (*groups, RevisionGroup(revision, (segment,), owners))
