"""Biases that are given by less than a number for each pair."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node

from . import distances
from .arguments import check_flag, kind

__all__ = ["RelativeBias"]


class RelativeBias:
    """A bias that depends on the distance of key and query alone: R numbers a head, whatever the lengths.

    For query i of Sq and key j of Sk::

        bias_ij = table[..., clamp(j - (i + Sk - Sq) + zero, 0, R - 1)]

    The distance j - (i + Sk - Sq) is 0 where ``causal`` ends, aligned bottom-right. Distances beyond the table take its ends, and their
    gradient is added there. Accepted wherever ``bias`` is. Both passes take O(R) memory for it. The gradient of the table is summed in
    float32, in a fixed order, and rounded once to the table's dtype.

    An entry of -inf masks, as a bias's does. NaN or infinity in entries that hidden pairs alone read changes nothing. To PyTorch it is a tree
    of its table, which ``torch.export``, ``torch.compile`` and ``torch.func.vmap`` take as an argument.

    Example::

        bias = RelativeBias.t5(weight, bidirectional=True)
        out = attention(query, key, value, bias=bias, scale=1.0)

    Args:
        table: float of any of the four dtypes, whatever the query's; (R,), (H, R) or (B, H, R), the head axis also Hk, each entry serving its
            group, or 1, the batch axis also 1. Differentiable. In :func:`dmattn.attention_varlen` the batch axis is that of the sequences.
        zero: the index of distance 0, from 0 to R - 1; by default (R - 1) // 2.

    Raises:
        TypeError: ``table`` is no tensor, or no float one, or ``zero`` no integer.
        ValueError: ``table`` is empty or has another number of axes, or ``zero`` lies outside it.
    """

    def __init__(self, table: Tensor, zero: int | None = None) -> None:
        if not isinstance(table, Tensor) or not table.is_floating_point():
            received = f"{table.dtype} tensor" if isinstance(table, Tensor) else kind(table)
            raise TypeError(f"dmattn: RelativeBias: table: expected a float tensor, received {received}")
        if not 1 <= table.ndim <= 3 or table.shape[-1] == 0:
            raise ValueError(f"dmattn: RelativeBias: table: expected shape (R,), (H, R) or (B, H, R), R from 1, received {tuple(table.shape)}")
        length = table.shape[-1]
        if zero is None:
            zero = (length - 1) // 2
        elif isinstance(zero, bool) or not isinstance(zero, (numbers.Integral, torch.SymInt)):
            raise TypeError(f"dmattn: RelativeBias: zero: expected an integer or None, received {kind(zero)}")
        if not 0 <= zero < length:
            raise ValueError(f"dmattn: RelativeBias: zero: expected an index of the table, from 0 to {length - 1}, received {zero}")
        self.table = table
        self.zero = zero if isinstance(zero, (int, torch.SymInt)) else int(zero)
        self.longest: int | None = None  # queries or keys that the table was made for; None for any number

    def __repr__(self) -> str:
        return f"RelativeBias(table of shape {tuple(self.table.shape)} in {self.table.dtype}, zero={self.zero})"

    def dense(self, len_q: int, len_k: int) -> Tensor:
        """The same bias as a tensor of shape (..., len_q, len_k), in the table's dtype and differentiable. O(len_q * len_k) memory."""
        for name, length in (("len_q", len_q), ("len_k", len_k)):
            if isinstance(length, bool) or not isinstance(length, (numbers.Integral, torch.SymInt)):
                raise TypeError(f"dmattn: RelativeBias.dense: {name}: expected an integer, received {kind(length)}")
            if length < 0:
                raise ValueError(f"dmattn: RelativeBias.dense: {name}: expected a non-negative integer, received {length}")
            self.check_length(f"RelativeBias.dense: {name}", length)
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
        2 * max_distance + 1 numbers a head. The gradient of `weight` is that of an embedding.

        Args:
            weight: float, (buckets, H), ``relative_attention_bias.weight``. Differentiable.
            bidirectional: True in encoders, False in decoders.
            max_distance: from here on distances share the last bucket of their direction.

        Raises:
            TypeError, ValueError: an argument of the wrong type or shape, too few buckets for both halves, or a `max_distance` that is not
                larger than the distances with a bucket of their own.

        Source: Raffel et al., 2020 (arXiv:1910.10683).
        """
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            received = f"{weight.dtype} tensor" if isinstance(weight, Tensor) else kind(weight)
            raise TypeError(f"dmattn: RelativeBias.t5: weight: expected a float tensor, received {received}")
        check_flag("bidirectional", bidirectional)
        least = 4 if bidirectional else 2
        if weight.ndim != 2 or weight.shape[0] < least:
            raise ValueError(f"dmattn: RelativeBias.t5: weight: expected shape (buckets from {least}, H), received {tuple(weight.shape)}")
        _check_integer("t5: max_distance", max_distance)
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
        return cls(torch.nn.functional.embedding(bucket, weight).t(), max_distance)

    @classmethod
    def alibi(cls, slopes: Tensor, length: int) -> RelativeBias:
        """ALiBi: ``bias_ij = -slope * |j - (i + Sk - Sq)|``, with slopes that may be learned, for up to `length` queries and keys.

        Args:
            slopes: float, (H,); also (Hk,). Differentiable. The table is in float32 at least, as 16 bits would round long distances.
            length: the largest Sq and Sk served; the table has 2 * length - 1 numbers a head. A longer call raises ValueError.

        Raises:
            TypeError, ValueError: an argument of the wrong type, shape or value.

        Source: Press, Smith and Lewis, 2022 (arXiv:2108.12409).
        """
        if not isinstance(slopes, Tensor) or not slopes.is_floating_point():
            received = f"{slopes.dtype} tensor" if isinstance(slopes, Tensor) else kind(slopes)
            raise TypeError(f"dmattn: RelativeBias.alibi: slopes: expected a float tensor, received {received}")
        if slopes.ndim != 1:
            raise ValueError(f"dmattn: RelativeBias.alibi: slopes: expected shape (H,), received {tuple(slopes.shape)}")
        _check_integer("alibi: length", length)
        if length < 1:
            raise ValueError(f"dmattn: RelativeBias.alibi: length: expected at least 1, received {length}")
        distance = torch.arange(1 - length, length, device=slopes.device).abs()
        bias = cls(-slopes.to(torch.promote_types(slopes.dtype, torch.float32))[:, None] * distance, length - 1)
        bias.longest = length
        return bias


def _check_integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"dmattn: RelativeBias.{name}: expected an integer, received {kind(value)}")


def _with_fields(tensors: Iterable[Any], context: tuple[int, int | None]) -> RelativeBias:
    """A bias of what stands for its table in a tree: a transformation may have put anything there, so nothing is checked."""
    bias = object.__new__(RelativeBias)
    (bias.table,) = tensors
    bias.zero, bias.longest = context
    return bias


register_pytree_node(
    RelativeBias,
    lambda bias: ([bias.table], (bias.zero, bias.longest)),
    _with_fields,
    flatten_with_keys_fn=lambda bias: ([(GetAttrKey("table"), bias.table)], (bias.zero, bias.longest)),
    serialized_type_name="dmattn.RelativeBias",
)
torch.serialization.add_safe_globals([RelativeBias])  # a saved program holds the inputs that it was exported with
