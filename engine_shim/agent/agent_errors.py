"""Errors of the agent: each says whose fault it is, and with which status the process ends."""

from __future__ import annotations

from relume.events.log.errors import RelumeError
from relume.events.settings.config_error import ConfigError

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_FENCED = 3
EXIT_OWNED = 4


class AgentError(RelumeError):
    """Root of the agent's own errors; `status` is the process exit status it leads to."""

    status = EXIT_FAILED


class RunDirectoryBusy(AgentError):
    """Another living agent holds this run directory. The operator's fault."""

    status = EXIT_CONFIG

    def __init__(self, path: str) -> None:
        super().__init__(f"another agent runs in {path}; stop it or give --run-dir another path")
        self.path = path


class RunDirectoryUnusable(AgentError):
    """The run directory cannot be made, or nothing can be made in it: no room, no right."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(
            f"{path}: {detail}; make room on its disk, or give --run-dir a path where this user "
            "may write"
        )
        self.path = path


class StateUnreadable(AgentError):
    """The state file exists but does not decode. Starting without it could reuse an
    incarnation or leave an orphan engine alive, so the agent refuses."""

    status = EXIT_CONFIG

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(
            f"{path} does not decode ({detail}); make sure no engine of this worker is alive, "
            "then remove it"
        )
        self.path = path


class LogNotFollowed(AgentError):
    """etcd lost the log, and this agent cannot read which log it holds instead."""

    def __init__(self, log_id: str, detail: str) -> None:
        super().__init__(
            f"etcd lost log {log_id or 'without an id'}, and this agent cannot follow to another: "
            f"{detail}; give --etcd credentials that may read and write the prefix, and start it again"
        )
        self.log_id = log_id


class WorkerFenced(AgentError):
    """Another agent owns this worker's stream now; whatever we run must stop."""

    status = EXIT_FENCED

    def __init__(self, stream: str, epoch: int) -> None:
        super().__init__(
            f"another agent took stream {stream}; our epoch {epoch} is over. Give each agent its own "
            "--worker; if there is no other agent, relume doctor says what stands in the stream"
        )
        self.stream = stream
        self.epoch = epoch


class WorkerOwned(AgentError):
    """The worker's stream had a living owner for longer than a dead one could hold it."""

    status = EXIT_OWNED

    def __init__(self, stream: str, owner: str, waited_s: float) -> None:
        super().__init__(
            f"stream {stream} is still owned by {owner} after {waited_s:.0f} s: another agent of "
            "this worker is alive; give --worker another name or stop it"
        )
        self.stream = stream
        self.owner = owner
        self.waited_s = waited_s


class HostRefused(AgentError):
    """The engine could not be started: no zygote, no such program, a refused fork.
    Expected while a zygote restarts; the supervisor retries with backoff."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


def exit_status(error: BaseException) -> int:
    """The exit status of a process that `error` ends."""
    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    return error.status if isinstance(error, AgentError) else EXIT_FAILED
