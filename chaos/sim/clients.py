"""Clients in virtual time: they send what the schedule says, and write down what they lived.

Each sends a request once, to one gateway, and does not try again. Token i of a request is a
function of what was asked and i, so that a gap, a repetition or another's answer shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from relume.chaos.outcome import History
from relume.chaos.scenario.schedule import Request, Schedule
from relume.chaos.sim.loop import NS, VirtualLoop
from relume.chaos.sim.ports import Ask, Net, Stretch
from relume.chaos.validators.records import ClientRecord
from relume.controlplane.gateway.weight import checkpoint_weight
from relume.policies.routing_settings import TIERS

_CYCLE = 256
_TABLE = list(range(_CYCLE)) * 16
WRONG = _CYCLE
"""A token that no healthy engine makes."""


def tokens_of(asked: str, start: int, count: int) -> list[int]:
    """Tokens `start..start+count-1` of the fault-free answer."""
    found: list[int] = []
    at = (zlib.crc32(asked.encode()) + start) % _CYCLE
    while len(found) < count:
        found += _TABLE[at : at + count - len(found)]
        at = (at + len(found)) % _CYCLE if len(found) < count else at
    return found


def fault_free(names: Sequence[str], schedule: Schedule) -> list[History]:
    """What clients of a fleet without faults would have of these requests: what answers are
    compared with."""
    wanted = set(names)
    return [
        History(
            r.name,
            ClientRecord(
                f"fault-free:{r.name}",
                token_count=r.output_tokens,
                finish="length",
                tokens=tokens_of(r.name, 0, r.output_tokens),
                asked=r.name,
                undisturbed=True,
            ),
            0,
        )
        for r in schedule.requests
        if r.name in wanted
    ]


class Call:
    """One request as its client lives it; `ports.Caller`."""

    __slots__ = (
        "_clients", "door", "first_ns", "gateway", "last_ns", "longest_ns", "over", "record",
        "request", "sent_ns",
    )  # fmt: skip

    def __init__(self, clients: Clients, request: Request) -> None:
        self._clients = clients
        self.request = request
        self.record = ClientRecord(request.name, asked=request.name)
        self.sent_ns = 0
        self.first_ns = self.last_ns = self.longest_ns = 0
        self.over = False
        self.gateway = ""

    def tokens(self, stretch: Stretch) -> None:
        """See ports.Caller."""
        if self.over:
            return
        record = self.record
        if not record.token_count:
            self.first_ns = stretch.first_ns
            record.status = 200
        else:
            self.longest_ns = max(self.longest_ns, stretch.first_ns - self.last_ns)
        self.longest_ns = max(self.longest_ns, stretch.longest_ns)
        self.last_ns = stretch.last_ns
        if not record.starts or stretch.start != record.token_count:
            record.starts.append(stretch.start)
        if stretch.wrong:
            record.tokens += [WRONG] * stretch.count
        else:
            record.tokens += tokens_of(record.asked, stretch.start, stretch.count)
        record.token_count += stretch.count

    def end(self, finish: str) -> None:
        """See ports.Caller."""
        if not self.over:
            self.record.finish, self.record.status = finish, 200
            self._ended("completed")

    def refused(self, status: int, message: str) -> None:
        """See ports.Caller."""
        if not self.over:
            if not self.record.token_count:
                self.record.status = status
            self._ended("rejected" if status < 500 else "failed")

    def cut(self) -> None:
        """See ports.Caller."""
        if not self.over:
            self._ended("cut")

    def hang_up(self) -> None:
        """Leave in the middle."""
        if not self.over:
            door = self._clients.net.door(self.gateway)
            self._clients.flush(self)
            if not self.over:
                door.hang_up(self.record.request)
                self._ended("cancelled")

    def _ended(self, outcome: str) -> None:
        self.over = True
        self.record.outcome = outcome
        if self.record.token_count > 1:
            self.record.gaps_ms = [self.longest_ns / 1e6]
        self._clients.ended(self)

    def history(self, began_ns: int) -> History:
        """What is to be kept of it."""
        told = self.record.token_count > 0
        return History(
            self.request.name, self.record, self.sent_ns - began_ns,
            self.first_ns - began_ns if told else None, self.last_ns - began_ns if told else None,
        )  # fmt: skip


class Clients:
    """All clients of a run, in one process that never dies. `doors`: addresses of gateways, to
    which requests go in turn. `on_end` is called when the last is answered."""

    def __init__(
        self,
        loop: VirtualLoop,
        net: Net,
        schedule: Schedule,
        doors: Sequence[str],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.loop = loop
        self.net = net
        self.process = loop.process("clients")
        self.calls: dict[str, Call] = {}
        self.left = len(schedule.requests)
        self._schedule = schedule
        self._doors = list(doors)
        self._open = {name: net.door(name) for name in self._doors}
        self._on_end = on_end
        self._after: dict[str, list[Request]] = {}
        self._sent = 0

    def start(self) -> None:
        """Send what has a time; the rest follows on answers."""
        now = self.loop.time()
        timed = []
        for request in self._schedule.requests:
            if request.at_ns is not None:
                timed.append(request)
            else:
                self._after.setdefault(request.after or "", []).append(request)
        timed.sort(key=lambda request: request.at_ns or 0)
        self._began = now
        self._coming = iter(timed)
        self._next()
        if not self.left:
            self._on_end()

    def _next(self) -> None:
        """Wait for the next request that has a time."""
        request = next(self._coming, None)
        if request is not None:
            at_s = self._began + (request.at_ns or 0) / NS
            self.process.call_at(at_s, self._timely, request)

    def _timely(self, request: Request) -> None:
        self._next()
        self._send(request)

    def _send(self, request: Request) -> None:
        call = self.calls[request.name] = Call(self, request)
        # Whoever finds nobody listening goes to the next address.
        turns = (self._doors[(self._sent + n) % len(self._doors)] for n in range(len(self._doors)))
        usual = self._doors[self._sent % len(self._doors)]
        call.gateway = next((door for door in turns if self.net.answers(door)), usual)
        self._sent += 1
        call.sent_ns = self.loop.now_ns
        ask = Ask(
            request.name, request.name, request.prompt_tokens, request.output_tokens,
            verdict_of(request), checkpoint_weight(None, request.priority), request.n,
            request.prefix, request.prefix_block, tier_of(request), request.tenant,
        )  # fmt: skip
        self._open[call.gateway].ask(ask, call)

    def flush(self, call: Call) -> None:
        """Bring a client's answer up to date."""
        self._open[call.gateway].flush(call.record.request)

    def flush_everything(self, gateway: str = "") -> None:
        """The same of all, or of all that one gateway serves."""
        for call in self.under_way:
            if gateway in ("", call.gateway):
                self.flush(call)

    @property
    def under_way(self) -> list[Call]:
        """Those that are not over."""
        return [call for call in self.calls.values() if not call.over]

    def ended(self, call: Call) -> None:
        """A call is over: those that waited for it come."""
        self.left -= 1
        for request in self._after.pop(call.request.name, ()):
            self.process.call_at(self.loop.time() + request.think_ns / NS, self._send, request)
        if not self.left:
            self._on_end()

    def histories(self, began_ns: int) -> tuple[History, ...]:
        """Of all that was sent, in the schedule's order; times from `began_ns` on."""
        names = (request.name for request in self._schedule.requests)
        return tuple(self.calls[name].history(began_ns) for name in names if name in self.calls)


def tier_of(request: Request) -> str:
    """What it says in `x-relume-tier`."""
    return request.tier if request.tier in TIERS else ""


def verdict_of(request: Request) -> str:
    """Sampling without a seed is not repeated token for token. Of several choices a simulated
    engine makes one: such requests are not taken up."""
    if request.n > 1:
        return "restart"
    return "exact" if request.temperature == 0 or request.seed is not None else "sampled"
