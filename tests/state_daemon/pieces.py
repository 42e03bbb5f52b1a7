"""A writer that sends each block in pieces, as the KV protocol allows: token ids, then a layer
at a time. The engine sends whole images; a holder assembles either."""

from __future__ import annotations

from collections.abc import Sequence

from relume.engine_shim.checkpoints.link.block_stream import BlockOut, CacheView
from relume.engine_shim.checkpoints.link.image import RunningDigest, pack_tokens
from relume.engine_shim.checkpoints.link.peer import Peer
from relume.events.wire.kv import kv_messages as m


class PiecedBlock:
    """One block; its pieces are sent in order, with the digest of the image in the last."""

    def __init__(self, block: BlockOut, view: CacheView) -> None:
        layers = [memoryview(bytes(layer)) for layer in view.pieces(block.block_id)]
        self.parts = [memoryview(pack_tokens(block.tokens)), *layers]
        self._block = block
        self._total = sum(map(len, self.parts))
        self._offset = 0
        self._digest = RunningDigest()

    def send(self, peer: Peer, part: memoryview) -> bool:
        """Send the next piece. False: the link has no room for it."""
        block, end = self._block, self._offset + len(part)
        self._digest.update(part)
        digest = self._digest.digest() if end == self._total else b""
        piece = m.Piece(
            request=block.request,
            child=block.child,
            rank=block.rank,
            index=block.index,
            attempt=block.attempt,
            offset=self._offset,
            length=len(part),
            total=self._total,
            digest=digest,
            priority=block.priority,
            scope=block.scope,
        )
        self._offset = end
        return peer.flush([piece], [part])


def scatter_in_pieces(view: CacheView, blocks: Sequence[BlockOut], peer: Peer) -> int:
    """Send `blocks` piece by piece; how many were taken whole, from the first on."""
    for taken, block in enumerate(blocks):
        pieced = PiecedBlock(block, view)
        if not all(pieced.send(peer, part) for part in pieced.parts):
            return taken
    return len(blocks)
