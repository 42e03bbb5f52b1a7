"""How full etcd is, and what to do about it. Pure.

etcd holds its quota against the size of the database *file*, which never shrinks by
itself: trimming makes room inside it, defragmenting gives the room back. Past the quota
every put and lease grant is refused (NOSPACE) until the alarm is disarmed by hand.
"""

from __future__ import annotations

import enum

from msgspec import Struct

QUOTA_SHED_PERCENT = 60
"""Share of the quota above which the log is trimmed early."""
QUOTA_ALARM_PERCENT = 80
"""Share of the quota above which an alarm is raised."""


class QuotaConfig(Struct, frozen=True):
    """`quota_bytes`: what etcd's --quota-backend-bytes is (etcd 3.4 and 3.5 do not report it)."""

    quota_bytes: int = 2 * 1024**3
    shed_percent: int = QUOTA_SHED_PERCENT
    alarm_percent: int = QUOTA_ALARM_PERCENT


class Level(enum.IntEnum):
    """calm; shed: keep less than usual in etcd; alarm: an operator should look; full:
    NOSPACE, nothing can be appended."""

    CALM = 0
    SHED = 1
    ALARM = 2
    FULL = 3


def level(size_bytes: int, full: bool, config: QuotaConfig) -> Level:
    """The level of a database file of `size_bytes`; `full`: the alarm is raised."""
    if full:
        return Level.FULL
    if size_bytes * 100 >= config.quota_bytes * config.alarm_percent:
        return Level.ALARM
    if size_bytes * 100 >= config.quota_bytes * config.shed_percent:
        return Level.SHED
    return Level.CALM


def worth_defragmenting(size_bytes: int, used_bytes: int, config: QuotaConfig) -> bool:
    """Whether giving back the free part of the file would matter: a member answers
    nothing meanwhile, so a tenth of the quota is the least."""
    return (size_bytes - used_bytes) * 10 >= config.quota_bytes
