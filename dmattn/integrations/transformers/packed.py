"""Packed text told by cumulative lengths: the documents that lie one after another in a row, once what the lengths hold is checked."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.utils.import_utils import is_tracing

from ...mask_checks import check_cumulative
from ...masks import IntervalMask

__all__ = ["documents", "join"]

_checked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # lengths whose values were read -> (version, where they end)


def documents(
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
    query: Tensor,
    key: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
) -> IntervalMask:
    """The pairs of one document: query i and key j with ``cu_seq_lens_q[d] <= i < cu_seq_lens_q[d + 1]``, and so for j, with the same d.

    Args:
        cu_seq_lens_q: integer, (documents + 1,): where documents begin among the queries, from 0, and last the number of queries. A document
            may be empty. cu_seq_lens_k: the same of the keys.
        query, key: (1, H, Q, D) and (1, Hk, K, D), of which the lengths are read.
        causal, window: of :func:`dmattn.attention`, inside each document, aligned with its last query and key as in FlashAttention; a window
            looks back alone.

    Returns:
        A mask with intervals of shape (K,): O(Q + K) memory.

    Raises:
        ValueError: one of the two is missing, the batch is larger than 1, or the lengths are not as above. Their numbers are read once for
            a tensor, for which a GPU is waited for, and again when PyTorch has seen it change (through NumPy or ``.data`` it does not);
            while tracing it is asserted where the graph runs, without a ValueError.
        TypeError: one of them is not an integer tensor.
    """
    ends = []
    for name, lengths, states in (("cu_seq_lens_q", cu_seq_lens_q, query), ("cu_seq_lens_k", cu_seq_lens_k, key)):
        ends.append(_checked_lengths(name, lengths, states))
    ends_q, ends_k = ends
    if ends_q.shape != ends_k.shape:
        expected = f"as many documents as cu_seq_lens_q has, {len(ends_q) - 1}"
        raise ValueError(f"dmattn: cu_seq_lens_k: expected {expected}, received {len(ends_k) - 1}")
    left, right = (None if window is None else window[0], 0) if causal else (None, None)
    return IntervalMask.packed(ends_q, ends_k, query.shape[2], key.shape[2], left=left, right=right)


def join(mask: Tensor | IntervalMask | None, packed: IntervalMask, query: Tensor, key: Tensor) -> Tensor | IntervalMask:
    """The pairs that both allow; a bool tensor stays one."""
    if mask is None:
        return packed
    if isinstance(mask, IntervalMask):
        return mask & packed
    if not all(size in (1, length) for size, length in zip(mask.shape[2:], (query.shape[2], key.shape[2]), strict=True)):
        return mask  # attention() says what is wrong with it
    return mask & packed.to_dense(query.shape[2])


def _checked_lengths(name: str, lengths: Tensor | None, states: Tensor) -> Tensor:
    """`lengths` on the device of `states`, (1, H, S, D), whose sequence they divide."""
    batch, _, end, _ = states.shape
    if lengths is None:
        raise ValueError(f"dmattn: {name}: expected the lengths of both queries and keys, or of neither, received None")
    check_cumulative(f"dmattn: {name}", lengths, of="documents")
    if batch != 1:
        raise ValueError(f"dmattn: {name}: expected a batch of 1, in whose row all documents lie, received a batch of {batch}")
    lengths, given = lengths.long(), lengths  # unsigned differences would wrap
    traced = is_tracing(given)
    read = None if traced or given.is_inference() else (given._version, end)
    if read is None or _checked.get(given) != read:
        right = (lengths[0] == 0) & (lengths[-1] == end) & (lengths.diff() >= 0).all()
        expected = f"places that rise from 0 to the {end} tokens of the sequence"
        if traced:
            torch._assert_async(right, f"dmattn: {name}: expected {expected}")
        elif not right:
            raise ValueError(f"dmattn: {name}: expected {expected}, received {_shown(lengths.tolist())}")
        if read is not None:
            _checked[given] = read
    return lengths.to(states.device)


def _shown(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-2]}, {values[-1]}]"
