"""Interval masks: for every key one interval of queries that may attend it, O(N) memory instead of N x N."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node

from .arguments import kind

__all__ = ["IntervalMask"]


@dataclass(frozen=True, eq=False)
class IntervalMask:
    """A mask given by one query interval per key: query i attends key j iff ``first[..., j] <= i < last[..., j]``.

    Accepted wherever ``mask`` is, and combined with ``causal`` and ``window`` by intersection. An empty interval
    (``last <= first``) hides the key from every query. Two masks intersect with ``&``. The queries are those of the call, counted from 0:
    a mask made for Sq queries does not fit a call with fewer, as with a cache, and where it knows its Sq such a call is refused.

    To PyTorch a mask is a tree of its two tensors, which ``torch.export``, ``torch.compile`` and ``torch.func.vmap`` take as an argument; its
    `len_q` is a constant there. Exported with a length of queries that varies, it has to be None.

    Args:
        first: int32, at least 1 axis, broadcastable to (..., H, Sk), each axis by itself; the head axis may also be Hk, each entry serving
            its group. The first query that attends the key.
        last: int32, same rule and same device as ``first``. One past the last query that attends the key.
        len_q: Sq, the number of queries that the intervals are about; None fits any. The constructors set it.

    Raises:
        TypeError: ``first`` or ``last`` is not an int32 tensor.
        ValueError: devices differ, a tensor has no axis, or the shapes do not broadcast together.

    The column-wise representation was made known by FlashMask (Wang et al., 2024, arXiv:2410.01359).
    """

    first: Tensor
    last: Tensor
    len_q: int | None = None

    def __post_init__(self) -> None:
        for name, bound in (("first", self.first), ("last", self.last)):
            if not isinstance(bound, Tensor) or bound.dtype != torch.int32:
                raise TypeError(f"IntervalMask: {name}: expected an int32 tensor, received {_what(bound)}")
            if bound.ndim < 1:
                raise ValueError(f"IntervalMask: {name}: expected at least 1 axis (..., H, Sk), received shape {tuple(bound.shape)}")
        if self.first.device != self.last.device:
            raise ValueError(f"IntervalMask: last: expected device {self.first.device} as first has, received {self.last.device}")
        try:
            torch.broadcast_shapes(self.first.shape, self.last.shape)
        except RuntimeError:
            expected = f"a shape that broadcasts with first's {tuple(self.first.shape)}"
            raise ValueError(f"IntervalMask: last: expected {expected}, received {tuple(self.last.shape)}") from None

    def __and__(self, other: IntervalMask) -> IntervalMask:
        """The pairs that both masks allow: intervals intersect key by key."""
        if not isinstance(other, IntervalMask):
            return NotImplemented
        len_q = other.len_q if self.len_q is None else self.len_q
        if other.len_q is not None and other.len_q != len_q:
            raise ValueError(f"IntervalMask: &: expected masks for the same number of queries, received {self.len_q} and {other.len_q}")
        try:
            return IntervalMask(torch.maximum(self.first, other.first), torch.minimum(self.last, other.last), len_q)
        except RuntimeError as error:
            shapes = f"{tuple(self.first.shape)} and {tuple(other.first.shape)} on {self.first.device} and {other.first.device}"
            raise ValueError(f"IntervalMask: &: expected masks of broadcastable shapes on one device, received {shapes}") from error

    def to(self, device: torch.device | str) -> IntervalMask:
        """The same mask on another device."""
        return IntervalMask(self.first.to(device), self.last.to(device), self.len_q)

    def to_dense(self, len_q: int) -> Tensor:
        """The same mask as a bool tensor of shape (..., len_q, Sk), True where query attends key. O(len_q * Sk) memory."""
        if self.len_q is not None and len_q != self.len_q:
            raise ValueError(f"IntervalMask.to_dense: len_q: expected {self.len_q}, for which the mask was made, received {len_q}")
        query = torch.arange(len_q, device=self.first.device)[:, None]
        return (self.first[..., None, :] <= query) & (query < self.last[..., None, :])

    @classmethod
    def causal(cls, len_q: int, len_k: int, *, device: torch.device | str | None = None) -> IntervalMask:
        """Query i attends key j iff ``j <= i + len_k - len_q`` (bottom-right aligned). Shape (Sk,)."""
        _check_lengths("causal", len_q=len_q, len_k=len_k)
        return cls.window(len_q, len_k, left=None, right=0, device=device)

    @classmethod
    def window(cls, len_q: int, len_k: int, *, left: int | None, right: int | None, device: torch.device | str | None = None) -> IntervalMask:
        """Query i attends key j iff ``-left <= j - (i + len_k - len_q) <= right``; None leaves a side unbounded. Shape (Sk,)."""
        _check_lengths("window", len_q=len_q, len_k=len_k)
        left, right = _checked_sides("window", left, right, len_q + len_k)
        position = torch.arange(len_k, dtype=torch.int32, device=device)
        first, last = _bounds(position, torch.zeros_like(position), torch.full_like(position, len_q), len_k, left, right)
        return cls(first, last, len_q)

    @classmethod
    def packed(
        cls, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, len_q: int, len_k: int, *, left: int | None = None, right: int | None = None
    ) -> IntervalMask:
        """Sequences that lie one after another attend within themselves, each by the rule of :meth:`window`. Shape (Sk,).

        Query i and key j of sequence n, which has queries ``cu_seqlens_q[n] <= i < cu_seqlens_q[n + 1]`` and keys likewise: i attends j iff
        ``-left <= (j - cu_seqlens_k[n + 1]) - (i - cu_seqlens_q[n + 1]) <= right``; None leaves a side unbounded. Nothing waits for the device.

        Args:
            cu_seqlens_q: integer, (sequences + 1,): where sequences begin among the queries, from 0, and last `len_q`. A sequence may be
                empty. What it holds is not checked: other numbers give a mask that means nothing. cu_seqlens_k: the same of the keys.
        """
        for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            check_cumulative(f"IntervalMask.packed: {name}", ends)
        if cu_seqlens_k.shape != cu_seqlens_q.shape or cu_seqlens_k.device != cu_seqlens_q.device:
            expected, received = (f"shape {tuple(x.shape)} on {x.device}" for x in (cu_seqlens_q, cu_seqlens_k))
            raise ValueError(f"IntervalMask.packed: cu_seqlens_k: expected {expected} as cu_seqlens_q has, received {received}")
        _check_lengths("packed", len_q=len_q, len_k=len_k)
        left, right = _checked_sides("packed", left, right, len_q + len_k)
        ends_q, ends_k = cu_seqlens_q.long(), cu_seqlens_k.long()  # places are compared with them as int64
        sequence, position = sequence_of(ends_k, len_k), torch.arange(len_k, device=ends_k.device)
        first, last = _bounds(position, ends_q[sequence], ends_q[sequence + 1], ends_k[sequence + 1], left, right)
        return cls(first.clamp(min=0).to(torch.int32), last.clamp(max=len_q).to(torch.int32), len_q)

    @classmethod
    def documents(cls, segment_ids: Tensor) -> IntervalMask:
        """Tokens attend only within their own document; self-attention (Sq = Sk) over packed sequences, told by an id a token.

        Where their cumulative lengths are known, :meth:`packed` also serves other lengths of queries than of keys.

        Args:
            segment_ids: integer, (B, S) or (S,). A document is a maximal run of equal ids, so an id that comes back
                later starts a new document. Shape of the mask (B, 1, S) or (S,).
        """
        if not _is_integer(segment_ids):
            raise TypeError(f"IntervalMask.documents: segment_ids: expected an integer tensor, received {_what(segment_ids)}")
        if segment_ids.ndim not in (1, 2):
            received = tuple(segment_ids.shape)
            raise ValueError(f"IntervalMask.documents: segment_ids: expected shape (B, S) or (S,), received {received}")
        length = segment_ids.shape[-1]
        position = torch.arange(length, dtype=torch.int32, device=segment_ids.device).expand(segment_ids.shape)
        starts = torch.ones_like(segment_ids, dtype=torch.bool)
        starts[..., 1:] = segment_ids[..., 1:] != segment_ids[..., :-1]
        if length == 0:
            return _with_head_axis(position, position, 0)
        first = position.masked_fill(~starts, 0).cummax(-1).values
        ends = torch.ones_like(starts)
        ends[..., :-1] = starts[..., 1:]
        last = (position + 1).masked_fill(~ends, length).flip(-1).cummin(-1).values.flip(-1)
        return _with_head_axis(first, last, length)

    @classmethod
    def prefix_lm(cls, prefix_lengths: Tensor, len_q: int, len_k: int) -> IntervalMask:
        """Causal, but every query also sees the prefix: key j iff ``j < prefix_lengths[b]`` or ``j <= i + len_k - len_q``.

        Args:
            prefix_lengths: integer, (B,): length of the bidirectional prefix of each batch row. Mask shape (B, 1, Sk).
        """
        if not _is_integer(prefix_lengths):
            raise TypeError(f"IntervalMask.prefix_lm: prefix_lengths: expected an integer tensor, received {_what(prefix_lengths)}")
        if prefix_lengths.ndim != 1:
            received = tuple(prefix_lengths.shape)
            raise ValueError(f"IntervalMask.prefix_lm: prefix_lengths: expected shape (B,), received {received}")
        _check_lengths("prefix_lm", len_q=len_q, len_k=len_k)
        causal = cls.causal(len_q, len_k, device=prefix_lengths.device)
        inside = torch.arange(len_k, device=prefix_lengths.device) < prefix_lengths[:, None]
        return _with_head_axis(causal.first.expand(inside.shape).masked_fill(inside, 0), causal.last.expand(inside.shape), len_q)

    @classmethod
    def padding(cls, key_padding_mask: Tensor, len_q: int) -> IntervalMask:
        """Every query attends the real keys and none of the padded ones.

        Args:
            key_padding_mask: bool, (B, Sk), True for a real token (Hugging Face's ``attention_mask.bool()``). Mask (B, 1, Sk).
        """
        if not isinstance(key_padding_mask, Tensor) or key_padding_mask.dtype != torch.bool:
            hint = "; key_padding_mask.bool() if nonzero means real" if isinstance(key_padding_mask, Tensor) else ""
            raise TypeError(f"IntervalMask.padding: key_padding_mask: expected a bool tensor, received {_what(key_padding_mask)}{hint}")
        if key_padding_mask.ndim != 2:
            received = tuple(key_padding_mask.shape)
            raise ValueError(f"IntervalMask.padding: key_padding_mask: expected shape (B, Sk), received {received}")
        _check_lengths("padding", len_q=len_q)
        last = key_padding_mask.to(torch.int32) * len_q
        return _with_head_axis(torch.zeros_like(last), last, len_q)


def _with_fields(tensors: Iterable[Any], len_q: int | None) -> IntervalMask:
    """A mask of what stands for its tensors in a tree: a transformation may have put anything there, so nothing is checked."""
    mask = object.__new__(IntervalMask)
    vars(mask).update(zip(("first", "last"), tensors, strict=True), len_q=len_q)
    return mask


register_pytree_node(
    IntervalMask,
    lambda mask: ([mask.first, mask.last], mask.len_q),
    _with_fields,
    flatten_with_keys_fn=lambda mask: ([(GetAttrKey("first"), mask.first), (GetAttrKey("last"), mask.last)], mask.len_q),
    serialized_type_name="dmattn.IntervalMask",
)
torch.serialization.add_safe_globals([IntervalMask])  # a saved program holds the inputs that it was exported with


def sequence_of(ends: Tensor, length: int) -> Tensor:
    """The number of the sequence in which each of `length` packed places lies, from their cumulative lengths (sequences + 1,), int64.

    Never one that does not exist, whatever `ends` holds.
    """
    place = torch.arange(length, device=ends.device)
    return (torch.searchsorted(ends.contiguous(), place, right=True) - 1).clamp(0, ends.shape[0] - 2)


def check_cumulative(name: str, lengths: object, of: str = "sequences") -> None:
    """Raise unless `lengths` is an integer tensor (sequences + 1,) of one sequence at least; `of` is what messages call them."""
    if not _is_integer(lengths):
        raise TypeError(f"{name}: expected an integer tensor, received {_what(lengths)}")
    if lengths.ndim != 1 or lengths.shape[0] < 2:
        raise ValueError(f"{name}: expected shape ({of} + 1,), received {tuple(lengths.shape)}")


def _is_integer(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool


def _bounds(
    position: Tensor, begin_q: Tensor, end_q: Tensor, end_k: Tensor | int, left: int | None, right: int | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(first, last) of keys at `position`, for queries from `begin_q` to `end_q`; the last of these stands at the last key, before `end_k`."""
    own = end_q - (end_k - position)  # the query as far from the end as the key
    first = begin_q if right is None else torch.maximum(begin_q, own - right)
    last = end_q if left is None else torch.minimum(end_q, own + left + 1)
    return first, last


def _checked_sides(constructor: str, left: int | None, right: int | None, unbounded: int) -> tuple[int | None, int | None]:
    """Both sides of a window, None from `unbounded` on, where they hide nothing: integers of the device have an end."""
    for name, size in (("left", left), ("right", right)):
        if size is not None and (not isinstance(size, numbers.Integral) or isinstance(size, bool)):
            raise TypeError(f"IntervalMask.{constructor}: {name}: expected a non-negative integer or None, received {kind(size)}")
        if size is not None and size < 0:
            raise ValueError(f"IntervalMask.{constructor}: {name}: expected a non-negative integer, or None for off, received {size}")
    return (None if left is None or left >= unbounded else left), (None if right is None or right >= unbounded else right)


def _check_lengths(constructor: str, **lengths: int) -> None:
    for name, length in lengths.items():
        if isinstance(length, bool) or not isinstance(length, (numbers.Integral, torch.SymInt)):
            raise TypeError(f"IntervalMask.{constructor}: {name}: expected an integer, received {kind(length)}")
        if length < 0:
            raise ValueError(f"IntervalMask.{constructor}: {name}: expected a non-negative integer, received {length}")


def _with_head_axis(first: Tensor, last: Tensor, len_q: int) -> IntervalMask:
    """(B, Sk) bounds as (B, 1, Sk); (Sk,) bounds as they are."""
    if first.ndim == 2:
        first, last = first[:, None], last[:, None]
    return IntervalMask(first.contiguous(), last.contiguous(), len_q)


def _what(value: object) -> str:
    return f"{value.dtype} tensor" if isinstance(value, Tensor) else kind(value)
