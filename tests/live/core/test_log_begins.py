"""etcd loses the end of the log, and another begins in its place: resumable streams continue in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.conftest import small_fleet
from tests.live.streams.new_log import streams_continue

pytestmark = [pytest.mark.core, pytest.mark.timeout(300), pytest.mark.usefixtures("patient")]


async def test_streams_that_outlast_their_replica_continue_token_for_token(
    zygote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await streams_continue(small_fleet(tmp_path, zygote=zygote), "drained", monkeypatch)
