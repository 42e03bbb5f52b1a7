"""A log in one file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from relume.controlplane.replay.recorded_log import from_file
from relume.controlplane.replay.store import BadStoredLog, StoredLog, save
from relume.controlplane.replay.verify import verify
from relume.events.log.interface import RevisionGroup
from relume.policies.state.fleet import Fleet, dump
from relume.policies.state.fold import apply_group
from tests.replay.scene import Scene
from tests.replay.tamper import dropped, places


async def scene_log() -> list[RevisionGroup]:
    async with Scene(21) as scene:
        await scene.traffic(30)
        scene.workers["w0"].die()
        await scene.traffic(20, "more")
        await scene.settled()
    return scene.log.groups


@pytest.fixture(scope="module")
def groups() -> list[RevisionGroup]:
    return asyncio.run(scene_log())


def test_what_is_stored_comes_back(groups: list[RevisionGroup], tmp_path: Path) -> None:
    path = tmp_path / "run.rlog"
    footer = save(path, groups, origin="a scene", note="of a test")
    with StoredLog(path) as stored:
        assert (stored.header.origin, stored.header.note) == ("a scene", "of a test")
        assert list(stored.groups()) == groups
        assert stored.footer == footer
        assert stored.base is None
    assert footer.last == groups[-1].revision
    assert footer.records == sum(len(s.records) for g in groups for s in g.segments)
    assert [p.name for p in tmp_path.iterdir()] == ["run.rlog"]


def test_part_behind_a_snapshot_is_stored_with_it(
    groups: list[RevisionGroup], tmp_path: Path
) -> None:
    fleet, half = Fleet(), len(groups) // 2
    for group in groups[:half]:
        apply_group(fleet, group)
    before = dump(fleet)
    save(tmp_path / "tail.rlog", groups[half:], fleet)
    assert dump(fleet) == before
    history = from_file(tmp_path / "tail.rlog")
    assert history.base is not None
    assert dump(history.base) == before
    assert history.footer is not None
    verdict = verify(history.groups, history.base, end=history.footer.end)
    assert verdict.ok, verdict.divergences
    assert verdict.unanchored == 0


def test_end_of_a_stored_log_is_anchored(groups: list[RevisionGroup], tmp_path: Path) -> None:
    """The very last event, behind which nothing comes, cannot be dropped unseen."""
    end = save(tmp_path / "run.rlog", groups).end
    last = list(places(groups))[-1][0]
    cut = dropped(groups, last)
    assert verify(cut).divergences == [], "nobody knows that there was more"
    assert [d.what for d in verify(cut, end=end).divergences] == ["order"]
    assert verify(groups, end=end).unanchored == 0


def test_empty_log_can_be_stored(tmp_path: Path) -> None:
    save(tmp_path / "empty.rlog", [])
    assert from_file(tmp_path / "empty.rlog").groups == []


@pytest.mark.parametrize("at", [0, 5, 40, 300, -1, -20, -200])
def test_damage_is_refused(groups: list[RevisionGroup], tmp_path: Path, at: int) -> None:
    path = tmp_path / "run.rlog"
    save(path, groups)
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(BadStoredLog):
        from_file(path)


@pytest.mark.parametrize("left", [0, 10, 200, -1])
def test_torn_file_is_refused(groups: list[RevisionGroup], tmp_path: Path, left: int) -> None:
    path = tmp_path / "run.rlog"
    save(path, groups)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(BadStoredLog):
        from_file(path)


def test_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    with pytest.raises(BadStoredLog, match="no stored log"):
        from_file(path)
    path.write_text('{"format":"relume-log","version":9}\n')
    with pytest.raises(BadStoredLog, match="newer"):
        from_file(path)
    with pytest.raises(BadStoredLog):
        from_file(tmp_path / "missing.rlog")
    with pytest.raises(BadStoredLog):
        from_file(tmp_path)


def test_failed_export_leaves_no_file(groups: list[RevisionGroup], tmp_path: Path) -> None:
    def broken():
        yield from groups[:5]
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save(tmp_path / "run.rlog", broken())
    assert list(tmp_path.iterdir()) == []
