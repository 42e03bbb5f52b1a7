"""A picture of the live page, made by a headless Chromium if there is one."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
SIZE = (1280, 820)
DRAWN_MS = 3000
"""Time for which the page loads: its event stream never ends."""
MOST_S = 30.0
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--hide-scrollbars",
)  # fmt: skip


def find_chromium() -> str:
    """RELUME_CHROMIUM, or the first on PATH; empty if there is none."""
    named = os.environ.get("RELUME_CHROMIUM", "")
    return named or next(filter(None, map(shutil.which, NAMES)), "")


async def take_picture(url: str, path: Path) -> str:
    """Write a picture of the page at `url` to `path`. Returns why there is none; empty: there is."""
    if not (chromium := find_chromium()):
        return "no Chromium on PATH (`apt-get install chromium`, or set RELUME_CHROMIUM)"
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="relume-page-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            chromium, *_FLAGS, f"--user-data-dir={profile}", f"--timeout={DRAWN_MS}",
            "--window-size={},{}".format(*SIZE), f"--screenshot={path.resolve()}", url,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(MOST_S):
                await process.wait()
        except TimeoutError:
            return f"{chromium} did not end within {MOST_S:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return "" if path.exists() else f"{chromium} ended with {process.returncode}, without a picture"
