"""Returns that land late: who ends a request whose client came back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from relume.controlplane.replica.live_requests import LiveRequest
from relume.controlplane.replica.resumptions import StreamResumptions
from relume.controlplane.stream.arrival import Arrival
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import Guarantee

OURS = "r.r0"


def late_return(let_go: bool) -> list[Any]:
    """The client of "q" returned; we ended "q", or let go of it; then the return landed. What we
    wrote."""
    written: list[Any] = []

    def emit(event: Any) -> int:
        written.append(event)
        return 4 + len(written)

    async def changed() -> None: ...

    request = SimpleNamespace(owner=OURS, boot="b", verdict=Guarantee.EXACT)
    fleet = SimpleNamespace(
        streams={OURS: SimpleNamespace(position=3)}, requests={"q": request}, placed={}, workers={}
    )
    decisions: Any = SimpleNamespace(
        view=SimpleNamespace(fleet=fleet, stream=OURS), boot="b", emit=emit,
        decision_id=lambda: "d",
    )  # fmt: skip
    arrival = Arrival(
        request="q", model="m", route="/v1/completions", stream=True, prompt_tokens=1,
        max_tokens=9, verdict="exact",
    )  # fmt: skip
    live = {"q": LiveRequest(arrival)}
    returns = StreamResumptions(decisions, live, lambda *given: None, changed)
    returns.came_back("q", 3, 0)
    first = written.pop()
    returns.came_back("q", 4, 0)  # written at position 5, and the first one before it
    if let_go:
        returns.left_unserved(live["q"])
    del live["q"]
    returns.seen(OURS, 4, first)
    assert len(written) == 1, "an earlier return does not end it"
    returns.seen(OURS, 5, written[0])
    return written


@pytest.mark.parametrize("let_go", [False, True])
def test_a_return_that_lands_late_ends_only_what_we_let_go_of(let_go: bool) -> None:
    kinds = [type(event) for event in late_return(let_go)]
    assert kinds == [v.ClientReturned] + [v.RequestEnded] * let_go
