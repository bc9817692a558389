"""The public function. Its docstring is the specification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, NoReturn, overload

from torch import Tensor

from ..arguments import check_flag, kind, refuse_arguments
from ..biases import FactoredBias, RelativeBias
from ..checks import Window, check_qkv, check_tensor
from ..execution.eager import attend
from ..factors import joined
from ..graphs import left_out_of_graphs
from ..masks import IntervalMask
from ..problem import Problem, autocast
from . import heads, ring
from .pairs import Setting
from .plan import Band
from .ranks import Ranks, seen
from .sharding import whole
from .shares import CONTIGUOUS, ZIGZAG, check_order, parts

__all__ = ["context_parallel_attention"]

RING, HEADS = "ring", "heads"


@overload
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Any = ...,
    mask: Tensor | IntervalMask | None = ...,
    bias: Tensor | RelativeBias | FactoredBias | None = ...,
    causal: bool = ...,
    window: Window = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    order: str = ...,
    strategy: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Any = ...,
    mask: Tensor | IntervalMask | None = ...,
    bias: Tensor | RelativeBias | FactoredBias | None = ...,
    causal: bool = ...,
    window: Window = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    order: str = ...,
    strategy: str = ...,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@left_out_of_graphs("it waits for other processes")
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Any = None,
    mask: Tensor | IntervalMask | None = None,
    bias: Tensor | RelativeBias | FactoredBias | None = None,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    order: str = ZIGZAG,
    strategy: str = RING,
    return_lse: bool = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Exact attention over a sequence that P ranks share: :func:`dmattn.attention` of the whole, of which each rank has its part.

    Rank r calls it with its shares of queries, keys and values, as :func:`shard` cuts them, and gets out and lse of its queries over the keys
    of all ranks. The formula, with its mask, bias, window, softcap, scale and sinks, is that of :func:`dmattn.attention`, places i and j being
    those in the whole sequences, of Sq and Sk; ``causal`` and ``window`` are aligned bottom-right there. Gradients are those that one process
    would have, of which each rank gets its share. All ranks call it together, and run its backward pass.

    **strategy "ring".** Keys, values, and a mask or bias of keys go from rank to rank while each computes with those that it has; backward they
    go again, and the gradients made of them go home. No rank ever has more keys than its own and two other ranks', nor a matrix of scores, and
    between the passes it keeps its own share alone. Keys that no query of a rank sees, by ``causal`` or ``window``, are not sent to it.

    **strategy "heads".** One exchange gives each rank the whole sequence of H / P heads, another gives results back. P divides H and Hk.
    A rank's part of a mask or bias for H or Hk heads is exchanged likewise. One with a single head is gathered: rows of it then take P times
    their memory on each rank. One row with columns of all keys is a row for each query there, as that of another rank may be another.

    Args:
        query: (..., H, Sq / P, D), this rank's share; dtypes, devices and leading axes as in :func:`dmattn.attention`. Differentiable.
        key: (..., Hk, Sk / P, D). Differentiable.
        value: (..., Hk, Sk / P, Dv). Differentiable.
        group: a torch.distributed process group (gloo on CPUs, NCCL on GPUs), by default that of all processes.
        mask: bool, with axes before the last two as in :func:`dmattn.attention`, and these two

            - (..., Sq / P or 1, Sk or 1): rows of this rank's queries, or one for all of them, with columns of all keys, ascending, or one
              for all;
            - (..., 1, Sk / P): of this rank's keys, for the queries of all ranks.

            Or an :class:`dmattn.IntervalMask` of the whole sequence, in places of the whole sequence of queries, the same on all ranks.
        bias: float, of the same shapes. Differentiable: a bias of this rank's keys gets the gradient over the queries of all ranks, any other
            that over this rank's queries, which sums over ranks to the whole where all have the same bias. Where Sk / P is 1, (..., 1, 1) is
            a bias of the rank's key. Or a :class:`dmattn.FactoredBias` of the rows of this rank's queries and the columns of its keys. Or a
            :class:`dmattn.RelativeBias`, the same on all ranks: its gradient is this rank's queries' share.
        causal, window, scale, softcap: as in :func:`dmattn.attention`, the same on all ranks.
        sinks: (H,), the same on all ranks. Differentiable: the gradient is this rank's queries' share, which sums over ranks to the whole.
        order: "zigzag" or "contiguous", that of :func:`shard`. Under a causal mask "zigzag" gives all ranks the same work.
        strategy: "ring" or "heads".
        return_lse: return (out, lse); lse is differentiable.

    2 P divides Sq and Sk in the order "zigzag", P in "contiguous". There is no dropout. Derivatives are first ones, in reverse mode. Compiled
    code calls it as it is, between two graphs.

    **Precision.** Results of blocks are rounded to the query's dtype, summed in float32 (float64 of float64) and rounded once more; so are the
    gradients, of which those that a rank makes of another's keys are sent in the key's dtype. The order of sums is fixed: results and gradients
    repeat in every bit.

    **Agreement.** Before anything else ranks exchange 2 KiB each, by which they agree about shapes, dtypes, options and which tensors require
    gradients; so each call waits until all ranks have made it. Nothing of it is kept for the next call: a rank that knew a call which
    another does not would leave it waiting.

    Returns:
        out: (..., H, Sq / P, Dv) in the query's dtype. lse: (..., H, Sq / P), float32 (float64 for float64 inputs); only with ``return_lse``.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, dtype, device or value, or ranks that disagree. Every rank raises,
            before any tensor is sent, and the group can be used again. A process without a group, or outside of it, raises alone.

    A rank that fails later, such as for want of memory, leaves the others waiting for its messages until the group's timeout. Then gloo raises,
    and NCCL's watchdog ends the process.

    Sources: Liu, Zaharia and Abbeel, Ring Attention, 2023 (arXiv:2310.01889); Jacobs et al., DeepSpeed Ulysses, 2023 (arXiv:2309.14509); the
    zigzag order is that of Llama 3's training (arXiv:2407.21783) and of zhuzilin/ring-flash-attention.

    Example::

        query, key, value = (shard(x, -2) for x in (query, key, value))
        out = context_parallel_attention(query, key, value, causal=True)  # (B, H, S / P, D)
    """
    ranks = Ranks.of(group)
    options: dict[str, Any] = dict(causal=causal, window=window, scale=scale, softcap=softcap, sinks=sinks, order=order, strategy=strategy)

    def prepare() -> tuple[_Call, Mapping[str, object]]:
        if unknown:
            refuse_arguments(context_parallel_attention, (), unknown)
        check_flag("return_lse", return_lse)
        call = _prepared(ranks, query, key, value, mask, bias, **options)
        return call, call.described() | dict(return_lse=return_lse)

    call = ranks.agree(prepare)
    out, lse = _by_heads(call, return_lse) if strategy == HEADS else _by_ring(call)
    return (out, lse) if return_lse else out


class _Call(NamedTuple):
    """Checked arguments of a rank. Mask, bias and intervals have as many axes as the query, or one less."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    mask_travels: bool
    bias: Tensor | None
    bias_kind: ring.BiasKind
    intervals: IntervalMask | None
    sinks: Tensor | None
    strategy: str
    left: int | None
    right: int | None
    setting: Setting

    def described(self) -> dict[str, object]:
        """What ranks have to agree about."""
        setting, intervals = self.setting, self.intervals
        found: dict[str, object] = {name: seen(getattr(self, name)) for name in ("query", "key", "value", "mask", "bias", "sinks")}
        if intervals is not None:
            bounds = ", ".join(str(tuple(x.shape)) for x in _bounds(intervals))
            found["mask"] = f"IntervalMask for {setting.len_q} queries, bounds of shapes {bounds}"
        if self.bias_kind.zero is not None:
            found["bias"] = f"RelativeBias of a table of {found['bias']}, distance 0 at {self.bias_kind.zero}"
        found |= {
            "causal or window": (self.left, self.right),
            "scale": setting.scale,
            "softcap": setting.softcap,
            "order": setting.order,
            "strategy": self.strategy,
        }
        return {"function": "context_parallel_attention", **found}


def _prepared(
    ranks: Ranks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    bias: Any,
    *,
    order: str,
    strategy: str,
    scale: Any,
    softcap: Any,
    **options: Any,
) -> _Call:
    """Raises as the public function does."""
    check_order(order)
    check_strategy(strategy)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        ranks.check_device(name, tensor.device)
    if isinstance(bias, FactoredBias):
        query, key, scale = joined(query, key, value, bias, scale, softcap)
        bias = None
    elif isinstance(bias, RelativeBias):
        check_tensor("bias.table", bias.table)
    query, key, value = autocast(query, key, value)
    check_qkv(query, key, value, is_packed=False)
    for name, tensor in (("query", query), ("key", key)):
        check_shares(name, tensor, order, ranks.size)
    for name, tensor in (("query", query), ("key", key)):
        if strategy == HEADS and tensor.shape[-3] % ranks.size:
            expected = f"a number of heads that {ranks.size} ranks divide, or strategy={RING!r}"
            raise ValueError(f"dmattn: {name}: expected {expected}, received {tensor.shape[-3]}")
    all_queries, all_keys, all_values = (_as_long_as_all(x, ranks.size) for x in (query, key, value))
    shares = query.shape[-2], key.shape[-2]
    lengths = all_queries.shape[-2], all_keys.shape[-2]
    arguments: dict[str, Any] = dict(causal=False, window=None, scale=scale, softcap=softcap)

    def checked(name: str, x: Any) -> tuple[Tensor | None, bool]:
        """A mask or bias with all axes, and whether it travels."""
        if x is None:
            return None, False
        travels = isinstance(x, Tensor) and _travels(name, x, shares, lengths, ranks.size)
        keys, values = (key, value) if travels else (all_keys, all_values)
        given: dict[str, Any] = dict(mask=None, bias=None) | {name: x} | arguments
        return getattr(Problem.canonical(query, keys, values, **given), name), travels

    intervals, zero = None, None
    if isinstance(mask, IntervalMask):
        of_all = Problem.canonical(all_queries, all_keys, all_values, mask, None, **arguments)
        assert of_all.first is not None
        assert of_all.last is not None
        intervals, mask = IntervalMask(of_all.first, of_all.last, lengths[0], of_all.also_first, of_all.also_last), None
    elif mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"dmattn: mask: expected a bool tensor, an IntervalMask or None, received {kind(mask)}")
    mask, mask_travels = checked("mask", mask)
    if isinstance(bias, RelativeBias):
        of_all = Problem.canonical(all_queries, all_keys, all_values, None, bias, **arguments)
        bias, zero, bias_travels = of_all.bias, of_all.zero, False
    else:
        bias, bias_travels = checked("bias", bias)
    plain = Problem.canonical(query, key, value, None, None, options["causal"], options["window"], scale, softcap, 0.0, options["sinks"])
    band = Band.of(plain.left, plain.right, *lengths)
    has_columns = any(x is not None and not travels and x.shape[-1] != 1 for x, travels in ((mask, mask_travels), (bias, bias_travels)))
    setting = Setting(
        ranks, order, *lengths, band, plain.scale, plain.softcap, joins_rows=zero is None, joins_cols=not has_columns and zero is None
    )
    return _Call(
        plain.query,
        plain.key,
        plain.value,
        mask,
        mask_travels,
        bias,
        ring.BiasKind(bias_travels, zero),
        intervals,
        plain.sinks,
        strategy,
        plain.left,
        plain.right,
        setting,
    )


def check_strategy(strategy: object) -> None:
    """Raise unless it is one."""
    if strategy not in (RING, HEADS):
        received = repr(strategy) if isinstance(strategy, str) else kind(strategy)
        raise (ValueError if isinstance(strategy, str) else TypeError)(f"dmattn: strategy: expected {RING!r} or {HEADS!r}, received {received}")


def check_shares(name: str, x: Tensor, order: str, size: int) -> None:
    """Raise unless queries or keys are a share of some sequence."""
    if order == ZIGZAG and x.shape[-2] % 2:
        expected = f"a share of an even length, two chunks of the {parts(order, size)} of the whole sequence, or order={CONTIGUOUS!r}"
        raise ValueError(f"dmattn: {name}: expected {expected}, received {x.shape[-2]}")


def _as_long_as_all(x: Tensor, size: int) -> Tensor:
    """A view of the length that all ranks' shares have together, to check others against."""
    return x[..., :1, :].expand(*x.shape[:-2], x.shape[-2] * size, x.shape[-1]) if x.shape[-2] else x


def _travels(name: str, x: Tensor, shares: tuple[int, int], lengths: tuple[int, int], size: int) -> bool:
    """Whether a mask or bias is one of this rank's keys. Raises where it is not one of the layouts either."""
    rows, cols = (1, 1, *x.shape)[-2:]
    if size > 1 and rows == 1 and cols == shares[1]:
        return True
    of_keys = f"of this rank's keys, (..., 1, {shares[1]})"
    if not (rows in (1, shares[0]) and cols in (1, lengths[1])):
        expected = f"rows of this rank's queries with columns of all keys, (..., {shares[0]} or 1, {lengths[1]} or 1), or a {name} {of_keys}"
        raise ValueError(f"dmattn: {name}: expected {expected}, received shape {tuple(x.shape)}")
    return False


def _bounds(intervals: IntervalMask) -> tuple[Tensor, ...]:
    bounds = (intervals.first, intervals.last, intervals.also_first, intervals.also_last)
    return tuple(x for x in bounds if x is not None)


def _by_ring(call: _Call) -> tuple[Tensor, Tensor]:
    bounds = () if call.intervals is None else _bounds(call.intervals)
    masks = ring.Masks(None if call.mask_travels else call.mask, call.mask if call.mask_travels else None, bounds)
    return ring.attend(call.setting, call.query, call.key, call.value, masks, call.bias, call.bias_kind, call.sinks)


def _by_heads(call: _Call, with_lse: bool) -> tuple[Tensor, Tensor]:
    ranks, order = call.setting.ranks, call.setting.order
    size, rank = ranks.size, ranks.rank
    exchanged: dict[str, Tensor] = dict(query=call.query, key=call.key, value=call.value)
    gathered: dict[str, Tensor] = {}
    table = call.bias if call.bias_kind.zero is not None else None
    for name, x, travels in (("mask", call.mask, call.mask_travels), ("bias", call.bias if table is None else None, call.bias_kind.travels)):
        if x is not None:
            x = x.transpose(-1, -2) if travels else x.expand(*x.shape[:-2], call.query.shape[-2], x.shape[-1])
            (gathered if x.shape[-3] == 1 else exchanged)[name] = x
    of_heads = dict(zip(exchanged, heads.to_heads(ranks, order, *exchanged.values()), strict=True))
    of_heads |= {name: whole(x, x.ndim - 2, order, ranks) for name, x in gathered.items()}
    mask, bias = (
        x.transpose(-1, -2) if travels and x is not None else x
        for x, travels in ((of_heads.get("mask"), call.mask_travels), (of_heads.get("bias"), call.bias_kind.travels))
    )

    def own(x: Tensor, axis: int) -> Tensor:
        """Of this rank's heads, where it has several."""
        return x if x.shape[axis] == 1 else x.chunk(size, axis)[rank]

    given: Any = mask
    added: Any = bias if table is None else RelativeBias(own(table, -3)[..., 0, :], call.bias_kind.zero or 0)
    sinks = None if call.sinks is None else own(call.sinks, 0)
    if call.intervals is not None:
        first, last, *others = (own(x, -2) for x in _bounds(call.intervals))
        given = IntervalMask(first, last, call.intervals.len_q, *others)
    window = (call.left, call.right)
    tensors = of_heads["query"], of_heads["key"], of_heads["value"]
    out, lse = attend(*tensors, given, added, False, window, call.setting.scale, call.setting.softcap, 0.0, sinks)
    if not with_lse:
        return heads.to_sequence(ranks, order, out)[0], lse
    out, lse = heads.to_sequence(ranks, order, out, lse[..., None])
    return out, lse[..., 0]
