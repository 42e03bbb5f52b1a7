"""The production engine: stock `vllm serve` with our plugin, scheduler and middleware.

`python -m relume.engine_shim.engine.hosts.vllm_serve <arguments of vllm serve>` checks that vLLM will load the
plugin and replaces itself by `vllm serve`; its environment is that of the in-process
engine (RELUME_WORKER, RELUME_INCARNATION, RELUME_AGENT_SOCKET), with RELUME_PROGRESS, a
file through which HTTP server and EngineCore share their progress.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from typing import NoReturn

from relume.engine_shim.engine.hosts.niceness import keep_niceness

PLUGIN = "relume.engine_shim.engine.plugin:register"
MIDDLEWARE = "relume.engine_shim.engine.middleware.RelumeMiddleware"
SCHEDULER = "relume.engine_shim.engine.reporting_scheduler.relume_scheduler"


class PluginNotInstalled(RuntimeError):
    """vLLM finds plugins by installed metadata, and ours has none here."""

    def __init__(self) -> None:
        super().__init__(
            "vLLM would not load Relume's plugin: install the package (`pip install relume`) "
            "into the environment of vLLM, and do not exclude `relume` by VLLM_PLUGINS"
        )


def check_plugin() -> None:
    """Raises PluginNotInstalled."""
    allowed = os.environ.get("VLLM_PLUGINS")
    found = entry_points(group="vllm.general_plugins", name="relume")
    if not any(p.value == PLUGIN for p in found) or (
        allowed is not None and "relume" not in allowed.split(",")
    ):
        raise PluginNotInstalled


def serve_arguments(argv: list[str]) -> list[str]:
    """Arguments of `vllm serve` from ours: the model as vLLM wants it, and our hooks."""
    rest, model = [], []
    words = iter(argv)
    for word in words:
        if word == "--model":
            model = [next(words, "")]
        elif word.startswith("--model="):
            model = [word.removeprefix("--model=")]
        else:
            rest.append(word)
    hooks = ["--middleware", MIDDLEWARE]
    if not any(word.split("=")[0] == "--scheduler-cls" for word in rest):
        hooks += ["--scheduler-cls", SCHEDULER]
    return ["serve", *model, *rest, *hooks]


def main() -> NoReturn:
    check_plugin()
    keep_niceness()
    arguments = serve_arguments(sys.argv[1:])
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
