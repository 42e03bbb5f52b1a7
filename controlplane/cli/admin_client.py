"""How the command line finds and calls the admin API: standard library only, synchronous."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TIMEOUT_S = 10.0
RETRY_S = 30.0
FOLLOW_TIMEOUT_S = 60.0
"""The server sends something every ten seconds; a longer silence means that it is gone."""


class CliError(Exception):
    """One line for the operator, and the exit code of the command."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


EXIT_NO = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_REFUSED = 4
EXIT_PARTLY = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--admin`, `--state-dir` and `--json`."""
    parser.add_argument(
        "--admin",
        default=os.environ.get("RELUME_ADMIN", ""),
        metavar="URL",
        help="admin API [RELUME_ADMIN; default: the fleet of `relume up` in this folder]",
    )
    parser.add_argument(
        "--state-dir", default=".relume", help="state of `relume up` (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


class AdminClient:
    """Calls the admin APIs one after another until one answers.

    `urls` are theirs, `token` goes to them alone.
    """

    def __init__(self, urls: list[str], token: str = "") -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._token = token

    @classmethod
    def find(cls, args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> AdminClient:
        """From --admin or RELUME_ADMIN, else from the fleet file. The token in that file is
        sent to the addresses in that file only. Raises CliError."""
        known = read_fleet_file(args.state_dir)
        token = environ.get("RELUME_ADMIN_TOKEN", "")
        if args.admin:
            url = args.admin if "://" in args.admin else f"http://{args.admin}"
            if not token and url.rstrip("/") in known.get("admins", ()):
                token = known.get("admin_token", "")
            return cls([url], token)
        if not known.get("admins"):
            raise CliError(
                f"no fleet runs from {args.state_dir}/ here: start one with `relume up`, "
                "or name its admin API with --admin URL",
                EXIT_UNREACHABLE,
            )
        return cls(list(known["admins"]), token or known.get("admin_token", ""))

    def get(self, path: str, **query: Any) -> Any:
        """GET `path` under /admin/v1; returns the decoded JSON. Raises CliError."""
        return self._call("GET", path, query)

    def post(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """Change something, with an idempotency key, so that trying the next replica after
        a broken connection changes it once. Raises CliError."""
        return self._call(method, path, {}, body, {"Idempotency-Key": uuid.uuid4().hex})

    def follow(self, path: str, **query: Any) -> Iterator[dict[str, Any]]:
        """Server-sent events, without end: a broken stream continues where it stopped, from any
        replica that answers. Raises CliError when none does for RETRY_S."""
        last_id, heard = "", 0.0
        while True:
            headers = {"Last-Event-ID": last_id} if last_id else {}
            try:
                with self._open("GET", path, {**query, "follow": 1}, None, headers, True) as answer:
                    heard = time.monotonic()
                    for line in answer:
                        heard = time.monotonic()
                        if line.startswith(b"id: "):
                            last_id = line[4:].decode().strip()
                        elif line.startswith(b"data: "):
                            yield json.loads(line[6:])
            except (OSError, http.client.HTTPException):
                pass  # broken: connect again, after the last event received
            except CliError as error:
                if error.code != EXIT_UNREACHABLE or time.monotonic() - heard > RETRY_S:
                    raise
            time.sleep(0.5)

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        try:
            with self._open(method, path, query, body, headers or {}, False) as answer:
                return json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise CliError(
                f"{self.urls[0]} answered unintelligibly: {error}", EXIT_UNREACHABLE
            ) from None

    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: Any,
        headers: Mapping[str, str],
        follow: bool,
    ) -> Any:
        given = {k: str(v) for k, v in query.items() if v not in (None, "", False)}
        suffix = f"/admin/v1/{path}" + (f"?{urllib.parse.urlencode(given)}" if given else "")
        data = None if body is None else json.dumps(body).encode()
        reason = ""
        for url in self.urls:
            request = urllib.request.Request(url + suffix, data, dict(headers), method=method)
            if data is not None:
                request.add_header("Content-Type", "application/json")
            if self._token:
                request.add_header("Authorization", f"Bearer {self._token}")
            try:
                return urllib.request.urlopen(
                    request, timeout=FOLLOW_TIMEOUT_S if follow else TIMEOUT_S
                )
            except urllib.error.HTTPError as error:
                refusal = _refusal(error)
                if error.code != 503:
                    raise refusal from None
                reason = str(refusal)  # the next replica may be better off
            except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
                reason = str(getattr(error, "reason", error))
            except ValueError as error:
                raise CliError(f"{url}: not an address ({error})", EXIT_USAGE) from None
        raise CliError(
            f"no admin API answers at {', '.join(self.urls)} ({reason}): "
            "is `relume up` or `relume serve` running? --admin names another",
            EXIT_UNREACHABLE,
        )


def _refusal(error: urllib.error.HTTPError) -> CliError:
    try:
        message = json.loads(error.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {error.code}"
    if error.code == 401:
        message += " (set RELUME_ADMIN_TOKEN)"
    return CliError(message, EXIT_REFUSED)


def read_fleet_file(state_dir: str) -> dict[str, Any]:
    """What `relume up` wrote about its fleet; empty when none runs. Raises CliError."""
    path = Path(state_dir) / "run" / "fleet.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except PermissionError:
        raise CliError(f"{path} belongs to another user: use --admin URL", EXIT_USAGE) from None
    except (OSError, ValueError) as error:
        raise CliError(f"{path} does not read: {error}; remove it", EXIT_USAGE) from None
