"""Stored history that would fill the memory is refused before it does."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from relume.controlplane.history import archive as archives
from relume.controlplane.history import snapshots
from relume.controlplane.history.archive import Archive
from relume.controlplane.history.unpacking import (
    FREE_BYTES,
    MOST_RATIO,
    BadPacking,
    Unpacker,
)
from relume.policies.state.fleet import Fleet, dump
from tests.history.test_files import archived, story

MIB = 1 << 20
UNUSABLE = "unpacks to more than 16 MiB and 100 times its size"
CHILD = """
import sys
from pathlib import Path

def peak_mib():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) >> 10

from relume.controlplane.cli.relume_command import main
from relume.controlplane.history import snapshots
from relume.controlplane.history.archive import Archive
from relume.controlplane.history.errors import DamagedFile
kind, path = sys.argv[1], Path(sys.argv[2])
try:
    main(["replay", "--log", "missing.rlog"])  # imports what it needs
    before = peak_mib()
    if kind == "log":
        assert main(["replay", "--verify", "--log", str(path)]) == 1
    elif kind == "archive":
        list(Archive(path, "log").read())
    else:
        snapshots.read(path, "log")
except DamagedFile as error:
    print(error, file=sys.stderr)
print(peak_mib() - before)
"""


def bomb(mebibytes: int) -> bytes:
    """zlib of so many MiB of zeros; its end says that they are damaged."""
    packer = zlib.compressobj(9)
    head = packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    return head + again * (mebibytes - 1) + packer.flush()


def stored_log(path: Path, *parts: bytes) -> Path:
    head = b'{"format":"relume-log","version":1}\n'
    path.write_bytes(head + b"".join(struct.pack("<cI", b"G", len(p)) + p for p in parts))
    return path


def read_in_child(kind: str, path: Path) -> tuple[int, str]:
    """MiB that reading took at its peak, and the last line of the error."""
    command = [sys.executable, "-c", CHILD, kind, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1]), done.stderr.strip().splitlines()[-1]


def test_a_bomb_is_refused_before_it_takes_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = bomb(2048)
    assert len(packed) < 2.2 * MIB
    fake = SimpleNamespace(compress=lambda *_: packed, crc32=zlib.crc32, error=zlib.error)
    log = stored_log(tmp_path / "bomb.rlog", packed)
    assert len(log.read_bytes()) < 2.2 * MIB
    with monkeypatch.context() as patch:
        patch.setattr(archives, "zlib", fake)
        patch.setattr(snapshots, "zlib", fake)
        archive = archived(tmp_path, story(4))
        manifest = snapshots.write(tmp_path, "log", dump(Fleet()), 9)
    for kind, path in (
        ("log", log),
        ("archive", archive.directory),
        ("snapshot", tmp_path / manifest.file),
    ):
        grown_mib, error = read_in_child(kind, path)
        assert UNUSABLE in error and "export the log again" in error, (kind, error)
        assert grown_mib < 100, (kind, grown_mib)


def test_many_small_bombs_are_one() -> None:
    """Each part is below what a file may unpack to."""
    packed = bomb(4)
    unpacker = Unpacker()
    whole = zlib.compress(bytes(4 * MIB), 9)
    assert len(whole) < 2 * len(packed)
    with pytest.raises(BadPacking, match=UNUSABLE):
        for _ in range(6):
            assert len(unpacker.unpack(whole)) == 4 * MIB


def test_dense_files_are_read_up_to_the_bound() -> None:
    """Of any size at a ratio that logs reach, and of 16 MiB at any."""
    record = b"".join(b"%07d" % number for number in range(200_000))
    raw = record * 20
    packed = zlib.compress(raw, 6)
    assert len(raw) > FREE_BYTES and 2 < len(raw) / len(packed) < MOST_RATIO
    assert Unpacker().unpack(packed) == raw
    small = bytes(FREE_BYTES)
    assert Unpacker().unpack(zlib.compress(small, 9)) == small


@pytest.mark.parametrize("change", [lambda p: p[:-1], lambda p: p + b"x", lambda p: b"x" + p])
def test_a_part_that_is_not_whole_is_damaged(change) -> None:
    with pytest.raises(BadPacking, match="damaged"):
        Unpacker().unpack(change(zlib.compress(b"record" * 50_000)))


def test_a_length_beyond_the_file_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cut.rlog"
    stored_log(path, b"")
    path.write_bytes(path.read_bytes()[:-5] + struct.pack("<cI", b"G", 2**32 - 1))
    grown_mib, error = read_in_child("log", path)
    assert "is cut short" in error and grown_mib < 50


def test_an_archive_of_many_blocks_is_read(tmp_path: Path) -> None:
    groups = story(400)
    assert list(Archive(archived(tmp_path, groups).directory, "log").read()) == groups
