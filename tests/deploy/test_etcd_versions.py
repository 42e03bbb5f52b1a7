"""Which etcd versions may hold the log."""

import subprocess
import sys

import pytest

from relume.events.etcd.client import etcd_versions
from relume.events.etcd.client.etcd_versions import (
    EtcdVersion,
    NotAVersion,
    VersionCheck,
    judge,
    parse_version,
)

BANNER = (
    "etcd Version: 3.4.23\nGit SHA: Not provided\nGo Version: go1.19.8\nGo OS/Arch: linux/amd64\n"
)


@pytest.mark.parametrize("members", [1, 3, 5])
@pytest.mark.parametrize("text", ["3.5.0", "3.5.1", "3.5.2"])
def test_versions_that_lose_acknowledged_writes_are_refused_at_any_size(text, members):
    judgement = judge(parse_version(text), members)
    assert judgement.verdict is VersionCheck.REFUSED
    assert "13766" in judgement.reason and text in judgement.reason


@pytest.mark.parametrize("text", ["3.4.0", "3.4.20", "3.5.3", "3.5.4"])
def test_versions_that_answer_before_the_disk_does_are_refused_with_one_member(text):
    assert judge(parse_version(text), 1).verdict is VersionCheck.REFUSED
    assert "14370" in judge(parse_version(text), 1).reason
    assert judge(parse_version(text), 3).usable


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("3.3.25", VersionCheck.REFUSED),
        ("2.3.8", VersionCheck.REFUSED),
        ("3.4.21", VersionCheck.WARNED),
        ("3.4.23", VersionCheck.WARNED),
        ("3.4.99", VersionCheck.WARNED),
        ("3.5.5", VersionCheck.WARNED),
        ("3.5.32", VersionCheck.WARNED),
        ("3.5.33", VersionCheck.ACCEPTED),
        ("3.6.0", VersionCheck.WARNED),
        ("3.6.13", VersionCheck.WARNED),
        ("3.6.14", VersionCheck.ACCEPTED),
        ("3.10.0", VersionCheck.ACCEPTED),
        ("3.6.14-rc.1", VersionCheck.REFUSED),
    ],
)
def test_single_member_verdicts(text, verdict):
    judgement = judge(parse_version(text), 1)
    assert judgement.verdict is verdict
    assert bool(judgement.reason) == (verdict is not VersionCheck.ACCEPTED)


def test_end_of_life_is_said():
    assert "end of life" in judge(EtcdVersion(3, 4, 23), 1).reason


def test_reads_what_etcd_prints_and_what_its_api_answers():
    assert parse_version(BANNER) == (3, 4, 23, "")
    assert parse_version("3.5.21") == (3, 5, 21, "")
    assert parse_version("v3.6.0-alpha.0+git\n") == (3, 6, 0, "alpha.0")


@pytest.mark.parametrize(
    "text", ["", "etcd", "3.5", "Go Version: go1.19.8", "release 3.5.1 of foo"]
)
def test_other_text_is_not_a_version(text):
    with pytest.raises(NotAVersion):
        parse_version(text)


def test_a_cluster_has_members():
    with pytest.raises(ValueError, match="at least one member"):
        judge(EtcdVersion(3, 6, 14), 0)


@pytest.mark.parametrize(
    ("text", "status"), [("3.6.14", 0), (BANNER, 0), ("3.5.1", 3), ("soup", 4)]
)
def test_runs_by_path_with_the_standard_library_alone(text, status):
    done = subprocess.run(
        [sys.executable, "-I", "-S", etcd_versions.__file__, "--members", "1"],
        input=text,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
