"""Which versions of vLLM the plugin works with. Imports nothing of vLLM: the private parts that the plugin
touches may be missing in others."""

from __future__ import annotations

MINORS = ("0.32",)
REMEDY = (
    "install a supported version, or let it join without the plugin: relume worker --host-kind plain "
    "--backend URL"
)


class UnsupportedVllm(RuntimeError):
    """The installed vLLM is not one whose private parts the plugin knows."""

    def __init__(self, found: str) -> None:
        known = ", ".join(f"{minor}.x" for minor in MINORS)
        super().__init__(f"vLLM {found} is installed; Relume's plugin supports {known}; {REMEDY}")
        self.found = found


def is_supported(version: str) -> bool:
    """Whether the plugin works with this version of vLLM."""
    return version.startswith(tuple(f"{minor}." for minor in MINORS))
