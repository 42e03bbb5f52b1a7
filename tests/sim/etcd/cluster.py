"""A loop, a network and simulated etcd, for tests of what reads and writes it."""

from relume.chaos.sim.etcd.members import SimEtcd
from relume.chaos.sim.world.network import Wires
from relume.chaos.sim.world.virtual_loop import VirtualLoop
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.log.codec import decode_all
from relume.events.log.segment import Chain

TTL_S = 8


class World:
    """A loop, a network and a cluster."""

    def __init__(self, members=1, seed=7, **config):
        self.loop = VirtualLoop(seed)
        self.wires = Wires(self.loop)
        names = [f"e{n}" for n in range(members)]
        self.etcd = SimEtcd(self.loop, self.wires, names, EtcdConfig(lease_ttl_s=TTL_S, **config))

    def run(self, name, work, until_s=3600.0):
        """Run `work(process)` in a process of that name."""
        process = self.loop.process(name)

        async def main():
            return await process.spawn(work(process))

        return self.loop.run(main(), until_s)

    def events(self, stream=""):
        return [
            event
            for group in self.etcd.groups()
            for segment in group.segments
            if not stream or segment.stream == stream
            for event in decode_all(segment.records)
        ]

    def chain(self):
        chain = Chain()
        for group in self.etcd.groups():
            for segment in group.segments:
                chain.check(segment)


def ticks(events):
    return [e.number for e in events if type(e) is v.Tick]
