"""Envelopes of resumable requests, on their way to the request's holders and back.

The API process has separate links for them: they need no KV cache and no fingerprint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from relume.engine_shim import identity
from relume.engine_shim.checkpoints.connector_settings import settings_of
from relume.engine_shim.checkpoints.daemon_links import LinkConfig, Links
from relume.engine_shim.checkpoints.link.image import digest_of
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.kv_errors import KvStreamError

logger = logging.getLogger(__name__)

ANSWER_S = 1.0


class EnvelopeLinks:
    """Links to state daemons of an engine that takes part in checkpoints."""

    def __init__(self, config: LinkConfig) -> None:
        me = identity.from_environment()
        self._links = Links(config, me.worker, me.incarnation, "keeper", None)
        self._counts = dict.fromkeys(("kept", "refused", "too_large"), 0)

    @classmethod
    def of(cls, vllm_config: Any) -> EnvelopeLinks | None:
        """None for an engine that takes no part in checkpoints."""
        settings = settings_of(vllm_config)
        if settings is None:
            return None
        try:
            return cls(LinkConfig.of(settings))
        except msgspec.ValidationError:
            return None  # the connector says what is wrong

    async def keep(
        self, request: str, attempt: int, endpoints: Sequence[str], envelope: bytes
    ) -> None:
        """Give the envelope to every holder; one that does not take it is logged."""
        if len(envelope) > m.MAX_ENVELOPE_BYTES:
            self._counts["too_large"] += 1
            logger.warning("no envelope of %s: %d bytes are too many", request, len(envelope))
            return
        message: m.Message = m.Keep(0, request, attempt, envelope)
        chunk: tuple[bytes, ...] = ()
        if len(envelope) > m.MAX_INLINE_ENVELOPE:
            message, chunk = m.KeepChunk(0, request, attempt, digest_of(envelope)), (envelope,)
        asking = [asyncio.to_thread(self._ask, endpoint, message, chunk) for endpoint in endpoints]
        for endpoint, answer in zip(endpoints, await asyncio.gather(*asking), strict=True):
            if isinstance(answer, KvStreamError):
                self._counts["refused"] += 1
                logger.warning("no envelope of %s at %s: %s", request, endpoint, answer)
            else:
                self._counts["kept"] += 1

    async def recall(self, request: str, endpoints: Sequence[str]) -> bytes:
        """The envelope with the latest attempt among `endpoints`; empty when none has it."""
        message = m.Recall(0, request)
        asking = [asyncio.to_thread(self._ask, endpoint, message) for endpoint in endpoints]
        answers = [a for a in await asyncio.gather(*asking) if isinstance(a, m.Envelope)]
        return max(answers, key=lambda a: a.attempt).envelope if answers else b""

    def figures(self) -> dict[str, int]:
        """What became of the envelopes, each holder counted: for the log."""
        return {f"envelopes_{name}": count for name, count in self._counts.items()}

    def _ask(self, endpoint: str, message: Any, chunk: tuple[bytes, ...] = ()) -> Any:
        """The answer, with the chunk of an envelope in its place, or what went wrong."""
        try:
            answer, found = self._links.peer(endpoint).ask(message, ANSWER_S, chunk)
        except KvStreamError as error:
            return error
        if isinstance(answer, m.Envelope) and not answer.envelope:
            return msgspec.structs.replace(answer, envelope=bytes(found))
        return answer
