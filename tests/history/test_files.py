"""Archive and snapshot files: what goes in comes out, and damage is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from relume.controlplane.history import archive as archives
from relume.controlplane.history import snapshots
from relume.controlplane.history.archive import MANIFEST, Archive
from relume.controlplane.history.errors import AmbiguousArchive, DamagedFile, HistoryGap, OtherBuild
from relume.controlplane.history.group_codec import decode_groups, encode_group
from relume.controlplane.history.replica_restore import load_history
from relume.events.log.errors import BrokenChain, Compacted, CorruptSegment
from relume.events.log.interface import Heads, RevisionGroup
from relume.events.log.segment import Segment, pack, unpack
from relume.policies.state.fleet import Fleet, dump


def story(count: int, streams: tuple[str, ...] = ("w.w0", "r.r0")) -> list[RevisionGroup]:
    """`count` groups, a segment each, the streams in turn; owners at the beginning."""
    groups = [RevisionGroup(2, owners=(("r.r0", 2), ("w.w0", 2)))]
    heads = {stream: (0, bytes(16), 1) for stream in streams}
    for number in range(count):
        stream = streams[number % len(streams)]
        seq, previous, first = heads[stream]
        records = [b"record %d" % number, b"x" * number]
        segment = unpack(pack(stream, 2, seq + 1, first, previous, records, 17))
        heads[stream] = (segment.seq, segment.hash, segment.last + 1)
        groups.append(RevisionGroup(3 + 2 * number, (segment,)))
    return groups


def archived(root: Path, *parts: list[RevisionGroup]) -> Archive:
    archive = Archive(root / "log", "log")
    for groups in parts:
        file = archive.begin("1")
        half = len(groups) // 2
        file.add(groups[:half])
        file.add(groups[half:])
        file.seal(groups[-1].revision + 1)
    return archive


def test_groups_survive_the_codec_with_their_owners() -> None:
    groups = [*story(7), RevisionGroup(99, owners=(("fleet", 0),))]
    assert list(decode_groups(b"".join(map(encode_group, groups)))) == groups


def test_a_segment_that_is_not_what_it_hashes_to_is_not_archived() -> None:
    group = story(1)[1]
    (good,) = group.segments
    fields = {name: getattr(good, name) for name in Segment.__struct_fields__}
    forged = Segment(**{**fields, "records": (b"other",)})
    with pytest.raises(CorruptSegment):
        encode_group(RevisionGroup(3, (forged,)))


def test_what_is_sealed_is_read_back_by_the_next_opener(tmp_path: Path) -> None:
    groups = story(40)
    archive = archived(tmp_path, groups[:15], groups[15:30], groups[30:])
    again = Archive(archive.directory, "log")
    assert list(again.read()) == groups
    assert again.last == groups[-1].revision + 1
    assert again.heads() == archive.heads()
    middle = groups[17].revision
    assert list(again.read(middle)) == groups[18:]
    assert list(again.read(middle, groups[20].revision)) == groups[18:21]
    assert list(again.read(middle, groups[33].revision)) == groups[18:34]


def test_unsealed_files_do_not_count_and_are_swept_when_their_writer_is_dead(
    tmp_path: Path,
) -> None:
    groups = story(20)
    archive = archived(tmp_path, groups[:10])
    archive.begin("1").add(groups[10:])
    dead = archive.directory / ".0000-1.4194304.rla"
    dead.touch()
    again = Archive(archive.directory, "log")
    assert again.last == groups[9].revision + 1
    assert dead.exists()  # opening changes nothing
    again.begin("2").discard()
    assert not dead.exists()


def test_two_leaders_files_that_overlap_read_as_one_log(tmp_path: Path) -> None:
    groups = story(30)
    first = archived(tmp_path, groups[:10])
    second = Archive(first.directory, "log")  # has not seen what `first` seals next
    for archive, author, until in ((first, "5", 20), (second, "9", 25)):
        file = archive.begin(author)
        file.add(groups[10:until])
        file.seal(groups[until - 1].revision)
    third = Archive(first.directory, "log")
    assert third.last == groups[24].revision
    assert list(third.read()) == groups[:25]


@pytest.mark.parametrize("broken", ["order", "skip", "again"])
def test_groups_that_do_not_continue_the_chain_are_refused(tmp_path: Path, broken: str) -> None:
    groups = story(30)
    archive = archived(tmp_path, groups[:10])
    wrong = {"order": groups[12:10:-1], "skip": groups[14:], "again": groups[9:]}[broken]
    with pytest.raises(BrokenChain):
        archive.begin("1").add(wrong)


@pytest.mark.parametrize("at", [3, 40, -200, -5])
def test_one_flipped_byte_is_noticed(tmp_path: Path, at: int) -> None:
    groups = story(60)
    archive = archived(tmp_path, groups[:30], groups[30:])
    path = archive.directory / archive.entries[0].file
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFile):
        list(Archive(archive.directory, "log").read())


def test_a_damaged_last_file_is_left_out_so_that_it_is_written_again(tmp_path: Path) -> None:
    groups = story(60)
    archive = archived(tmp_path, groups[:30], groups[30:])
    path = archive.directory / archive.entries[1].file
    path.write_bytes(path.read_bytes()[:-1])
    again = Archive(archive.directory, "log")
    assert again.last == groups[29].revision + 1
    file = again.begin("2")
    file.add(groups[30:])
    file.seal(groups[-1].revision)
    assert list(Archive(archive.directory, "log").read()) == groups


def test_a_missing_file_is_a_gap_and_not_a_shorter_log(tmp_path: Path) -> None:
    groups = story(60)
    archive = archived(tmp_path, groups[:20], groups[20:40], groups[40:])
    (archive.directory / archive.entries[1].file).unlink()
    again = Archive(archive.directory, "log")
    with pytest.raises(HistoryGap) as gap:
        list(again.read())
    assert gap.value.after == groups[19].revision + 1
    assert list(again.read(groups[39].revision + 1)) == groups[40:]


def test_the_archive_continues_after_a_gap(tmp_path: Path) -> None:
    groups = story(60)
    archive = archived(tmp_path, groups[:20])
    after = groups[39].revision + 1
    file = archive.begin("7", after)
    file.add(groups[40:50])
    file.seal(groups[49].revision)
    archive = Archive(archive.directory, "log")
    assert archive.first == after
    file = archive.begin("7")
    file.add(groups[50:])
    file.seal(groups[-1].revision)
    again = Archive(archive.directory, "log")
    assert list(again.read(after)) == groups[40:]
    with pytest.raises(HistoryGap):
        list(again.read())


def test_a_torn_manifest_line_costs_only_itself(tmp_path: Path) -> None:
    groups = story(40)
    archive = archived(tmp_path, groups[:20])
    manifest = archive.directory / MANIFEST
    manifest.write_bytes(manifest.read_bytes() + b'{"log":"log","aft')
    again = Archive(archive.directory, "log")
    file = again.begin("2")
    file.add(groups[20:])
    file.seal(groups[-1].revision)
    assert list(Archive(archive.directory, "log").read()) == groups


def test_the_archive_of_another_log_is_not_mistaken(tmp_path: Path) -> None:
    archived(tmp_path, story(4))
    assert archives.find(tmp_path) == tmp_path / "log"
    assert archives.find(tmp_path, "other") is None
    other = Archive(tmp_path / "other", "other")
    file = other.begin("1")
    file.add(story(3))
    file.seal(99)
    with pytest.raises(AmbiguousArchive):
        archives.find(tmp_path)
    assert archives.find(tmp_path, "other") == tmp_path / "other"


def test_a_snapshot_comes_back_as_it_was(tmp_path: Path) -> None:
    fleet = Fleet(revision=7, owners={"fleet": 3}, config={"a": "b"})
    manifest = snapshots.write(tmp_path, "log", dump(fleet), 9)
    found = snapshots.read(tmp_path / manifest.file, "log", manifest.hash)
    assert dump(found.fleet) == dump(fleet) and found.covers == 9
    assert snapshots.present(tmp_path) == [9]


@pytest.mark.parametrize("at", [0, 6, 30, -1])
def test_a_damaged_snapshot_is_refused(tmp_path: Path, at: int) -> None:
    manifest = snapshots.write(tmp_path, "log", dump(Fleet(revision=7)), 9)
    path = tmp_path / manifest.file
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(DamagedFile):
        snapshots.read(path, "log")


def test_a_snapshot_of_another_log_or_build_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = snapshots.write(tmp_path, "log", dump(Fleet(revision=7)), 9)
    path = tmp_path / manifest.file
    with pytest.raises(DamagedFile):
        snapshots.read(path, "other")
    with pytest.raises(DamagedFile):
        snapshots.read(path, "log", "00" * 16)
    monkeypatch.setattr(snapshots, "shape", lambda: "another")
    with pytest.raises(OtherBuild):
        snapshots.read(path, "log")


class _TrimmedOnce:
    """A reader whose log is sealed further, and trimmed, between two looks."""

    def __init__(self, archive: Archive, groups: list[RevisionGroup]) -> None:
        self._archive = archive
        self._groups = groups
        self._trimmed = False

    async def read(
        self, after: int = 0, until: int = 0, heads: Heads | None = None
    ) -> list[RevisionGroup]:
        if not self._trimmed:
            self._trimmed = True
            file = self._archive.begin("1")
            file.add([g for g in self._groups if g.revision > after][:10])
            file.seal(file.last)
            raise Compacted(after, after + 5)
        return [g for g in self._groups if g.revision > after]


async def test_history_is_whole_though_the_leader_trims_while_it_is_read(tmp_path: Path) -> None:
    groups = story(40)
    reader = _TrimmedOnce(archived(tmp_path, groups[:20]), groups)
    assert await load_history(tmp_path, reader) == groups


async def test_what_is_neither_in_the_archive_nor_in_the_log_is_a_gap(tmp_path: Path) -> None:
    class Trimmed:
        async def read(
            self, after: int = 0, until: int = 0, heads: Heads | None = None
        ) -> list[RevisionGroup]:
            raise Compacted(after, after + 5)

    archived(tmp_path, story(20))
    with pytest.raises(HistoryGap):
        await load_history(tmp_path, Trimmed())
