"""The client's side of a request in the simulated gateway: what `http/server.py` is in the real
one."""

from __future__ import annotations

from typing import Protocol

import msgspec

from relume.chaos.sim.message_ports import Ask, Caller, Stretch
from relume.chaos.sim.world.endpoints import CallerSender
from relume.controlplane.gateway.http.replies import Reply
from relume.controlplane.stream.answer import DONE
from relume.controlplane.stream.stream_data import Stream


class AnsweringSession(Protocol):
    """Offered by `sim_session.SimSession`. `connection`: its client's present one; `stretch`: the
    tokens whose bytes are written next; `failed_with`: the status of its error."""

    connection: SimClientConnection
    stream: Stream
    stretch: Stretch | None
    failed_with: int

    def look(self) -> None: ...
    def gone(self) -> None: ...


class SimClientConnection:
    """The client's connection for the machine's effects: it passes bytes to `Caller`. `sessions`:
    those of one gateway, by connection."""

    chunked = True
    session: AnsweringSession

    def __init__(self, caller: Caller, what: Ask, sessions: dict[str, SimClientConnection]) -> None:
        self.what = what
        self._caller = caller
        self._held: list[bytes] | None = None
        self._sessions = sessions
        self._status = 200
        sessions[what.key] = self

    def forget(self) -> None:
        """Drop it: no further call names it."""
        self._sessions.pop(self.what.key, None)

    @property
    def lost(self) -> bool:
        """See ClientPort."""
        return isinstance(self._caller, CallerSender) and self._caller.lost

    @property
    def undelivered(self) -> int:
        """See ClientPort; 1: not everything."""
        return int(isinstance(self._caller, CallerSender) and not self._caller.arrived_whole)

    def begin(self, head: bytes, first: bytes, last: bool = False) -> None:
        """See ClientPort."""
        self._status = int(head.split(b" ", 2)[1])
        if self._status == 200:
            self.write(first)
        if last:
            self._end()

    def _end(self) -> None:
        if self._status >= 400:
            self._caller.refused(self._status, "")
        else:
            finish = self.session.stream.answer.finish
            # A client knows the finish from the last event, also where the gateway reads no frames
            # or the end frame is lost.
            self._caller.end("length" if finish in ("", "-") else finish, self._status)

    def write(self, data: bytes) -> None:
        """See ClientPort."""
        if self._status != 200:
            return
        if self._held is not None:
            self._held.append(data)
            return
        stretch, self.session.stretch = self.session.stretch, None
        if stretch is not None:
            self._caller.tokens(msgspec.structs.replace(stretch, data=data))
        elif data:
            self._caller.tokens(Stretch(start=-1, count=0, first_ns=0, last_ns=0, data=data))

    def hold(self) -> None:
        """Send nothing before `send_held`."""
        self._held = []

    def send_held(self) -> None:
        """Send all writes since `hold` at once."""
        held, self._held = self._held, None
        if held:
            self.write(b"".join(held))

    def write_chunk(self, chunk: bytes) -> None:
        """See ClientPort: one chunk of HTTP, without its end."""
        self.write(chunk[chunk.index(b"\n") + 1 : -2])

    def finish(self, data: bytes = b"", close: bool = False) -> None:
        """See ClientPort."""
        self.send_held()
        if close:
            self._fail(self.session.failed_with, data.removeprefix(b"data: ").removesuffix(DONE))
        else:
            self.write(data)
            self._end()

    def reply(self, reply: Reply) -> None:
        """See ClientPort."""
        if reply.status >= 400:
            self._fail(reply.status, reply.body)
            return
        last_ns = self.session.stretch.last_ns if self.session.stretch is not None else 0
        self.session.stretch = Stretch(start=0, count=1, first_ns=last_ns, last_ns=last_ns)
        self.write(reply.body)
        self._end()

    def break_off(self) -> None:
        """See ClientPort."""
        self._held = None
        self.forget()
        self._caller.cut()

    def _fail(self, status: int, body: bytes) -> None:
        self._caller.refused(status, msgspec.json.decode(body)["error"]["message"])
