"""Dynamic masks over a sequence that ranks share: scores are gathered, keys are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..arguments import check_flag, refuse_keywords
from ..dynamic import checked, intervals_of
from ..execution.eager import attend
from ..graphs import left_out_of_graphs
from ..masks import IntervalMask
from ..problem import Problem, autocast
from . import ring
from .context_parallel import check_shares
from .fetch import Wanted, fetched, needed_by
from .pairs import Setting
from .plan import Band
from .ranks import Ranks, seen
from .sharding import whole
from .shares import ZIGZAG, check_order, runs

__all__ = ["context_parallel_dynamic_mask_attention"]


@left_out_of_graphs("it waits for other processes")
def context_parallel_dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    *,
    keep: int,
    group: Any = None,
    causal: bool = True,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    order: str = ZIGZAG,
    return_lse: bool = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    r""":func:`dmattn.dynamic_mask_attention` of a sequence that P ranks share: each query keeps the `keep` best keys of all ranks.

    Rank r has its shares of queries, keys, values and scores, as :func:`dmattn.distributed.shard` cuts them. Ranks gather the scores,
    (B, Hk, Sk) numbers, and make the plan of the mask alike, each for itself. Then a rank fetches the rows of those keys that its queries keep.
    Where these are all keys, on any rank, keys and values go round the ring instead, as in :func:`context_parallel_attention`.

    Args:
        query: (B, H, Sq / P, D); key: (B, Hk, Sk / P, D); value: (B, Hk, Sk / P, Dv). Differentiable.
        key_bias: (B, Hk, Sk / P), the scores of this rank's keys. Differentiable: its gradient is over the queries of all ranks.
        keep: how many keys a query keeps of all ranks', at least 1; the same on all ranks.
        group, order: as in :func:`context_parallel_attention`.
        causal, scale: as in :func:`dmattn.dynamic_mask_attention`, in places of the whole sequences; the same on all ranks.
        key_padding_mask: bool, (B, Sk / P), True for a real token of this rank.
        sinks: (H,), the same on all ranks. Differentiable: the gradient is this rank's queries' share.
        return_lse: return (out, lse); lse is differentiable.

    What ranks fetch follows from the scores, so each call waits for the device once, to learn how many rows there are. Results repeat in every
    bit. Derivatives are first ones, in reverse mode, and all ranks run the backward pass.

    Returns:
        out: (B, H, Sq / P, Dv) in the query's dtype; lse: (B, H, Sq / P), only with ``return_lse``.

    Raises:
        TypeError, ValueError: as :func:`context_parallel_attention`, on every rank.
    """
    ranks = Ranks.of(group)

    def prepare() -> tuple[Problem, Mapping[str, object]]:
        if unknown:
            refuse_keywords(context_parallel_dynamic_mask_attention, unknown)
        check_flag("return_lse", return_lse)
        check_order(order)
        given: tuple[Any, ...] = query, key, value
        if all(isinstance(x, Tensor) for x in given):  # else `checked` says what they are
            given = autocast(*given)
        problem = checked(given[0], given[1], given[2], key_bias, keep, key_padding_mask, causal, scale, sinks)
        for name, tensor in (("query", problem.query), ("key", problem.key)):
            ranks.check_device(name, tensor.device)
            check_shares(name, tensor, order, ranks.size)
        tensors = dict(query=problem.query, key=problem.key, value=problem.value, key_bias=key_bias, sinks=sinks)
        described: dict[str, object] = {name: seen(x) for name, x in tensors.items()}
        options = dict(keep=keep, causal=causal, key_padding_mask=key_padding_mask is not None, scale=problem.scale, order=order)
        return problem, {"function": "context_parallel_dynamic_mask_attention", **described, **options, "return_lse": return_lse}

    problem = ranks.agree(prepare)
    len_q, len_k = problem.query.shape[2] * ranks.size, problem.key.shape[2] * ranks.size
    if min(len_q, len_k) == 0:
        nothing = key_bias[:, :, None]
        out, lse = attend(problem.query, problem.key, problem.value, None, nothing, False, None, problem.scale, None, 0.0, sinks)
        return (out, lse) if return_lse else out
    scores = whole(key_bias.detach(), 2, order, ranks)
    valid = None if key_padding_mask is None else whole(key_padding_mask, 1, order, ranks)[:, None].expand(scores.shape)
    listed, first, last = intervals_of(scores, valid, min(keep, len_k), len_q, causal)
    wanted, intervals = _wanted(ranks, order, listed, first, last, len_q)
    if wanted is None:
        band = Band.of(None, 0 if causal else None, len_q, len_k)
        setting = Setting(ranks, order, len_q, len_k, band, problem.scale, None, joins_rows=True, joins_cols=True)
        masks = ring.Masks(None, None, (first, last))
        bias = key_bias[:, :, None]
        out, lse = ring.attend(setting, problem.query, problem.key, problem.value, masks, bias, ring.BiasKind(True, None), problem.sinks)
    else:
        rows = fetched(wanted, problem.key, problem.value, key_bias)
        of_keys = rows[2][:, :, None]
        out, lse = attend(problem.query, *rows[:2], intervals, of_keys, False, None, problem.scale, None, 0.0, problem.sinks)
    return (out, lse) if return_lse else out


def _wanted(ranks: Ranks, order: str, listed: Tensor, first: Tensor, last: Tensor, len_q: int) -> tuple[Wanted | None, IntervalMask | None]:
    """What ranks fetch, and the intervals of it in places of this rank's queries, in the order of `listed`; None if a rank needs all keys."""
    size, (batch, heads, len_k) = ranks.size, first.shape
    if batch == 0:
        return None, None

    def held(x: Tensor, rank: int) -> Tensor:
        """The columns of a rank's keys."""
        return torch.cat([x[..., run.start : run.start + run.length] for run in runs(order, size, rank, len_k)], -1)

    def places(chosen: Tensor, number: int) -> Tensor:
        """Where it is True, `number` times, in its flattened entries: without asking the device for that number."""
        return torch.nonzero_static(chosen.flatten(), size=number)[:, 0]

    needed_by_ranks = [needed_by(first, last, order, size, rank, len_q) for rank in range(size)]
    needed = needed_by_ranks[ranks.rank]
    of_ranks = [held(needed, rank) for rank in range(size)]  # that come from them
    of_own = [held(each, ranks.rank) for each in needed_by_ranks]  # that go to them
    numbers = [x.sum() for x in (*needed_by_ranks, *of_ranks, *of_own)]
    *found, most = torch.stack([*numbers, needed.sum(-1).max()]).tolist()
    totals, from_ranks, to_ranks = found[:size], found[size : 2 * size], found[2 * size :]
    if max(totals) == batch * heads * len_k:
        return None, None
    most = max(1, most)
    place = needed.gather(-1, listed.long()).cumsum(-1) - 1  # among the rows that come, by lifetime
    place = torch.zeros_like(first, dtype=torch.long).scatter_(-1, listed.long(), place)
    place += torch.arange(batch * heads, device=first.device).view(batch, heads, 1) * most
    pairs = list(zip(of_ranks, from_ranks, strict=True))
    received = torch.cat([held(place, rank).flatten()[places(*pair)] for rank, pair in enumerate(pairs)])
    sent = tuple(places(*pair) for pair in zip(of_own, to_ranks, strict=True))
    all_needed = places(needed, totals[ranks.rank])
    bounds = []
    for bound in (first, last):
        local = torch.zeros_like(bound)
        for run in runs(order, size, ranks.rank, len_q):
            local += (bound - run.start).clamp(0, run.length)
        rows = bound.new_zeros(batch * heads * most)
        rows[place.flatten()[all_needed]] = local.flatten()[all_needed]
        bounds.append(rows.view(batch, heads, most))
    wanted = Wanted(ranks, sent, received, tuple(from_ranks), most)
    return wanted, IntervalMask(bounds[0], bounds[1], len_q // size)
