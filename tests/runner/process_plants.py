"""Bugs put into the product on purpose (`tests.runner.plants`): one party ends a process of another, or
keeps its streams waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relume.chaos.sim import replica_process
from relume.chaos.sim.agent import EngineHandle
from relume.controlplane.history.continuity.last_seen import LastSeen
from relume.controlplane.replica import death_notices
from relume.controlplane.replica.death_notices import NoticeWatch
from relume.controlplane.replica.loop import Replica
from relume.controlplane.replica.scheduler import Scheduler
from relume.engine_shim.agent.effects import EffectRunner
from relume.engine_shim.agent.engine_process.supervisor import Supervisor
from relume.engine_shim.agent.stream_ownership.log_change import LogChange
from relume.engine_shim.agent.unread_reports import UnreadReports
from relume.events.etcd.reader import log_reader, scan
from relume.events.etcd.writer.stream_writer import EtcdWriter
from relume.events.log import damaged_segment
from relume.events.log.codec import UnreadableRecord
from relume.events.log.errors import BrokenChain, Fenced
from relume.events.vocabulary.enums import EffectKind, RouteCause
from relume.events.wire.notices import DeathNotice

UNDER_LOAD = Path(__file__).parent.parent / "sim" / "new_logs" / "etcd-restored-under-load.yaml"
"""Engines have requests when a new log begins: in the library's scenario they end before."""

Set = Callable[[Any, str, Any], None]


def _record_ends_replicas(patch: Set) -> None:
    """a record that cannot be read ends each replica that follows the log"""
    seen = Replica._seen

    def strict(self: Replica, stream: str, position: int, event: Any) -> None:
        if type(event) is UnreadableRecord:
            raise BrokenChain(stream, 0, f"record {position}: {event.reason}")
        seen(self, stream, position, event)

    patch(Replica, "_seen", strict)


def _damage_ends_replicas(patch: Set) -> None:
    """a segment that cannot be read ends each replica, also one of a worker's stream"""
    for module in (damaged_segment, log_reader, scan):
        patch(module, "may_be_skipped", lambda stream: False)
    _stray_keys_end_replicas(patch)


def _stray_keys_end_replicas(patch: Set) -> None:
    """a key that is no segment ends each replica, also far ahead of what is written"""

    async def is_stray(self: scan.Scan, *key: object) -> bool:
        return False

    patch(log_reader, "is_stray", lambda seq, last: False)
    patch(scan.Scan, "_is_stray", is_stray)


def _absurd_notices_believed(patch: Set) -> None:
    """a notice of a death is believed, whatever its epoch is"""
    patch(death_notices, "refusal", lambda *given: "")


def _refused_notice_hides_death(patch: Set) -> None:
    """a replica that refused a notice of an engine ignores later ones of it"""
    died = NoticeWatch.died

    def noted(self: NoticeWatch, name: str, notice: DeathNotice) -> str:
        if why := died(self, name, notice):
            self._noticed[name] = notice.incarnation
        return why

    patch(NoticeWatch, "died", noted)


def _orders_for_others(patch: Set) -> None:
    """an agent restarts its engine when another worker's is to be restarted"""
    take = EffectRunner._take

    def all_of_them(self: EffectRunner, group: Any) -> None:
        take(self, group)
        for decided in self._events(group, "fleet", b"\xb1effects_decided/1"):
            for effect in decided.effects:
                if effect.kind == EffectKind.RESTART and effect.worker != self._worker:
                    self._supervisor.replace(decided.decision)

    patch(EffectRunner, "_take", all_of_them)


def _unread_engine_is_ended(patch: Set) -> None:
    """an agent ends its engine when it cannot read a report"""
    started, note = Supervisor._started, UnreadReports.note

    def begin(self: Any, *given: Any) -> None:
        started(self, *given)
        self._reports._unread.supervisor = self

    def strict(self: Any, reason: str, *given: Any) -> None:
        note(self, reason, *given)
        self.supervisor.replace(reason)

    patch(Supervisor, "_started", begin)
    patch(UnreadReports, "note", strict)


def _drained_streams_wait(patch: Set) -> None:
    """a stream that leaves a drained worker waits for a second although another worker is open"""
    assign, capacity = Scheduler.assign, Scheduler.capacity
    waiting: set[str] = set()

    def later(self: Scheduler, request: str, cause: RouteCause, delivered: int) -> Any:
        if cause == RouteCause.MOVED:
            waiting.add(request)
            return None
        return assign(self, request, cause, delivered)

    async def after_a_second(self: Scheduler, request: str, timeout_s: float) -> bool:
        if request in waiting:
            waiting.discard(request)
            await asyncio.sleep(1.0)
        return await capacity(self, request, timeout_s)

    patch(Scheduler, "assign", later)
    patch(Scheduler, "capacity", after_a_second)


def _agents_stay(patch: Set) -> None:
    """an agent waits for a new log for ever"""

    async def never(self: LogChange) -> None:
        await asyncio.Event().wait()

    patch(LogChange, "new_log", never)


def _new_log_ends_engines(patch: Set) -> None:
    """an agent that lost its log believes that another agent has its worker, and ends its engine"""

    async def fenced(self: EtcdWriter, error: Exception) -> Fenced:
        return Fenced(self.stream, self.epoch)

    patch(EtcdWriter, "_fence_of", fenced)


def _adopted_requests_uncounted(patch: Set) -> None:
    """an engine that a new log adopts does not report its requests again"""
    patch(EngineHandle, "request_statement", lambda self: None)


def _restored_log_continued(patch: Set) -> None:
    """a replica does not compare etcd with what it has read of the log"""

    async def unseen(self: LastSeen) -> None: ...

    patch(LastSeen, "check", unseen)


def _streams_end_with_log(patch: Set) -> None:
    """a replica whose log is gone exits at once"""

    async def at_once(*given: Any) -> None: ...

    patch(replica_process, "outlive_log", at_once)


BUGS: tuple[tuple[str, str, Callable[[Set], None]], ...] = (
    ("I20", "unreadable-record 0", _record_ends_replicas),
    ("I12", "segment-damaged 0", _damage_ends_replicas),
    ("I12", "stray-keys 0", _stray_keys_end_replicas),
    ("I26", "notices-absurd 0", _absurd_notices_believed),
    ("I26", "notices-absurd 0", _refused_notice_hides_death),
    ("I20", "rolling-restart 0", _orders_for_others),
    ("I20", "reports-unreadable 0", _unread_engine_is_ended),
    ("I20", "rolling-restart 0", _drained_streams_wait),
    ("I20", "etcd-restored 0", _agents_stay),
    ("I20", "etcd-restored 0", _new_log_ends_engines),
    ("I21", f"{UNDER_LOAD} 1", _adopted_requests_uncounted),
    ("I1", "etcd-restored 1", _restored_log_continued),
    ("bound:lost_streams", "etcd-restored 0", _streams_end_with_log),
)
"""Promises of which any finds it, scenario and seed of a run in which one did, and how to put it in."""
