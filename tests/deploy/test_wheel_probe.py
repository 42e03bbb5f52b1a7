"""The wheel's probe finds what it is there to find."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PROBE = CHECKOUT / "deploy/dev/wheel_probe.py"


@pytest.fixture
def probe():
    specification = importlib.util.spec_from_file_location("wheel_probe", PROBE)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def installed(tmp_path):
    """A directory as an installed wheel's site-packages, with empty packages of ours."""
    site = tmp_path / "site"
    for name in ("", "events", "policies", "engine_shim", "controlplane"):
        package(site, name)
    distribution(site, "relume")
    return site


@pytest.fixture
def with_chaos(installed):
    """The same, with the distribution relume-chaos."""
    package(installed, "chaos")
    distribution(installed, "relume-chaos")
    return installed


def package(site, name):
    (site / "relume" / name).mkdir(parents=True)
    (site / "relume" / name / "__init__.py").write_text("")


def distribution(site, name):
    metadata = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")


# An isolated Python that sees the given directories and the standard library, nothing else.
ISOLATED = """
import runpy, sys
_, path, *sys.argv = sys.argv
sys.path[:0] = path.split(":")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(site: Path, *more: Path, extra: str = "base"):
    path = ":".join(map(str, (site, *more)))
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", ISOLATED, path, PROBE, extra, CHECKOUT],
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_accepts_a_whole_wheel(installed):
    done = run(installed)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["package", "module"])
def test_a_name_with_two_owners_is_found(installed, tmp_path, kind):
    other = tmp_path / "other"
    if kind == "package":
        (other / "relume").mkdir(parents=True)
        (other / "relume/__init__.py").write_text("")
    else:
        other.mkdir()
        (other / "relume.py").write_text("")
    done = run(installed, other)
    assert done.returncode == 1
    assert "top-level name 'relume' has 2 owners" in done.stderr
    assert str(installed / "relume") in done.stderr and str(other) in done.stderr


def test_one_place_reached_twice_is_one_owner(installed, tmp_path):
    (tmp_path / "link").symlink_to(installed)
    assert run(installed, tmp_path / "link").returncode == 0


def test_a_package_left_out_is_found(installed):
    (installed / "relume/engine_shim/__init__.py").unlink()
    done = run(installed)
    assert "'relume.engine_shim' is not in the wheel" in done.stderr


def test_chaos_is_in_its_own_wheel_alone(with_chaos):
    done = run(with_chaos)
    assert done.returncode == 1
    assert "'relume.chaos' is in the wheel of worker hosts" in done.stderr
    assert run(with_chaos, extra="chaos").returncode == 0


def test_relume_chaos_without_its_package_is_found(installed):
    distribution(installed, "relume-chaos")
    done = run(installed, extra="chaos")
    assert "'relume.chaos' is not in the wheel" in done.stderr


def test_both_distributions_have_one_version():
    """relume-chaos asks for the relume of its own version."""
    ours, chaos = (
        tomllib.loads((CHECKOUT / path).read_text())["project"]
        for path in ("pyproject.toml", "chaos/pyproject.toml")
    )
    assert chaos["version"] == ours["version"]
    assert chaos["dependencies"] == [f"relume[chaos]=={ours['version']}"]


def test_a_second_top_level_name_is_found(installed):
    (installed / "relume-0.1.0.dist-info/RECORD").write_text(
        "events/log/codec.py,,\nrelume/x.py,,\n"
    )
    done = run(installed)
    assert "the wheel installs events/log/codec.py, outside of 'relume'" in done.stderr


def test_an_undeclared_dependency_is_found(installed):
    (installed / "relume/policies/load.py").write_text("import surprise\n")
    done = run(installed)
    assert done.returncode == 1
    assert "policies.load needs 'surprise'" in done.stderr


def test_only_the_shim_may_lean_on_the_engine(installed):
    (installed / "relume/engine_shim/leaf.py").write_text("import vllm\n")
    assert run(installed).returncode == 0
    (installed / "relume/events/wrong.py").write_text("import vllm\n")
    assert "events.wrong needs 'vllm'" in run(installed).stderr


def test_a_module_that_breaks_is_found(installed):
    (installed / "relume/events/broken.py").write_text("def f(:\n")
    assert "events.broken does not import: SyntaxError" in run(installed).stderr


def test_a_script_without_its_target_is_found(installed):
    (installed / "relume-0.1.0.dist-info/entry_points.txt").write_text(
        "[console_scripts]\nrelume = relume.controlplane.cli.relume_command:main\n"
    )
    done = run(installed, extra="control")
    assert "'relume' = relume.controlplane.cli.relume_command:main does not load" in done.stderr
