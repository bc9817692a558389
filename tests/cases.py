"""Named attention problems, each with the reason it is here. Lengths are small and odd, so that Triton's interpreter gets through them."""

from __future__ import annotations

import os

import pytest
import torch
from conftest import NEEDS_CUDA

from dmattn.equivalence import Case
from dmattn.execution.backend import interpreting

GQA = dict(heads=4, kv_heads=2)
MQA = dict(heads=3, kv_heads=1)

HEADS_AND_LENGTHS = (
    Case("mha-37", 37, reason="nothing but softmax(QK)V"),
    Case("gqa-37x65", 37, 65, **GQA, reason="two query heads share a key-value head, dK and dV sum over them"),
    Case("mqa-19x37", 19, 37, **MQA, reason="all query heads share one key-value head"),
    Case("one-batch-row-one-head-37", 37, batch=1, heads=1, reason="axes of size 1 are both full and broadcast"),
    Case("causal-65", 65, causal=True, reason="tiles on, below and above the diagonal"),
    Case("causal-more-keys-19x65", 19, 65, causal=True, reason="bottom-right alignment: every query sees at least Sk - Sq + 1 keys"),
    Case("causal-more-queries-65x19", 65, 19, causal=True, reason="bottom-right alignment leaves the first Sq - Sk rows empty"),
    Case("gqa-causal-37x65", 37, 65, **GQA, causal=True, reason="causal bounds of the loop over queries, for each head of a group"),
    Case("one-query-1x65", 1, 65, reason="decoding: one row of a tile is real"),
    Case("one-query-causal-gqa-1x37", 1, 37, **GQA, causal=True, reason="a causal decoding step sees all keys"),
    Case("one-key-37x1", 37, 1, reason="softmax of one score is 1: dQ and dK are zero but for the gradient of lse"),
    Case("one-key-causal-19x1", 19, 1, causal=True, reason="only the last query sees the only key"),
    Case("one-by-one", 1, 1, reason="the smallest problem there is"),
    Case("whole-tiles-64x32", 64, 32, reason="lengths that are multiples of a tile take the path without bounds"),
    Case("whole-tiles-in-keys-only-37x64", 37, 64, reason="bounds on the queries and none on the keys"),
    Case("whole-tiles-in-queries-only-32x37", 32, 37, reason="bounds on the keys and none on the queries"),
    Case("three-heads-mqa-65x37", 65, 37, **MQA, reason="a row past the end of one head is the first row of the next head"),
    Case("transposed-layout-37x65", 37, 65, **GQA, transposed=True, reason="(B, S, H, D) in memory, as models hand it over"),
    Case("transposed-layout-causal-bias-37", 37, transposed=True, causal=True, bias="bhqk", reason="gradients take the transposed strides"),
)

HEAD_DIMS = tuple(
    Case(f"head-dim-{head_dim}-causal-bias-19x37", 19, 37, head_dim=head_dim, causal=True, bias="bhqk", reason=reason)
    for head_dim, reason in (
        (1, "a head dim of one is padded to 16"),
        (8, "smaller than what a matrix product takes"),
        (16, "the smallest that a matrix product takes"),
        (20, "no power of two and no multiple of 8"),
        (40, "padded to 64"),
        (64, "a common head dim"),
        (96, "padded to 128"),
        (128, "a common head dim"),
    )
) + (
    Case("narrow-values-32-over-8", 37, 19, value_dim=8, bias="1hqk", reason="value head dim below the query's"),
    Case("wide-values-20-over-40", 19, 37, head_dim=20, value_dim=40, **GQA, causal=True, reason="value head dim above the query's"),
    Case("values-of-one-dim", 19, 37, head_dim=16, value_dim=1, reason="delta sums over a single value dim"),
)

MASK_REASONS = {
    "bhqk": "a mask of its own for every pair",
    "1hqk": "a mask shared by the batch",
    "b1qk": "a mask shared by the heads, as padding with causal makes it",
    "11qk": "one mask for everything",
    "bgqk": "one mask for each key-value head",
    "1gqk": "one mask for each key-value head, shared by the batch",
    "bh1k": "a key hidden from all queries of a head",
    "bg1k": "a key hidden from all queries of a group",
    "b11k": "key padding",
    "1h1k": "a key hidden per head",
    "111k": "a key hidden from everyone",
    "bhq1": "a query that sees all or nothing",
    "1hq1": "a query that sees all or nothing, per head",
    "11q1": "a query that sees all or nothing, for everyone",
    "bh11": "a head switched on or off in each batch row",
    "1h11": "a head switched on or off",
    "b111": "a batch row switched on or off",
}
MASKS = tuple(
    Case(f"gqa-random-mask-{axes}-37x65" if "g" in axes else f"random-mask-{axes}-37x65", 37, 65, mask=axes, reason=reason, **GQA if "g" in axes else {})
    for axes, reason in MASK_REASONS.items()
) + (
    Case("empty-rows-mask-37x65", 37, 65, mask="bhqk", keep="random-empty-rows", reason="every third row has nothing to attend"),
    Case("gqa-empty-rows-mask-bias-19x37", 19, 37, **GQA, mask="b1qk", keep="random-empty-rows", bias="bgqk", reason="no gradient of the bias in an empty row"),
    Case("all-masked-37", 37, mask="b1qk", keep="nothing", bias="1hqk", reason="nothing to attend anywhere: zeros, and -inf in lse"),
    Case("topk-mask-37x65", 37, 65, mask="bhqk", keep="topk", reason="the sparse mask of dynamic mask attention"),
    Case("gqa-topk-mask-causal-bias-65", 65, **GQA, mask="bgqk", keep="topk", causal=True, bias="bgqk", reason="a dynamic mask as models use it"),
    Case("whole-empty-tiles-65x97", 65, 97, batch=1, mask="11qk", keep="blocks", bias="bhqk", reason="empty tiles are skipped, their dBias is written all the same"),
    Case("whole-empty-tiles-shared-bias-65x97", 65, 97, mask="11qk", keep="blocks", bias="11qk", heads=1, reason="empty tiles in the shared dBias"),
    Case("blocked-mask-37x65", 37, 65, mask="bhqk", blocked=True, reason="the bits of a BlockMask for those of a bool tensor"),
    Case("blocked-mask-two-blocks-of-keys-37x140", 37, 140, batch=1, heads=1, mask="11qk", keep="blocks", blocked=True, bias="1hqk", reason="words of another block, and tiles that need none"),
    Case("gqa-blocked-mask-causal-bias-140x37", 140, 37, batch=1, **GQA, mask="1gqk", keep="random-empty-rows", blocked=True, bias="bgqk", causal=True, reason="words of queries in the kernel that walks them"),
    Case("blocked-mask-window-bias-per-key-65x37", 65, 37, mask="b1qk", blocked=True, bias="bh1k", window=(20, 7), softcap=2.0, reason="beside all other rules"),
    Case("blocked-mask-in-one-tile-19x23", 19, 23, mask="b1qk", keep="topk", blocked=True, bias="1hqk", dropout_p=0.2, reason="a tile of fewer pairs than a word's"),
    Case("gqa-blocked-mask-by-head-one-query-1x150", 1, 150, **GQA, mask="bhqk", blocked=True, reason="decoding under a block mask"),
    Case("whole-empty-tiles-causal-gqa-65", 65, batch=1, **GQA, mask="1hqk", keep="blocks", causal=True, reason="tiles skipped by the mask and by causal"),
)  # fmt: skip

BIAS_REASONS = {
    "bhqk": "the dQ kernel stores dS",
    "1hqk": "T5 and Swin: shared by the batch",
    "b1qk": "pair bias shared by the heads",
    "11qk": "one bias for everything",
    "bgqk": "one bias for each key-value head",
    "1gqk": "one bias for each key-value head, shared by the batch",
    "bh1k": "per key: column sums in the dK and dV kernel",
    "bg1k": "per key and key-value head, as dynamic mask attention has it",
    "b11k": "per key, shared by the heads",
    "1h1k": "per key, shared by the batch",
    "111k": "per key, shared by all",
    "bhq1": "per query: the gradient is that of lse",
    "1hq1": "per query, shared by the batch",
    "bgq1": "per query and key-value head",
    "bh11": "a scalar for each batch row and head",
    "1h11": "a scalar for each head",
    "1111": "one scalar",
}
BIASES = (
    tuple(
        Case(f"gqa-bias-{axes}-37x65" if "g" in axes else f"bias-{axes}-37x65", 37, 65, bias=axes, reason=reason, **GQA if "g" in axes else {})
        for axes, reason in BIAS_REASONS.items()
    )
    + tuple(
        Case(f"{name}-bias-{axes}-19x37", 19, 37, bias=axes, bias_dtype=dtype, reason="the bias keeps its own dtype, and so does its gradient")
        for axes in ("bhqk", "1hqk", "b11k", "1hq1")
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32))
    )
    + (
        Case("fp64-bias-1hqk-19x37", 19, 37, bias="1hqk", bias_dtype=torch.float64, reason="a float64 bias with a narrower query"),
        Case("gqa-causal-random-mask-bias-19x37", 19, 37, **GQA, causal=True, mask="bhqk", bias="bhqk", reason="everything at once"),
        Case(
            "mqa-causal-mask-shared-bias-65x37", 65, 37, **MQA, causal=True, mask="b1qk", bias="1hqk", reason="empty rows in the shared dBias"
        ),
        Case("causal-bias-per-key-65x19", 65, 19, causal=True, bias="bh1k", reason="empty rows in the per-key dBias"),
        Case("causal-bias-per-query-65x19", 65, 19, causal=True, bias="bhq1", reason="an empty row has no dBias, whatever dLSE is"),
        Case("padded-bias-19x37", 19, 37, bias="bhqk", padded=True, reason="rows of dBias have the padding of the bias"),
        Case(
            "gqa-padded-shared-bias-causal-65x37",
            65,
            37,
            **GQA,
            bias="1gqk",
            padded=True,
            causal=True,
            reason="parts of dBias lie otherwise than their sum",
        ),
        Case("five-batch-rows-share-a-bias-19x37", 19, 37, batch=5, heads=1, bias="1hqk", reason="members divide unevenly over programs"),
    )
)

OPTIONS = (
    Case("softcap-37x65", 37, 65, softcap=1.5, reason="scores reach the cap, so its derivative matters"),
    Case("gqa-softcap-causal-bias-65x37", 65, 37, **GQA, softcap=2.0, causal=True, bias="1hqk", reason="the bias is added after the cap"),
    Case("softcap-mask-bias-per-key-19x37", 19, 37, softcap=0.7, mask="bhqk", bias="b11k", reason="masked after the cap"),
    Case("large-softcap-37", 37, softcap=50.0, bias="bhqk", reason="Gemma 2's cap: tanh near zero, where a quotient cancels"),
    Case("scale-37x65", 37, 65, scale=0.5, reason="a scale of the caller's"),
    Case("scale-one-bias-37", 37, head_dim=16, scale=1.0, bias="1hqk", reason="T5 does not scale"),
    Case("scale-zero-19x37", 19, 37, scale=0.0, bias="bhqk", reason="the bias alone decides; dQ and dK are zero"),
    Case("scale-negative-softcap-19x37", 19, 37, scale=-0.3, softcap=1.0, reason="the sign goes through the cap"),
    Case("window-5-65", 65, window=5, reason="one integer for both sides"),
    Case("window-3-2-37x65", 37, 65, window=(3, 2), reason="sides of different width, aligned bottom-right"),
    Case("window-3-2-65x37", 65, 37, window=(3, 2), reason="the window leaves the first rows empty"),
    Case("window-left-only-37x65", 37, 65, window=(4, None), bias="bhqk", reason="unbounded to the right"),
    Case("window-right-only-65x37", 65, 37, window=(None, 4), bias="bh1k", reason="unbounded to the left"),
    Case("window-causal-gqa-65", 65, **GQA, causal=True, window=(7, 0), reason="Mistral's window of 8 keys"),
    Case("window-causal-overrides-right-37x65", 37, 65, causal=True, window=(9, 5), reason="causal is the tighter bound on the right"),
    Case("window-wider-than-the-sequence-37", 37, window=1000, reason="a window that hides nothing"),
    Case("window-zero-37", 37, window=0, bias="1hqk", reason="every query sees its own key alone"),
    Case("window-zero-more-queries-37x19", 37, 19, window=0, reason="one key each, and empty rows"),
    Case("window-of-2-to-the-31-19x37", 19, 37, window=2**31 - 1, reason="a side that people take for unbounded, and that positions cannot exceed"),
    Case("window-of-2-to-the-63-37x19", 37, 19, window=(2**63, 3), reason="beyond 64 bits"),
    Case("window-unbounded-19x37", 19, 37, window=(None, None), reason="no bound on either side"),
    Case("window-mask-bias-65", 65, window=(20, 3), mask="b1qk", bias="1hqk", reason="window, mask and shared dBias"),
    Case("window-past-whole-tiles-97x65", 97, 65, batch=1, heads=1, window=(10, 3), bias="bhqk", reason="tiles the window never visits get a zero dBias"),
)  # fmt: skip

INTERVALS = (
    Case("documents-65", 65, intervals="documents", reason="packed sequences"),
    Case("documents-causal-gqa-bias-65", 65, **GQA, intervals="documents", causal=True, bias="1hqk", reason="packed decoder sequences"),
    Case("documents-window-bias-per-key-65", 65, intervals="documents", causal=True, window=(12, 0), bias="bh1k", reason="all bounds on the loops at once"),
    Case("prefix-37x65", 37, 65, intervals="prefix", bias="bhqk", reason="a bidirectional prefix of another length in each batch row"),
    Case("prefix-more-queries-65x37", 65, 37, intervals="prefix", reason="rows that see nothing but the prefix"),
    Case("padding-37x65", 37, 65, intervals="padding", bias="b1qk", reason="padded keys"),
    Case("padding-causal-mqa-65x37", 65, 37, **MQA, intervals="padding", causal=True, reason="padded keys, and empty rows by causal"),
    Case("interval-causal-37x65", 37, 65, intervals="causal", reason="causal as intervals, shared by batch and heads"),
    Case("interval-window-softcap-65x37", 65, 37, intervals="window", softcap=2.0, bias="bh1k", reason="a window as intervals"),
    Case("random-intervals-37x65", 37, 65, intervals="random", bias="bhqk", reason="arbitrary intervals, some empty, some past the end"),
    Case("gqa-random-intervals-65x37", 65, 37, **GQA, intervals="random", bias="1gqk", reason="intervals for each key-value head"),
    Case("gqa-random-intervals-per-head-19x37", 19, 37, **GQA, intervals="random-per-head", bias="bg1k", reason="intervals for each query head"),
    Case("random-intervals-shared-65", 65, intervals="random-shared", causal=True, window=(30, None), bias="11qk", reason="one interval per key for everyone"),
    Case("random-intervals-one-query-1x37", 1, 37, intervals="random", reason="decoding under intervals"),
    Case("global-tokens-97", 97, batch=1, intervals="global", reason="Longformer: a window, and queries and keys that see and are seen by all"),
    Case("gqa-global-tokens-causal-shared-bias-65", 65, **GQA, intervals="global", causal=True, bias="1hqk", reason="tiles between two intervals in a shared dBias"),
    Case("gqa-two-intervals-dense-bias-97x65", 97, 65, **GQA, intervals="random-two", bias="bhqk", reason="two intervals a key that may overlap or be empty; dBias of tiles in neither"),
    Case("two-intervals-per-head-37x65", 37, 65, **GQA, intervals="random-two-per-head", bias="bg1k", reason="two for each query head, sums over a group"),
    Case("two-intervals-shared-window-65x97", 65, 97, intervals="random-two-shared", window=(40, 9), softcap=2.0, bias="11qk", reason="two for everyone, inside a window"),
    Case("two-intervals-dropout-37x65", 37, 65, intervals="random-two", dropout_p=0.3, reason="dropout counts all keys, seen or not"),
    Case("two-intervals-one-query-1x37", 1, 37, intervals="random-two", reason="decoding under two intervals"),
    Case("documents-with-prefix-65", 65, intervals="document-prefix", bias="bh1k", reason="a prefix of each packed document"),
    Case("chunked-causal-37x65", 37, 65, intervals="chunked", causal=True, bias="bhqk", reason="Llama 4's local layers, left padding of other lengths"),
)  # fmt: skip

FAULTS = (
    Case("one-key-head-dim-40-37x1", 37, 1, head_dim=40, scale=1.63, reason="float32: large terms cancel in dS, their roundings remain"),
    Case("narrow-values-39-over-10-63x69", 63, 69, batch=1, head_dim=39, value_dim=10, intervals="padding", bias="111k", causal=True,
         reason="ptxas 12.8 loses a matrix operand's address where operands of two widths share memory"),
    Case("narrow-values-38-over-18-69x34", 69, 34, **GQA, head_dim=38, value_dim=18, mask="1hq1", bias="1hq1", bias_dtype=torch.float32, causal=True,
         window=3, reason="the same with a branch in the loop"),
    Case("fp32-bias-softcap-head-dim-39-60x42", 60, 42, batch=1, head_dim=39, bias="1gqk", bias_dtype=torch.float32, softcap=34.5, transposed=True,
         reason="LLVM in Triton 3.6 packs a tile's start and a thread index into one register, and the one runs over into the other"),
    Case("fp32-bias-softcap-head-dim-36-17x35", 17, 35, batch=3, heads=2, kv_heads=1, head_dim=36, bias="11qk", bias_dtype=torch.float32, causal=True,
         softcap=46.4, reason="the same in a shared dBias"),
)  # fmt: skip

WINDOWS = (
    Case("window-in-one-tile-19x32", 19, 32, transposed=True, bias="1hqk", reason="all pairs of a head in one tile, bounds on the queries"),
    Case("window-in-one-tile-32x23", 32, 23, bias="bhqk", causal=True, reason="bounds on the keys, empty rows, dBias of every member"),
    Case("window-of-one-pair", 1, 1, bias="1hqk", reason="the smallest tile there is"),
    Case("windows-in-parts-7x9", 7, 9, batch=5, head_dim=64, bias="1hqk", reason="several members to a part, the last part with fewer"),
    Case("windows-in-parts-shared-by-heads-7x5", 7, 5, batch=3, heads=3, head_dim=64, bias="11qk", mask="1hqk", reason="members are batch entries and heads"),
    Case("window-bias-shared-by-heads-19", 19, batch=3, bias="b1qk", mask="b11k", reason="a slice for each batch entry"),
    Case("window-empty-rows-19x23", 19, 23, mask="b1qk", keep="random-empty-rows", bias="1hqk", softcap=2.0, reason="delta of an empty row is 0, whatever dLSE is"),
    Case("window-all-masked-19", 19, mask="b1qk", keep="nothing", bias="bhqk", reason="zeros everywhere"),
    Case("window-dropout-17x29", 17, 29, bias="1hqk", dropout_p=0.3, reason="delta counts what is dropped"),
    Case("window-dropout-key-bias-29x17", 29, 17, bias="b11k", dropout_p=0.3, softcap=3.0, reason="column sums of what is kept"),
    Case("window-key-bias-shared-by-all-23", 23, batch=5, bias="111k", window=(4, 3), reason="a bias that stays on chip without a sum of it"),
    Case("window-query-bias-intervals-31x19", 31, 19, bias="1hq1", intervals="random", head_dim=20, value_dim=40, reason="its gradient needs no sum in the kernel"),
    Case("window-grouped-19", 19, **GQA, bias="1hqk", reason="keys shared by heads go to the kernels that sum over a group"),
)  # fmt: skip

# Tables of distances; their names say how they lie to the pairs.
DISTANCES = (
    Case("distances-table-longer-than-needed-37", 37, bias="1hr", distances=301, reason="places beyond the pairs' own have zero gradient"),
    Case("distances-exact-table-37", 37, bias="1hr", distances=73, reason="every entry is one diagonal"),
    Case("distances-saturating-both-ends-65", 65, bias="1hr", distances=21, reason="most pairs take an end"),
    Case("distances-saturating-causal-65", 65, bias="1hr", distances=33, zero=32, causal=True, reason="the last entry is the diagonal"),
    Case("distances-causal-zero-inside-65", 65, bias="1hr", distances=17, causal=True, reason="entries of hidden distances"),
    Case("distances-gqa-by-key-head-causal-37x65", 37, 65, **GQA, bias="1gr", distances=64, zero=40, causal=True, reason="more keys than queries"),
    Case("distances-gqa-one-table-window-65x37", 65, 37, **GQA, bias="11r", distances=50, zero=20, window=(30, 9), reason="more queries than keys"),
    Case("distances-gqa-by-batch-and-head-window-65x19", 65, 19, **GQA, bias="bhr", distances=9, window=(24, 0), reason="rows without a key"),
    Case("distances-by-batch-alone-37", 37, heads=3, kv_heads=1, bias="b1r", distances=15, reason="heads share the table of a batch entry"),
    Case("distances-one-number-37", 37, bias="11r", distances=1, reason="both ends are the same entry"),
    Case("distances-two-numbers-gqa-37", 37, **GQA, bias="b1r", distances=2, zero=1, reason="no entry is between the ends"),
    Case("distances-beyond-the-start-19x40", 19, 40, bias="1hr", distances=300, zero=0, causal=True, reason="all pairs take the first entry"),
    Case("distances-zero-at-the-end-19x65", 19, 65, bias="1hr", distances=7, zero=6, reason="all keys after the query take the last entry"),
    Case("distances-one-query-1x65", 1, 65, batch=3, bias="1hr", distances=19, zero=3, reason="decoding"),
    Case("distances-one-query-gqa-1x65", 1, 65, **GQA, bias="1hr", distances=150, zero=140, causal=True, reason="decoding, heads in one tile"),
    Case("distances-one-key-37x1", 37, 1, bias="1hr", distances=11, reason="one column of distances"),
    Case("distances-mask-random-37x65", 37, 65, bias="1hr", distances=31, mask="bhqk", reason="a mask of pairs beside it"),
    Case("distances-mask-blocks-empty-rows-65", 65, bias="1hr", distances=31, mask="11qk", keep="random-empty-rows", reason="rows without a key"),
    Case("distances-mask-of-blocks-96", 96, bias="1hr", distances=41, mask="1hqk", keep="blocks", reason="full tiles, where nothing that hides is asked"),
    Case("distances-mask-of-keys-37", 37, bias="bhr", distances=31, mask="b11k", reason="padding"),
    Case("distances-documents-65", 65, bias="1hr", distances=31, intervals="documents", reason="intervals beside it"),
    Case("distances-random-intervals-gqa-65x37", 65, 37, **GQA, bias="1hr", distances=31, intervals="random-per-head", reason="intervals by head"),
    Case("distances-prefix-causal-65", 65, bias="1gr", distances=40, intervals="prefix", reason="intervals that end at different queries"),
    Case("distances-softcap-37", 37, bias="1hr", distances=25, softcap=3.0, reason="the bias is added after the cap"),
    Case("distances-dropout-gqa-37x40", 37, 40, **GQA, bias="1hr", distances=25, dropout_p=0.3, reason="gradients through what is kept"),
    Case("distances-half-table-65", 65, bias="1hr", distances=33, bias_dtype=torch.float16, reason="a table of 16 bits, whose gradient is rounded once"),
    Case("distances-float-table-65", 65, bias="1hr", distances=33, bias_dtype=torch.float32, reason="a table of more bits than the query has"),
    Case("distances-double-table-37", 37, bias="1hr", distances=33, bias_dtype=torch.float64, reason="a table of 64 bits"),
    Case("distances-transposed-values-narrow-65", 65, bias="1hr", distances=33, transposed=True, value_dim=8, reason="(B, S, H, D) in memory"),
    Case("distances-scaled-head-dim-20-65x37", 65, 37, head_dim=20, scale=1.0, bias="1hr", distances=33, zero=3, reason="T5's scale"),
)  # fmt: skip

SINKS = (
    Case("sinks-37x65", 37, 65, sinks="random", reason="a key without a value, for each head"),
    Case("gqa-sinks-window-causal-65", 65, **GQA, causal=True, window=(15, 0), sinks="random", sinks_dtype=torch.float32, reason="GPT-OSS"),
    Case("far-sinks-37x65", 37, 65, heads=3, bias="1hqk", sinks="far", reason="far above all scores, far below, and none"),
    Case("sinks-empty-rows-65x19", 65, 19, **GQA, causal=True, sinks="far", reason="lse of an empty row is the sink's score, with a gradient"),
    Case("sinks-all-masked-70x37", 70, 37, heads=3, mask="b1qk", keep="nothing", sinks="random", reason="nothing but sinks"),
    Case("sinks-bias-per-query-70x65", 70, 65, bias="1hq1", sinks="random", reason="dBias by query is dLSE less what the sinks take"),
    Case("sinks-bias-of-heads-causal-65x37", 65, 37, heads=3, bias="1h11", causal=True, sinks="far", reason="the same beside empty rows and no sink"),
    Case("sinks-key-bias-softcap-19x37", 19, 37, bias="b11k", softcap=1.5, sinks="random", reason="no softcap and no bias of a sink"),
    Case("sinks-dropout-37x65", 37, 65, dropout_p=0.3, sinks="random", reason="no dropout of a sink"),
    Case("sinks-one-query-gqa-1x600", 1, 600, **GQA, batch=1, sinks="random", reason="decoding: sinks join the splits of the keys"),
    Case("sinks-one-query-gqa-1x65", 1, 65, **GQA, mask="b11k", sinks="far", reason="decoding without splits"),
    Case("sinks-many-queries-2100x3", 2100, 3, heads=1, sinks="random", reason="many queries of few keys"),
    Case("sinks-random-intervals-37x65", 37, 65, intervals="random", bias="bg1k", **GQA, sinks="far", reason="lists of keys, some empty"),
)  # fmt: skip

AXES = (
    Case("rows-bias-of-batch-37x65", 37, 65, leading="bn", bias="b1hqk", mask="bn11k", reason="AlphaFold's pair bias with batch, a mask of each row"),
    Case("rows-bias-of-rows-65x37", 65, 37, leading="bn", bias="1nhqk", causal=True, reason="members of a slice lie apart"),
    Case("shifted-windows-19", 19, leading="bn", batch=3, rows=4, bias="11hqk", mask="1n1qk", reason="Swin: a bias for all, a mask of the window"),
    Case("windows-bias-of-batch-in-parts-19x23", 19, 23, leading="bn", rows=5, bias="b11qk", reason="a slice of one tile, members of several heads"),
    Case("copies-37", 37, leading="bnm", bias="b1mhqk", reason="a shared axis between two others"),
    Case("gqa-copies-bias-in-the-middle-37x40", 37, 40, leading="bnm", **GQA, bias="1n1gqk", mask="b1m1qk", reason="the reverse, and a mask of the others"),
    Case("rows-key-bias-of-batch-37x65", 37, 65, leading="bn", bias="b1h1k", mask="1n11k", reason="sums over queries, summed over rows"),
    Case("rows-bias-of-queries-70x37", 70, 37, leading="bn", bias="1nhq1", sinks="random", reason="dBias by query is dLSE, summed over the batch"),
    Case("rows-without-leading-axes-37", 37, leading="", bias="hqk", mask="qk", reason="no batch at all"),
    Case("rows-omitted-front-axes-37", 37, leading="bn", bias="nhqk", mask="hqk", reason="axes in front may be left out"),
    Case("gqa-axial-37x65", 37, 65, leading="bn", **GQA, transposed=True, bias="b1hqk", mask="1nhqk", keep="blocks", reason="no stride walks the axes"),
    Case("rows-axial-copies-37", 37, leading="bnm", transposed=True, window=(9, 4), reason="the same with three axes and no bias"),
    Case("rows-intervals-of-batch-70x37", 70, 37, leading="bn", intervals="b1gk", bias="b1h1k", reason="lists of the slices that intervals have"),
    Case("rows-intervals-of-rows-37x65", 37, 65, leading="bn", **GQA, intervals="1nhk", bias="b1gqk", window=(30, 5), reason="of other axes than the bias's"),
    Case("rows-prepared-mask-37x135", 37, 135, leading="bn", mask="n1qk", keep="blocks", blocked=True, bias="b1hqk", reason="its batch is the last axis"),
    Case("rows-two-intervals-65x37", 65, 37, leading="bn", intervals="random-twob1gk", bias="1nh1k", reason="bounds of both by the same entries"),
    Case("gqa-rows-factors-19x37", 19, 37, leading="bn", **GQA, factors=("b1h", "1ng"), mask="n1qk", reason="factors of some axes each"),
    Case("rows-softcap-dropout-37x65", 37, 65, leading="bn", bias="b1hqk", softcap=2.0, dropout_p=0.2, reason="dropped by the place in the whole batch"),
    Case("rows-one-query-3x600", 3, 600, leading="bn", batch=1, **GQA, bias="1nh1k", mask="1n1qk", reason="decoding: splits of the keys"),
    Case("rows-table-of-batch-37x65", 37, 65, leading="bn", bias="b1hr", distances=17, mask="bn11k", reason="a table that the rows share"),
    Case("rows-table-of-rows-65x37", 65, 37, leading="bn", bias="1ngr", distances=21, zero=3, **GQA, causal=True, reason="members lie apart"),
    Case("copies-table-65", 65, leading="bnm", bias="b1mhr", distances=150, softcap=2.0, reason="no single stride walks it"),
)  # fmt: skip

FACTORS = (
    Case("factors-37x65", 37, 65, factors=("bh", "bh"), reason="rows and cols of every head"),
    Case("gqa-factors-37x65", 37, 65, **GQA, factors=("bh", "bg"), reason="query heads of a group have rows of their own, and cols together"),
    Case("gqa-factors-of-groups-causal-65x37", 65, 37, **GQA, factors=("1g", "b1"), causal=True, reason="rows of a group, and rows that see no key"),
    Case("mqa-factors-shared-19x37", 19, 37, **MQA, factors=("11", "1g"), bias_dtype=torch.float32, reason="gradients summed over all that share a factor"),
    Case("factors-of-a-batch-row-window-65", 65, factors=("b1", "1h"), window=(9, 3), head_dim=40, value_dim=24, reason="other head dims of keys and values"),
    Case("factors-mask-empty-rows-19x37", 19, 37, mask="b1qk", keep="random-empty-rows", factors=("1h", "b1"), scale=0.25, reason="exact columns"),
    Case("gqa-factors-documents-65", 65, **GQA, intervals="documents", causal=True, factors=("bh", "1g"), bias_dtype=torch.float64, reason="intervals"),
    Case("factors-dropout-37x65", 37, 65, factors=("bh", "bh"), dropout_p=0.3, reason="dropout"),
    Case("factors-scale-zero-19x37", 19, 37, factors=("bh", "bh"), scale=0.0, reason="the bias alone decides; dQ and dK are zero"),
    Case("factors-scale-negative-in-one-tile-19x23", 19, 23, factors=("11", "bh"), scale=-0.3, reason="a small problem"),
    Case("factors-one-query-1x65", 1, 65, **GQA, factors=("bh", "bg"), reason="decoding"),
)  # fmt: skip

CASES = (*HEADS_AND_LENGTHS, *HEAD_DIMS, *MASKS, *BIASES, *OPTIONS, *INTERVALS, *WINDOWS, *DISTANCES, *FAULTS, *SINKS, *AXES)

LARGE = (
    Case("large-mha-127", 127, heads=4, head_dim=64, reason="one short of a tile"),
    Case("large-causal-129", 129, heads=4, head_dim=64, causal=True, reason="one past a tile"),
    Case("large-gqa-causal-1023", 1023, heads=8, kv_heads=2, head_dim=128, causal=True, reason="many tiles and a ragged last one"),
    Case("large-bias-bhqk-255", 255, heads=4, head_dim=64, bias="bhqk", reason="dense dBias"),
    Case("large-bias-1hqk-1023", 1023, batch=4, heads=4, head_dim=64, bias="1hqk", reason="dBias shared by the batch"),
    Case("large-bias-1hqk-many-members-129", 129, batch=33, heads=2, head_dim=32, bias="1hqk", reason="members split over programs, partial sums"),
    Case("large-bias-b1qk-127x255", 127, 255, heads=6, head_dim=32, bias="b1qk", causal=True, reason="dBias shared by the heads"),
    Case("large-bias-bg1k-1023", 1023, heads=8, kv_heads=4, head_dim=64, bias="bg1k", causal=True, reason="per-key dBias"),
    Case("large-bias-bhq1-255x127", 255, 127, heads=3, head_dim=96, bias="bhq1", reason="per-query dBias, three heads"),
    Case("large-head-dim-40-129x255", 129, 255, head_dim=40, bias="1hqk", mask="b1qk", reason="padded head dim"),
    Case("large-head-dim-96-255", 255, head_dim=96, bias="bhqk", causal=True, reason="padded head dim"),
    Case("large-head-dim-128-topk-mask-1023", 1023, heads=4, kv_heads=2, head_dim=128, mask="bgqk", keep="topk", bias="bgqk", causal=True, reason="a dynamic mask"),
    Case("large-head-dim-192-values-128-129x127", 129, 127, head_dim=192, value_dim=128, causal=True, bias="bh1k", reason="MLA's head dims"),
    Case("large-head-dim-256-127x129", 127, 129, head_dim=256, bias="1hqk", softcap=20.0, reason="the largest head dim"),
    Case("large-head-dim-256-causal-255", 255, head_dim=256, heads=4, kv_heads=1, causal=True, bias="bhqk", reason="the largest head dim with a dense dBias"),
    Case("large-values-256-head-dim-32-129", 129, head_dim=32, value_dim=256, reason="values far wider than keys"),
    Case("large-blocks-mask-1023x255", 1023, 255, heads=3, head_dim=64, mask="11qk", keep="blocks", bias="bhqk", reason="whole empty tiles"),
    Case("large-blocked-mask-1023x255", 1023, 255, heads=4, kv_heads=2, head_dim=64, mask="1gqk", keep="blocks", blocked=True, bias="bhqk", reason="a block mask in the portable kernels"),
    Case("large-blocked-mask-decoding-3x1023", 3, 1023, batch=4, heads=8, kv_heads=2, head_dim=128, mask="bhqk", blocked=True, reason="few queries, and bits by head"),
    Case("large-empty-rows-255x1023", 255, 1023, heads=3, head_dim=64, mask="bhqk", keep="random-empty-rows", bias="11qk", reason="rows with nothing"),
    Case("large-window-causal-1023", 1023, heads=4, kv_heads=2, head_dim=64, causal=True, window=(100, 0), bias="1hqk", reason="a band through many tiles"),
    Case("large-documents-1023", 1023, heads=4, kv_heads=2, head_dim=128, intervals="documents", causal=True, bias="bh1k", reason="packed sequences"),
    Case("large-global-tokens-1023", 1023, heads=4, kv_heads=2, head_dim=64, intervals="global", bias="bh1k", reason="Longformer, tiles that neither interval touches"),
    Case("large-two-intervals-1023x255", 1023, 255, heads=4, kv_heads=2, head_dim=128, intervals="random-two", bias="bhqk", causal=True, reason="two intervals, dS stored"),
    Case("large-two-intervals-shared-bias-255x1023", 255, 1023, batch=3, heads=4, head_dim=64, intervals="random-two-per-head", bias="1hqk", reason="two intervals in a shared dBias"),
    Case("large-random-intervals-255x1023", 255, 1023, heads=4, kv_heads=2, head_dim=64, intervals="random", bias="bhqk", reason="intervals"),
    Case("large-swin-windows-49", 49, batch=512, heads=4, head_dim=32, bias="1hqk", mask="b1qk", keep="blocks", reason="Swin's windows"),
    Case("large-t5-windows-64", 64, batch=300, heads=8, head_dim=64, bias="1hqk", scale=1.0, reason="windows of a whole tile, several members to a part"),
    Case("large-windows-dense-bias-64x49", 64, 49, batch=40, heads=3, head_dim=128, bias="bhqk", dropout_p=0.1, reason="dBias of every member"),
    Case("large-transposed-1023x129", 1023, 129, heads=4, head_dim=64, transposed=True, bias="b11k", reason="the layout of models"),
    Case("large-distances-t5-1023", 1023, heads=4, head_dim=64, bias="1hr", distances=257, scale=1.0, reason="T5's table, most pairs beyond its ends"),
    Case("large-distances-of-all-255x1023", 255, 1023, batch=3, heads=4, kv_heads=2, head_dim=128, bias="1gr", distances=1277, zero=1022, causal=True,
         reason="ALiBi's: each diagonal has a number, no pair is beyond the ends"),
    Case("large-decoding-distances-1x1023", 1, 1023, batch=4, heads=8, kv_heads=2, head_dim=128, bias="bhr", distances=257, reason="one query of T5"),
    Case("large-decoding-1x1023", 1, 1023, batch=4, heads=8, kv_heads=2, head_dim=128, causal=True, bias="bh1k", reason="one query"),
    Case("large-softcap-gemma-255", 255, heads=4, kv_heads=2, head_dim=256, softcap=50.0, causal=True, window=(63, 0), reason="Gemma 2"),
)  # fmt: skip

WIDEST = (  # which float32 on a GPU has no kernel for
    Case("widest-512-causal-grouped-65x97", 65, 97, **GQA, head_dim=512, causal=True, reason="Gemma 4's head dim"),
    Case("widest-512-mask-dense-bias-37x65", 37, 65, head_dim=512, mask="b1qk", keep="random-empty-rows", bias="bhqk", reason="the largest head dim"),
    Case("widest-264-shared-bias-softcap-65x37", 65, 37, head_dim=264, value_dim=72, bias="1hqk", softcap=20.0, reason="padded to 512, narrow values"),
    Case("widest-values-320-documents-key-bias-97", 97, head_dim=48, value_dim=320, intervals="documents", bias="bh1k", reason="wide values"),
    Case("widest-512-distances-window-65", 65, head_dim=512, bias="1hr", distances=33, window=(40, 3), sinks="random", reason="a table, and sinks"),
    Case("widest-512-blocked-mask-65x160", 65, 160, head_dim=512, mask="11qk", keep="random", blocked=True, dropout_p=0.2, reason="bits, dropout"),
    Case("widest-512-decoding-1x1100", 1, 1100, **GQA, head_dim=512, causal=True, bias="bg1k", reason="keys split over programs"),
)  # fmt: skip

LARGE_FACTORS = (
    Case("large-factors-head-dim-64-255x1023", 255, 1023, heads=4, kv_heads=2, head_dim=64, factors=("bh", "bg"), bias_dtype=torch.float32, reason="columns past a padded head dim"),
    Case("large-factors-head-dim-96-causal-1023", 1023, heads=4, head_dim=96, factors=("1h", "11"), bias_dtype=torch.float32, causal=True, reason="columns within a padded head dim, on Hopper"),
    Case("large-factors-head-dim-128-values-64-257", 257, heads=4, kv_heads=2, head_dim=128, value_dim=64, factors=("b1", "bg"), bias_dtype=torch.float32, reason="a head dim of 256"),
    Case("large-factors-documents-head-dim-104-1023", 1023, heads=4, kv_heads=2, head_dim=104, intervals="documents", factors=("bh", "11"), bias_dtype=torch.float32, reason="intervals on Hopper"),
)  # fmt: skip

HOPPER = (
    Case("hopper-distances-t5-1025x2304", 1025, 2304, heads=3, head_dim=64, bias="1hr", distances=257, zero=100, scale=1.0, reason="tiles below, at and beyond the table"),
    Case("hopper-distances-of-all-700x2049", 700, 2049, **GQA, head_dim=40, bias="bhr", distances=2748, zero=2048, reason="a number for each pair of every tile"),
    Case("hopper-distances-window-grouped-300x2100", 300, 2100, **GQA, head_dim=64, bias="1gr", distances=65, window=(100, 20), reason="keys in a window"),
    Case("hopper-distances-causal-700x900", 700, 900, heads=3, head_dim=64, bias="11r", distances=129, zero=128, causal=True, reason="edges of causal, dK and dV"),
    Case("hopper-distances-wide-causal-300x2100", 300, 2100, **GQA, head_dim=128, bias="1hr", distances=257, causal=True, reason="wide sums beside numbers of pairs"),
    Case("hopper-distances-shared-sinks-2048", 2048, heads=2, head_dim=64, bias="11r", distances=33, sinks="random", bias_dtype=torch.float32, reason="a table of float32, with sinks"),
    Case("hopper-drawn-blocks-causal-300x2100", 300, 2100, batch=8, heads=16, kv_heads=8, head_dim=64, causal=True, reason="more blocks than processors, so that programs draw them, of three consumers"),
    Case("hopper-drawn-blocks-causal-bias-900x1030", 900, 1030, batch=2, heads=16, head_dim=128, bias="bh1k", causal=True, reason="the same, two consumers"),
    Case("hopper-drawn-blocks-empty-rows-1500x700", 1500, 700, heads=16, head_dim=96, causal=True, reason="drawn blocks without keys"),
    Case("hopper-drawn-blocks-block-mask-1300", 1300, heads=16, head_dim=128, mask="1hqk", keep="blocks", blocked=True, reason="drawn blocks by lists"),
    Case("hopper-drawn-blocks-documents-1300", 1300, heads=16, head_dim=80, intervals="documents", reason="drawn blocks by intervals"),
    Case("hopper-dense-bias-causal-264x520", 264, 520, heads=4, head_dim=128, bias="bhqk", causal=True, reason="edges of tiles by causal, and dS stored"),
    Case("hopper-dense-bias-empty-rows-520x264", 520, 264, heads=2, head_dim=128, bias="bhqk", causal=True, reason="whole tiles of queries with no key"),
    Case("hopper-padded-dense-bias-causal-264x251", 264, 251, heads=2, head_dim=128, bias="bhqk", padded=True, causal=True, reason="the copy engine stores dS beside padding"),
    Case("hopper-padded-four-members-264x391", 264, 391, batch=4, heads=24, head_dim=64, bias="1hqk", padded=True, reason="dBias made with dQ, beside padding"),
    Case("hopper-loaded-bias-causal-261x251", 261, 251, batch=2, heads=3, head_dim=64, bias="bhqk", causal=True, reason="rows of a bias that the copy engine cannot address"),
    Case("hopper-loaded-shared-bias-fp32-300x523", 300, 523, batch=3, heads=4, kv_heads=2, head_dim=128, bias="1gqk", bias_dtype=torch.float32, reason="a bias of float32, 64 keys a tile"),
    Case("hopper-loaded-bias-mask-window-393x525", 393, 525, heads=4, head_dim=40, mask="b1qk", bias="1hqk", window=(200, 100), reason="the same by lists, and a window"),
    Case("hopper-loaded-bias-wide-150x333", 150, 333, heads=2, head_dim=256, bias="bhqk", sinks="random", reason="the same beside head dims over 128"),
    Case("hopper-loaded-bias-drawn-321x301", 321, 301, batch=16, heads=8, head_dim=64, bias="1hqk", causal=True, reason="blocks that are drawn, of which the loader is told, too"),
    Case("hopper-loaded-bias-fp32-many-blocks-301x257", 301, 257, batch=16, heads=8, head_dim=64, bias="1hqk", bias_dtype=torch.float32, reason="blocks in turn, a last key by itself"),
    Case("hopper-128-keys-causal-393x1161", 393, 1161, heads=4, kv_heads=2, head_dim=128, causal=True, reason="tiles of 128 keys at an edge"),
    Case("hopper-128-keys-window-300x1301", 300, 1301, heads=3, head_dim=128, window=(700, 20), reason="the same, two edges"),
    Case("hopper-128-keys-padding-257x2151", 257, 2151, heads=3, head_dim=64, mask="b11k", keep="padding", reason="the same under a mask of keys, three consumers"),
    Case("hopper-padded-shared-bias-261x251", 261, 251, batch=5, heads=3, head_dim=64, bias="11qk", padded=True, reason="dBias in a pass of its own, beside padding"),
    Case("hopper-grouped-pair-bias-328x264", 328, 264, heads=4, kv_heads=2, head_dim=96, value_dim=72, bias="bgqk", causal=True, transposed=True, reason="padded head dims, models' layout"),
    Case("hopper-shared-bias-window-264", 264, batch=5, heads=3, head_dim=128, bias="11qk", window=(150, 90), reason="both sides of a window, fifteen members"),
    Case("hopper-shared-bias-head-dim-64-392x264", 392, 264, batch=3, heads=4, kv_heads=2, head_dim=64, bias="b1qk", causal=True, scale=0.3, reason="members are heads; a scale of its own"),
    Case("hopper-four-members-264x392", 264, 392, batch=4, heads=24, kv_heads=8, head_dim=64, bias="1hqk", reason="dBias made with dQ, keys that fill no tile"),
    Case("hopper-four-members-causal-520x264", 520, 264, batch=4, heads=16, head_dim=64, bias="1hqk", causal=True, reason="programs without a key, whose dBias is 0"),
    Case("hopper-four-heads-window-393x520", 393, 520, batch=18, heads=4, head_dim=64, bias="b1qk", window=(150, 90), scale=0.3, reason="members are heads; dBias is 0 on both sides"),
    Case("hopper-three-members-dims-40-56-264x520", 264, 520, batch=3, heads=24, head_dim=40, value_dim=56, bias="1hqk", causal=True, transposed=True, reason="an odd number of members, padded head dims"),
    Case("hopper-two-members-window-392x264", 392, 264, batch=6, heads=8, kv_heads=4, head_dim=64, bias="bgqk", window=(None, 30), reason="64 keys a tile"),
    Case("hopper-two-members-head-dim-96-264x392", 264, 392, heads=24, head_dim=96, bias="1hqk", window=(100, None), reason="wide heads of two members"),
    Case("hopper-four-members-head-dim-128-264x392", 264, 392, batch=4, heads=24, kv_heads=8, head_dim=128, bias="1hqk", reason="members shared out to the consumers"),
    Case("hopper-four-heads-causal-dims-72-88-520x264", 520, 264, batch=14, heads=4, kv_heads=2, head_dim=72, value_dim=88, bias="b1qk", causal=True, reason="the same where members are heads, and without a key"),
    Case("hopper-eight-members-window-393x520", 393, 520, batch=8, heads=18, head_dim=64, bias="1hqk", window=(150, 90), reason="four members to a consumer, dBias is 0 on both sides"),
    Case("hopper-five-members-dims-40-56-520x264", 520, 264, batch=5, heads=14, head_dim=40, value_dim=56, bias="1hqk", causal=True, transposed=True, reason="three and two members to the consumers"),
    Case("hopper-six-members-causal-264x392", 264, 392, batch=6, heads=24, head_dim=64, bias="1hqk", causal=True, reason="three members to a consumer"),
    Case("hopper-seven-members-393x520", 393, 520, batch=7, heads=18, kv_heads=6, head_dim=64, bias="1hqk", reason="four and three members to the consumers"),
    Case("hopper-dense-bias-head-dim-40-264", 264, heads=2, head_dim=40, value_dim=56, bias="bhqk", reason="head dims padded to 64"),
    Case("hopper-key-bias-fp32-387x523", 387, 523, heads=6, kv_heads=2, head_dim=128, bias="bg1k", bias_dtype=torch.float32, causal=True, reason="odd lengths, sums over the group"),
    Case("hopper-query-bias-261x136", 261, 136, heads=2, head_dim=128, bias="bhq1", window=(40, None), reason="a window open to the right"),
    Case("hopper-scalar-bias-65x1", 65, 1, heads=4, head_dim=128, bias="1h11", reason="one key"),
    Case("hopper-block-mask-window-900x1200", 900, 1200, heads=2, head_dim=128, mask="1hqk", keep="blocks", window=(300, 50), reason="empty, partial and full blocks"),
    Case("hopper-blocked-mask-window-900x1200", 900, 1200, heads=2, head_dim=128, mask="1hqk", keep="blocks", blocked=True, window=(300, 50), reason="the same by bits"),
    Case("hopper-blocked-random-mask-grouped-393x523", 393, 523, heads=4, kv_heads=2, head_dim=128, mask="bhqk", blocked=True, reason="every bit of a tile, odd ends"),
    Case("hopper-blocked-mask-dense-bias-causal-264x528", 264, 528, heads=2, head_dim=128, mask="b1qk", keep="random-empty-rows", blocked=True, bias="bhqk", causal=True, reason="bits and a bias of pairs"),
    Case("hopper-blocked-mask-shared-bias-head-dim-64-260x2056", 260, 2056, heads=2, kv_heads=1, head_dim=64, mask="11qk", blocked=True, bias="1hqk", reason="narrow heads: dQ and dK by bits"),
    Case("hopper-blocked-mask-key-bias-520x776", 520, 776, heads=2, head_dim=100, mask="1hqk", keep="topk", blocked=True, bias="b11k", reason="bias columns beside bits"),
    Case("hopper-blocked-mask-one-block-130x100", 130, 100, heads=2, head_dim=128, mask="bhqk", blocked=True, bias="bhq1", reason="one block of keys has no list"),
    Case("hopper-high-scores-blocked-mask-400x1304", 400, 1304, head_dim=128, mask="b1qk", keep="blocks", blocked=True, scale=2.0, reason="maxima that do not do, in listed tiles"),
    Case("hopper-block-mask-dense-bias-causal-264x528", 264, 528, heads=2, head_dim=128, mask="b1qk", keep="blocks", bias="bhqk", causal=True, reason="dS stored by lists"),
    Case("hopper-empty-rows-mask-grouped-300x336", 300, 336, heads=4, kv_heads=2, head_dim=128, mask="bhqk", keep="random-empty-rows", bias="bgqk", reason="a list for every head"),
    Case("hopper-padding-mask-260x391", 260, 391, batch=3, heads=2, head_dim=100, mask="b11k", bias="1hqk", reason="a mask by key"),
    Case("hopper-query-mask-head-dim-64-260x391", 260, 391, heads=2, head_dim=64, mask="b1q1", bias="bg1k", reason="a mask by query"),
    Case("hopper-mask-one-block-130x100", 130, 100, heads=2, head_dim=128, mask="bhqk", bias="bhq1", reason="one block of keys has no list"),
    Case("hopper-scalar-mask-130x300", 130, 300, heads=2, head_dim=128, mask="bh11", reason="whole heads hidden"),
    Case("hopper-documents-grouped-700", 700, heads=4, kv_heads=2, head_dim=128, intervals="documents", bias="bg1k", reason="two consumers share a block of keys"),
    Case("hopper-documents-dense-bias-causal-700", 700, heads=2, head_dim=128, intervals="documents", bias="bhqk", causal=True, reason="dS stored by two consumers"),
    Case("hopper-intervals-window-300x700", 300, 700, heads=4, kv_heads=2, head_dim=128, intervals="random", window=(200, 100), reason="intervals and both sides of a window"),
    Case("hopper-intervals-dense-bias-head-dim-64-704x304", 704, 304, heads=4, kv_heads=2, head_dim=64, intervals="random", bias="bhqk", reason="the same at head dim 64"),
    Case("hopper-padding-intervals-shared-bias-391", 391, batch=3, heads=2, head_dim=128, intervals="padding", bias="1hqk", reason="dBias by the portable kernel"),
    Case("hopper-documents-window-bias-by-head-700", 700, batch=3, heads=4, kv_heads=2, head_dim=128, intervals="documents", bias="1h1k", window=(90, 10), reason="intervals of a batch entry beside the bias of a head"),
    Case("hopper-intervals-by-group-bias-by-head-300", 300, heads=4, kv_heads=2, head_dim=128, intervals="random", bias="1h1k", reason="intervals of a group beside the bias of each of its heads"),
    Case("hopper-padding-query-bias-causal-513x700", 513, 700, heads=2, head_dim=96, intervals="padding", bias="bhq1", causal=True, reason="intervals packed alone, inside a window"),
    Case("hopper-several-blocks-a-program-393x263", 393, 263, batch=5, heads=9, head_dim=128, reason="180 blocks of queries, more than there are processors"),
    Case("hopper-several-blocks-a-program-shared-bias-393x264", 393, 264, batch=5, heads=9, head_dim=128, bias="1hqk", reason="the same, batch entries side by side"),
    Case("hopper-three-consumers-380x2056", 380, 2056, batch=9, heads=8, kv_heads=4, head_dim=64, reason="and several blocks a program, in turn"),
    Case("hopper-three-consumers-odd-dims-190x2051", 190, 2051, heads=3, head_dim=40, value_dim=64, reason="keys that fill no tile"),
    Case("hopper-one-consumer-dense-bias-380x2056", 380, 2056, heads=4, kv_heads=2, head_dim=64, bias="bhqk", scale=0.3, reason="three programs on a processor, a tile of bias each"),
    Case("hopper-one-consumer-exact-scale-dense-bias-380x2056", 380, 2056, heads=4, kv_heads=2, head_dim=64, bias="bhqk", reason="products are added to the bias"),
    Case("hopper-one-consumer-exact-scale-several-blocks-572x2056", 572, 2056, batch=8, heads=6, head_dim=64, bias="1hqk", reason="and queries multiplied anew in each"),
    Case("hopper-exact-scale-several-blocks-a-program-393x904", 393, 904, batch=5, heads=9, head_dim=128, bias="1hqk", scale=0.125, reason="the same, two consumers"),
    Case("hopper-exact-scale-mask-dense-bias-window-392x520", 392, 520, heads=2, head_dim=128, mask="b1qk", keep="blocks", bias="bhqk", window=(200, 60), scale=0.25, reason="beside a mask"),
    Case("hopper-causal-many-sequences-300x400", 300, 400, batch=3, heads=7, head_dim=128, causal=True, reason="21 sequences, not a multiple of those side by side"),
    Case("hopper-values-64-under-head-dim-96-264x520", 264, 520, heads=4, kv_heads=2, head_dim=96, value_dim=64, reason="values narrower than keys, beyond whose end the copy engine writes zeros"),
    Case("hopper-values-40-under-head-dim-128-causal-393x263", 393, 263, heads=3, head_dim=128, value_dim=40, causal=True, reason="the same in part of a panel"),
    Case("hopper-values-64-dense-bias-264", 264, heads=2, head_dim=104, value_dim=64, bias="bhqk", reason="dS stored beside them"),
    Case("hopper-values-64-documents-700", 700, heads=4, kv_heads=2, head_dim=96, value_dim=64, intervals="documents", causal=True, reason="dK and dV by intervals"),
    Case("hopper-values-64-four-members-264x392", 264, 392, batch=4, heads=24, kv_heads=8, head_dim=128, value_dim=64, bias="1hqk", reason="dQ made with dBias"),
    Case("hopper-values-64-shared-bias-264", 264, batch=5, heads=3, head_dim=128, value_dim=64, bias="11qk", window=(150, 90), reason="dBias in a pass of its own"),
    Case("hopper-values-64-block-mask-520x776", 520, 776, heads=2, head_dim=128, value_dim=64, mask="1hqk", keep="blocks", bias="b11k", reason="lists and bias columns"),
    Case("hopper-parts-of-keys-130x9000", 130, 9000, heads=16, head_dim=128, reason="few queries over many keys, which are split over programs"),
    Case("hopper-parts-of-keys-dense-bias-130x9000", 130, 9000, heads=16, head_dim=128, bias="bhqk", reason="tiles of a bias in each part of the keys"),
    Case("hopper-parts-of-keys-causal-sinks-130x17000", 130, 17000, batch=1, heads=33, head_dim=72, causal=True, transposed=True, sinks="random", reason="parts that end at a diagonal; sinks join their sum"),
    Case("hopper-parts-of-keys-window-130x9000", 130, 9000, batch=1, heads=33, head_dim=128, window=(8600, 50), reason="parts of a window"),
    Case("hopper-parts-of-keys-key-bias-130x9000", 130, 9000, heads=12, head_dim=96, value_dim=80, bias="bh1k", reason="bias columns in each part"),
    Case("hopper-parts-of-keys-causal-260x17000", 260, 17000, batch=1, heads=22, head_dim=64, causal=True, reason="narrow heads"),
    Case("hopper-parts-of-keys-grouped-130x20001", 130, 20001, batch=1, heads=32, kv_heads=16, head_dim=128, causal=True, reason="a group's heads, odd lengths"),
    Case("hopper-parts-of-keys-wide-100x9000", 100, 9000, heads=2, head_dim=192, value_dim=128, causal=True, reason="dQ of head dims over 128"),
    Case("hopper-parts-of-keys-query-bias-fp32-100x9000", 100, 9000, heads=2, head_dim=40, bias="bhq1", bias_dtype=torch.float32, reason="its gradient is that of lse"),
    Case("hopper-head-dim-72-packed-rows-700", 700, batch=2, heads=3, head_dim=72, transposed=True, reason="strides of multiples of 8 and not of 16"),
    Case("hopper-head-dim-24-dense-bias-mask-264", 264, batch=8, heads=16, head_dim=24, bias="bhqk", mask="b11k", transposed=True, reason="the same, narrow"),
    Case("hopper-head-dim-120-documents-700", 700, heads=3, head_dim=120, intervals="documents", causal=True, reason="the same by intervals"),
    Case("hopper-cut-72-729", 729, heads=4, head_dim=72, reason="64 and 16 of 128 dims are summed over, half of the 16 copied from beyond the end"),
    Case("hopper-cut-80-causal-grouped-393x777", 393, 777, **GQA, head_dim=80, causal=True, reason="the same, odd lengths"),
    Case("hopper-cut-80-window-900x1030", 900, 1030, heads=2, head_dim=80, window=(300, 200), reason="64 and 16 dims, edges on both sides"),
    Case("hopper-cut-80-shared-bias-exact-scale-393x904", 393, 904, batch=5, heads=9, head_dim=80, bias="1hqk", scale=0.125, reason="queries in two pieces are multiplied by the scale, in each block anew"),
    Case("hopper-cut-72-dense-bias-exact-scale-causal-264x520", 264, 520, heads=3, head_dim=72, bias="bhqk", causal=True, scale=0.25, reason="the same, the second one of 16 dims"),
    Case("hopper-cut-72-dense-bias-causal-400x520", 400, 520, heads=3, head_dim=72, bias="bhqk", causal=True, reason="scores times the scale"),
    Case("hopper-cut-80-loaded-bias-261x251", 261, 251, heads=3, head_dim=80, bias="bhqk", reason="64 keys a tile, whole columns of values"),
    Case("hopper-cut-80-key-bias-causal-387x523", 387, 523, **GQA, head_dim=80, bias="bg1k", causal=True, reason="bias columns after both products"),
    Case("hopper-cut-80-sinks-causal-grouped-700x900", 700, 900, **GQA, head_dim=80, causal=True, sinks="far", reason="sinks rescale all columns"),
    Case("hopper-cut-80-block-mask-520x776", 520, 776, heads=2, head_dim=80, mask="1hqk", keep="blocks", reason="listed tiles"),
    Case("hopper-cut-72-blocked-mask-window-900x1200", 900, 1200, heads=2, head_dim=72, mask="1hqk", keep="blocks", blocked=True, window=(300, 50), reason="the same by bits"),
    Case("hopper-cut-80-documents-grouped-700", 700, **GQA, head_dim=80, intervals="documents", bias="bg1k", reason="keys copied by blocks, in pieces"),
    Case("hopper-cut-80-distances-700x2049", 700, 2049, **GQA, head_dim=80, bias="bhr", distances=257, zero=100, reason="products are added to numbers of pairs"),
    Case("hopper-cut-72-several-blocks-a-program-393x263", 393, 263, batch=5, heads=9, head_dim=72, transposed=True, reason="stages of pieces, used by block after block"),
    Case("hopper-cut-72-values-80-264x520", 264, 520, **GQA, head_dim=72, value_dim=80, reason="queries and values cut at other dims"),
    Case("hopper-cut-128-values-80-causal-264x520", 264, 520, **GQA, head_dim=128, value_dim=80, causal=True, reason="values alone padded"),
    Case("hopper-cut-80-values-128-264x520", 264, 520, **GQA, head_dim=80, value_dim=128, reason="queries and keys alone"),
    Case("hopper-higher-scores-cut-80-400x1300", 400, 1300, head_dim=80, scale=8.0, reason="tiles computed again, values of the tile before added"),
    Case("hopper-higher-scores-cut-80-key-bias-block-mask-400x1304", 400, 1304, head_dim=80, mask="b1qk", keep="blocks", bias="b11k", scale=8.0, reason="the same, in listed tiles"),
    Case("hopper-softcap-causal-grouped-sinks-393x777", 393, 777, **GQA, head_dim=128, softcap=5.0, causal=True, sinks="random", reason="Gemma 2's kind: a tanh of products"),
    Case("hopper-softcap-64-520x776", 520, 776, heads=4, head_dim=64, softcap=3.0, reason="no room for three consumers of dK and dV"),
    Case("hopper-softcap-narrow-window-900x1030", 900, 1030, heads=2, head_dim=40, softcap=2.0, window=(300, 200), reason="48 dims, edges on both sides"),
    Case("hopper-softcap-saturated-264x1000", 264, 1000, head_dim=128, softcap=1.5, scale=4.0, reason="a tanh of 1, whose slope is 0"),
    Case("hopper-softcap-of-far-scores-264x1000", 264, 1000, head_dim=80, softcap=250.0, scale=8.0, reason="maxima that rise, to almost the largest cap"),
    Case("hopper-softcap-query-bias-256x392", 256, 392, heads=4, kv_heads=2, head_dim=64, softcap=20.0, bias="bhq1", reason="scores in base 2"),
    Case("hopper-softcap-shared-bias-members-exact-scale-392x520", 392, 520, batch=3, heads=6, head_dim=64, softcap=4.0, bias="1hqk", scale=0.125, reason="products are not added to the bias"),
    Case("hopper-softcap-shared-bias-key-mask-264x392", 264, 392, batch=10, heads=2, head_dim=72, softcap=4.0, bias="1hqk", mask="b11k", keep="padding", reason="dBias in a pass of its own"),
    Case("hopper-softcap-dense-bias-causal-261x520", 261, 520, heads=3, head_dim=128, softcap=4.0, bias="bhqk", causal=True, reason="dBias is dS before the slope"),
    Case("hopper-softcap-dense-bias-64-264x392", 264, 392, heads=3, head_dim=64, softcap=4.0, bias="bhqk", sinks="random", reason="the same of narrow heads"),
    Case("hopper-softcap-loaded-bias-261x251", 261, 251, heads=3, head_dim=112, softcap=4.0, bias="bhqk", reason="the same, stored by consumers"),
    Case("hopper-softcap-wide-causal-grouped-520x700", 520, 700, **GQA, head_dim=256, softcap=5.0, causal=True, reason="probabilities are handed over with the slope"),
    Case("hopper-softcap-wide-dense-bias-264x392", 264, 392, heads=2, head_dim=160, softcap=5.0, bias="bhqk", reason="dBias by the portable kernel"),
    Case("hopper-softcap-documents-causal-1300", 1300, batch=1, heads=8, kv_heads=4, head_dim=128, softcap=5.0, intervals="documents", causal=True, reason="by intervals, one consumer"),
    Case("hopper-softcap-documents-dense-bias-700", 700, batch=1, heads=2, head_dim=128, softcap=5.0, intervals="documents", bias="bhqk", reason="two in turns, dBias stored"),
    Case("hopper-softcap-documents-wide-700", 700, heads=3, head_dim=224, softcap=5.0, intervals="documents", reason="split sums"),
    Case("hopper-softcap-dense-bias-alone-wide-264x392", 264, 392, heads=2, head_dim=240, softcap=5.0, bias="bhqk", causal=True, reason="dQ and dBias by one portable kernel"),
    Case("hopper-cut-72-documents-key-bias-700", 700, heads=3, head_dim=72, intervals="documents", bias="bh1k", reason="consumers in turns, 128 of 128 dims"),
    Case("hopper-softcap-block-mask-520x776", 520, 776, heads=2, head_dim=96, softcap=5.0, mask="1hqk", keep="blocks", reason="listed tiles"),
    Case("hopper-softcap-key-bias-393x523", 393, 523, heads=2, head_dim=128, softcap=5.0, bias="bh1k", reason="left to the portable kernels"),
    Case("hopper-softcap-large-393x523", 393, 523, heads=2, head_dim=128, softcap=3000.0, reason="left to the portable kernels, where a tanh near 0 has all digits"),
    Case("hopper-sums-48-dense-bias-causal-264x520", 264, 520, heads=3, head_dim=40, bias="bhqk", causal=True, reason="32 and 16 of 64 dims are summed over"),
    Case("hopper-sums-48-key-bias-grouped-393x523", 393, 523, **GQA, head_dim=48, bias="bg1k", reason="the same beside bias columns"),
    Case("hopper-sums-48-documents-causal-700", 700, heads=4, head_dim=48, intervals="documents", causal=True, reason="keys copied by blocks"),
    Case("hopper-sums-112-causal-grouped-393x777", 393, 777, **GQA, head_dim=112, causal=True, reason="64, 32 and 16 of 128 dims"),
    Case("hopper-sums-112-shared-bias-exact-scale-393x904", 393, 904, batch=5, heads=9, head_dim=104, bias="1hqk", scale=0.125, reason="each piece is multiplied by the scale"),
    Case("hopper-sums-96-window-900x1030", 900, 1030, heads=2, head_dim=96, window=(300, 200), reason="Phi-3's kind"),
    Case("hopper-sums-112-block-mask-520x776", 520, 776, heads=2, head_dim=100, mask="1hqk", keep="blocks", reason="listed tiles"),
    Case("hopper-sums-112-documents-key-bias-700", 700, **GQA, head_dim=112, intervals="documents", bias="bg1k", reason="consumers in turns exchange whole columns"),
    Case("hopper-wide-144-causal-grouped-520x264", 520, 264, **GQA, head_dim=144, causal=True, reason="16 dims of a third panel"),
    Case("hopper-wide-160-shared-bias-264x392", 264, 392, batch=3, heads=2, head_dim=160, bias="1hqk", reason="32 dims of a third panel"),
    Case("hopper-wide-176-dense-bias-causal-264x520", 264, 520, heads=2, head_dim=176, bias="bhqk", causal=True, reason="48 dims of a third panel, dBias stored"),
    Case("hopper-wide-208-window-393x520", 393, 520, heads=2, head_dim=208, window=(150, 90), reason="16 dims of a fourth panel"),
    Case("hopper-wide-224-causal-grouped-sinks-700x900", 700, 900, **GQA, head_dim=224, causal=True, sinks="random", transposed=True, reason="32 dims of a fourth panel"),
    Case("hopper-wide-240-values-144-393x523", 393, 523, heads=2, head_dim=240, value_dim=144, reason="128, 64, 32 and 16 dims, values of three panels"),
    Case("hopper-wide-128-values-200-key-bias-393x523", 393, 523, heads=2, head_dim=72, value_dim=200, bias="bh1k", reason="queries padded to two panels"),
    Case("hopper-wide-160-documents-causal-700", 700, heads=3, head_dim=160, intervals="documents", causal=True, reason="split sums in panels"),
    Case("hopper-wide-160-block-mask-520x776", 520, 776, heads=2, head_dim=160, mask="1hqk", keep="blocks", reason="listed tiles of panels"),
    Case("hopper-rising-scores-400x2300", 400, 2300, head_dim=128, scale=40.0, reason="maxima rise by more than a higher one has room for"),
    Case("hopper-negative-scale-200", 200, heads=2, head_dim=128, bias="bhqk", scale=-0.3, reason="left to the portable kernels"),
    Case("hopper-even-640", 640, batch=4, heads=12, head_dim=128, reason="no tile with an edge, and two rounds of some programs"),
    Case("hopper-high-scores-400x1300", 400, 1300, head_dim=128, scale=2.0, reason="maxima that do not do for later tiles: they are computed again"),
    Case("hopper-higher-scores-400x1300", 400, 1300, head_dim=128, scale=8.0, reason="the same where bfloat16 has no room for the weights"),
    Case("hopper-higher-scores-three-consumers-380x2056", 380, 2056, batch=9, heads=8, kv_heads=4, head_dim=64, scale=12.0, reason="the same, out of turn"),
    Case("hopper-higher-scores-key-bias-block-mask-400x1304", 400, 1304, head_dim=128, mask="b1qk", keep="blocks", bias="b11k", scale=8.0, reason="the same, in listed tiles"),
    Case("hopper-high-scores-block-mask-400x1304", 400, 1304, head_dim=128, mask="b1qk", keep="blocks", scale=2.0, reason="the same, in listed tiles"),
    Case("hopper-high-scores-several-blocks-a-program-393x900", 393, 900, batch=5, heads=9, head_dim=128, bias="b11k", scale=2.0, reason="the same, with bias columns"),
    Case("hopper-three-consumers-high-scores-380x2056", 380, 2056, batch=9, heads=8, kv_heads=4, head_dim=64, scale=3.0, reason="the same, out of turn"),
    Case("hopper-exact-scale-dense-bias-causal-400x520", 400, 520, heads=3, head_dim=128, bias="bhqk", causal=True, scale=0.125, reason="products are added to the bias"),
    Case("hopper-scale-one-shared-bias-393x904", 393, 904, batch=5, heads=9, head_dim=128, bias="1hqk", scale=1.0, reason="the same in float16, where maxima rise"),
    Case("hopper-one-consumer-scale-one-dense-bias-380x2304", 380, 2304, heads=4, head_dim=64, bias="bhqk", scale=1.0, reason="the same, by one consumer"),
    Case("hopper-three-consumers-two-idle-130x2050", 130, 2050, heads=2, head_dim=64, reason="the last one has no query"),
    Case("hopper-one-consumer-head-dim-64-256x2056", 256, 2056, heads=2, head_dim=64, bias="1hqk", reason="narrow heads beside a bias"),
    Case("hopper-one-consumer-keys-300x191", 300, 191, heads=4, kv_heads=2, head_dim=64, reason="dK and dV with tiles of 32 queries, an odd end"),
    Case("hopper-three-consumers-keys-520x1153", 520, 1153, heads=16, head_dim=64, reason="dK and dV with three consumers, an odd end"),
    Case("hopper-three-consumers-keys-distances-516x1153", 516, 1153, heads=16, head_dim=64, bias="1hr", distances=257, reason="the same beside a table"),
    Case("hopper-two-consumers-of-64-dims-448x4100", 448, 4100, heads=3, head_dim=64, reason="three would leave rows idle"),
    Case("hopper-two-consumers-keys-window-2100", 2100, heads=8, head_dim=64, window=(300, 20), reason="dK and dV with two consumers of 64 dims"),
    Case("hopper-two-consumers-keys-causal-gqa-2052x2176", 2052, 2176, heads=16, kv_heads=8, head_dim=64, causal=True, bias="bg1k", reason="the same, sums over queries"),
    Case("hopper-two-consumers-keys-loaded-bias-2101", 2101, heads=8, head_dim=64, bias="1hqk", reason="the same, pairs loaded"),
    Case("hopper-two-consumers-keys-causal-d128-1100", 1100, heads=16, head_dim=128, causal=True, reason="and of 128 dims"),
    Case("hopper-causal-empty-rows-900x300", 900, 300, heads=3, head_dim=128, causal=True, reason="programs without a key"),
    Case("hopper-window-900x1030", 900, 1030, heads=2, head_dim=128, window=(300, 200), reason="last keys first, edges on both sides"),
    Case("hopper-narrow-window-900x960", 900, 960, batch=4, heads=12, head_dim=40, window=(40, 20), reason="windows, in drawn blocks"),
    Case("hopper-narrow-window-sinks-641x700", 641, 700, batch=2, heads=4, head_dim=96, window=(30, 50), sinks="random", reason="the same, and a block with one query"),
    Case("hopper-narrow-window-dense-bias-392x456", 392, 456, heads=3, head_dim=128, bias="bhqk", window=(30, 10), reason="dBias is 0 in tiles that a consumer leaves out"),
    Case("hopper-left-window-dense-bias-520x776", 520, 776, heads=2, head_dim=128, bias="bhqk", window=(150, None), reason="first keys first"),
    Case("hopper-sinks-window-causal-gqa-700", 700, heads=8, kv_heads=2, head_dim=64, causal=True, window=(127, 0), sinks="random", sinks_dtype=torch.float32, reason="GPT-OSS"),
    Case("hopper-sinks-causal-gqa-700x900", 700, 900, heads=4, kv_heads=2, head_dim=128, causal=True, sinks="far", reason="sinks join at the end, with two consumers"),
    Case("hopper-sinks-one-consumer-bias-392x2056", 392, 2056, heads=4, head_dim=64, bias="1hqk", sinks="far", reason="scores in units of a bias of pairs"),
    Case("hopper-sinks-query-bias-empty-rows-900x300", 900, 300, heads=3, head_dim=128, bias="bhq1", causal=True, sinks="random", reason="dBias by query from the terms that dQ makes"),
    Case("hopper-sinks-key-bias-intervals-392x520", 392, 520, heads=3, head_dim=128, intervals="random", bias="b11k", sinks="far", reason="bias columns, and lists"),
    Case("hopper-sinks-bias-on-chip-256", 256, batch=300, heads=4, head_dim=32, bias="1hqk", sinks="far", reason="narrow heads, the bias on chip"),
    Case("hopper-intervals-few-keys-200x9", 200, 9, heads=2, head_dim=128, intervals="random", bias="b11k", reason="fewer keys than one listed block"),
    Case("hopper-intervals-dense-bias-window-392x520", 392, 520, heads=2, head_dim=128, intervals="random", bias="bhqk", window=(100, 60), reason="a tile filled up in front, and so its bias"),
    Case("hopper-documents-key-bias-fp16-grouped-700", 700, heads=4, kv_heads=2, head_dim=128, intervals="documents", bias="b11k", bias_dtype=torch.float16, causal=True, reason="a bias of another dtype, in the products"),
    Case("hopper-intervals-many-blocks-130x33500", 130, 33500, batch=1, heads=2, kv_heads=1, head_dim=128, intervals="random-per-head", bias="b11k", reason="more blocks of 16 keys than a list names"),
    Case("hopper-documents-several-blocks-a-program-520", 520, batch=5, heads=8, kv_heads=4, head_dim=128, intervals="documents", bias="bg1k", reason="lists, and several of them a program"),
    Case("hopper-intervals-several-blocks-a-program-900x3", 900, 3, batch=3, heads=8, head_dim=128, intervals="random", bias="b11k", reason="blocks of queries without a key between others"),
    Case("hopper-intervals-dense-bias-several-blocks-a-program-520x304", 520, 304, batch=5, heads=8, head_dim=128, intervals="random", bias="bhqk", reason="the same beside a bias of pairs"),
    Case("hopper-rows-resident-bias-of-batch-192x320", 192, 320, leading="bn", rows=140, heads=4, head_dim=32, bias="b1hqk", reason="slices of the batch, members side by side"),
    Case("hopper-rows-resident-bias-of-rows-200x264", 200, 264, leading="bn", batch=90, heads=4, head_dim=32, bias="1nhqk", reason="the same, members apart"),
    Case("hopper-copies-resident-bias-200x136", 200, 136, leading="bnm", batch=40, rows=2, copies=4, heads=4, head_dim=16, bias="1n1hqk", reason="the same, between others"),
    Case("hopper-rows-shared-bias-mask-192x320", 192, 320, leading="bn", rows=140, heads=4, head_dim=32, bias="b1hqk", mask="bn11k", keep="padding", reason="AlphaFold's padding: tiles without a key are left out, members without any keep nothing"),
    Case("hopper-shared-bias-mask-by-head-197x321", 197, 321, batch=133, heads=4, head_dim=32, bias="1hqk", padded=True, mask="bh1k", sinks="far", reason="some keys of every tile, odd lengths, sinks beside them"),
    Case("hopper-rows-shared-bias-mask-of-rows-200x264", 200, 264, leading="bn", batch=90, heads=4, head_dim=24, bias="1nhqk", mask="1n11k", keep="padding", reason="members apart, a mask that others share"),
    Case("hopper-shared-bias-no-key-129x72", 129, 72, batch=264, heads=4, head_dim=16, bias="1hqk", mask="b11k", keep="nothing", reason="no tile of any member"),
    Case("hopper-narrow-rows-shared-bias-400x456", 400, 456, batch=34, heads=4, head_dim=32, bias="1hqk", reason="more keys than stay on chip, an end within a tile"),
    Case("hopper-narrow-rows-mask-448x712", 448, 712, batch=34, heads=4, head_dim=24, bias="1hqk", mask="b11k", keep="padding", sinks="random", reason="a mask by key"),
    Case("hopper-narrow-short-rows-mask-200x136", 200, 136, batch=70, heads=4, head_dim=32, bias="1hqk", mask="b11k", keep="padding", reason="the same, short"),
    Case("hopper-narrow-rows-leading-mask-by-head-513x520", 513, 520, leading="bn", batch=2, rows=14, heads=4, head_dim=32, bias="b11qk", mask="bnh1k", keep="padding", reason="slices of the batch that heads share, tiles without a key"),
    Case("hopper-narrow-513x449", 513, 449, batch=12, heads=12, head_dim=32, reason="long rows without a bias, both lengths odd"),
    Case("hopper-narrow-causal-grouped-500x700", 500, 700, batch=12, heads=12, kv_heads=4, head_dim=24, causal=True, reason="the same, causal"),
    Case("hopper-narrow-key-bias-causal-520x456", 520, 456, batch=12, heads=12, kv_heads=4, head_dim=32, bias="bg1k", causal=True, reason="bias columns of few dims, and rows without a key"),
    Case("hopper-narrow-key-bias-sinks-513x1030", 513, 1030, batch=12, heads=12, head_dim=24, bias="b11k", sinks="far", reason="the same beside sinks"),
    Case("hopper-narrow-own-bias-513x520", 513, 520, batch=12, heads=12, head_dim=32, bias="bhqk", reason="out beside a bias of each batch entry"),
    Case("hopper-narrow-own-bias-mask-520x768", 520, 768, batch=12, heads=12, head_dim=24, bias="bhqk", mask="b11k", keep="padding", reason="the same beside a mask by key"),
    Case("hopper-40-window-900x1030", 900, 1030, head_dim=40, window=(100, 50), reason="dims that are padded to 64, under a short window"),
    Case("hopper-one-consumer-documents-2048", 2048, heads=12, head_dim=64, intervals="documents", reason="dK and dV by intervals: 768 programs, of which a processor has two at a time"),
    Case("hopper-one-consumer-documents-causal-grouped-1300", 1300, batch=4, heads=8, kv_heads=4, head_dim=128, intervals="documents", causal=True, reason="the same with 336 programs of wide heads that share keys"),
    Case("hopper-one-consumer-intervals-dense-bias-520x808", 520, 808, batch=3, heads=8, head_dim=64, intervals="random", bias="bhqk", reason="the same with 312, dS stored"),
    Case("hopper-64-documents-key-bias-causal-grouped-1100", 1100, batch=3, heads=16, kv_heads=8, head_dim=64, intervals="documents", bias="bg1k", causal=True, scale=0.2, reason="bias columns beside lists with programs of one consumer, which draw their blocks"),
    Case("hopper-64-intervals-key-bias-by-head-grouped-520x776", 520, 776, **GQA, head_dim=64, intervals="random-per-head", bias="bh1k", reason="the same by head"),
    Case("hopper-64-padding-key-bias-fp32-sinks-393x900", 393, 900, heads=3, head_dim=64, intervals="padding", bias="b11k", bias_dtype=torch.float32, sinks="far", reason="the same beside sinks"),
    Case("hopper-48-documents-grouped-700", 700, **GQA, head_dim=48, intervals="documents", reason="and by intervals"),
    Case("hopper-56-block-mask-520x776", 520, 776, head_dim=56, mask="1hqk", keep="blocks", reason="and under a mask of pairs"),
    Case("hopper-40-shared-bias-mask-264x392", 264, 392, batch=10, head_dim=40, bias="1hqk", mask="b11k", keep="padding", reason="and dBias beside a mask by key"),
    Case("hopper-higher-scores-dense-bias-400x1304", 400, 1304, head_dim=128, bias="bhqk", scale=8.0, reason="tiles computed again beside a bias of pairs"),
    Case("hopper-higher-scores-distances-380x2056", 380, 2056, batch=4, head_dim=64, bias="1hr", distances=257, scale=8.0, reason="the same beside a table"),
    Case("hopper-higher-scores-wide-264x1000", 264, 1000, head_dim=256, scale=8.0, reason="the same with 256 dims"),
    Case("hopper-higher-scores-several-blocks-a-program-393x900", 393, 900, batch=5, heads=9, head_dim=128, bias="b11k", scale=8.0, reason="the same, several blocks a program"),
    Case("hopper-shared-bias-key-mask-264x392", 264, 392, batch=10, heads=2, head_dim=72, bias="1hqk", mask="b11k", keep="padding", reason="dBias in a pass of its own beside a mask by key"),
    Case("hopper-shared-bias-key-mask-by-head-causal-329x333", 329, 333, batch=9, heads=4, kv_heads=2, head_dim=128, bias="11qk", mask="bh1k", keep="padding", causal=True, reason="the same, of each head, with a bias that is loaded"),
    Case("hopper-rows-shared-bias-of-three-136x200", 136, 200, leading="bn", batch=4, head_dim=64, bias="b1hqk", reason="dQ and dBias of few members together, side by side"),
    Case("hopper-rows-shared-bias-of-eight-197x264", 197, 264, leading="bn", batch=8, heads=3, head_dim=64, bias="1nhqk", causal=True, reason="the same, members apart"),
    Case("hopper-rows-shared-bias-of-many-200x136", 200, 136, leading="bn", rows=9, heads=4, kv_heads=2, head_dim=64, bias="b1hqk", window=(90, 20), reason="dBias of many members"),
    Case("hopper-copies-shared-bias-520x776", 520, 776, leading="bnm", head_dim=128, bias="b1mhqk", reason="an entry of the bias by two axes"),
    Case("hopper-rows-block-mask-key-bias-520x776", 520, 776, leading="bn", head_dim=128, mask="1nhqk", keep="blocks", bias="b1h1k", reason="lists, masks and bias columns by their own entries"),
    Case("hopper-rows-intervals-key-bias-520", 520, leading="bn", heads=4, kv_heads=2, head_dim=128, intervals="1n1k", bias="1ng1k", reason="packed intervals and bias columns by their own entries"),
    Case("hopper-rows-intervals-dense-bias-392x520", 392, 520, leading="bn", head_dim=128, intervals="b11k", bias="1nhqk", window=(100, 60), reason="intervals and bias of other axes"),
    Case("hopper-rows-prepared-mask-shared-bias-260x776", 260, 776, leading="bn", head_dim=128, mask="nhqk", keep="blocks", blocked=True, bias="b1hqk", reason="bits by the entries of the mask"),
    Case("hopper-axial-200x136", 200, 136, leading="bn", head_dim=64, bias="b1hqk", transposed=True, reason="queries that the copy engine cannot address"),
    Case("hopper-block-mask-key-bias-causal-520x776", 520, 776, heads=2, head_dim=128, mask="1hqk", keep="blocks", bias="b11k", causal=True, reason="a bias copied by the blocks of a mask's lists"),
    Case("hopper-wide-odd-lengths-393x523", 393, 523, batch=1, head_dim=256, reason="64 keys a tile, sums of 256 dims"),
    Case("hopper-wide-causal-grouped-520x264", 520, 264, **GQA, head_dim=256, causal=True, reason="rows and programs without a key"),
    Case("hopper-wide-window-192-and-128-393x520", 393, 520, head_dim=192, value_dim=128, window=(150, 90), reason="queries and keys in three panels"),
    Case("hopper-wide-causal-192-and-128-700x900", 700, 900, **GQA, head_dim=192, value_dim=128, causal=True, transposed=True, reason="as DeepSeek has it, models' layout"),
    Case("hopper-wide-136-264", 264, **GQA, head_dim=136, reason="of the third panel 8 dims"),
    Case("hopper-wide-192-sinks-130x1000", 130, 1000, head_dim=192, causal=True, sinks="random", reason="dK in three sums"),
    Case("hopper-wide-200-transposed-300x700", 300, 700, head_dim=200, transposed=True, reason="8 dims of a fourth panel"),
    Case("hopper-wide-values-256-causal-264x393", 264, 393, head_dim=128, value_dim=256, causal=True, reason="values wider than keys"),
    Case("hopper-wide-values-40-264x393", 264, 393, head_dim=256, value_dim=40, reason="values narrower, panels beyond their end"),
    Case("hopper-wide-one-key-65x1", 65, 1, head_dim=256, reason="one key"),
    Case("hopper-wide-dense-bias-causal-264x520", 264, 520, head_dim=256, bias="bhqk", causal=True, reason="dS stored by the consumer of dK"),
    Case("hopper-wide-padded-dense-bias-160-and-96-264x251", 264, 251, head_dim=160, value_dim=96, bias="bhqk", padded=True, reason="the copy engine stores dS beside padding"),
    Case("hopper-wide-shared-bias-136-264x392", 264, 392, batch=3, **GQA, head_dim=136, bias="1hqk", reason="dQ and dK beside a bias of pairs, three panels"),
    Case("hopper-wide-shared-bias-exact-scale-192-264x392", 264, 392, batch=3, head_dim=192, bias="1hqk", scale=0.125, reason="queries in panels are not multiplied"),
    Case("hopper-wide-shared-bias-several-blocks-a-program-393x264", 393, 264, batch=5, heads=9, head_dim=256, bias="1hqk", reason="and queries multiplied anew in each"),
    Case("hopper-wide-key-bias-causal-387x523", 387, 523, **GQA, head_dim=256, bias="bg1k", bias_dtype=torch.float32, causal=True, reason="bias columns, sums over the group"),
    Case("hopper-wide-key-bias-by-head-192-and-128-387x523", 387, 523, **GQA, head_dim=192, value_dim=128, bias="1h1k", reason="sums over the queries by head"),
    Case("hopper-wide-query-bias-261x136", 261, 136, head_dim=192, bias="bhq1", window=(40, None), reason="a window open to the right"),
    Case("hopper-wide-block-mask-window-600x900", 600, 900, head_dim=256, mask="1hqk", keep="blocks", window=(300, 50), reason="lists of 64 and of 32 keys"),
    Case("hopper-wide-mask-dense-bias-empty-rows-264x528", 264, 528, head_dim=256, mask="bhqk", keep="random-empty-rows", bias="bhqk", reason="one stage in dK and dV"),
    Case("hopper-wide-padding-mask-192-and-128-260x391", 260, 391, head_dim=192, value_dim=128, mask="b11k", reason="a mask by key"),
    Case("hopper-wide-mask-160-and-96-300x336", 300, 336, **GQA, head_dim=160, value_dim=96, mask="bhqk", keep="random-empty-rows", reason="a list for every head"),
    Case("hopper-wide-blocked-mask-dense-bias-causal-264x528", 264, 528, head_dim=256, mask="b1qk", keep="blocks", blocked=True, bias="bhqk", causal=True, reason="bits of 32 keys"),
    Case("hopper-wide-blocked-random-mask-192-and-128-393x523", 393, 523, **GQA, head_dim=192, value_dim=128, mask="bhqk", blocked=True, reason="every bit of a tile"),
    Case("hopper-wide-documents-grouped-700", 700, **GQA, head_dim=256, intervals="documents", bias="bg1k", reason="both consumers take every tile"),
    Case("hopper-wide-documents-bias-by-head-window-700", 700, **GQA, head_dim=192, value_dim=128, intervals="documents", bias="1h1k", window=(90, 10), reason="sums by head under intervals"),
    Case("hopper-wide-intervals-dense-bias-160-and-96-392x520", 392, 520, head_dim=160, value_dim=96, intervals="random", bias="bhqk", reason="dS stored under intervals"),
    Case("hopper-wide-intervals-256-304x704", 304, 704, **GQA, head_dim=256, intervals="random", reason="keys that no query attends"),
    Case("hopper-wide-intervals-few-keys-200x9", 200, 9, head_dim=192, intervals="random", bias="b11k", reason="fewer keys than one listed block"),
    Case("hopper-wide-distances-causal-264x520", 264, 520, head_dim=256, bias="1hr", distances=129, causal=True, reason="numbers of pairs beside 256 dims"),
    Case("hopper-wide-distances-192-and-128-300x700", 300, 700, **GQA, head_dim=192, value_dim=128, bias="1hr", distances=257, reason="the same, in panels"),
    Case("hopper-wide-high-scores-400x1300", 400, 1300, head_dim=256, scale=1.0, reason="maxima that do not do are computed again"),
    Case("hopper-wide-high-scores-192-and-128-400x1300", 400, 1300, head_dim=192, value_dim=128, scale=1.5, reason="the same with 128 keys a tile"),
    Case("hopper-wide-several-blocks-a-program-393x263", 393, 263, batch=5, heads=9, head_dim=256, reason="more blocks of queries than processors"),
    Case("hopper-wide-leading-axes-264", 264, leading="bn", head_dim=256, bias="b1hqk", transposed=True, reason="slices by their own axes"),
)  # fmt: skip


def runs() -> list:
    """(case, device, dtype) of every equivalence test as pytest parameters: what this process can run, and what a GPU would."""
    cases = CASES + WIDEST + FACTORS
    of_cpu = interpreted_dtypes if interpreting() else lambda case: (torch.float32, torch.float16, torch.bfloat16)
    cpu = [(case, dtype) for case in cases for dtype in of_cpu(case)]
    gpu = [(case, dtype) for case in cases + LARGE_FACTORS + LARGE + HOPPER for dtype in gpu_dtypes(case)]
    return [pytest.param(case, "cpu", dtype, id=name(case, "cpu", dtype)) for case, dtype in cpu] + [
        pytest.param(case, "cuda", dtype, id=name(case, "cuda", dtype), marks=NEEDS_CUDA) for case, dtype in gpu
    ]


def kernel_dtypes(case: Case) -> tuple[torch.dtype, ...]:
    """Those for which a GPU has kernels."""
    return (torch.bfloat16, torch.float16) if case in WIDEST else (torch.bfloat16, torch.float16, torch.float32)


def gpu_dtypes(case: Case) -> tuple[torch.dtype, ...]:
    """Those in which a GPU runs a case: each asks for kernels of its own, which take seconds to compile.

    Kernels of float16 are those of bfloat16 in all but a few places. So every third case has it, and each with a scale of its own or a bias that
    is kept on chip. Hopper's kernels are not of float32, in which the cases for them get kernels that other cases get, too.
    """
    wanted = {torch.bfloat16, *([torch.float16] if is_in_half(case) else []), *([] if case in HOPPER else [torch.float32])}
    return tuple(dtype for dtype in kernel_dtypes(case) if dtype in wanted)


def interpreted_dtypes(case: Case) -> tuple[torch.dtype, ...]:
    """Those in which the interpreter runs a case: of those that it computes rightly one, and float16 too as on a GPU, or with DMATTN_FULL."""
    if case.bias_dtype == torch.bfloat16:
        return ()
    if torch.float32 not in kernel_dtypes(case):
        return (torch.float16,)
    return (torch.float32, torch.float16) if is_in_half(case) or os.environ.get("DMATTN_FULL") else (torch.float32,)


def is_in_half(case: Case) -> bool:
    """Whether a case runs in float16 besides another dtype."""
    return NUMBERS[case.name] % 3 == 0 or case.scale is not None or "resident" in case.name


NUMBERS = {case.name: number for number, case in enumerate(CASES + WIDEST + FACTORS + LARGE_FACTORS + LARGE + HOPPER)}


def name(case: Case, device: str, dtype: torch.dtype) -> str:
    """What pytest calls a run."""
    return f"{case.name}-{str(dtype).removeprefix('torch.')}-{device}"
