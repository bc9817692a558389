"""Peers that have to be installed: FlashAttention-4 (flash-attn-4), and kernels of triangle attention, a bias of pairs that all rows share.

They are imported when they are asked for. One that is not installed, or does not do a problem, raises, as those of benchmarks/peers.py do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmattn import IntervalMask
from dmattn.bench.contenders import OwnLayout, cu_seqlens
from dmattn.bench.workload import Workload


def attention_of(name: str, workload: Workload, tensors: dict[str, Any]) -> Callable[..., Tensor] | OwnLayout:
    """One of `PEERS` as a function of (query, key, value, bias) that returns out."""
    return PEERS[name](workload, tensors)


def _flash4(deterministic: bool) -> Callable[..., Any]:
    def prepared(workload: Workload, tensors: dict[str, Any]) -> Callable[..., Tensor]:
        mask = tensors["mask"]
        packed = isinstance(mask, IntervalMask) and workload.documents is not None and workload.batch == 1
        if workload.biased or (mask is not None and not packed):
            raise ValueError("refused: FlashAttention-4 has no gradient of a bias and no mask but documents")
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

        options: dict[str, Any] = dict(causal=workload.causal)
        options |= dict(deterministic=True) if deterministic else {}  # of the backward pass; the forward pass is
        options |= {} if workload.softcap is None else dict(softcap=workload.softcap)
        options |= {} if workload.window is None else dict(window_size=workload.options["window"])
        if packed:
            ends = cu_seqlens(mask, workload.len_k)
            longest = int(ends.diff().max())
            lengths = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest)
            return lambda query, key, value, bias: (
                _out(flash_attn_varlen_func(*(x.squeeze(0).transpose(0, 1) for x in (query, key, value)), **lengths, **options))
                .transpose(0, 1)
                .unsqueeze(0)
            )

        def function(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
            sinks = {} if bias is None else dict(learnable_sink=bias)
            return _out(flash_attn_func(*(x.transpose(1, 2) for x in (query, key, value)), **sinks, **options)).transpose(1, 2)

        return function

    return prepared


def _out(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _triangle(workload: Workload, tensors: dict[str, Any]) -> Tensor:
    """(B, Sk), True where a key is seen; raises where it is no triangle attention."""
    expected = Workload(
        workload.name, workload.batch, workload.heads, workload.heads, workload.len_k, workload.len_k, workload.head_dim, bias="1hqk"
    )
    differing = {x: y for x, y in workload.particular.items() if x not in ("padded", "sequence_first", "dtype", "distribution")}
    if differing != expected.particular or workload.len_q != workload.len_k or workload.kv_heads != workload.heads or workload.head_dim > 64:
        raise ValueError("refused: no triangle attention, rows that share a bias of pairs")
    if tensors["mask"] is None:
        return torch.ones((workload.batch, workload.len_k), dtype=torch.bool, device=tensors["query"].device)
    return tensors["mask"][:, 0, 0]


def _trifast(workload: Workload, tensors: dict[str, Any]) -> OwnLayout:
    seen = _triangle(workload, tensors)
    if workload.batch != workload.len_k:
        raise ValueError("refused: trifast's rows are as many as a row's keys")
    from trifast import triangle_attention

    hidden = ~seen[None]
    return OwnLayout(
        lambda query, key, value, bias: triangle_attention(query, key, value, bias, hidden),
        lambda x: x.permute(1, 0, 2, 3)[None].contiguous(),
        lambda x: x[0].permute(1, 0, 2, 3),
    )


def _protenix(workload: Workload, tensors: dict[str, Any]) -> OwnLayout:
    seen = _triangle(workload, tensors)
    from protenix.model.tri_attention.op import TriAttentionFunction

    keys = _added(seen, tensors["query"].dtype)
    return OwnLayout(
        lambda query, key, value, bias: TriAttentionFunction.apply(query, key, value, keys, bias[:, None], False),
        *_BY_TOKENS,
        query_scale=workload.head_dim**-0.5,
    )


def _openfold3(workload: Workload, tensors: dict[str, Any]) -> OwnLayout:
    seen = _triangle(workload, tensors)
    from openfold3.core.kernels.triton.evoformer import TritonEvoformer

    keys = _added(seen, tensors["query"].dtype)
    return OwnLayout(lambda query, key, value, bias: TritonEvoformer(query, key, value, keys, bias[:, None]), *_BY_TOKENS)


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """(1, B, 1, 1, Sk), a bias of 0 or of what leaves no probability."""
    zero = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return zero.masked_fill(~seen, -math.inf if dtype is torch.float16 else -1e9)[None, :, None, None]


_BY_TOKENS = (lambda x: x.transpose(1, 2)[None].contiguous(), lambda x: x[0].transpose(1, 2))  # (1, B, S, H, D)
PEERS = {"fa4": _flash4(False), "fa4_deterministic": _flash4(True), "trifast": _trifast, "protenix": _protenix, "openfold3": _openfold3}
