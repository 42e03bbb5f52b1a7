"""Clusters that end with their test."""

import pytest

from tests.sim.etcd.cluster import World


@pytest.fixture
def world():
    made = []

    def make(**how):
        made.append(World(**how))
        return made[-1]

    yield make
    for each in made:
        each.etcd.close()
        each.loop.close()
