"""Kubernetes and systemd as a process sees them: probes, SIGTERM, a grace period, SIGKILL, by the
numbers of the manifests and units in `deploy/`."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from relume.controlplane.local.child_processes import Child

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


def pod(name: str) -> dict[str, Any]:
    """The StatefulSet `name` of the manifests; its one container is `container`."""
    for path in sorted((DEPLOY / "k8s").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] == "StatefulSet" and document["metadata"]["name"] == name:
                spec = document["spec"]["template"]["spec"]
                return {**document["spec"], **spec, "container": spec["containers"][0]}
    raise LookupError(name)


def may_be_away(name: str, pods: int) -> int:
    """How many pods of `name` its disruption budget lets be away at once."""
    for path in sorted((DEPLOY / "k8s").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] == "PodDisruptionBudget" and document["metadata"]["name"] == name:
                spec = document["spec"]
                return spec.get("maxUnavailable", pods - spec.get("minAvailable", pods))
    raise LookupError(name)


def unit(name: str) -> dict[str, str]:
    """The settings of a unit of systemd."""
    lines = (DEPLOY / "systemd" / f"{name}@.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))


async def stopped(child: Child, grace_s: float) -> float:
    """SIGTERM, and SIGKILL after the grace period; the seconds until the process was gone."""
    began = time.monotonic()
    child.process.send_signal(signal.SIGTERM)
    while child.alive:
        if time.monotonic() - began > grace_s:
            child.process.kill()
            child.process.wait()
        await asyncio.sleep(0.05)
    return time.monotonic() - began


class Probe:
    """A readiness probe of a pod, played until it is cancelled. `since`: from when on it is ready, by
    the monotonic clock; 0: it is not."""

    def __init__(self, ask: Callable[[float], Awaitable[bool]], numbers: dict[str, Any]) -> None:
        self.since = 0.0
        self._succeeded = asyncio.Event()
        self._ask = ask
        self._period_s = float(numbers.get("periodSeconds", 10))
        self._failures = int(numbers.get("failureThreshold", 3))
        self._timeout_s = float(numbers.get("timeoutSeconds", 1))

    async def run(self) -> None:
        failed = 0
        while True:
            is_ready = await self._ask(self._timeout_s)
            failed = 0 if is_ready else failed + 1
            if is_ready:
                self.since = self.since or time.monotonic()
                self._succeeded.set()
            elif failed >= self._failures:
                self.since = 0.0
            await asyncio.sleep(self._period_s)

    async def success(self) -> None:
        """Return just after it has found the process ready once more."""
        self._succeeded.clear()
        await self._succeeded.wait()

    async def ready_for(self, seconds: float, within_s: float) -> None:
        """Wait until it has been ready for so long."""
        async with asyncio.timeout(within_s):
            while not self.since or time.monotonic() - self.since < seconds:
                await asyncio.sleep(0.1)


def asks_http(url: str) -> Callable[[float], Awaitable[bool]]:
    """A probe `httpGet`."""

    async def ask(timeout_s: float) -> bool:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                async with session.get(url) as answer:
                    return 200 <= answer.status < 400
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    return ask


def asks_command(numbers: dict[str, Any], port: int) -> Callable[[float], Awaitable[bool]]:
    """A probe `exec`, at another port than the one in the manifest."""
    python, *words = numbers["exec"]["command"]
    assert python == "python3"
    argv = [sys.executable, *(re.sub(r":\d+/", f":{port}/", word) for word in words)]

    async def ask(timeout_s: float) -> bool:
        quiet = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*argv, stdout=quiet, stderr=quiet)
        try:
            async with asyncio.timeout(timeout_s):
                return await process.wait() == 0
        except TimeoutError:
            process.kill()
            await process.wait()
            return False

    return ask


class NotifySocket:
    """Where systemd listens to a unit of `Type=notify`. Close it at the end."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))

    def close(self) -> None:
        self._socket.close()

    def heard(self) -> list[str]:
        """What came since the last call."""
        found = []
        while True:
            try:
                found.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return found

    async def ready(self, within_s: float) -> list[str]:
        """Wait for READY=1; returns what came until then."""
        return await self.until("READY=1", within_s)

    async def until(self, words: str, within_s: float) -> list[str]:
        """Wait for a message with these words; returns what came until then."""
        found: list[str] = []
        async with asyncio.timeout(within_s):
            while not any(words in text for text in found):
                found += self.heard()
                await asyncio.sleep(0.05)
        return found
