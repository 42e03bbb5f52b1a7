"""The agent of the next build: it writes a newer event beside each report of its engine as soon as it may.

python -m tests.mixed_versions.next_agent [flags of `relume worker`]
"""

from __future__ import annotations

import sys

from relume.engine_shim.agent import life
from relume.engine_shim.agent.__main__ import main
from relume.engine_shim.agent.journal import Journal
from tests.mixed_versions.next_build import NEXT, WeatherReported, next_build


class NextJournal(Journal):
    """Of an agent that has something new to say."""

    def step(self, record: bytes) -> bool:
        is_accepted = super().step(record)
        if is_accepted and self.feature_level >= NEXT:
            self.record(WeatherReported(sky="grey"))
        return is_accepted


if __name__ == "__main__":
    life.Journal = NextJournal  # type: ignore[misc]
    with next_build():
        sys.exit(main(sys.argv[1:]))
