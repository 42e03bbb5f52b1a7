"""The files of the page: plain ES modules, a style sheet and one document, from this package.

They are public, since they hold no data: whoever reads the fleet's data needs a role. The policy in
their headers lets the page load nothing from elsewhere, run no inline script and make no HTML of text.
"""

from __future__ import annotations

import gzip
from hashlib import blake2b
from pathlib import Path

from aiohttp import web
from msgspec import Struct

from relume.controlplane.admin.errors import NotFound

FOLDER = Path(__file__).with_name("static")
INDEX = "index.html"
LIVE = b'<meta name="relume-source" content="live">'
RECORDING = b'<meta name="relume-source" content="recording">'
"""What the document says of the server behind it."""
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Of every file. `no-cache`: a browser asks each time whether its copy is current."""


class StaticFile(Struct, frozen=True):
    """A file in memory. `tag` changes with its contents."""

    kind: str
    plain: bytes
    packed: bytes
    tag: str


def read_files(recording: bool = False) -> dict[str, StaticFile]:
    """The files by name, for a live replica or for a stored log. Raises OSError."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in KINDS:
            plain = path.read_bytes()
            if recording and path.name == INDEX:
                plain = plain.replace(LIVE, RECORDING)
            found[path.name] = StaticFile(
                kind=KINDS[path.suffix],
                plain=plain,
                packed=gzip.compress(plain, 9, mtime=0),
                tag=f'"{blake2b(plain, digest_size=12).hexdigest()}"',
            )
    return found


class StaticFiles:
    """Handlers of `/ui`, of a live replica or of a stored log."""

    def __init__(self, recording: bool = False) -> None:
        self._files = read_files(recording)

    async def document(self, request: web.Request) -> web.StreamResponse:
        """GET /ui/: the page."""
        return self._answer(request, INDEX)

    async def file(self, request: web.Request) -> web.StreamResponse:
        """GET /ui/{file}. Raises NotFound."""
        return self._answer(request, request.match_info["file"])

    async def redirect(self, request: web.Request) -> web.StreamResponse:
        """GET /ui: to the folder, since the page names its files relative to itself."""
        return web.Response(status=307, headers={**HEADERS, "Location": "ui/"})

    def _answer(self, request: web.Request, name: str) -> web.StreamResponse:
        known = self._files.get(name)
        if known is None:
            raise NotFound(f"no file {name!r}; the page is at /ui/", "file")
        headers = {**HEADERS, "ETag": known.tag, "Vary": "Accept-Encoding"}
        if request.headers.get("If-None-Match", "") == known.tag:
            return web.Response(status=304, headers=headers)
        body = known.plain
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            body = known.packed
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, content_type=known.kind, charset="utf-8", headers=headers)
