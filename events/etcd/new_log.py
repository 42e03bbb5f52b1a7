"""Beginning a new log in an etcd that does not hold the former one whole any more.

The new log has the same prefix and another id. First the owner keys go, so every writer of the former
log is fenced. Then its segments and snapshot manifests go, and last the id changes: what waits for a
new log sees it when nothing of the former one is left. Each transaction is bounded. A call that was cut
short is repeated; what it deleted stays deleted.
"""

from __future__ import annotations

from aetcd import rpc
from msgspec import Struct

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.keys import Keys, after_prefix
from relume.events.etcd.maintenance import Maintenance
from relume.events.log.errors import LogError

_PAGE = 512  # keys deleted in one transaction; etcd does nothing else meanwhile
_VALUE = 3  # Compare.CompareTarget.VALUE
_CREATE = 1  # Compare.CompareTarget.CREATE


class AnotherLog(LogError):
    """etcd holds another log than the one that is to end."""

    def __init__(self, expected: str, present: str) -> None:
        super().__init__(
            f"etcd holds log {present or 'without an id'}, not {expected or 'one without an id'}; "
            "nothing more was changed"
        )
        self.present = present


class RemovedKeys(Struct, frozen=True, kw_only=True):
    """How many keys of the former log were deleted."""

    owners: int
    segments: int
    manifests: int


async def begin_log(client: EtcdClient, former: str, fresh: str) -> RemovedKeys:
    """End log `former` (empty: one without an id) and name the new one `fresh`.

    Raises AnotherLog, LogUnavailable, AccessRefused.
    """
    keys = Keys(client.config.prefix)
    present = await Maintenance(client).identity()
    if present != former:
        raise AnotherLog(former, present)
    removed = RemovedKeys(
        owners=await _delete_all(client, keys.own),
        segments=await _delete_all(client, keys.log),
        manifests=await _delete_all(client, keys.snap),
    )
    compare = rpc.Compare(key=keys.identity, result=0, target=_VALUE, value=former.encode())
    if not former:
        compare = rpc.Compare(key=keys.identity, result=0, target=_CREATE, create_revision=0)
    put = rpc.RequestOp(request_put=rpc.PutRequest(key=keys.identity, value=fresh.encode()))
    answer = await client.txn(rpc.TxnRequest(compare=[compare], success=[put]))
    if not answer.succeeded:
        raise AnotherLog(former, await Maintenance(client).identity())
    return removed


async def _delete_all(client: EtcdClient, prefix: bytes) -> int:
    """Delete every key under `prefix`; how many there were."""
    count, end = 0, after_prefix(prefix)
    while (page := await client.range(prefix, end, limit=_PAGE, keys_only=True)).kvs:
        await client.delete(prefix, page.kvs[-1].key + b"\0")
        count += len(page.kvs)
    return count
