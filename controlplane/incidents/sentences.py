"""An incident in words: one sentence, and lines for a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from relume.controlplane.incidents.incident import Incident, IncidentInfo
from relume.events.log.entries import KINDS
from relume.events.vocabulary import SegmentSkipped
from relume.events.vocabulary.enums import DeathReason, FailedPart, FailureClass, RecoveryTier


def summary(record: Incident) -> str:
    """What failed, what became of the streams, and how long clients waited."""
    parts = [_what(record), *_served(record), *_streams(record)]
    if record.longest_gap_us >= 0:
        parts.append(f"longest gap {_seconds(record.longest_gap_us)}")
    if record.longest_ttft_us >= 0:
        parts.append(f"longest time to a first token {_seconds(record.longest_ttft_us)}")
    return "; ".join(parts) + "."


def info(record: Incident) -> IncidentInfo:
    """The record without its lists, with its sentence."""
    facts = {name: getattr(record, name) for name in IncidentInfo.__struct_fields__}
    return IncidentInfo(**{**facts, "summary": summary(record)})


def whole(record: Incident) -> Incident:
    """The record with its sentence."""
    return replace(record, summary=summary(record))


def _what(record: Incident) -> str:
    name, reason = record.name, record.reason
    if record.part == FailedPart.DAEMON:
        return f"the state daemon of {name} was lost ({reason})"
    if record.part == FailedPart.GATEWAY:
        return f"gateway {name} was lost ({reason})"
    if record.part == FailedPart.STREAM and record.events[0].type == KINDS[SegmentSkipped]:
        return f"a segment of {name}'s stream in the log is damaged ({reason})"
    if record.part == FailedPart.STREAM:
        return f"{name} wrote a record that cannot be read ({reason})"
    return _of_worker(record)


def _of_worker(record: IncidentInfo) -> str:
    name, reason = record.name, record.reason
    match record.failure:
        case FailureClass.CRASH if reason == DeathReason.KILLED:
            return f"{name}'s engine was killed"
        case FailureClass.CRASH if reason == DeathReason.EXIT:
            return f"{name}'s engine exited"
        case FailureClass.CRASH:
            return f"{name}'s engine died"
        case FailureClass.HANG:
            return f"{name}'s engine hung"
        case FailureClass.HOST:
            return f"{name}'s host was lost ({reason})"
        case FailureClass.ERRORS:
            return f"{name} failed requests ({reason})"
        case FailureClass.SLOW:
            return f"{name} was slow ({reason})"
        case FailureClass.REPORTS:
            return f"reports of {name}'s engine could not be read ({reason})"
        case FailureClass.CORRUPTION:
            return f"{name} computed wrong results ({reason})"
        case _:
            return f"connections to {name} broke ({reason})"


def _served(record: IncidentInfo) -> Iterator[str]:
    if record.failure == FailureClass.CORRUPTION:
        least = "at least " if record.served_at_least else ""
        number = _count(record.served, "request") if record.served or least else "no request"
        yield f"{least}{number} got tokens from it since its last right answers"
        if record.not_released:
            yield record.not_released


def _excluded(record: IncidentInfo) -> str:
    """Until when the worker of an unreadable stream gets no requests."""
    if record.open:
        return "it gets no requests until an operator trusts it again"
    if record.capacity_back_ms < 0:
        return "it left before an operator trusted it again"
    after_ms = max(record.capacity_back_ms - record.noticed_ms, 0)
    return f"{record.trusted_by or 'an operator'} trusted it again after {after_ms / 1000:.0f} s"


def _streams(record: IncidentInfo) -> Iterator[str]:
    if record.part == FailedPart.STREAM:
        yield _excluded(record)
        return
    if record.part == FailedPart.DAEMON:
        if record.streams:
            yield f"{_count(record.streams, 'checkpoint')} moved{_on(record, 'to')}"
        else:
            yield "no checkpoint moved"
        return
    if not record.streams:
        yield "no stream was touched"
        return
    if record.continued:
        yield f"{_count(record.continued, 'stream')} continued{_on(record, 'on')}"
    if record.failed:
        yield f"{record.failed} failed"
    if record.left:
        yield f"{_count(record.left, 'client')} left"
    waiting = record.streams - record.continued - record.failed - record.left
    if waiting > 0:
        yield f"{waiting} not continued yet"


def _on(record: IncidentInfo, word: str) -> str:
    names = sorted(record.workers, key=lambda name: (-record.workers[name], name))
    if len(names) > 4:
        names = [*names[:3], f"{len(names) - 3} more"]
    return f" {word} {_and(names)}" if names else ""


def _and(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _seconds(microseconds: int) -> str:
    return f"{microseconds / 1e6:.2f} s"


def timeline(record: IncidentInfo) -> Iterator[tuple[str, str]]:
    """When each thing happened, counted from its beginning."""
    moments = (
        ("noticed", record.noticed_ms),
        ("decided", record.decided_ms),
        ("first stream on", record.first_stream_on_ms),
        ("last stream on", record.last_stream_on_ms),
        ("capacity back", record.capacity_back_ms),
        ("first token", record.first_token_ms),
        ("at its peak", record.peak_ms),
    )
    yield "began", clock(record.began_ms)
    for name, at_ms in moments:
        if name.endswith("stream on") and record.part == FailedPart.DAEMON:
            name = name.replace("stream on", "checkpoint moved")
        if at_ms >= 0:
            yield name, f"+{max(at_ms - record.began_ms, 0) / 1000:.2f} s"
        elif name == "capacity back":
            yield name, "not yet" if record.open else "no: the worker left, or failed again"


_TIERS = {
    RecoveryTier.SOFTWARE_CRASH: "software crash, the host's memory had them",
    RecoveryTier.DEVICE_LOST: "device lost, the host's memory had a part of them",
    RecoveryTier.COLD: "cold, read from files",
}


def _recovered(record: IncidentInfo) -> Iterator[tuple[str, str]]:
    """What the next engine and the streams had of the failed engine's state."""
    if record.tier:
        total = record.reused_bytes + record.reloaded_bytes
        reloaded = f"{_mebibytes(record.reloaded_bytes)} of {_mebibytes(total)} reloaded"
        yield "weights", f"{reloaded} ({_TIERS[record.tier]})"
    if record.moved_bytes:
        yield "KV blocks restored", _mebibytes(record.moved_bytes)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def lines(record: Incident) -> Iterator[str]:
    """The whole record, for a terminal."""
    yield summary(record)
    yield ""
    subject = record.subject.removeprefix(f"{record.part}:")
    yield f"incident {record.id}: {record.failure} of {record.part} {subject}"
    for name, when in timeline(record):
        yield f"  {name:<22} {when}"
    for name, what in _recovered(record):
        yield f"  {name:<22} {what}"
    if record.touched:
        yield ""
        yield from _table(record)
    if record.served_requests:
        yield ""
        yield "requests that got tokens from it since its last right answers:"
        for served in record.served_requests:
            yield f"  {served.request}  {served.state}"
        if record.served > len(record.served_requests):
            yield f"  and {record.served - len(record.served_requests)} more"
    if record.events:
        yield ""
        yield "events, in the order of the log:"
        for event in record.events:
            since_ms = event.at_ms - record.began_ms
            about = f"{event.request}: " if event.request else ""
            yield f"  {event.id:>10} {since_ms:>+8} ms  {event.stream:<8} {about}{event.text}"
    if record.events_left_out:
        about = " about single streams: `relume why REQUEST`"
        yield f"  and {record.events_left_out} more{'' if record.part == FailedPart.STREAM else about}"


def _table(record: Incident) -> Iterator[str]:
    moved = record.part == FailedPart.DAEMON
    yield "checkpoints that moved:" if moved else "streams:"
    for stream in record.touched:
        parts = [f"{stream.delivered} tokens delivered"] if stream.delivered else []
        if stream.to:
            parts.append(f"to {', '.join(stream.to)}")
        if stream.on_ms >= 0:
            parts.append(f"on after {(stream.on_ms - stream.touched_ms) / 1000:.2f} s")
        if stream.restored:
            parts.append(f"{stream.restored} tokens restored")
        if stream.longest_gap_us >= 0 and not moved:
            parts.append(f"longest gap {_seconds(stream.longest_gap_us)}")
        yield f"  {stream.request}  {stream.state}: {', '.join(parts)}".rstrip(": ")
    if record.streams > len(record.touched):
        yield f"  and {record.streams - len(record.touched)} more"


def clock(at_ms: int) -> str:
    """A time for people; `-` if there is none."""
    if at_ms <= 0:
        return "-"
    return f"{time.strftime('%H:%M:%S', time.localtime(at_ms / 1000))}.{at_ms % 1000:03d}"


def find(records: Iterable[Incident], wanted: str) -> Incident | None:
    """The record with this id or number (from 1, in order), or the latest about what is named:
    w0, w0:1, daemon:w0, stream:w0, r0."""
    known = list(records)
    for record in reversed(known):
        if wanted in (record.id, record.subject):
            return record
    for record in reversed(known):
        if wanted == record.name:
            return record
    if wanted.isdecimal() and 0 < int(wanted) <= len(known):
        return known[int(wanted) - 1]
    return None
