"""Entry point of the vLLM plugin (`vllm.general_plugins`), once in every vLLM process.

`register` ties the process to its agent (reports and lifeline) and patches the API side.
Without RELUME_AGENT_SOCKET nothing reports, which is how vLLM runs outside a fleet.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from typing import Any

from relume.engine_shim import identity
from relume.engine_shim.engine import stacks
from relume.engine_shim.engine.hosts import niceness
from relume.engine_shim.engine.progress import Progress
from relume.engine_shim.engine.reporter import Reporter
from relume.engine_shim.supported_vllm import UnsupportedVllm, is_supported
from relume.events.failpoints import failpoint_client
from relume.events.wire.reports import Hello, Ready, Weights, frame, ready_frame, weights_frame

log = logging.getLogger("relume")

_registered_pid = 0
_reporter: Reporter | None = None
_progress: Progress | None = None
_exact: dict[str, bool | str] = {}


def register(role: str = "") -> None:
    """Idempotent. `role` overrides the one in the process's name: core, api, worker. Outside a fleet a
    version of vLLM that is not supported runs as it does without the plugin.

    Raises AgentUnreachable, UnsupportedVllm.
    """
    global _registered_pid, _reporter, _progress
    if _registered_pid == os.getpid():  # a fork is another process and registers again
        return
    _registered_pid = os.getpid()
    me = identity.from_environment()
    if not is_supported(vllm_version()):
        if me.agent_socket:
            raise UnsupportedVllm(vllm_version())
        log.warning("%s. The plugin does nothing here.", UnsupportedVllm(vllm_version()))
        return
    failpoint_client.start(f"engine {me.worker}")
    if not role:
        role = _role(multiprocessing.current_process().name)
        if role == "core":  # its workers inherit that
            niceness.give_way()
    if me.agent_socket:
        stacks.arm(me.agent_socket)
        _reporter = Reporter(me.agent_socket, Hello(os.getpid(), role, me.incarnation))
    _progress = Progress(me.progress)
    if me.pools and role != "api":
        from relume.engine_shim.pools import weights_loader

        loading = _progress.write_loading
        weights_loader.install(me.pools, bool(me.pools_anew), report_weights, me.load_mb_s, loading)
    if role == "worker":
        from relume.engine_shim.engine.vllm_private import model_runner, worker_times

        model_runner.install()
        worker_times.install(_progress)
    else:
        from relume.engine_shim.engine.vllm_private import api_server as vllm_private

        vllm_private.install()


def _role(process_name: str) -> str:
    """vLLM names the processes it starts; the launcher's own process is the API server."""
    if process_name.startswith("EngineCore"):
        return "core"
    return "worker" if process_name.startswith("VllmWorker") else "api"


def reporter() -> Reporter | None:
    """The connection to the agent; None without one."""
    return _reporter


def progress() -> Progress:
    """The page steps are counted in. Call `register` first."""
    assert _progress is not None, "plugin.register was not called"
    return _progress


def announce(ready: Ready) -> None:
    """Reports to the agent that the engine serves."""
    if _reporter is not None:
        _reporter.send(ready_frame(ready))


def report_weights(weights: Weights) -> None:
    """Reports to the agent where this rank's weights come from."""
    if _reporter is not None:
        _reporter.send(weights_frame(weights))


def tell(record: bytes) -> None:
    """Has the agent write an encoded event of this engine."""
    if _reporter is not None:
        _reporter.send(frame(record))


def vllm_version() -> str:
    """Version of the vLLM in this process."""
    from importlib.metadata import version

    return version("vllm")


def hardware(ranks: int) -> str:
    """What the engine computes on, and on how many of them."""
    from vllm.platforms import current_platform

    name = current_platform.get_device_name() or current_platform.device_type
    return f"{name} x{ranks}"


async def test_exactness(engine: Any) -> None:
    """Runs the self-test on vLLM's AsyncLLM, once, before the engine says it is ready."""
    global _exact
    from relume.engine_shim.checkpoints import selftest_restore
    from relume.engine_shim.engine import selftest
    from relume.engine_shim.engine.vllm_private import answer_ids

    answer_ids.pin()
    found = await selftest.verdicts(engine)
    restore = await selftest_restore.verdict(engine, found)
    _exact = found if restore is None else {**found, selftest.RESTORE: restore}


def exact() -> dict[str, bool | str]:
    """Ways to take a request up again, and whether what follows is exact here, or why not.
    Empty until they are tested."""
    return _exact


def keeps_blocks() -> bool:
    """Whether checkpoints of this engine can be trusted, as far as is known."""
    return _exact.get("restore", True) is True


def parses_output(scope: Any, body: bytes) -> bool:
    """Whether a stateful parser reads what the request of `scope` streams."""
    from relume.engine_shim.engine.vllm_private import api_server as vllm_private

    try:
        wanted = json.loads(body)
    except ValueError:
        return False
    if not isinstance(wanted, dict):
        return False
    return vllm_private.parses_output(scope["app"].state, scope["path"], wanted)


async def retarget(request: str, attempt: int, targets: tuple[str, ...]) -> bool:
    """Other holders for a running attempt; False when it is not here."""
    from relume.engine_shim.engine.vllm_private import api_server as vllm_private
    from relume.engine_shim.engine.vllm_private import engine_core as vllm_private_core

    if not keeps_blocks():
        return False
    return await vllm_private_core.retarget(vllm_private.engines(), request, attempt, targets)


async def hand_over(request: str, attempt: int, unbegun: bool) -> str:
    """Stops a running attempt that will continue elsewhere; why not (`handover.Refusal`), or empty."""
    from relume.engine_shim.engine.vllm_private import api_server as vllm_private
    from relume.engine_shim.engine.vllm_private import engine_core as vllm_private_core

    return await vllm_private_core.hand_over(vllm_private.engines(), request, attempt, unbegun)


async def turn() -> None:
    """Returns when the engine's loop has taken a turn."""
    from relume.engine_shim.engine.vllm_private import api_server as vllm_private
    from relume.engine_shim.engine.vllm_private import engine_core as vllm_private_core

    await vllm_private_core.turn(vllm_private.engines())


async def answer_canary(engine: Any, body: bytes, incarnation: int) -> tuple[int, dict[str, Any]]:
    """Status and content of the answer to a canary of the agent."""
    from relume.engine_shim.engine import canary

    return await canary.respond(engine, body, incarnation, progress())


def state() -> dict[str, Any]:
    """What `GET /relume/state` shows beside the identity."""
    from relume.engine_shim.engine.vllm_private import api_server as vllm_private

    held = vllm_private.unfinished()
    return {"pid": os.getpid(), **progress().read(), "unfinished": held, "exact": exact()}
