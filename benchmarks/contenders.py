"""Every contender of a workload as one function. A form says how each is given what is learned beside query, key and value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks import distances, optional_peers, peers, tables
from benchmarks.workloads import Workload
from dmattn import BlockMask, FactoredBias, IntervalMask, RelativeBias, attention

OURS = "dmattn"
DEFAULT_PEERS = ("flex", *peers.SDPA_BACKENDS, "cudnn", "eager")  # cudnn: NVIDIA's frontend of it, which has dBias
# sdpa: the kernel of torch's own choice; flex_max: FlexAttention with max-autotune, minutes of compilation a workload
PEERS = (*DEFAULT_PEERS, "sdpa", "flex_max", *optional_peers.PEERS)
Attention = Callable[..., Any]  # of (query, key, value, what is learned beside them), to out


class Form(NamedTuple):
    """What is learned beside query, key and value, by the name `bias` among the tensors of a workload."""

    ours: Callable[[Any], dict[str, Any]]  # as keywords of `dmattn.attention`
    flex: type[peers.FlexProblem]
    plain: Callable[[Any, Tensor, Tensor], dict[str, Any]]  # beside query and key as keywords of `peers.eager`, a bias of pairs among them


class _FlexSinks(peers.FlexProblem):
    def __init__(self, query: Tensor, key: Tensor, *, bias: Tensor, **options: Any) -> None:
        super().__init__(query, key, bias=None, **options)

    def out(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None
        return self.with_sinks(query, key, value, bias)


_AS_IT_IS = Form(lambda bias: dict(bias=bias), peers.FlexProblem, lambda bias, query, key: dict(bias=bias))
_SINKS = Form(lambda sinks: dict(sinks=sinks), _FlexSinks, lambda sinks, query, key: dict(bias=None, sinks=sinks))
_POINTS = Form(
    lambda points: dict(bias=distances.factors(points)),
    distances.FlexDistances,
    lambda points, query, key: dict(bias=distances.dense(points).to(query.dtype)),
)
_TABLE = Form(
    lambda table: dict(bias=RelativeBias(table)),
    tables.FlexTable,
    lambda table, query, key: dict(bias=tables.dense(table, query.shape[2], key.shape[2])),
)


_FACTORS = Form(
    lambda factors: dict(bias=FactoredBias(*tables.rows_and_cols(factors))),
    tables.FlexFactors,
    lambda factors, query, key: dict(bias=tables.dense_factors(factors)),
)
_ALIBI = Form(
    lambda table: dict(bias=RelativeBias(table)),
    tables.FlexAlibi,
    lambda table, query, key: dict(bias=tables.dense(table, query.shape[2], key.shape[2]).to(query.dtype)),
)


def form_of(workload: Workload) -> Form:
    """That of a workload's bias."""
    if workload.sinks:
        return _SINKS
    if workload.alibi:
        return _ALIBI
    if workload.factors is not None:
        return _FACTORS
    return _POINTS if workload.distances else _AS_IT_IS if workload.table is None else _TABLE


def attention_of(name: str, workload: Workload, tensors: dict[str, Any]) -> Attention:
    """A contender as a function of (query, key, value, bias) that returns out; everything that a user prepares once is prepared here."""
    options: dict[str, Any] = dict(mask=tensors["mask"], **workload.options)
    form, given = form_of(workload), tensors["bias"]
    if name == OURS:
        if workload.prepared:
            options["mask"] = BlockMask.from_mask(tensors["mask"])
        return lambda query, key, value, bias: attention(query, key, value, **form.ours(bias), **options)
    if name in ("flex", "flex_max"):
        problem = form.flex(tensors["query"], tensors["key"], bias=given, **options)
        if not tensors["query"].is_cuda:
            return problem.out
        return problem.compiled(problem.out, mode="max-autotune-no-cudagraphs" if name == "flex_max" else None)
    if name in optional_peers.PEERS:
        return optional_peers.attention_of(name, workload, tensors)
    if isinstance(options["mask"], IntervalMask):
        options["mask"] = options["mask"].to_dense(tensors["query"].shape[2])
    if name == "eager":
        return lambda query, key, value, bias: peers.eager(query, key, value, **form.plain(bias, query, key), **options)
    if workload.sinks:
        raise ValueError("refused: no sinks")
    if name == "sdpa" or name in peers.SDPA_BACKENDS:
        backend = peers.SDPA_BACKENDS.get(name)
        return lambda query, key, value, bias: peers.sdpa(query, key, value, **form.plain(bias, query, key), backend=backend, **options)
    if name == "cudnn":
        if workload.window is not None or workload.softcap is not None:
            raise ValueError("refused: cuDNN is not asked for a window or a softcap here")
        pairs = None if given is None else form.plain(given.detach(), tensors["query"], tensors["key"])["bias"]
        pairs = None if pairs is None else pairs.requires_grad_(given.requires_grad)
        out = peers.CudnnProblem(tensors["query"], tensors["key"], tensors["value"], bias=pairs, **options).out
        return lambda query, key, value, bias: out(query, key, value, form.plain(bias, query, key)["bias"])
    raise ValueError(f"no contender is called {name}")
