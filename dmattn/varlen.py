"""Attention over packed sequences of any lengths: one after another in a tensor without padding, told by where each begins."""

from __future__ import annotations

import numbers
from itertools import pairwise
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from . import advice
from .arguments import check_flag, kind, refuse_arguments
from .biases import FactoredBias, RelativeBias
from .checks import HEADS_FIRST, Window, check_tensor
from .execution.eager import call
from .execution.watching import nothing_watches
from .factors import joined
from .mask_checks import check_cumulative, check_places
from .problem import Problem

__all__ = ["attention_varlen"]
_REQUIRED: Any = None  # Python's own error for a missing argument would hide ours for the keyword that was passed in its place


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    mask: Tensor | None = ...,
    bias: Tensor | FactoredBias | RelativeBias | None = ...,
    causal: bool = ...,
    window: Window = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout_p: float = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    mask: Tensor | None = ...,
    bias: Tensor | FactoredBias | RelativeBias | None = ...,
    causal: bool = ...,
    window: Window = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout_p: float = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    mask: Tensor | None = ...,
    bias: Tensor | FactoredBias | RelativeBias | None = ...,
    causal: bool = ...,
    window: Window = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout_p: float = ...,
    sinks: Tensor | None = ...,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor = _REQUIRED,
    cu_seqlens_k: Tensor = _REQUIRED,
    *more: NoReturn,
    max_seqlen_q: int = _REQUIRED,
    max_seqlen_k: int = _REQUIRED,
    mask: Tensor | None = None,
    bias: Tensor | FactoredBias | RelativeBias | None = None,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Exact attention, with a mask and a differentiable additive bias, inside each of several packed sequences.

    For sequence n, with q = ``cu_seqlens_q[n] : cu_seqlens_q[n + 1]``, k = ``cu_seqlens_k[n] : cu_seqlens_k[n + 1]`` and their lengths
    Sq and Sk, :func:`dmattn.attention` of its slice::

        out[q] = attention(query[q], key[k], value[k], mask=mask[n, :, :Sq, :Sk], bias=bias[n, :, :Sq, :Sk], causal, window, ...)

    Sequences may have no queries or no keys; a query of one without keys gives 0 and lse = -inf, or its head's sink. Nothing waits for the
    device: a CUDA graph, or one of ``torch.compile``, serves other lengths in `cu_seqlens_q` and `cu_seqlens_k` as well. Float64 tensors on a
    GPU and derivatives past the first are exceptions: PyTorch's formula goes from one sequence to the next.

    Args:
        query: (total_q, H, D), float16, bfloat16, float32 or float64, on a CPU or a CUDA device, any strides. Differentiable.
        key: (total_k, Hk, D), the query's dtype and device; Hk divides H. Differentiable. value: (total_k, Hk, Dv), likewise.
        cu_seqlens_q: integer, (sequences + 1,), on the query's device: where the sequences begin among the queries, rising from 0 to total_q.
        cu_seqlens_k: integer, (sequences + 1,): the same of the keys, from 0 to total_k.
        max_seqlen_q: a number of queries that no sequence exceeds, known to the caller. max_seqlen_k: the same of the keys.
        mask: bool, broadcastable to (sequences, H, max_seqlen_q, max_seqlen_k), the head axis also Hk, in the coordinates of each sequence:
            its first query and key are at 0, and what is beyond its lengths is not read into the result. True attends. No gradient.
            An :class:`IntervalMask` of the packed tokens goes to :func:`dmattn.attention`, as ``mask & IntervalMask.packed(...)``.
        bias: float of any of the four dtypes, broadcastable likewise, added to the score; -inf masks. Differentiable: the gradient has the
            bias's own shape and dtype, is 0 beyond the lengths of each sequence, and is summed in float32 and rounded once.
            Or a :class:`FactoredBias` of packed factors, which lie where the tokens do: ``rows`` (total_q, H or Hk or 1, R) or (total_q, R),
            ``cols`` (total_k, Hk or 1, R) or (total_k, R).
            Or a :class:`dmattn.RelativeBias`, whose table may have a first axis of sequences, and whose distances are aligned with each
            sequence's own last query and key.
        causal, window: as in :func:`dmattn.attention`, inside each sequence: aligned with its own last query and key.
        scale, softcap: as in :func:`dmattn.attention`.
        sinks: as there, (H,): the same for all sequences.
        dropout_p: as there, where sequences are as batch entries: which weights are dropped follows from a sequence's number.
        return_lse: return (out, lse); lse is differentiable.

    No tensor is padded: query, key, value, out and their gradients stay as they lie. Each sequence has tiles of its own, and tiles of others
    are not visited. Programs are launched for as many blocks as so many tokens can have, however uneven the lengths are. A mask takes lists of
    its blocks besides, for each sequence. In the backward pass the sums of a bias by key, those of pairs beyond a table's ends, and what the
    gradient of a bias by query is summed from are laid out as (sequences, heads, max_seqlen). On Hopper, infinity or NaN in the values, or in
    the incoming gradients, of a sequence's first tokens may spread to the sequence before it.

    What `cu_seqlens_q` and `cu_seqlens_k` hold on a GPU cannot be checked without waiting: where they do not rise from 0 to the total, or a
    sequence is longer than `max_seqlen_q` or `max_seqlen_k` says, the results mean nothing, but no memory is touched that is not the arguments'
    own. On a CPU that raises, but in compiled code.

    Head dims, autocast, determinism and derivatives are as in :func:`dmattn.attention`.

    Returns:
        out: (total_q, H, Dv) in the query's dtype, contiguous.
        lse: (H, total_q), natural logarithm, float32 (float64 for float64 inputs); only with ``return_lse``.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, dtype, device or value, or more queries or keys than `sequences` of the
            longest length can hold; the message names it, what was expected and what was received. Raised before anything runs.
        RuntimeError: as :func:`dmattn.attention`.

    Source: the interface of FlashAttention's ``flash_attn_varlen_func`` (Dao, 2023, arXiv:2307.08691), with mask and bias besides.
    """
    if more or unknown:
        refuse_arguments(attention_varlen, more, unknown)
    check_flag("return_lse", return_lse)
    if advice.asked and not torch.compiler.is_compiling():
        advice.look_at_direction(bias, causal)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        if tensor.ndim != 3:
            hint = "; a batch of padded rows is for dmattn.attention" if tensor.ndim == 4 else ""
            raise ValueError(f"dmattn: {name}: expected 3 axes (total, heads, head dim), received shape {tuple(tensor.shape)}{hint}")
    _check_lengths(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    max_seqlen_q, max_seqlen_k = (x if isinstance(x, (int, torch.SymInt)) else int(x) for x in (max_seqlen_q, max_seqlen_k))
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    if isinstance(bias, FactoredBias):
        query, key, scale = joined(query, key, value, bias, scale, softcap, is_packed=True)
        bias = None
    problem = Problem.canonical(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        dropout_p=dropout_p,
        sinks=sinks,
        packed=(cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k),
    )
    ends_q = cu_seqlens_q.long().contiguous()
    ends_k = ends_q if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k.long().contiguous()
    out, lse = call(problem._replace(ends_q=ends_q, ends_k=ends_k, longest_q=max_seqlen_q, longest_k=max_seqlen_k))
    out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)  # the gradient of an index is a copy
    return (out, lse) if return_lse else out


def _check_lengths(
    query: Tensor, key: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> None:  # fmt: skip
    for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_cumulative(f"dmattn: {name}", ends)
        check_tensor(name, ends)
        if ends.device != query.device:
            raise ValueError(f"dmattn: {name}: expected query's device {query.device}, received {ends.device}")
    is_read = _is_read(query, cu_seqlens_q, cu_seqlens_k)
    if is_read:  # first, as lengths in their place would be blamed on what follows
        for name, ends, tokens in (("cu_seqlens_q", cu_seqlens_q, query), ("cu_seqlens_k", cu_seqlens_k, key)):
            total, heads, _ = tokens.shape
            check_places(f"dmattn: {name}", ends, total, HEADS_FIRST if ends[-1] == heads != total else "")
    sequences = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k.shape[0] - 1 != sequences:
        raise ValueError(
            f"dmattn: cu_seqlens_k: expected as many sequences as cu_seqlens_q has, {sequences}, received {cu_seqlens_k.shape[0] - 1}"
        )
    for name, longest, total in (("max_seqlen_q", max_seqlen_q, query.shape[0]), ("max_seqlen_k", max_seqlen_k, key.shape[0])):
        where = name.replace("max_seqlen", "cu_seqlens")
        if isinstance(longest, bool) or not isinstance(longest, (numbers.Integral, torch.SymInt)):
            one = f"{where}.diff().max()" if longest is None else name if isinstance(longest, Tensor) and longest.numel() == 1 else None
            hint = f"; {one}.item() is one, and waits for the device" if one else ""
            raise TypeError(f"dmattn: {name}: expected an integer, received {kind(longest)}{hint}")
        if longest < 0:
            raise ValueError(f"dmattn: {name}: expected a non-negative integer, received {longest}")
        if sequences * longest < total:
            least = -(-total // sequences) if sequences else 0
            if is_read:
                least = _longest(cu_seqlens_q if name == "max_seqlen_q" else cu_seqlens_k)
            expected = f"{least} or more for {total} tokens in {sequences} sequences"
            raise ValueError(
                f"dmattn: {name}: expected {expected} ({where} has where each begins, from 0 on, and the total), received {longest}"
            )
    for name, longest, ends in (("max_seqlen_q", max_seqlen_q, cu_seqlens_q), ("max_seqlen_k", max_seqlen_k, cu_seqlens_k)):
        length = _longest(ends) if is_read else 0
        if length > longest:
            raise ValueError(f"dmattn: {name}: expected at least the longest sequence's {length} tokens, received {longest}")


def _longest(ends: Tensor) -> int:
    """The tokens of the longest sequence."""
    return max((end - begin for begin, end in pairwise(ends.tolist())), default=0)


def _is_read(query: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> bool:
    """Whether places are looked at: on a CPU, where nobody traces or maps them."""
    return query.is_cpu and nothing_watches((query, cu_seqlens_q, cu_seqlens_k))
