"""One sound run for all tests that need one."""

from __future__ import annotations

import asyncio

import pytest

from tests.validators.builders import Run, sound_run


@pytest.fixture(scope="session")
def run() -> Run:
    return asyncio.run(sound_run())
