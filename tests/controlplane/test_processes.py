"""Ports for the processes of a local fleet."""

from __future__ import annotations

import socket
from pathlib import Path

from controlplane.processes import free_port


def test_ports_lie_below_the_ephemeral_range_and_none_is_given_twice() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(50)]
    assert max(ports) < low and len(set(ports)) == 50


def test_the_preferred_port_is_given_while_it_is_free() -> None:
    port = free_port()
    assert free_port(port) == port
    with socket.create_server(("127.0.0.1", port)):
        assert free_port(port) != port
