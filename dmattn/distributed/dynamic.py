"""Dynamic masks over a sequence that ranks share: scores are gathered, keys are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from ..arguments import check_flag, refuse_arguments
from ..dynamic import checked, intervals_of
from ..execution.eager import attend
from ..graphs import left_out_of_graphs
from ..problem import Problem, autocast
from . import ring
from .context_parallel import check_shares
from .fetch import fetched
from .messages import Layout, gathered
from .pairs import Setting
from .plan import Band
from .ranks import Ranks, seen
from .shares import ZIGZAG, check_order, whole_of
from .wanted import wanted

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
            refuse_arguments(context_parallel_dynamic_mask_attention, (), unknown)
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
    scores, valid = _of_all_keys(ranks, order, key_bias.detach(), key_padding_mask)
    listed, first, last = intervals_of(scores, valid, min(int(keep), len_k), len_q, causal)
    found = wanted(ranks, order, listed, first, last, len_q) if key_bias.numel() else None
    if found is None:
        band = Band.of(None, 0 if causal else None, len_q, len_k)
        setting = Setting(ranks, order, len_q, len_k, band, problem.scale, None, joins_rows=True, joins_cols=True)
        masks = ring.Masks(None, None, (first, last))
        bias = key_bias[:, :, None]
        out, lse = ring.attend(setting, problem.query, problem.key, problem.value, masks, bias, ring.BiasKind(True, None), problem.sinks)
    else:
        rows, intervals = fetched(found[0], problem.key, problem.value, key_bias), found[1]
        of_keys = rows[2][:, :, None]
        out, lse = attend(problem.query, *rows[:2], intervals, of_keys, False, None, problem.scale, None, 0.0, problem.sinks)
    return (out, lse) if return_lse else out


def _of_all_keys(ranks: Ranks, order: str, scores: Tensor, is_real: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scores (B, Hk, Sk) of all keys and, where given, which are real ones, of the same shape: in one message from each rank."""
    if is_real is None:
        return whole_of(gathered(scores, ranks), 2, order), None
    layout = Layout.of((scores, is_real))
    all_scores, all_real = layout.opened(gathered(layout.packed((scores, is_real)), ranks))
    whole = whole_of(all_scores, 2, order)
    return whole, whole_of(all_real, 1, order)[:, None].expand(whole.shape)
