"""The network between simulated processes: connections like TCP's, and datagrams.

A process named `w0.engine` is on host `w0`. Links are named by their ends (a process, a host,
or "" for any) and a kind: etcd, gateway (workers and control plane), holder (KV streams),
client. `cut` stops all messages over such a link, in both directions or one; `shape` makes it
slow or unreliable. Messages on a cut link stay in the sender's kernel and arrive when it is healed.

A connection delivers in order; loss on it is delay. The peer's kernel signals its end: a
process that dies resets its connections soon afterwards. If the link is cut, no side gets a
message. Stopped processes accept connections and send nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct, field

from relume.chaos.sim.message_ports import Ask, Caller, Door
from relume.chaos.sim.world.endpoints import CallerSender, TokenSender
from relume.chaos.sim.world.link_rules import Rule, Way, way_by
from relume.chaos.sim.world.virtual_loop import NS, Process, VirtualLoop, current

CLOSED_S = 0.02
"""Time until the kernel closes a killed process's connections."""
RETRANSMIT_S = 0.2
"""Delay of a lost segment of a connection, doubled with each further loss."""

RESET = "connection reset by peer"

Lost = Callable[[str, str], None]


class Refused(ConnectionRefusedError):
    """No process listens at that address."""


class Listener(Struct):
    """The object that answers at an address, and its process."""

    process: Process
    what: Any
    ends: dict[Any, None] = field(default_factory=dict)
    """Its ends of connections made there."""


class Wires:
    """The network of a run; a `ports.Net` for processes that serve on it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.served: dict[str, Listener] = {}
        self.shaped = 0
        """Counts changes of the rules."""
        self._random = random.Random(loop.random.random())
        self.draw = self._random.random
        self._rules: list[Rule] = []
        self._ways: dict[tuple[str, str, str], Way] = {}
        self._held: dict[End, None] = {}
        self._changed = asyncio.Event()
        self._ends: dict[Process, dict[End, None]] = {}

    # --- addresses -----------------------------------------------------------------------

    def serve(self, address: str, process: Process, what: Any) -> None:
        """Have `what` answer at `address` (`host:port`), in `process`, until that is killed."""
        served = self.served[address] = Listener(process, what)

        def gone() -> None:
            if self.served.get(address) is served:
                del self.served[address]

        process.at_death.append(gone)

    def close(self, address: str) -> None:
        """Close the address; resets connections to it."""
        served = self.served.pop(address, None)
        for end in served.ends if served is not None else ():
            self.loop.call_later(CLOSED_S, end.shut, "reset", RESET)

    def stop_listening(self, address: str) -> None:
        """Accept no further connection at the address; those that exist stay."""
        self.served.pop(address, None)

    def answers(self, address: str) -> bool:
        """Whether a process listens there."""
        return address in self.served

    def door(self, address: str) -> Door:
        """A gateway's door for clients: calls on it travel over the network."""
        return ClientDoor(self, address)

    # --- faults --------------------------------------------------------------------------

    def cut(self, one: str, other: str = "", kind: str = "", both: bool = True) -> Rule:
        """Stop all messages from `one` to `other` (and back, if `both`) until healed."""
        return self.shape(Rule(one=one, other=other, kind=kind, both=both, cut=True))

    def shape(self, rule: Rule) -> Rule:
        """Apply `rule` until healed."""
        self._rules.append(rule)
        self._ways.clear()
        self.shaped += 1
        return rule

    def heal(self, rule: Rule) -> None:
        """Remove a rule; messages that it stopped continue."""
        if rule not in self._rules:
            return
        self._rules.remove(rule)
        self._ways.clear()
        self.shaped += 1
        held, self._held = self._held, {}
        for end in held:
            end.resend()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def way(self, sender: str, receiver: str, kind: str) -> Way:
        """The direction from one process to another."""
        key = sender, receiver, kind
        found = self._ways.get(key)
        if found is None:
            found = self._ways[key] = way_by(self._rules, sender, receiver, kind)
        return found

    # --- datagrams -----------------------------------------------------------------------

    def post(
        self, sender: Process, to: Process, kind: str, work: Callable[..., object], *args: Any
    ) -> None:
        """Run `work` in process `to`: perhaps never, twice, or after later messages."""
        way = self.way(sender.name, to.name, kind)
        draw = self._random.random
        if way.cut or (way.loss and draw() < way.loss):
            return
        late = way.delay_s * (1 + draw())
        if way.reorder and draw() < way.reorder:
            late += 10 * way.delay_s * draw()
        to.call_at(self.loop.time() + late, work, *args)
        if way.duplicate and draw() < way.duplicate:
            to.call_at(self.loop.time() + late + way.delay_s * draw(), work, *args)

    # --- connections ---------------------------------------------------------------------

    async def connect(self, near: Process, address: str, kind: str) -> tuple[End, Any]:
        """A connection from `near`, and the object that answers there.

        Raises Refused. Never returns while the link is cut: the caller has a time limit.
        """
        while True:
            served = self.served.get(address)
            there = served.process.name if served is not None else address.rpartition(":")[0]
            out, back = self.way(near.name, there, kind), self.way(there, near.name, kind)
            if out.cut or back.cut:
                await self._changed.wait()
                continue
            await asyncio.sleep((out.delay_s + back.delay_s) * (1 + self._random.random()))
            if self.way(near.name, there, kind).cut or self.way(there, near.name, kind).cut:
                continue
            served = self.served.get(address)
            if served is None:
                raise Refused(f"no process listens at {address}")
            return self.line(near, served, kind), served.what

    def line(self, near: Process, there: Listener, kind: str) -> End:
        """Make a connection without delay; returns the near end, `peer` is the far one."""
        one, other = End(self, near, kind), End(self, there.process, kind)
        one.peer, other.peer = other, one
        other.served = there
        there.ends[other] = None
        for end in (one, other):
            ends = self._ends.get(end.process)
            if ends is None:
                ends = self._ends[end.process] = {}
                end.process.at_death.append(partial(self._died, end.process))
            ends[end] = None
        return one

    def _died(self, process: Process) -> None:
        for end in self._ends.pop(process, {}):
            self.loop.call_later(CLOSED_S, end.shut, "reset", RESET)

    def _forget(self, end: End) -> None:
        ends = self._ends.get(end.process)
        if ends is not None:
            ends.pop(end, None)
        if end.served is not None:
            end.served.ends.pop(end, None)
        self._held.pop(end, None)


class End:
    """One end of a connection. The network calls `lost(kind, detail)` in its process, once, when
    the other side is gone (eof, reset); never after `close`."""

    __slots__ = (
        "_arrives",
        "_coming",
        "_shaped",
        "_skip",
        "_waiting",
        "_way",
        "_wires",
        "closed",
        "kind",
        "lost",
        "peer",
        "process",
        "served",
    )
    peer: End

    def __init__(self, wires: Wires, process: Process, kind: str) -> None:
        self._wires = wires
        self.process = process
        self.kind = kind
        self.closed = False
        self.lost: Lost = _nobody
        self.served: Listener | None = None
        self._arrives = 0.0
        self._coming: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._skip = 0
        self._way: Way | None = None
        self._shaped = 0
        self._waiting: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    @property
    def now_ns(self) -> int:
        """Virtual time."""
        return self._wires.loop.now_ns

    @property
    def travel_ns(self) -> int:
        """The longest that a message sent now travels, unless it is held up: by a cut, by loss, or by a
        process that is stopped."""
        wires = self._wires
        if not wires.shaped:
            return 0
        way = wires.way(self.process.name, self.peer.process.name, self.kind)
        return int(2 * way.delay_s * NS)

    @property
    def is_closed_there(self) -> bool:
        """Whether the other end is closed; the message about it may be on its way."""
        return self.peer.closed

    def send(self, work: Callable[..., object], *args: Any) -> None:
        """Run `work` at the other end, after all earlier messages."""
        if not self.closed:
            self._send(work, args)

    def close(self) -> None:
        """Close it from this side; the other end gets eof after all messages."""
        self.shut("eof", "closed by the peer")

    def shut(self, kind: str, detail: str) -> None:
        """Close it; the other end gets `kind`."""
        if self.closed:
            return
        self.closed = True
        self.lost = _nobody
        self._wires._forget(self)
        self._send(self.peer._ended, (kind, detail))

    def reset(self) -> None:
        """Break the connection: both ends get a reset, this one after all messages to it."""
        far = self.peer
        if self.closed or far.closed:
            return
        on_lost = far.lost
        far.shut("reset", RESET)
        far.process.call_soon(on_lost, "reset", RESET)

    def lose_peer(self) -> None:
        """Break the connection at the other end, without a notice; this one gets a reset."""
        self.peer.shut("reset", RESET)

    def frame_copies(self) -> int:
        """Number of times that the next frame of an answer arrives here: 1, unless a rule changes it."""
        wires = self._wires
        if not wires.shaped:
            return 1
        way = wires.way(self.peer.process.name, self.process.name, self.kind)
        if way.frame_lost and wires.draw() < way.frame_lost:
            return 0
        return 2 if way.frame_repeated and wires.draw() < way.frame_repeated else 1

    def finish(self) -> None:
        """Close both ends without a notice: both sides know that it is over."""
        for end in (self, self.peer):
            end.closed = True
            end.lost = _nobody
            self._wires._forget(end)

    def look(self, work: Callable[..., object], *args: Any) -> None:
        """Run `work` at the other end and receive the tokens that it sends, at once: this updates a
        stream with late reports. No effect on a cut link. Other messages, such as the end, arrive
        at their own times: the reader is about to make a decision."""
        peer = self.peer
        if not self.would_come():
            return
        if peer.process.alive and not peer.closed:
            peer.process.context.run(work, *args)
        while self._coming and not self.closed:
            if getattr(self._coming[0][0], "__func__", None) is not TokenSender.arrived:
                break
            self._skip += 1
            next_work, next_args = self._coming.popleft()
            next_work(*next_args)

    def would_come(self) -> bool:
        """Whether messages of the other end arrive now: the link is not cut."""
        peer = self.peer
        if self.closed or peer._waiting:
            return False
        return not self._wires.way(peer.process.name, self.process.name, self.kind).cut

    def resend(self) -> None:
        """Send waiting messages again: the link may be healed."""
        waiting, self._waiting = self._waiting, deque()
        for work, args in waiting:
            self._send(work, args)

    def _send(self, work: Callable[..., object], args: tuple[Any, ...]) -> None:
        wires, peer = self._wires, self.peer
        way = self._way
        if way is None or self._shaped != wires.shaped:
            way = self._way = wires.way(self.process.name, peer.process.name, self.kind)
            self._shaped = wires.shaped
        if way.cut or self._waiting:
            self._waiting.append((work, args))
            wires._held[self] = None
            return
        loop = wires.loop
        at = loop._now_s + way.delay_s * (1 + wires.draw())
        if way.loss:
            again = RETRANSMIT_S
            while wires.draw() < way.loss and again < 30:
                at, again = at + again, 2 * again
        if at < self._arrives:
            at = self._arrives
        self._arrives = at
        peer._coming.append((work, args))
        loop.call_at(at, peer._arrive, context=peer.process.own_context)

    def _arrive(self) -> None:
        if self._skip:
            self._skip -= 1
            return
        work, args = self._coming.popleft()
        work(*args)

    def _ended(self, kind: str, detail: str) -> None:
        if self.closed:
            return
        self.closed = True
        lost, self.lost = self.lost, _nobody
        self._wires._forget(self)
        lost(kind, detail)


def _nobody(kind: str, detail: str) -> None:
    pass


class ClientDoor:
    """A `Door` for clients; each calls it in its own process."""

    def __init__(self, wires: Wires, address: str) -> None:
        self._wires = wires
        self._address = address
        self._calls: dict[str, End] = {}

    def ask(self, what: Ask, caller: Caller) -> None:
        """Connect and send; a caller without a listener is cut."""
        me, served = current(), self._wires.served.get(self._address)
        if me is None:
            raise RuntimeError("clients have a process")
        if served is None:
            me.call_soon(caller.cut)
            return
        near = self._calls[what.key] = self._wires.line(me, served, "client")

        def forget() -> None:
            self._calls.pop(what.key, None)

        def cut(*_: str) -> None:
            forget()
            caller.cut()

        def gone(*_: str) -> None:
            served.what.hang_up(what.key)

        near.lost, near.peer.lost = cut, gone
        answers = CallerSender(near.peer, caller, forget, what.loses_end)
        near.send(served.what.ask, what, answers)

    def flush(self, connection: str) -> None:
        """Update the answer, at once."""
        near, served = self._calls.get(connection), self._wires.served.get(self._address)
        if near is not None and served is None:
            there = near.peer.served  # it accepts no more connections
            served = there if there is not None and there.process.alive else None
        if near is not None and served is not None and not served.process.stopped:
            near.look(served.what.flush, connection)

    def hang_up(self, connection: str) -> None:
        """Close the connection."""
        near = self._calls.pop(connection, None)
        if near is not None:
            near.close()
