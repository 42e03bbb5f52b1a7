"""Fuzzing finds bugs that were put into the product on purpose, by the promises they break."""

from __future__ import annotations

import pytest

from relume.chaos.runner import fuzz
from tests.runner.plants import PLANTS, find


@pytest.mark.full
@pytest.mark.parametrize("name", PLANTS)
def test_fuzzing_finds(name: str) -> None:
    plant = PLANTS[name]
    found = find(plant, [plant.run]) or find(plant)
    assert found is not None, plant.what
    asked, ran = found
    assert plant.promises & {*ran.signature}, ran.why
    assert fuzz.one(asked).result != "failed", "the plant, and nothing else, is what failed"
