"""Results that several programs make in parts."""

from __future__ import annotations

import pytest
import torch
from conftest import NEEDS_CUDA

from dmattn.execution.backend import interpreting

pytest.importorskip("triton", reason="the kernels need Triton")

from dmattn.kernels.base.parts import empty_parts, sum_parts

interpreted = pytest.mark.skipif(not interpreting(), reason="launches a kernel, in the interpreter")
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=NEEDS_CUDA)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 2, 1)], ids=["contiguous", "heads-last"])
@pytest.mark.parametrize("shape", [(1, 2, 9, 130), (2, 3, 8, 5)])
def test_parts_are_summed_in_order_and_rounded_once(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    count = 7
    back = [order.index(axis) for axis in range(4)]
    result = torch.full([shape[axis] for axis in order], float("nan"), dtype=dtype, device=device).permute(back)
    assert result.shape == shape
    parts = empty_parts(result, count)
    parts.copy_(torch.randn(parts.shape, generator=torch.Generator().manual_seed(0)))
    sum_parts(parts, result)
    total = torch.zeros(shape, device=device)
    for part in parts.view(count, *shape):
        total += part
    assert torch.equal(result, total.to(dtype))


def test_one_part_is_the_result() -> None:
    result = torch.full((2, 3, 4, 5), 7.0)
    parts = empty_parts(result, 1)
    assert parts is result
    sum_parts(parts, result)
    assert (result == 7).all()
