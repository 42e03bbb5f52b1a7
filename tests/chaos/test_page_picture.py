"""A picture of a page: it needs a Chromium that ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from relume.chaos import page_picture
from relume.chaos.page_picture import find_chromium, take_picture


def stand_in(folder: Path, script: str) -> str:
    """A program in the place of Chromium."""
    program = folder / "chromium"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


async def test_without_chromium_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RELUME_CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get install chromium" in await take_picture("http://x", tmp_path / "page.png")


@pytest.mark.parametrize(
    ("script", "why"),
    [("exit 3", "ended with 3, without a picture"), ("exec sleep 60", "did not end within 0 s")],
)
async def test_a_chromium_that_makes_none_is_named(
    script: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_picture, "MOST_S", 0.3)
    monkeypatch.setenv("RELUME_CHROMIUM", stand_in(tmp_path, script))
    path = tmp_path / "page.png"
    path.write_bytes(b"of an earlier run")
    assert why in await take_picture("http://x", path)
    assert not path.exists()


@pytest.mark.skipif(not find_chromium(), reason="no Chromium: apt-get install chromium")
async def test_the_picture_is_a_png_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<h1>here</h1>")
    path = tmp_path / "made" / "page.png"
    assert await take_picture(page.as_uri(), path) == ""
    assert path.read_bytes().startswith(b"\x89PNG")
