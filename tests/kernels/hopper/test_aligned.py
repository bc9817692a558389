"""A bias that the copy engine cannot address, in a copy that it can: the numbers are the same, and so are results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import needs_cuda
from torch import Tensor

from dmattn import BlockMask, IntervalMask, attention
from dmattn.execution import replay

pytest.importorskip("triton", reason="the kernels need Triton")

from dmattn.kernels import run
from dmattn.kernels.base.leading import by_entry
from dmattn.kernels.hopper.aligned import aligned_copy, copy_pairs, empty_aligned

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("width", [1, 7, 8, 1001])
def test_rows_begin_at_multiples_of_16_bytes(width: int) -> None:
    made = empty_aligned(torch.empty(2, 3, 5, width, dtype=FP16))
    assert made.shape == (2, 3, 5, width)
    assert made.stride(3) == 1
    assert all(stride % 8 == 0 for stride in made.stride()[:3])
    assert made.data_ptr() % 16 == 0


def placed(x: Tensor, how: str) -> Tensor:
    """The same numbers elsewhere in memory."""
    if how == "transposed":
        return x.mT.contiguous().mT
    if how == "begins-unaligned":
        return torch.nn.functional.pad(x, (1, 0))[..., 1:]
    return x


def masked(kind: str, batch: int, lengths: tuple[int, int]) -> Tensor | IntervalMask | BlockMask:
    """A mask of a kind for each batch entry; of blocks the same for all."""
    if kind == "documents":
        return IntervalMask.documents(torch.arange(lengths[0], device="cuda").expand(batch, -1) // 200)
    mask = torch.rand(batch if kind == "pairs" else 1, 1, *lengths, device="cuda") < 0.7
    if kind == "pairs":
        return mask
    mask[..., :128, 128:] = False
    return BlockMask.from_mask(mask)


@pytest.fixture
def on_hopper() -> None:
    """Skips a test on another GPU."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@needs_cuda
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("how", ["contiguous", "transposed", "begins-unaligned"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 7, 257), (1, 5, 129, 1001), (3, 1, 9, 8)])
def test_numbers_are_copied_there_and_back(shape: tuple[int, ...], how: str) -> None:
    source = placed(torch.randn(shape, device="cuda").to(BF16), how)
    copy = aligned_copy(source)
    assert torch.equal(copy, source)
    back = torch.full((*shape[:3], shape[3] + 2), 7.0, dtype=BF16, device="cuda")
    copy_pairs(copy, back[..., 1:-1])
    assert torch.equal(back[..., 1:-1], source)
    assert (back[..., [0, -1]] == 7).all()  # numbers beside the target are left


@needs_cuda
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("how", ["contiguous", "transposed", "begins-unaligned"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("leading", "heads", "lengths", "dim", "bias_shape", "options"),
    [
        ((4,), 8, (333, 333), 64, (1, 8), {}),
        ((3,), 8, (501, 397), 128, (1, 8), dict(scale=0.2)),
        ((2,), 12, (401, 401), 64, (2, 1), dict(causal=True)),
        ((9,), 4, (333, 517), 80, (1, 4), dict(softcap=20.0)),
        ((2, 24), 2, (333, 333), 32, (2, 1, 2), {}),
        ((4,), 4, (393, 393), 192, (1, 4), dict(window=(200, 180))),
        ((12,), 4, (393, 393), 64, (1, 4), dict(mask="documents")),
        ((8,), 8, (333, 333), 128, (1, 8), dict(mask="pairs")),
        ((8,), 8, (333, 333), 128, (1, 8), dict(mask="blocks")),
    ],
    ids=["members-of-4", "d128", "heads-share", "softcap-d80", "leading-axes", "wide-window", "documents", "mask-of-pairs", "block-mask"],
)
def test_results_are_those_of_a_padded_bias(
    leading: tuple[int, ...],
    heads: int,
    lengths: tuple[int, int],
    dim: int,
    bias_shape: tuple[int, ...],
    options: dict[str, Any],
    dtype: torch.dtype,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, as the same kernels run; of a second call, too, which repeats the first one's launches on other numbers."""
    copied: list[tuple[int, ...]] = []

    def copy(bias: Any) -> Any:
        copied.append(tuple(by_entry(bias).shape[-2:]))
        return aligned_copy(bias)

    monkeypatch.setattr(run, "aligned_copy", copy)
    torch.manual_seed(0)
    query, d_out = (torch.randn(*leading, heads, lengths[0], dim, device="cuda").to(dtype) for _ in range(2))
    key, value = (torch.randn(*leading, heads, lengths[1], dim, device="cuda").to(dtype) for _ in range(2))
    numbers = torch.randn(*bias_shape, *lengths, device="cuda").to(dtype)
    if "mask" in options:
        options = options | dict(mask=masked(options["mask"], leading[0], lengths))
    padded = torch.nn.functional.pad(numbers, (0, -lengths[1] % 8))[..., : lengths[1]]
    found = []
    for bias in (placed(numbers, how), padded):
        replay.forget()  # what was launched before `copy` was in its place
        copied.clear()
        results: list[Tensor] = []
        for call in range(2):
            given = [x.detach().requires_grad_() for x in (query, key, value, bias)]
            out = attention(*given[:3], bias=given[3], **options)
            results += (out, *torch.autograd.grad(out, given, d_out))
            if call == 0:
                assert copied == ([] if bias is padded else [lengths] * 2)  # once in each pass
                bias.mul_(0.5)
        found.append(results)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
