"""CURVE keys for checkpoints between hosts: one curve file and one secret a host.

`python -m relume.engine_shim.checkpoints.curve_keys --out DIR NAME=HOST:PORT ...` writes
DIR/NAME.json and DIR/NAME.secret for each host; `HOST:PORT` is where the others reach its state daemon
(`--checkpoint-advertise`). Each host is given its own two files (`--checkpoint-curve-file`);
all of them are made together, since each lists the public keys of the rest. What exists is
not overwritten.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import zmq

_HOST = re.compile(r"([A-Za-z0-9_.-]{1,64})=([A-Za-z0-9_.:\[\]-]{1,120}:[0-9]{1,5})")


def write_keys(directory: Path, hosts: Mapping[str, str]) -> None:
    """Keys for `hosts`: names to addresses (HOST:PORT). Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    pairs = {name: zmq.curve_keypair() for name in hosts}
    public = {f"tcp://{hosts[name]}": pair[0].decode() for name, pair in pairs.items()}
    for name, (key, secret) in pairs.items():
        _write(directory / f"{name}.secret", secret, 0o600)
        curve = {"public": key.decode(), "secret_file": f"{name}.secret", "hosts": public}
        _write(directory / f"{name}.json", json.dumps(curve, indent=1).encode(), 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)


def main(argv: Sequence[str] | None = None) -> int:
    """0 done, 1 not written, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m relume.engine_shim.checkpoints.curve_keys",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="directory to write to")
    parser.add_argument("hosts", metavar="NAME=HOST:PORT", nargs="+")
    given = parser.parse_args(argv)
    found = {}
    for text in given.hosts:
        parts = _HOST.fullmatch(text)
        if parts is None or parts[1] in found:
            parser.error(f"{text!r} is not NAME=HOST:PORT, or named twice")
        found[parts[1]] = parts[2]
    try:
        write_keys(Path(given.out), found)
    except OSError as error:
        print(f"checkpoint keys: {error}", file=sys.stderr)
        return 1
    print(f"keys of {len(found)} hosts are in {given.out}; secrets are for their hosts alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
