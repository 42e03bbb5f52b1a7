"""Principals of API calls: bearer tokens with roles, or the local operator when there are none."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from msgspec import Struct

from relume.controlplane.admin.errors import Forbidden, Unauthenticated
from relume.controlplane.gateway.config import is_loopback
from relume.controlplane.serve_settings import ROLES


class Principal(Struct, frozen=True):
    """The caller: `name` goes into the log with every change (I16)."""

    name: str
    role: str


LOCAL = Principal("local", "admin")


class Authenticator:
    """Checks tokens in constant time.

    `tokens` maps a token to `role` or `role:name`. Without a name the principal is the role
    and a fingerprint of the token. Without tokens every caller is `local`, provided its Host header
    is a loopback name: a web page that resolves its own name to 127.0.0.1 does not.
    """

    def __init__(self, tokens: Mapping[str, str]) -> None:
        self._known: list[tuple[bytes, Principal]] = []
        for token, given in tokens.items():
            role, _, name = given.partition(":")
            digest = hashlib.sha256(token.encode()).digest()
            self._known.append((digest, Principal(name or f"{role}-{digest.hex()[:8]}", role)))

    def principal(self, authorization: str, host: str, origin: str = "") -> Principal:
        """The caller, from the headers of its request. Raises Unauthenticated, Forbidden."""
        if not self._known:
            name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
            if not is_loopback(name) or (origin and not _is_loopback_origin(origin)):
                raise Forbidden(f"without tokens only loopback is served, not {origin or host!r}")
            return LOCAL
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("send `Authorization: Bearer TOKEN`")
        digest = hashlib.sha256(token.strip().encode()).digest()
        found = None
        for known, principal in self._known:  # all of them: no early exit to time
            if hmac.compare_digest(known, digest):
                found = principal
        if found is None:
            raise Unauthenticated("this token is not known here")
        return found


def require(principal: Principal, role: str) -> None:
    """Raise Forbidden unless `principal` has `role` or a higher one."""
    if ROLES.index(principal.role) < ROLES.index(role):
        raise Forbidden(f"{principal.name} is {principal.role}; this needs {role}")


def _is_loopback_origin(origin: str) -> bool:
    authority = origin.partition("://")[2]
    return is_loopback(
        authority.rpartition(":")[0] if authority.rpartition(":")[2].isdigit() else authority
    )
