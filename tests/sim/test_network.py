"""The simulated network: order, cuts, deaths, datagrams, and the doors of gateways."""

import asyncio

import pytest
from msgspec import structs

from relume.chaos.sim.message_ports import Ask, Stretch
from relume.chaos.sim.world.endpoints import AnswerSender
from relume.chaos.sim.world.link_rules import Rule
from relume.chaos.sim.world.network import Refused, Wires
from relume.chaos.sim.world.virtual_loop import NS, VirtualLoop


@pytest.fixture
def loop():
    made = VirtualLoop(seed=7)
    yield made
    made.close()


class Heard:
    """What came, and when."""

    def __init__(self, loop):
        self._loop = loop
        self.what = []
        self.at_s = []

    def __call__(self, *args):
        self.what.append(args[0] if len(args) == 1 else args)
        self.at_s.append(self._loop.time())


def connected(loop, kind="gateway"):
    wires = Wires(loop)
    gateway, engine = loop.process("r0"), loop.process("w0.engine")
    wires.serve("w0:8000", engine, "the engine")
    return wires, gateway, engine, Heard(loop)


async def line(wires, gateway, kind="gateway"):
    end, what = await wires.connect(gateway, "w0:8000", kind)
    assert what == "the engine"
    return end


def test_a_connection_delivers_in_order_even_when_segments_are_lost(loop):
    wires, gateway, _, heard = connected(loop)

    async def main():
        wires.shape(Rule(one="r0", other="w0", kind="", both=True, loss=0.5))
        end = await line(wires, gateway)
        for number in range(50):
            end.send(heard, number)
        await asyncio.sleep(60)

    loop.run(main())
    assert heard.what == list(range(50))
    assert heard.at_s[-1] > 0.2


def test_what_is_cut_comes_when_the_link_is_healed_and_other_kinds_are_not_cut(loop):
    wires, gateway, _, heard = connected(loop)

    async def main():
        end, other = await line(wires, gateway), await line(wires, gateway, "holder")
        cut = wires.cut("w0", kind="gateway")
        end.send(heard, "cut")
        other.send(heard, "not cut")
        await asyncio.sleep(5)
        assert heard.what == ["not cut"]
        wires.heal(cut)
        await asyncio.sleep(1)

    loop.run(main())
    assert heard.what == ["not cut", "cut"]


def test_a_one_way_cut_lets_the_other_direction_through(loop):
    wires, gateway, _, heard = connected(loop)

    async def main():
        end = await line(wires, gateway)
        wires.cut("w0", "r0", both=False)
        end.send(heard, "to the worker")
        end.peer.send(heard, "to the gateway")
        await asyncio.sleep(5)

    loop.run(main())
    assert heard.what == ["to the worker"]


def test_a_killed_process_resets_its_connections_behind_what_it_had_sent(loop):
    wires, gateway, engine, heard = connected(loop)

    async def main():
        end = await line(wires, gateway)
        end.lost = heard
        end.peer.send(heard, "last words")
        engine.kill()
        await asyncio.sleep(1)
        with pytest.raises(Refused):
            await wires.connect(gateway, "w0:8000", "gateway")

    loop.run(main())
    assert heard.what == ["last words", ("reset", "connection reset by peer")]


def test_a_death_behind_a_cut_is_not_seen(loop):
    wires, gateway, engine, heard = connected(loop)

    async def main():
        end = await line(wires, gateway)
        end.lost = heard
        cut = wires.cut("w0")
        engine.kill()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await wires.connect(gateway, "w0:8000", "gateway")
        assert heard.what == []
        wires.heal(cut)
        await asyncio.sleep(1)

    loop.run(main())
    assert heard.what == [("reset", "connection reset by peer")]


def test_a_stopped_process_is_silent_and_gets_all_when_it_continues(loop):
    wires, gateway, engine, heard = connected(loop)

    async def main():
        engine.stop()
        end = await line(wires, gateway)
        for number in range(3):
            end.send(heard, number)
        await asyncio.sleep(5)
        assert heard.what == []
        engine.go_on()
        await asyncio.sleep(1)

    loop.run(main())
    assert heard.what == [0, 1, 2]


def test_datagrams_are_lost_repeated_and_overtaken(loop):
    wires, gateway, engine, heard = connected(loop)

    async def main():
        wires.shape(
            Rule(one="", other="w0", kind="holder", both=True, loss=0.2, duplicate=0.2, reorder=0.3)
        )
        for number in range(300):
            wires.post(gateway, engine, "holder", heard, number)
            await asyncio.sleep(0.0001)
        await asyncio.sleep(1)

    loop.run(main())
    assert 200 < len(set(heard.what)) < 300
    assert len(heard.what) > len(set(heard.what))
    assert heard.what != sorted(heard.what)


def test_a_look_brings_a_stream_up_to_date_at_once_unless_it_is_cut(loop):
    wires, gateway, _, heard = connected(loop)
    heard.tokens = lambda stretch: heard(stretch.start)
    heard.end = heard

    async def main():
        end = await line(wires, gateway)
        engine = AnswerSender(end.peer, heard)
        engine.tokens(Stretch(start=0, count=1, first_ns=0, last_ns=0))
        end.look(lambda: engine.tokens(Stretch(start=1, count=1, first_ns=0, last_ns=0)))
        assert heard.what == [0, 1]
        end.look(lambda: engine.end("length"))
        assert heard.what == [0, 1]  # that comes in its own time
        await asyncio.sleep(1)
        assert heard.what == [0, 1, "length"]
        wires.cut("w0")
        end.look(lambda: engine.tokens(Stretch(start=2, count=1, first_ns=0, last_ns=0)))
        await asyncio.sleep(5)

    loop.run(main())
    assert heard.what == [0, 1, "length"]


@pytest.mark.parametrize("shaped_s", [0.0, 3.0])
def test_tokens_on_a_slow_link_come_one_after_the_other(loop, shaped_s):
    """Composed 168556: an engine's next stretch of tokens of ten seconds got one time, as if the client had
    waited as long. Each travels by itself. `shaped_s`: the link becomes slow after the first of them."""
    wires, gateway, _, heard = connected(loop)
    heard.tokens = heard
    made = Stretch(start=1, count=100, first_ns=NS, last_ns=10 * NS, longest_ns=NS // 2)

    async def main():
        end = await line(wires, gateway)
        await asyncio.sleep(shaped_s)
        wires.shape(Rule(one="w0", other="r0", kind="gateway", both=True, delay_s=0.3))
        await asyncio.sleep(12 - shaped_s)
        AnswerSender(end.peer, heard).tokens(made)
        await asyncio.sleep(1)

    loop.run(main())
    (came,) = heard.what
    late_ns = came.first_ns - made.first_ns
    assert 300_000_000 <= late_ns < 601_000_000
    assert came == structs.replace(made, first_ns=NS + late_ns, last_ns=10 * NS + late_ns)


@pytest.mark.parametrize("held_up_by", ["cut", "stop"])
def test_tokens_that_are_held_up_come_together_on_a_slow_link_too(loop, held_up_by):
    wires, gateway, _, heard = connected(loop)
    heard.tokens = heard
    made = Stretch(start=1, count=100, first_ns=NS, last_ns=2 * NS, longest_ns=NS // 2)

    async def main():
        end = await line(wires, gateway)
        wires.shape(Rule(one="w0", other="r0", kind="gateway", both=True, delay_s=0.3))
        await asyncio.sleep(2)
        cut = wires.cut("w0", kind="gateway") if held_up_by == "cut" else gateway.stop()
        AnswerSender(end.peer, heard).tokens(made)
        await asyncio.sleep(5)
        assert heard.what == []
        wires.heal(cut) if cut else gateway.go_on()
        await asyncio.sleep(1)

    loop.run(main())
    (came,) = heard.what
    assert came.first_ns == came.last_ns > 7 * NS and came.longest_ns == 0


class Client:
    def __init__(self):
        self.told = []

    def tokens(self, stretch):
        self.told.append(stretch)

    def end(self, finish, status=200):
        self.told.append(finish)

    def refused(self, status, message):
        self.told.append(status)

    def cut(self):
        self.told.append("cut")


class Gateway:
    """Says `count` tokens and keeps its callers."""

    def __init__(self):
        self.callers = {}
        self.gone = []

    def ask(self, what, caller):
        self.callers[what.client_id] = caller
        caller.tokens(Stretch(start=0, count=3, first_ns=1, last_ns=3))

    def flush(self, client_id):
        self.callers[client_id].tokens(Stretch(start=3, count=1, first_ns=4, last_ns=4))

    def hang_up(self, client_id):
        self.gone.append(client_id)


def test_a_client_and_a_gateway_hear_of_each_other_through_the_door(loop):
    wires = Wires(loop)
    clients, replica = loop.process("clients"), loop.process("r0")
    gateway, told, left, cut, late = Gateway(), Client(), Client(), Client(), Client()
    wires.serve("r0:8000", replica, gateway)
    door = wires.door("r0:8000")

    async def main():
        for name, client in (("c0", told), ("c1", left), ("c2", cut)):
            door.ask(Ask(client_id=name, content_id="q", prompt_tokens=4, output_tokens=4), client)
        await asyncio.sleep(1)
        door.flush("c0")
        gateway.callers["c0"].end("length")
        door.hang_up("c1")
        await asyncio.sleep(1)
        replica.kill()
        await asyncio.sleep(1)
        door.ask(Ask(client_id="c3", content_id="q", prompt_tokens=4, output_tokens=4), late)
        await asyncio.sleep(1)

    loop.run(_in(clients, main()))
    first, more = (
        Stretch(start=0, count=3, first_ns=1, last_ns=3),
        Stretch(start=3, count=1, first_ns=4, last_ns=4),
    )
    assert told.told == [first, more, "length"]
    assert (left.told, cut.told, late.told) == ([first], [first, "cut"], ["cut"])
    assert gateway.gone == ["c1"]


async def _in(process, work):
    await process.spawn(work)


def test_tokens_held_up_on_the_way_are_as_late_as_they_came(loop):
    wires = Wires(loop)
    clients, replica = loop.process("clients"), loop.process("r0")
    gateway, client = Gateway(), Client()
    wires.serve("r0:8000", replica, gateway)

    async def main():
        wires.door("r0:8000").ask(
            Ask(client_id="c0", content_id="q", prompt_tokens=4, output_tokens=4), client
        )
        rule = wires.cut("r0", "clients", both=False)
        await asyncio.sleep(5)
        wires.heal(rule)
        await asyncio.sleep(1)

    loop.run(_in(clients, main()))
    (stretch,) = client.told
    assert stretch.count == 3 and 5e9 < stretch.first_ns < 6e9


@pytest.mark.parametrize("leaves", [False, True])
def test_a_client_that_has_left_acknowledges_no_end(loop, leaves):
    wires = Wires(loop)
    clients, replica = loop.process("clients"), loop.process("r0")
    gateway, client = Gateway(), Client()
    wires.serve("r0:8000", replica, gateway)
    door = wires.door("r0:8000")

    async def main():
        door.ask(Ask(client_id="c0", content_id="q", prompt_tokens=4, output_tokens=4), client)
        await asyncio.sleep(1)
        gateway.callers["c0"].end("length")
        if leaves:
            door.hang_up("c0")  # the end is on its way
        await asyncio.sleep(1)

    loop.run(_in(clients, main()))
    there = gateway.callers["c0"]
    assert there.lost
    assert there.arrived_whole is not leaves
    assert ("length" in client.told) is not leaves
