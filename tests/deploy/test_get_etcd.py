"""`get-etcd.sh` takes a fit etcd and refuses others with the reason, without touching the host."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = CHECKOUT / "deploy/dev/get-etcd.sh"
TOOLS = ("bash", "env", "awk", "sed", "timeout", "dirname", "python3", "cat")


def put(directory: Path, name: str, text: str) -> Path:
    directory.mkdir(exist_ok=True)
    program = directory / name
    program.write_text("#!/bin/bash\n" + text)
    program.chmod(0o755)
    return program


def etcd(directory: Path, version: str) -> Path:
    return put(directory, "etcd", f"echo 'etcd Version: {version}'\necho 'Git SHA: none'\n")


@pytest.fixture
def open_path():
    """A scratch directory that other users can read, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def run(open_path):
    """Run the script with a PATH of the given directories and the few tools it needs."""
    tools = open_path / "tools"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(shutil.which(name))

    def run(*directories: Path, arguments=("--no-install",), user=None, **environment: str):
        path = ":".join(map(str, (*directories, tools)))
        return subprocess.run(
            ["/bin/bash", str(SCRIPT), *arguments],
            env={"PATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=30,
            user=user,
        )

    return run


def test_takes_the_one_on_path(run, tmp_path):
    program = etcd(tmp_path / "a", "3.6.14")
    done = run(tmp_path / "a")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{program}\n", "")


def test_goes_past_a_refused_one(run, tmp_path):
    etcd(tmp_path / "a", "3.5.1")
    program = etcd(tmp_path / "b", "3.5.33")
    done = run(tmp_path / "a", tmp_path / "b")
    assert done.stdout == f"{program}\n"
    assert "13766" in done.stderr


def test_a_named_one_that_is_refused_is_not_replaced_silently(run, tmp_path):
    etcd(tmp_path / "a", "3.6.14")
    named = etcd(tmp_path / "b", "3.5.1")
    done = run(tmp_path / "a", RELUME_ETCD=str(named))
    assert (done.returncode, done.stdout) == (3, "")
    assert "loses acknowledged writes" in done.stderr
    assert "unset it to look on PATH" in done.stderr  # and what to do


@pytest.mark.parametrize("text", ["exit 1\n", "echo soup\n"])
def test_what_is_not_etcd_is_not_taken(run, tmp_path, text):
    put(tmp_path / "a", "etcd", text)
    done = run(tmp_path / "a")
    assert (done.returncode, done.stdout) == (1, "")


def test_does_not_install_a_package_it_would_refuse(run, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root would get as far as installing")
    put(tmp_path / "a", "apt-cache", "echo 'etcd-server:'; echo '  Candidate: 1:3.3.25+dfsg-7'\n")
    put(tmp_path / "a", "apt-get", f"touch {tmp_path}/ran\n")
    done = run(tmp_path / "a", arguments=())
    assert done.returncode == 3
    assert "3.3.25" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_without_root_it_says_what_to_run(run, open_path):
    put(open_path / "a", "apt-get", "exit 99\n")
    nobody = 65534 if os.geteuid() == 0 else None
    for directory in (SCRIPT.parent, *SCRIPT.parent.parents):
        if nobody and directory.stat().st_mode & 0o005 != 0o005:
            pytest.skip(f"{directory} is closed to other users")
    done = run(open_path / "a", arguments=(), user=nobody)
    assert done.returncode == 1
    assert "sudo apt-get install etcd-server" in done.stderr
