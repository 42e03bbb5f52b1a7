"""Answers over the network: each end has a proxy of the other (`message_ports`).

A call of a proxy runs at the other end, later. An engine sends tokens in stretches, some time after it
made them. Tokens that were held up (by a cut, or a stopped process) get the times of their arrival.
On a slow link each token travels by itself: it arrives as much later as the link is slow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from msgspec.structs import replace

from relume.chaos.sim.message_ports import Answer, Caller, Stretch

LATE_NS = 100_000_000
"""Travel time above which a message counts as delayed; if the link is slow, above what that explains."""


class Connection(Protocol):
    """One end of a connection, as `relume.chaos.sim.world.network.End`."""

    @property
    def now_ns(self) -> int:
        """Virtual time."""
        ...

    @property
    def travel_ns(self) -> int:
        """The longest that a message sent now travels to the other end, unless it is held up."""
        ...

    def send(self, work: Callable[..., object], *args: Any) -> None:
        """Run `work` at the other end, after all earlier messages."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the connection is gone."""
        ...

    @property
    def is_closed_there(self) -> bool:
        """Whether the other end is closed, whether this one knows or not."""
        ...

    def finish(self) -> None:
        """Close both ends without a notice to either."""
        ...

    def lose_peer(self) -> None:
        """Break the connection at the other end, without a notice; this one gets a reset."""
        ...


class TokenSender:
    """Sends tokens from `end` to the other end."""

    __slots__ = ("_end", "_to")

    def __init__(self, end: Connection, to: Answer | Caller) -> None:
        self._end = end
        self._to = to

    def tokens(self, stretch: Stretch) -> None:
        end = self._end
        end.send(self.arrived, stretch, end.now_ns, end.travel_ns)

    def arrived(self, stretch: Stretch, sent_ns: int, travel_ns: int) -> None:
        """The tokens have reached the other end. `travel_ns`: how long they may have travelled."""
        now_ns = self._end.now_ns
        took_ns = now_ns - sent_ns
        if took_ns > LATE_NS + travel_ns:
            stretch = replace(stretch, first_ns=now_ns, last_ns=now_ns, longest_ns=0)
        elif took_ns > LATE_NS:
            first_ns, last_ns = stretch.first_ns + took_ns, stretch.last_ns + took_ns
            stretch = replace(stretch, first_ns=first_ns, last_ns=last_ns)
        self._to.tokens(stretch)


class AnswerSender(TokenSender):
    """The engine's proxy of an `Answer`; `end` is the engine's."""

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
    """The gateway's proxy of a `Caller`; `end` is the gateway's. The connection ends with it.
    `arrived_whole`: the client has received the end; `loses_end`: it never does."""

    __slots__ = ("_forget", "_loses_end", "arrived_whole")
    _to: Caller

    def __init__(
        self, end: Connection, to: Caller, forget: Callable[[], object], loses_end: bool = False
    ) -> None:
        super().__init__(end, to)
        self._forget = forget
        self._loses_end = loses_end
        self.arrived_whole = False

    @property
    def lost(self) -> bool:
        """Whether the connection is gone."""
        return self._end.closed

    def end(self, finish: str, status: int = 200) -> None:
        self._end.send(self._over, self._to.end, finish, status)

    def refused(self, status: int, message: str) -> None:
        self._end.send(self._over, self._to.refused, status, message)

    def cut(self) -> None:
        self._end.send(self._over, self._to.cut)

    def lost_end(self) -> None:
        self._end.send(self._over, self._to.lost_end)

    def _over(self, tell: Callable[..., None], *args: Any) -> None:
        if self._end.is_closed_there:
            return  # a closed socket acknowledges nothing
        if self._loses_end:
            self._end.lose_peer()
            self._forget()
            self._to.lost_end()
            return
        self.arrived_whole = True
        self._end.finish()
        self._forget()
        tell(*args)
