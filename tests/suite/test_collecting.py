"""What collecting the tests costs every process of a run."""

from __future__ import annotations

import pytest

from tests.suite.sharing import HEAVY


def test_collecting_imports_no_vllm(request: pytest.FixtureRequest) -> None:
    """Every process of a run collects every test; vLLM would cost each 5 s of a CPU and 400 MB.
    Tests of it import it in their bodies or fixtures."""
    assert request.config.stash[HEAVY] == set()
