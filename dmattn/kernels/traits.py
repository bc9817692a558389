"""All that decides which kernels serve a call, as plain data: its sizes, its features, the kind of its bias, the tensors that cannot be copied.

A :class:`Traits` holds no tensor, so that a test or a report makes one without a device. :meth:`Traits.of` computes it once for a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem import DISTANCES, KEYS, PAIRS, Gradients, Problem, kind_of
from .base.device import device_family, processors
from .base.leading import Nested, flattened, flattened_gradients
from .hopper.addressing import Placed, why_not_copied
from .hopper.copies import GLUON

# Results of the two passes. A gradient of the bias is made in five ways, which its kind decides.
OUT, D_QUERY, D_KEY, D_VALUE = "out", "d_query", "d_key", "d_value"
D_BIAS_OF_PAIRS = "d_bias of pairs"  # (B, H, Sq, Sk): dS itself
D_BIAS_SHARED = (
    "d_bias of pairs, shared"  # a leading axis or heads broadcast: dS summed over the members, (batch, head) pairs that share a slice
)
D_BIAS_OF_KEYS = "d_bias of keys"  # (..., 1, Sk): dS summed over the queries
D_BIAS_OF_QUERIES = "d_bias of queries"  # (..., Sq or 1, 1): dS summed over the keys, which is the gradient of lse
D_BIAS_OF_DISTANCES = "d_bias of distances"  # (..., 1, R), a table: dS summed over the pairs of a distance
END_SUMS = "sums at the ends"  # for each query those of dS over the keys whose distances take an end of the table
D_SINKS = "d_sinks"
QUERY_TERMS = "query terms"  # of each query, besides its scores (base/query_terms.py), as vectors
DELTA = "delta"  # one of them, for who makes the other of lse
TERM_COLUMNS = "columns of query terms"  # the same as columns of a product's factor (base/bias_columns.py)
ANY_FORM = "any form of query terms"  # for who reads whichever there is
TERM_FORMS = frozenset({QUERY_TERMS, DELTA, TERM_COLUMNS})

LEADING = "leading axes"  # some of which a mask, intervals or a bias share (base/leading.py)
LEADING_IN_RUNS = "leading axes that no single stride walks"  # in a tensor
PARTIAL = "further keys in out and lse"  # of a backward pass, than the call has

NO_GRADIENTS = Gradients()
_PARAMETERS = {"query", "key", "value", "scale", "dropout_p", "states"}  # fields of a problem that are no features
_FEATURES = {"first": "intervals", "last": "intervals", "left": "window", "right": "window", "seed": "dropout", "zero": "bias of distances"}
_FEATURES |= {"also_first": "two intervals", "also_last": "two intervals"}
_FEATURES |= {"blocks": "block mask", "bits": "block mask"}
_FEATURES |= dict.fromkeys(("ends_q", "ends_k", "longest_q", "longest_k"), "packed sequences")
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_INTERVALS = ("first", "last", "also_first", "also_last")
_INPUTS = ("query", "key", "value", "mask", *_INTERVALS, "bias")


class Bias(NamedTuple):
    """A bias: its type, and its entries on the axes of batch and heads."""

    dtype: torch.dtype
    batch: int
    heads: int


class Traits(NamedTuple):
    """One call. Of a problem with an order of its keys they are the traits of the copies in that order (reorder.py).

    `uncopyable` has the name of each tensor that Hopper's copy engine cannot address, with each reason, unless no single stride walks its
    leading axes, which is a feature; `wide` the names of tensors in which an offset within a tile may need more than 32 bits. `wanted` are the
    results of a backward pass. `aligned` has the bias and its gradient, with what had been said of them as uncopyable, where kernels get copies
    that the copy engine can address (hopper/aligned.py).
    """

    family: str
    gluon: bool
    processors: int
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    len_q: int
    len_k: int
    head_dim: int
    value_dim: int
    features: frozenset[str] = frozenset()
    bias: Bias | None = None
    left: int | None = None
    right: int | None = None
    scale: float = 1.0
    softcap: float | None = None
    uncopyable: tuple[tuple[str, str], ...] = ()
    wide: frozenset[str] = frozenset()
    wanted: frozenset[str] = frozenset()
    aligned: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls,
        problem: Problem,
        out: Tensor,
        d_out: Tensor | None = None,
        gradients: Gradients = NO_GRADIENTS,
        *,
        target: tuple[str, int] | None = None,
    ) -> Traits:
        """Those of a canonical problem (`dmattn.problem.Problem`) and the results of a pass, of which a backward pass wants some.

        A `target`, (family, processors), stands for the device of the tensors.
        """
        gradients = flattened_gradients(gradients, problem)
        problem, out, d_out = flattened(problem, out, d_out)
        query, bias, device = problem.query, problem.bias, problem.query.device
        family, count = (device_family(device), processors(device)) if target is None else target
        batch, heads, len_q, head_dim = query.shape
        kv_heads, len_k, value_dim = problem.value.shape[1:]
        len_k = len_k if problem.key.numel() else 0  # of packed sequences none may have a key
        given = {name: Placed.of(x) for name in _INPUTS if (x := getattr(problem, name)) is not None}
        if problem.order is not None:
            len_k = problem.order.shape[2]
            sizes = dict(key=(len_k, head_dim), value=(len_k, value_dim), first=(len_k,), last=(len_k,), bias=(1, len_k))
            copies = sizes.keys() & given.keys()
            given |= {name: Placed.contiguous(given[name].dtype, (batch, kv_heads, *sizes[name])) for name in copies}
        kinds = {name: kind_of(given[name].shape) for name in ("mask", "bias") if name in given}
        if problem.zero is not None:
            kinds["bias"] = DISTANCES
        results = dict(out=out, d_out=d_out, d_query=gradients.query, d_bias=gradients.bias)
        copied = {name: x for name, x in given.items() if name in ("query", "key", "value") or kinds.get(name) == PAIRS}
        copied |= {name: Placed.of(x) for name, x in results.items() if x is not None}
        scattered = {name for name, x in (problem._asdict() | results).items() if isinstance(x, Nested) and x.places is not None}
        uncopyable = tuple((name, why) for name, x in copied.items() if name not in scattered for why in why_not_copied(name, *x))
        loaded = {"mask", *_INTERVALS, "bias"} - ({"bias"} & copied.keys() - dict(uncopyable).keys())
        pointed = {name: x for name, x in given.items() if name in loaded}
        made = {D_QUERY: gradients.query, D_KEY: gradients.key, D_VALUE: gradients.value, D_SINKS: gradients.sinks}
        if bias is not None:
            made[_d_bias_of(problem, (batch, heads))] = gradients.bias
        return cls(
            family=family,
            gluon=GLUON,
            processors=count,
            dtype=query.dtype,
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            len_q=len_q,
            len_k=len_k,
            head_dim=head_dim,
            value_dim=value_dim,
            features=_features(problem, kinds, (*results.values(), gradients.key, gradients.value)),
            bias=None if bias is None else Bias(bias.dtype, *given["bias"].shape[:2]),
            left=problem.left,
            right=problem.right,
            scale=problem.scale,
            softcap=problem.softcap,
            uncopyable=uncopyable,
            # Of an axis of 1, too, whose stride nobody uses.
            wide=frozenset(name for name, x in pointed.items() if max(x.strides[2:]) >= 1 << 22),
            wanted=frozenset(name for name, x in made.items() if x is not None),
        )

    def with_aligned(self, *names: str) -> Traits:
        """Those of the call where kernels get aligned copies of these tensors."""
        return self._replace(
            uncopyable=tuple((name, why) for name, why in self.uncopyable if name not in names),
            aligned=tuple((name, why) for name, why in self.uncopyable if name in names),
        )

    @property
    def members(self) -> int:
        """How many (batch, head) share one slice of the bias."""
        return self.batch // self.bias.batch * (self.heads // self.bias.heads)


def _features(problem: Problem, kinds: dict[str, str], results: Sequence[Any]) -> frozenset[str]:
    """Which rules and inputs a problem has beyond queries, keys and values: a word for each field that is not None.

    A field that this file has never heard of is a feature of its own name, and so is a dtype: a kernel that does not name it does not serve it.
    """
    present = [name for name, x in zip(problem._fields, problem, strict=True) if x is not None and name not in _PARAMETERS]
    found = {f"{name} of {kinds[name]}" if name in kinds else _FEATURES.get(name, name) for name in present}
    heads, kv_heads = problem.query.shape[1], problem.key.shape[1]
    if heads > kv_heads and any(x is not None and x.shape[1] == heads for x in (getattr(problem, name) for name in _INTERVALS)):
        found.add("intervals by head")  # which differ among heads that share keys
    ruling = {"mask", "blocks", *_INTERVALS, "bias", "states"}
    nested = {name: x for name, x in problem._asdict().items() if isinstance(x, Nested)}
    if not ruling.isdisjoint(nested):
        found.add(LEADING)
    if any(isinstance(x, Nested) for x in results) or any(name not in ruling or x.places is not None for name, x in nested.items()):
        found.add(LEADING_IN_RUNS)
    return frozenset(found | {str(x.dtype) for x in (problem.query, problem.bias) if x is not None and x.dtype not in _DTYPES})


def _d_bias_of(problem: Problem, members: tuple[int, int]) -> str:
    """Which result the gradient of the bias is, in a problem of so many (batch entries, heads)."""
    if problem.pair_bias is not None:
        return D_BIAS_OF_PAIRS if problem.pair_bias.shape[:2] == members else D_BIAS_SHARED
    return {KEYS: D_BIAS_OF_KEYS, DISTANCES: D_BIAS_OF_DISTANCES}.get(problem.bias_kind or "", D_BIAS_OF_QUERIES)
