"""A damaged archive or snapshot is refused by type, or gives all that it says it has."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from relume.controlplane.history import snapshots
from relume.controlplane.history.archive import MANIFEST, Archive
from relume.events.log.errors import LogError
from relume.policies.state.fleet import Fleet, dump
from tests.damage.damaged_bytes import Damage, damage
from tests.history.test_files import archived, story

GROUPS = story(30)
NAMED = {"archive_file_damaged", "archive_manifest_line_torn", "archive_file_unlisted"}


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 3), damage())
def test_a_damaged_archive_gives_all_of_what_it_claims_or_an_error(
    which: int, damaged: Damage
) -> None:
    """An archive that claims less than before says why: it names the file, or the line of its manifest."""
    with tempfile.TemporaryDirectory() as name:
        archive = archived(Path(name), GROUPS[:10], GROUPS[10:20], GROUPS[20:])
        files = [MANIFEST, *(entry.file for entry in archive.entries)]
        path = archive.directory / files[which]
        path.write_bytes(damaged(path.read_bytes()))
        with capture_logs() as lines:
            again = Archive(archive.directory, "log")
        assert again.last <= archive.last
        if again.last < archive.last:
            assert {line["event"] for line in lines} & NAMED
        try:
            found = list(again.read())
        except LogError:
            return
        assert found == [group for group in GROUPS if group.revision <= again.last]


def test_a_manifest_that_lost_its_last_line_names_the_file() -> None:
    """Its end looks whole, and the next leader would archive the rest again if etcd still had it."""
    with tempfile.TemporaryDirectory() as name:
        archive = archived(Path(name), GROUPS[:10], GROUPS[10:])
        manifest = archive.directory / MANIFEST
        lines = manifest.read_bytes().splitlines(keepends=True)
        manifest.write_bytes(lines[0])
        with capture_logs() as logged:
            again = Archive(archive.directory, "log")
        assert again.last == archive.entries[0].last
        ((event, path),) = [(line["event"], line["path"]) for line in logged]
        assert event == "archive_file_unlisted" and path.endswith(archive.entries[1].file)


def test_a_file_that_other_files_cover_needs_no_line() -> None:
    with tempfile.TemporaryDirectory() as name:
        archive = archived(Path(name), GROUPS)
        one = archive.directory / archive.entries[0].file
        (archive.directory / one.name.replace("-1.rla", "-2.rla")).write_bytes(one.read_bytes())
        with capture_logs() as logged:
            assert list(Archive(archive.directory, "log").read()) == GROUPS
        assert not logged


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
