"""`dmattn.compat` beside the originals themselves, as far as these run on a CPU: FlexAttention's results, xFormers' masks and signature.

FlashAttention, flash-dmattn and DeepSpeed's kernel are compiled by nvcc. cuEquivariance's library is linked to NVIDIA's driver, and xFormers has
no operator for CPUs. Their formulas are in test_compat.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from libraries import library
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from dmattn import compat
from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="about arguments, which are the same in both halves")
EXACT = dict(rtol=1e-9, atol=1e-11)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).requires_grad_()


def step(function: Callable[..., Any], inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """All results, and the gradients of the inputs."""
    found = function(*inputs, **options)
    results = found if isinstance(found, tuple) else (found,)
    loss = sum((x * torch.cos(torch.arange(x.numel()).view(x.shape))).sum() for x in results)
    return [*results, *torch.autograd.grad(loss, inputs)]


def sliding(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i + 9) & (i + 9 - j < 8)


@pytest.mark.parametrize("heads", [4, 2], ids=["heads", "grouped"])
@pytest.mark.parametrize("how", ["plain", "block-mask", "by-batch-and-head"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention(how: str, heads: int) -> None:
    """Without gradients, which it has on no CPU."""
    inputs = [normal(2, 4, 21, 16), normal(2, heads, 30, 16), normal(2, heads, 30, 16)]
    options: dict[str, Any] = dict(scale=0.3, enable_gqa=heads < 4)
    if how == "block-mask":
        options["block_mask"] = create_block_mask(sliding, None, None, 21, 30, device="cpu")
    if how == "by-batch-and-head":
        options["block_mask"] = create_block_mask(lambda b, h, i, j: j <= i + 4 + 2 * b + h, 2, 4, 21, 30, device="cpu")
    inputs = [x.detach() for x in inputs]
    ours, theirs = (each(*inputs, **options, return_aux=AuxRequest(lse=True)) for each in (compat.flex_attention, flex_attention))
    torch.testing.assert_close(ours[0], theirs[0], **EXACT)
    torch.testing.assert_close(ours[1].lse, theirs[1].lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["LowerTriangularMask", "LowerTriangularFromBottomRightMask"])
def test_xformers_masks(name: str) -> None:
    """The mask as xFormers writes it out, in its formula; the class is its own, not one of that name."""
    mask = getattr(library("xformers.ops.fmha.attn_bias"), name)()
    inputs = [normal(2, 5, 4, 8), normal(2, 9, 4, 8), normal(2, 9, 4, 8)]

    def original(query: Tensor, key: Tensor, value: Tensor, attn_bias: Any) -> Tensor:
        scores = torch.einsum("bihd,bjhd->bhij", query, key) * 8**-0.5 + attn_bias.materialize((2, 4, 5, 9), dtype=torch.float64)
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), value)

    ours = step(compat.memory_efficient_attention, inputs, attn_bias=mask)
    for x, y in zip(ours, step(original, inputs, attn_bias=mask), strict=True):
        torch.testing.assert_close(x, y, **EXACT)


def test_xformers_other_masks_are_refused() -> None:
    """Theirs, which look alike."""
    masks, query = library("xformers.ops.fmha.attn_bias"), normal(1, 8, 4, 8)
    others = [
        masks.BlockDiagonalMask.from_seqlens([3, 5]),
        masks.BlockDiagonalCausalMask.from_seqlens([3, 5]),
        masks.LowerTriangularFromBottomRightLocalAttentionMask(4),
        masks.LowerTriangularMaskWithTensorBias(torch.zeros(8, 8)),
        masks.LocalAttentionFromBottomRightMask(2, 2),
    ]
    for other in others:
        with pytest.raises(TypeError, match=r"^dmattn: attn_bias: expected a float tensor, one of LowerTriangularMask, .*attention_varlen"):
            compat.memory_efficient_attention(query, query, query, other)


@pytest.mark.parametrize("name", ["flex_attention", "memory_efficient_attention"])
def test_parameters_are_the_originals(name: str) -> None:
    original = flex_attention if name == "flex_attention" else library("xformers.ops").memory_efficient_attention
    ours, theirs = ([(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()] for f in (getattr(compat, name), original))
    assert ours == theirs
