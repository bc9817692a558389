"""Adversarial inputs by what hides keys: NaN and infinities at hidden places, all masked, nothing at all, odd places in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from benchmarks.prove.part import DTYPES
from benchmarks.prove.problems import PLAIN
from dmattn import BlockMask, IntervalMask, attention
from dmattn.equivalence import Case, Inputs, Standard, judge, results

Checks = Iterator[tuple[str, Callable[[], str | None]]]
POISONS = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf}
HIDING = {
    "mask": Case("hidden", 137, 251, head_dim=64, bias="bhqk", mask="bhqk"),
    "block mask": Case("hidden", 137, 251, head_dim=64, bias="bhqk", mask="11qk", blocked=True),
    "causal": Case("hidden", 200, 264, head_dim=128, bias="1hqk", causal=True),
    "window": Case("hidden", 137, 251, head_dim=64, bias="bhqk", window=(25, 13)),
    "intervals": Case("hidden", 136, 200, head_dim=64, bias="bhqk", intervals="random"),
    "two intervals": Case("hidden", 136, 200, head_dim=64, bias="1hqk", intervals="random-two"),
}
EMPTY = {
    "bool mask": Case("empty", 137, 251, head_dim=64, mask="b1qk", keep="nothing", bias="1hqk"),
    "mask by key": Case("empty", 137, 251, head_dim=64, mask="b11k", keep="nothing", bias="bh1k"),
    "block mask": Case("empty", 137, 251, head_dim=64, mask="11qk", keep="nothing", blocked=True, bias="bhqk"),
    "short": Case("empty", 37, 23, mask="b1qk", keep="nothing", bias="1hqk"),
    "decoding": Case("empty", 2, 900, heads=4, kv_heads=2, head_dim=64, mask="b11k", keep="nothing"),
}
ZERO = ((0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0), (2, 2, 0, 0), (0, 0, 0, 0))  # batch, heads, lengths


def hidden_places(device: str, tiny: bool) -> Checks:
    """NaN, inf and -inf in a bias at hidden places: every result and gradient has the bits that it has without."""
    for (by, case), poison, dtype in product(HIDING.items(), POISONS, DTYPES):
        yield (
            f"{poison} in the bias hidden by {by}, {dtype}",
            lambda by=by, case=case, poison=poison, dtype=dtype: _poisoned(shrunk(case, tiny), DTYPES[dtype], POISONS[poison], device),
        )


def minus_infinity_masks(device: str, tiny: bool) -> Checks:
    """-inf in a bias masks: the rule, against float64 of the same bias, some rows of which hide all keys."""
    for dtype in DTYPES:
        yield f"-inf in the bias in the place of a mask, {dtype}", lambda dtype=dtype: _by_bias(DTYPES[dtype], device, tiny)


def all_masked(device: str, tiny: bool) -> Checks:
    """No query sees a key: zeros, -inf in lse, and no gradient, exactly."""
    for (by, case), dtype in product(EMPTY.items(), DTYPES):
        yield (
            f"all masked by {by}, {dtype}",
            lambda case=case, dtype=dtype: _empty(shrunk(case, tiny).inputs(DTYPES[dtype], device), case.options),
        )
    for dtype in DTYPES:
        yield f"all masked by empty intervals, {dtype}", lambda dtype=dtype: _empty_intervals(DTYPES[dtype], device, tiny)


def zero_sizes(device: str, tiny: bool) -> Checks:
    """Batches, heads and lengths of 0: shapes as ever, zeros, and -inf in lse."""
    for sizes, dtype in product(ZERO, DTYPES):
        yield f"batch, heads and lengths of {sizes}, {dtype}", lambda sizes=sizes, dtype=dtype: _nothing(sizes, DTYPES[dtype], device)


def odd_strides(device: str, tiny: bool) -> Checks:
    """Tensors that lie in memory in every odd way: the rule, as for contiguous ones."""
    for way, dtype in product(WAYS, DTYPES):
        yield f"{way}, {dtype}", lambda way=way, dtype=dtype: _placed(WAYS[way], DTYPES[dtype], device, tiny)


def shrunk(case: Case, tiny: bool) -> Case:
    """A third of it for a CPU."""
    return replace(case, len_q=max(1, case.len_q // 3), len_k=max(1, case.sizes["k"] // 3), head_dim=16) if tiny else case


def judged(inputs: Inputs, options: dict, made: dict[str, Tensor] | None = None) -> str | None:
    """What the rule says against the results of `attention`, or those that were `made`; None where all pass."""
    made = results(attention, inputs, options) if made is None else made
    return "; ".join(str(verdict) for verdict in judge(made, Standard.of(inputs, options)) if not verdict.passed) or None


def _seen(case: Case, inputs: Inputs, device: str) -> Tensor:
    """True where a query attends a key, by all that hides."""
    len_q, len_k = case.sizes["q"], case.sizes["k"]
    distance = torch.arange(len_k, device=device) - torch.arange(len_q, device=device)[:, None] - (len_k - len_q)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if case.causal:
        seen = seen & (distance <= 0)
    if case.window is not None:
        left, right = case.window
        seen = seen & (distance >= -left) & (distance <= right)
    if isinstance(inputs.mask, IntervalMask):
        return seen & inputs.mask.to_dense(len_q)
    if isinstance(inputs.mask, BlockMask):
        return seen & inputs.mask.to_dense()
    return seen if inputs.mask is None else seen & inputs.mask


def _poisoned(case: Case, dtype: torch.dtype, poison: float, device: str) -> str | None:
    inputs = case.inputs(dtype, device)
    assert inputs.bias is not None
    clean = results(attention, inputs, case.options)
    hidden = ~_seen(case, inputs, device)
    hidden = hidden.expand(*torch.broadcast_shapes(hidden.shape, inputs.bias.shape))
    if inputs.bias.shape[0] == 1:  # hidden from all that share it
        hidden = hidden.all(0, keepdim=True)
    found = results(attention, replace(inputs, bias=inputs.bias.masked_fill(hidden, poison)), case.options)
    if not hidden.any():
        return "nothing was hidden"
    wrong = [name for name, x in found.items() if not torch.equal(x, clean[name])]
    if found["d_bias"].masked_select(hidden.expand_as(inputs.bias)).any():
        wrong.append("the gradient at hidden places")
    return f"changed {', '.join(wrong)}" if wrong else None


def _by_bias(dtype: torch.dtype, device: str, tiny: bool) -> str | None:
    case = shrunk(Case("masking", 137, 251, head_dim=64, bias="bhqk", mask="bhqk", keep="random-empty-rows"), tiny)
    inputs = case.inputs(dtype, device)
    assert inputs.bias is not None
    made = results(attention, replace(inputs, mask=None, bias=inputs.bias.masked_fill(~inputs.mask, -math.inf)), PLAIN)
    return judged(inputs, PLAIN, made)  # by the mask: sizes of terms are no numbers beside infinities


def _empty_intervals(dtype: torch.dtype, device: str, tiny: bool) -> str | None:
    case = shrunk(Case("empty", 137, 251, head_dim=64, bias="bhqk"), tiny)
    none = torch.zeros(case.sizes["k"], dtype=torch.int32, device=device)
    return _empty(replace(case.inputs(dtype, device), mask=IntervalMask(none, none)), case.options)


def _empty(inputs: Inputs, options: dict) -> str | None:
    found = results(attention, inputs, options)
    wrong = [name for name, x in found.items() if name != "lse" and x.any()]  # NaN is no zero either
    if not (found["lse"] == -math.inf).all():
        wrong.append("lse")
    return f"no zeros, or no -inf, in {', '.join(wrong)}" if wrong else None


def _nothing(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> str | None:
    batch, heads, len_q, len_k = sizes
    case = Case("nothing", len_q, len_k, batch=batch, heads=heads, head_dim=16)
    inputs = case.inputs(dtype, device)
    inputs = replace(inputs, bias=torch.randn(1, heads, len_q, len_k, device=device, dtype=dtype))
    wrong = _empty(inputs, dict(causal=True))
    found = results(attention, inputs, dict(causal=True))
    shapes = dict(out=inputs.query, d_query=inputs.query, d_key=inputs.key, d_value=inputs.value, d_bias=inputs.bias)
    odd = [name for name, x in shapes.items() if x is not None and found[name].shape != x.shape]
    return wrong or (f"other shapes of {', '.join(odd)}" if odd else None)


def _models(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def _columns_first(x: Tensor) -> Tensor:
    return x.transpose(-2, -1).contiguous().transpose(-2, -1)


def _every_second(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, -1)[..., ::2]


def _far_rows(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, 5, 0, 3))[..., : x.shape[-2], : x.shape[-1]]


def _shifted(x: Tensor) -> Tensor:
    """Where no multiple of 4 bytes begins."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


def _expanded(x: Tensor) -> Tensor:
    """One batch entry for all."""
    return x[:1].expand(x.shape)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "(B, S, H, D) in memory": _models,
    "columns before rows": _columns_first,
    "every second element": _every_second,
    "rows far apart": _far_rows,
    "an odd address": _shifted,
    "expanded batch entries": _expanded,
}


def _placed(way: Callable[[Tensor], Tensor], dtype: torch.dtype, device: str, tiny: bool) -> str | None:
    case = shrunk(Case("strides", 137, 251, heads=4, kv_heads=2, head_dim=64, bias="bhqk", mask="bhqk", causal=True), tiny)
    inputs = case.inputs(dtype, device)
    names = ("query", "key", "value", "bias", "mask", "d_out")
    return judged(replace(inputs, **{name: way(getattr(inputs, name)) for name in names}), case.options)
