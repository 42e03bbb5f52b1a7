"""A request as routing sees it."""

from __future__ import annotations

from msgspec import Struct

from relume.events.vocabulary.enums import Tier
from relume.policies.routing.prefix_hits import NONE, Hits


class RouteQuery(Struct, frozen=True, gc=False, kw_only=True):
    """What is to be placed. `avoid` holds `worker:incarnation` that failed it before; `lost`
    is the attempt that was (0: none yet). `prefix`: marks of the prompt, packed
    (`relume.events.wire.prefix`); `hits`: what workers hold of it. `session` it belongs to, `tier`
    of its answer. `at_us` is the time of the decision on the replica's clock, `slo_us` (0: none)
    the time to its first token that its tier asks for, `shed`: it is refused when that cannot be
    kept."""

    request: str = ""
    model: str
    prompt_tokens: int = 0
    delivered: int = 0
    avoid: tuple[str, ...] = ()
    lost: int = 0
    prefix: bytes = b""
    session: str = ""
    tier: Tier = Tier.NONE
    at_us: int = 0
    hits: Hits = NONE
    slo_us: int = 0
    shed: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that a worker that holds nothing of it would compute."""
        return self.prompt_tokens + self.delivered
