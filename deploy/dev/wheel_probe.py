"""Run inside a fresh environment: does the installed wheel work with what it declares?

    python -I wheel_probe.py base|control|chaos CHECKOUT

Exit status 0, or 1 with one line for each finding on stderr.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

NAME = "relume"
CHAOS = f"{NAME}.chaos"
PACKAGES = tuple(f"{NAME}.{part}" for part in ("events", "policies", "engine_shim", "controlplane"))
# What is installed, and what of it is imported.
INSTALLED = {"base": PACKAGES, "control": PACKAGES, "chaos": (*PACKAGES, CHAOS)}
IMPORTED = {
    "base": PACKAGES[:3],
    "control": (*PACKAGES[:2], PACKAGES[3]),
    "chaos": INSTALLED["chaos"],
}
DISTRIBUTIONS = {"base": (NAME,), "control": (NAME,), "chaos": (NAME, f"{NAME}-chaos")}
# What comes with the engine that a worker host has anyway. Only leaf modules of the shim, and
# benches that drive an engine, may need it.
FROM_THE_ENGINE = {
    "aiohttp", "fastapi", "httptools", "numpy", "prometheus_client", "pydantic", "pydantic_core",
    "safetensors", "starlette", "tokenizers", "torch", "transformers", "uvicorn", "uvloop", "vllm",
    "zmq",
}  # fmt: skip
MAY_NEED_THE_ENGINE = ("relume.engine_shim", CHAOS)


def owners(name: str, path: list[str]) -> list[Path]:
    """Every place on `path` that has a top-level module `name`."""
    found = []
    for entry in path:
        found += [
            place
            for place in (Path(entry, name), *Path(entry or ".").glob(f"{name}.py"))
            if (place.is_dir() and any(place.glob("*.py"))) or place.is_file()
        ]
    return list(dict.fromkeys(place.resolve() for place in found))


def ownership_findings(extra: str, path: list[str]) -> Iterator[str]:
    """Whether our one name is ours alone, has its packages and no more, and brings no other
    name."""
    places = owners(NAME, path)
    if not places:
        yield f"top-level package '{NAME}' is not in the wheel"
        return
    if len(places) > 1:
        listed = " and ".join(map(str, places))
        yield f"top-level name '{NAME}' has {len(places)} owners: {listed}; uninstall one"
    for package in INSTALLED[extra]:
        if not any(places[0].joinpath(package.partition(".")[2]).glob("*.py")):
            yield f"package '{package}' is not in the wheel"
    if CHAOS not in INSTALLED[extra] and places[0].joinpath("chaos").exists():
        yield f"package '{CHAOS}' is in the wheel of worker hosts"
    for distribution in DISTRIBUTIONS[extra]:
        for file in importlib.metadata.distribution(distribution).files or ():
            if not file.parts[0].startswith((NAME, "..")):
                yield f"the wheel installs {file}, outside of '{NAME}'"


def import_findings(package: str, checkout: Path) -> Iterator[str]:
    """Import every module of a package; say which do not, or come from the checkout."""
    for name in (package, *modules_under(package)):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = ".".join((error.name or "").split(".")[:2])
            if not missing.startswith(f"{NAME}."):
                missing = missing.partition(".")[0]
            if missing in FROM_THE_ENGINE and package in MAY_NEED_THE_ENGINE:
                continue
            if missing in (*PACKAGES, CHAOS):
                yield f"{name} needs {error.name}, which is not in the wheel"
            else:
                yield f"{name} needs '{missing}', which its dependencies do not declare"
        except Exception as error:  # whatever a module raises, report it and go on to the next
            yield f"{name} does not import: {type(error).__name__}: {error}"
        else:
            origin = Path(module.__file__ or "/")
            if origin.is_relative_to(checkout):
                yield f"{name} was imported from the checkout ({origin}), not from the wheel"


def modules_under(package: str) -> Iterator[str]:
    """Names of all modules below an installed package, without importing leaf modules."""

    def unimportable(_: str) -> None:
        """Reported by `import_findings`, which imports the same name."""

    for info in pkgutil.walk_packages(
        importlib.import_module(package).__path__, package + ".", onerror=unimportable
    ):
        if not info.name.endswith("__main__"):
            yield info.name


def script_findings(extra: str) -> Iterator[str]:
    """Scripts and plugins whose target is not there."""
    for distribution in DISTRIBUTIONS[extra]:
        for entry in importlib.metadata.distribution(distribution).entry_points:
            package = ".".join(entry.module.split(".")[:2])
            if package in IMPORTED[extra] or package not in INSTALLED[extra]:
                try:
                    entry.load()
                except Exception as error:
                    yield f"{entry.group} '{entry.name}' = {entry.value} does not load: {error}"


def main(extra: str, checkout: Path) -> int:
    findings = list(ownership_findings(extra, sys.path))
    if not findings:
        for package in IMPORTED[extra]:
            findings.extend(import_findings(package, checkout))
        findings.extend(script_findings(extra))
    for finding in findings:
        print(f"wheel ({extra}): {finding}", file=sys.stderr)
    if not findings:
        print(f"wheel ({extra}): every module of {', '.join(IMPORTED[extra])} imports")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
