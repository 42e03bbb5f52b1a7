"""A damaged segment in etcd costs no segment before it, and every one that is not read has a name."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from relume.chaos.sim.etcd.key_store import Txn
from relume.chaos.sim.etcd.members import SimEtcd
from relume.chaos.sim.world.network import Wires
from relume.chaos.sim.world.virtual_loop import VirtualLoop
from relume.events.etcd.keys import Keys
from relume.events.log.damaged_segment import DamagedSegment
from relume.events.log.errors import BrokenChain, CorruptSegment
from relume.events.log.segment import GENESIS, Segment, pack, unpack
from tests.damage.damaged_bytes import Damage, damage

OTHER = "w.w9"


def chain_of(stream: str, records: list[list[bytes]]) -> list[bytes]:
    values, previous, first = [], GENESIS, 1
    for number, some in enumerate(records, 1):
        values.append(pack(stream, 2, number, first, previous, some))
        segment = unpack(values[-1])
        previous, first = segment.hash, segment.last + 1
    return values


def read(streams: dict[str, list[bytes]]) -> tuple[dict[str, list[Segment]], list[DamagedSegment]]:
    """What the real reader makes of an etcd with these values. Raises CorruptSegment, BrokenChain."""
    loop = VirtualLoop(1)
    etcd = SimEtcd(loop, Wires(loop))
    keys, damaged = Keys(etcd.config.prefix), list[DamagedSegment]()
    found: dict[str, list[Segment]] = {stream: [] for stream in streams}

    async def main() -> None:
        for stream, values in streams.items():
            for seq, value in enumerate(values, 1):
                put = (keys.segment(stream, seq), value, 0)
                etcd.store.txn(Txn(compares=(), puts=(put,), reads=(), otherwise=()))
        reader = etcd.reader(loop.process("p0"))
        reader.on_damage = damaged.append
        for group in await reader.read():
            for segment in group.segments:
                found[segment.stream].append(segment)

    try:
        loop.run(main(), 60.0)
    finally:
        etcd.close()
    return found, damaged


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.lists(st.binary(max_size=60), min_size=1, max_size=3), min_size=1, max_size=6),
    st.sampled_from(("w.w0", "r.r0", "fleet")),
    st.integers(0, 5),
    damage(),
)
def test_all_before_a_damaged_segment_is_read_and_the_rest_has_a_name(
    records: list[list[bytes]], stream: str, place: int, damaged: Damage
) -> None:
    values = chain_of(stream, records)
    whole = [unpack(value) for value in values]
    at = place % len(values)
    is_same = damaged(values[at]) == values[at]
    values[at] = damaged(values[at])
    others = chain_of(OTHER, [[b"one"], [b"two"]])
    try:
        found, named = read({stream: values, OTHER: others})
    except (CorruptSegment, BrokenChain) as error:
        assert not is_same and not stream.startswith("w.")
        assert f"{at + 1} of {stream}" in str(error)
        return
    assert found[OTHER] == [unpack(value) for value in others]
    if is_same:
        assert found[stream] == whole and not named
        return
    assert stream.startswith("w.")
    assert found[stream] == whole[:at]
    assert {(one.stream, one.seq) for one in named} == {
        (stream, seq) for seq in range(at + 1, len(values) + 1)
    }
