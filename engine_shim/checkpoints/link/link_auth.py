"""Authentication of a plaintext link: both ends prove that they know the fleet's secret.

CURVE authenticates and encrypts by keys; on one host the kernel authenticates the peer's user.
Between hosts of a declared private network, where CURVE's cost is not wanted, the
connection opens with a challenge and a response in both directions (HMAC-SHA256 over both
nonces and the greeting), so that neither end can be replayed or reflected. What follows
on that connection is neither encrypted nor signed: that is what "declared private" means.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import os
import secrets
import stat
from collections.abc import Sequence

NONCE_BYTES = 32
MIN_SECRET_BYTES = 16


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def server_mac(secret: bytes, client_nonce: bytes, server_nonce: bytes, hello: bytes) -> bytes:
    """The daemon's proof, made before it has seen the client's."""
    return _mac(secret, b"relume-kv-server", client_nonce, server_nonce, hello)


def client_mac(secret: bytes, client_nonce: bytes, server_nonce: bytes, hello: bytes) -> bytes:
    """The client's proof; `hello` binds it to the identity it claimed."""
    return _mac(secret, b"relume-kv-client", client_nonce, server_nonce, hello)


def _mac(secret: bytes, label: bytes, *parts: bytes) -> bytes:
    mac = hmac.new(secret, label, hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(4, "big") + part)
    return mac.digest()


def equal(a: bytes, b: bytes) -> bool:
    """In constant time."""
    return hmac.compare_digest(a, b)


def declared_private(address: str, networks: Sequence[str]) -> bool:
    """Whether `address` is loopback or lies in one of the declared networks.

    Raises ValueError for what is no address or network.
    """
    ip = ipaddress.ip_address(address)
    return ip.is_loopback or any(ip in ipaddress.ip_network(network) for network in networks)


def read_private(path: str) -> bytes:
    """A secret file's content, for its owner's eyes only; one of root's may be readable by
    its group, as mounted secrets are.

    Raises OSError, PermissionError when others can read it.
    """
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        allowed = stat.S_IRWXU | (stat.S_IRGRP if found.st_uid == 0 else 0)
        if found.st_mode & 0o777 & ~allowed:
            raise PermissionError(errno.EACCES, "can be read by others; chmod 600", path)
        return file.read().strip()
