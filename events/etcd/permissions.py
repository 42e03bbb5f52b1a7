"""What each process may do in etcd: the permissions of its user, in terms of the layout of keys.

A worker's agent owns and writes its own stream and reads `fleet`, where its orders are. It can
neither write nor delete what the control plane decided, or what other workers said. A replica
writes its own stream, leads, and trims all of them. etcd's permissions cannot distinguish an append
from a deletion: a worker's user can delete its own segments, which the hash chain shows.
"""

from __future__ import annotations

from msgspec import Struct

from relume.events.etcd.keys import Keys


class Grant(Struct, frozen=True, kw_only=True):
    """Permission to read `key`, or all keys that begin with it, and to write if `write`."""

    key: bytes
    is_prefix: bool = False
    write: bool = False


def of_control_plane(keys: Keys) -> tuple[Grant, ...]:
    """For replicas."""
    return (Grant(key=keys.root, is_prefix=True, write=True),)


def of_reader(keys: Keys) -> tuple[Grant, ...]:
    """For `relume replay`, `why` and the debugger."""
    return (Grant(key=keys.root, is_prefix=True),)


def of_worker(keys: Keys, worker: str) -> tuple[Grant, ...]:
    """For the agent of `worker`. Raises BadStreamName."""
    stream = f"w.{worker}"
    return (
        Grant(key=keys.owner(stream), write=True),
        Grant(key=keys.stream(stream), is_prefix=True, write=True),
        Grant(key=keys.stream("fleet"), is_prefix=True),
    )
