"""The way out of NOSPACE, by steps that a full etcd still carries out: no put among them.

    seal the archive, write the snapshot (files only)
    compact and delete up to it
    the same again after the deletion, since a compaction frees what was deleted before
    defragment every member, disarm the alarm by member id

The snapshot's manifest cannot be committed meanwhile; replicas look at the files too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from relume.controlplane.history.cycle import FoldCopy, Step, preserve, trim
from relume.controlplane.history.vault import Vault
from relume.events.etcd.errors import AccessRefused
from relume.events.etcd.maintenance import Maintenance, Space

log = structlog.get_logger("relume.history")
BY_HAND = (
    "run `etcdctl defrag --cluster` as root of etcd, or let replicas do it: "
    "`etcdctl user grant-role relume-control root`"
)


async def shrink(maintenance: Maintenance, space: Space, step: Step) -> None:
    """Defragment all members. etcd reserves that for its role root: if this replica's user lacks
    it, an operator must. Raises LogUnavailable."""
    try:
        await maintenance.defragment(space)
    except AccessRefused as error:
        log.error("defragmentation_refused", reason=str(error), remedy=BY_HAND)
    else:
        step("defragmented")


async def relieve(
    vault: Vault,
    maintenance: Maintenance,
    cut: Callable[[], FoldCopy],
    reach: Callable[[int], Awaitable[None]],
    epoch: int,
    step: Step = lambda name: None,
) -> Space:
    """Make room and disarm; returns the space as it is then. `cut` copies the fold,
    `reach(revision)` returns when it has folded the log up to that revision.

    Raises Fenced, LogUnavailable, OSError, BrokenChain; a repeated call continues from there.
    """
    moment = cut()
    manifest = await preserve(vault, moment, step)
    _, deleted_at = await trim(vault, maintenance, manifest, epoch, step)
    if deleted_at:
        await reach(deleted_at)
        moment = cut()
        await preserve(vault, moment, step)
        await maintenance.compact(moment.covers, physical=True)
    step("freed")
    await shrink(maintenance, await maintenance.space(), step)
    await maintenance.disarm(await maintenance.space())
    step("disarmed")
    return await maintenance.space()
