"""The gateway in virtual time: the real `Gateway` without a socket.

Its sessions are the real `RequestSession` (`sim_session`), fed with the bytes of real frames; its
connections to engines are those of the simulated network (`sim_connections`). Engines report streams
late: a reader that needs the position of one (`look`) has its engine report it.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from random import Random
from typing import Any

from relume.chaos.sim.engine.prefix_model import of_prompt
from relume.chaos.sim.gateway.answer_bytes import RELAYED, WHOLE, style_of
from relume.chaos.sim.gateway.client_connection import SimClientConnection
from relume.chaos.sim.gateway.request_body import decode, may_keep
from relume.chaos.sim.gateway.sim_connections import SimPool, SimUpstream
from relume.chaos.sim.gateway.sim_session import PATH, SimSession, body_of
from relume.chaos.sim.message_ports import Ask, Caller
from relume.chaos.sim.world.network import Wires
from relume.chaos.sim.world.virtual_loop import Process
from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.gateway.endpoint import Gateway
from relume.controlplane.gateway.http.replies import Reply, error_reply
from relume.controlplane.gateway.ports import SchedulerPort
from relume.controlplane.gateway.request_session import RequestSession
from relume.controlplane.gateway.streams import Streams
from relume.controlplane.stream import event_ids
from relume.controlplane.stream.arrival import Arrival
from relume.controlplane.stream.stream_data import RelayedRequest, Stream
from relume.events.log.errors import LogError
from relume.events.vocabulary.enums import Guarantee, Tier
from relume.events.wire.tokenizer_messages import CountReply

RELAYED_PATH = "/v1/embeddings"
_REASONS = {
    "relayed": "unprotected route",
    "restarting": "its engine cannot\r\ncontinue it",
}
METHODS = ("POST", "GET", "HEAD")


def _relayed(what: Ask) -> RelayedRequest:
    return RelayedRequest(METHODS[zlib.crc32(what.content_id.encode()) % 3], (("accept", "*/*"),))


class PromptCounts:
    """The tokenising process: it returns the number in the body, late, or does not answer."""

    wait_s = 0.25

    def __init__(self, name: str) -> None:
        self._random = Random(f"{name}:counts")

    async def count(
        self, model: str, chat: bool, block_tokens: int, body: bytes
    ) -> CountReply | None:
        """See `token_counts.Tokens`."""
        after_s = self._random.choice((0.0, 0.001, 0.05, self.wait_s))
        usable = self._random.random() < 0.8
        if after_s:
            await asyncio.sleep(after_s)
        tokens = decode(body).prompt_tokens
        return CountReply(1, tokens) if usable and after_s < self.wait_s else None


class SimGateway(Gateway):
    """A `Door` for clients, and the real `GatewayPort`."""

    model = ""
    """The model of requests that name none: the fleet's only one."""

    def __init__(
        self,
        scheduler: SchedulerPort,
        wires: Wires,
        process: Process,
        config: GatewayConfig | None = None,
    ) -> None:
        clock = wires.loop.time
        super().__init__(
            scheduler, config or GatewayConfig(max_requests=1 << 20), clock=clock,
            wall_clock=lambda: time.time(),
        )  # fmt: skip
        self._connections: dict[str, SimClientConnection] = {}
        streams = self._streams
        session: Any = SimSession
        streams = Streams(self.config.resume, streams._wall_clock, streams._entropy, session)
        counts: Any = PromptCounts(process.name)
        self._assemble(SimPool(wires, process, self.config), streams, counts)

    async def start(self) -> None:
        """Start without a socket: the network gives it an address."""
        ready = asyncio.Event()
        self._runner = asyncio.create_task(self._run(ready), name="gateway")
        await ready.wait()

    @property
    def taken(self) -> frozenset[str]:
        """Requests of other replicas whose last bytes may have reached their clients from here."""
        return frozenset(name for name, one in self._streams.open.items() if one.is_taken)

    # --- Door

    def ask(self, what: Ask, caller: Caller) -> None:
        """A client's request."""
        if self.counters.in_flight >= self.config.max_requests:
            caller.refused(429, "too many requests are under way; try again")
            return
        model, marks = what.model or self.model, b""
        if what.prefix:
            size = self._scheduler.block_tokens(model)
            marks = of_prompt(what.prefix, what.prefix_block, what.prompt_tokens, size)
        client = SimClientConnection(caller, what, self._connections)
        if what.last_event_id:
            self._return(client)
            return
        is_relayed = what.kind == "relayed"
        arrival = Arrival(
            request=self.service.new_id(), model=model, route=RELAYED_PATH if is_relayed else PATH,
            stream=style_of(what.content_id, what.kind) not in (WHOLE, RELAYED), prompt_tokens=what.prompt_tokens,
            max_tokens=0 if is_relayed else what.output_tokens, verdict=Guarantee(what.verdict),
            reason=_REASONS.get(what.kind, ""), protected=not is_relayed,
            client_id=what.client_id, priority=what.priority,
            needs=("choices",) if what.kind == "choices" else (), fallback=Guarantee.BEST_EFFORT,
            prefix=marks, tier=Tier(what.tier), share=what.tenant,
            countable=what.kind == "counted", may_keep=may_keep(what.content_id),
        )  # fmt: skip
        if what.kind == "resumable":
            session: RequestSession = self._streams.new(
                self._context, client, arrival, PATH, what.client_id, body_of(what)
            )
        else:
            stream = Stream(
                arrival=arrival,
                path=arrival.route,
                response_id=what.client_id,
                body=body_of(what),
                limits=self.config,
                now=self.clock(),
                relayed=_relayed(what) if is_relayed else None,
            )
            session = SimSession(self._context, client, stream)
        refused = self.service.started(session)
        if isinstance(refused, Reply):
            client.forget()
            caller.refused(refused.status, "not taken")

    def _return(self, client: SimClientConnection) -> None:
        """A client returns to its stream."""
        what = client.what
        shown = event_ids.parse(what.last_event_id)
        assert shown is not None
        try:
            served = self._streams.returned(self._context, client, shown, PATH, what.client_id, "")
        except LogError:
            served = error_reply(503, "the control plane cannot take streams over at present")
        if isinstance(served, Reply):
            client.forget()
            client.reply(served)

    def flush(self, connection: str) -> None:
        """Report the answer up to now."""
        client = self._connections.get(connection)
        if client is not None:
            client.session.look()

    def hang_up(self, connection: str) -> None:
        """The client closed its connection."""
        client = self._connections.pop(connection, None)
        if client is not None and client.session.connection is client:
            client.session.gone()

    def cut_frame(self, worker: str, incarnation: int, random: Random) -> bool:
        """Break the connection of one answer from that engine; False: there is none."""
        self._look_at(worker, incarnation)
        found = [
            attempt.upstream
            for attempt in self._attempts.get((worker, incarnation), ())
            if isinstance(attempt, SimSession) and isinstance(attempt.upstream, SimUpstream)
        ]
        if not found:
            return False
        random.choice(found).reset()
        return True

    # --- GatewayPort

    def delivered_on(self, worker: str, incarnation: int) -> dict[str, int]:
        """See GatewayPort; brought up to date first."""
        self._look_at(worker, incarnation)
        return super().delivered_on(worker, incarnation)

    def movable_on(self, worker: str, incarnation: int) -> dict[str, int]:
        """See GatewayPort; brought up to date first."""
        self._look_at(worker, incarnation)
        return super().movable_on(worker, incarnation)

    def movable_tokens(self, worker: str, incarnation: int, request: str) -> int | None:
        """See GatewayPort; brought up to date first."""
        self._look_at(worker, incarnation)
        return super().movable_tokens(worker, incarnation, request)

    def silent_on(
        self, worker: str, incarnation: int, before: float
    ) -> dict[tuple[str, int], float]:
        """See GatewayPort; brought up to date first."""
        self._refresh(worker, incarnation)
        return super().silent_on(worker, incarnation, before)

    def withheld_on(self, worker: str, incarnation: int) -> list[tuple[str, int]]:
        """See GatewayPort; brought up to date first."""
        self._refresh(worker, incarnation)
        return super().withheld_on(worker, incarnation)

    def _refresh(self, worker: str, incarnation: int) -> None:
        for attempt in self._attempts.get((worker, incarnation), ()):
            if isinstance(attempt, SimSession) and isinstance(attempt.upstream, SimUpstream):
                attempt.upstream.refresh()

    def _look_at(self, worker: str, incarnation: int) -> None:
        for attempt in list(self._attempts.get((worker, incarnation), ())):
            if isinstance(attempt, SimSession):
                attempt.look()
