"""What etcd reports only on its metrics page: its quota.

Etcd serves the page on its client port, beside gRPC, by default.
"""

from __future__ import annotations

import asyncio
import re
import ssl

from relume.events.etcd.config import TlsConfig

_QUOTA = re.compile(rb"^etcd_server_quota_backend_bytes ([0-9.e+]+)$", re.MULTILINE)
_MOST_BYTES = 4 * 1024 * 1024


async def quota_bytes(endpoint: str, tls: TlsConfig | None, timeout_s: float) -> int:
    """The member's --quota-backend-bytes; 0 if it is unknown, for any reason."""
    try:
        async with asyncio.timeout(timeout_s):
            page = await _get(endpoint, "/metrics", tls)
    except (OSError, TimeoutError):
        return 0
    found = _QUOTA.search(page)
    return int(float(found[1])) if found else 0


async def _get(endpoint: str, path: str, tls: TlsConfig | None) -> bytes:
    """The answer to a GET, head and body. HTTP/1.0: one answer, then the end.

    Raises OSError (ssl.SSLError is one).
    """
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    name = (tls.server_name or host) if tls else None
    reader, writer = await asyncio.open_connection(
        host, int(port), ssl=_context(tls) if tls else None, server_hostname=name
    )
    try:
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {endpoint}\r\n\r\n".encode())
        page = b""
        while len(page) < _MOST_BYTES and (more := await reader.read(65_536)):
            page += more
        return page
    finally:
        writer.close()


def _context(tls: TlsConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca or None)
    if tls.cert:
        context.load_cert_chain(tls.cert, tls.key or None)
    return context
