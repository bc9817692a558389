"""How a result is judged: named cases, their inputs, and the one tolerance rule that tests, benchmarks and `dmattn verify` share.

Truth is :mod:`dmattn.reference` in float64 on the already rounded inputs. A tensor passes when its largest error is at most twice that
of the plain PyTorch computation in the input dtype, plus a band of two roundings of the largest true value, in the coarser of the tensor's
dtype and (for gradients, which read the rounded out) the inputs'. Inputs in float32 add two float32 roundings of the terms that are summed
(:func:`term_sizes`), for where they cancel their roundings remain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from . import distances, reference
from .biases import FactoredBias, RelativeBias
from .block_mask import BlockMask
from .broadcast import per_query_head, sum_to
from .functional import attention
from .masks import IntervalMask
from .problem import Gradients, Problem

PLAIN_FACTOR = 2.0
BAND_ROUNDINGS = 2.0
LEARNED = (*Gradients._fields, "rows", "cols")
RESULTS = ("out", "lse", *(f"d_{name}" for name in LEARNED))


@dataclass(frozen=True)
class Case:
    """One attention problem by name.

    `leading` are letters for the axes before the heads, any of b, n and m. `mask` and `bias` are letters for their axes, a letter where the
    axis is full and 1 where it is broadcast: ``"bhqk"``, ``"1hqk"``, ``"b11k"``; the head axis is ``h``, ``g`` (one entry per key-value head)
    or 1, and axes in front may be left out. A bias whose letters end in ``r`` is the table of a RelativeBias of `distances` numbers, whose
    distance 0 is at `zero`. `keep` says which entries the mask keeps: random with ``"random"``, the first of each row, all or none with
    ``"padding"``, the largest of each row with ``"topk"``, whole blocks with ``"blocks"``, none with ``"nothing"``; ``"random-empty-rows"``
    hides every third query's row too. `blocked` gives the mask as a BlockMask. `intervals` names an IntervalMask instead: documents,
    document-prefix, prefix, padding, causal, window, global (tokens beside a window), chunked; or random intervals, "random" for each batch row
    and key-value head, "random-per-head" for each query head, "random-shared" for all, and two a key with "random-two", "random-two-per-head",
    "random-two-shared"; or letters for the axes of random ones, the last of which is k.

    `sinks` are "random", or "far", which are far above the scores of every third head, far below those of the next, and none in the one after.
    `factors` has the leading axes of both factors of a FactoredBias in the place of a bias, ``("bh", "1g")``.
    """

    name: str
    len_q: int
    len_k: int | None = None
    leading: str = "b"
    batch: int = 2
    rows: int = 3  # the length of n
    copies: int = 2  # the length of m
    heads: int = 2
    kv_heads: int | None = None
    head_dim: int = 32
    value_dim: int | None = None
    mask: str | None = None
    keep: str = "random"
    blocked: bool = False
    intervals: str | None = None
    bias: str | None = None
    bias_dtype: torch.dtype | None = None
    distances: int = 0
    zero: int | None = None
    factors: tuple[str, str] | None = None
    causal: bool = False
    window: Any = None
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    sinks: str | None = None
    sinks_dtype: torch.dtype | None = None
    transposed: bool = False  # (B, S, H, D) in memory, with lengths before the last leading axis where there are several
    padded: bool = False  # rows of the bias begin at multiples of 16 bytes
    reason: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """Length of each axis letter."""
        return {
            "b": self.batch,
            "n": self.rows,
            "m": self.copies,
            "h": self.heads,
            "g": self.kv_heads or self.heads,
            "q": self.len_q,
            "k": self.len_q if self.len_k is None else self.len_k,
            "r": self.distances,
            "1": 1,
        }

    @property
    def has_two_intervals(self) -> bool:
        """Whether `intervals` names a mask of two a key."""
        return self.intervals is not None and self.intervals.startswith(("global", "random-two"))

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `attention` other than tensors; dropout only where there is some, as peers have none to compare."""
        given = dict(causal=self.causal, window=self.window, scale=self.scale, softcap=self.softcap)
        return given | dict(dropout_p=self.dropout_p) if self.dropout_p else given

    @property
    def table_zero(self) -> int | None:
        """The index of distance 0 where the bias is a table of distances."""
        if self.bias is None or not self.bias.endswith("r"):
            return None
        return (self.distances - 1) // 2 if self.zero is None else self.zero

    def inputs(self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        """Random tensors, the same for a seed on every device."""
        random = torch.Generator().manual_seed(seed)
        size, kv = self.sizes, "g"

        def normal(axes: str, dim: int | None = None) -> Tensor:
            shape = [size[a] for a in axes] + ([] if dim is None else [dim])
            return torch.randn(shape, generator=random)

        def place(x: Tensor, to: torch.dtype) -> Tensor:
            if self.transposed:
                before = -3 if len(self.leading) < 2 else -4
                x = x.movedim(-2, before).contiguous().movedim(before, -2)
            return x.to(device, to)

        value_dim = self.value_dim or self.head_dim
        query, d_out = (place(normal(f"{self.leading}hq", dim), dtype) for dim in (self.head_dim, value_dim))
        key, value = (place(normal(f"{self.leading}{kv}k", dim), dtype) for dim in (self.head_dim, value_dim))
        bias = None if self.bias is None else normal(self.bias).to(device, self.bias_dtype or dtype)
        rows = cols = None
        if self.factors is not None:
            rows, cols = (normal(axes, 3).to(device, self.bias_dtype or dtype) for axes in (self.factors[0] + "q", self.factors[1] + "k"))
        if self.padded and bias is not None:
            bias = pad(bias, (0, -bias.shape[-1] % 8))[..., : bias.shape[-1]]
        mask: Tensor | IntervalMask | BlockMask | None = None
        if self.mask is not None:
            dense = self._mask(random).to(device)
            mask = BlockMask.from_mask(dense) if self.blocked else dense
        elif self.intervals is not None:
            mask = self._intervals(random, device)
        d_lse = normal(f"{self.leading}hq").to(device)
        sinks = None
        if self.sinks is not None:
            sinks = normal("h")
            if self.sinks == "far":
                sinks += torch.tensor([60.0, -60.0, float("-inf")])[torch.arange(len(sinks)) % 3]
            sinks = sinks.to(device, self.sinks_dtype or dtype)
        return Inputs(query, key, value, mask, bias, d_out, d_lse, sinks, rows, cols, self.table_zero)

    def _mask(self, random: torch.Generator) -> Tensor:
        assert self.mask is not None
        shape = [self.sizes[a] for a in self.mask]
        noise = torch.rand(shape, generator=random)
        if self.keep == "topk":
            keep = max(1, shape[-1] // 4)
            return torch.zeros(shape, dtype=torch.bool).scatter(-1, noise.topk(keep, -1).indices, True)
        if self.keep == "blocks":
            rows, cols = (torch.arange(n) // 32 for n in shape[-2:])
            return ((rows[:, None] * 5 + cols * 3) % 4 == 0).expand(shape).contiguous()
        if self.keep == "padding":  # of every sixth row all keys, and of another sixth none
            return torch.arange(shape[-1]) < (1.5 * noise[..., :1] - 0.25) * shape[-1]
        if self.keep == "nothing":
            return torch.zeros(shape, dtype=torch.bool)
        assert self.keep in ("random", "random-empty-rows"), self.keep
        mask = noise < 0.6
        if self.keep == "random-empty-rows":
            mask[..., ::3, :] = False
        return mask

    def _intervals(self, random: torch.Generator, device: torch.device | str) -> IntervalMask:
        size = self.sizes
        batch, len_q, len_k = size["b"], size["q"], size["k"]
        if self.intervals == "documents":
            cuts = torch.rand((batch, len_k), generator=random) < 3 / max(1, len_k)
            mask = IntervalMask.documents(cuts.cumsum(-1))
        elif self.intervals == "prefix":
            mask = IntervalMask.prefix_lm(torch.randint(0, len_k + 1, (batch,), generator=random), len_q, len_k)
        elif self.intervals == "padding":
            lengths = torch.randint(1, len_k + 1, (batch, 1), generator=random)
            mask = IntervalMask.padding(torch.arange(len_k) < lengths, len_q)
        elif self.intervals == "causal":
            mask = IntervalMask.causal(len_q, len_k)
        elif self.intervals == "window":
            mask = IntervalMask.window(len_q, len_k, left=len_k // 3, right=2)
        elif self.intervals == "chunked":
            mask = IntervalMask.chunked(len_q, len_k, max(2, len_k // 3), left_padding=torch.randint(0, len_k + 1, (batch,), generator=random))
        elif self.intervals == "document-prefix":
            ids = (torch.rand((batch, len_k), generator=random) < 3 / max(1, len_k)).cumsum(-1)
            mask = IntervalMask.documents(ids, prefix=torch.rand((batch, len_k), generator=random) < 0.3)
        elif self.intervals == "global":
            begin = torch.randint(0, len_k, (batch, 1, 1), generator=random)
            position = torch.arange(len_k)
            tokens = IntervalMask.global_tokens((begin <= position) & (position < begin + 3))
            mask = IntervalMask.window(len_k, len_k, left=len_k // 8, right=len_k // 8) | tokens
        else:
            axes = {"": "bg", "-per-head": "1h", "-shared": ""}
            name, two, rest = (self.intervals or "").partition("random-two")
            kind = rest if two else name.removeprefix("random")
            leading = [size[axis] for axis in axes.get(kind, kind.removesuffix("k"))]
            bounds = []
            for _ in range(2 if two else 1):
                first = torch.randint(0, len_q + 1, (*leading, len_k), generator=random, dtype=torch.int32)
                bounds += [first, first + torch.randint(0, len_q // 2 + 2, first.shape, generator=random, dtype=torch.int32)]
            mask = IntervalMask(bounds[0], bounds[1], None, *bounds[2:])
        return tree_map(lambda bound: bound.to(device), replace(mask, len_q=None))


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case, with the incoming gradients. Where there is a `zero`, `bias` is the table of a RelativeBias."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | IntervalMask | BlockMask | None
    bias: Tensor | None
    d_out: Tensor
    d_lse: Tensor
    sinks: Tensor | None = None
    rows: Tensor | None = None
    cols: Tensor | None = None
    zero: int | None = None

    def bias_of(self, bias: Tensor | None) -> Tensor | RelativeBias | None:
        """What `attention` takes, of the tensor here or a copy of it."""
        return bias if bias is None or self.zero is None else RelativeBias(bias, self.zero)


def results(function: Callable[..., Any], inputs: Inputs, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """Out, lse and every gradient of `function`, called like `attention` with ``return_lse=True``, by the names of `RESULTS`."""
    leaves = {name: getattr(inputs, name) for name in LEARNED}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items() if x is not None}
    bias = inputs.bias_of(leaves.get("bias")) if inputs.rows is None else FactoredBias(leaves["rows"], leaves["cols"])
    given: dict[str, Any] = dict(mask=inputs.mask, bias=bias, return_lse=True, **options)
    if "sinks" in leaves:  # which not every function takes
        given["sinks"] = leaves["sinks"]
    with _same_dropout(inputs, options):
        out, lse = function(leaves["query"], leaves["key"], leaves["value"], **given)
    grads = torch.autograd.grad((out, lse), tuple(leaves.values()), (inputs.d_out.to(out.dtype), inputs.d_lse.to(lse.dtype)))
    named = {f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


def truth(inputs: Inputs, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The results in float64."""
    wide = Inputs(**{name: _double(x) for name, x in vars(inputs).items()})
    return results(reference.attention, wide, options)


def plain(inputs: Inputs, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The results of plain PyTorch operations in the inputs' own dtype: what one would write without this library."""
    return results(reference.attention, inputs, options)


def term_sizes(inputs: Inputs, options: Mapping[str, Any]) -> dict[str, float]:
    """For each result, the largest sum of the absolute values of its terms: what an error of summation is relative to.

    A probability counts 1 + the terms of its score, or lse if that is larger, for exp makes of their absolute error a relative one.
    """
    wide = Inputs(**{name: _double(x) for name, x in vars(inputs).items()})
    rows, cols = wide.rows, wide.cols
    bias = wide.bias_of(wide.bias) if rows is None or cols is None else FactoredBias(rows, cols).to_dense()
    with _same_dropout(inputs, options):
        problem = Problem.canonical(wide.query, wide.key, wide.value, mask=wide.mask, bias=bias, sinks=wide.sinks, **options)
    factor = torch.ones((), device=wide.query.device) if problem.seed is None else reference.kept_factor(problem, torch.float64)
    heads = problem.query.shape[-3]
    query, key, value, d_out = (per_query_head(x, heads).abs() for x in (problem.query, problem.key, problem.value, wide.d_out))
    len_q, len_k = query.shape[-2], key.shape[-2]
    dense = wide.bias if wide.bias is None or wide.zero is None else RelativeBias(wide.bias, wide.zero).to_dense(len_q, len_k)
    score_terms = abs(problem.scale) * query @ key.mT + (0.0 if dense is None else per_query_head(dense, heads).abs())
    if rows is not None and cols is not None:
        score_terms = score_terms + per_query_head(FactoredBias(rows.abs(), cols.abs()).to_dense(), heads)
    out, lse = reference.attend(problem, torch.float64)
    empty = (lse == float("-inf"))[..., None]
    scores, _ = reference.masked_scores(problem, torch.float64)
    p = torch.softmax(reference.with_sinks(scores, problem.sinks), -1).masked_fill(empty, 0.0)
    p, of_sinks = p[..., : scores.shape[-1]], p[..., scores.shape[-1] :]  # the latter of no key without sinks
    p = p * (1 + torch.maximum(score_terms, lse.abs().nan_to_num(posinf=0.0)[..., None]))
    if wide.sinks is not None:
        of_sinks = of_sinks * (1 + wide.sinks.abs().nan_to_num(posinf=0.0))[:, None, None]
    deltas = (d_out * out.abs()).sum(-1, keepdim=True) + wide.d_lse.abs()[..., None]
    d_scores = p * (factor * (d_out @ value.mT) + deltas)
    sizes = {
        "out": (p * factor) @ value,
        "lse": p.sum(-1) + of_sinks.sum(-1),
        "d_query": abs(problem.scale) * d_scores @ key,
        "d_key": sum_to(abs(problem.scale) * d_scores.mT @ query, wide.key.shape),
        "d_value": sum_to((p * factor).mT @ d_out, wide.value.shape),
    }
    if dense is not None:
        sizes["d_bias"] = sum_to(d_scores, dense.shape)
    if wide.bias is not None and wide.zero is not None:
        table = torch.zeros_like(wide.bias)
        distances.add_pairs(table, sizes["d_bias"], wide.zero, 0, len_q)
        sizes["d_bias"] = table
    if wide.sinks is not None:
        sizes["d_sinks"] = (of_sinks * deltas).movedim(-3, 0).flatten(1).sum(1)
    if rows is not None and cols is not None:
        sizes["d_rows"] = sum_to(d_scores @ per_query_head(cols, heads).abs(), rows.shape)
        sizes["d_cols"] = sum_to(d_scores.mT @ per_query_head(rows, heads).abs(), cols.shape)
    largest = torch.stack([size.max().double() if size.numel() else size.new_zeros(()) for size in sizes.values()])
    return dict(zip(sizes, largest.tolist(), strict=True))


@contextmanager
def _same_dropout(inputs: Inputs, options: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the next call drops what every call at this place drops; torch's generators are as before afterwards."""
    if not options.get("dropout_p"):
        yield  # a CUDA graph that is being captured takes no seed
        return
    with torch.random.fork_rng([inputs.query.device] if inputs.query.is_cuda else []):
        torch.manual_seed(0)
        yield


class Standard(NamedTuple):
    """What results are judged by: the truth, plain PyTorch's answer in the inputs' dtype, and the sizes of the terms."""

    true: Mapping[str, Tensor]
    plain: Mapping[str, Tensor]
    sizes: Mapping[str, float]

    @classmethod
    def of(cls, inputs: Inputs, options: Mapping[str, Any]) -> Standard:
        """The standard for one set of inputs."""
        return cls(truth(inputs, options), plain(inputs, options), term_sizes(inputs, options))


@dataclass(frozen=True)
class Verdict:
    """How one tensor compares with the truth."""

    name: str
    error: float  # largest absolute error
    relative: float  # error / largest true value
    plain_error: float
    budget: float
    passed: bool
    worst: tuple[int, ...]
    got: float
    wanted: float

    def __str__(self) -> str:
        mark = "ok" if self.passed else "FAILED"
        place = f"at {self.worst}: got {self.got:.9g}, wanted {self.wanted:.9g}"
        return f"{self.name}: error {self.error:.3g}, budget {self.budget:.3g}, plain {self.plain_error:.3g} {mark}, {place}"


def judge(ours: Mapping[str, Tensor], standard: Standard) -> list[Verdict]:
    """One verdict per tensor of `ours` by the budget rule; infinities must stand exactly where the truth has them."""
    return [_verdict(name, ours[name], standard) for name in RESULTS if name in ours]


def check(case: Case, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> list[Verdict]:
    """Run `attention` on a case and judge it."""
    inputs = case.inputs(dtype, device, seed)
    return judge(results(attention, inputs, case.options), Standard.of(inputs, case.options))


def _verdict(name: str, ours: Tensor, standard: Standard) -> Verdict:
    true, usual = standard.true[name], standard.plain[name]
    assert ours.shape == true.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(true.shape)}"
    error, plain_error = _error(ours, true), _error(usual, true)
    if error.numel() == 0:
        return Verdict(name, 0.0, 0.0, 0.0, 0.0, True, (), 0.0, 0.0)
    place = error.argmax()
    # one read of the device, as each waits for whoever shares it
    most, largest, plain_max, got, wanted, at = torch.stack(
        (
            error.max(),
            true.double().abs().masked_fill(~true.isfinite(), 0.0).max(),
            plain_error.masked_fill(~plain_error.isfinite(), 0.0).max(),
            ours.take(place).double(),
            true.take(place).double(),
            place.double(),
        )
    ).tolist()
    inputs_dtype = standard.plain["out"].dtype
    rounding = torch.finfo(ours.dtype).eps
    if name.startswith("d_"):
        rounding = max(rounding, torch.finfo(inputs_dtype).eps)
    band = rounding * largest
    if inputs_dtype.itemsize > 2:
        band += torch.finfo(torch.float32).eps * standard.sizes[name]
    budget = PLAIN_FACTOR * plain_max + BAND_ROUNDINGS * band
    worst = tuple(int(i) for i in torch.unravel_index(torch.tensor(int(at)), error.shape))
    return Verdict(name, most, most / largest if largest else most, plain_max, budget, most <= budget, worst, got, wanted)


def _error(x: Tensor, true: Tensor) -> Tensor:
    """|x - true|; 0 where both are the same infinity, infinite where x is NaN or only one of them is finite."""
    error = (x.double() - true.double()).abs()
    return error.masked_fill(x.double() == true.double(), 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))


def _double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
