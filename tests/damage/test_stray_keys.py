"""Whatever keys come into a replica's stream, no reader loses a segment, and each names all stray keys."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from relume.chaos.sim.etcd.key_store import Txn
from relume.chaos.sim.etcd.members import SimEtcd
from relume.chaos.sim.world.network import Wires
from relume.chaos.sim.world.virtual_loop import VirtualLoop
from relume.events.etcd.keys import Keys
from relume.events.etcd.reader.log_reader import EtcdReader
from relume.events.log.damaged_segment import DamagedSegment
from relume.events.log.errors import BrokenChain, CorruptSegment
from relume.events.log.segment import GENESIS, Segment, pack, unpack

APPEND = 0


class Stream:
    """The stream `r.r0` of an etcd: its writer and a person write keys."""

    def __init__(self, etcd: SimEtcd) -> None:
        self.segments: list[Segment] = []
        self.strays: set[int] = set()
        self.is_damaged = False
        self._etcd = etcd
        self._keys = Keys(etcd.config.prefix)

    def append(self) -> None:
        """The writer's next segment, unless a key stands there."""
        last = self.segments[-1] if self.segments else None
        seq = len(self.segments) + 1
        if self.is_damaged or seq in self.strays:
            return
        previous, first = (last.hash, last.last + 1) if last is not None else (GENESIS, 1)
        data = pack("r.r0", 2, seq, first, previous, [b"one"])
        self._put(seq, data)
        self.segments.append(unpack(data))

    def put(self, ahead: int) -> None:
        """A key that is no segment, so far from the last one."""
        end = len(self.segments)
        seq = max(0, end + ahead)
        if 0 < seq <= end + 1 and seq not in self.strays:
            self.is_damaged = True
        else:
            self.strays.add(seq)
        self._put(seq, b"no segment")

    def _put(self, seq: int, value: bytes) -> None:
        put = (self._keys.segment("r.r0", seq), value, 0)
        self._etcd.store.txn(Txn(compares=(), puts=(put,), reads=(), otherwise=()))


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from((*[APPEND] * 6, 2, 2, 3, 4, -99, 1, -1)), min_size=1, max_size=24),
    st.integers(0, 24),
)
def test_a_reader_finds_all_segments_or_ends(steps: list[int], place: int) -> None:
    loop = VirtualLoop(1)
    etcd = SimEtcd(loop, Wires(loop))
    stream, named = Stream(etcd), set[int]()

    def note(damaged: DamagedSegment) -> None:
        named.add(damaged.seq)

    async def read() -> list[Segment]:
        reader: EtcdReader = etcd.reader(loop.process("p0"))
        reader.on_damage = note
        groups = [g for g in await reader.read() if g.segments]
        if groups and not stream.is_damaged:
            middle = groups[place % len(groups)]
            head = middle.segments[0]
            for heads in (None, {"r.r0": (head.seq, head.hash, head.last + 1)}):
                rest = await reader.read(middle.revision, heads=heads)
                assert [s for g in rest for s in g.segments] == stream.segments[head.seq :]
        return [s for g in groups for s in g.segments]

    for step in steps:
        if step == APPEND:
            stream.append()
        else:
            stream.put(step)
    found: list[Segment] | None = []

    async def main() -> None:
        nonlocal found
        try:
            found = await read()
        except (CorruptSegment, BrokenChain):
            found = None

    try:
        loop.run(main(), 60.0)
    finally:
        etcd.close()
    if stream.is_damaged:
        assert found is None
    else:
        assert found == stream.segments and named == stream.strays
