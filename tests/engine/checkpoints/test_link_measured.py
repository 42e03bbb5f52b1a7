"""A real engine measures its link to a holder, and its agent hears of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from relume.events.vocabulary import LinkMeasured
from tests.engine import client
from tests.engine.checkpoints.restored_requests import (
    PATH,
    PROMPT,
    body_for,
    connector,
    endpoint,
)
from tests.engine.fleet import Zygote, engine_of, wait_until
from tests.signals import slowed
from tests.state_daemon.daemon import daemon_in

pytestmark = pytest.mark.full
LEAST_BYTES = 1 << 20
"""`link_probe.LEAST_PROBED`."""


def test_a_link_is_measured_once_a_request_left_enough_blocks_there(
    zygote: Zygote, tmp_path: Path
) -> None:
    with (
        daemon_in(tmp_path, budget_bytes=64 << 20) as holder,
        engine_of(zygote.fork(*connector())) as engine,
    ):
        body = body_for(prompt=f"{PROMPT} {PROMPT}", max_tokens=1000, ignore_eos=True)
        headers = client.headers_for(request="long", checkpoint=endpoint(holder))
        connection, _ = client.open_stream(engine.port, PATH, body, headers)
        with slowed(engine.core):  # else it may end before the probe, and its blocks with it
            wait_until(lambda: engine.agent.events, "an event of the engine")
        connection.close()
        (event,) = engine.agent.events
        assert isinstance(event, LinkMeasured), event
        assert event.holder == endpoint(holder) and event.bytes >= LEAST_BYTES
        assert event.duration_us > 0
