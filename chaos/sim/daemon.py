"""A host's state daemon in virtual time: the real store of blocks on memory that is only counted.

A block's bytes are 16 that stand for its identity; its size is what the budget is charged. Its
links are datagrams between processes, which may be lost, repeated and reordered by faults; what
the store makes of them is the daemon's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from msgspec import Struct

from relume.engine_shim.kv_stream import messages as m
from relume.engine_shim.kv_stream.errors import Refusal
from relume.engine_shim.kv_stream.fingerprint import Fingerprint, usable
from relume.engine_shim.state_daemon.arena import Arena
from relume.engine_shim.state_daemon.extents import Extents
from relume.engine_shim.state_daemon.file_tier import FileTier
from relume.engine_shim.state_daemon.service import Service
from relume.engine_shim.state_daemon.store import BlockStore

if TYPE_CHECKING:
    from relume.chaos.sim.worker import Host

EXPIRE_S = 10.0


class CountedArena(Arena):
    """Memory of which each extent has 16 bytes."""

    def __init__(self, budget: int) -> None:
        self._extents = Extents(budget)
        self._limit = self._extents.capacity
        self._spare = True
        self._bytes: dict[int, bytearray] = {}

    def host_short(self) -> bool:
        return False

    def allocate(self, length: int) -> int | None:
        if not self.fits(length):
            return None
        offset = self._extents.allocate(length)
        if offset is not None:
            self._bytes[offset] = bytearray(16)
        return offset

    def view(self, offset: int, length: int) -> memoryview:
        return memoryview(self._bytes[offset])

    def read(self, offset: int, length: int) -> memoryview:
        return memoryview(self._bytes[offset])

    def release(self, offset: int) -> int:
        self._bytes.pop(offset, None)
        return self._extents.release(offset)

    def trim(self) -> int:
        return 0

    def resident(self) -> int:
        return self.used

    def close(self) -> None:
        self._bytes.clear()


class CountedFile(FileTier):
    """A file of which each image of `image` bytes has 16. The `disk` outlives the daemon."""

    def __init__(self, budget: int, image: int, disk: Disk) -> None:
        self._extents = Extents(budget)
        self._images: dict[int, bytes] = {}
        self._image = image
        self._disk = disk

    def write(self, image: memoryview) -> int | None:
        offset = None if self._disk.full else self._extents.allocate(self._image)
        if offset is None:
            return None
        self._images[offset] = bytes(image)
        self._disk.used = self.used
        return offset

    def read(self, offset: int, length: int) -> bytes:
        return self._images[offset]

    def release(self, offset: int) -> int:
        self._images.pop(offset, None)
        freed = self._extents.release(offset)
        self._disk.used = self.used
        return freed

    def close(self) -> None:
        self._images.clear()


class Disk:
    """A host's. `used`: bytes of its daemon's file; `full`: nothing more can be written."""

    def __init__(self) -> None:
        self.used = 0
        self.full = False


class Putting(Struct, frozen=True):
    """Blocks of one engine for one holder, sent together."""

    writer: str
    epoch: int
    incarnation: int
    fingerprint: Fingerprint
    pieces: tuple[m.Piece, ...]
    data: tuple[bytes, ...]


class Put(Struct, frozen=True):
    """The answer: which life of the daemon, up to which block it has each request, and what it
    refused with (request, attempt, code)."""

    boot: str
    reached: dict[tuple[str, int], int]
    refused: tuple[tuple[str, int, str], ...]


class SimDaemon:
    """One process of it. `on_change` is called when there is something to tell its agent."""

    def __init__(self, host: Host, epoch: int, budget: int, file_budget: int = 0) -> None:
        self.host = host
        self.process = host.loop.process(f"{host.name}.daemon")
        self.arena = CountedArena(budget)
        self.file_budget = file_budget
        self.store = BlockStore(self.arena)
        if file_budget:
            host.disk.used = 0
            cold = CountedFile(file_budget, host.spec.block_bytes, host.disk)
            self.store = BlockStore(self.arena, cold, cold_after_s=0.0)
        self.service = Service(self.store, host.name, epoch, b"", host.loop.time)
        self.service.boot = f"{host.random.getrandbits(64):016x}"
        self.on_change: Callable[[], None] = lambda: None
        self._expiring()

    @property
    def boot(self) -> str:
        """The name of this life."""
        return self.service.boot

    def _expiring(self) -> None:
        now = self.host.loop.time()
        if self.store.expire(now):
            self.on_change()
        self.process.call_at(now + EXPIRE_S, self._expiring)

    # --- messages, in its process --------------------------------------------------------------

    def put(self, what: Putting, answer: Callable[[Put], None]) -> None:
        """Take blocks."""
        reached: dict[tuple[str, int], int] = {}
        refused = []
        now = self.host.loop.time()
        hello = m.Hello(m.VERSION, what.writer, what.epoch, what.incarnation, "writer", b"")
        try:
            self.service.fence(hello)
        except Refusal as refusal:
            refused = [(piece.request, piece.attempt, refusal.code) for piece in what.pieces]
        else:
            for piece, data in zip(what.pieces, what.data, strict=True):
                try:
                    place = self.store.put(
                        what.writer, what.fingerprint, piece, memoryview(data), now
                    )
                    reached[piece.request, piece.attempt] = place.blocks
                except Refusal as refusal:
                    refused.append((piece.request, piece.attempt, refusal.code))
        answer(Put(self.boot, reached, tuple(refused)))
        self.on_change()

    def ask(self, request: str, fingerprint: Fingerprint, answer: Callable[[int], None]) -> None:
        """How many blocks of `request` can be had without a gap?"""
        self.store.touch(request, self.host.loop.time())
        positions, theirs = self.store.position(request)
        if theirs is None or usable(fingerprint, theirs) != "same" or not positions:
            answer(0)
        else:
            answer(min(position.blocks for position in positions))

    def get(
        self, request: str, first: int, count: int, answer: Callable[[int, bool], None]
    ) -> None:
        """`answer(blocks, corrupt)`: so many of those wanted are good; behind them lies a
        damaged one."""
        store = self.store
        store.touch(request, self.host.loop.time())
        run = store.run(request, 0, 0, first, count)
        for number, content in enumerate(run):
            if store.contents.verified(content) is None:
                store.discard(request, 0, 0, first + number)
                self.on_change()
                answer(number, True)
                return
            store.served(content.length)
        answer(len(run), False)

    def drop(self, request: str, attempt: int, moved: bool = False) -> None:
        """The request ended, or is held by others now."""
        self.store.drop(request, attempt, moved)
        self.on_change()

    # --- faults --------------------------------------------------------------------------------

    def corrupt(self, blocks: int, random: Random) -> int:
        """Flip bits in so many held blocks; how many there were."""
        held = sorted(self.arena._bytes)
        for offset in random.sample(held, min(blocks, len(held))):
            self.arena._bytes[offset][random.randrange(16)] ^= 1 << random.randrange(8)
        return min(blocks, len(held))

    def shrink(self, share: float) -> None:
        """Leave it this share of its budget; what is beyond it goes, least worth first."""
        self.store.keep_to(share)
        self.on_change()

    def kill(self) -> None:
        """kill -9."""
        self.host.end(self.process)
