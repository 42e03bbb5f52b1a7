"""A digest of a model's files: two workers with other weights are not compared.

Names and sizes of all files are hashed, the text files whole, and of each file of weights its
beginning, which has the table of its tensors and some of them. Reading all weights would take
minutes, and their bytes in memory are what canaries check.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

HEAD_BYTES = 1 << 20
MOST_FILES = 1000


def weights_digest(model: str) -> str:
    """16 hex digits; empty if the model is no readable local directory."""
    folder = Path(model)
    digest = blake2b(digest_size=8)
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())[:MOST_FILES]
        for path in files:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(HEAD_BYTES))
    except OSError:
        return ""
    return digest.hexdigest() if files else ""
