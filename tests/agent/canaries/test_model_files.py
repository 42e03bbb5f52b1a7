"""The digest of every byte of a model's files: what it reads, when, and what the log gets of it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from relume.engine_shim.agent.canaries.model_files import NOT_LOCAL, LocalModelFiles, in_thread
from relume.engine_shim.agent.canaries.weights_digest import (
    HEAD_BYTES,
    PIECE_BYTES,
    KnownFiles,
    ModelDigest,
    Reading,
    ReadStopped,
    read_files,
    stamps_of,
    weights_digest,
)
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import FailureClass, HealthState
from tests.agent.stage import Stage, staged

LATE = 3 * HEAD_BYTES
"""Place of a byte that only a digest of all bytes has."""
RAISED = v.FeatureLevelRaised(level=2, was=1, replicas=("r0",))


def model_in(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(os.urandom(LATE + 1000))
    return folder


def damage(model: Path, at: int = LATE) -> None:
    """One byte is another one. As where a disk does it, size and time of the last write stay."""
    path = model / "model.safetensors"
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def read(model: Path, known: KnownFiles, anew: bool = False) -> ModelDigest:
    return read_files(str(model), stamps_of(str(model)), known, anew, Reading())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_in(tmp_path / "model")


@pytest.fixture
def known(tmp_path: Path) -> KnownFiles:
    return KnownFiles(tmp_path / "known.json")


@pytest.mark.parametrize("at", [0, LATE, LATE + 999])
def test_each_byte_counts(model: Path, known: KnownFiles, at: int) -> None:
    before, short = read(model, known), weights_digest(str(model))
    damage(model, at)
    after = read(model, known, anew=True)
    assert after.digest != before.digest and len(after.digest) == 16
    assert [name for name, _ in after.files] == ["model.safetensors"], (
        "config.json is whole in the short one"
    )
    assert after.files != before.files and after.size_bytes == before.size_bytes
    assert (weights_digest(str(model)) == short) == (at == LATE or at == LATE + 999)


def test_a_file_that_was_read_is_not_read_again_unless_it_is_to_be(
    model: Path, known: KnownFiles, tmp_path: Path
) -> None:
    first = read(model, known)
    assert first.reread
    (file,) = tmp_path.glob("known.json")
    stored = json.loads(file.read_text())
    stored["model.safetensors"]["digest"] = "remembered"
    file.write_text(json.dumps(stored))
    second = read(model, known)
    assert not second.reread and second.files == (("model.safetensors", "remembered"),)
    third = read(model, known, anew=True)
    assert third == first and third.reread
    assert not read(model, known).reread and read(model, known).digest == first.digest


@pytest.mark.parametrize("change", ["written", "replaced"])
def test_a_file_that_was_written_or_replaced_is_read_again(
    model: Path, known: KnownFiles, tmp_path: Path, change: str
) -> None:
    before = read(model, known)
    if change == "written":
        damage(model)
    else:
        other = tmp_path / "other"
        other.write_bytes((model / "model.safetensors").read_bytes())
        other.replace(model / "model.safetensors")
    after = read(model, known)
    assert (after.digest == before.digest) == (change == "replaced")
    assert not after.reread, "config.json was not read again"


def test_what_is_remembered_may_be_damaged_or_missing(
    model: Path, known: KnownFiles, tmp_path: Path
) -> None:
    first = read(model, known)
    for garbage in (b"", b"[1]", b'{"model.safetensors": {"digest": "00"}}', b"\xff"):
        (tmp_path / "known.json").write_bytes(garbage)
        assert read(model, known) == first
    nowhere = KnownFiles(tmp_path / "no" / "known.json")
    assert read(model, nowhere).reread and read(model, nowhere).reread


def test_a_file_that_changed_after_the_engine_s_start_has_no_digest(
    model: Path, known: KnownFiles
) -> None:
    at_start = stamps_of(str(model))
    (model / "model.safetensors").write_bytes(os.urandom(LATE))
    with pytest.raises(OSError, match=r"model\.safetensors changed after the engine had started"):
        read_files(str(model), at_start, known, False, Reading())
    (model / "more.safetensors").touch()
    with pytest.raises(OSError, match="changed after"):
        read_files(str(model), at_start, known, False, Reading())


def test_nor_has_one_that_changes_while_it_is_read(
    model: Path, known: KnownFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Reading.advance

    def late(self: Reading, count: int) -> None:
        if self.done_bytes >= PIECE_BYTES:
            damage(model, 5)
        advance(self, count)

    monkeypatch.setattr(Reading, "advance", late)
    with pytest.raises(OSError, match=r"model\.safetensors changed"):
        read(model, known)


def test_the_rate_is_bounded_and_the_reader_can_be_stopped() -> None:
    reading, began = Reading(rate=100 * PIECE_BYTES), time.monotonic()
    for _ in range(10):
        reading.advance(PIECE_BYTES)
    assert time.monotonic() - began >= 0.099 and reading.done_bytes == 10 * PIECE_BYTES
    slow = Reading(rate=1)
    slow.stop()
    with pytest.raises(ReadStopped):
        slow.advance(PIECE_BYTES)


def test_a_name_that_is_no_text_has_a_digest(model: Path, known: KnownFiles) -> None:
    (model / os.fsdecode(b"\xff.safetensors")).write_bytes(bytes(HEAD_BYTES + 1))
    assert len(weights_digest(str(model))) == 16
    names = [name for name, _ in read(model, known).files]
    assert names == ["model.safetensors", "\\xff.safetensors"]


async def test_a_reader_that_hangs_holds_up_nobody(model: Path, tmp_path: Path) -> None:
    """As on a disk that does not answer. Its thread ends with the process."""
    entered, left = asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def hang() -> None:
        loop.call_soon_threadsafe(entered.set)
        time.sleep(0.2)
        left.append(True)

    task = asyncio.create_task(in_thread(hang))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left == []


async def test_a_model_on_a_hub_has_no_files_here(tmp_path: Path) -> None:
    files = LocalModelFiles("some/name-on-a-hub", tmp_path / "known.json")
    with pytest.raises(OSError, match=NOT_LOCAL):
        await files.note()


# --- the agent


async def raise_level(stage: Stage) -> None:
    async with stage.log.writer("fleet") as leader:
        leader.append(RAISED)


def verdict(incarnation: int, state: HealthState) -> v.HealthDecided:
    return v.HealthDecided(
        worker="w0",
        incarnation=incarnation,
        state=state,
        failure=FailureClass.CORRUPTION,
        evidence="its canaries differ",
        since=0,
    )


async def restart(stage: Stage, incarnation: int, *before: v.HealthDecided) -> None:
    """The leader decides so, and has the engine restarted."""
    effect = v.Effect("restart", "w0", incarnation)
    decided = v.EffectsDecided(
        decision=f"d{incarnation}", basis=v.Basis(1, 0), cause="c", effects=(effect,)
    )
    async with stage.log.writer("fleet") as leader:
        leader.append(*before, decided)


async def digested(stage: Stage, incarnation: int) -> v.WeightsDigested:
    def found() -> v.WeightsDigested | None:
        of_it = [e for e in stage.events(v.WeightsDigested) if e.incarnation == incarnation]
        return of_it[0] if of_it else None

    event = await stage.until(found)
    assert event is not None
    return event


async def test_both_events_wait_until_every_replica_reads_them(tmp_path: Path, model: Path) -> None:
    async with staged(tmp_path / "run", model=str(model)) as stage:
        await stage.nth(v.EngineReady, 1)
        await stage.until(lambda: stage.agent.describe()["engine"]["model_files"].get("digest"))
        assert stage.events(v.WeightsReadStarted, v.WeightsDigested) == []
        await raise_level(stage)
        event = await digested(stage, 1)
        (started,) = stage.events(v.WeightsReadStarted)
    assert started.weights == event.weights == weights_digest(str(model))
    assert started.size_bytes == event.size_bytes > LATE
    expected = read(model, KnownFiles(tmp_path / "no" / "known"))
    assert (event.digest, event.files) == (expected.digest, expected.files)
    assert event.reread and not event.error


async def test_a_restarted_engine_uses_what_was_read_and_one_in_quarantine_does_not(
    tmp_path: Path, model: Path
) -> None:
    async with staged(tmp_path / "run", model=str(model)) as stage:
        await raise_level(stage)
        first = await digested(stage, 1)
        await restart(stage, 1)
        second = await digested(stage, 2)
        assert second.digest == first.digest and not second.reread
        known = tmp_path / "run" / "model-files.json"
        stored = json.loads(known.read_text())
        for name in stored:
            stored[name]["digest"] = "remembered"
        known.write_text(json.dumps(stored))
        await restart(stage, 2, verdict(2, HealthState.QUARANTINED))
        third = await digested(stage, 3)
        assert third.digest == first.digest and third.reread
        await restart(stage, 3, verdict(3, HealthState.HEALTHY))
        fourth = await digested(stage, 4)
        assert fourth.digest == first.digest and not fourth.reread


async def test_what_cannot_be_read_is_in_the_log(tmp_path: Path) -> None:
    async with staged(tmp_path / "run", model="some/name-on-a-hub") as stage:
        await raise_level(stage)
        event = await digested(stage, 1)
        assert (event.digest, event.error) == ("", NOT_LOCAL)
        assert stage.events(v.WeightsReadStarted) == []


async def test_nothing_is_read_where_the_setting_is_zero(tmp_path: Path, model: Path) -> None:
    async with staged(tmp_path / "run", model=str(model), weights_read_mb_s=0) as stage:
        await raise_level(stage)
        await stage.nth(v.EngineReady, 1)
        await stage.until(lambda: stage.agent._journal.feature_level >= 2)
        await restart(stage, 1)
        await stage.nth(v.EngineReady, 2)
        assert stage.events(v.WeightsReadStarted, v.WeightsDigested) == []


async def test_a_new_log_gets_the_digest_of_the_engine_that_runs(
    tmp_path: Path, model: Path
) -> None:
    """Its level is the first one again at its beginning."""
    async with staged(tmp_path / "run", "--pace", "0.02", model=str(model)) as stage:
        await raise_level(stage)
        first = await digested(stage, 1)
        await stage.until(lambda: stage.directory.state.log == "log0")
        stage.log.replace()
        await stage.nth(v.EngineReady, 1)
        assert stage.events(v.WeightsDigested) == []
        await raise_level(stage)
        assert await digested(stage, 1) == first
        assert len(stage.events(v.WeightsReadStarted)) == 1


async def test_an_agent_that_learns_late_of_a_quarantine_reads_again(
    tmp_path: Path, model: Path
) -> None:
    """Its worker was cut off, and had restarted the engine by itself."""
    async with staged(tmp_path / "run", model=str(model)) as stage:
        await raise_level(stage)
        first = await digested(stage, 1)
        await restart(stage, 1)
        assert not (await digested(stage, 2)).reread
        async with stage.log.writer("fleet") as leader:
            leader.append(verdict(1, HealthState.QUARANTINED))
        again = await stage.nth(v.WeightsDigested, 3)
        assert again.incarnation == 2 and again.reread and again.digest == first.digest
        assert len(stage.events(v.WeightsReadStarted)) == 3
        async with stage.log.writer("fleet") as leader:
            leader.append(verdict(1, HealthState.QUARANTINED))
        await restart(stage, 2)
        assert (await digested(stage, 3)).reread
        assert len(stage.events(v.WeightsDigested)) == 4, "once is enough for an engine"
