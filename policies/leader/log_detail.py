"""How much of the engines' steps goes into the log: less of it while etcd fills up. Pure.

Two marks, so that a database about the first of them does not switch to and fro: detail is
shed from `shed_percent` of the quota on, and back below RESTORE_BELOW percent points less.
"""

from __future__ import annotations

from relume.events.vocabulary.enums import StepDetail

FULL, SHED = StepDetail.FULL, StepDetail.SHED

RESTORE_BELOW = 10


def detail(was: StepDetail, size_bytes: int, quota_bytes: int, shed_percent: int) -> StepDetail:
    """`full` or `shed` for a database file of `size_bytes`, where it was `was` before."""
    mark = shed_percent - RESTORE_BELOW if was == SHED else shed_percent
    return SHED if size_bytes * 100 >= quota_bytes * mark else FULL
