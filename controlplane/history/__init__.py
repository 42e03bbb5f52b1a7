"""A log that lasts: archive, snapshots, trimming, quota.

etcd holds the recent log; the whole log is the archive's sealed files and etcd together.

    archive.py          sealed files of revision groups, hash chain checked on the way in and out
    snapshots.py        files of the fold at a revision
    history_keeper.py   the leader's loop: archive, snapshot, announce, then trim
    quota.py            how full etcd is, and what to do about it
    replica_restore.py  the fold of a starting replica; the whole history for verification

Order is what keeps it safe, and every step may be the last before a crash: a file is
fsynced before a manifest names it, a manifest is committed before the log says so
(`SnapshotTaken`), the log says so before anything is compacted or deleted. Each cycle
starts from what is there, so a leader killed anywhere is carried on by the next.
"""
