"""What the arguments of kernels say of tensors."""

from __future__ import annotations

import pytest
import torch

from dmattn.kernels.base import layout, whole
from dmattn.kernels.base.layout import strided
from dmattn.kernels.base.leading import one_batch_axis

BF16, FP32 = torch.bfloat16, torch.float32


def told(x) -> int:
    """What kernels are told that all strides but the last are multiples of."""
    return {1: 1, whole.ALIGNED.value: 8}[len(strided(x, 4).whole)]


def test_no_two_kinds_of_tensors_have_as_many_numbers() -> None:
    """Or Triton takes one for the other: see base/whole.py."""
    kinds = layout.Strided, layout.Stepped, layout.SteppedThrice, layout.OfQueries, layout.OfKeys
    lengths = [1, *(x.value for x in (whole.ALIGNED, whole.EVEN, whole.ANYWHERE, whole.FOURS))]
    counts = [len(kind._fields) - 1 + ones for kind in kinds for ones in lengths]
    assert len({*counts, len(layout.OfTerms._fields)}) == len(lengths) * len(kinds) + 1


def of_layout(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_permuted(shape, order, dtype=dtype, device="meta")


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
@pytest.mark.parametrize(
    ("dim", "dtype", "expected"),
    [
        (72, BF16, 8),
        (24, torch.float16, 8),
        (64, BF16, 1),
        (80, BF16, 1),
        (36, BF16, 1),
        (37, BF16, 1),
        (36, FP32, 1),
        (72, FP32, 1),
        (72, torch.int32, 1),
    ],
)
def test_rows_of_whole_16_bytes_are_told_where_triton_does_not_see_them(
    order: tuple[int, ...], dim: int, dtype: torch.dtype, expected: int
) -> None:  # fmt: skip
    assert told(of_layout((2, 4, 33, dim), order, dtype)) == expected


def test_an_odd_stride_is_not_told_to_be_a_multiple() -> None:
    assert told(torch.empty((2, 4, 33, 73), dtype=BF16, device="meta")[..., :72]) == 1
    assert told(torch.empty((2, 4, 33 * 72 + 1), dtype=BF16, device="meta")[..., 1:].view(2, 4, 33, 72)) == 1


def test_axes_of_1_do_not_count() -> None:
    x = torch.empty((1, 4, 33 * 72 + 8), dtype=BF16, device="meta")[..., 8:].view(1, 4, 33, 72)
    assert told(x.as_strided(x.shape, (3, *x.stride()[1:]))) == 8


def test_a_vector_per_row_is_told_to_be_a_multiple_of_nothing() -> None:
    assert told(torch.empty((2, 4, 72), dtype=FP32, device="meta")) == 1


def test_steps_to_the_places_of_leading_axes_count() -> None:
    x = torch.empty((3, 2, 5, 4, 33, 72), dtype=BF16, device="meta")
    nested = one_batch_axis("query", x.transpose(0, 2), (5, 2, 3))
    assert told(nested) == 8
    odd = torch.empty((3, 2, 5, 4 * 33 * 72 + 1), dtype=BF16, device="meta")[..., 1:].view(3, 2, 5, 4, 33, 72)
    assert told(one_batch_axis("query", odd.transpose(0, 2), (5, 2, 3))) == 1
