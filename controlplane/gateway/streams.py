"""The resumable streams of one gateway: begun, resumed, released."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from relume.controlplane.gateway.config import ResumeConfig
from relume.controlplane.gateway.context import ClientPort, Context
from relume.controlplane.gateway.deliveries import Deliveries
from relume.controlplane.gateway.http.replies import Reply, error_reply
from relume.controlplane.gateway.releases import Releases
from relume.controlplane.gateway.request_session import RequestSession
from relume.controlplane.stream import event_ids
from relume.controlplane.stream.arrival import Arrival
from relume.controlplane.stream.error_codes import NO_NEWS, OF_MESSAGES, SOUGHT
from relume.controlplane.stream.stream_data import Stream


class Streams:
    """`open`: by request. `deliveries`: those of them that wait for their client's
    acknowledgement. `wall_clock` gives unix seconds, `entropy(n)` returns n random bytes. `session`
    is the class of sessions."""

    def __init__(
        self,
        config: ResumeConfig,
        wall_clock: Callable[[], float],
        entropy: Callable[[int], bytes],
        session: type[RequestSession] = RequestSession,
    ) -> None:
        self.open: dict[str, RequestSession] = {}
        self.deliveries = Deliveries()
        self.releases = Releases()
        self._config = config
        self._wall_clock = wall_clock
        self._entropy = entropy
        self._session = session

    def new(
        self,
        context: Context,
        connection: ClientPort,
        arrival: Arrival,
        path: str,
        response_id: str,
        body: bytes,
    ) -> RequestSession:
        """A session for a stream that may be resumed."""
        self.deliveries.on_next_request(connection)
        token = event_ids.resume_token(self._entropy(event_ids.TOKEN_ENTROPY_BYTES))
        arrival = msgspec.structs.replace(
            arrival, resumable=event_ids.digest(token), grace_ticks=self._config.grace_ticks
        )
        stream = Stream(
            arrival=arrival,
            path=path,
            response_id=response_id,
            body=body,
            limits=context.config,
            now=context.clock(),
            resume_token=token,
            created=str(int(self._wall_clock())),
        )
        return self._session(context, connection, stream, self)

    def returned(
        self,
        context: Context,
        connection: ClientPort,
        shown: event_ids.EventId,
        path: str,
        response_id: str,
        tenant: str,
    ) -> Reply | RequestSession:
        """A client returns to its stream, which may have been another replica's. Raises
        LogError."""
        session = self.open.get(shown.request)
        if session is not None and session.is_taken:
            session.client_gone()
        elif session is not None:
            if not session.holds(shown.resume_token, tenant):
                return _gone("no such stream")
            session.came_back(connection, shown.position)
            return session
        returns = context.scheduler.returns
        known = returns.known(shown.request)
        if known is None and returns.is_sought(shown.request):
            return _unknown(SOUGHT, context.config.retry_after_s)
        if known is None and returns.is_behind:
            return _unknown(NO_NEWS, context.config.retry_after_s)
        if (
            known is None
            or not event_ids.proves(shown.resume_token, known[1])
            or known[0].tenant != tenant
        ):
            return _gone("no such stream, or it has ended")
        if returns.is_moving(shown.request):
            return _moving(context.config.retry_after_s)
        stream = Stream(
            arrival=known[0],
            path=path,
            response_id=response_id,
            body=b"",
            limits=context.config,
            now=context.clock(),
            resume_token=shown.resume_token,
        )
        session = self._session(context, connection, stream, self)
        session.take_over(shown.position)
        return session

    def expire(self, now: float) -> None:
        """End the streams whose clients stayed away longer than the grace time."""
        for session in [s for s in self.open.values() if now > s.stream.absent_until]:
            session.expire()

    def let_go(self, whose: Callable[[RequestSession], bool]) -> int:
        """Leave streams to whichever replica their clients come to, and wait for nothing more;
        returns how many there were."""
        found = [s for s in self.open.values() if whose(s)]
        for session in found:
            session.let_go()
            if session.is_taken:
                session.client_gone()
        return len(found)

    def away_on(self, worker: str, incarnation: int) -> dict[str, int]:
        """See GatewayPort."""
        found = (s for s in self.open.values() if s.runs_unattended_on(worker, incarnation))
        return {s.arrival.request: s.delivered for s in found}

    def leave(self, worker: str, incarnation: int, cause: str, detail: str) -> None:
        """Give up what runs there for absent clients."""
        for session in [s for s in self.open.values() if s.left_on(worker, incarnation)]:
            session.worker_lost(cause, detail)

    def given_up(self, request: str, attempt: int) -> None:
        """See GatewayPort."""
        if (session := self.open.get(request)) is not None:
            session.handover_noticed(attempt)


def _unknown(message: str, retry_after_s: int) -> Reply:
    """Whether there is such a stream is not known here now."""
    return error_reply(503, message, code=OF_MESSAGES[message], retry_after_s=retry_after_s)


def _moving(retry_after_s: int) -> Reply:
    """It is about to continue, and would be lost if it were taken from its replica now."""
    message = "the worker of this stream is lost, and another replica continues it: return again"
    return error_reply(503, message, code="stream_moving", retry_after_s=retry_after_s)


def _gone(message: str) -> Reply:
    """There is no such stream for this client."""
    return error_reply(410, message, code="stream_gone")
