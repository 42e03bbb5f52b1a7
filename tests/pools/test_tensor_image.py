"""A model's tensors as one piece of memory, out and in."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from relume.engine_shim.pools.tensor_image import CHUNK_BYTES, TensorImage, Unimageable, digest


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Of several types and shapes; two names have one tensor."""
    made = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(7, 5, generator=made))
    return {
        "embedding": weight,
        "head": weight,
        "half": torch.randn(3, 3, generator=made).to(torch.bfloat16),
        "turned": torch.randn(4, 6, generator=made).t(),
        "scale": torch.randn((), generator=made),
        "ids": torch.randint(0, 9, (11,), generator=made),
        "none": torch.empty(0),
    }


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("image")
    yield made
    os.close(made)


def test_another_model_has_the_tensors_of_the_first(fd: int) -> None:
    first, second = tensors(1), tensors(2)
    image, other = TensorImage(first), TensorImage(second)
    assert image.table == other.table and "head" not in [row[0] for row in image.table]
    os.ftruncate(fd, image.size)
    image.write(fd)
    other.use(fd)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert second["embedding"] is second["head"]
    assert second["turned"].stride() == (1, 6), "its own memory, since the image is in order"


def test_what_an_engine_writes_to_its_tensors_does_not_reach_the_image(fd: int) -> None:
    first = tensors(1)
    image = TensorImage(first)
    os.ftruncate(fd, image.size)
    image.write(fd)
    before = digest(fd, image.size)
    image.use(fd)
    with torch.no_grad():
        first["embedding"].zero_()
        first["half"] += 1
    assert digest(fd, image.size) == before


@pytest.mark.parametrize("at", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 9])
def test_each_byte_counts_for_the_digest(fd: int, at: int) -> None:
    size = 2 * CHUNK_BYTES + 10
    os.ftruncate(fd, size)
    before = digest(fd, size)
    os.pwrite(fd, b"\x01", at)
    assert digest(fd, size) != before


def test_tensors_without_memory_have_no_image() -> None:
    with pytest.raises(Unimageable, match="before it is loaded"):
        TensorImage({"quantised": torch.empty(3, device="meta")})
    with pytest.raises(Unimageable, match="no tensors"):
        TensorImage({})
