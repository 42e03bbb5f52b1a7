"""Clients in virtual time: they send the schedule's requests, and record the answers.

Each sends a request once, to one gateway, without retries. A client of a resumable stream loses its
connection at any byte, and returns with the id of its last whole event, to the same gateway or
another (`ReturningCall`). Clients read their answers from the gateway's bytes (`answer_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from relume.chaos.outcome import History
from relume.chaos.scenario.schedule import Request, Schedule
from relume.chaos.sim.gateway.answer_bytes import WRONG, AnswerReader, style_of, tokens_of
from relume.chaos.sim.message_ports import Ask, Net, Stretch
from relume.chaos.sim.world.virtual_loop import NS, VirtualLoop
from relume.chaos.validators.ground_truth import ClientCall
from relume.chaos.validators.records import ClientRecord
from relume.controlplane.gateway.openai.priority import checkpoint_weight
from relume.controlplane.stream.error_codes import NOT_KNOWN
from relume.policies.routing.routing_settings import TIERS

PATIENCE = 12
"""Maximum number of returns to a stream that gives no bytes."""
AWAY_S = (0.0, 0.05, 0.5, 5.0, 40.0)
"""Maximum times of absence, of which one is drawn."""
STAYS_AWAY = 0.08
"""Probability that a client that leaves never returns."""
GONE, BUSY = 410, 503
DOOR_AGAIN_S = 0.05


def fault_free(names: Sequence[str], schedule: Schedule) -> list[History]:
    """Records of these requests in a fleet without faults: the references for answers."""
    wanted = set(names)
    return [
        History(
            request=r.name,
            record=ClientRecord(
                request=f"fault-free:{r.name}",
                token_count=r.output_tokens,
                finish="length",
                tokens=tokens_of(r.name, 0, r.output_tokens),
                content_id=r.name,
                undisturbed=True,
            ),
            sent_ns=0,
        )
        for r in schedule.requests
        if r.name in wanted
    ]


class Call:
    """One request on its client's side; a `ports.Caller`."""

    __slots__ = (
        "_clients", "_reader", "connection", "ended_ns", "first_ns", "gateway", "last_ns",
        "longest_ns", "message", "over", "record", "refusal", "request", "sent_ns", "served_by",
    )  # fmt: skip

    def __init__(self, clients: Clients, request: Request) -> None:
        self._clients = clients
        self._reader = AnswerReader(style_of(request.name, request.client))
        self.connection = request.name
        self.request = request
        self.record = ClientRecord(request=request.name, content_id=request.name)
        self.sent_ns = 0
        self.first_ns = self.last_ns = self.longest_ns = 0
        self.over = False
        self.refusal = 0
        """Status of the error that ended it."""
        self.message = ""
        self.ended_ns = 0
        self.gateway = ""
        self.served_by = ""
        """The gateway that gave it its last token."""

    def tokens(self, stretch: Stretch) -> None:
        """See ports.Caller."""
        if self.over:
            return
        record, had = self.record, self._token_count
        start = record.token_count
        self._read(stretch)
        if not stretch.count:
            return
        if not had:
            record.status = 200
        if self._token_count == had:
            return  # a note without a token: the frame after it was lost
        if not had:
            self.first_ns = stretch.first_ns
        else:
            self.longest_ns = max(self.longest_ns, stretch.first_ns - self.last_ns)
        self.longest_ns = max(self.longest_ns, stretch.longest_ns)
        self.last_ns = stretch.last_ns
        if self.request.client == "choices":
            pass  # each has its own first token
        elif not record.starts or stretch.start != start:
            record.starts.append(stretch.start)

    @property
    def _token_count(self) -> int:
        """Tokens read, of all choices."""
        return self.record.token_count + self.record.other_tokens

    def _read(self, stretch: Stretch) -> None:
        self._had(self._reader.read(stretch.data))

    def _had(self, tokens: list[int]) -> None:
        if tokens:
            self.served_by = self.gateway
        self.record.tokens += tokens
        self.record.token_count += len(tokens)
        self.record.other_tokens = self._reader.other_tokens

    def end(self, finish: str, status: int = 200) -> None:
        """See ports.Caller."""
        if not self.over:
            if not self._reader.is_complete:
                self._had([WRONG])  # an end without the last event
            self.record.finish, self.record.status = finish, status
            self._ended("completed")

    def refused(self, status: int, message: str) -> None:
        """See ports.Caller."""
        if not self.over:
            self.refusal, self.message = status, message
            if not self.record.token_count:
                self.record.status = status
            self._ended("rejected" if status < 500 else "failed")

    def cut(self) -> None:
        """See ports.Caller."""
        if not self.over:
            self._ended("cut")

    def lost_end(self) -> None:
        """See ports.Caller."""
        if not self.over:
            self._ended("cancelled")

    def hang_up(self) -> None:
        """Leave in the middle."""
        if not self.over:
            self._clients.flush(self)
            if not self.over:
                self._clients.close(self)
                self._ended("cancelled")

    def _ended(self, outcome: str) -> None:
        self.over = True
        self.ended_ns = self._clients.loop.now_ns
        self.record.outcome = outcome
        if self.record.token_count > 1:
            self.record.gaps_ms = [self.longest_ns / 1e6]
        self._clients.ended(self)

    def known(self, replicas: Mapping[str, str]) -> ClientCall:
        """What it knows of its request. `replicas`: streams of gateways, by address."""
        moves = isinstance(self, ReturningCall)
        return ClientCall(
            gateway="" if moves else replicas.get(self.gateway, ""),
            kind=self.request.client,
            tenant=self.request.tenant,
            sent_ns=self.sent_ns,
            first_ns=self.first_ns,
            ended_ns=self.ended_ns,
            status=self.refusal,
            message=self.message,
            last_ns=self.last_ns,
            served_by=replicas.get(self.served_by, ""),
            model=self.request.model,
        )

    def history(self, began_ns: int) -> History:
        """Its history."""
        has_tokens = self.record.token_count > 0
        return History(
            request=self.request.name,
            record=self.record,
            sent_ns=self.sent_ns - began_ns,
            first_ns=self.first_ns - began_ns if has_tokens else None,
            last_ns=self.last_ns - began_ns if has_tokens else None,
        )


class ReturningCall(Call):
    """A call for a resumable stream. It reads the bytes when a connection is over, cut at any
    byte."""

    __slots__ = (
        "_departures", "_is_first", "_patience", "_random", "_raw", "_since_ns", "_turn", "loses_end",
    )  # fmt: skip

    def __init__(self, clients: Clients, request: Request) -> None:
        super().__init__(clients, request)
        self._random = Random(f"{clients.seed}:{request.name}:client")
        self._departures = self._random.choice((0, 1, 1, 2, 3))
        self._patience = PATIENCE
        self._turn = 0
        self._raw = b""
        self._is_first = True
        self._since_ns = 0
        self.loses_end = False

    def connected(self) -> OfConnection:
        """Open a connection; returns its caller."""
        self._since_ns = self._clients.loop.now_ns
        share = self._clients.lost_ends
        self.loses_end = share > 0 and self._random.random() < share
        if self._departures:
            self._departures -= 1
            seconds = self._random.choice((0.1, 0.5, 2.0)) * self._random.random()
            self._clients.later(seconds, self._leave, self._turn)
        return OfConnection(self, self._turn)

    def is_at(self, turn: int) -> bool:
        """Whether that connection is the current one."""
        return turn == self._turn and not self.over

    def tokens(self, stretch: Stretch) -> None:
        """See ports.Caller."""
        self._raw += stretch.data
        self._patience = PATIENCE
        if not stretch.count:
            return
        # Tokens generated during its absence came with the connection.
        first_ns = max(stretch.first_ns, self._since_ns)
        if self._is_first:
            self._is_first = False
            if not self.last_ns:
                self.first_ns = first_ns
                self.record.status = 200
        else:
            self.longest_ns = max(self.longest_ns, first_ns - self.last_ns)
        if stretch.first_ns >= self._since_ns:
            self.longest_ns = max(self.longest_ns, stretch.longest_ns)
        self.last_ns = max(stretch.last_ns, self._since_ns)

    def _take(self, most: int | None = None) -> None:
        """Read the bytes of this connection, or the first `most` of them."""
        self._had(self._reader.read(self._raw[:most]))
        self._raw = b""

    def end(self, finish: str, status: int = 200) -> None:
        """See ports.Caller."""
        self._take()
        super().end(finish, status)

    def refused(self, status: int, message: str) -> None:
        """See ports.Caller."""
        self._take()
        if status == BUSY and self._reader.last_id and self._may_return():
            return
        if self._reader.last_id and (status == GONE or message in NOT_KNOWN):
            self.refusal, self.message = status, message
            self._ended("gone")
            return
        super().refused(status, message)

    def cut(self) -> None:
        """See ports.Caller."""
        self._take()
        if not self._may_return():
            super().cut()

    def lost_end(self) -> None:
        """See ports.Caller. It has lost some of the last bytes too."""
        self._take(self._random.randrange(len(self._raw) + 1))
        if not self._may_return():
            self._ended("cancelled")

    def hang_up(self) -> None:
        """Leave and never return."""
        super().hang_up()
        self._take()

    def _leave(self, turn: int) -> None:
        """Lose the connection at any byte."""
        if not self.is_at(turn):
            return
        self._clients.flush(self)
        if not self.is_at(turn):
            return
        self._clients.close(self)
        self._take(self._random.randrange(len(self._raw) + 1))
        if self._random.random() < STAYS_AWAY or not self._may_return():
            self._ended("cancelled")

    def _may_return(self) -> bool:
        """Return after a while, if it has an event id, and a limited number of times."""
        self._turn += 1
        self._reader.cut()
        if not self._reader.last_id or not self._patience:
            return False
        self._patience -= 1
        self._is_first = True
        self.connection = f"{self.request.name}#{self._turn}"
        away_s = self._random.choice(AWAY_S) * self._random.random()
        self._clients.later(away_s, self._return, self._turn)
        return True

    def _return(self, turn: int) -> None:
        if self.is_at(turn):
            self._clients.resend(self, self._reader.last_id, self._random)


class OfConnection:
    """`ports.Caller` of one connection of a client; ignores messages of older connections."""

    def __init__(self, call: ReturningCall, turn: int) -> None:
        self._call = call
        self._turn = turn

    def tokens(self, stretch: Stretch) -> None:
        """See ports.Caller."""
        if self._call.is_at(self._turn):
            self._call.tokens(stretch)

    def end(self, finish: str, status: int = 200) -> None:
        """See ports.Caller."""
        if self._call.is_at(self._turn):
            self._call.end(finish, status)

    def refused(self, status: int, message: str) -> None:
        """See ports.Caller."""
        if self._call.is_at(self._turn):
            self._call.refused(status, message)

    def cut(self) -> None:
        """See ports.Caller."""
        if self._call.is_at(self._turn):
            self._call.cut()

    def lost_end(self) -> None:
        """See ports.Caller."""
        if self._call.is_at(self._turn):
            self._call.lost_end()


class Clients:
    """All clients of a run, in one process that never dies. `doors`: addresses of gateways, to
    which requests go in turn. It calls `on_end` after the last answer."""

    lost_ends = 0.0
    """Share of connections of resumable clients that break before the last bytes arrive."""
    waits = False
    """Whether clients wait while no gateway accepts connections."""

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
        self.seed = schedule.seed
        self._schedule = schedule
        self._doors = list(doors)
        self._open = {name: net.door(name) for name in self._doors}
        self._on_end = on_end
        self._after: dict[str, list[Request]] = {}
        self._sent = 0

    def start(self) -> None:
        """Send the requests that have a time; the others follow answers."""
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
        if self.waits and not any(map(self.net.answers, self._doors)):
            self.later(DOOR_AGAIN_S, self._send, request)
            return
        resumable = request.client == "resumable"
        call = (ReturningCall if resumable else Call)(self, request)
        self.calls[request.name] = call
        # A client whose address has no listener uses the next one.
        turns = (self._doors[(self._sent + n) % len(self._doors)] for n in range(len(self._doors)))
        usual = self._doors[self._sent % len(self._doors)]
        call.gateway = next((door for door in turns if self.net.answers(door)), usual)
        self._sent += 1
        call.sent_ns = self.loop.now_ns
        self._ask(call)

    def resend(self, call: ReturningCall, last_event_id: str, random: Random) -> None:
        """A client returns to its stream, to the same gateway or another."""
        there = [door for door in self._doors if self.net.answers(door)]
        if there and (call.gateway not in there or random.random() < 0.5):
            call.gateway = random.choice(there)
        self._ask(call, last_event_id)

    def _ask(self, call: Call, last_event_id: str = "") -> None:
        request = call.request
        caller = call.connected() if isinstance(call, ReturningCall) else call
        ask = Ask(
            kind=request.client,
            connection=call.connection,
            last_event_id=last_event_id,
            client_id=request.name,
            content_id=request.name,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            verdict=verdict_of(request),
            priority=checkpoint_weight(None, request.priority),
            n=request.n,
            prefix=request.prefix,
            prefix_block=request.prefix_block,
            tier=tier_of(request),
            tenant=request.tenant,
            loses_end=isinstance(call, ReturningCall) and call.loses_end,
            model=request.model,
        )
        self._open[call.gateway].ask(ask, caller)

    def later(self, seconds: float, work: Callable[..., object], *args: object) -> None:
        """Run `work` in the clients' process."""
        self.process.call_at(self.loop.time() + seconds, work, *args)

    def close(self, call: Call) -> None:
        """Close a client's connection."""
        self._open[call.gateway].hang_up(call.connection)

    def flush(self, call: Call) -> None:
        """Update a client's answer to now."""
        self._open[call.gateway].flush(call.connection)

    def flush_everything(self, gateway: str = "") -> None:
        """Update all answers, or all that one gateway serves."""
        for call in self.under_way:
            if gateway in ("", call.gateway):
                self.flush(call)

    @property
    def under_way(self) -> list[Call]:
        """Calls that are not over."""
        return [call for call in self.calls.values() if not call.over]

    def ended(self, call: Call) -> None:
        """A call is over: send the requests that follow it."""
        self.left -= 1
        for request in self._after.pop(call.request.name, ()):
            self.process.call_at(self.loop.time() + request.think_ns / NS, self._send, request)
        if not self.left:
            self._on_end()

    def histories(self, began_ns: int) -> tuple[History, ...]:
        """Histories of all sent requests, in the schedule's order; times from `began_ns` on."""
        names = (request.name for request in self._schedule.requests)
        return tuple(self.calls[name].history(began_ns) for name in names if name in self.calls)


def tier_of(request: Request) -> str:
    """Its value of header `TIER`."""
    return request.tier if request.tier in TIERS else ""


def verdict_of(request: Request) -> str:
    """Its resume guarantee. Sampling without a seed does not repeat token for token. A simulated
    engine generates one of several choices: such requests restart."""
    if request.n > 1 or request.client in ("relayed", "restarting"):
        return "restart"
    return "exact" if request.temperature == 0 or request.seed is not None else "sampled"
