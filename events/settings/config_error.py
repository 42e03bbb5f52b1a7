"""The error for a setting that cannot be used."""

from __future__ import annotations

import re

from relume.events.log.errors import RelumeError
from relume.events.settings.declared import flag_of

_IN_A_URL = re.compile(r"//[^\s'\",]*@")
_WITHOUT_SCHEME = re.compile(r"[^\s'\",/:@=()\[]+:[^\s'\",@]*@")


class ConfigError(RelumeError):
    """A setting is missing or cannot be used. The operator's fault; `remedy` says what to do.

    `field` is the setting's name, `value` what was given (secrets masked), `source` where
    it came from.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, problem: str, remedy: str, source: str = ""):
        came_from = f" (from {source})" if source else ""
        problem = without_credentials(problem)
        value = without_credentials(value) if isinstance(value, str) else value
        shown = without_credentials(repr(value))
        super().__init__(f"{field} = {shown}{came_from}: {problem}; {remedy}")
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy
        self.source = source

    @property
    def flag(self) -> str:
        """The setting's flag."""
        return flag_of(self.field)


def without_credentials(text: str) -> str:
    """`text` with user and password of every URL in it masked, and those of `user:password@host`."""
    return _WITHOUT_SCHEME.sub("***@", _IN_A_URL.sub("//***@", text))
