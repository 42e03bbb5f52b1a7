"""Which etcd versions hold an acknowledged write, and which we refuse.

Theory of operation. The log is only as good as etcd's promise that an acknowledged append
survives a kill. Three published defects break it, so the version decides before anything is
written:

* 3.5.0-3.5.2: the consistent index could be committed before the data it describes. After
  `kill -9` acknowledged writes are missing, also with a single member (etcd issue 13766; we saw
  it in 3 of 145 kills of 3.5.1). Refused always.
* below 3.4.21 and 3.5.0-3.5.4: a single-member cluster answers before its write-ahead log is on
  disk (etcd issue 14370). Refused with one member.
* the 3.4 line is past its end of life: accepted for development and CI, with a warning.

The module is pure and imports the standard library only: `deploy/dev/get-etcd.sh` runs this file
by its path, before any environment exists.

    python3 -I events/etcd/client/etcd_versions.py --members 1 < <(etcd --version)

Exit status there: 0 accepted (warnings on stderr), 3 refused (reason on stderr), 4 not a version.
"""

from __future__ import annotations

import enum
import re
import sys
from typing import NamedTuple

RECOMMENDED = "3.5.33 or later, or 3.6.14 or later"

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


class VersionCheck(enum.Enum):
    ACCEPTED = "accepted"
    WARNED = "accepted with a warning"
    REFUSED = "refused"


class Judgement(NamedTuple):
    """`reason` is one sentence for an operator; empty when plainly accepted."""

    verdict: VersionCheck
    reason: str

    @property
    def usable(self) -> bool:
        return self.verdict is not VersionCheck.REFUSED


def parse_version(text: str) -> EtcdVersion:
    """Read `3.5.9`, `v3.6.0-rc.1` or the whole output of `etcd --version`.

    Raises `NotAVersion`.
    """
    found = _BANNER.search(text)
    if found is None:
        raise NotAVersion(text)
    major, minor, patch, pre = found.groups()
    return EtcdVersion(int(major), int(minor), int(patch), pre or "")


def judge(version: EtcdVersion, members: int) -> Judgement:
    """Whether a cluster of `members` (>= 1) running `version` may hold the log."""
    if members < 1:
        raise ValueError(f"a cluster has at least one member, not {members}")
    release = version[:3]
    if version.pre:
        return _refused(version, "is a pre-release; only releases have a durability record")
    if (3, 5, 0) <= release <= (3, 5, 2):
        return _refused(
            version, "loses acknowledged writes after kill -9, also with one member (issue 13766)"
        )
    if release < (3, 4, 0):
        return _refused(version, "is older than the 3.4 line, which we never tested")
    if members == 1 and (release < (3, 4, 21) or (3, 5, 0) <= release < (3, 5, 5)):
        return _refused(
            version,
            "with a single member acknowledges writes before they are on disk (issue 14370); "
            "3.4.21 or 3.5.5 cure it",
        )
    if release < (3, 5, 0):
        return _warned(version, "is past its end of life: fit for development and CI only")
    if release < (3, 5, 33) or (3, 6, 0) <= release < (3, 6, 14):
        return _warned(version, "lacks later fixes")
    return Judgement(VersionCheck.ACCEPTED, "")


def _refused(version: EtcdVersion, why: str) -> Judgement:
    return Judgement(VersionCheck.REFUSED, f"etcd {version} {why}; use {RECOMMENDED}")


def _warned(version: EtcdVersion, why: str) -> Judgement:
    return Judgement(VersionCheck.WARNED, f"etcd {version} {why}; we recommend {RECOMMENDED}")


def main(argv: list[str], banner: str) -> int:
    """The command line of the docstring above: `[--members N]`, the banner on stdin."""
    members = 1
    if argv[:1] == ["--members"] and len(argv) == 2 and argv[1].isdigit() and int(argv[1]) > 0:
        members = int(argv[1])
    elif argv:
        print("usage: versions.py [--members N] < version-text", file=sys.stderr)
        return 2
    try:
        version = parse_version(banner)
    except NotAVersion as error:
        print(f"{error}", file=sys.stderr)
        return 4
    judgement = judge(version, members)
    if judgement.reason:
        print(judgement.reason, file=sys.stderr)
    return 0 if judgement.usable else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin.read()))
