"""The PyTorch path, for CPU tensors and float64: the formulas over chunks of query rows, which all (batch, head) compute together.

A bias or mask that some leading axes share, and the gradient of such a bias, keep their own shapes: no more of them than a chunk's scores is
broadcast. Queries, keys and values whose leading axes no single stride walks are copied, as torch's products do.

Temporaries are a few times the scores of a chunk: CHUNK_SCORES, or where that is more, MIN_ROWS rows of each (batch, head). Half precision
is computed in float32 and rounded once, as the kernels do. A chunk has only the keys that a window leaves one of its rows, and beside intervals
on a CPU those from the first to the last that one of its rows sees: of packed sequences those of its own, as in a loop over them. Where keys
have two intervals these may lie far apart, and a chunk has copies of those alone. Forward, a chunk is PyTorch's own kernel's wherever that is
exact (:mod:`.torch_kernel`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import distances, reference
from ..bits import unpacked
from ..broadcast import per_query_gradient, sum_to
from ..masks import BOUNDS
from ..own_rows import begins_and_lengths, own_rows
from ..problem import DISTANCES, HEADS, KEYS, PAIRS, QUERIES, Gradients, Problem
from ..reference import fold_groups, kept_factor, masked_scores, with_sinks
from . import torch_kernel
from .sequences import Sequence, sequences_of
from .watching import nothing_watches

Keys = slice | Tensor  # of a chunk: some in a row, or ascending places
# The axes of queries and of keys, of tensors of a problem and of results; an axis of 1 is one entry for all, but not in those that are FULL.
AXES: dict[str, tuple[int | None, int | None]] = {
    "query": (-2, None),
    "key": (None, -2),
    "value": (None, -2),
    "mask": (-2, -1),
    "bias": (-2, -1),
}
AXES |= dict.fromkeys(BOUNDS, (None, -1)) | {"sinks": (None, None), "out": (-2, None), "lse": (-1, None)}
FULL = ("query", "key", "value", "out", "lse")
CHUNK_SCORES = 1 << 21  # scores alive at a time: 8 MiB in float32, a few times over in temporaries; of fewer, sums over chunks take long
MIN_ROWS = 16
WINDOW_ROWS = 128  # at most, of a chunk of a window: the same
PACKED_ROWS = 128  # at most, of a chunk of packed sequences: more would compute more pairs that no query sees


@torch.no_grad()
def forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Write (out, lse) of `problem`."""
    dtype = compute_dtype(problem)
    problem = problem._replace(key=problem.key.to(dtype), value=problem.value.to(dtype))
    for sequence in sequences_of(problem):
        own, own_out, own_lse = sequence.problem(problem), sequence.of("out", out), sequence.of("lse", lse)
        attend, scores = reference.attend, scores_of_row(own)
        if torch_kernel.serves(own):
            own, attend, scores = torch_kernel.prepared(own), torch_kernel.attend, torch_kernel.scores_added(own)
        for rows, keys, chunk in chunks(own, scores):
            own_out[..., rows, :], own_lse[..., rows] = attend(chunk, dtype, rows.start, aligned_length(own, keys), sequence.number)


@torch.no_grad()
def backward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    gradients: Gradients,
    partial: bool = False,
) -> None:
    """Write the gradients that are not None, recomputing each chunk; sums over chunks are rounded once. `partial` is that of passes.py."""
    dtype = compute_dtype(problem)
    d_key, d_value, d_bias = gradients.key, gradients.value, gradients.bias
    problem = problem._replace(key=problem.key.to(dtype), value=problem.value.to(dtype))
    d_sink_scores = None if problem.sinks is None else torch.zeros_like(lse)
    by_query = _ByQuery(out, d_out, lse, d_lse, d_sink_scores)
    # each chunk has rows of a bias of pairs of its own, unless sequences share them
    is_summed = problem.bias_kind in (KEYS, DISTANCES) or (problem.ends_q is not None and problem.bias_kind == PAIRS)
    sums = {"key": d_key, "value": d_value, "bias": d_bias if is_summed else None}
    totals = {name: torch.zeros(x.shape, dtype=dtype, device=x.device) for name, x in sums.items() if x is not None}
    if d_bias is not None and not is_summed:
        d_bias.zero_()  # a chunk may not have all keys
    for sequence in sequences_of(problem):
        own = Gradients(*(None if x is None else sequence.of(name, x) for name, x in gradients._asdict().items()))
        own = own._replace(**{name: sequence.of(name, totals[name]) if name in totals else None for name in ("key", "value")})
        own = own._replace(bias=sequence.of("bias", totals["bias"]) if "bias" in totals else own.bias)
        _add(problem, sequence, dtype, by_query.of(sequence), own, partial)
    for name, total in totals.items():
        getattr(gradients, name).copy_(total)
    if d_bias is not None and problem.bias_kind in (QUERIES, HEADS):
        if problem.ends_q is None or problem.longest_q is None:
            per_query_gradient(lse, d_lse, d_sink_scores, d_bias)
        else:
            begins, lengths = begins_and_lengths(problem.ends_q, lse.shape[-1], problem.longest_q)
            of_lse, of_sinks = (None if x is None else own_rows(x, begins, lengths, problem.longest_q) for x in (d_lse, d_sink_scores))
            per_query_gradient(own_rows(lse, begins, lengths, problem.longest_q), of_lse, of_sinks, d_bias)
    if gradients.sinks is not None and d_sink_scores is not None:
        gradients.sinks.copy_(d_sink_scores.sum([axis for axis in range(lse.ndim) if axis != lse.ndim - 2]))


class _ByQuery(NamedTuple):
    """What the backward pass reads of each query; and where it writes the gradient of the sink's score."""

    out: Tensor
    d_out: Tensor
    lse: Tensor
    d_lse: Tensor | None
    d_sink_scores: Tensor | None

    def of(self, sequence: Sequence) -> _ByQuery:
        vectors = (None if x is None else sequence.of("lse", x) for x in self[3:])
        return _ByQuery(sequence.of("out", self.out), sequence.of("out", self.d_out), sequence.of("lse", self.lse), *vectors)


def _add(whole: Problem, sequence: Sequence, dtype: torch.dtype, by_query: _ByQuery, gradients: Gradients, partial: bool) -> None:
    """Add to sums over chunks of one sequence, those of keys, values and bias, and write what each chunk has its own rows of."""
    problem, number, kind = sequence.problem(whole), sequence.number, whole.bias_kind  # of a bias whose axes may be 1 long here
    out, d_out, lse, d_lse, d_sink_scores = by_query
    d_query, key_sum, value_sum, d_bias = gradients.query, gradients.key, gradients.value, gradients.bias
    kv_heads = problem.key.shape[-3]
    for rows, keys, chunk in chunks(problem, scores_of_row(problem)):
        scores, tanh = masked_scores(chunk, dtype, rows.start, aligned_length(problem, keys))
        empty = lse[..., rows, None] == float("-inf")
        if partial:
            p = torch.exp(scores - lse[..., rows, None].masked_fill(empty, 0.0))
        else:
            p = torch.softmax(with_sinks(scores, problem.sinks).masked_fill_(empty, 0.0), -1)
        of_sinks = p[..., scores.shape[-1] :]  # of no key without sinks
        p = p[..., : scores.shape[-1]]
        d_out_rows = d_out[..., rows, :].to(dtype).masked_fill(empty, 0.0)
        factor = None if problem.seed is None else kept_factor(chunk, dtype, rows.start, number)
        if value_sum is not None:
            weights = p if factor is None else p * factor
            value_sum[..., keys, :] += fold_groups(weights, kv_heads).transpose(-1, -2) @ fold_groups(d_out_rows, kv_heads)
        delta = (d_out_rows * out[..., rows, :]).sum(-1, keepdim=True)
        if d_lse is not None:
            delta = delta - d_lse[..., rows, None]
        if d_sink_scores is not None:
            d_sink_scores[..., rows] = (of_sinks * -delta).masked_fill(empty, 0.0)[..., 0]
        d_p = (fold_groups(d_out_rows, kv_heads) @ chunk.value.transpose(-1, -2)).view(p.shape)
        if factor is not None:
            d_p *= factor
        d_scores = (p * (d_p - delta)).masked_fill_(empty, 0.0)
        if d_bias is not None and kind == DISTANCES:
            assert problem.zero is not None
            of_pairs = sum_to(d_scores, (*d_bias.shape[:-2], *d_scores.shape[-2:]))
            distances.add_pairs(d_bias[..., 0, :], of_pairs, problem.zero, rows.start, aligned_length(problem, keys))
        elif d_bias is not None and kind in (PAIRS, KEYS):
            of_rows = rows if kind == PAIRS else slice(None)
            shape = (*d_bias.shape[:-2], d_scores.shape[-2] if kind == PAIRS else d_bias.shape[-2], d_scores.shape[-1])
            d_bias[..., of_rows, keys] += sum_to(d_scores, shape)
        if tanh is not None:
            d_scores = d_scores * (1 - tanh * tanh)
        d_scores = fold_groups(d_scores * problem.scale, kv_heads)
        if d_query is not None:
            d_query[..., rows, :] = (d_scores @ chunk.key).view(*p.shape[:-1], chunk.key.shape[-1])
        if key_sum is not None:
            key_sum[..., keys, :] += d_scores.transpose(-1, -2) @ fold_groups(chunk.query.to(dtype), kv_heads)


def scores_of_row(problem: Problem) -> int:
    """Of one row of each (batch, head)."""
    return math.prod(problem.query.shape[:-2]) * problem.key.shape[-2]


def chunks(problem: Problem, scores: int) -> Iterator[tuple[slice, Keys, Problem]]:
    """(row slice, keys, `problem` :func:`restricted` to those query rows and keys, which are all that the rows see).

    `scores` is how many numbers are alive for a row.
    """
    len_q, len_k = problem.query.shape[-2], problem.key.shape[-2]
    step = max(MIN_ROWS, CHUNK_SCORES // max(1, scores))
    if problem.left is not None or problem.right is not None:
        step = min(step, WINDOW_ROWS)
    parts: Iterable[tuple[slice, Keys]] = ((slice(start, min(start + step, len_q)), slice(0, len_k)) for start in range(0, len_q, step))
    first, known = problem.first, [getattr(problem, name) for name in BOUNDS]  # but no graph may depend on what they hold
    if first is not None and first.is_cpu and len_q > MIN_ROWS and problem.seed is None and nothing_watches(known):  # dropout counts all keys
        if problem.also_first is not None:
            problem = _without_window(problem)
        parts = _parts_of_intervals(problem, step)
    for rows, keys in parts:
        if isinstance(keys, slice):
            keys = _in_window(problem, rows, keys)
        yield rows, keys, restricted(problem, rows, keys)


def restricted(problem: Problem, rows: slice, keys: Keys) -> Problem:
    """`problem` of some query rows and keys."""
    fields: dict[str, Any] = {name: part_of(problem, name, x, rows, keys) for name in AXES if (x := getattr(problem, name, None)) is not None}
    if problem.blocks is not None and problem.bits is not None:
        mask = unpacked(problem.blocks, problem.bits, problem.key.shape[-2], rows.start, rows.stop)
        fields |= dict(mask=mask[..., keys], blocks=None, bits=None)
    return problem._replace(**fields)


def part_of(problem: Problem, name: str, x: Tensor, rows: slice, keys: Keys) -> Tensor:
    """A field of a problem, or what has the shape of one or of a result, of some query rows and keys; a view where these are slices."""
    of_rows, of_keys = _axes(problem, name, x)
    x = x if of_rows is None else _at(x, of_rows, rows)
    return x if of_keys is None else _at(x, of_keys, keys)


def add_part(problem: Problem, name: str, total: Tensor, rows: slice, keys: Keys, x: Tensor) -> None:
    """Add to the :func:`part_of` of `total`."""
    of_rows, of_keys = _axes(problem, name, total)
    total = total if of_rows is None else _at(total, of_rows, rows)
    if of_keys is None:
        total += x
    elif isinstance(keys, slice):
        total = _at(total, of_keys, keys)
        total += x
    else:
        total.index_add_(of_keys, keys, x)  # no key stands twice in them


def _axes(problem: Problem, name: str, x: Tensor) -> tuple[int | None, int | None]:
    """Those of queries and keys, None where there is none, as in a table of distances, or one entry for all."""
    if name == "bias" and problem.zero is not None:
        return None, None
    of_rows, of_keys = (None if axis is None or (x.shape[axis] == 1 and name not in FULL) else axis for axis in AXES[name])
    return of_rows, of_keys


def _at(x: Tensor, axis: int, places: Keys) -> Tensor:
    return x.narrow(axis, places.start, places.stop - places.start) if isinstance(places, slice) else x.index_select(axis, places)


def _in_window(problem: Problem, rows: slice, keys: slice) -> slice:
    """Those of `keys` that the window leaves one of `rows`; all of them under dropout, which counts all keys."""
    if problem.seed is not None:
        return keys
    offset = problem.key.shape[-2] - problem.query.shape[-2]
    start = keys.start if problem.left is None else max(keys.start, rows.start + offset - problem.left)
    stop = keys.stop if problem.right is None else min(keys.stop, rows.stop + offset + problem.right)
    return slice(start, stop) if start < stop else slice(0, 0)


def _without_window(problem: Problem) -> Problem:
    """The same problem with what the window hides left out of both intervals of its keys, which a chunk may then have in any places."""
    len_q, len_k = problem.query.shape[-2], problem.key.shape[-2]
    first, last, also_first, also_last = (getattr(problem, name) for name in BOUNDS)
    own = torch.arange(len_k, device=first.device) - (len_k - len_q)  # the query at the key's own place
    if problem.right is not None:
        first, also_first = (torch.maximum(x, own - problem.right) for x in (first, also_first))
    if problem.left is not None:
        last, also_last = (torch.minimum(x, own + problem.left + 1) for x in (last, also_last))
    return problem._replace(left=None, right=None, first=first, last=last, also_first=also_first, also_last=also_last)


def _parts_of_intervals(problem: Problem, step: int) -> Iterator[tuple[slice, Keys]]:
    """Slices of at most `step` rows, each with the keys from the first to the last that it sees, in any batch entry and head.

    Where keys have two intervals, and it sees none of some keys between, only with the others, unless distances count. Where intervals that
    have begun have all ended, as between packed sequences, slices end too and are shorter: of no other sequence is a key computed then.
    """
    len_q, len_k = problem.query.shape[-2], problem.key.shape[-2]
    bounds = [bound for name in BOUNDS if (bound := getattr(problem, name)) is not None]
    bounds = [x.expand(*x.shape[:-1], len_k).clamp(0, len_q) for x in torch.broadcast_tensors(*bounds)]
    first, last = torch.stack(bounds[::2]), torch.stack(bounds[1::2])
    any_row = first < last
    begun, ended = (torch.bincount(x[any_row], minlength=len_q + 1).cumsum(0) for x in (first, last))
    ends = ((begun[:-1] == ended[1:]).nonzero()[:, 0] + 1).tolist()
    if len(ends) > 1:
        step = min(step, PACKED_ROWS)
    start = 0
    while start < len_q:
        stop = min(start + step, len_q)
        before = bisect_right(ends, stop)
        if before and ends[before - 1] > start:
            stop = ends[before - 1]
        seen = ((first < stop) & (last > start) & any_row).flatten(0, -2).any(0).nonzero()[:, 0]
        keys = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 0)
        scattered = problem.also_first is not None and problem.zero is None and len(seen) < keys.stop - keys.start
        yield slice(start, stop), seen if scattered else keys
        start = stop


def aligned_length(problem: Problem, keys: Keys) -> int:
    """The number of queries for :func:`masked_scores`: as many less as there are keys behind `keys`, as the last of both stand side by side.

    Where keys are in any places there is no window that would count them.
    """
    len_q, len_k = problem.query.shape[-2], problem.key.shape[-2]
    return len_q - (len_k - keys.stop) if isinstance(keys, slice) else len_q


def compute_dtype(problem: Problem) -> torch.dtype:
    """Of scores and sums: float32, but float64 for float64 inputs."""
    return torch.float64 if problem.query.dtype == torch.float64 else torch.float32
