"""The stream machine: one client request's life, without I/O, clock or event loop.

    machine = StreamMachine(stream)
    for effect in machine.handle(event, now):
        carry_out(effect)                           # some are answered by the next event
    chunk = machine.state.take(chunk, now)          # the hot path of a streaming answer

`table` says what may happen when, `stream_events` what a shell feeds in, `stream_effects` what the
shell must do. `now` is in seconds of any monotonic clock.
"""

from __future__ import annotations

from relume.controlplane.stream.arrival import Assignment
from relume.controlplane.stream.errors import IllegalEvent
from relume.controlplane.stream.handlers.endings import attempt_of, end
from relume.controlplane.stream.handlers.resuming import can_be_placed
from relume.controlplane.stream.stream_data import Stream
from relume.controlplane.stream.stream_effects import Effect
from relume.controlplane.stream.stream_states import (
    Attaching,
    Attempt,
    AwaitingFirst,
    Collecting,
    Connecting,
    Counting,
    Detached,
    Ended,
    Regenerating,
    State,
    Streaming,
)
from relume.controlplane.stream.table import TABLE
from relume.events.vocabulary.enums import AttemptMode, RequestOutcome

_BRINGING = frozenset((Streaming, Collecting, Regenerating))
"""States in which tokens of the attempt came already."""


class StreamMachine:
    """One request. `stream`: what it carries from state to state."""

    __slots__ = ("state", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.state: State = Counting()

    def handle(self, event: object, now: float) -> list[Effect]:
        """Take an event; the effects that follow, in order. Raises IllegalEvent."""
        stream, state = self.stream, self.state
        handler = TABLE[type(state)].get(type(event))
        if handler is None:
            raise IllegalEvent(state, event)
        effects = stream.effects = []
        self.state = handler(stream, state, event, now)
        return effects

    def give_up(self) -> list[Effect]:
        """The last resort, where even `Fault` failed: end without a word to the client."""
        stream = self.stream
        stream.effects = []
        self.state = end(
            stream, self.state, RequestOutcome.FAILED, 500, "the gateway failed on this request"
        )
        return stream.effects

    def accepts(self, event: type) -> bool:
        """Whether the row of the current state has such an event."""
        return event in TABLE[type(self.state)]

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return type(self.state) is Ended

    @property
    def is_movable(self) -> bool:
        """Whether the attempt may be handed over now: another worker can take it up. An engine
        does not know relayed requests as attempts, so it cannot hand them over."""
        state, stream = self.state, self.stream
        if type(state) in (Attaching, Connecting) or not isinstance(state, Attempt):
            return False
        if stream.relayed is not None:
            return False
        return not stream.again and not stream.obstacle()

    @property
    def owes_token(self) -> bool:
        """Whether the attempt brings its tokens one by one, the next one is due, and another worker
        can take the stream up. A new answer in one piece may come with its end, and a replay sends
        nothing until it has all of the client's part again: of these no first token is due."""
        state = self.state
        if type(state) is AwaitingFirst:
            mode = state.to.mode
            is_new = mode == AttemptMode.NEW and self.stream.arrival.stream
            is_due = is_new or mode == AttemptMode.CONTINUE
        else:
            is_due = type(state) in _BRINGING
        return is_due and self.is_movable

    @property
    def withholds(self) -> bool:
        """Whether no token is due because the attempt may send none before its engine is done, and
        another worker can take the stream up: a replay, and a new answer in one piece."""
        return type(self.state) is AwaitingFirst and not self.owes_token and self.is_movable

    @property
    def placeable(self) -> Assignment | None:
        """The attempt that runs on for an absent client, if another worker can take the stream up
        after what that client has."""
        state = self.state
        if isinstance(state, Detached) and can_be_placed(self.stream, state):
            return state.left
        return None

    @property
    def attempt(self) -> Assignment | None:
        """The attempt under way."""
        return attempt_of(self.state)
