"""Biases of pairs that are not stored pair by pair."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node

from .arguments import kind

__all__ = ["FactoredBias"]


@dataclass(frozen=True, eq=False)
class FactoredBias:
    r"""A bias of pairs as a product of factors: ``bias_ij = rows_i . cols_j``, added to the score of query i and key j.

    Accepted as the `bias` of :func:`dmattn.attention` and :func:`dmattn.attention_varlen`. Both passes take O((Sq + Sk) * R) memory, as the
    factors are more columns of query and key there: ``q'_i = (q_i, rows_i / scale)`` and ``k'_j = (k_j, cols_j)``. The squared distance of
    points in three dimensions has R = 5: ``|x|^2 + |y|^2 - 2 x . y`` is ``(1, |x|^2, -2 x) . (|y|^2, 1, y)``.

    Args:
        rows: (..., Sq, R), float16, bfloat16, float32 or float64, whatever the query's dtype. Leading axes broadcast to (B, H), the head axis
            also Hk, each entry serving its group of query heads. Differentiable.
        cols: (..., Sk, R), any of the four dtypes, on the device of `rows`. Leading axes broadcast to (B, Hk): query heads that share a key
            share its factors. Differentiable.

    Factors are finite numbers, and so are rows over scale. What hides a pair is a mask, and NaN in a factor counts as NaN in query or key does.
    A softcap is refused: it bounds products, and a bias is added after it. `scale` is 0, or from 2**-64 to 2**64 in size.

    **Precision.** The bias is that of float32 factors (float64 beside float64 queries) whatever the query's dtype: where products are rounded
    to fewer bits, a factor is the sum of several columns. With ``M_r = max_i |rows_ir| * max_j |cols_jr|``, its error is at most
    ``2**-20 * sum_r M_r``, besides the rounding of float32 sums. Float16 adds ``2**-23 * sum_r sqrt(abs(scale) * M_r)``, and overflows from
    ``M_r / abs(scale) = 2**30`` on. A factor in the query's dtype is exact in one column; rows are where scale is a power of two, too.

    ============================  =======================================  ====================================
    query                         columns a factor                         with rows, cols or both exact
    ============================  =======================================  ====================================
    float64, float32              1                                        1
    float32 where TF32 is on      6, of three bfloat16 numbers each        3, 3 or 1, if they are bfloat16
    bfloat16                      6, of three bfloat16 numbers each        3, 3 or 1
    float16                       3, of two float16 numbers each           2, 2 or 1
    ============================  =======================================  ====================================

    The head dim and all columns are at most 256 together, and are padded to a multiple of 16 bytes. :func:`dmattn.explain` says which kernels
    serve them: on a GPU they are those of the larger head dim.

    Gradients of factors have the factor's shape and dtype, and are summed in float32 over the axes on which it is broadcast. They are as exact
    as those of query and key, and rounded to the query's dtype before those sums. Differences of large sums keep that rounding: centre points
    that lie far from 0, or pass float32 queries.

    To PyTorch it is a tree of its two tensors, as :class:`dmattn.IntervalMask` is.

    Raises:
        TypeError, ValueError: a factor is no float tensor of at least two axes, or dtypes, numbers of factors or devices are not those above.

    Source: FlashBias (Wu et al., 2025, arXiv:2505.12044).
    """

    rows: Tensor
    cols: Tensor

    def __post_init__(self) -> None:
        for name, factors in (("rows", self.rows), ("cols", self.cols)):
            if not isinstance(factors, Tensor) or not factors.is_floating_point() or factors.dtype.itemsize < 2:
                received = f"{factors.dtype} tensor" if isinstance(factors, Tensor) else kind(factors)
                raise TypeError(f"dmattn: bias.{name}: expected a float16, bfloat16, float32 or float64 tensor, received {received}")
            if factors.ndim < 2 or factors.shape[-1] == 0:
                expected = f"shape (..., {'Sq' if name == 'rows' else 'Sk'}, R) with R of at least 1"
                raise ValueError(f"dmattn: bias.{name}: expected {expected}, received {tuple(factors.shape)}")
        if self.cols.shape[-1] != self.rows.shape[-1]:
            expected = f"as many factors as bias.rows has, {self.rows.shape[-1]}"
            raise ValueError(f"dmattn: bias.cols: expected {expected}, received shape {tuple(self.cols.shape)}")
        if self.cols.device != self.rows.device:
            raise ValueError(f"dmattn: bias.cols: expected device {self.rows.device} as bias.rows has, received {self.cols.device}")

    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The same bias as a tensor (..., Sq, Sk), differentiable: products and sums in float64, rounded once. O(Sq * Sk) memory.

        `dtype` is by default that of the factors, but at least float32. Of rows for H heads and cols for Hk it has H heads.
        """
        if dtype is None:
            dtype = torch.promote_types(torch.promote_types(self.rows.dtype, self.cols.dtype), torch.float32)
        rows, cols = self.rows.double(), self.cols.double()
        if rows.ndim > 2 and cols.ndim > 2:
            rows, cols = _same_heads(rows, cols.shape[-3]), _same_heads(cols, rows.shape[-3])
        return (rows @ cols.mT).to(dtype)


def _same_heads(x: Tensor, heads: int) -> Tensor:
    """Factors (..., heads, length, R) for as many heads as the others have, if these are more."""
    own = x.shape[-3]
    return x if own == 1 or heads <= own else x.repeat_interleave(heads // own, dim=-3)


def _with_factors(tensors: Iterable[Any], _: None) -> FactoredBias:
    """A bias of what stands for its factors in a tree: a transformation may have put anything there, so nothing is checked."""
    bias = object.__new__(FactoredBias)
    vars(bias).update(zip(("rows", "cols"), tensors, strict=True))
    return bias


register_pytree_node(
    FactoredBias,
    lambda bias: ([bias.rows, bias.cols], None),
    _with_factors,
    flatten_with_keys_fn=lambda bias: ([(GetAttrKey("rows"), bias.rows), (GetAttrKey("cols"), bias.cols)], None),
    serialized_type_name="dmattn.FactoredBias",
)
torch.serialization.add_safe_globals([FactoredBias])  # a saved program holds the inputs that it was exported with
