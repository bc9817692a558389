"""The rows of the matrix: problems as real models have them, by kind. Tensors lie in memory as (B, S, H, D).

A name tells the model or the kind, what stands beside it, and the length where that matters. Rows of benchmarks/speed.py, which are measured
there too, come first. Kinds of which rows drawn at random were behind a peer have joined since.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.workloads import WORKLOADS, Workload
from dmattn.bench.distributions import DISTRIBUTIONS

_OF_SPEED = {workload.name: workload for workload in WORKLOADS}
_NAMED = (
    "plain_d128",
    "plain_d128_causal",
    "plain_d64",
    "bias1h_d64",
    "bias1h_d128",
    "biasbh_d128",
    "biasbh_d128_causal",
    "biaskey_gqa_causal",
    "t5_window",
    "evoformer_row",
    "distances_d64",
    "t5_relative",
    "blockmask_10pct_prepared",
    "gpt_oss_window",
    "gpt_oss_window_sinks",
    "longformer_16k",
    "decode_128k",
)
_ROWS = (
    *(_OF_SPEED[name] for name in _NAMED),  # first, as README's table is of them
    # language models, causal
    Workload("plain_d64_causal", 4, 32, 32, 4096, 4096, 64, causal=True),
    Workload("llama1b_16k", 1, 32, 8, 16384, 16384, 64, causal=True, like="Llama 1B"),
    Workload("llama1b_2k", 4, 32, 8, 2048, 2048, 64, causal=True, like="Llama 1B"),
    Workload("llama8b_512", 16, 32, 8, 512, 512, 128, causal=True, like="Llama 8B"),
    Workload("llama8b_8k_fp16", 1, 32, 8, 8192, 8192, 128, causal=True, dtype="fp16", like="Llama 8B"),
    Workload("plain_d128_16k", 1, 16, 16, 16384, 16384, 128),
    Workload("plain_d128_16k_causal", 1, 16, 16, 16384, 16384, 128, causal=True),
    Workload("one_group_64k", 1, 4, 1, 65536, 65536, 128, causal=True),
    Workload("mistral_window_128k", 1, 8, 2, 131072, 131072, 128, causal=True, window=4096, like="Mistral"),
    Workload("phi2_d80", 2, 32, 32, 2048, 2048, 80, causal=True, like="Phi-2"),
    Workload("phi3_d96_window", 2, 32, 32, 4096, 4096, 96, causal=True, window=2048, like="Phi-3"),
    Workload("causal_d112", 2, 16, 16, 2048, 2048, 112, causal=True),
    Workload("gemma3_d256", 1, 8, 4, 8192, 8192, 256, causal=True, like="Gemma 3"),
    Workload("gemma3_d256_window", 1, 8, 4, 8192, 8192, 256, causal=True, window=1024, like="Gemma 3"),
    Workload("gemma2_softcap", 1, 32, 16, 4096, 4096, 128, causal=True, softcap=50.0, like="Gemma 2"),
    Workload("gemma2_d256_softcap", 1, 8, 4, 8192, 8192, 256, causal=True, softcap=50.0, like="Gemma 2"),
    Workload("causal_d160", 2, 16, 16, 2048, 2048, 160, causal=True),
    Workload("mla_192_128", 1, 16, 16, 4096, 4096, 192, value_dim=128, causal=True, like="DeepSeek"),
    Workload("causal_1001", 8, 16, 16, 1001, 1001, 64, causal=True),
    Workload("packed_documents_8k", 1, 32, 8, 8192, 8192, 128, causal=True, documents=12),
    Workload("varlen_causal_8k", 1, 32, 8, 8192, 8192, 128, causal=True, documents=12, packed=True),
    Workload("sinks_causal_4k", 1, 64, 8, 4096, 4096, 64, causal=True, sinks=True),
    Workload("one_kv_head_2k", 1, 71, 1, 2048, 2048, 64, causal=True, like="Falcon"),
    Workload("two_kv_heads_2k", 4, 14, 2, 2048, 2048, 64, causal=True, like="Qwen 2"),
    Workload("prefix_chunk_2k_of_32k", 1, 32, 8, 2048, 32768, 128, causal=True),
    # decoding
    Workload("decode_4k_b64", 64, 32, 8, 1, 4096, 128, inference=True),
    Workload("decode_4k_b24", 24, 32, 8, 1, 4096, 128, inference=True),
    Workload("decode_2k_b96", 96, 32, 8, 1, 2048, 128, inference=True),
    Workload("decode_2k_b64_mha", 64, 8, 8, 1, 2048, 128, inference=True),
    Workload("decode_3000_b32_mha", 32, 16, 16, 1, 3000, 128, inference=True),
    Workload("decode_4_queries_3000", 32, 16, 16, 4, 3000, 128, causal=True, inference=True),
    Workload("decode_2_queries_d192", 24, 8, 8, 2, 4096, 192, causal=True, inference=True, dtype="fp16"),
    Workload("decode_64k_b24_d64", 24, 12, 2, 1, 65536, 64, bias="b11k", inference=True),
    Workload("decode_32k_b8", 8, 32, 8, 1, 32768, 128, inference=True),
    Workload("decode_4k_b32_pad", 32, 32, 8, 1, 4096, 128, padded=True, inference=True),
    Workload("decode_1k_b16_d64", 16, 32, 8, 1, 1024, 64, inference=True),
    Workload("decode_4k_b4_d64", 4, 32, 32, 1, 4096, 64, inference=True),
    Workload("decode_8_queries_8k", 8, 32, 8, 8, 8192, 128, causal=True, inference=True),
    Workload("decode_4_queries_d256", 4, 8, 4, 4, 16384, 256, causal=True, inference=True),
    Workload("decode_bias_512", 32, 16, 16, 1, 512, 64, bias="1hqk", inference=True, like="T5"),
    Workload("decode_bias_b32_pad", 32, 16, 16, 1, 2048, 64, bias="1hqk", padded=True, inference=True),
    Workload("decode_bias_300_d96", 2, 4, 1, 1, 300, 96, bias="1hqk", inference=True),
    Workload("decode_300_d256", 4, 8, 8, 1, 300, 256, inference=True),
    # encoders, vision, images
    Workload("bert_512_pad", 32, 12, 12, 512, 512, 64, padded=True, like="BERT"),
    Workload("bert_128_pad", 64, 12, 12, 128, 128, 64, padded=True, like="BERT"),
    Workload("modernbert_8k_window", 1, 12, 12, 8192, 8192, 64, window=128, like="ModernBERT"),
    Workload("modernbert_8k_documents", 1, 12, 12, 8192, 8192, 64, documents=16, like="ModernBERT"),
    Workload("modernbert_8k_varlen", 1, 12, 12, 8192, 8192, 64, documents=16, packed=True, like="ModernBERT"),
    Workload("window_1024_d64", 2, 16, 16, 8192, 8192, 64, window=1024),
    Workload("window_512_d128", 2, 16, 16, 8192, 8192, 128, window=512),
    Workload("bert_16k_varlen_128", 1, 12, 12, 16384, 16384, 64, documents=128, packed=True, like="BERT"),
    Workload("vit_197", 128, 12, 12, 197, 197, 64, like="ViT"),
    Workload("siglip_729_d72", 32, 16, 16, 729, 729, 72, like="SigLIP"),
    Workload("dit_256_d72", 32, 16, 16, 256, 256, 72, like="DiT"),
    Workload("vit_giant_257_d88", 32, 16, 16, 257, 257, 88, like="ViT-g"),
    Workload("vit_huge_257_d80", 64, 16, 16, 257, 257, 80, like="ViT-Huge"),
    Workload("plain_d32_1023", 8, 16, 16, 1023, 1023, 32),
    Workload("sd_d40", 4, 8, 8, 4096, 4096, 40, like="Stable Diffusion"),
    Workload("sd_d160_256", 16, 8, 8, 256, 256, 160, like="Stable Diffusion"),
    Workload("narrow_gqa_300_d32", 32, 24, 4, 300, 300, 32),
    Workload("sdxl_cross_77", 8, 20, 20, 1024, 77, 64, like="SDXL"),
    Workload("sd_cross_77_d40", 8, 8, 8, 4096, 77, 40, like="Stable Diffusion"),
    Workload("cross_257_d40", 8, 8, 8, 2048, 257, 40),
    Workload("whisper_cross_1500", 8, 20, 20, 448, 1500, 64, like="Whisper"),
    Workload("perceiver_cross_50k", 2, 8, 8, 512, 50176, 128, like="Perceiver"),
    Workload("one_head_4k", 1, 1, 1, 4096, 4096, 128),
    Workload("four_heads_1k", 1, 4, 4, 1024, 1024, 64),
    Workload("sixteen_heads_2k", 1, 16, 16, 2048, 2048, 64),
    Workload("twenty_heads_2k_causal", 1, 20, 20, 2048, 2048, 64, causal=True),
    Workload("twenty_heads_2k_d128_causal", 1, 20, 20, 2048, 2048, 128, causal=True),
    Workload("four_heads_cross_8k", 1, 4, 4, 300, 8192, 64),
    Workload("four_heads_cross_4k_fp32", 1, 4, 4, 512, 4096, 64, dtype="fp32"),
    Workload("two_heads_1k_d256_fp32", 1, 2, 2, 1024, 1024, 256, dtype="fp32"),
    Workload("one_head_2k_fp32", 1, 1, 1, 2048, 2048, 128, dtype="fp32"),
    Workload("eight_heads_1k_causal_fp32", 2, 8, 8, 1024, 1024, 64, causal=True, dtype="fp32"),
    Workload("fp32_d64", 2, 16, 16, 2048, 2048, 64, dtype="fp32"),
    Workload("fp32_d128_causal", 1, 16, 16, 2048, 2048, 128, causal=True, dtype="fp32"),
    Workload("fp32_d256", 4, 8, 8, 1024, 1024, 256, dtype="fp32"),
    # a bias of pairs
    Workload("t5_odd_1000", 8, 12, 12, 1000, 1000, 64, bias="1hqk", like="T5"),
    Workload("t5_odd_1001", 8, 12, 12, 1001, 1001, 64, bias="1hqk", like="T5"),
    Workload("t5_1024", 8, 12, 12, 1024, 1024, 64, bias="1hqk", like="T5"),
    Workload("t5_512_pad", 16, 12, 12, 512, 512, 64, bias="1hqk", padded=True, like="T5"),
    Workload("t5_1000_pad", 8, 12, 12, 1000, 1000, 64, bias="1hqk", padded=True, like="T5"),
    Workload("bias_pad_1024_d128", 16, 16, 16, 1024, 1024, 128, bias="1hqk", padded=True),
    Workload("swin_49", 4096, 12, 12, 49, 49, 32, bias="1hqk", like="Swin"),
    Workload("swin_own_49", 2048, 6, 6, 49, 49, 32, bias="bhqk", like="Swin"),
    Workload("graphs_128_d24", 64, 32, 32, 128, 128, 24, bias="bhqk", padded=True, like="Graphormer"),
    Workload("windows_100", 512, 16, 16, 100, 100, 32, bias="bhqk"),
    Workload("rows_128_d24", 2048, 8, 8, 128, 128, 24, bias="11qk"),
    Workload("bias_own_160_d32", 512, 8, 8, 160, 160, 32, bias="bhqk"),
    Workload("triangle_317_pad", 317, 4, 4, 317, 317, 32, bias="1hqk", padded=True, like="AlphaFold"),
    Workload("extra_msa_384_d8", 512, 8, 8, 384, 384, 8, bias="1hqk", padded=True, like="AlphaFold 2"),
    Workload("triangle_256", 256, 4, 4, 256, 256, 32, bias="1hqk", like="AlphaFold"),
    Workload("tri_att_384", 384, 4, 4, 384, 384, 32, bias="1hqk", padded=True, like="AlphaFold"),
    Workload("triangle_768", 768, 4, 4, 768, 768, 32, bias="1hqk", like="AlphaFold"),
    Workload("tri_att_768", 768, 4, 4, 768, 768, 32, bias="1hqk", padded=True, like="AlphaFold"),
    Workload("pairformer_single_d24", 8, 16, 16, 768, 768, 24, bias="bhqk", padded=True, like="AlphaFold 3"),
    Workload("bias_heads_share_d64", 4, 16, 16, 2048, 2048, 64, bias="b1qk"),
    Workload("bias_heads_share_d32", 36, 8, 8, 2048, 2048, 32, bias="b1qk"),
    Workload("bias_all_share_d96", 8, 8, 8, 2048, 2048, 96, bias="11qk"),
    Workload("bias_all_share_900", 18, 12, 12, 2500, 900, 64, bias="11qk", dtype="fp16"),
    Workload("bias_gqa_causal", 2, 16, 4, 2048, 2048, 128, bias="bgqk", causal=True),
    Workload("bias_window_causal", 2, 16, 16, 4096, 4096, 128, bias="1hqk", causal=True, window=512),
    Workload("bias_documents", 2, 16, 16, 4096, 4096, 64, bias="1hqk", documents=8),
    # bool masks of pairs
    Workload("mask_pairs_d64", 4, 16, 16, 2048, 2048, 64, mask="b1qk"),
    Workload("mask_pairs_2001_d128", 4, 16, 16, 2001, 2001, 128, mask="b1qk"),
    Workload("mask_pairs_heads_gqa", 2, 16, 4, 2048, 2048, 128, mask="bhqk"),
    Workload("mask_pairs_512_d64", 16, 16, 16, 512, 512, 64, mask="b1qk"),
    Workload("swin_shifted_49", 512, 12, 12, 49, 49, 32, bias="1hqk", mask="b1qk", like="Swin"),
    Workload("bias_mask_pairs_d64", 8, 12, 12, 1024, 1024, 64, bias="1hqk", mask="b1qk", like="T5"),
    Workload("bias_mask_pairs_d128", 4, 16, 16, 2048, 2048, 128, bias="1hqk", mask="b1qk"),
    Workload("bias_own_mask_256_d32", 32, 8, 8, 256, 256, 32, bias="bhqk", mask="b1qk"),
    Workload("bias_share_mask_pairs", 16, 12, 12, 768, 768, 64, bias="b1qk", mask="b1qk"),
    Workload("bias_query_mask_d24", 128, 8, 8, 200, 200, 24, bias="1hq1", mask="b1qk"),
    Workload("mask_pairs_300_gqa_d32", 32, 24, 4, 300, 300, 32, mask="b1qk"),
    Workload("mask_pairs_heads_d24", 10, 2, 2, 2000, 2000, 24, mask="bhqk"),
    Workload("mask_own_1025_d32", 68, 3, 3, 1025, 1025, 32, causal=True, mask="bhqk"),
    Workload("mask_own_1500_d32", 30, 6, 6, 1500, 1500, 32, mask="bhqk"),
    Workload("mask_pairs_197", 128, 12, 12, 197, 197, 64, mask="b1qk", like="ViT"),
    Workload("table_mask_197_d32", 256, 12, 12, 197, 197, 32, table=257, mask="1hqk"),
    Workload("table_mask_pairs", 8, 12, 12, 1024, 1024, 64, table=257, mask="b1qk", like="T5"),
    Workload("bias_two_heads_2k", 1, 2, 2, 2048, 2048, 128, bias="bhqk"),
    Workload("bias_softcap", 2, 16, 16, 2048, 2048, 128, bias="1hqk", softcap=30.0),
    Workload("bias_cross", 8, 12, 12, 512, 1500, 64, bias="1hqk"),
    Workload("bias_cross_own", 4, 16, 16, 448, 1500, 64, bias="bhqk", like="Whisper"),
    Workload("bias_d80_729", 16, 16, 16, 729, 729, 80, bias="1hqk"),
    Workload("bias_d40_1536", 9, 3, 3, 1536, 1536, 40, bias="1hqk"),
    Workload("bias_d56_pad_1000", 8, 12, 12, 1000, 1000, 56, bias="1hqk", padded=True),
    Workload("bias_own_d48_3000", 1, 12, 12, 3000, 3000, 48, bias="bhqk"),
    Workload("bias_d256", 1, 8, 8, 4096, 4096, 256, bias="bhqk"),
    Workload("bias_d256_shared", 2, 8, 8, 2048, 2048, 256, bias="1hqk"),
    Workload("bias_d160", 2, 8, 8, 2048, 2048, 160, bias="1hqk"),
    Workload("bias_192_128", 1, 16, 16, 2048, 2048, 192, value_dim=128, bias="bhqk", causal=True),
    Workload("bias_fp16", 4, 16, 16, 2048, 2048, 64, bias="1hqk", dtype="fp16"),
    Workload("swin_49_fp32", 1024, 12, 12, 49, 49, 32, bias="1hqk", dtype="fp32"),
    Workload("triangle_256_fp32", 128, 4, 4, 256, 256, 32, bias="1hqk", padded=True, dtype="fp32"),
    Workload("gqa_80_fp32", 512, 16, 4, 80, 80, 64, bias="1hqk", mask="b1qk", dtype="fp32"),
    Workload("bias_key_500_d96_fp32", 9, 12, 6, 500, 500, 96, bias="bh1k", padded=True, dtype="fp32"),
    Workload("gqa_mask_197_d96_fp32", 44, 24, 6, 197, 197, 96, mask="11qk", dtype="fp32"),
    Workload("gqa_mask_127_fp32", 48, 12, 3, 100, 127, 64, mask="bhqk", dtype="fp32"),
    Workload("bias_fp32", 1, 8, 8, 2048, 2048, 64, bias="1hqk", dtype="fp32"),
    # other biases
    Workload("bias_key_d64", 4, 16, 16, 4096, 4096, 64, bias="bh1k"),
    Workload("bias_key_shared_1001", 8, 12, 12, 1001, 1001, 64, bias="b11k"),
    Workload("bias_query_d64", 4, 16, 16, 4096, 4096, 64, bias="bhq1"),
    Workload("alibi_causal", 2, 32, 32, 2048, 2048, 128, alibi=True, causal=True),
    Workload("alibi_pad", 4, 16, 16, 2048, 2048, 128, alibi=True, padded=True),
    Workload("alibi_gqa_2k", 1, 16, 4, 2048, 2048, 64, alibi=True),
    Workload("alibi_d32", 16, 16, 16, 1024, 1024, 32, alibi=True),
    Workload("t5_relative_d32", 8, 8, 8, 2048, 2048, 32, table=257, like="T5"),
    Workload("t5_relative_causal", 4, 16, 16, 2048, 2048, 64, table=257, causal=True, like="T5"),
    Workload("t5_relative_d128_window", 2, 16, 16, 4096, 4096, 128, table=257, window=1024, like="T5"),
    Workload("t5_relative_pad_1000", 8, 12, 12, 1000, 1000, 64, table=257, padded=True, like="T5"),
    Workload("t5_relative_documents", 2, 16, 16, 4096, 4096, 64, table=257, documents=8, like="T5"),
    Workload("distances_d32", 4, 8, 8, 2048, 2048, 32, distances=True),
    Workload("factors_d32_causal", 4, 8, 8, 2048, 2048, 32, factors=4, causal=True),
    Workload("factors_d64", 2, 16, 16, 4096, 4096, 64, factors=16),
    # plain_d128 again, with other inputs
    *(replace(_OF_SPEED["plain_d128"], name=f"plain_d128_{name}", distribution=name) for name in DISTRIBUTIONS),
    Workload("llama1b_2k_trained", 4, 32, 8, 2048, 2048, 64, causal=True, distribution="trained", like="Llama 1B"),
)
MATRIX = tuple(replace(workload, sequence_first=True) for workload in _ROWS)


def under(row: Workload, distribution: str) -> Workload:
    """The row with inputs of another distribution, which its name has, too."""
    return replace(row, name=f"{row.name}_{distribution}", distribution=distribution)


def row_of(name: str) -> Workload:
    """The row of a name, which may be one of :func:`under`.

    Raises:
        ValueError: there is none.
    """
    for row in MATRIX:
        if row.name == name:
            return row
        if name.startswith(f"{row.name}_") and (rest := name.removeprefix(f"{row.name}_")) in DISTRIBUTIONS:
            return under(row, rest)
    raise ValueError(f"no row is called {name}")
