"""Where a resumable stream began: what a replica of a later log must know to take it over.

A log may end under engines that run, and another begins in its place. It names no request of the former
one. So the dispatch of a resumable stream carries the id of its log, and the request as it arrived
there. The engine has both beside the stream, and the request's holders in its envelope.
"""

from __future__ import annotations

import re
from typing import Self

from msgspec import Struct

from relume.events.log import codec
from relume.events.log.errors import LogError
from relume.events.vocabulary import RequestArrived
from relume.events.wire.errors import HeaderError
from relume.events.wire.headers import ORIGIN, decode_record, encode_record

_LOG_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}").fullmatch


class StreamOrigin(Struct, frozen=True):
    """The log in which the request arrived, and its arrival there."""

    log: str
    arrival: RequestArrived

    def format(self) -> str:
        """As the value of `ORIGIN`."""
        return f"{self.log} {encode_record(codec.encode(self.arrival)).decode()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises HeaderError."""
        log, _, record = text.partition(" ")
        if not _LOG_ID(log):
            raise HeaderError(ORIGIN, f"{log[:80]!r} is no id of a log")
        try:
            arrival = codec.decode(decode_record(ORIGIN, record))
        except LogError as error:
            raise HeaderError(ORIGIN, str(error)) from None
        if type(arrival) is not RequestArrived or not arrival.resumable:
            raise HeaderError(ORIGIN, "its record is not the arrival of a resumable stream")
        return cls(log, arrival)


def log_of(origin: str) -> str:
    """The log in a value of `ORIGIN`, which need not be well-formed."""
    return origin.partition(" ")[0]
