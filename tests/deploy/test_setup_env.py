"""`setup-env.sh` and its lock: clear refusals, nothing half-done, exact versions only."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = CHECKOUT / "deploy/dev/setup-env.sh"
LOCK = CHECKOUT / "deploy/dev/lock.txt"


def set_up(directory: Path, **environment: str):
    return subprocess.run(
        ["bash", SCRIPT, directory],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_without_a_fit_python_it_names_what_it_tried(tmp_path):
    done = set_up(tmp_path / "venv", RELUME_PYTHON="/bin/false")
    assert done.returncode == 1
    assert "no Python 3.11" in done.stderr and "/bin/false" in done.stderr
    assert "remedy:" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_refuses_where_it_cannot_write(tmp_path):
    (tmp_path / "file").write_text("")
    done = set_up(tmp_path / "file" / "venv")
    assert done.returncode == 1
    assert "cannot be written" in done.stderr and "remedy:" in done.stderr


@pytest.mark.full
def test_without_an_index_it_fails_with_a_remedy_and_is_not_done(tmp_path):
    venv = tmp_path / "venv"
    done = set_up(
        venv,
        PIP_CONFIG_FILE=os.devnull,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(tmp_path),
        PIP_NO_CACHE_DIR="1",
    )
    assert done.returncode == 1
    assert "installing pip and the build tools" in done.stderr
    assert "pip config list" in done.stderr
    assert not (venv / ".relume-environment").exists()


def test_lock_has_exact_versions_and_nothing_of_this_machine():
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 100
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.!]*", line), line


def test_lock_covers_what_is_required():
    specification = importlib.util.spec_from_file_location(
        "requirements", CHECKOUT / "deploy/dev/requirements.py"
    )
    requirements = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(requirements)
    locked = dict(
        line.split("==") for line in LOCK.read_text().splitlines() if not line.startswith("#")
    )
    for requirement in requirements.own_requirements("dev"):
        name = requirements.canonicalize_name(requirement.name)
        assert requirement.specifier.contains(locked[name]), requirement
    if importlib.util.find_spec("vllm"):
        assert requirements.locked_versions() == locked, "run `make lock`"


def test_scripts_are_sound_bash():
    for script in sorted((CHECKOUT / "deploy/dev").glob("*.sh")):
        subprocess.run(["bash", "-n", script], check=True)
        assert os.access(script, os.X_OK), script
