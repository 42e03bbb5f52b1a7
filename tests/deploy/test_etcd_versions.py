"""Which etcd versions may hold the log."""

import subprocess
import sys

import pytest

from relume.events.etcd.client import etcd_versions
from relume.events.etcd.client.etcd_versions import NotAVersion, judge, parse_version

BANNER = (
    "etcd Version: 3.4.23\nGit SHA: Not provided\nGo Version: go1.19.8\nGo OS/Arch: linux/amd64\n"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("2.3.8", "older than the 3.4 line"),
        ("3.3.25", "older than the 3.4 line"),
        ("3.4.0", "14370"),
        ("3.4.20", "14370"),
        ("3.5.0", "13766"),
        ("3.5.2", "13766"),
        ("3.5.3", "14370"),
        ("3.5.4", "14370"),
        ("3.6.14-rc.1", "pre-release"),
    ],
)
def test_versions_that_may_lose_acknowledged_writes_are_refused_with_the_reason(text, reason):
    judgement = judge(parse_version(text))
    assert not judgement.usable
    assert reason in judgement.reason and text in judgement.reason


@pytest.mark.parametrize("text", ["3.4.21", "3.4.99", "3.5.5", "3.5.32", "3.6.0", "3.6.13"])
def test_versions_that_lack_fixes_are_accepted_with_a_warning(text):
    judgement = judge(parse_version(text))
    assert judgement.usable and text in judgement.reason


@pytest.mark.parametrize("text", ["3.5.33", "3.6.14", "3.10.0"])
def test_current_versions_are_accepted_without_a_warning(text):
    assert judge(parse_version(text)) == (True, "")


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


@pytest.mark.parametrize(
    ("text", "status"), [("3.6.14", 0), (BANNER, 0), ("3.5.1", 3), ("soup", 4)]
)
def test_runs_by_path_with_the_standard_library_alone(text, status):
    done = subprocess.run(
        [sys.executable, "-I", "-S", etcd_versions.__file__],
        input=text,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
