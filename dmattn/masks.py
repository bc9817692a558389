"""Interval masks: for every key one interval of queries that may attend it, or two, O(N) memory instead of N x N."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node

from .arguments import hint_for, kind
from .mask_checks import (
    check_bool,
    check_cumulative,
    check_lengths,
    check_padding,
    check_places,
    check_rows,
    checked_queries,
    checked_sides,
    is_integer,
    refuse_several,
    what,
)
from .own_rows import sequence_of
from .unions import Interval, expect_none, read, runs_of, united, window_bounds

__all__ = ["IntervalMask"]

BOUNDS = ("first", "last", "also_first", "also_last")  # tensors of a mask, the last two in a mask of two intervals a key


@dataclass(frozen=True, eq=False)
class IntervalMask:
    """A mask given by one interval of queries for each key, or by two.

    Query i attends key j iff ``first[..., j] <= i < last[..., j]``; or also, with a second interval, iff
    ``also_first[..., j] <= i < also_last[..., j]``.

    Accepted wherever ``mask`` is, and combined with ``causal`` and ``window`` by intersection. An empty interval (``last <= first``) allows no
    query; where two overlap, a pair counts once. The queries are those of the call, counted from 0: a mask made for Sq queries does not fit a
    call with fewer, as with a cache, and where it knows its Sq such a call is refused.

    ``a & b`` allows the pairs that both masks allow, ``a | b`` those that one of them does. Intervals of a key that overlap or touch become
    one; the mask has a second interval if a key needs it. To see that, ``|`` waits for the device, and so does ``&`` of two masks with two
    intervals; but not while a graph is being made, where the result has two. If a key would need three, they raise ValueError, and where they
    could not see it the graph raises RuntimeError.

    To PyTorch a mask is a tree of its tensors, which ``torch.export``, ``torch.compile`` and ``torch.func.vmap`` take as an argument; its
    `len_q` is a constant there. Exported with a length of queries that varies, it has to be None.

    Args:
        first: int32, at least 1 axis, broadcastable to (..., H, Sk), each axis by itself; the head axis may also be Hk, each entry serving
            its group. The first query that attends the key.
        last: int32, same rule and same device as ``first``. One past the last query that attends the key.
        len_q: Sq, the number of queries that the intervals are about; None fits any. The constructors set it.
        also_first: as ``first``, of a second interval; None where a key has one.
        also_last: as ``last``, of the second interval; None together with ``also_first``.

    Raises:
        TypeError: a bound is not an int32 tensor, one of the second interval is given alone, or `len_q` is no integer.
        ValueError: `len_q` is negative, devices differ, a tensor has no axis, or the shapes do not broadcast together.

    The column-wise representation, with up to two intervals, was made known by FlashMask (Wang et al., 2024, arXiv:2410.01359).
    """

    first: Tensor
    last: Tensor
    len_q: int | None = None
    also_first: Tensor | None = None
    also_last: Tensor | None = None

    def __post_init__(self) -> None:
        if isinstance(self.len_q, Tensor) and self.len_q.ndim > 0:
            hint = "a second interval is also_first=, also_last="
            raise TypeError(f"dmattn: IntervalMask: len_q: expected an integer or None, received Tensor; {hint}")
        if (self.also_first is None) != (self.also_last is None):
            given, missing = ("also_last", "also_first") if self.also_first is None else ("also_first", "also_last")
            raise TypeError(f"dmattn: IntervalMask: {missing}: expected an int32 tensor beside {given}, received NoneType")
        if self.len_q is not None:
            check_lengths("", len_q=self.len_q)
        bounds = _fields(self)
        for name, bound in bounds:
            if not isinstance(bound, Tensor) or bound.dtype != torch.int32:
                raise TypeError(f"dmattn: IntervalMask: {name}: expected an int32 tensor, received {what(bound)}")
            if bound.ndim < 1:
                raise ValueError(f"dmattn: IntervalMask: {name}: expected at least 1 axis (..., H, Sk), received shape {tuple(bound.shape)}")
        for number, (name, bound) in enumerate(bounds[1:], 1):
            if bound.device != self.first.device:
                raise ValueError(f"dmattn: IntervalMask: {name}: expected device {self.first.device} as first has, received {bound.device}")
            try:
                torch.broadcast_tensors(*(x for _, x in bounds[: number + 1]))  # broadcast_shapes would import sympy, which takes seconds
            except RuntimeError:
                expected = f"a shape that broadcasts with first's {tuple(self.first.shape)}"
                raise ValueError(f"dmattn: IntervalMask: {name}: expected {expected}, received {tuple(bound.shape)}") from None

    def __repr__(self) -> str:
        shapes = " and ".join(str(tuple(getattr(first, "shape", ()))) for first, _ in self._intervals)
        return f"IntervalMask(first of shape {shapes}, len_q={self.len_q}, device={getattr(self.first, 'device', None)})"

    def __and__(self, other: IntervalMask) -> IntervalMask:
        """The pairs that both masks allow: intervals intersect key by key."""
        if not isinstance(other, IntervalMask):
            _refuse_operand("&", other)
        len_q = self._len_q_with(other, "&")
        met = [(torch.maximum(a, c), torch.minimum(b, d)) for a, b in self._intervals for c, d in other._intervals]
        return _fewest(united(met, len_q), len_q, "&") if len(met) > 2 else _of_intervals(*met, len_q=len_q)

    def __or__(self, other: IntervalMask) -> IntervalMask:
        """The pairs that one of the masks allows, or both."""
        if not isinstance(other, IntervalMask):
            _refuse_operand("|", other)
        len_q = self._len_q_with(other, "|")
        return _fewest(united([*self._intervals, *other._intervals], len_q), len_q, "|")

    def __invert__(self) -> NoReturn:
        """None: the queries that do not attend a key may be more intervals than two."""
        hint = "~mask.to_dense(Sq) is one, which BlockMask.from_mask prepares"
        raise TypeError(f"dmattn: IntervalMask: ~: expected a bool tensor, received an IntervalMask; {hint}")

    __rand__, __ror__ = __and__, __or__  # of what is no mask of intervals: they raise

    @property
    def _intervals(self) -> tuple[Interval, ...]:
        if self.also_first is None or self.also_last is None:
            return ((self.first, self.last),)
        return (self.first, self.last), (self.also_first, self.also_last)

    @property
    def _shape(self) -> torch.Size:
        return self._spread()[0].shape

    def _spread(self, *others: IntervalMask) -> Sequence[Tensor]:
        """All bounds, and those of others, in the shape that they have together; RuntimeError if there is none."""
        spread: Sequence[Tensor] = torch.broadcast_tensors(*(x for mask in (self, *others) for interval in mask._intervals for x in interval))
        return spread

    def _len_q_with(self, other: IntervalMask, sign: str) -> int | None:
        """That of both masks, which are to be joined."""
        len_q = other.len_q if self.len_q is None else self.len_q
        if other.len_q is not None and other.len_q != len_q:
            received = f"{self.len_q} and {other.len_q}"
            raise ValueError(f"dmattn: IntervalMask: {sign}: expected masks for the same number of queries, received {received}")
        try:
            self._spread(other)
            fit = self.first.device == other.first.device
        except RuntimeError:
            fit = False
        if not fit:
            keys, others = self.first.shape[-1], other.first.shape[-1]
            if keys != others and 1 not in (keys, others):
                raise ValueError(f"dmattn: IntervalMask: {sign}: expected masks of as many keys, received {keys} and {others}")
            received = f"{tuple(self._shape)} and {tuple(other._shape)} on {self.first.device} and {other.first.device}"
            raise ValueError(f"dmattn: IntervalMask: {sign}: expected masks of broadcastable shapes on one device, received {received}")
        return len_q

    def to(self, device: torch.device | str) -> IntervalMask:
        """The same mask on another device."""
        return _of_intervals(*((first.to(device), last.to(device)) for first, last in self._intervals), len_q=self.len_q)

    def to_dense(self, len_q: int | None = None) -> Tensor:
        """The same mask as a bool tensor of shape (..., len_q, Sk), True where query attends key. O(len_q * Sk) memory.

        `len_q` is by default the one that the mask was made for, and is needed where it was made for none.
        """
        len_q = checked_queries(len_q, self.len_q)
        query = torch.arange(len_q, device=self.first.device)[:, None]
        allowed, *also = ((first[..., None, :] <= query) & (query < last[..., None, :]) for first, last in self._intervals)
        return allowed | also[0] if also else allowed

    @classmethod
    def causal(cls, len_q: int, len_k: int, *, device: torch.device | str | None = None) -> IntervalMask:
        """Query i attends key j iff ``j <= i + len_k - len_q`` (bottom-right aligned). Shape (Sk,)."""
        check_lengths("causal", len_q=len_q, len_k=len_k)
        return cls.window(len_q, len_k, left=None, right=0, device=device)

    @classmethod
    def window(cls, len_q: int, len_k: int, *, left: int | None, right: int | None, device: torch.device | str | None = None) -> IntervalMask:
        """Query i attends key j iff ``-left <= j - (i + len_k - len_q) <= right``; None leaves a side unbounded. Shape (Sk,)."""
        check_lengths("window", len_q=len_q, len_k=len_k)
        left, right = checked_sides("window", left, right, len_q + len_k)
        position = torch.arange(len_k, dtype=torch.int32, device=device)
        first, last = window_bounds(position, torch.zeros_like(position), torch.full_like(position, len_q), len_k, left, right)
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
                empty. Other numbers are refused on a CPU, but in compiled code; a GPU is not waited for: they give a mask that means nothing.
                cu_seqlens_k: the same of the keys.
        """
        for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            check_cumulative(f"dmattn: IntervalMask.packed: {name}", ends)
        if cu_seqlens_k.shape != cu_seqlens_q.shape or cu_seqlens_k.device != cu_seqlens_q.device:
            expected, received = (f"shape {tuple(x.shape)} on {x.device}" for x in (cu_seqlens_q, cu_seqlens_k))
            raise ValueError(f"dmattn: IntervalMask.packed: cu_seqlens_k: expected {expected} as cu_seqlens_q has, received {received}")
        check_lengths("packed", len_q=len_q, len_k=len_k)
        left, right = checked_sides("packed", left, right, len_q + len_k)
        check_places("dmattn: IntervalMask.packed: cu_seqlens_q", cu_seqlens_q, len_q)
        check_places("dmattn: IntervalMask.packed: cu_seqlens_k", cu_seqlens_k, len_k)
        ends_q, ends_k = cu_seqlens_q.long(), cu_seqlens_k.long()  # places are compared with them as int64
        sequence, position = sequence_of(ends_k, len_k), torch.arange(len_k, device=ends_k.device)
        first, last = window_bounds(position, ends_q[sequence], ends_q[sequence + 1], ends_k[sequence + 1], left, right)
        return cls(first.clamp(min=0).to(torch.int32), last.clamp(max=len_q).to(torch.int32), len_q)

    @classmethod
    def documents(cls, segment_ids: Tensor, *, prefix: Tensor | None = None) -> IntervalMask:
        """Tokens attend only within their own document; self-attention (Sq = Sk) over packed sequences, told by an id a token.

        With `prefix` a document is a prefix language model: query i of it attends key j of it iff ``j <= i`` or ``prefix[j]``. That is causal
        already: ``causal=True`` besides would hide the prefix's later tokens from its earlier ones.

        Where their cumulative lengths are known, :meth:`packed` also serves other lengths of queries than of keys.

        Args:
            segment_ids: integer, (B, S) or (S,). Tokens of a document must be neighbours: a document is a maximal run of equal ids.
                An id that comes back later starts a new document, which is no error, as nothing waits for the device. To keep such tokens
                together, sort them by ``segment_ids.argsort(dim=-1, stable=True)``, or take a bool mask or a :class:`dmattn.BlockMask`.
                Shape of the mask (B, 1, S) or (S,).
            prefix: bool, the shape and device of `segment_ids`, True for a token that its whole document attends, such as the
                first ones of each document.
        """
        if not is_integer(segment_ids):
            hint = hint_for("segment_ids", segment_ids)
            raise TypeError(f"dmattn: IntervalMask.documents: segment_ids: expected an integer tensor, received {what(segment_ids)}{hint}")
        if segment_ids.ndim not in (1, 2):
            received = tuple(segment_ids.shape)
            raise ValueError(f"dmattn: IntervalMask.documents: segment_ids: expected shape (B, S) or (S,), received {received}")
        if prefix is not None:
            check_bool("documents: prefix", prefix, "a token that its whole document attends")
            if prefix.shape != segment_ids.shape or prefix.device != segment_ids.device:
                expected, given = (f"shape {tuple(x.shape)} on {x.device}" for x in (segment_ids, prefix))
                raise ValueError(f"dmattn: IntervalMask.documents: prefix: expected {expected} as segment_ids has, received {given}")
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
        return _with_head_axis(first if prefix is None else torch.where(prefix, first, position), last, length)

    @classmethod
    def chunked(
        cls, len_q: int, len_k: int, size: int, *, left_padding: Tensor | None = None, device: torch.device | str | None = None
    ) -> IntervalMask:
        """Tokens attend only within their own chunk of `size` places: query i, which stands at place ``i + len_k - len_q``, and key j.

        ``(i + len_k - len_q - padding[b]) // size == (j - padding[b]) // size``, with padding 0 if none is given. With ``causal=True``
        these are the local layers of Llama 4.

        Args:
            size: places of a chunk, 1 or more.
            left_padding: integer, (B,): the place at which the first chunk of each batch row begins; the mask then has shape (B, 1, Sk) and
                lies on its device. Without it the shape is (Sk,).
        """
        check_lengths("chunked", len_q=len_q, len_k=len_k, size=max(size, 0) if isinstance(size, int) else size)
        if size < 1:
            raise ValueError(f"dmattn: IntervalMask.chunked: size: expected a positive integer, received {size}")
        start: Tensor | int = 0
        if left_padding is not None:
            check_rows("chunked", "left_padding", left_padding)
            if device is not None:
                raise ValueError(f"dmattn: IntervalMask.chunked: device: expected None beside left_padding, received {device}")
            start, device = left_padding[:, None].long(), left_padding.device
        size = min(size, 1 << 31)  # more places than there are
        begin = (torch.arange(len_k, device=device) - start) // size * size + start - (len_k - len_q)
        first, last = (bound.clamp(0, len_q).int() for bound in (begin, begin + size))
        return _with_head_axis(first, last, len_q)

    @classmethod
    def global_tokens(cls, is_global: Tensor) -> IntervalMask:
        """All queries attend global keys, and global queries attend all keys; self-attention (Sq = Sk).

        Joined with a window, ``IntervalMask.window(S, S, left=w, right=w) | IntervalMask.global_tokens(is_global)``, these are the two
        intervals a key of Longformer. For other queries to see no later key, ``&`` or ``causal=True``.

        Args:
            is_global: bool, (B | 1, H | 1, S) or (S,), True for a global token; the head axis may also be Hk. The global tokens of a row are
                one run, or none, as one interval says which queries are global. To see that, this waits for the device.

        Raises:
            TypeError, ValueError: another dtype or shape; global tokens in several runs.
        """
        check_bool("global_tokens: is_global", is_global, "a global token")
        if is_global.ndim not in (1, 3):
            hint = "; is_global[:, None] of (B, S)" if is_global.ndim == 2 else ""
            shape = tuple(is_global.shape)
            raise ValueError(f"dmattn: IntervalMask.global_tokens: is_global: expected shape (B, H, S) or (S,), received {shape}{hint}")
        length = is_global.shape[-1]
        starts = torch.ones_like(is_global)
        starts[..., 1:] = ~is_global[..., :-1]
        several = (is_global & starts).sum(-1) > 1
        expected = "one run of global tokens in each row"
        refuse_several(several, f"dmattn: IntervalMask.global_tokens: is_global: expected {expected}, received several runs")
        position = torch.arange(length, dtype=torch.int32, device=is_global.device)
        any_key = torch.full_like(position, length)
        begin, end = torch.where(is_global, position, any_key), torch.where(is_global, position + 1, 0)
        if length:
            begin, end = begin.amin(-1, keepdim=True), end.amax(-1, keepdim=True)
        return cls(begin.masked_fill(is_global, 0).int(), end.masked_fill(is_global, length).int(), length)

    @classmethod
    def from_mask(cls, mask: Tensor) -> IntervalMask:
        """The intervals of a bool mask in which the queries that attend a key are one run, or two, for every key.

        To see that, this waits for the device. For a moment it takes a few times the memory of the mask. Axes that are expanded become 1.

        Args:
            mask: bool, (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk), each of the first two axes full or 1, True where query attends key.

        Raises:
            TypeError, ValueError: another dtype or number of axes; a key that three runs of queries attend.
        """
        check_bool("from_mask: mask", mask, "a query that attends a key")
        if not 2 <= mask.ndim <= 4:
            expected = "(Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk)"
            raise ValueError(f"dmattn: IntervalMask.from_mask: mask: expected shape {expected}, received {tuple(mask.shape)}")
        len_q = mask.shape[-2]
        for axis in range(mask.ndim - 2):
            if mask.stride(axis) == 0:
                mask = mask.narrow(axis, 0, min(1, mask.shape[axis]))
        if len_q == 0:
            empty = mask.new_zeros((*mask.shape[:-2], mask.shape[-1]), dtype=torch.int32)
            return cls(empty, empty, 0)
        return _fewest(runs_of(mask), len_q, "from_mask: mask")

    @classmethod
    def prefix_lm(cls, prefix_lengths: Tensor, len_q: int, len_k: int) -> IntervalMask:
        """Causal, but every query also sees the prefix: key j iff ``j < prefix_lengths[b]`` or ``j <= i + len_k - len_q``.

        Args:
            prefix_lengths: integer, (B,): length of the bidirectional prefix of each batch row. Mask shape (B, 1, Sk).
        """
        check_rows("prefix_lm", "prefix_lengths", prefix_lengths)
        check_lengths("prefix_lm", len_q=len_q, len_k=len_k)
        causal = cls.causal(len_q, len_k, device=prefix_lengths.device)
        inside = torch.arange(len_k, device=prefix_lengths.device) < prefix_lengths.long()[:, None]
        return _with_head_axis(causal.first.expand(inside.shape).masked_fill(inside, 0), causal.last.expand(inside.shape), len_q)

    @classmethod
    def padding(cls, key_padding_mask: Tensor, len_q: int) -> IntervalMask:
        """Every query attends the real keys and none of the padded ones.

        Args:
            key_padding_mask: bool, (B, Sk), True for a real token (Hugging Face's ``attention_mask.bool()``; torch.nn.MultiheadAttention's
                is the opposite: pass its ``~``). Mask (B, 1, Sk), whose B belongs to the query's last leading axis.
        """
        check_padding(key_padding_mask)
        check_lengths("padding", len_q=len_q)
        last = key_padding_mask.to(torch.int32) * len_q
        return _with_head_axis(torch.zeros_like(last), last, len_q)


def _refuse_operand(sign: str, other: object) -> NoReturn:
    hint = f"mask.to_dense(Sq) {sign} a bool tensor is a mask, too, which BlockMask.from_mask prepares"
    raise TypeError(f"dmattn: IntervalMask: {sign}: expected an IntervalMask beside an IntervalMask, received {kind(other)}; {hint}")


def _fields(mask: IntervalMask) -> list[tuple[str, Tensor]]:
    return [(name, getattr(mask, name)) for name in BOUNDS[: 2 if mask.also_first is None else 4]]


def _with_fields(tensors: Iterable[Any], len_q: int | None) -> IntervalMask:
    """A mask of what stands for its tensors in a tree: a transformation may have put anything there, so nothing is checked."""
    mask = object.__new__(IntervalMask)
    vars(mask).update(dict.fromkeys(BOUNDS) | dict(zip(BOUNDS, tensors, strict=False)), len_q=len_q)
    return mask


register_pytree_node(
    IntervalMask,
    lambda mask: ([bound for _, bound in _fields(mask)], mask.len_q),
    _with_fields,
    flatten_with_keys_fn=lambda mask: ([(GetAttrKey(name), bound) for name, bound in _fields(mask)], mask.len_q),
    serialized_type_name="dmattn.IntervalMask",
)
torch.serialization.add_safe_globals([IntervalMask])  # a saved program holds the inputs that it was exported with


def _of_intervals(one: Interval, also: Interval | tuple[None, None] = (None, None), *, len_q: int | None) -> IntervalMask:
    return IntervalMask(*one, len_q, *also)


def _fewest(found: tuple[Interval, Interval, Tensor], len_q: int | None, made_by: str) -> IntervalMask:
    """The mask of what :func:`united` or :func:`runs_of` gives, with one interval a key where that is all."""
    lower, upper, third = found
    seen = read(third, upper[0] < upper[1])
    expected = f"dmattn: IntervalMask: {made_by}: expected at most two intervals of queries a key"
    hint = "a bool mask or a BlockMask has any number"
    if seen is None:
        expect_none(third, f"{expected}, received three; {hint}")
    elif seen[0]:
        *entry, key = third.nonzero()[0].tolist()
        raise ValueError(f"{expected}, received three at key {key}{f' of entry {tuple(entry)}' if entry else ''}; {hint}")
    return _of_intervals(lower, upper, len_q=len_q) if seen is None or seen[1] else _of_intervals(lower, len_q=len_q)


def _with_head_axis(first: Tensor, last: Tensor, len_q: int) -> IntervalMask:
    """(B, Sk) bounds as (B, 1, Sk); (Sk,) bounds as they are."""
    if first.ndim == 2:
        first, last = first[:, None], last[:, None]
    return IntervalMask(first.contiguous(), last.contiguous(), len_q)
