"""Biases of pairs that are not stored pair by pair."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node

from . import advice, distances
from .arguments import check_flag, hint_for, kind

__all__ = ["FactoredBias", "RelativeBias"]


@dataclass(frozen=True, eq=False, repr=False)
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

    Factors are finite numbers, and so are rows over scale. Hide pairs by a mask. NaN in a factor counts as NaN in query or key does.
    A softcap is refused: it bounds products, and a bias is added after it. `scale` is 0, or from 2**-64 to 2**64 in size.

    **Precision.** The bias is that of float32 factors (float64 beside float64 queries) whatever the query's dtype: where products are rounded
    to fewer bits, a factor is the sum of several columns. With ``M_r = max_i |rows_ir| * max_j |cols_jr|``, its error is at most
    ``2**-20 * sum_r M_r``, besides the rounding of float32 sums. Float16 adds ``2**-23 * sum_r sqrt(abs(scale) * M_r)``, and overflows from
    ``M_r / abs(scale) = 2**30`` on. A factor in the query's dtype is exact in one column: cols always, rows if scale is a power of two.

    ============================  =======================================  ====================================
    query                         columns a factor                         with rows, cols or both exact
    ============================  =======================================  ====================================
    float64, float32              1                                        1
    float32 where TF32 is on      6, of three bfloat16 numbers each        3, 3 or 1, if they are bfloat16
    bfloat16                      6, of three bfloat16 numbers each        3, 3 or 1
    float16                       3, of two float16 numbers each           2, 2 or 1
    ============================  =======================================  ====================================

    The head dim and all columns are at most 512 together (in float32 on a GPU 256), and are padded to a multiple of 16 bytes.
    :func:`dmattn.explain` says which kernels serve them: on a GPU they are those of the larger head dim.

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

    def __repr__(self) -> str:
        rows, cols = (f"of shape {tuple(x.shape)} in {x.dtype}" for x in (self.rows, self.cols))
        return f"FactoredBias(rows {rows}, cols {cols})"

    def __post_init__(self) -> None:
        for name, factors in (("rows", self.rows), ("cols", self.cols)):
            _check_float(f"bias.{name}", factors)
            if factors.ndim < 2 or factors.shape[-1] == 0:
                expected = f"shape (..., {'Sq' if name == 'rows' else 'Sk'}, R) with R of at least 1"
                raise ValueError(f"dmattn: bias.{name}: expected {expected}, received {tuple(factors.shape)}")
        if self.cols.shape[-1] != self.rows.shape[-1]:
            expected = f"shape (..., Sk, R) with R = {self.rows.shape[-1]}, as bias.rows {tuple(self.rows.shape)} has"
            hint = _hint_of_factors(self.rows.shape, self.cols.shape)
            raise ValueError(f"dmattn: bias.cols: expected {expected}, received {tuple(self.cols.shape)}{hint}")
        if self.cols.device != self.rows.device:
            raise ValueError(f"dmattn: bias.cols: expected device {self.rows.device} as bias.rows has, received {self.cols.device}")

    def __add__(self, other: object) -> NoReturn:
        """None: a sum is one of tensors."""
        _refuse_sum("FactoredBias", "to_dense()", other)

    __radd__ = __add__

    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The same bias as a tensor (..., Sq, Sk), differentiable: products and sums in float64, rounded once. O(Sq * Sk) memory.

        `dtype` is by default that of the factors, but at least float32. Of rows for H heads and cols for Hk it has H heads.
        """
        if dtype is None:
            dtype = torch.promote_types(torch.promote_types(self.rows.dtype, self.cols.dtype), torch.float32)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"dmattn: FactoredBias.to_dense: dtype: expected a float dtype, received {dtype}")
        rows, cols = self.rows.double(), self.cols.double()
        if rows.ndim > 2 and cols.ndim > 2:
            own, other = rows.shape[-3], cols.shape[-3]
            if own != other and (not min(own, other) or max(own, other) % min(own, other)):
                raise ValueError(
                    f"dmattn: bias.cols: expected bias.rows' {own} heads, or a number that divides or is divided by it, received {other}"
                )
            if any(size != other and size != 1 and other != 1 for size, other in zip(rows.shape[-4::-1], cols.shape[-4::-1], strict=False)):
                expected = f"leading axes that broadcast with those of bias.rows, {tuple(rows.shape[:-3])}"
                raise ValueError(f"dmattn: bias.cols: expected {expected}, received {tuple(cols.shape[:-3])}")
            rows, cols = _same_heads(rows, cols.shape[-3]), _same_heads(cols, rows.shape[-3])
        return (rows @ cols.mT).to(dtype)


def _hint_of_factors(rows: Sequence[int], cols: Sequence[int]) -> str:
    """What a message adds where one side or both have the factors before the tokens; empty where that is not what is wrong."""
    if not all(row in (col, 1) or col == 1 for row, col in zip(rows[-3::-1], cols[-3::-1], strict=False)):
        return ""
    both = rows[-2] == cols[-2] < min(rows[-1], cols[-1])  # fewer factors than tokens
    ways = {"rows.mT and cols.mT": both, "cols.mT": rows[-1] == cols[-2], "rows.mT": rows[-2] == cols[-1]}
    fitting = [way for way, fits in ways.items() if fits]
    return f"; (..., R, S) layout? {' or '.join(fitting)}" if fitting else ""


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


@dataclass(frozen=True, eq=False, init=False, repr=False)
class RelativeBias:
    """A bias that depends on the distance of key and query alone: R numbers a head, whatever the lengths.

    For query i of Sq and key j of Sk::

        bias_ij = table[..., clamp(j - (i + Sk - Sq) + zero, 0, R - 1)]

    The distance j - (i + Sk - Sq) is 0 where ``causal`` ends, aligned bottom-right, and grows with the key: later keys have higher indices.
    Distances beyond the table take its ends, and their gradient is added there. Accepted wherever ``bias`` is. Both passes take O(R) memory for
    it. The gradient of the table is summed in float32, in a fixed order, and rounded once to the table's dtype.

    An entry of -inf masks, as a bias's does. NaN or infinity in entries that hidden pairs alone read changes nothing. To PyTorch it is a tree
    of its table, which ``torch.export``, ``torch.compile`` and ``torch.func.vmap`` take as an argument.

    Example::

        bias = RelativeBias.t5(weight, bidirectional=True)
        out = attention(query, key, value, bias=bias, scale=1.0)

    Args:
        table: float of any of the four dtypes, whatever the query's; (R,) or (..., H, R), the head axis also Hk, each entry serving its
            group, or 1; each leading axis the query's or 1, and those in front may be left out. Differentiable. In
            :func:`dmattn.attention_varlen` there is one leading axis, that of the sequences.
        zero: the index of distance 0, from 0 to R - 1; by default (R - 1) // 2.

    Raises:
        TypeError: ``table`` is no tensor, or no float one, or ``zero`` no integer.
        ValueError: ``table`` is empty or has no axis, or ``zero`` lies outside it.
    """

    table: Tensor
    zero: int
    longest: int | None  # queries or keys that the table was made for; None for any number
    is_bidirectional = False  # T5's, half of whose buckets are for later keys; only advice reads it, and a tree does not keep it

    def __init__(self, table: Tensor, zero: int | None = None) -> None:
        _check_float("RelativeBias: table", table)
        if table.ndim == 0 or table.shape[-1] == 0:
            raise ValueError(f"dmattn: RelativeBias: table: expected shape (R,) or (..., H, R), R from 1, received {tuple(table.shape)}")
        length = table.shape[-1]
        if zero is None:
            zero = (length - 1) // 2
            if advice.asked and not torch.compiler.is_compiling():
                advice.look_at_zero(length, zero)
        else:
            _check_integer("RelativeBias: zero", zero, "an integer or None")
        if not 0 <= zero < length:
            shape, other = tuple(table.shape), table.ndim == 2 and 0 <= zero < table.shape[0]
            hint = f"; the last axis of the table {shape} is the distances{', as that of table.t() would be' if other else ''}"
            raise ValueError(f"dmattn: RelativeBias: zero: expected an index of the table, from 0 to {length - 1}, received {zero}{hint}")
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "zero", zero if isinstance(zero, (int, torch.SymInt)) else int(zero))
        object.__setattr__(self, "longest", None)

    def __repr__(self) -> str:
        return f"RelativeBias(table of shape {tuple(self.table.shape)} in {self.table.dtype}, zero={self.zero})"

    def __add__(self, other: object) -> NoReturn:
        """None: a sum is one of tensors."""
        _refuse_sum("RelativeBias", "to_dense(Sq, Sk)", other)

    __radd__ = __add__

    def to_dense(self, len_q: int, len_k: int) -> Tensor:
        """The same bias as a tensor of shape (..., len_q, len_k), in the table's dtype and differentiable. O(len_q * len_k) memory."""
        for name, length in (("len_q", len_q), ("len_k", len_k)):
            _check_integer(f"RelativeBias.to_dense: {name}", length)
            if length < 0:
                raise ValueError(f"dmattn: RelativeBias.to_dense: {name}: expected a non-negative integer, received {length}")
            self.check_length(f"RelativeBias.to_dense: {name}", length)
        return distances.of_pairs(self.table, self.zero, 0, len_q, len_q, len_k)

    def check_length(self, name: str, length: int) -> None:
        """Raise if there are more queries or keys than the table was made for."""
        if self.longest is not None and length > self.longest:
            raise ValueError(f"dmattn: {name}: expected at most {self.longest}, the length of RelativeBias.alibi, received {length}")

    @classmethod
    def t5(cls, weight: Tensor, *, bidirectional: bool, max_distance: int = 128) -> RelativeBias:
        """The relative position bias of T5, from the weight of its embedding: equal to ``T5Attention.compute_bias`` of Sq queries and Sk keys.

        Half of the buckets of a direction hold one distance each, the others hold ranges that grow with the logarithm of the distance, up to
        `max_distance`. With ``bidirectional`` a half of the buckets serves keys after the query; without, these take bucket 0. The table has
        2 * max_distance + 1 numbers a head. The gradient of `weight` is that of an embedding. The table is read off the weight here, as it is
        now: make the bias anew in each forward pass.

        Args:
            weight: float, (buckets, H), ``relative_attention_bias.weight``, as an ``nn.Embedding(buckets, H)`` has it. Differentiable.
            bidirectional: True in encoders, False in decoders.
            max_distance: from here on distances share the last bucket of their direction.

        Raises:
            TypeError, ValueError: an argument of the wrong type or shape, too few buckets for both halves, or a `max_distance` that is not
                larger than the distances with a bucket of their own.

        Source: Raffel et al., 2020 (arXiv:1910.10683).
        """
        _check_float("RelativeBias.t5: weight", weight)
        check_flag("bidirectional", bidirectional)
        least = 4 if bidirectional else 2
        if weight.ndim != 2 or weight.shape[0] < least:
            hint = "; (H, buckets) layout? pass weight.t()" if weight.ndim == 2 and weight.shape[1] >= least else ""
            raise ValueError(f"dmattn: RelativeBias.t5: weight: expected shape (buckets from {least}, H), received {tuple(weight.shape)}{hint}")
        _check_integer("RelativeBias.t5: max_distance", max_distance)
        buckets = weight.shape[0] // 2 if bidirectional else weight.shape[0]
        exact = buckets // 2
        if max_distance <= exact:
            raise ValueError(
                f"dmattn: RelativeBias.t5: max_distance: expected more than {exact}, half of {buckets} buckets, received {max_distance}"
            )
        distance = torch.arange(-max_distance, max_distance + 1, device=weight.device)
        far = distance.abs() if bidirectional else (-distance).clamp(min=0)
        # in T5's own order of operations, as a rounding decides the bucket
        ratio = torch.log(far.clamp(min=exact).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
        bucket = torch.where(far < exact, far, (exact + ratio.to(torch.long)).clamp(max=buckets - 1))
        if bidirectional:
            bucket = bucket + (distance > 0) * buckets
        bias = cls(torch.nn.functional.embedding(bucket, weight).t(), max_distance)
        object.__setattr__(bias, "is_bidirectional", bidirectional)
        return bias

    @classmethod
    def alibi(cls, slopes: Tensor, length: int) -> RelativeBias:
        """ALiBi: ``bias_ij = -slope * |j - (i + Sk - Sq)|``, with slopes that may be learned, for up to `length` queries and keys.

        The table is made of the slopes as they are now: where they are learned, make the bias anew in each forward pass.

        Args:
            slopes: float, (H,); also (Hk,). Differentiable. The table is in float32 at least, as 16 bits would round long distances.
            length: the largest Sq and Sk served; the table has 2 * length - 1 numbers a head. A longer call raises ValueError.

        Raises:
            TypeError, ValueError: an argument of the wrong type, shape or value.

        Source: Press, Smith and Lewis, 2022 (arXiv:2108.12409).
        """
        _check_float("RelativeBias.alibi: slopes", slopes)
        if slopes.ndim != 1:
            table = "RelativeBias(-slopes[..., None] * torch.arange(1 - length, length, device=slopes.device).abs())"
            hint = f"; of slopes (B, H) it is {table}" if slopes.ndim == 2 else ""
            raise ValueError(f"dmattn: RelativeBias.alibi: slopes: expected shape (H,), received {tuple(slopes.shape)}{hint}")
        _check_integer("RelativeBias.alibi: length", length)
        if length < 1:
            raise ValueError(f"dmattn: RelativeBias.alibi: length: expected at least 1, received {length}")
        distance = torch.arange(1 - length, length, device=slopes.device).abs()
        bias = cls(-slopes.to(torch.promote_types(slopes.dtype, torch.float32))[:, None] * distance, length - 1)
        object.__setattr__(bias, "longest", length)
        return bias


def _refuse_sum(name: str, dense: str, other: object) -> NoReturn:
    raise TypeError(f"dmattn: {name}: +: expected tensors, received a {name} beside {kind(other)}; bias.{dense} is a tensor")


def _check_float(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype.itemsize < 2:
        received = f"{value.dtype} tensor" if isinstance(value, Tensor) else f"{kind(value)}{hint_for(name.split()[-1], value)}"
        raise TypeError(f"dmattn: {name}: expected a float16, bfloat16, float32 or float64 tensor, received {received}")


def _check_integer(name: str, value: Any, expected: str = "an integer") -> None:
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"dmattn: {name}: expected {expected}, received {kind(value)}")


def _with_table(tensors: Iterable[Any], context: tuple[int, int | None]) -> RelativeBias:
    """A bias of what stands for its table in a tree: a transformation may have put anything there, so nothing is checked."""
    bias = object.__new__(RelativeBias)
    vars(bias).update(zip(("table", "zero", "longest"), (*tensors, *context), strict=True))
    return bias


register_pytree_node(
    RelativeBias,
    lambda bias: ([bias.table], (bias.zero, bias.longest)),
    _with_table,
    flatten_with_keys_fn=lambda bias: ([(GetAttrKey("table"), bias.table)], (bias.zero, bias.longest)),
    serialized_type_name="dmattn.RelativeBias",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
)
torch.serialization.add_safe_globals([RelativeBias])  # a saved program holds the inputs that it was exported with
