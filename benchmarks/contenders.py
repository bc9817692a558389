"""Every contender of a workload as one function. A form says how each is given what is learned beside query, key and value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks import distances, peers, tables
from benchmarks.workloads import Workload
from dmattn import BlockMask, IntervalMask, RelativeBias, attention

OURS = "dmattn"
DEFAULT_PEERS = ("flex", *peers.SDPA_BACKENDS, "cudnn", "eager")  # cudnn: NVIDIA's frontend of it, which has dBias
PEERS = (*DEFAULT_PEERS, "flex_max")  # flex_max: FlexAttention with max-autotune, minutes of compilation a workload
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


def form_of(workload: Workload) -> Form:
    """That of a workload's bias."""
    if workload.sinks:
        return _SINKS
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
    if isinstance(options["mask"], IntervalMask):
        options["mask"] = options["mask"].to_dense(tensors["query"].shape[2])[(None,) * 2]
    if name == "eager":
        return lambda query, key, value, bias: peers.eager(query, key, value, **form.plain(bias, query, key), **options)
    if workload.sinks:
        raise ValueError("refused: no sinks")
    if name in peers.SDPA_BACKENDS:
        backend = peers.SDPA_BACKENDS[name]
        return lambda query, key, value, bias: peers.sdpa(query, key, value, **form.plain(bias, query, key), backend=backend, **options)
    if name == "cudnn":
        if workload.window is not None:
            raise ValueError("refused: cuDNN is not asked for a window here")
        pairs = None if given is None else form.plain(given.detach(), tensors["query"], tensors["key"])["bias"].requires_grad_()
        out = peers.CudnnProblem(tensors["query"], tensors["key"], tensors["value"], bias=pairs, **options).out
        return lambda query, key, value, bias: out(query, key, value, form.plain(bias, query, key)["bias"])
    raise ValueError(f"no contender is called {name}")
