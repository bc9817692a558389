"""What is measured: the problems whose speed is compared, and the cases whose exactness is."""

from __future__ import annotations

import torch

from dmattn.bench.problems import PROBLEMS
from dmattn.bench.workload import PASSES, Workload
from dmattn.equivalence import Case

__all__ = ["EXACTNESS", "EXACTNESS_ON_GPU", "LSE_GRADIENT", "PASSES", "QUICK_LENGTH", "WORKLOADS", "Workload"]
_OF_README = {problem.name: problem for problem in PROBLEMS}
WORKLOADS = (
    Workload("plain_d128", 4, 16, 16, 4096, 4096, 128),
    Workload("plain_d128_causal", 4, 16, 16, 4096, 4096, 128, causal=True),
    Workload("plain_d64", 4, 32, 32, 4096, 4096, 64),
    _OF_README["bias1h_d64"],
    Workload("bias1h_d128", 4, 16, 16, 4096, 4096, 128, bias="1hqk"),
    Workload("biasbh_d128", 2, 16, 16, 4096, 4096, 128, bias="bhqk"),
    Workload("biasbh_d128_causal", 2, 16, 16, 4096, 4096, 128, bias="bhqk", causal=True),
    _OF_README["biaskey_gqa_causal"],
    _OF_README["t5_window"],
    _OF_README["evoformer_row"],
    Workload("distances_d64", 2, 16, 16, 4096, 4096, 64, distances=True),
    _OF_README["t5_relative"],
    _OF_README["blockmask_10pct"],
    Workload("blockmask_10pct_prepared", 1, 16, 16, 16384, 16384, 128, kept_blocks=0.10, prepared=True),
    Workload("gpt_oss_window", 1, 64, 8, 8192, 8192, 64, causal=True, window=128, like="GPT-OSS"),
    Workload("gpt_oss_window_sinks", 1, 64, 8, 8192, 8192, 64, causal=True, window=128, sinks=True, like="GPT-OSS"),
    Workload("longformer_16k", 2, 12, 12, 16384, 16384, 64, longformer=(256, 64), like="Longformer"),
    Workload("decode_128k", 1, 32, 8, 1, 131072, 128, bias="bg1k", inference=True),
)

EXACTNESS = (
    Case("mha-127", 127, heads=4),
    Case("mha-causal-129", 129, heads=4, causal=True),
    Case("gqa-255", 255, heads=4, kv_heads=2),
    Case("gqa-causal-129x255", 129, 255, heads=4, kv_heads=2, causal=True, reason="fewer queries than keys, aligned bottom-right"),
    Case("gqa-causal-127x65", 127, 65, heads=4, kv_heads=2, causal=True, reason="more queries than keys: the first rows are empty"),
    Case("mqa-129", 129, heads=4, kv_heads=1),
    Case("mqa-causal-255", 255, heads=4, kv_heads=1, causal=True),
    Case("one-query-1023-keys", 1, 1023, heads=4, kv_heads=2),
    Case("head-dim-64-127", 127, head_dim=64),
    Case("head-dim-80-129", 129, head_dim=80, reason="no power of two"),
    Case("head-dim-128-255", 255, head_dim=128),
    Case("head-dim-256-129", 129, head_dim=256),
    Case("value-dim-96-129", 129, head_dim=64, value_dim=96),
    Case("topk-mask-127", 127, heads=4, mask="bhqk", keep="topk"),
    Case("topk-mask-gqa-causal-bias-129", 129, heads=4, kv_heads=2, mask="bhqk", keep="topk", bias="bhqk", causal=True),
    Case("topk-mask-per-kv-head-255", 255, heads=4, kv_heads=2, mask="bgqk", keep="topk", bias="bg1k"),
    Case("block-mask-255", 255, mask="1hqk", keep="blocks"),
    Case("block-mask-bias-129", 129, mask="11qk", keep="blocks", bias="1hqk"),
    Case("padding-mask-127", 127, mask="b11k"),
    Case("empty-rows-129", 129, mask="bhqk", keep="random-empty-rows", bias="bhqk"),
    Case("bias-bhqk-129", 129, bias="bhqk"),
    Case("bias-1hqk-127", 127, batch=3, bias="1hqk", reason="T5, Swin"),
    Case("bias-11qk-129", 129, batch=3, bias="11qk"),
    Case("bias-b1qk-127", 127, heads=4, bias="b1qk", reason="pair bias shared by the heads"),
    Case("bias-bgqk-129", 129, heads=4, kv_heads=2, bias="bgqk", reason="one bias for each key-value head"),
    Case("bias-bh1k-255", 255, bias="bh1k"),
    Case("bias-bg1k-causal-255", 255, heads=4, kv_heads=2, bias="bg1k", causal=True, reason="dynamic mask attention"),
    Case("bias-b11k-129", 129, heads=4, bias="b11k"),
    Case("bias-bhq1-lse-gradient-127", 127, bias="bhq1", reason="moves lse only: without a gradient of lse its own is 0"),
    Case("bias-1h11-lse-gradient-129", 129, heads=4, bias="1h11"),
    Case("bias-fp32-129", 129, bias="1hqk", bias_dtype=torch.float32),
    Case("bias-by-distance-255", 255, heads=4, bias="1hr", distances=65, reason="T5's as a table"),
    Case("bias-by-distance-gqa-causal-129", 129, heads=4, kv_heads=2, bias="bgr", distances=129, causal=True),
    Case("bias-1023", 1023, bias="1hqk", causal=True),
    Case("window-255", 255, window=(31, 16)),
    Case("window-causal-gqa-1023", 1023, heads=4, kv_heads=2, causal=True, window=(127, 0)),
    Case("softcap-129", 129, head_dim=64, softcap=20.0, bias="1hqk"),
    Case("intervals-documents-255", 255, intervals="documents", causal=True),
    Case("intervals-prefix-127", 127, intervals="prefix", bias="1hqk"),
    Case("intervals-padding-129", 129, intervals="padding"),
    Case("intervals-global-tokens-255", 255, intervals="global", reason="two intervals a key"),
    Case("intervals-per-kv-head-129", 129, heads=4, kv_heads=2, intervals="random", bias="bg1k"),
    Case("transposed-strides-129", 129, heads=4, kv_heads=2, transposed=True, bias="1hqk"),
    Case("lse-gradient-129", 129, bias="bhqk", reason="in the cases of this name lse has an incoming gradient too"),
    Case("lse-gradient-causal-127", 127, heads=4, kv_heads=2, causal=True, mask="b1qk"),
)

EXACTNESS_ON_GPU = (
    Case("gqa-causal-2047", 2047, heads=4, kv_heads=2, head_dim=64, causal=True),
    Case("bias-1hqk-2048", 2048, batch=4, head_dim=64, bias="1hqk"),
    Case("bias-by-distance-2048", 2048, batch=4, head_dim=64, bias="1hr", distances=257),
    Case("topk-mask-bias-4095", 4095, head_dim=128, mask="bhqk", keep="topk", bias="bhqk", causal=True),
    Case("bias-bg1k-causal-4096", 4096, batch=1, heads=4, kv_heads=2, head_dim=128, bias="bg1k", causal=True),
)

QUICK_LENGTH = 129
LSE_GRADIENT = "lse-gradient"
