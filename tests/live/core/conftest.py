"""The core's fleet: one a session, at rest when a test begins."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.live.core.core_fleet import CoreFleet, CoreFleets


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def core_fleets(
    zygote: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[CoreFleets]:
    fleets = CoreFleets(tmp_path_factory.mktemp("core"), zygote)
    yield fleets
    await fleets.close()


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(core_fleets: CoreFleets) -> AsyncIterator[CoreFleet]:
    """The fleet of the core, for one test."""
    try:
        fleet = await core_fleets.get()
        fleet.begin()
        yield fleet
        try:
            await fleet.rest()
        except BaseException:
            await core_fleets.close()
            raise
    finally:
        core_fleets.leave()
