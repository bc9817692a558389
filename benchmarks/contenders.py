"""Every contender of a workload as one function: those of dmattn/bench, more peers, and more forms of what is learned beside the tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks import distances, optional_peers, peers, tables
from dmattn import FactoredBias, RelativeBias
from dmattn.bench import contenders
from dmattn.bench.contenders import OURS, Attention, Form, as_pairs
from dmattn.bench.peers import SDPA_BACKENDS, FlexProblem, dense
from dmattn.bench.workload import Workload

DEFAULT_PEERS = ("flex", *SDPA_BACKENDS, "cudnn", "eager")  # cudnn: NVIDIA's frontend of it, which has dBias
# sdpa: the kernel of torch's own choice; flex_max: FlexAttention with max-autotune, minutes of compilation a workload
PEERS = (*DEFAULT_PEERS, "sdpa", "flex_max", *optional_peers.PEERS)
__all__ = ["DEFAULT_PEERS", "OURS", "PEERS", "Attention", "attention_of", "form_of"]


class _FlexSinks(FlexProblem):
    def __init__(self, query: Tensor, key: Tensor, *, bias: Tensor, **options: Any) -> None:
        super().__init__(query, key, bias=None, **options)

    def out(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None
        return self.with_sinks(query, key, value, bias)


_SINKS = Form(lambda sinks: dict(sinks=sinks), _FlexSinks, lambda sinks, query, key: dict(bias=None, sinks=sinks))
_POINTS = Form(
    lambda points: dict(bias=distances.factors(points)),
    distances.FlexDistances,
    lambda points, query, key: dict(bias=distances.dense(points).to(query.dtype)),
)
_FACTORS = Form(
    lambda factors: dict(bias=FactoredBias(*tables.rows_and_cols(factors))),
    tables.FlexFactors,
    lambda factors, query, key: dict(bias=tables.dense_factors(factors)),
)
_ALIBI = Form(
    lambda table: dict(bias=RelativeBias(table)),
    tables.FlexAlibi,
    lambda table, query, key: dict(bias=dense(table, query.shape[2], key.shape[2]).to(query.dtype)),
)


def form_of(workload: Workload) -> Form:
    """That of a workload's bias."""
    if workload.sinks:
        return _SINKS
    if workload.alibi:
        return _ALIBI
    if workload.factors is not None:
        return _FACTORS
    return _POINTS if workload.distances else contenders.form_of(workload)


def attention_of(name: str, workload: Workload, tensors: dict[str, Any]) -> Attention:
    """A contender as a function of (query, key, value, bias) that returns out; everything that a user prepares once is prepared here."""
    form, given = form_of(workload), tensors["bias"]
    if name in optional_peers.PEERS:
        return optional_peers.attention_of(name, workload, tensors)
    if name not in ("eager", "cudnn"):
        if name in ("sdpa", *SDPA_BACKENDS) and workload.sinks:
            raise ValueError("refused: no sinks")
        return contenders.attention_of(name, workload, tensors, form)
    options: dict[str, Any] = dict(workload.options, mask=as_pairs(tensors["mask"], workload.len_q))
    if name == "eager":
        return lambda query, key, value, bias: peers.eager(query, key, value, **form.plain(bias, query, key), **options)
    if workload.sinks:
        raise ValueError("refused: no sinks")
    if workload.window is not None or workload.softcap is not None:
        raise ValueError("refused: cuDNN is not asked for a window or a softcap here")
    pairs = None if given is None else form.plain(given.detach(), tensors["query"], tensors["key"])["bias"]
    pairs = None if pairs is None else pairs.requires_grad_(given.requires_grad)
    out = peers.CudnnProblem(tensors["query"], tensors["key"], tensors["value"], bias=pairs, **options).out
    return lambda query, key, value, bias: out(query, key, value, form.plain(bias, query, key)["bias"])
