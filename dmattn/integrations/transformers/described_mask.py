"""Transformers' masks as one interval of queries per key: O(B * K) memory where the mask itself takes O(B * Q * K)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import transformers.masking_utils as rules
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers.utils.import_utils import is_cuda_stream_capturing

from ...masks import IntervalMask
from .described import Described

__all__ = ["DescribedMask", "describe", "rules_of"]

MaskFunction = Callable[..., Any]


class DescribedMask(Described):
    """A mask (B, 1, Q, K) of Transformers that owns no (Q, K) memory: bool, True where a query attends a key, or eager's float one.

    The float one is 0 where a query attends a key and the lowest number of its dtype elsewhere.
    :func:`dmattn.integrations.transformers.attend` reads what it stands for (:func:`arguments`).

    Attributes:
        first, last: int32, (K,) or (B, 1, K): query i attends key j iff ``first[..., j] <= i < last[..., j]``. Where `causal_window` says it
            all they are made when somebody asks for them (:class:`_Later`).
        causal_window: (causal, window) of :func:`dmattn.attention` where these two say it all, else None.
    """

    first: Tensor
    last: Tensor
    causal_window: tuple[bool, tuple[int | None, int | None] | None] | None

    @staticmethod
    def __new__(cls, first: Tensor, last: Tensor, shape: tuple[int, int], causal_window: Any, dtype: torch.dtype = torch.bool) -> DescribedMask:
        """Of `shape` (B, Q); K is that of the intervals. `dtype` is bool or a float dtype."""
        batch, len_q = shape
        self = cls._new((batch, 1, len_q, first.shape[-1]), dtype, first.device)
        self.first, self.last, self.causal_window = first, last, causal_window
        return self

    def _made(self) -> Tensor:
        dense = IntervalMask(self.first, self.last, self.shape[2]).to_dense(self.shape[2])
        if self.dtype != torch.bool:
            dense = torch.zeros(dense.shape, dtype=self.dtype, device=dense.device).masked_fill_(~dense, torch.finfo(self.dtype).min)
        return dense.expand(self.shape)

    def _moved(self, device: torch.device, dtype: torch.dtype) -> DescribedMask | None:
        if dtype != self.dtype:
            return None
        return DescribedMask(self.first.to(device), self.last.to(device), (self.shape[0], self.shape[2]), self.causal_window, dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DescribedMask(shape={tuple(self.shape)}, dtype={self.dtype}, causal_window={self.causal_window}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Into what torch.compile hands to a graph: the intervals."""
        if self.edited():
            expected = "a mask that was not written into, nor in inference mode sliced, in a compiled function (mask.clone() is a tensor)"
            raise ValueError(f"dmattn: attention_mask: expected {expected}, received one that was")
        return ["first", "last"], (self.causal_window, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> DescribedMask:
        return DescribedMask(inner["first"], inner["last"], (size[0], size[2]), *context)  # lengths stay out of what a graph is guarded on


class _Later(DescribedMask):
    """One that is `causal_window`, whose intervals are made when somebody asks for them: a dozen operations, at each token of a generation."""

    _make: Callable[[], tuple[Tensor, Tensor]]
    _bounds: tuple[Tensor, Tensor] | None

    @staticmethod
    def __new__(
        cls,
        make: Callable[[], tuple[Tensor, Tensor]],
        size: tuple[int, ...],
        device: torch.device | str,
        causal_window: Any,
        dtype: torch.dtype,
    ) -> _Later:
        """Of `size` (B, 1, Q, K)."""
        self = cls._new(size, dtype, torch.empty(0, device=device).device)  # with its number
        self._make, self._bounds, self.causal_window = make, None, causal_window
        return self

    def _both(self) -> tuple[Tensor, Tensor]:
        if self._bounds is None:
            self._bounds = self._make()
        return self._bounds

    @property
    def first(self) -> Tensor:  # type: ignore[override]
        return self._both()[0]

    @property
    def last(self) -> Tensor:  # type: ignore[override]
        return self._both()[1]


def arguments(mask: DescribedMask) -> tuple[Tensor | IntervalMask | None, bool, tuple[int | None, int | None] | None]:
    """`mask`, `causal` and `window` of :func:`dmattn.attention`; once an operation wrote into the tensor, `mask` is it, bool or float.

    No method: torch.compile would take one for an operation on the tensor.
    """
    if not torch.compiler.is_compiling() and mask.edited():
        return mask.dense(), False, None
    if mask.causal_window is not None:
        return None, *mask.causal_window
    return IntervalMask(mask.first, mask.last, mask.shape[2]), False, None


def rules_of(
    mask_function: MaskFunction, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int | Tensor
) -> tuple[bool, tuple[int | None, int | None] | None] | None:
    """`causal` and `window` of :func:`dmattn.attention` that a mask function is without its documents; None where it is more than that."""
    found = _conditions(mask_function) if _transformers_agrees() else None
    if found is None:
        return None
    found = [rule for rule in found if rule.kind != "packed"]
    ends = (q_offset + q_length, kv_offset + kv_length)
    return _causal_window(found) if not found or (not any(isinstance(end, Tensor) for end in ends) and ends[0] == ends[1]) else None


class _Rule(NamedTuple):
    """One condition of a mask: "causal", "left" (size), "both" (size), "chunks" (size, left padding) or "packed" (sequence of each token).

    Or "blocks" (conditions that are joined by "and", the block of each token or a negative number): these conditions hold, or query and key are
    of one block, as the tokens of an image are.
    """

    kind: str
    values: tuple[Any, ...] = ()


class _Place(NamedTuple):
    """Where the queries and keys of a mask stand in their sequences."""

    batch: int
    len_q: int
    len_k: int
    q_offset: int | Tensor
    kv_offset: int
    device: torch.device | str


def describe(
    mask_function: MaskFunction,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    attention_mask: Tensor | None,
    device: torch.device | str,
    dtype: torch.dtype = torch.bool,
) -> DescribedMask | None:
    """The mask that :func:`transformers.masking_utils.sdpa_mask` makes of the same arguments, or None where that one is to be made.

    With a float `dtype` it is that of :func:`transformers.masking_utils.eager_mask`.

    None for a `mask_function` other than Transformers' causal, sliding, chunked, packed and blockwise ones and what they make together, while
    tracing or compiling, and for a single query with padding or an offset, which is as small as its description.
    """
    found = _conditions(mask_function)
    padding = attention_mask
    if found is None or not _transformers_agrees() or (padding is not None and (padding.dtype != torch.bool or padding.ndim != 2)):
        return None
    return _describe(found, batch_size, q_length, kv_length, q_offset, kv_offset, padding, device, dtype)


def _describe(
    found: list[_Rule],
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    padding: Tensor | None,
    device: torch.device | str,
    dtype: torch.dtype = torch.bool,
) -> DescribedMask | None:
    if padding is not None:
        padding = rules.prepare_padding_mask(padding, kv_length, kv_offset)[:, kv_offset : kv_offset + kv_length]
        if padding.shape[0] != batch_size:
            return None
    fixed = not isinstance(q_offset, Tensor)  # a static cache's is a tensor, whose value would have to be waited for
    aligned = not found or (fixed and q_offset + q_length == kv_offset + kv_length)
    causal_window = _causal_window(found) if aligned else None
    if padding is not None and causal_window is not None:  # worth waiting for a GPU, as Transformers' SDPA integration does
        if not is_cuda_stream_capturing() and bool(padding.all()):
            padding = None
        else:
            causal_window = None
    if q_length == 1 and causal_window is None:
        return None
    place = _Place(batch_size, q_length, kv_length, q_offset, kv_offset, device)
    if causal_window is not None:
        return _Later(partial(_bounds_of_rules, found, place), (batch_size, 1, q_length, kv_length), device, causal_window, dtype)
    bounds = _bounds(found, place)
    if bounds is None:
        return None
    first, last = bounds
    if padding is not None:
        last = torch.where(padding, last, 0)
    first, last = _within(first, last, q_length)
    if max(first.ndim, last.ndim) == 2:
        first, last = (bound.expand(batch_size, kv_length)[:, None] for bound in (first, last))
    return DescribedMask(first, last, (batch_size, q_length), causal_window, dtype)


def _bounds_of_rules(found: list[_Rule], at: _Place) -> tuple[Tensor, Tensor]:
    """The bounds of a mask that is `causal_window`, (K,)."""
    bounds = _bounds(found, at)
    assert bounds is not None, "dmattn: conditions on distances alone are an interval"
    return _within(*bounds, at.len_q)


def _within(first: Tensor, last: Tensor, len_q: int) -> tuple[Tensor, Tensor]:
    return first.clamp(0, len_q).to(torch.int32), last.clamp(0, len_q).to(torch.int32)


def _bounds(found: list[_Rule], at: _Place) -> tuple[Tensor, Tensor] | None:
    """(first, last) of the queries for which all conditions hold, (K,) or (B, K); None where they are no interval."""
    first = torch.zeros(at.len_k, dtype=torch.int64, device=at.device)
    last = first + at.len_q
    own = torch.arange(at.len_k, device=at.device) + (at.kv_offset - at.q_offset)  # of the query at the key's own position
    for rule in found:
        if rule.kind == "causal":
            begin, end = own, last
        elif rule.kind == "left":
            begin, end = first, own + rule.values[0]
        elif rule.kind == "both":
            begin, end = own - rule.values[0], own + rule.values[0] + 1
        elif rule.kind == "chunks":
            size, left_padding = rule.values
            begin = (own + at.q_offset - left_padding[:, None]) // size * size + left_padding[:, None] - at.q_offset
            end = begin + size
        else:
            bounds = _bounds_by_blocks(rule, at) if rule.kind == "blocks" else _bounds_of_documents(rule.values[0], at)
            if bounds is None:
                return None
            begin, end = bounds
        first, last = torch.maximum(first, begin), torch.minimum(last, end)
    return first, last


def _bounds_of_documents(sequences: Tensor, at: _Place) -> tuple[Tensor, Tensor] | None:
    """The same of packed sequences, by the sequence of each token."""
    fixed = not isinstance(at.q_offset, Tensor)
    if not fixed or at.q_offset != 0 or at.kv_offset != 0 or sequences.shape != (at.batch, at.len_q) or at.len_q != at.len_k:
        return None
    documents = IntervalMask.documents(sequences)
    return documents.first[:, 0], documents.last[:, 0]


def _bounds_by_blocks(rule: _Rule, at: _Place) -> tuple[Tensor, Tensor] | None:
    """The same of conditions or blocks: one interval, as both hold between a key and the query at its position. None if a block is in parts."""
    found, blocks = rule.values
    bounds, stop = _bounds(found, at), at.kv_offset + at.len_k
    if bounds is None or type(blocks) is not Tensor or blocks.ndim != 2 or blocks.shape[0] != at.batch or blocks.shape[1] < stop:
        return None
    if is_cuda_stream_capturing():
        return None
    runs = IntervalMask.documents(blocks)
    begins = (runs.first[:, 0] == torch.arange(blocks.shape[1], device=blocks.device)) & (blocks >= 0)
    numbers = torch.where(begins, blocks, -1).sort(-1).values
    if bool(((numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] >= 0)).any()):
        return None
    begin, end = (bound[:, 0, at.kv_offset : stop].long() - at.q_offset for bound in (runs.first, runs.last))
    first, last = bounds
    in_block, nothing = blocks[:, at.kv_offset : stop] >= 0, last <= first
    begin, end = torch.where(nothing, begin, torch.minimum(first, begin)), torch.where(nothing, end, torch.maximum(last, end))
    return torch.where(in_block, begin, first), torch.where(in_block, end, last)


def _causal_window(found: list[_Rule]) -> tuple[bool, tuple[int | None, int | None] | None] | None:
    """`causal` and `window` where these are all there is."""
    if not {rule.kind for rule in found} <= {"causal", "left", "both"}:
        return None
    causal = any(rule.kind == "causal" for rule in found)
    left = min((rule.values[0] - (rule.kind == "left") for rule in found if rule.values), default=None)
    right = min((rule.values[0] for rule in found if rule.kind == "both"), default=None)
    if left is not None and left < 0:
        return None
    return causal, None if left is None else (left, 0 if causal else right)


def _conditions(mask_function: MaskFunction, packed: bool = False) -> list[_Rule] | None:
    """The conditions that a mask function of Transformers joins by "and"; None where it is another function. `packed`: inside a sequence."""
    if mask_function is rules.causal_mask_function:
        return [_Rule("causal")]
    if mask_function is rules.bidirectional_mask_function:
        return []
    made_by, _, inner = getattr(mask_function, "__qualname__", "").partition(".<locals>.")
    if getattr(mask_function, "__module__", None) != rules.__name__ or not inner:
        return None
    cells = dict(zip(mask_function.__code__.co_freevars, (cell.cell_contents for cell in mask_function.__closure__ or ()), strict=True))
    try:
        if made_by == "and_masks":
            parts = cells["mask_functions"]
            packed = packed or any("packed_sequence_mask_function." in part.__qualname__ for part in parts)
            joined = [_conditions(part, packed) for part in parts]
            return None if None in joined else [rule for each in joined for rule in each or ()]
        if made_by == "or_masks":
            first, *others = cells["mask_functions"]
            blocks = _blocks(others[0]) if len(others) == 1 else None
            inside = _conditions(first, packed)
            return None if blocks is None or inside is None else [_Rule("blocks", (inside, blocks))]
        if made_by == "sliding_window_overlay":
            return [_Rule("left", (cells["sliding_window"],))]
        if made_by == "sliding_window_bidirectional_overlay":
            return [_Rule("both", (cells["sliding_window"],))]
        if made_by == "chunked_overlay":
            return [_Rule("chunks", (cells["chunk_size"], cells["left_padding"]))]
        if made_by == "packed_sequence_mask_function":
            return [_Rule("packed", (cells["packed_sequence_mask"],))]
        if made_by == "remap_positions_for_packed_sequence" and packed:
            # Positions rise by one inside a sequence, so distances are what they were. Chunks count from its start, which is another rule.
            inside = _conditions(cells["mask_function"], packed)
            return None if inside is None or any(rule.kind in ("chunks", "blocks") for rule in inside) else inside
    except (AttributeError, KeyError):  # another version's way
        return None
    return None


def _blocks(mask_function: MaskFunction) -> Tensor | None:
    """The block of each token, by which Transformers' blockwise mask goes; None of another function."""
    if mask_function.__module__ != rules.__name__ or not mask_function.__qualname__.startswith("blockwise_overlay.<locals>."):
        return None
    return dict(zip(mask_function.__code__.co_freevars, (cell.cell_contents for cell in mask_function.__closure__ or ()), strict=True))[
        "block_sequence_ids"
    ]


@lru_cache(maxsize=1)
def _transformers_agrees() -> bool:
    """Whether the functions above mean, in the Transformers that is installed, what this module takes them for: tried once, on small masks."""
    with _disable_current_modes(), torch.device("cpu"), torch.no_grad():  # whatever the first call stands in
        wrong = _misunderstood()
    if wrong is not None:
        name = wrong.__qualname__
        warnings.warn(f"dmattn: masks take (Q, K) memory, as this Transformers gives another meaning to {name}", stacklevel=2)
    return wrong is None


def _misunderstood() -> MaskFunction | None:
    """A function of Transformers whose mask is not what is described for it, in either of its forms."""
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]]).bool()
    sequences = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [1] + [2]])
    positions = torch.cat([torch.arange(n) for n in (4, 7, 9, 1, 1)]).view(2, 11)
    window, both = rules.sliding_window_causal_mask_function(3), rules.sliding_window_bidirectional_mask_function(2)
    packed: MaskFunction = rules.and_masks(window, rules.packed_sequence_mask_function(sequences))
    if hasattr(rules, "packed_sequence_compatibility_function"):  # since Transformers 5.18
        packed = rules.packed_sequence_compatibility_function(window, positions, sequences)
    chunks = rules.chunked_causal_mask_function(4, torch.tensor([2, 0]))
    images = torch.tensor([[-1, 0, 0, 0, 0, -1, -1, 1, 1, 1, -1], [0, 0, -1, 1, 2, 2, 2, 2, 2, -1, -1]])
    blocks = rules.or_masks(window, rules.blockwise_overlay(images))
    tries = [(each, 5, 6, keys) for each in (rules.causal_mask_function, window, both, chunks, blocks) for keys in (None, padding)]
    for function, len_q, q_offset, keys in [*tries, (rules.bidirectional_mask_function, 5, 6, padding), (packed, 11, 0, None)]:
        place: dict[str, Any] = dict(batch_size=2, q_length=len_q, kv_length=11, q_offset=q_offset, kv_offset=0, device="cpu")
        found = _conditions(function)
        ours = None if found is None else _describe(found, padding=keys, **place)
        theirs = rules.sdpa_mask(mask_function=function, attention_mask=keys, allow_is_causal_skip=False, **place)
        if ours is not None and not all(torch.equal(dense.expand(theirs.shape), theirs) for dense in (ours.dense(), _as_attended(ours))):
            return function
    return None


def _as_attended(mask: DescribedMask) -> Tensor:
    """The bool mask that :func:`dmattn.attention` makes of the :func:`arguments`."""
    given, causal, window = arguments(mask)
    left, right = window or (None, None)
    len_q, len_k = mask.shape[2:]
    rule = IntervalMask.window(len_q, len_k, left=left, right=0 if causal else right).to_dense(len_q)
    return rule if given is None else rule & (given if isinstance(given, Tensor) else given.to_dense(len_q))
