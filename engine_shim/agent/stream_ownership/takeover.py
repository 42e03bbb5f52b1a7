"""Taking over from a dead predecessor without waiting for its lease.

The lock on the run directory proves that the agent which last ran in it is dead, and the
state file tells the epoch it held. The owner key of exactly that epoch therefore has no living
owner and may be removed immediately. Otherwise it would stay for a lease's TTL, and the worker
would answer nothing meanwhile. Any other owner is left alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aetcd import rpc

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.keys import Keys

FreeStream = Callable[[str, int], Awaitable[bool]]
_CREATE = 1  # Compare.CompareTarget.CREATE
_EQUAL = 0


async def free_stream(client: EtcdClient, stream: str, epoch: int) -> bool:
    """Remove the owner key of `stream` if its epoch is `epoch`; whether it was.

    Raises LogUnavailable.
    """
    key = Keys(client.config.prefix).owner(stream)
    compare = rpc.Compare(key=key, result=_EQUAL, target=_CREATE, create_revision=epoch)
    delete = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
    answer = await client.txn(rpc.TxnRequest(compare=[compare], success=[delete]))
    return answer.succeeded
