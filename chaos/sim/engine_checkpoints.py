"""An engine's part in checkpoints: it sends full blocks to their holders, and restores them before it
schedules a request.

It follows `block_plan` and `rank_blocks` in `engine_shim/checkpoints/`. Blocks leave a few times per
second, all of one holder together. Both directions share the hosts' links, which carry one transfer
after the other. The engine resends blocks that a holder did not confirm.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping

from relume.chaos.sim.daemon import DaemonSlot, Put, Putting
from relume.chaos.sim.engine.worker_engine import EngineProcess, Submit, Track
from relume.chaos.sim.world.network_card import carried
from relume.chaos.sim.world.virtual_loop import Process
from relume.chaos.sim.world.worker_machine import Machine
from relume.engine_shim.checkpoints.block_plan import BLOCKS_A_STEP
from relume.engine_shim.checkpoints.daemon_links import LinkConfig
from relume.engine_shim.checkpoints.link.block_stream import REQUESTED_BYTES
from relume.engine_shim.checkpoints.link.image import digest_of
from relume.engine_shim.checkpoints.link_probe import LEAST_PROBED, MOST_PROBED, PROBE_BYTES
from relume.engine_shim.checkpoints.lookup import OTHERS_S
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import AttemptMode, RestoreFailure
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.fingerprint import Fingerprint

STREAM_S = 0.1
"""Interval at which blocks leave."""
CONFIRM_S = 1.0
"""Time after which unconfirmed blocks are sent again."""
CHUNK_BYTES = 16 << 20
LIMITS = LinkConfig()


class Flow:
    """A request's blocks to one holder. `next`: the first unsent block; `had`: the holder has all
    blocks before it; `since`: time of the first unconfirmed send."""

    __slots__ = ("boot", "had", "next", "refused", "since")

    def __init__(self) -> None:
        self.next = self.had = 0
        self.since = 0.0
        self.boot = ""
        self.refused = False


class Pump:
    """State of one attempt's blocks. While it decodes, the next work is due at decode step `due` of
    its engine: until then its holders have confirmed all blocks."""

    __slots__ = ("due", "flows", "former", "reading", "restored")

    def __init__(self, targets: tuple[str, ...]) -> None:
        self.flows = {endpoint: Flow() for endpoint in targets}
        self.former: tuple[str, ...] = ()
        self.due = self.restored = 0
        self.reading: Reading | None = None


class EngineCheckpoints:
    """One for an engine. `holders`: state daemons of all hosts, by their endpoint."""

    def __init__(self, engine: EngineProcess, holders: Mapping[str, DaemonSlot]) -> None:
        self.engine = engine
        self.machine = engine.machine
        self.loop = engine.machine.loop
        self.holders = holders
        spec = self.machine.spec
        self.size = spec.block_bytes
        self.block = spec.block_tokens
        self.fingerprint = fingerprint_of(self.machine)
        self.loads: deque[Reading] = deque()
        """Current restores, in the order they began; with exact links only the first one moves."""
        self._ticking = False
        self._measured: set[str] = set()

    # --- requests come and go ------------------------------------------------------------------

    def arrived(self, track: Track, submit: Submit) -> bool:
        """Add an attempt; True: it waits for its blocks, then calls `submit` with the restored ones."""
        what = track.what
        track.pump = Pump(what.checkpoint)
        if what.checkpoint:
            self._tick_soon()
        if not what.restore:
            return False
        track.pump.reading = Reading(self, track, submit)
        return True

    def restoring(self, track: Track) -> bool:
        """Whether a restore of its blocks is in progress."""
        return track.pump is not None and track.pump.reading is not None

    def finished(self, track: Track, ended: bool) -> None:
        """The attempt left the engine; if it `ended` by itself, holders may drop its blocks."""
        if ended and track.pump is not None:
            for endpoint in (*track.pump.flows, *track.pump.former):
                self._drop(track, endpoint, False)

    def _drop(self, track: Track, endpoint: str, moved: bool) -> None:
        holder = self.holders.get(endpoint)
        if holder is not None and holder.daemon is not None:
            what, daemon = track.what, holder.daemon
            self.machine.wires.post(
                self.engine.process, daemon.process, "holder", daemon.drop, what.request,
                what.attempt, moved,
            )  # fmt: skip

    def retarget(self, track: Track, endpoints: tuple[str, ...]) -> None:
        """Change the holders of a running attempt; former ones drop once the new ones have all blocks."""
        pump = track.pump
        flows = {endpoint: pump.flows.get(endpoint) or Flow() for endpoint in endpoints}
        former = (*pump.flows, *pump.former)
        pump.former = tuple(e for e in dict.fromkeys(former) if e not in flows)
        pump.flows, pump.due = flows, 0
        self._tick_soon()

    def has_envelope(self, endpoint: str) -> bool:
        """Whether the state daemon there lives: then it has the requests of its blocks."""
        slot = self.holders.get(endpoint)
        daemon = slot.daemon if slot is not None else None
        return daemon is not None and daemon.process.alive and not daemon.process.halted

    # --- out -----------------------------------------------------------------------------------

    def _tick_soon(self) -> None:
        if not self._ticking:
            self._ticking = True
            self.engine.process.call_at(self.loop.time() + STREAM_S, self._tick)

    def _tick(self) -> None:
        """Send the blocks filled since."""
        self._ticking = False
        engine, now = self.engine, self.loop.time()
        engine.step()
        wanted: dict[str, list[tuple[Track, int, int]]] = {}
        full_links: dict[str, bool] = {}
        active, block = False, self.block
        decoded, running = engine.decoded(), engine.engine.running
        for track in engine.tracks.values():
            pump = track.pump
            if pump is None or not pump.flows or track.leaving:
                continue
            active = True
            joined, confirmed = track.joined, True
            if joined < 0:
                sequence = running.get(track.name)
                full = sequence.computed // block if sequence is not None else 0
            elif pump.due > decoded:
                continue
            else:
                what = track.what
                tokens = min(track.base + decoded - joined, what.output_tokens)
                full = (what.prompt_tokens + tokens - 1) // block
            for endpoint, flow in pump.flows.items():
                if flow.had == flow.next >= full or flow.refused:
                    continue
                confirmed = False
                taken = full_links.get(endpoint)
                if taken is None:
                    taken = full_links[endpoint] = self._full(endpoint, now)
                if taken:
                    continue
                if flow.next > flow.had and now - flow.since > CONFIRM_S:
                    flow.next = flow.had
                last = min(full, flow.next + BLOCKS_A_STEP)
                if flow.next < last:
                    wanted.setdefault(endpoint, []).append((track, flow.next, last))
                    if flow.next == flow.had:
                        flow.since = now
                    flow.next = last
            if pump.former and full and all(f.had >= full for f in pump.flows.values()):
                for endpoint in pump.former:
                    self._drop(track, endpoint, True)
                pump.former = ()
            if confirmed and joined >= 0 and not pump.former:
                pump.due = (full + 1) * block - track.what.prompt_tokens - track.base + joined + 1
        for endpoint, blocks in wanted.items():
            self._send(endpoint, blocks, now)
        if active:
            self._tick_soon()

    def _full(self, endpoint: str, now: float) -> bool:
        """Whether the links to a holder are busy until the next tick."""
        holder = self.holders.get(endpoint)
        if holder is None or not self.machine.settings.exact_links:
            return False
        return max(self.machine.links.out, holder.machine.links.back) > now + STREAM_S

    def _send(self, endpoint: str, blocks: list[tuple[Track, int, int]], now: float) -> None:
        holder = self.holders.get(endpoint)
        if holder is None or holder.daemon is None:
            return
        pieces, data = [], []
        for track, first, last in blocks:
            what = track.what
            for index in range(first, last):
                image, digest = image_of(what.content_id, index)
                pieces.append(
                    m.Piece(
                        request=what.request,
                        child=0,
                        rank=0,
                        index=index,
                        attempt=what.attempt,
                        offset=0,
                        length=self.size,
                        total=self.size,
                        digest=digest,
                        priority=what.priority,
                    )
                )
                data.append(image)
        putting = Putting(
            writer=self.machine.name, epoch=self.machine.directory.state.epoch, incarnation=self.engine.incarnation,
            fingerprint=self.fingerprint, pieces=tuple(pieces), data=tuple(data),
        )  # fmt: skip
        there = carried(self.machine.links, holder.machine.links, len(pieces) * self.size, now)
        mine, theirs = self.engine.process, holder.daemon

        def answer(put: Put) -> None:
            self.machine.wires.post(theirs.process, mine, "holder", self._confirmed, endpoint, put)

        mine.call_at(
            there,
            self.machine.wires.post,
            mine,
            theirs.process,
            "holder",
            theirs.put,
            putting,
            answer,
        )

    def _confirmed(self, endpoint: str, put: Put) -> None:
        tracks = self.engine.tracks
        for request, attempt, code in put.refused:
            track = tracks.get(f"{request}/{attempt}")
            flow = track.pump.flows.get(endpoint) if track is not None else None
            if flow is not None:
                if code == "digest":
                    flow.next = flow.had
                else:
                    flow.refused = True
        for (request, attempt), blocks in put.reached.items():
            track = tracks.get(f"{request}/{attempt}")
            flow = track.pump.flows.get(endpoint) if track is not None else None
            if flow is None or track is None:
                continue
            track.pump.due = 0
            if put.boot != flow.boot:
                anew, flow.boot = bool(flow.boot), put.boot
                if anew:
                    flow.next = flow.had = 0  # it lost everything
            if blocks > flow.had:
                flow.had, flow.since = blocks, self.loop.time()
                flow.next = max(flow.next, blocks)
            self._measure(endpoint, request, blocks)

    def _measure(self, endpoint: str, request: str, blocks: int) -> None:
        """Read a holder's blocks once, if they suffice to measure its link."""
        holder = self.holders[endpoint]
        count = min(blocks, max(PROBE_BYTES // self.size, 1))
        known = endpoint in self._measured or len(self._measured) == MOST_PROBED
        if known or holder.daemon is None or not self.machine.settings.measured_links:
            return
        if count * self.size < LEAST_PROBED:
            return
        self._measured.add(endpoint)
        theirs, mine, began = holder.daemon, self.engine.process, self.loop.time()

        def came(blocks: int) -> None:
            if blocks:
                took_us = max(round((self.loop.time() - began) * 1e6), 1)
                self.engine.tell(
                    v.LinkMeasured(
                        self.engine.incarnation, endpoint, blocks * self.size, took_us
                    )
                )  # fmt: skip

        def answer(blocks: int, _corrupt: bool) -> None:
            size = blocks * self.size
            there = carried(holder.machine.links, self.machine.links, size, self.loop.time(), True)
            theirs.process.call_at(
                there, self.machine.wires.post, theirs.process, mine, "holder", came, blocks
            )

        self.machine.wires.post(
            mine, theirs.process, "holder", theirs.get, request, 0, count, answer
        )


class Reading:
    """One attempt's restore: it queries all holders, then fetches from the best."""

    def __init__(self, parts: EngineCheckpoints, track: Track, submit: Submit) -> None:
        self._parts = parts
        self._track = track
        self._submit = submit
        self._found: dict[str, int] = {}
        self._over = False
        self._began = parts.loop.time()
        self._holder = ""
        self._good = self._bytes = 0
        self._wanted = 0
        engine = parts.engine.process
        for endpoint in track.what.restore:
            holder = parts.holders.get(endpoint)
            if holder is None or holder.daemon is None:
                continue
            daemon = holder.daemon

            def answer(
                blocks: int, endpoint: str = endpoint, process: Process = daemon.process
            ) -> None:
                parts.machine.wires.post(process, engine, "holder", self._held, endpoint, blocks)

            parts.machine.wires.post(
                engine, daemon.process, "holder", daemon.ask, track.what.request,
                parts.fingerprint, answer,
            )  # fmt: skip
        engine.call_at(self._began + LIMITS.lookup_timeout_s, self._chosen)

    def _held(self, endpoint: str, blocks: int) -> None:
        if self._over or self._holder:
            return
        self._found[endpoint] = blocks
        if len(self._found) == len(self._track.what.restore):
            self._chosen()
        elif blocks:
            self._parts.engine.process.call_at(self._parts.loop.time() + OTHERS_S, self._chosen)

    def _chosen(self) -> None:
        """The best holder that answered; on a tie, the first one named."""
        if self._over or self._holder:
            return
        parts, what = self._parts, self._track.what
        tokens = what.prompt_tokens + (what.delivered if what.mode == AttemptMode.CONTINUE else 0)
        most = (tokens - 1) // parts.block
        best = max(what.restore, key=lambda e: self._found.get(e, 0))
        blocks = min(self._found.get(best, 0), most)
        if not blocks or self._track.leaving:
            silent = [endpoint for endpoint in what.restore if endpoint not in self._found]
            if silent and not self._track.leaving and not self._found.get(best):
                self._holder = silent[0]
                self._failed("unreachable")
            else:
                self._end()
            return
        self._holder, self._wanted = best, blocks
        parts.loads.append(self)
        if not parts.machine.settings.exact_links or len(parts.loads) == 1:
            self._begin()

    def _begin(self) -> None:
        """Begin to move its blocks."""
        parts, what = self._parts, self._track.what
        best, blocks = self._holder, self._wanted
        self._began = parts.loop.time()
        parts.engine.tell(
            v.RestoreStarted(
                incarnation=parts.engine.incarnation,
                request=what.request,
                child=0,
                attempt=what.attempt,
                holder=best,
                tokens=blocks * parts.block,
            )
        )
        parts.engine.process.call_at(self._began + LIMITS.load_timeout_s, self._late)
        self._fetch()

    def _fetch(self) -> None:
        parts, what = self._parts, self._track.what
        holder = parts.holders[self._holder]
        if holder.daemon is None:
            return
        daemon, engine, first = holder.daemon, parts.engine.process, self._good
        at_once = REQUESTED_BYTES if parts.machine.settings.exact_links else CHUNK_BYTES
        count = min(self._wanted - first, max(at_once // parts.size, 1))

        source = holder.machine

        def answer(blocks: int, corrupt: bool) -> None:
            local = source is parts.machine
            sender = source.local if local else source.links
            receiver = sender if local else parts.machine.links
            there = carried(sender, receiver, blocks * parts.size, parts.loop.time(), True)
            daemon.process.call_at(
                there, parts.machine.wires.post, daemon.process, engine, "holder", self._came, first,
                blocks, corrupt,
            )  # fmt: skip

        parts.machine.wires.post(
            engine, daemon.process, "holder", daemon.get, what.request, first, count, answer
        )

    def _came(self, first: int, blocks: int, corrupt: bool) -> None:
        if self._over or first != self._good:
            return
        self._good += blocks
        if corrupt:
            self._failed("corrupt")
        elif not blocks:
            self._failed("gone")
        elif self._good < self._wanted:
            self._fetch()
        else:
            parts, what = self._parts, self._track.what
            took_us = max(round((parts.loop.time() - self._began) * 1e6), 1)
            parts.engine.tell(
                v.RestoreDone(
                    incarnation=parts.engine.incarnation,
                    request=what.request,
                    child=0,
                    attempt=what.attempt,
                    holder=self._holder,
                    tokens=self._good * parts.block,
                    bytes=self._good * parts.size,
                    duration_us=took_us,
                )
            )
            self._end()

    def _late(self) -> None:
        if not self._over:
            self._failed("unreachable")

    def _failed(self, reason: str) -> None:
        parts, what = self._parts, self._track.what
        parts.engine.tell(
            v.RestoreFailed(
                incarnation=parts.engine.incarnation,
                request=what.request,
                child=0,
                attempt=what.attempt,
                holder=self._holder,
                tokens=self._good * parts.block,
                reason=RestoreFailure(reason),
            )
        )
        self._end()

    def _end(self) -> None:
        self._over = True
        loads = self._parts.loads
        if self in loads:
            first = loads[0] is self
            loads.remove(self)
            if first and loads and self._parts.machine.settings.exact_links:
                loads[0]._begin()
        self._track.pump.reading = None
        self._submit(self._track, self._good * self._parts.block)


_IMAGES: dict[tuple[str, int], tuple[bytes, bytes]] = {}
_MAX_IMAGES = 200_000


def image_of(content_id: str, index: int) -> tuple[bytes, bytes]:
    """Substitute for the bytes of a request's block, and its digest."""
    found = _IMAGES.get((content_id, index))
    if found is None:
        if len(_IMAGES) >= _MAX_IMAGES:
            _IMAGES.clear()
        image = hashlib.blake2b(f"{content_id}:{index}".encode(), digest_size=16).digest()
        found = _IMAGES[content_id, index] = image, digest_of(image)
    return found


def fingerprint_of(machine: Machine) -> Fingerprint:
    """Fingerprint of the KV blocks that engines of the machine write."""
    spec = machine.spec
    return Fingerprint(
        model=machine.model,
        build="sim",
        dtype="float16",
        block_size=spec.block_tokens,
        layers=1,
        kv_heads=1,
        head_size=1,
        piece_bytes=spec.kv_bytes_per_token,
    )
