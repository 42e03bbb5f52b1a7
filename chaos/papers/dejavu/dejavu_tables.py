"""DéjàVu Tables 2 to 5 as data: the best configurations for Figures 16 to 19."""

from __future__ import annotations

from msgspec import Struct

from relume.chaos.papers.dejavu.inputs import (
    BLOOM_176B,
    OPT_30B,
    OPT_66B,
    Machine,
    Model,
    a100,
    v100,
)


class Best(Struct, frozen=True):
    """The best of `machines`. One pipeline: its microbatch. Several: their number, depth and
    microbatch. Apart: machines and microbatch for prompts, and for tokens."""

    machines: int
    batch: int
    parallel: tuple[int, int, int] | None = None
    apart: tuple[int, int, int, int] | None = None


class Setting(Struct, frozen=True, kw_only=True):
    """A figure's model and machines, and its table."""

    figure: int
    table: int
    model: Model
    machine: Machine
    rows: tuple[Best, ...]


SETTINGS = (
    Setting(
        figure=16, table=2, model=OPT_66B, machine=a100(2),
        rows=(
            Best(1, 4),
            Best(2, 16, (2, 1, 4), (1, 4, 1, 4)),
            Best(4, 16, (2, 2, 16), (2, 2, 2, 2)),
            Best(6, 16, (3, 2, 16), (2, 16, 4, 16)),
            Best(8, 16, (2, 4, 16), (3, 16, 5, 16)),
            Best(10, 16, (5, 2, 16), (4, 16, 6, 16)),
            Best(12, 16, (3, 4, 16), (5, 16, 7, 16)),
            Best(14, 16, (7, 2, 16), (5, 16, 9, 16)),
            Best(16, 8, (4, 4, 16), (6, 16, 10, 16)),
        ),
    ),
    Setting(
        figure=17, table=3, model=OPT_66B, machine=a100(4),
        rows=(
            Best(1, 32),
            Best(2, 32, (2, 1, 32), (1, 32, 1, 32)),
            Best(4, 16, (4, 1, 32), (2, 32, 2, 32)),
            Best(6, 32, (6, 1, 32), (3, 32, 3, 32)),
            Best(8, 16, (8, 1, 32), (4, 32, 4, 32)),
            Best(10, 32, (10, 1, 32), (5, 32, 5, 32)),
            Best(12, 16, (12, 1, 32), (6, 32, 6, 32)),
            Best(14, 32, (14, 1, 32), (7, 32, 7, 32)),
            Best(16, 8, (16, 1, 32), (8, 32, 8, 32)),
        ),
    ),
    Setting(
        figure=18, table=4, model=OPT_30B, machine=v100(4),
        rows=(
            Best(2, 8),
            Best(4, 16, (2, 2, 8), (2, 8, 2, 8)),
            Best(6, 16, (3, 2, 8), (2, 16, 4, 16)),
            Best(8, 16, (2, 4, 16), (3, 16, 5, 16)),
            Best(10, 16, (5, 2, 8), (4, 16, 6, 16)),
            Best(12, 16, (3, 4, 16), (5, 16, 7, 16)),
            Best(14, 16, (7, 2, 8), (6, 16, 8, 16)),
            Best(16, 8, (4, 4, 16), (7, 16, 9, 16)),
        ),
    ),
    Setting(
        figure=19, table=5, model=BLOOM_176B, machine=a100(4),
        rows=(
            Best(2, 16),
            Best(4, 16, (2, 2, 16), (2, 16, 2, 16)),
            Best(6, 32, (3, 2, 16), (3, 16, 3, 16)),
            Best(8, 16, (2, 4, 16), (4, 16, 4, 16)),
            Best(10, 32, (5, 2, 16), (5, 16, 5, 16)),
            Best(12, 16, (6, 2, 16), (6, 32, 6, 32)),
            Best(14, 32, (7, 2, 16), (8, 32, 6, 32)),
            Best(16, 8, (4, 4, 16), (10, 32, 6, 32)),
        ),
    ),
)  # fmt: skip
