"""The promises about kept history, checked from outside."""

from __future__ import annotations

from pathlib import Path

from relume.controlplane.history.replica_restore import History, load_history
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.maintenance import Maintenance
from relume.events.log.codec import decode
from relume.events.log.errors import Compacted
from relume.policies.state.fleet import state_hash
from relume.policies.state.fold import apply_group
from tests.history.stage import Traffic, folded


async def history_is_whole(log: EtcdLog, root: Path, *traffics: Traffic) -> None:
    """I6, I13: one chain over archive and etcd, every acknowledged append in it where it
    was acknowledged, and the fold by way of the newest snapshot is the fold of it all."""
    groups = await load_history(root, log.reader(), await Maintenance(log.client).identity())
    segments = {(s.stream, s.seq): (g.revision, s) for g in groups for s in g.segments}
    for traffic in traffics:
        stream = traffic.writer.stream
        for landed in traffic.landed:
            revision, segment = segments[stream, landed.seq]
            assert (revision, segment.first, segment.last) == (
                landed.revision,
                landed.first,
                landed.last,
            )
        events = [
            decode(record)
            for (name, _), (_, segment) in sorted(segments.items())
            if name == stream
            for record in segment.records
        ]
        steps = [event for event in events if type(event).__name__ == "EngineStep"]
        assert steps[: len(traffic.taken)] == traffic.taken[: len(steps)]
        assert len(events) >= traffic.acknowledged
    whole = folded(groups)
    restored = await History(root, Maintenance(log.client)).restore()
    fleet = restored.fleet
    try:
        behind = await log.reader().read(restored.covers)
    except Compacted:  # another snapshot was taken in between
        restored = await History(root, Maintenance(log.client)).restore()
        fleet, behind = restored.fleet, await log.reader().read(restored.covers)
    for group in behind:
        if group.revision <= groups[-1].revision:
            apply_group(fleet, group)
    if restored.covers <= groups[-1].revision:
        assert state_hash(fleet) == state_hash(whole)
