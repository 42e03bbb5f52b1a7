"""A host's state daemon in virtual time: the real store of blocks on counted memory.

16 bytes stand for a block's identity; the budget is charged with its real size. Its links are
datagrams between processes, which faults may lose, repeat and reorder. The daemon's real code
handles them.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from msgspec import Struct

from relume.chaos.sim.world.worker_machine import Disk, Machine
from relume.engine_shim.checkpoints.daemon.service import Service
from relume.engine_shim.checkpoints.daemon.store.arena import Arena
from relume.engine_shim.checkpoints.daemon.store.block_store import BlockStore
from relume.engine_shim.checkpoints.daemon.store.extents import Extents
from relume.engine_shim.checkpoints.daemon.store.file_tier import FileTier
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.fingerprint import Fingerprint, usable
from relume.events.wire.kv.kv_errors import Refusal

EXPIRE_S = 10.0


class CountedArena(Arena):
    """Memory with 16 bytes per extent."""

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
    """A file with 16 bytes for each image of `image` bytes. The `disk` outlives the daemon."""

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


class Putting(Struct, frozen=True, kw_only=True):
    """Blocks of one engine for one holder, sent together."""

    writer: str
    epoch: int
    incarnation: int
    fingerprint: Fingerprint
    pieces: tuple[m.Piece, ...]
    data: tuple[bytes, ...]


class Put(Struct, frozen=True):
    """The answer: the daemon's life, the block up to which it has each request, and its refusals
    (request, attempt, code)."""

    boot: str
    reached: dict[tuple[str, int], int]
    refused: tuple[tuple[str, int, str], ...]


class SimDaemon:
    """One process of it. It calls `on_change` when its agent has something to report."""

    def __init__(self, machine: Machine, epoch: int, budget: int, file_budget: int = 0) -> None:
        self.machine = machine
        self.process = machine.loop.process(f"{machine.name}.daemon")
        self.arena = CountedArena(budget)
        self.file_budget = file_budget
        self.store = BlockStore(self.arena)
        if file_budget:
            machine.disk.used = 0
            cold = CountedFile(file_budget, machine.spec.block_bytes, machine.disk)
            self.store = BlockStore(self.arena, cold, cold_after_s=0.0)
        self.service = Service(self.store, machine.name, epoch, b"", machine.loop.time)
        self.service.boot = f"{machine.random.getrandbits(64):016x}"
        self.on_change: Callable[[], None] = lambda: None
        self._expiring()

    @property
    def boot(self) -> str:
        """The name of this life."""
        return self.service.boot

    def _expiring(self) -> None:
        now = self.machine.loop.time()
        if self.store.expire(now):
            self.on_change()
        self.process.call_at(now + EXPIRE_S, self._expiring)

    # --- messages, in its process --------------------------------------------------------------

    def put(self, what: Putting, answer: Callable[[Put], None]) -> None:
        """Take blocks."""
        reached: dict[tuple[str, int], int] = {}
        refused = []
        now = self.machine.loop.time()
        hello = m.Hello(
            version=m.VERSION,
            worker=what.writer,
            epoch=what.epoch,
            incarnation=what.incarnation,
            role="writer",
            nonce=b"",
        )
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
        """Number of gapless blocks of `request`."""
        self.store.touch(request, self.machine.loop.time())
        positions, theirs = self.store.position(request)
        if theirs is None or usable(fingerprint, theirs) != "same" or not positions:
            answer(0)
        else:
            answer(min(position.blocks for position in positions))

    def get(
        self, request: str, first: int, count: int, answer: Callable[[int, bool], None]
    ) -> None:
        """Read blocks. Calls `answer(blocks, corrupt)`: the number of good ones of the wanted
        blocks, and whether a damaged one comes next."""
        store = self.store
        store.touch(request, self.machine.loop.time())
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
        """The request ended, or has other holders now."""
        self.store.drop(request, attempt, moved)
        self.on_change()

    def held(self) -> dict[str, tuple[int, int]]:
        """Per request, the tokens held without a gap from the first on, and all bytes."""
        size = self.machine.spec.block_tokens
        return {
            request: (held.prefix * size, held.bytes)
            for request, holding in self.store._holdings.items()
            if (held := holding.sequences.get((0, 0))) is not None
        }

    # --- faults --------------------------------------------------------------------------------

    def corrupt(self, blocks: int, random: Random) -> int:
        """Flip bits in up to `count` held blocks; returns how many there were."""
        held = sorted(self.arena._bytes)
        for offset in random.sample(held, min(blocks, len(held))):
            self.arena._bytes[offset][random.randrange(16)] ^= 1 << random.randrange(8)
        return min(blocks, len(held))

    def shrink(self, share: float) -> None:
        """Shrink its budget to this share; blocks beyond it go, the least valuable first."""
        self.store.keep_to(share)
        self.on_change()

    def kill(self) -> None:
        """kill -9."""
        self.machine.end(self.process)


class DaemonSlot:
    """Runs a machine's state daemons, one after the other. `daemon`: the last one."""

    def __init__(self, machine: Machine, budget_bytes: int, file_bytes: int) -> None:
        self.machine = machine
        self.address = f"tcp://{machine.name}:6000"
        self.daemon: SimDaemon | None = None
        self._budgets = budget_bytes, file_bytes

    def start(self, epoch: int) -> SimDaemon:
        """Start a new, empty state daemon."""
        self.daemon = SimDaemon(self.machine, epoch, *self._budgets)
        self.daemon.process.clock_s = self.machine.clock_s
        return self.daemon
