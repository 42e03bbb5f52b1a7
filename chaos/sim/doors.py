"""The protocols of `ports` over the network: each end holds something that looks like the other.

What a proxy is told runs at the other end, later. Tokens that were held up on their way (a cut,
a process that was stopped) are as late as they came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from relume.chaos.sim.loop import current
from relume.chaos.sim.ports import Answer, Ask, Caller, Stretch

if TYPE_CHECKING:
    from relume.chaos.sim.network import End, Wires

LATE_NS = 100_000_000
"""What travels so long was held up."""


class TokenSender:
    """Tokens from `end` to whoever has the other end."""

    __slots__ = ("_end", "_to")

    def __init__(self, end: End, to: Answer | Caller) -> None:
        self._end = end
        self._to = to

    def tokens(self, stretch: Stretch) -> None:
        self._end.send(self.arrived, stretch, self._end.now_ns)

    def arrived(self, stretch: Stretch, sent_ns: int) -> None:
        """They are at the other end."""
        now_ns = self._end.now_ns
        if now_ns - sent_ns > LATE_NS:
            stretch = Stretch(stretch.start, stretch.count, now_ns, now_ns, stretch.wrong)
        self._to.tokens(stretch)


class AnswerSender(TokenSender):
    """An `Answer` as the engine has it; `end` is the engine's."""

    __slots__ = ()
    _to: Answer

    def end(self, finish: str) -> None:
        self._end.send(self._to.end, finish)

    def moved(self) -> None:
        self._end.send(self._to.moved)

    def lost(self, kind: str, detail: str) -> None:
        self._end.send(self._to.lost, kind, detail)


class CallerSender(TokenSender):
    """A `Caller` as the gateway has it; `end` is the gateway's. The connection ends with it."""

    __slots__ = ("_forget",)
    _to: Caller

    def __init__(self, end: End, to: Caller, forget: Callable[[], object]) -> None:
        super().__init__(end, to)
        self._forget = forget

    def end(self, finish: str) -> None:
        self._end.send(self._over, self._to.end, finish)

    def refused(self, status: int, message: str) -> None:
        self._end.send(self._over, self._to.refused, status, message)

    def cut(self) -> None:
        self._end.send(self._over, self._to.cut)

    def _over(self, tell: Callable[..., None], *args: Any) -> None:
        self._end.finish()
        self._forget()
        tell(*args)


class ClientDoor:
    """A `Door` as clients see it, who each call it in their own process."""

    def __init__(self, wires: Wires, address: str) -> None:
        self._wires = wires
        self._address = address
        self._calls: dict[str, End] = {}

    def ask(self, what: Ask, caller: Caller) -> None:
        """Connect and send; a caller whom nobody listens to is cut."""
        me, served = current(), self._wires.served.get(self._address)
        if me is None:
            raise RuntimeError("clients have a process")
        if served is None:
            me.call_soon(caller.cut)
            return
        near = self._calls[what.client_id] = self._wires.line(me, served, "client")

        def forget() -> None:
            self._calls.pop(what.client_id, None)

        def cut(*_: str) -> None:
            forget()
            caller.cut()

        def gone(*_: str) -> None:
            served.what.hang_up(what.client_id)

        near.lost, near.peer.lost = cut, gone
        near.send(served.what.ask, what, CallerSender(near.peer, caller, forget))

    def flush(self, client_id: str) -> None:
        """Bring the answer up to date, at once."""
        near, served = self._calls.get(client_id), self._wires.served.get(self._address)
        if near is not None and served is not None and not served.process.stopped:
            near.look(served.what.flush, client_id)

    def hang_up(self, client_id: str) -> None:
        """Close the connection."""
        near = self._calls.pop(client_id, None)
        if near is not None:
            near.close()
