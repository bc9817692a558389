"""Attention over packed sequences of any lengths: one after another in a tensor without padding, told by where each begins."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, NoReturn, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .arguments import check_flag, kind, refuse_keywords
from .biases import FactoredBias, RelativeBias
from .broadcast import per_query_head
from .execution import passes
from .execution.eager import call
from .execution.mapped import refuse_batches
from .execution.passes import LEARNED
from .execution.watching import nothing_watches
from .factors import joined
from .masks import IntervalMask, check_cumulative, sequence_of
from .problem import Problem, Window, check_tensor

__all__ = ["attention_varlen"]


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
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
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
    device: a CUDA graph, or one of ``torch.compile``, serves other lengths in `cu_seqlens_q` and `cu_seqlens_k` as well. On a GPU
    ``torch.compile`` leaves out of its graphs what a mask of pairs, or a mask by query with a bias by key, has computed (with
    ``fullgraph=True`` it raises).

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
            ``cols`` (total_k, Hk or 1, R) or (total_k, R). It takes no padded copies.
            Or a :class:`dmattn.RelativeBias`, whose table may have a first axis of sequences, and whose distances are aligned with each
            sequence's own last query and key.
        causal, window: as in :func:`dmattn.attention`, inside each sequence: aligned with its own last query and key.
        scale, softcap: as in :func:`dmattn.attention`.
        sinks: as there, (H,): the same for all sequences.
        dropout_p: as there; which weights are dropped depends on how the sequences are packed.
        return_lse: return (out, lse); lse is differentiable.

    Without mask and bias, or where each of them is the same for all queries (axis -2 is 1) or for all keys (axis -1 is 1) of a sequence, this
    takes memory of O(total_q + total_k), and tiles of other sequences are not visited; only the gradient of a bias is laid out as (sequences,
    heads, max_seqlen) first. A mask or bias of pairs, and a mask by query with a bias by key, take padded copies of query, key and
    value: memory of sequences * max_seqlen in each pass, as a bias of each sequence does itself, but nothing padded is kept from the forward
    pass to the backward pass. A mask of pairs or by query is there combined with the lengths into one of (sequences, heads, max_seqlen_q,
    max_seqlen_k).

    A :class:`dmattn.RelativeBias` takes no copies where one tensor is given as both `cu_seqlens_q` and `cu_seqlens_k`. With two tensors query,
    key and value are copied to total_q + total_k places, on which distances are those of each sequence; and to padded ones where the table
    has an axis of sequences, or beside a mask of pairs or by query.

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
    if unknown:
        refuse_keywords(attention_varlen, unknown)
    check_flag("return_lse", return_lse)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        if tensor.ndim != 3:
            raise ValueError(f"dmattn: {name}: expected 3 axes (total, heads, head dim), received shape {tuple(tensor.shape)}")
    _check_lengths(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
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
    lengths = _Lengths(cu_seqlens_q.long(), cu_seqlens_k.long(), max_seqlen_q, max_seqlen_k, cu_seqlens_q is cu_seqlens_k)
    out, lse = _attend(problem, lengths)
    return (out, lse) if return_lse else out


class _Lengths(NamedTuple):
    """Where sequences end among the queries and the keys, the longest of each, and whether both are known to be the same."""

    ends_q: Tensor
    ends_k: Tensor
    longest_q: int
    longest_k: int
    alike: bool


class _Places(NamedTuple):
    """Of packed rows: the sequence of each and its position there, both (total,), and the sizes of (sequences, longest), which they index."""

    sequence: Tensor
    position: Tensor
    sequences: int
    longest: int

    @classmethod
    def of(cls, ends: Tensor, total: int, longest: int, last: bool = False) -> _Places:
        """From cumulative lengths, padding after the tokens or before them (`last`); inside (sequences, longest), whatever they hold."""
        sequence = sequence_of(ends, total)
        begins = ends[sequence + 1] - longest if last else ends[sequence]
        position = torch.arange(total, device=ends.device) - begins
        return cls(sequence, position.clamp(0, longest - 1), ends.shape[0] - 1, longest)

    @classmethod
    def in_one(cls, ends: Tensor, other_ends: Tensor, total: int, other_total: int) -> _Places:
        """All sequences in one, where queries and keys of a sequence end at the same place; `other_ends` are those of the others."""
        place = torch.arange(total, device=ends.device) + other_ends[sequence_of(ends, total) + 1]
        return cls(torch.zeros_like(place), place.clamp(0, total + other_total - 1), 1, total + other_total)

    @property
    def row(self) -> Tensor:
        """The same as numbers of rows among all padded ones."""
        return self.sequence * self.longest + self.position


def _taken(padded: Tensor, places: _Places) -> Tensor:
    """Rows (total, ...) out of (sequences, longest, ...). None is taken twice, so its gradient, which adds, is the same each time."""
    return padded.flatten(0, 1).index_select(0, places.row)


def _put(packed: Tensor, places: _Places, padding: float = 0.0) -> Tensor:
    """The inverse: rows (total, ...) put among padding, (sequences, longest, ...)."""
    rows = packed.new_full((places.sequences * places.longest, *packed.shape[1:]), padding)
    return rows.index_copy(0, places.row, packed).unflatten(0, (places.sequences, places.longest))


def _attend(problem: Problem, lengths: _Lengths) -> tuple[Tensor, Tensor]:
    """(out, lse) of a packed problem of one batch entry, whose mask and bias are in the coordinates of the sequences."""
    len_q, len_k, mask, bias = problem.query.shape[2], problem.key.shape[2], problem.mask, problem.bias
    ends_q, ends_k, max_seqlen_q, max_seqlen_k, _ = lengths
    intervals = IntervalMask.packed(ends_q, ends_k, len_q, len_k, left=problem.left, right=problem.right)
    first, last = intervals.first[None, None], intervals.last[None, None]
    problem = problem._replace(mask=None, bias=None, left=None, right=None)
    if mask is not None or bias is not None:
        queries, keys = _Places.of(ends_q, len_q, max_seqlen_q), _Places.of(ends_k, len_k, max_seqlen_k)
        if mask is not None and mask.shape[2] == 1:
            last = torch.where(_of_keys(mask, keys)[:, :, 0], last, 0)
            mask = None
        if problem.zero is not None:
            return _relative(problem._replace(bias=bias, first=first, last=last), mask, lengths)
        if any(x is not None and x.shape[2] != 1 and x.shape[3] != 1 for x in (mask, bias)) or (mask is not None and _by_key(bias)):
            first, last = ((x - ends_q[keys.sequence]).clamp(0, max_seqlen_q).to(torch.int32) for x in (first, last))
            return _padded(problem._replace(bias=bias), mask, first, last, queries, keys)
        problem = problem._replace(bias=_packed_bias(mask, bias, problem.query.shape[1], queries, keys))
    out, lse = call(problem._replace(first=first, last=last))
    return out[0].transpose(0, 1), lse[0]


def _relative(problem: Problem, mask: Tensor | None, lengths: _Lengths) -> tuple[Tensor, Tensor]:
    """(out, lse) of a packed problem with a table of distances, and packed intervals; a mask differs between queries.

    Queries and keys of a sequence have to end at the same place, for distances to be those of the sequence.
    """
    ends_q, ends_k, longest_q, longest_k, alike = lengths
    len_q, len_k, first, last = problem.query.shape[2], problem.key.shape[2], problem.first, problem.last
    assert problem.bias is not None
    assert first is not None
    assert last is not None
    if mask is not None or problem.bias.shape[0] > 1:
        queries, keys = _Places.of(ends_q, len_q, longest_q, last=True), _Places.of(ends_k, len_k, longest_k, last=True)
        begins = ends_q[keys.sequence + 1] - longest_q
        first, last = ((x - begins).clamp(0, longest_q).to(torch.int32) for x in (first, last))
        return _padded(problem._replace(first=None, last=None), _at_the_end(mask, lengths), first, last, queries, keys)
    if alike:
        out, lse = call(problem)
        return out[0].transpose(0, 1), lse[0]
    queries, keys = _Places.in_one(ends_q, ends_k, len_q, len_k), _Places.in_one(ends_k, ends_q, len_k, len_q)
    moved = ends_k[sequence_of(ends_k, len_k) + 1].to(torch.int32)
    first, last = (torch.where(first < last, x + moved, 0) for x in (first, last))
    return _padded(problem._replace(first=None, last=None), None, first, last, queries, keys)


def _at_the_end(mask: Tensor | None, lengths: _Lengths) -> Tensor | None:
    """A mask (sequences or 1, heads, longest or 1, longest or 1) of sequences with their padding before them."""
    if mask is None:
        return None
    for axis, ends, longest in ((2, lengths.ends_q, lengths.longest_q), (3, lengths.ends_k, lengths.longest_k)):
        if mask.shape[axis] > 1:
            place = torch.arange(longest, device=ends.device) - (longest - ends.diff())[:, None]  # [sequences, longest]
            index = place.clamp(min=0).view(-1, 1, *((longest, 1) if axis == 2 else (1, longest)))
            sizes = [max(size, other) for size, other in zip(mask.shape, index.shape, strict=True)]
            mask = mask.expand(sizes).gather(axis, index.expand(sizes))
    return mask


def _by_key(bias: Tensor | None) -> bool:
    """Whether a bias that is not of pairs differs between keys."""
    return bias is not None and bias.shape[2] == 1 and bias.shape[3] != 1


def _packed_bias(mask: Tensor | None, bias: Tensor | None, heads: int, queries: _Places, keys: _Places) -> Tensor | None:
    """The bias of packed rows that says what a mask by query, and a bias by query or by key, say of the sequences."""
    if bias is not None:
        # in float32 at least: a gradient is rounded after its sum over the sequences and heads that share a value
        bias = bias.to(torch.promote_types(bias.dtype, torch.float32))
        bias = _of_keys(bias, keys) if _by_key(bias) else _of_queries(bias, queries)
    if mask is None:
        return bias
    seen = per_query_head(_of_queries(mask, queries), heads)
    return torch.where(seen, 0.0 if bias is None else per_query_head(bias, heads), float("-inf"))


def _padded(
    problem: Problem, mask: Tensor | None, first: Tensor, last: Tensor, queries: _Places, keys: _Places
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) with a batch entry for each sequence, its tokens first and then padding, which no query sees.

    Query, key and value of `problem` are packed; so are `first` and `last`, of queries counted in their sequence. Its bias is padded already.
    """
    learned = tuple(getattr(problem, name) for name in LEARNED)
    fixed = (mask, first, last, problem.seed, *queries[:2], *keys[:2])
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in learned if x is not None)
    if is_trained and forward_ad._current_level < 0 and nothing_watches((*learned, *fixed)):
        none: dict[str, Any] = dict.fromkeys((*LEARNED, "seed"))
        return _Padded.apply(problem._replace(**none), queries[2:], keys[2:], fixed, *learned)
    return _by_copies(problem, mask, first, last, queries, keys)


def _by_copies(
    problem: Problem, mask: Tensor | None, first: Tensor, last: Tensor, queries: _Places, keys: _Places
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same by functions that PyTorch differentiates one by one."""
    problem, first, last = _copied(problem, first, last, queries, keys)
    out, lse = call(problem._replace(first=first, last=last) if mask is None else _with_mask(problem, mask, first, last))
    return _rows_of(out, queries), _rows_of(lse, queries).t().contiguous()


def _copied(problem: Problem, first: Tensor, last: Tensor, queries: _Places, keys: _Places) -> tuple[Problem, Tensor, Tensor]:
    """A packed problem with padded query, key and value, and padded intervals."""
    query = _pad(problem.query[0], queries)
    key, value, first, last = (_pad(x[0], keys) for x in (problem.key, problem.value, first, last))
    return problem._replace(query=query, key=key, value=value), first, last


def _rows_of(x: Tensor, places: _Places) -> Tensor:
    """(sequences, heads, longest, ...) as (total, heads, ...)."""
    return _taken(x.transpose(1, 2), places)


class _Padded(torch.autograd.Function):
    """:func:`_by_copies`, which keeps nothing padded from one pass to the other: the backward pass makes the copies again.

    Arguments: what of the packed problem is no tensor; the sizes of the padded queries and keys; mask, first, last, seed and places; what is
    `LEARNED`.
    """

    @staticmethod
    def forward(ctx: Any, rules: Problem, of_queries: tuple, of_keys: tuple, fixed: tuple, *learned: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.rules, ctx.of_queries, ctx.of_keys = rules, of_queries, of_keys
        problem, queries, keys = _Padded._problem(ctx, fixed, learned)
        out, lse, states, *_ = passes.forward(_Padded._masked(problem, fixed, queries, keys))
        out, lse = _rows_of(out, queries), _rows_of(lse, queries).t().contiguous()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*learned, *fixed, states, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batches(d_out, d_lse)
        *tensors, states, out, lse = ctx.saved_tensors
        learned, fixed = tensors[: len(LEARNED)], tuple(tensors[len(LEARNED) :])
        needs = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():  # a second derivative may be asked for
            learned = [None if x is None else x.view_as(x) for x in learned]
            problem, queries, keys = _Padded._problem(ctx, fixed, learned)
            mask, first, last, *_ = fixed
            results = zip(_by_copies(problem, mask, first, last, queries, keys), (d_out, d_lse), strict=True)
            outputs, gradients = zip(*((x, gradient) for x, gradient in results if gradient is not None), strict=True)
            wanted = [x for x, need in zip(learned, needs, strict=True) if need]
            further = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=True, allow_unused=True))
            return None, None, None, None, *(next(further) if need else None for need in needs)
        problem, queries, keys = _Padded._problem(ctx, fixed, learned)
        padded = _Padded._masked(problem, fixed, queries, keys).with_states(states)
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_out, out = (_pad(x.transpose(0, 1), queries) for x in (d_out, out))
        d_lse = None if d_lse is None else _pad(d_lse, queries)
        lse = _put(lse.t(), queries, float("-inf")).transpose(1, 2)
        gradients = passes.backward(d_out, d_lse, out, lse, tuple(needs), True, padded)
        of_rows = dict(query=queries, key=keys, value=keys)
        found: list[Any] = []
        for name, x, need in zip(LEARNED, gradients, needs, strict=True):
            packed = need and name in of_rows
            found.append(_rows_of(x, of_rows[name]).transpose(0, 1)[None] if packed else x if need else None)
        return None, None, None, None, *found

    @staticmethod
    def _problem(ctx: Any, fixed: tuple, learned: Sequence[Tensor | None]) -> tuple[Problem, _Places, _Places]:
        _, _, _, seed, *places = fixed
        fields: dict[str, Any] = dict(zip(LEARNED, learned, strict=True))
        return ctx.rules._replace(seed=seed, **fields), _Places(*places[:2], *ctx.of_queries), _Places(*places[2:], *ctx.of_keys)

    @staticmethod
    def _masked(problem: Problem, fixed: tuple, queries: _Places, keys: _Places) -> Problem:
        mask, first, last, *_ = fixed
        problem, first, last = _copied(problem, first, last, queries, keys)
        return problem._replace(first=first, last=last) if mask is None else _with_mask(problem, mask, first, last)


def _with_mask(problem: Problem, mask: Tensor, first: Tensor, last: Tensor) -> Problem:
    return problem._replace(mask=mask & IntervalMask(first, last).to_dense(problem.query.shape[2]))


def _pad(x: Tensor, places: _Places) -> Tensor:
    """(heads, total, ...) as (sequences, heads, longest, ...), 0 in the padding."""
    return _put(x.transpose(0, 1), places).transpose(1, 2)


def _of_keys(x: Tensor, keys: _Places) -> Tensor:
    """A mask or bias (sequences or 1, heads, 1, longest or 1) of packed keys, (1, heads, 1, total)."""
    return _packed_rows(x[:, :, 0], keys)[None, :, None]


def _of_queries(x: Tensor, queries: _Places) -> Tensor:
    """A mask or bias (sequences or 1, heads, longest or 1, 1) of packed queries, (1, heads, total, 1)."""
    return _packed_rows(x[..., 0], queries)[None, ..., None]


def _packed_rows(x: Tensor, places: _Places) -> Tensor:
    """(sequences or 1, heads, longest or 1) as (heads, total), contiguous."""
    x = x.transpose(1, 2).expand(places.sequences, places.longest, -1)  # a view; its gradient is summed by PyTorch in a fixed order
    return x[places.sequence, places.position].t().contiguous()


def _check_lengths(
    query: Tensor, key: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> None:  # fmt: skip
    for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_cumulative(f"dmattn: {name}", ends)
        check_tensor(name, ends)
        if ends.device != query.device:
            raise ValueError(f"dmattn: {name}: expected query's device {query.device}, received {ends.device}")
    sequences = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k.shape[0] - 1 != sequences:
        raise ValueError(
            f"dmattn: cu_seqlens_k: expected as many sequences as cu_seqlens_q has, {sequences}, received {cu_seqlens_k.shape[0] - 1}"
        )
    for name, longest, total in (("max_seqlen_q", max_seqlen_q, query.shape[0]), ("max_seqlen_k", max_seqlen_k, key.shape[0])):
        if isinstance(longest, bool) or not isinstance(longest, (numbers.Integral, torch.SymInt)):
            raise TypeError(f"dmattn: {name}: expected an integer, received {kind(longest)}")
        if longest < 0:
            raise ValueError(f"dmattn: {name}: expected a non-negative integer, received {longest}")
        if sequences * longest < total:
            expected = f"a length that {sequences} sequences of {total} tokens do not exceed"
            raise ValueError(f"dmattn: {name}: expected {expected}, received {longest}")
    if query.is_cpu and nothing_watches((query, cu_seqlens_q, cu_seqlens_k)):
        _check_contents("cu_seqlens_q", cu_seqlens_q, query.shape[0], "max_seqlen_q", max_seqlen_q)
        _check_contents("cu_seqlens_k", cu_seqlens_k, key.shape[0], "max_seqlen_k", max_seqlen_k)


def _check_contents(name: str, ends: Tensor, total: int, limit: str, longest: int) -> None:
    places = ends.tolist()
    if places[0] != 0 or places[-1] != total or places != sorted(places):
        raise ValueError(f"dmattn: {name}: expected lengths that rise from 0 to the {total} tokens, received {places}")
    length = max(end - begin for begin, end in pairwise(places))
    if length > longest:
        raise ValueError(f"dmattn: {limit}: expected at least the longest sequence's {length} tokens, received {longest}")
