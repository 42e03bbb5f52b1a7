"""Which held sequences begin with which tokens, so that one request's blocks can serve
another's identical prefix.

A chain (`kv_stream.prefix`) is made of the token ids that the stored images carry, and
only as far as a sequence is one computation: a block a newer attempt wrote counts once what
is before it is that attempt's too. One entry a block of rank 0 at most, so the bound on
blocks bounds the index.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Row

from relume.engine_shim.checkpoints.daemon.contents import Content
from relume.engine_shim.checkpoints.daemon.holdings import Holding, Sequence
from relume.engine_shim.checkpoints.link.image import Buffer
from relume.events.wire.kv import token_chain
from relume.events.wire.kv.fingerprint import TOKEN_BYTES, Fingerprint

TRIED = 8
"""Maximum number of sequences with the same chain that are compared."""


class Prefixes:
    """The index. One thread. `read` gives a stored image's bytes."""

    def __init__(self, read: Callable[[Content], Buffer]) -> None:
        self._read = read
        self._owners: dict[bytes, list[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def extend(self, holding: Holding, sequence: Sequence) -> None:
        """Chains what the sequence holds now without a gap."""
        if not holding.scope:
            return
        chains, blocks = sequence.chains, sequence.blocks
        size = TOKEN_BYTES * holding.fingerprint.block_size
        while (index := len(chains)) in blocks:
            if index and blocks[index - 1].attempt < blocks[index].attempt:
                return
            tokens = bytes(self._read(blocks[index].content)[:size])
            if len(tokens) < size:
                return
            before = chains[-1] if index else token_chain.root(holding.fingerprint, holding.scope)
            chain = token_chain.link(before, tokens)
            chains.append(chain)
            if sequence.rank == 0:
                self._owners.setdefault(chain, []).append(sequence)

    def cut(self, sequence: Sequence, index: int) -> None:
        """Block `index` goes: the sequence ends before it."""
        chains = sequence.chains
        while len(chains) > index:
            chain = chains.pop()
            if sequence.rank == 0:
                owners = self._owners[chain]
                owners.remove(sequence)
                if not owners:
                    del self._owners[chain]

    def longest(
        self, chains: Row[bytes], fingerprint: Fingerprint, holdings: dict[str, Holding]
    ) -> tuple[str, int, int]:
        """(request, child, blocks) of the sequence with most of the prefix on all ranks; ("", 0,
        0)."""
        for count in range(len(chains), 0, -1):
            for owner in self._owners.get(chains[count - 1], ())[-TRIED:]:
                holding = holdings[owner.request]
                ranks = (
                    holding.sequences.get((owner.child, rank)) for rank in range(fingerprint.tp)
                )
                if all(s is not None and len(s.chains) >= count for s in ranks) and all(
                    holding.sequences[owner.child, rank].chains[count - 1] == chains[count - 1]
                    for rank in range(fingerprint.tp)
                ):
                    return owner.request, owner.child, count
        return "", 0, 0
