"""A world around one stream machine: a scheduler, workers that send real frames, a client that
reads bytes. Everything is drawn from one random source; what must never happen is asserted."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.stream import event_ids
from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream import stream_states as s
from relume.controlplane.stream.arrival import Arrival, Assignment, Rejected
from relume.controlplane.stream.handlers import endings
from relume.controlplane.stream.machine import StreamMachine
from relume.controlplane.stream.stream_data import RelayedRequest, Stream
from tests.stream.worker_side import BODY, PATH, TOKEN, Truth, WorkerSide

LIMITS = GatewayConfig(max_attempts=6)


class World(WorkerSide):
    """Feeds a machine and carries out its effects. `faults`: how probable a fault is at a step."""

    def __init__(self, rng: Random, faults: float = 0.3, calm: bool = False) -> None:
        """`calm`: a protected request that can be continued exactly, and no bad luck."""
        self.rng = rng
        self.faults = 0.0 if calm else faults
        self.calm = calm
        self.truth = Truth(rng)
        kinds = ("plain", "plain", "resumable", "resumable", "whole", "relayed")
        self.kind = rng.choice(kinds[:-1] if calm else kinds)
        self.adopted = self.kind == "resumable" and rng.random() < 0.2
        is_stamped = self.kind == "resumable"
        guarantees = ("exact", "exact", "sampled", "replay", "restart")
        self.guarantee = "exact" if calm else rng.choice(guarantees)
        if self.kind == "relayed":
            self.guarantee = "restart"
        arrival = Arrival(
            request="r-1",
            model="m",
            route=PATH,
            stream=self.kind in ("plain", "resumable"),
            prompt_tokens=3,
            max_tokens=9,
            verdict=self.guarantee,
            resumable=event_ids.digest(TOKEN) if is_stamped else "",
        )
        self.now = 100.0
        stream = Stream(
            arrival=arrival,
            path=PATH,
            response_id="q",
            body=b"" if self.adopted else BODY,
            limits=LIMITS,
            now=self.now,
            resume_token=TOKEN if is_stamped else "",
            created="17" if is_stamped and not self.adopted else "",
            relayed=RelayedRequest("POST", ()) if self.kind == "relayed" else None,
        )
        self.stream = stream
        self.machine = StreamMachine(stream)
        self.seen: set[tuple[type, type, type]] = set()  # state, event, next state
        self.ends: list[do.Effect] = []
        self.failures: list[str] = []
        self.accepted = 0
        self.open: Assignment | None = None
        self.sent: list[bytes] | None = None  # frames of the attempt that are still to come
        self.raw = b""  # of these, bytes cut out of the middle of a frame
        self.head: e.Head | None = None
        self.pending: list[Callable[[], None]] = []  # answers that come later
        self.attempt = 0
        self.is_doubted = False
        self.unsent: Assignment | None = None  # assigned, neither sent nor recorded as lost
        # the client
        self.connection = b""  # bytes of this connection
        self.is_connected, self.has_head = True, False
        self.is_answered = False  # this connection's response is whole, or an error
        self.had: list[bytes] = []  # whole events of connections before it
        self.position = (0, 0)
        self.was_failed = False

    # --- the shell

    def feed(self, event: object) -> None:
        state = self.machine.state
        kept = endings.attempt_of(state) or endings.left_of(state)
        effects = self.machine.handle(event, self.now)
        if isinstance(event, e.ClientReturned) and kept and not isinstance(state, s.Adopting):
            assert [x.to for x in effects if isinstance(x, do.Open)] == [kept], "not attached to"
        if isinstance(event, e.ClientReturned):
            told = [x.delivered for x in effects if isinstance(x, do.RecordFailure)]
            has = 0 if self.stream.again else self.position[0]
            assert set(told) <= {has}, "another count than its client returned with"
        if isinstance(state, s.Delivering) and state.is_taken and isinstance(event, e.ClientGone):
            assert self.machine.is_over, "another replica's stream waits here for its client"
        self.seen.add((type(state), type(event), type(self.machine.state)))
        for number, effect in enumerate(effects):
            last = number == len(effects) - 1
            self.carry_out(effect, last)
        assert self.open is self.machine.attempt, "an attempt is left open"

    def carry_out(self, effect: do.Effect, last: bool) -> None:
        kind = type(effect)
        assert not self.ends or kind not in (do.RecordEnd, do.LetGo, do.Open, do.Assign), effect
        if kind in (do.Accept, do.Admit, do.Assign, do.LocateEnvelope):
            assert last, f"{effect} is answered, and is not the last"
        if isinstance(effect, do.Accept):
            self.accept(effect.arrival)
        elif isinstance(effect, do.Admit):
            self.admit()
        elif isinstance(effect, do.Assign):
            self.assign(effect)
        elif isinstance(effect, do.LocateEnvelope):
            self.feed(e.EnvelopeKnown(not self.unlucky(0.3)))
        elif isinstance(effect, do.AwaitCapacity):
            self.pending.append(lambda: self.feed(e.CapacityKnown(not self.unlucky(0.2))))
        elif isinstance(effect, do.SetTimer):
            self.pending.append(lambda: self.feed(e.TimerFired()))
        elif isinstance(effect, do.StopWaiting):
            self.pending.clear()
        elif isinstance(effect, do.Open):
            assert self.open is None or (effect.fresh and self.open is effect.to), "two attempts"
            self.open, self.unsent = effect.to, None
            self.pending = [self.connect]
        elif isinstance(effect, do.Send):
            assert self.open is not None and self.machine.attempt is self.open
            self.serve(effect)
        elif isinstance(effect, do.Close):
            self.close()
        elif isinstance(effect, do.RecordEnd | do.LetGo):
            self.ends.append(effect)
            if isinstance(effect, do.RecordEnd):
                self.accepted += effect.unaccepted is not None
        elif isinstance(effect, do.RecordFailure):
            self.failures.append(effect.kind)
            if self.unsent is not None and self.unsent.attempt == effect.attempt:
                self.unsent = None
            if self.kind == "plain":
                have = self.truth.until(len(self.stream.answer.ids))
                assert self.connection.startswith(have), "counted, and not with the client"
        elif isinstance(effect, do.Detach):
            self.hang_up()
        else:
            self.tell_client(effect)

    def accept(self, arrival: Arrival) -> None:
        if self.unlucky(0.05):
            self.feed(e.NotAccepted())
        else:
            self.accepted += 1
            self.feed(e.Accepted(arrival))

    def admit(self) -> None:
        if self.unlucky(0.05):
            self.feed(Rejected(429, "too many", 3, "overloaded"))
        else:
            self.feed(self.rng.choice((e.Admitted(5.0), e.Admitted(5.0), e.Enqueued())))

    def assign(self, effect: do.Assign) -> None:
        if self.unlucky(0.05):
            self.feed(Rejected(502, "the worker was lost and this request cannot continue"))
        elif self.unlucky(0.1):
            self.feed(e.NoWorker(5.0))
        else:
            self.attempt += 1
            assert self.unsent is None, "an attempt that nobody hears of again"
            mode = "new"
            if effect.delivered and self.kind != "relayed":
                resuming = {"exact": "continue", "sampled": "continue", "replay": "replay"}
                mode = resuming.get(self.guarantee, "new")
                if self.is_doubted:
                    mode = "replay" if self.kind != "whole" else "new"
            self.unsent = self.worker(mode)
            self.feed(e.Assigned(self.unsent))

    def worker(self, mode: str) -> Assignment:
        name = f"w{self.rng.randrange(4)}"
        return Assignment(
            request="r-1",
            attempt=self.attempt,
            worker=name,
            incarnation=1,
            host="h",
            port=1,
            mode=mode,
            dispatch=b"d",
            doubted=self.is_doubted,
        )

    def connect(self) -> None:
        drawn = self.rng.random()
        if drawn < self.faults / 4:
            self.feed(e.ConnectFailed(self.rng.choice(("refused", "unreachable")), "no"))
        else:
            found = not self.unlucky(0.1)
            self.feed(e.Connected(("tcp://h:1",) if self.stream.again and found else ()))

    def close(self) -> None:
        self.open, self.sent, self.head, self.raw = None, None, None, b""
        self.pending = [answer for answer in self.pending if answer != self.connect]

    # --- the client

    def tell_client(self, effect: do.Effect) -> None:
        if isinstance(effect, do.Begin | do.ToClient | do.Finish):
            is_first = isinstance(effect, do.Begin)
            assert self.is_connected and self.has_head is not is_first, effect
            self.has_head = True
            self.connection += effect.data
            self.is_answered = isinstance(effect, do.Finish) or (is_first and effect.last)
            self.check_prefix()
        elif isinstance(effect, do.Reply):
            self.is_answered = True
        elif isinstance(effect, do.Fail):
            self.was_failed = self.is_answered = True
        elif isinstance(effect, do.Cut):
            self.hang_up()

    def check_prefix(self) -> None:
        """What the client has is a prefix of the true stream, on every connection."""
        if self.kind not in ("plain", "resumable"):
            return
        if self.kind == "plain":
            assert self.truth.bytes().startswith(self.connection), self.connection
            return
        mine = self.received()
        assert self.truth.bytes().startswith(mine), (self.truth.bytes(), mine)

    def events(self) -> list[bytes]:
        """Whole events of this connection."""
        return [part + b"\n\n" for part in self.connection.split(b"\n\n")[:-1]]

    def hang_up(self, cut: int | None = None) -> None:
        """The connection is gone; the client keeps its whole events."""
        if not self.is_connected:
            return
        self.is_connected = False
        if cut is not None:
            self.connection = self.connection[:cut]
        for event in self.events():
            self.had.append(event)
            found = event_ids.parse(event.split(b"\n")[0].decode().removeprefix("id: "))
            if self.kind == "resumable":
                assert found is not None, "an event without an id"
                assert found.position > self.position, "an event twice"
                self.position = found.position
        self.connection = b""

    # --- steps

    def possible(self) -> list[Callable[[], None]]:
        """What may go on without a fault."""
        state, found = self.machine.state, list[Callable[[], None]]()
        accepts = self.machine.accepts
        if self.pending:
            found.append(lambda: self.pending.pop(0)())
        if isinstance(state, s.Counting):
            counted = e.Counted(5) if self.rng.random() < 0.5 else e.Counted()
            found.append(lambda: self.feed(counted))
        if isinstance(state, s.Queued) and not self.ends:
            found.append(lambda: self.feed(e.Called()))
        if isinstance(state, s.Adopting):
            found.append(self.own)
        if self.sent is not None and not isinstance(state, s.Connecting):
            found.append(self.produce)
        if isinstance(state, s.Delivering):
            found.append(lambda: self.feed(e.Delivered()))
        if self.stream.is_absent and accepts(e.ClientReturned):
            found.append(self.come_back)
        return found

    def own(self) -> None:
        """The log decides; the worker may have changed meanwhile."""
        if self.unlucky(0.1):
            self.feed(e.Owned(False))
        else:
            self.feed(e.Owned(True, None if self.rng.random() < 0.3 else self.worker("attach")))

    def come_back(self) -> None:
        self.hang_up()
        self.is_connected, self.has_head, self.connection = True, False, b""
        self.is_answered = False
        self.feed(e.ClientReturned(self.position))

    def leave(self) -> None:
        self.hang_up(self.rng.randint(0, len(self.connection)))
        self.feed(e.ClientGone())

    def lose(self) -> None:
        kind = self.rng.choice(("reset", "eof", "timeout", "engine_error"))
        lost = e.ConnectionLost(
            kind, "lost", idle=self.rng.random() < 0.2 and self.head is not None
        )
        self.sent, self.head, self.raw = None, None, b""
        self.feed(lost)

    def doubt(self) -> None:
        self.is_doubted = True
        self.feed(e.TokensDoubted("said so"))

    def possible_faults(self) -> list[Callable[[], None]]:
        state, rng, accepts = self.machine.state, self.rng, self.machine.accepts
        found = list[Callable[[], None]]()
        if accepts(e.ConnectionLost):
            found.append(self.lose)
        if self.sent and self.head is None and not self.raw:
            found.append(self.sent.clear)  # the response ends in front of its end frame
        if accepts(e.EngineGivenUp) and (not isinstance(state, s.Detached) or rng.random() < 0.1):
            cause = rng.choice(("stall", "engine_dead", "engine_error", "reset", "corrupt"))
            found.append(lambda: self.feed(e.EngineGivenUp(cause, "said so")))
        if accepts(e.TokensDoubted):
            if isinstance(state, s.HandingOver) or rng.random() < 0.2:
                found.append(self.doubt)
        between_frames = self.sent is not None and self.head is None and not self.raw
        if isinstance(state, s.Receiving) and between_frames:
            found.append(self.misbehave)
        leaves = self.kind == "resumable" or rng.random() < 0.1
        if leaves and accepts(e.ClientGone) and not self.stream.is_absent and self.is_connected:
            found.append(self.leave)
        is_taken = isinstance(state, s.Delivering) and state.is_taken
        if accepts(e.ClientReturned) and self.position > (0, 0) and not is_taken:
            found.append(self.come_back)
        # Two handovers in a row only now and then: few runs come to that state, and it has other ends.
        if accepts(e.HandoverNoticed) and (
            isinstance(state, s.Detached) or len(self.seen) % 4 == 0
        ):
            found.append(lambda: self.feed(e.HandoverNoticed()))
        if isinstance(state, s.Delivering):
            found.append(lambda: self.feed(e.TakenOver()))
        rare: list[object] = [e.ShutDown(), e.TakenOver(), e.Fault()]
        if accepts(e.GraceOver) and self.stream.is_absent:
            rare.append(e.GraceOver())
        if rng.random() < 0.05:
            event = rng.choice(rare)
            found.append(lambda: self.feed(event))
        return found

    def start(self) -> None:
        rng = self.rng
        if self.adopted:
            self.accepted += 1
            tokens = rng.choice((*self.truth.starts[1:], len(self.truth.ids)))
            self.position = (tokens, 0)
            known = self.truth.until(tokens)
            self.had = [part + b"\n\n" for part in known.split(b"\n\n")[:-1]]
            self.feed(e.Adopted(self.position))
        elif rng.random() < 0.5:
            self.accepted += 1
            self.feed(e.Accepted(self.stream.arrival))

    def step(self, faults: bool = True) -> bool:
        """One event. False when nothing can happen any more."""
        self.now += self.rng.choice((0.0, 0.01, 2.0))
        if faults and self.rng.random() < self.faults and (bad := self.possible_faults()):
            self.rng.choice(bad)()
            return True
        steps = self.possible()
        if not steps:
            return False
        self.rng.choice(steps)()
        return True

    def run(self, steps: int) -> None:
        """Faults for `steps`, then none until it is over; then check how it ended."""
        self.start()
        for _ in range(steps):
            if self.machine.is_over:
                break
            self.step()
        self.faults = 0.0
        for _ in range(400):
            if self.machine.is_over:
                break
            assert self.step(faults=False), f"stuck in {self.machine.state}"
        assert self.machine.is_over, f"does not end: {self.machine.state}"
        self.check_end()

    def run_with_one_loss(self, after: int) -> None:
        """Nothing goes wrong but that one connection is lost after so many steps: the request
        completes, and no worker is blamed for more."""
        self.start()
        for _ in range(after):
            if not self.machine.is_over:
                self.step()
        blamed = len(self.failures)
        is_lost = self.machine.accepts(e.ConnectionLost)
        has_all = not self.adopted and self.received() == self.truth.bytes()
        if is_lost:
            self.sent, self.head, self.raw = None, None, b""
            self.feed(e.ConnectionLost("reset", "lost"))
        self.complete()
        assert blamed == 0 and len(self.failures) <= is_lost, self.failures
        assert not (has_all and self.failures), "a failure after the last byte"

    def run_with_one_return(self, after: int) -> None:
        """The same where a client that can resume leaves, and returns."""
        self.start()
        for _ in range(after):
            if not self.machine.is_over:
                self.step()
        resumes = not self.machine.is_over and (self.has_head or self.position > (0, 0))
        if self.kind == "resumable" and resumes and self.machine.accepts(e.ClientGone):
            if not self.stream.is_absent:
                self.leave()
                assert self.stream.is_absent, "the stream did not wait for its client"
                if self.position == (0, 0):
                    return  # it has no event to show
        self.complete()
        assert self.failures == []

    def complete(self) -> None:
        """Let it come to its end, which must be a good one."""
        for _ in range(400):
            if self.machine.is_over or not self.step():
                break
        assert self.machine.is_over, f"does not end: {self.machine.state}"
        self.check_end()
        assert isinstance(self.ends[0], do.RecordEnd) and self.ends[0].outcome == "completed"

    def received(self) -> bytes:
        """What the client has, without ids."""
        return b"".join(plain(event) for event in [*self.had, *self.events()])

    def check_end(self) -> None:
        """Exactly one end; what completed was delivered whole."""
        assert len(self.ends) == 1, self.ends
        assert self.accepted == 1 or isinstance(self.ends[0], do.LetGo)
        assert self.open is None, "an attempt is left open"
        assert self.is_answered or not self.is_connected, "a client waits for ever"
        (end,) = self.ends
        if isinstance(end, do.RecordEnd) and end.outcome == "completed":
            assert not self.was_failed
            if self.kind in ("plain", "resumable"):
                assert self.received() == self.truth.bytes(), "completed, and not whole"
            if self.kind != "relayed":
                assert end.tokens == len(self.truth.ids)


def plain(event: bytes) -> bytes:
    """An event without its id."""
    return re.sub(rb"^id: [^\n]*\n", b"", event)
