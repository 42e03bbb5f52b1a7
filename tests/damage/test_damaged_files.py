"""A damaged archive or snapshot is refused by type, or gives all that it says it has."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from relume.controlplane.history import snapshots
from relume.controlplane.history.archive import MANIFEST, Archive
from relume.events.log.errors import LogError
from relume.policies.state.fleet import Fleet, dump
from tests.damage.damaged_bytes import Damage, damage
from tests.history.test_files import archived, story

GROUPS = story(30)


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 3), damage())
def test_a_damaged_archive_gives_all_of_what_it_claims_or_an_error(
    which: int, damaged: Damage
) -> None:
    with tempfile.TemporaryDirectory() as name:
        archive = archived(Path(name), GROUPS[:10], GROUPS[10:20], GROUPS[20:])
        files = [MANIFEST, *(entry.file for entry in archive.entries)]
        path = archive.directory / files[which]
        path.write_bytes(damaged(path.read_bytes()))
        again = Archive(archive.directory, "log")
        assert again.last <= archive.last
        try:
            found = list(again.read())
        except LogError:
            return
        assert found == [group for group in GROUPS if group.revision <= again.last]


def test_a_manifest_that_claims_more_than_its_file_has_is_not_believed() -> None:
    """The leader would trim etcd by it."""
    with tempfile.TemporaryDirectory() as name:
        archive = archived(Path(name), GROUPS)
        manifest = archive.directory / MANIFEST
        said = b'"last":%d' % archive.last
        line = manifest.read_bytes()
        assert said in line
        manifest.write_bytes(line.replace(said, b'"last":%d' % (archive.last + 1000)))
        assert Archive(archive.directory, "log").last == 0


def test_a_manifest_line_of_any_bytes_costs_only_itself() -> None:
    with tempfile.TemporaryDirectory() as name:
        archive = archived(Path(name), GROUPS)
        manifest = archive.directory / MANIFEST
        manifest.write_bytes(b"\xff\xfe{\n" + manifest.read_bytes())
        assert list(Archive(archive.directory, "log").read()) == GROUPS


@settings(deadline=None, max_examples=150)
@given(damage())
def test_a_damaged_snapshot_is_refused_by_type_or_whole(damaged: Damage) -> None:
    with tempfile.TemporaryDirectory() as name:
        fleet = Fleet(revision=7, owners={"fleet": 3}, config={"a": "b"})
        manifest = snapshots.write(Path(name), "log", dump(fleet), 9)
        path = Path(name) / manifest.file
        path.write_bytes(damaged(path.read_bytes()))
        try:
            found = snapshots.read(path, "log")
        except LogError:
            return
        assert dump(found.fleet) == dump(fleet) and found.covers == 9
