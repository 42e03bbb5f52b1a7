"""API keys of clients, and the client that each request belongs to."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from relume.controlplane.gateway.http.reading import Request


class Keys:
    """The accepted keys; without any, every request is accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._tenants = {key.encode(): tenant(key) for key in sorted(keys)}

    def tenant_of(self, request: Request) -> str | None:
        """The client whose key this is, a bearer token or, as clients of `/v1/messages` send it,
        `x-api-key`; None for a wrong key. Compares in constant time."""
        if not self._tenants:
            return ""
        scheme, _, shown = request.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            shown = request.headers.get(b"x-api-key", b"")
        found = None
        for key, name in self._tenants.items():
            if hmac.compare_digest(key, shown.strip()):
                found = name
        return found


def tenant(key: str) -> str:
    """A name for a key that does not give it away."""
    return hashlib.sha256(key.encode()).hexdigest()[:12]
