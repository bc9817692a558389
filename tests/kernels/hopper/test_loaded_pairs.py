"""A bias of pairs that no two (batch, head) share, whose rows begin anywhere: consumers load it, and where it lies changes no bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import needs_cuda
from torch import Tensor

from dmattn import attention

pytest.importorskip("triton", reason="the kernels need Triton")

from dmattn.kernels.base.layout import strided
from dmattn.kernels.base.whole import ALIGNED, ANYWHERE, EVEN
from dmattn.kernels.hopper.loaded_pairs import are_words

BF16, FP16 = torch.bfloat16, torch.float16


def placed(x: Tensor, begin: int, more: int) -> Tensor:
    """The same numbers, the first so many past a multiple of 16 bytes, with so many more from row to row than a row has."""
    *rows, width = x.shape
    memory = torch.full((begin + math.prod(rows) * (width + more) + 8,), math.nan, dtype=x.dtype, device=x.device)
    made = memory[begin : begin + math.prod(rows) * (width + more)].view(*rows, width + more)[..., :width]
    return made.copy_(x)


@pytest.mark.parametrize(
    ("width", "begin", "more", "expected"),
    [
        (30, 0, 0, EVEN),
        (30, 2, 0, EVEN),
        (30, 1, 0, 1),  # the last number begins a word, of which the second half is nobody's
        (31, 0, 0, ANYWHERE),
        (31, 1, 0, 1),
        (29, 1, 1, ANYWHERE),
        (31, 0, 3, 1),
        (40, 0, 0, ALIGNED),
        (40, 1, 0, 1),
        (40, 2, 0, EVEN),
        (47, 1, 1, ANYWHERE),
        (48, 0, 0, 1),
    ],
)
def test_kernels_are_told_where_rows_begin(width: int, begin: int, more: int, expected: Any) -> None:
    bias = placed(torch.zeros(2, 3, 5, width, dtype=BF16), begin, more)
    told = strided(bias, 3, by_words=True).whole
    assert len(told) == getattr(expected, "value", expected)
    assert are_words(told) == (len(told) in (EVEN.value, ANYWHERE.value))
    assert not are_words(strided(bias, 3).whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_only_numbers_of_16_bits_are_loaded_by_words(dtype: torch.dtype) -> None:
    assert not are_words(strided(torch.zeros(1, 1, 4, 7, dtype=dtype), 1, by_words=True).whole)
    assert are_words(strided(torch.zeros(1, 1, 4, 7, dtype=BF16), 1, by_words=True).whole)
    assert not are_words(strided(torch.zeros(1, 1, 7, 4, dtype=BF16).mT, 1, by_words=True).whole)


@needs_cuda
@pytest.mark.parametrize(
    ("lengths", "head_dim", "dtype", "given"),
    [
        ((197, 333), 64, BF16, {}),
        ((70, 62), 64, FP16, {}),
        ((200, 450), 64, BF16, dict(causal=True)),
        ((333, 198), 128, BF16, dict(causal=True)),
        ((300, 301), 128, FP16, dict(window=(90, 40))),
        ((261, 517), 64, BF16, dict(window=(0, 30))),
        ((129, 389), 32, BF16, dict(softcap=20.0)),
        ((260, 390), 80, BF16, dict(scale=0.3)),
        ((65, 257), 256, BF16, {}),
        ((20, 1101), 64, BF16, {}),
    ],
)
def test_where_a_bias_lies_changes_no_bit(lengths: tuple[int, int], head_dim: int, dtype: torch.dtype, given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, length, head_dim, dtype=dtype, device="cuda") for length in (*lengths, lengths[1]))
    rising = torch.arange(lengths[1], device="cuda") / 4  # so that maxima of earlier tiles will not do
    bias = (torch.randn(2, 4, *lengths, device="cuda") + rising).to(dtype)
    exact = attention(query.double(), key.double(), value.double(), bias=bias.double(), **given)
    results, kinds = [], set()
    for begin in range(4):
        for more in range(4):
            x = placed(bias, begin, more)
            if x.stride(2) % 8 or begin:  # else the copy engine addresses it, by other tiles
                inputs = [y.detach().requires_grad_() for y in (query, key, value, x)]
                out = attention(*inputs[:3], bias=inputs[3], **given)
                kinds.add(len(strided(x, 4, by_words=True).whole))
                results.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    assert kinds == {1, ANYWHERE.value} | ({EVEN.value} if lengths[1] % 2 == 0 else set())
    torch.testing.assert_close(results[0][0].double(), exact, atol=0.02, rtol=0.02)
    for name, first, *others in zip(("out", "query", "key", "value", "bias"), *results, strict=True):
        assert all(torch.equal(first, other) for other in others), name
