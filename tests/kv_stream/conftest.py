"""Caches of torch tensors are tried in host memory, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=("cpu", pytest.param("cuda", marks=(GPU, pytest.mark.gpu))))
def device(request: pytest.FixtureRequest) -> str:
    return request.param
