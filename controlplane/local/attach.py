"""`relume attach URL`: a running OpenAI-compatible server joins the fleet as it is, without a restart.

The command asks the server for its model, and becomes the agent of a plain worker in front of it. When it
ends, the worker leaves and the server runs on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from relume.controlplane.cli.admin_client import EXIT_NO, EXIT_USAGE, CliError, read_fleet_file
from relume.controlplane.cli.output import print_line

ANSWER_S = 10.0
MOST_BYTES = 4 << 20
EXAMPLES = """\
examples:
  relume attach http://10.0.0.7:8000              stock vLLM, SGLang or TGI; until Ctrl-C
  relume attach http://10.0.0.7:8000 --worker p7 --run-dir /var/lib/relume/p7 --etcd 10.0.0.5:2379
  relume attach http://10.0.0.7:8000 --model qwen3 --backend-key-file /etc/relume/key

All other options are those of `relume worker`. A stream on this server cannot continue elsewhere once its
client has a part of it: for that, start the server under `relume worker`.
"""


def parser() -> argparse.ArgumentParser:
    """Its own options; all others go to `relume worker`."""
    made = argparse.ArgumentParser(
        prog="relume attach",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "url", metavar="URL", help="base URL of the server, for example http://10.0.0.7:8000"
    )
    made.add_argument("--worker", help="name of the worker (default: the server's host and port)")
    made.add_argument("--run-dir", help="directory of its state (default: .relume/attached/NAME)")
    made.add_argument("--model", help="the model, if the server has several")
    made.add_argument("--backend-key-file", metavar="FILE", help="file with the server's API key")
    made.add_argument("--state-dir", default=".relume", help="state of `relume up`, for its etcd")
    return made


def worker_arguments(given: Sequence[str]) -> list[str]:
    """The arguments of `relume worker` for these of `relume attach`. Raises CliError."""
    args, others = parser().parse_known_args(given)
    url = args.url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CliError(f"{args.url!r} is no URL; give one like http://10.0.0.7:8000", EXIT_USAGE)
    model = args.model or _only_model(url, args.backend_key_file)
    name = args.worker or re.sub(r"[^A-Za-z0-9_.-]", "-", parts.netloc.rpartition("@")[2])[:64]
    run_dir = args.run_dir or str(Path(args.state_dir) / "attached" / name)
    found = ["--worker", name, "--run-dir", run_dir, "--host-kind", "plain", "--backend", url]
    found += ["--model", model]
    if args.backend_key_file:
        found += ["--backend-key-file", args.backend_key_file]
    etcd = read_fleet_file(args.state_dir).get("etcd")
    has_etcd = any(o == "--etcd" or o.startswith("--etcd=") for o in others)
    if etcd and not has_etcd and "RELUME_ETCD_ENDPOINTS" not in os.environ:
        found += ["--etcd", ",".join(etcd)]
    print_line(
        f"{model} at {url} joins as worker {name}; Ctrl-C lets it leave, and the server runs on"
    )
    return [*found, *others]


def _only_model(url: str, key_file: str | None) -> str:
    """The model that the server names; adapters of it do not count. Raises CliError."""
    headers = {}
    try:
        if key_file:
            headers["authorization"] = f"Bearer {Path(key_file).read_text().strip()}"
        request = urllib.request.Request(f"{url}/v1/models", headers=headers)  # noqa: S310  http
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310  or https
            served: list[dict[str, Any]] = json.loads(answer.read(MOST_BYTES))["data"]
        names = sorted(str(model["id"]) for model in served if not model.get("parent"))
    except urllib.error.HTTPError as error:
        remedy = "give --backend-key-file" if error.code in (401, 403) else "is it the base URL?"
        raise CliError(f"{url}/v1/models answers {error.code}; {remedy}", EXIT_NO) from None
    except OSError as error:
        raise CliError(f"{url} does not answer: {error}; is the server up?", EXIT_NO) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CliError(
            f"{url}/v1/models gives no list of models; is it the base URL?", EXIT_NO
        ) from None
    if len(names) != 1:
        problem = f"{url} serves {', '.join(names) or 'no model'}"
        raise CliError(f"{problem}; choose one with --model", EXIT_USAGE)
    return names[0]
