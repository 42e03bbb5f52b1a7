"""Which etcd versions hold an acknowledged write, and which we refuse.

Theory of operation. The log is only as good as etcd's promise that an acknowledged append
survives a kill. Published defects break it, so the version decides before anything is written:

* 3.5.0-3.5.2: the consistent index could be committed before the data it describes. After
  `kill -9` acknowledged writes are missing, also with a single member (etcd issue 13766; we saw
  it in 3 of 145 kills of 3.5.1).
* below 3.4.21 and 3.5.0-3.5.4: a single-member cluster answers before its write-ahead log is on
  disk (etcd issue 14370). Refused with more members, too: a cluster may be reduced to one.

The module is pure and imports the standard library only: `deploy/dev/get-etcd.sh` runs this file
by its path, before any environment exists.

    python3 -I events/etcd/client/etcd_versions.py < <(etcd --version)

Exit status there: 0 accepted (a warning on stderr), 3 refused (reason on stderr), 4 not a version.
"""

from __future__ import annotations

import re
import sys
from typing import NamedTuple

RECOMMENDED = "use 3.5.33 or later, or 3.6.14 or later"

REFUSED = (
    ((0, 0, 0), (3, 4, 0), "is older than the 3.4 line, which we never tested"),
    ((3, 4, 0), (3, 4, 21), "acknowledges writes before they are on disk (issue 14370)"),
    ((3, 5, 0), (3, 5, 3), "loses acknowledged writes after kill -9 (issue 13766)"),
    ((3, 5, 3), (3, 5, 5), "acknowledges writes before they are on disk (issue 14370)"),
)
"""Releases from the first to before the second, and why they cannot hold the log."""

# `etcd --version` prints "etcd Version: X"; the API's Status and a package manager answer "X".
_BANNER = re.compile(
    r"(?:etcd Version:\s*|^\s*v?)(\d+)\.(\d+)\.(\d+)"
    r"(?:-([0-9A-Za-z.-]+))?(?:\+[0-9A-Za-z.-]+)?\s*$",
    re.MULTILINE,
)


class NotAVersion(ValueError):
    """The text holds no etcd version. `text` is what was given, cut to 200 characters."""

    def __init__(self, text: str) -> None:
        self.text = text[:200]
        super().__init__(f"no etcd version in {self.text.partition(chr(10))[0]!r}")


class EtcdVersion(NamedTuple):
    """`pre` is the pre-release tag (`rc.1`), empty for a release."""

    major: int
    minor: int
    patch: int
    pre: str = ""

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}" + (f"-{self.pre}" if self.pre else "")


class Judgement(NamedTuple):
    """`reason` is one sentence for an operator: why the version is refused, or a warning."""

    usable: bool
    reason: str = ""


def parse_version(text: str) -> EtcdVersion:
    """Read `3.5.9`, `v3.6.0-rc.1` or the whole output of `etcd --version`.

    Raises `NotAVersion`.
    """
    found = _BANNER.search(text)
    if found is None:
        raise NotAVersion(text)
    major, minor, patch, pre = found.groups()
    return EtcdVersion(int(major), int(minor), int(patch), pre or "")


def judge(version: EtcdVersion) -> Judgement:
    """Whether a cluster that runs `version` may hold the log."""
    release = version[:3]
    why = "is a pre-release; only releases have a durability record" if version.pre else ""
    for first, below, defect in REFUSED:
        if first <= release < below:
            why = defect
    if why:
        return Judgement(False, f"etcd {version} {why}; {RECOMMENDED}")
    if release < (3, 5, 33) or (3, 6, 0) <= release < (3, 6, 14):
        return Judgement(True, f"etcd {version} lacks fixes of later releases; {RECOMMENDED}")
    return Judgement(True)


def main(banner: str) -> int:
    """The command line of the docstring above, the banner on stdin."""
    try:
        version = parse_version(banner)
    except NotAVersion as error:
        print(f"{error}", file=sys.stderr)
        return 4
    judgement = judge(version)
    if judgement.reason:
        print(judgement.reason, file=sys.stderr)
    return 0 if judgement.usable else 3


if __name__ == "__main__":
    sys.exit(main(sys.stdin.read()))
