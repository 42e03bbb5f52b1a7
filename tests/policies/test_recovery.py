"""How a cut request goes on."""

from __future__ import annotations

import pytest

from policies.recovery import mode_of


@pytest.mark.parametrize("verdict", ["exact", "sampled", "replay", "restart"])
@pytest.mark.parametrize("streaming", [True, False])
def test_client_with_nothing_starts_anew(verdict: str, streaming: bool) -> None:
    assert mode_of(verdict, streaming, 0) == "new"


@pytest.mark.parametrize(
    ("verdict", "mode"),
    [("exact", "continue"), ("sampled", "continue"), ("replay", "replay"), ("restart", "hopeless")],
)
def test_streaming_client_with_tokens(verdict: str, mode: str) -> None:
    assert mode_of(verdict, True, 17) == mode


@pytest.mark.parametrize(
    ("verdict", "mode"),
    [("exact", "continue"), ("sampled", "continue"), ("replay", "new"), ("restart", "new")],
)
def test_client_that_waits_for_the_whole_has_no_bytes_yet(verdict: str, mode: str) -> None:
    assert mode_of(verdict, False, 17) == mode


def test_unknown_verdict_is_a_broken_invariant() -> None:
    with pytest.raises(KeyError):
        mode_of("maybe", True, 1)
