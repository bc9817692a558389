"""The problems of ``dmattn bench``: those of README's table, and smaller ones of the same kinds for a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .workload import Workload

__all__ = ["PROBLEMS", "on_a_cpu"]
PROBLEMS = (
    Workload("bias1h_d64", 4, 16, 16, 4096, 4096, 64, bias="1hqk", like="T5"),
    Workload("t5_relative", 4, 16, 16, 4096, 4096, 64, table=257, like="T5"),
    Workload("biaskey_gqa_causal", 2, 32, 8, 8192, 8192, 128, bias="bg1k", causal=True),
    Workload("t5_window", 2048, 8, 8, 64, 64, 32, bias="1hqk", like="Swin"),
    Workload("evoformer_row", 256, 4, 4, 384, 384, 32, bias="1hqk", like="AlphaFold"),
    Workload("blockmask_10pct", 1, 16, 16, 16384, 16384, 128, kept_blocks=0.10),
)
ON_A_CPU: dict[str, dict[str, Any]] = {  # milliseconds on one core rather than minutes
    "bias1h_d64": dict(batch=1, heads=4, kv_heads=4, len_q=512, len_k=512),
    "t5_relative": dict(batch=1, heads=4, kv_heads=4, len_q=512, len_k=512),
    "biaskey_gqa_causal": dict(batch=1, heads=8, kv_heads=2, len_q=512, len_k=512),
    "t5_window": dict(batch=64, heads=4, kv_heads=4),
    "evoformer_row": dict(batch=16, len_q=128, len_k=128),
    "blockmask_10pct": dict(heads=4, kv_heads=4, len_q=1024, len_k=1024),
}


def on_a_cpu(problem: Workload) -> Workload:
    """A problem of the same kind, of a size for a CPU, which has no figures worth comparing with a GPU's."""
    return replace(problem, **ON_A_CPU[problem.name])
