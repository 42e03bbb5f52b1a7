"""Answers over the network: each end holds something that looks like the other (`message_ports`).

A call of a proxy runs at the other end, later. Tokens that were held up on their way (a cut,
a process that was stopped) are as late as they came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from relume.chaos.sim.message_ports import Answer, Caller, Stretch

LATE_NS = 100_000_000
"""Travel time above which a message was held up."""


class Connection(Protocol):
    """One end of a connection, as `relume.chaos.sim.world.network.End`."""

    @property
    def now_ns(self) -> int:
        """Virtual time."""
        ...

    def send(self, work: Callable[..., object], *args: Any) -> None:
        """Run `work` at the other end, after all that was sent before."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it is gone."""
        ...

    def finish(self) -> None:
        """Close both ends without a word to either."""
        ...


class TokenSender:
    """Tokens from `end` to the other end."""

    __slots__ = ("_end", "_to")

    def __init__(self, end: Connection, to: Answer | Caller) -> None:
        self._end = end
        self._to = to

    def tokens(self, stretch: Stretch) -> None:
        self._end.send(self.arrived, stretch, self._end.now_ns)

    def arrived(self, stretch: Stretch, sent_ns: int) -> None:
        """They are at the other end."""
        now_ns = self._end.now_ns
        if now_ns - sent_ns > LATE_NS:
            stretch = Stretch(
                start=stretch.start,
                count=stretch.count,
                first_ns=now_ns,
                last_ns=now_ns,
                wrong=stretch.wrong,
                data=stretch.data,
            )
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

    def attached(self, base: int, known: int) -> None:
        self._end.send(self._to.attached, base, known)

    def refused(self, status: int) -> None:
        self._end.send(self._to.refused, status)

    def broken(self, kind: str) -> None:
        self._end.send(self._to.broken, kind)

    def taken(self) -> None:
        self._end.send(self._to.taken)


class CallerSender(TokenSender):
    """A `Caller` as the gateway has it; `end` is the gateway's. The connection ends with it.
    `arrived_whole`: the client has the end."""

    __slots__ = ("_forget", "arrived_whole")
    _to: Caller

    def __init__(self, end: Connection, to: Caller, forget: Callable[[], object]) -> None:
        super().__init__(end, to)
        self._forget = forget
        self.arrived_whole = False

    @property
    def lost(self) -> bool:
        """Whether the connection is gone."""
        return self._end.closed

    def end(self, finish: str) -> None:
        self._end.send(self._over, self._to.end, finish)

    def refused(self, status: int, message: str) -> None:
        self._end.send(self._over, self._to.refused, status, message)

    def cut(self) -> None:
        self._end.send(self._over, self._to.cut)

    def _over(self, tell: Callable[..., None], *args: Any) -> None:
        self.arrived_whole = True
        self._end.finish()
        self._forget()
        tell(*args)
