"""The subcommands of etcdctl that `relume doctor --etcd-roles` prints, over etcd's JSON gateway.

Stands in where etcdctl is not installed. It refuses what it does not know, and writes errors to
stderr with exit status 1, as etcdctl does.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import urllib.error
import urllib.request


def post(path: str, body: dict) -> None:
    endpoint = os.environ["ETCDCTL_ENDPOINTS"].split(",")[0]
    headers = {"content-type": "application/json"}
    if user := os.environ.get("ETCDCTL_USER"):
        name, _, password = user.partition(":")
        url = f"{endpoint}/v3/auth/authenticate"
        data = json.dumps({"name": name, "password": password}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
            headers["Authorization"] = json.load(answer)["token"]
    url, data = f"{endpoint}/v3/auth/{path}", json.dumps(body).encode()
    urllib.request.urlopen(urllib.request.Request(url, data, headers)).close()


def key_range(key: str, prefix: bool) -> dict[str, str]:
    start = key.encode()
    found = {"key": base64.b64encode(start).decode()}
    if prefix:
        end = start[:-1] + bytes([start[-1] + 1])
        found["range_end"] = base64.b64encode(end).decode()
    return found


def run(argv: list[str]) -> None:
    match argv:
        case ["user", "add", name, "--interactive=false"]:
            post("user/add", {"name": name, "password": sys.stdin.readline().strip()})
        case ["role", "add", name]:
            post("role/add", {"name": name})
        case ["role", "grant-permission", name, ("read" | "readwrite") as kind, key, *prefix]:
            assert prefix in ([], ["--prefix=true"]), argv
            permission = {"permType": kind.upper(), **key_range(key, bool(prefix))}
            post("role/grant", {"name": name, "perm": permission})
        case ["user", "grant-role", name, role]:
            post("user/grant", {"user": name, "role": role})
        case ["auth", "enable"]:
            post("enable", {})
        case _:
            raise SystemExit(f"etcdctl of the tests does not know {argv}")


if __name__ == "__main__":
    try:
        run(sys.argv[1:])
    except urllib.error.HTTPError as error:
        raise SystemExit(f"Error: {error.read().decode()}") from None
