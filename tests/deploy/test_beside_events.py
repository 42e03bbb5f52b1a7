"""Relume installed beside the PyPI package `events`, which opensearch-py needs: both work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
OTHERS = ("events==0.5", "opensearch-py")

BOTH = """
import events, opensearchpy
counter = events.Events()
heard = []
counter.on_change += heard.append
counter.on_change(7)
assert heard == [7], heard
client = opensearchpy.OpenSearch("http://127.0.0.1:9")
assert client.transport.hosts[0]["port"] == 9

from relume.events import vocabulary as v
from relume.events.log import codec
event = v.Tick(number=1, unix_ms=2)
assert codec.decode(codec.encode(event)) == event
import relume.policies.state.fleet
"""


def run(*command: str | Path, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=timeout, cwd="/"
    )


def done(*command: str | Path) -> str:
    ran = run(*command)
    assert ran.returncode == 0, f"{ran.args}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The other distributions' wheels, from the configured index."""
    folder = tmp_path_factory.mktemp("others")
    ran = run(sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder, *OTHERS)
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"pip's index does not give {' '.join(OTHERS)}: {last}")
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    done(sys.executable, "-m", "pip", *build, CHECKOUT)
    return next(folder.glob("relume-*.whl"))


@pytest.fixture(params=["relume-first", "relume-last"])
def python(request: pytest.FixtureRequest, tmp_path: Path, wheel: Path, others: Path) -> Path:
    """The Python of a fresh environment with all of them, and links to Relume's dependencies."""
    done(sys.executable, "-m", "venv", "--without-pip", tmp_path / "fresh")
    python = tmp_path / "fresh/bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index")
    steps = [
        (*pip, "--no-deps", wheel),
        (*pip, "--find-links", others, *OTHERS),
    ]
    for step in steps if request.param == "relume-first" else reversed(steps):
        done(*step)
    link = CHECKOUT / "deploy/dev/link_dependencies.py"
    done(sys.executable, link, "base", tmp_path / "dependencies")
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(done(python, "-I", "-c", purelib).strip())
    (site / "zz_dependencies.pth").write_text(f"{tmp_path / 'dependencies'}\n")
    return python


@pytest.mark.full
def test_relume_and_opensearch_work_side_by_side(python: Path) -> None:
    done(python, "-I", "-c", BOTH)
    done(python.with_name("relume"), "worker", "--help")


@pytest.mark.full
def test_uninstalling_either_leaves_the_other_working(python: Path) -> None:
    uninstall = (sys.executable, "-m", "pip", "--python", python, "uninstall", "--yes", "--quiet")
    done(*uninstall, "events", "opensearch-py")
    done(python, "-I", "-c", "import relume.policies.state.fleet, relume.events.log.codec")


@pytest.mark.full
def test_a_worker_host_has_no_chaos_and_the_demo_says_so(python: Path) -> None:
    absent = "import importlib.util as u; assert u.find_spec('relume.chaos') is None"
    done(python, "-I", "-c", absent)
    ran = run(python.with_name("relume"), "demo")
    assert ran.returncode == 2 and "relume-chaos is not installed" in ran.stderr
