#!/usr/bin/env python3
"""Let the environment of this Python use the packages and commands of another one.

    link_third_party.py DIRECTORY

pip sees the packages as outside of this environment: it never changes them, and what it installs
here comes before them on the path.
"""

import os
import re
import sys
import sysconfig
from pathlib import Path

# How pip starts a script: the second form is for long paths and those with spaces.
START = re.compile(rb"\A#!(.*/python[\d.]*|/bin/sh\n'''exec' .*\n' ''')\n")


def main(other: Path) -> None:
    here, packages = Path(sys.prefix), Path(sysconfig.get_path("purelib"))
    # addsitedir also runs their .pth files. The name sorts before _relume.pth, as packages do.
    line = f"import site; site.addsitedir({str(other / packages.relative_to(here))!a})\n"
    (packages / "_packages.pth").write_text(line)
    start = b"#!/bin/sh\n'''exec' \"%s\" \"$0\" \"$@\"\n' '''\n" % os.fsencode(sys.executable)
    for command in (other / "bin").iterdir():
        own = here / "bin" / command.name
        if command.is_file() and not own.exists():
            own.write_bytes(START.sub(lambda _: start, command.read_bytes()))
            own.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
