"""The history of one replica, put together from its configuration."""

from __future__ import annotations

from relume.controlplane.history.history_keeper import Keeper, KeeperConfig
from relume.controlplane.history.quota import QuotaConfig
from relume.controlplane.history.replica_restore import History
from relume.controlplane.replica.loop import Replica
from relume.controlplane.serve_settings import ServeConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.maintenance import Maintenance
from relume.events.etcd.reader.log_reader import EtcdReader


def history_of(config: ServeConfig, etcd: EtcdLog) -> History | None:
    """Where the replica takes its fold from; None without an archive."""
    return History(config.archive_dir, Maintenance(etcd.client)) if config.archive_dir else None


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
        quota=QuotaConfig(config.etcd_quota_bytes),
    )
