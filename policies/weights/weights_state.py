"""What the fold knows of a worker's model files. Data only; part of the fleet's state."""

from __future__ import annotations

from msgspec import Struct


class WeightsRecord(Struct, kw_only=True):
    """The model files of one incarnation of a worker, as its agent reports them (`WeightsReadStarted`,
    `WeightsDigested`). `weights`: the short digest, `digest`: that of every byte, empty while they are read,
    `files`: (name, digest) of large ones, unless another worker with the same digest has them here;
    `reread`: every file was read for this engine;
    `error`: why there is no digest. `since`: tick of the first report."""

    incarnation: int
    weights: str
    since: int
    digest: str = ""
    files: tuple[tuple[str, str], ...] = ()
    reread: bool = False
    error: str = ""
