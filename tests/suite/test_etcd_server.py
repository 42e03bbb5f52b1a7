"""The etcd of tests starts again on its ports, also if another process had one meanwhile."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.etcd_server import EtcdServer


@pytest.mark.etcd
def test_a_member_waits_for_a_port_that_another_process_took() -> None:
    with EtcdServer() as etcd, socket.socket() as other:
        etcd.kill9()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", etcd.client_ports[0]))
        other.listen()
        timer = threading.Timer(1.0, other.close)
        timer.start()
        try:
            etcd.restart()
        finally:
            timer.cancel()
        assert etcd.healthy()
        assert "address already in use" in etcd.log_tail(size=1 << 20)
