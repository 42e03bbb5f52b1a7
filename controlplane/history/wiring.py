"""The history of one replica, put together from its configuration."""

from __future__ import annotations

import structlog

from relume.controlplane.history.history_keeper import Keeper, KeeperConfig
from relume.controlplane.history.quota import QuotaConfig
from relume.controlplane.history.repair import unstick
from relume.controlplane.history.replica_restore import History
from relume.controlplane.replica.loop import Replica
from relume.controlplane.serve_settings import ServeConfig
from relume.events.etcd.errors import AccessRefused
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.maintenance import Maintenance
from relume.events.etcd.reader.log_reader import EtcdReader
from relume.events.log.errors import Fenced, LogUnavailable

log = structlog.get_logger("relume.history")


async def prepared_history(config: ServeConfig, etcd: EtcdLog) -> History | None:
    """Where the replica takes its fold from; None without an archive. If etcd is full and there is
    no leader, it is relieved first: it would grant this replica no lease.

    Raises HistoryError, OSError.
    """
    if not config.archive_dir:
        return None
    try:
        await unstick(etcd, config.archive_dir, config.name)
    except (LogUnavailable, AccessRefused, Fenced) as error:
        # Taking the stream comes next: it waits for etcd, and says what is wrong with it.
        log.warning("could_not_look_at_space", reason=str(error))
    return History(config.archive_dir, Maintenance(etcd.client))


def keeper_of(
    config: ServeConfig, replica: Replica, reader: EtcdReader, etcd: EtcdLog
) -> Keeper | None:
    """What stores history while `replica`, which follows `reader`, leads; None without an archive.
    It observes the replica from now on; run both concurrently."""
    if not config.archive_dir:
        return None
    keeper = Keeper(
        keeper_config(config),
        replica.fleet,
        replica.leadership,
        Maintenance(etcd.client),
        etcd.reader(),
        lambda: max(replica.covered, reader.revision),
        config.name,
    )
    replica.observe(keeper.seen)
    replica.observe_groups(keeper.group)
    replica.upkeep = keeper.status
    return keeper


def keeper_config(config: ServeConfig) -> KeeperConfig:
    """The part of the configuration that is about history."""
    return KeeperConfig(
        root=config.archive_dir,
        every_revisions=config.snapshot_every_revisions,
        every_s=config.snapshot_every_s,
        keep_snapshots=config.snapshots_kept,
        quota=QuotaConfig(
            config.etcd_quota_bytes, config.quota_shed_percent, config.quota_alarm_percent
        ),
    )
