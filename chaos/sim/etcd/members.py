"""Simulated etcd: members that agree, die, stop, elect, run out of space.

    client --line--> member --(quorum, fsync)--> Store --> members --watches--> clients

A member is a process. A change of the store waits for a leader, a quorum and the disks of a
majority. If the leader is lost, the seed decides whether the current batch was agreed on; its
clients get no answer. The leader counts leases; a new leader gives each its whole TTL again. The
log's own code (`relume.events.etcd`) runs on top, unchanged.
"""

from __future__ import annotations

import os
import random
import tempfile
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc
from msgspec import Struct
from msgspec.structs import replace

from relume.chaos import damaged_bytes
from relume.chaos.call_recorder import CallRecorder
from relume.chaos.memory_folder import memory_folder
from relume.chaos.sim.etcd.key_store import (
    CLUSTER,
    DAMAGED,
    Event,
    Header,
    Lease,
    NoSuchLease,
    OutOfHistory,
    Range,
    Store,
    Txn,
)
from relume.chaos.sim.etcd.stubs import Failure, Reply, SimClient
from relume.chaos.sim.world.link_rules import host_of
from relume.chaos.sim.world.network import End, Wires
from relume.chaos.sim.world.virtual_loop import Process, VirtualLoop
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.keys import Keys, after_prefix
from relume.events.etcd.maintenance import Maintenance
from relume.events.etcd.reader import scan
from relume.events.etcd.reader.log_reader import EtcdReader
from relume.events.etcd.writer.backlog import Backlog
from relume.events.etcd.writer.stream_writer import EtcdWriter
from relume.events.log.interface import LandedSegment, RevisionGroup

FSYNC_S = 0.0005
PEER_S = 0.0002
"""A message between members."""
READ_S = 0.0003
"""A linearizable read."""
ELECTION_S = (1.1, 2.1)
"""Time from the loss of a leader to the next write (ETCD.md)."""
RESTART_S = 0.4
RETRY_S = 0.1
LEASE_CHECK_S = 0.5
PORT = 2379
_NO_SPACE = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded")
_NO_LEASE = Failure(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")


class Member:
    """One etcd process. `fsync_s`: duration of an fsync. `apart`: number of faults that keep it from
    taking part in raft, such as a cut from its peers. `is_silent`: its watches get no events."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self.fsync_s = FSYNC_S
        self.apart = 0
        self.is_silent = False
        self.applied = 1
        self.watchers: dict[tuple[bytes, bytes], dict[tuple[End, int], Reply]] = {}
        self.unsent: dict[tuple[End, int], list[Event]] = {}
        """Events that a silent member owes to its watches."""

    def send(self, watch: tuple[End, int], reply: Reply, events: list[Event]) -> None:
        """Send events to a watch; a silent member keeps them."""
        if self.is_silent:
            self.unsent.setdefault(watch, []).extend(events)
        else:
            reply(_watch_response(self, events=events))

    @property
    def runs(self) -> bool:
        """Whether it lives and is not stopped."""
        return self.process.alive and not self.process.stopped

    @property
    def votes(self) -> bool:
        """Whether it runs and takes part in raft."""
        return self.runs and not self.apart


Proposal = tuple[Member, str, Any, Reply]


class Backup(Struct, frozen=True):
    """What a cluster was at a revision. Leases are in a backup, with their whole TTL: (id, TTL)."""

    revision: int
    leases: tuple[tuple[int, int], ...]


class SimEtcd:
    """A cluster. `names`: those of its members, which are processes on hosts of their own.

    Call `close` at the end: it removes the temporary directory of the spools.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        wires: Wires,
        names: Sequence[str] = ("e0",),
        config: EtcdConfig | None = None,
    ) -> None:
        self.loop = loop
        self.store = Store()
        loop.stand_ins["segments"] = lambda: mock.patch.multiple(scan, unpack=self.store.unpack)
        self.no_space = False
        """Whether puts and lease grants are refused, as under the alarm NOSPACE."""
        self.may_be_restored = False
        """Whether the log may end, and another begin. Processes look at its id only then: it costs them
        calls."""
        self.log_number = 0
        """Counts restores and new logs: what was read under another number is of another state."""
        self.former: tuple[RevisionGroup, ...] = ()
        """The log that ended last."""
        self.on_new_state: list[Callable[[], None]] = []
        """Called at each change of `log_number`."""
        self._ended: tuple[RevisionGroup, ...] = ()
        self._began = 0
        """Revision at which the present log began."""
        self.elections = 0
        self.landed: list[LandedSegment] = []
        """Appends acknowledged to writers as durable (I13)."""
        self.recorder: CallRecorder | None = None
        """Records the calls of all clients, if it is there before them."""
        self.clock_ms: dict[tuple[int, str], int] = {}
        """As in `GroundTruth`."""
        self.observers: list[Callable[[int, bool], None]] = []
        """Called after each agreed batch, with its first revision and whether it changed the
        leader's stream."""
        self._spools = tempfile.TemporaryDirectory(prefix="relume-sim-", dir=memory_folder())
        addresses = tuple(f"{name}:{PORT}" for name in names)
        self.config = replace(config or EtcdConfig(), endpoints=addresses)
        self._leaders = Keys(self.config.prefix).stream("fleet")
        self._wires = wires
        self._random = random.Random(loop.random.random())
        self._members: dict[str, Member] = {}
        self._batch: list[Proposal] = []
        self._committing = False
        self._waiting: list[Proposal] = []
        self._electing = False
        self._logs: weakref.WeakKeyDictionary[Process, EtcdLog] = weakref.WeakKeyDictionary()
        self._writers: weakref.WeakKeyDictionary[Process, list[EtcdWriter]] = (
            weakref.WeakKeyDictionary()
        )
        self._leases = 0
        self._clock_errors: dict[str, int] = {}
        self._under_way: list[Proposal] = []
        for name in names:
            self._members[name] = Member(name, loop.process(name))
            self._serve_at(name)
        self.leader: Member | None = self._members[names[0]]
        self._check_leases(self.leader)

    def close(self) -> None:
        """Remove the spools."""
        self._spools.cleanup()

    # --- for those who use the log -------------------------------------------------------

    def log(self, process: Process) -> EtcdLog:
        """The log for `process`; all its uses share one client."""
        found = self._logs.get(process)
        if found is None:
            disk = f"{self._spools.name}/{host_of(process.name)}"
            config = replace(self.config, spool_dir=disk)
            found = self._logs[process] = EtcdLog(config, process.name)
            found.client = SimClient(config, self, process)
            if self.recorder is not None:
                self.recorder.watch(found.client, process.name)
        return found

    def writer(
        self, stream: str, process: Process, *, wait_s: float = 0.0, gather_s: float = 0.0
    ) -> EtcdWriter:
        """The real writer. Its process's spool survives a kill."""
        writer = self.log(process).writer(stream, wait_s=wait_s, gather_s=gather_s)
        writer.on_landed(self.landed.append)
        if not stream.startswith("w."):
            writer.on_landed(lambda landed: self._note_clock(landed, process))

        def dead() -> None:
            spool = writer._backlog._spool
            if spool is not None:
                spool.close()
                os.utime(spool.path, ns=(self.loop.now_ns, self.loop.now_ns))

        process.at_death.append(dead)
        self._writers.setdefault(process, []).append(writer)
        return writer

    def _note_clock(self, landed: LandedSegment, process: Process) -> None:
        """Note the error of the clock by which a segment was stamped, if it has changed."""
        error_ms = round(process.clock_s * 1000)
        if error_ms != self._clock_errors.get(landed.stream, 0):
            self._clock_errors[landed.stream] = error_ms
            self.clock_ms[landed.revision, landed.stream] = error_ms

    def spooling(self, process: Process) -> bool:
        """Whether a writer of the process has a spool file now."""
        return bool(self._spools_of(process))

    def tear(self, process: Process, rng: random.Random) -> None:
        """Leave each spool of the process as a loss of power in the middle of a write would: with a
        part of the batch that is not synced, or with bytes that were never written."""
        for backlog in self._spools_of(process):
            assert backlog._spool is not None
            batch = [record for record, _ in backlog._unwritten]
            damaged_bytes.tear(backlog._spool.path, batch, rng)

    def corrupt(self, process: Process, rng: random.Random) -> None:
        """Damage the last record of each spool of the process."""
        for backlog in self._spools_of(process):
            assert backlog._spool is not None
            damaged_bytes.corrupt(backlog._spool.path, rng)

    def _spools_of(self, process: Process) -> list[Backlog]:
        writers = self._writers.get(process, ())
        return [one._backlog for one in writers if one._backlog._spool is not None]

    def reader(self, process: Process) -> EtcdReader:
        """The real reader."""
        return self.log(process).reader()

    def maintenance(self, process: Process) -> Maintenance | None:
        """For the id of the log, if another one may take its place."""
        return Maintenance(self.log(process).client) if self.may_be_restored else None

    def groups(self) -> tuple[RevisionGroup, ...]:
        """The whole log."""
        return self.store.groups(self.config.prefix, self._began + 1)

    def groups_from(self, first: int, last: int = 0) -> tuple[RevisionGroup, ...]:
        """The log from revision `first` on, up to `last` if given."""
        return self.store.groups(self.config.prefix, first, last)

    @property
    def leader_name(self) -> str:
        """The member that leads; empty without one."""
        return self.leader.name if self.leader is not None else ""

    # --- faults --------------------------------------------------------------------------

    @property
    def members(self) -> tuple[str, ...]:
        """Names of all members."""
        return tuple(self._members)

    def process(self, name: str) -> Process:
        """The process of a member; each start makes a new one."""
        return self._members[name].process

    def kill(self, name: str) -> None:
        """kill -9 of a member."""
        member = self._members[name]
        member.watchers.clear()
        member.unsent.clear()
        member.process.kill()
        self._check()

    def start(self, name: str) -> None:
        """Restart a killed member with its disk, after a short delay."""
        member = self._members[name]
        if member.process.alive:
            return
        self.loop.call_later(RESTART_S, self._started, member)

    def stop(self, name: str) -> None:
        """SIGSTOP."""
        self._members[name].process.stop()
        self._check()

    def go_on(self, name: str) -> None:
        """SIGCONT."""
        self._members[name].process.go_on()
        self._check()

    def isolate(self, name: str) -> None:
        """The member takes no part in raft until `rejoin`; it still accepts connections. A leader
        loses its leadership, because no follower hears from it."""
        self._members[name].apart += 1
        self._check()

    def rejoin(self, name: str) -> None:
        """Undo `isolate`."""
        self._members[name].apart -= 1
        self._check()

    def is_dispensable(self, name: str) -> bool:
        """Whether the others are a majority without the member, which lives."""
        others = sum(m.votes for m in self._members.values() if m.name != name)
        return self._members[name].process.alive and 2 * others > len(self._members)

    def silence(self, name: str) -> None:
        """The member answers calls, and its watches get no events until `end_silence`."""
        self._members[name].is_silent = True

    def end_silence(self, name: str) -> None:
        """Send the events that the member's watches have not got."""
        member = self._members[name]
        member.is_silent = False
        for watching in member.watchers.values():
            for (end, number), reply in list(watching.items()):
                events = member.unsent.pop((end, number), None)
                if events:
                    reply(_watch_response(member, events=events))
        member.unsent.clear()

    def back_up(self) -> Backup:
        """A backup of now."""
        leases = self.store.leases.values()
        return Backup(self.store.revision, tuple((lease.id, lease.ttl_s) for lease in leases))

    def restore(self, backup: Backup) -> None:
        """End all members, and start them on what `backup` has. All connections break, and watches with
        them."""
        for name in self.members:
            self.kill(name)
        self._ended = self.groups()
        self._batch, self._waiting, self._under_way = [], [], []
        leases = (Lease(name, ttl_s, 0.0) for name, ttl_s in backup.leases)
        self.store.go_back(backup.revision, leases)
        self._new_state()
        for name in self.members:
            self.start(name)

    def log_begins(self) -> None:
        """A new log began with the present revision, in the place of what was restored."""
        self.former, self._ended = self._ended, ()
        self._began = self.store.revision
        self._new_state()

    def _new_state(self) -> None:
        self.log_number += 1
        self.landed.clear()
        self.clock_ms.clear()
        if self.recorder is not None:
            self.recorder.forget()
        for tell in self.on_new_state:
            tell()

    def damage(self, stream: str, ahead: int) -> bool:
        """Put bytes that are no segment `ahead` of the last segment of a stream; False without a leader.
        A segment that is written there meanwhile stays."""
        if self.leader is None or not self._has_leader:
            return False
        keys = Keys(self.config.prefix)
        there = self._segments(stream)
        numbers = [keys.segment_of(kv.key)[1] for kv in there if kv.value != DAMAGED]
        key = keys.segment(stream, max(numbers, default=0) + ahead)
        put = Txn(compares=((key, 0, False),), puts=((key, DAMAGED, 0),), reads=(), otherwise=())
        self._propose(self.leader, "Txn", put, lambda _answer: None)
        return True

    def is_damaged(self, stream: str) -> bool:
        """Whether bytes that are no segment stand in a stream: no writer begins there again."""
        return any(kv.value == DAMAGED for kv in self._segments(stream))

    def _segments(self, stream: str) -> Sequence[Any]:
        folder = Keys(self.config.prefix).stream(stream)
        return self.store.range(Range(key=folder, end=after_prefix(folder))).kvs

    def jump(self, seconds: float) -> None:
        """The leader's clock jumps forward: leases have so much less time left."""
        for lease in self.store.leases.values():
            lease.deadline_s -= seconds

    def slow(self, name: str, more_s: float) -> None:
        """Make each fsync of the member `more_s` longer; 0: normal."""
        self._members[name].fsync_s = FSYNC_S + more_s

    # --- calls, in the member's process --------------------------------------------------

    def line(self, process: Process, address: str) -> End | None:
        """A connection to the member at `address`; None when it is not running."""
        served = self._wires.served.get(address)
        if served is None:
            return None
        end = self._wires.line(process, served, "etcd")
        member = served.what
        end.peer.lost = lambda *_: self._client_gone(member, end.peer)
        return end

    def serve(self, end: End, method: str, request: Any, reply: Reply) -> None:
        """A client's message to a member."""
        assert end.served is not None
        member: Member = end.served.what
        if method in ("Range", "Txn", "LeaseGrant", "LeaseRevoke", "DeleteRange"):
            self._propose(member, method, request, reply)
        elif method == "watch":
            number, what = request
            self._watch(member, end, number, what, reply)
        elif method == "keep":
            self._keep(member, request[1], reply)
        else:
            for watching in member.watchers.values():
                watching.pop((end, request[0]), None)

    def _client_gone(self, member: Member, end: End) -> None:
        for watching in member.watchers.values():
            for key in [k for k in watching if k[0] is end]:
                del watching[key]

    def _keep(self, member: Member, lease: int, reply: Reply) -> None:
        if not self._has_leader or member.apart:
            return
        found = self.store.leases.get(lease)
        if found is None:
            reply(SimpleNamespace(TTL=0))
            return
        found.deadline_s = self.loop.time() + found.ttl_s
        reply(SimpleNamespace(TTL=found.ttl_s))

    # --- agreeing ------------------------------------------------------------------------

    @property
    def _quorum(self) -> bool:
        return 2 * sum(m.votes for m in self._members.values()) > len(self._members)

    @property
    def _has_leader(self) -> bool:
        return self.leader is not None and self.leader.votes and self._quorum

    def _propose(self, member: Member, method: str, request: Any, reply: Reply) -> None:
        if self.no_space and (method == "LeaseGrant" or (type(request) is Txn and request.puts)):
            reply(_NO_SPACE)
            return
        proposal = member, method, request, reply
        if member.apart:
            return  # it finds no leader, and drops the proposal
        if self.leader is None or not self._has_leader:
            # Without a leader some are dropped at once, some wait for the next one.
            if self._random.random() < 0.5:
                self._waiting.append(proposal)
            return
        if method == "Range" or (method == "Txn" and not (request.puts or request.drops)):
            process = self.leader.process
            process.call_at(self.loop.time() + READ_S, self._carry_out, *proposal)
            return
        self._batch.append(proposal)
        if not self._committing:
            self._next_batch()

    def _next_batch(self) -> None:
        """Write the batch to the disks of a majority, then agree on it."""
        assert self.leader is not None
        self._committing = True
        running = sorted(m.fsync_s for m in self._members.values() if m.votes)
        disk_s = running[len(self._members) // 2] if len(self._members) > 1 else running[0]
        disk_s *= 0.8 + 0.4 * self._random.random()
        peers_s = PEER_S if len(self._members) > 1 else 0.0
        at = self.loop.time() + disk_s + peers_s
        batch, self._batch = self._batch, []
        self._under_way = batch
        self.leader.process.call_at(at, self._commit, batch, self.elections)

    def _commit(self, batch: list[Proposal], term: int) -> None:
        if term != self.elections:
            return  # a former leader: the election has decided the batch
        leader = self.leader
        if leader is not None and leader.apart and self._quorum:
            at = self.loop.time() + RETRY_S  # decided by the election, or once it is back
            leader.process.call_at(at, self._commit, batch, term)
            return
        if not self._quorum:
            self._waiting[:0] = batch + self._batch
            self._batch, self._under_way, self._committing = [], [], False
            return
        self._under_way = []
        for proposal in batch:
            self._carry_out(*proposal)
        self._committing = False
        if self._batch:
            self._next_batch()

    def _carry_out(self, member: Member, method: str, request: Any, reply: Reply) -> None:
        store = self.store
        before = store.revision
        try:
            answer = self._answer(method, request)
        except OutOfHistory as error:
            answer = Failure(grpc.StatusCode.OUT_OF_RANGE, str(error))
        except NoSuchLease:
            answer = _NO_LEASE
        if store.revision > before:
            self._spread()
            of_leader = any(
                event.kv.key.startswith(self._leaders)
                for changed in store.changes[before:]
                for event in changed
            )
            for observer in self.observers:
                observer(before + 1, of_leader)
        if member.apart:
            return  # it does not apply what the others agreed on
        if member.runs:
            reply(answer)
        elif member.process.alive:
            member.process.call_soon(reply, answer)

    def _answer(self, method: str, request: Any) -> Any:
        store = self.store
        if method == "Range":
            return store.range(request)
        if method == "Txn":
            return store.txn(request)
        if method == "LeaseGrant":
            self._leases += 1
            lease = Lease(0x7000 + self._leases, max(request, 2), 0.0)
            lease.deadline_s = self.loop.time() + lease.ttl_s
            store.grant(lease)
            return SimpleNamespace(ID=lease.id, TTL=lease.ttl_s)
        if method == "LeaseRevoke":
            store.revoke(request)
        else:
            store.delete(*request)
        return SimpleNamespace(header=Header(store.revision))

    # --- watches -------------------------------------------------------------------------

    def _watch(self, member: Member, end: End, number: int, what: Any, reply: Reply) -> None:
        key, last, start = what
        store = self.store
        if start <= store.compacted:
            reply(_watch_response(member, compact_revision=store.compacted + 1, canceled=True))
            return
        member.watchers.setdefault((key, last), {})[end, number] = reply
        reply(_watch_response(member, created=True))
        if 0 < start <= member.applied:
            events = []
            for at, changed in store.changes_from(start):
                if at > member.applied:
                    break
                events += _within(changed, key, last)
            if events:
                member.send((end, number), reply, events)

    def _spread(self) -> None:
        """The store changed: each running member applies it and notifies its watchers."""
        now = self.loop.time()
        for member in self._members.values():
            if member is self.leader:
                self._apply(member)
            elif member.process.alive and not member.apart:
                member.process.call_at(now + PEER_S, self._apply, member)

    def _apply(self, member: Member) -> None:
        store, seen = self.store, member.applied
        if seen == store.revision:
            return
        member.applied = store.revision
        for (key, last), watching in member.watchers.items():
            if not watching:
                continue
            for at in range(seen + 1, store.revision + 1):
                if events := _within(store.changes[at - 1], key, last):
                    for watch, reply in list(watching.items()):
                        member.send(watch, reply, events)

    # --- leaders -------------------------------------------------------------------------

    def _serve_at(self, name: str) -> None:
        member = self._members[name]
        self._wires.serve(f"{name}:{PORT}", member.process, member)

    def _started(self, member: Member) -> None:
        if member.process.alive:
            return
        member.process = self.loop.process(member.name)
        member.applied = self.store.revision
        member.is_silent = False
        self._serve_at(member.name)
        self._check()

    def _check(self) -> None:
        """Members started or stopped."""
        leader = self.leader
        if leader is not None and not leader.process.alive:
            self.leader = leader = None
        if leader is not None and leader.votes:
            if self._quorum:
                self._settle()
            return
        if not self._electing and self._quorum:
            self._electing = True
            self.loop.call_later(self._random.uniform(*ELECTION_S), self._elect)

    def _elect(self) -> None:
        self._electing = False
        if (self.leader is not None and self.leader.votes) or not self._quorum:
            self._check()
            return
        running = [m for m in self._members.values() if m.votes]
        self.leader = running[int(self._random.random() * len(running))]
        self.elections += 1
        for lease in self.store.leases.values():
            lease.deadline_s = self.loop.time() + lease.ttl_s
        # The batch that the last leader had sent to its followers is agreed on whole or not at all.
        lost, self._under_way = self._under_way + self._batch, []
        self._batch, self._committing = [], False
        if self._random.random() < 0.5:
            self._waiting[:0] = lost
        self._check_leases(self.leader)
        self._settle()

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, []
        for proposal in waiting:
            self._propose(*proposal)
        for member in self._members.values():
            if member.votes:
                self._apply(member)

    def _check_leases(self, leader: Member) -> None:
        if self.leader is leader and leader.process.alive:
            self._expire()
            process, at = leader.process, self.loop.time() + LEASE_CHECK_S
            process.call_at(at, self._check_leases, leader)

    def _expire(self) -> None:
        now = self.loop.time()
        for lease in [x for x in self.store.leases.values() if x.deadline_s < now]:
            leader = self.leader
            assert leader is not None
            self._propose(leader, "LeaseRevoke", lease.id, lambda _: None)


def _within(events: Sequence[Event], key: bytes, last: bytes) -> list[Event]:
    if last:
        return [e for e in events if key <= e.kv.key < last]
    return [e for e in events if e.kv.key == key]


class WatchResponse(Struct, frozen=True, kw_only=True):
    """As `WatchResponse`."""

    header: Header
    events: Sequence[Event] = ()
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    fragment: bool = False
    cancel_reason: str = ""


def _watch_response(member: Member, **what: Any) -> WatchResponse:
    return WatchResponse(header=Header(member.applied, CLUSTER), **what)
