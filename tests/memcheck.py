"""A few small launches of every kernel, to run under a memory checker on a GPU: `make memcheck`."""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

# An allocation each, or what lies past the end of a tensor is another's memory, and what nobody wrote was written for another.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cases
import packed_cases

from dmattn import dynamic_mask_attention, kernels, merge_attention, reference
from dmattn.equivalence import Case, check
from dmattn.kernels import narrow_heads, traits
from dmattn.kernels.hopper import shared_query_grad as hopper_shared_query_grad
from dmattn.kernels.hopper.resident import bias as hopper_resident
from dmattn.kernels.portable import group_parts, split_keys

T = TypeVar("T")
CASES = (
    Case("dense-bias-causal", 65, 37, heads=2, bias="bhqk", causal=True),
    Case("shared-bias-mask", 37, 65, batch=3, bias="1hqk", mask="b1qk", keep="random-empty-rows"),
    Case("key-bias-grouped-window", 130, heads=4, kv_heads=2, bias="bg1k", window=(20, 3)),
    Case("intervals-softcap-odd-dims", 97, heads=2, head_dim=20, value_dim=40, intervals="documents", softcap=5.0, bias="1hq1"),
    Case("global-tokens-dense-bias", 197, heads=2, intervals="global", bias="bhqk"),
    Case(
        "two-intervals-shared-bias-grouped-odd-dims",
        133,
        197,
        heads=4,
        kv_heads=2,
        head_dim=20,
        value_dim=40,
        intervals="random-two",
        bias="1hqk",
        window=(90, 30),
    ),
    Case("decoding-two-intervals", 2, 1999, heads=4, kv_heads=2, intervals="random-two", bias="bg1k"),
    Case("block-mask-large-head", 129, head_dim=200, mask="11qk", keep="blocks"),
    Case("blocked-mask-large-head", 129, 150, head_dim=200, mask="11qk", keep="random", blocked=True, bias="bhqk"),
    Case("blocked-mask-grouped-shared-bias", 150, 97, heads=4, kv_heads=2, mask="1gqk", keep="blocks", blocked=True, bias="1hqk", softcap=5.0),
    Case("few-queries-in-parts-padding", 5, 2999, heads=2, head_dim=72, mask="b11k", keep="padding"),
    Case("few-queries-in-parts-dense-bias-causal", 60, 1201, heads=2, head_dim=20, bias="bhqk", causal=True),
    Case("decoding-groups-few-keys", 3, 77, batch=5, heads=8, kv_heads=2, head_dim=64, mask="b11k", keep="padding", bias="bg1k"),
    Case("few-heads-in-parts", 300, 1501, heads=1, batch=2, head_dim=72, sinks="random"),
    Case("few-heads-in-parts-mask-large-head", 290, 700, heads=2, batch=1, head_dim=200, mask="1hqk", keep="random-empty-rows"),
    Case("few-heads-queries-in-parts-causal", 700, 133, batch=1, heads=2, head_dim=96, causal=True),
    Case("few-queries-few-keys-dense-bias", 1, 300, batch=2, heads=8, head_dim=72, bias="1hqk"),
    Case("mask-rows-from-anywhere", 259, 197, batch=3, heads=2, head_dim=32, mask="bhqk", keep="random-empty-rows"),
    Case("hopper-few-parts-of-keys", 100, 2101, batch=1, heads=4, kv_heads=2, head_dim=64),
    Case("hopper-parts-of-keys-causal-odd-dims", 130, 9001, batch=1, heads=33, head_dim=72, causal=True, transposed=True),
    Case("hopper-rows-of-144-bytes", 201, heads=2, head_dim=72, bias="1hqk", transposed=True),
    Case("hopper-blocked-mask-window", 393, 523, heads=4, kv_heads=2, head_dim=128, mask="1gqk", keep="random", blocked=True, window=(300, 50)),
    Case(
        "hopper-blocked-mask-dense-bias-causal",
        136,
        208,
        heads=2,
        head_dim=64,
        mask="b1qk",
        keep="blocks",
        blocked=True,
        bias="bhqk",
        causal=True,
    ),
    Case("hopper-loaded-bias-causal", 137, 251, heads=2, head_dim=64, bias="bhqk", causal=True),
    Case("hopper-loaded-bias-even-rows", 137, 250, heads=2, head_dim=64, bias="bhqk"),
    Case("hopper-mask-by-bits", 197, 331, heads=3, head_dim=64, mask="b1qk", keep="random-empty-rows"),
    Case("hopper-mask-by-bits-narrow-own-bias", 261, 389, batch=5, heads=4, head_dim=32, mask="bhqk", keep="random", bias="bhqk"),
    Case("hopper-copied-shared-bias", 393, 523, batch=3, heads=2, head_dim=64, bias="1hqk"),
    Case("hopper-copied-shared-bias-of-two-causal", 521, 587, heads=4, head_dim=128, bias="1hqk", causal=True),
    Case("hopper-loaded-shared-bias", 137, 251, batch=3, heads=2, head_dim=128, bias="1hqk"),
    Case("hopper-loaded-shared-bias-fp32", 200, 131, batch=3, heads=2, head_dim=40, bias="1hqk", bias_dtype=torch.float32),
    Case("hopper-loaded-bias-mask-window", 137, 251, heads=2, head_dim=128, mask="b1qk", bias="bhqk", window=(100, 20)),
    Case("hopper-loaded-mask-wide", 137, 251, heads=2, head_dim=192, mask="11qk", bias="bhqk"),
    Case("decoding-blocked-mask-by-head", 3, 1100, heads=4, kv_heads=2, mask="bhqk", keep="random", blocked=True, head_dim=64),
    Case("dense-bias-softcap", 65, 37, bias="bhqk", softcap=5.0),  # whose dBias is no dS that dQ could be made of
    Case("dropout-shared-bias-grouped-causal", 65, 97, heads=4, kv_heads=2, bias="1hqk", causal=True, dropout_p=0.2),
    Case("dropout-dense-bias", 97, 65, bias="bhqk", dropout_p=0.2),
    Case("window-mask-softcap", 49, batch=5, heads=2, bias="1hqk", mask="b1qk", keep="random-empty-rows", softcap=5.0),
    Case("window-dense-bias-odd-dims", 64, 37, heads=2, head_dim=20, value_dim=40, bias="bhqk", causal=True),
    Case("windows-in-parts-dropout", 17, 19, batch=70, bias="11qk", head_dim=64, dropout_p=0.2),
    Case("shared-bias-in-parts-odd-lengths", 97, 70, batch=64, heads=2, head_dim=40, bias="1hqk", mask="b11k"),
    Case("hopper-mask-dense-bias-causal", 136, 208, heads=2, head_dim=128, mask="b1qk", keep="blocks", bias="bhqk", causal=True),
    Case("hopper-drawn-blocks-causal", 200, batch=5, heads=16, kv_heads=8, head_dim=128, causal=True),
    Case("hopper-documents-grouped", 200, heads=4, kv_heads=2, head_dim=128, intervals="documents", bias="bg1k"),
    Case("hopper-intervals-dense-bias", 136, 200, heads=2, head_dim=64, intervals="random", bias="bhqk"),
    Case("rows-shared-bias-mask", 128, 64, batch=133, heads=2, head_dim=32, bias="1hqk", mask="b1qk", keep="random-empty-rows"),
    Case("hopper-one-pass-padding-shared-bias", 130, 201, batch=27, heads=4, head_dim=24, mask="b11k", keep="padding", bias="1hqk"),
    Case("hopper-one-pass-own-bias-causal", 131, 72, batch=54, heads=4, head_dim=40, value_dim=64, bias="bhqk", padded=True, causal=True),
    Case("hopper-one-pass-three-consumers", 70, 192, batch=54, heads=4, head_dim=32),
    Case("rows-dense-bias", 64, 128, batch=264, heads=1, head_dim=16, value_dim=32, bias="bhqk"),
    Case("hopper-dense-bias-causal", 136, 200, heads=2, head_dim=128, bias="bhqk", causal=True),
    Case("hopper-shared-bias-grouped-window", 200, 136, batch=3, heads=2, kv_heads=1, head_dim=64, bias="1hqk", window=(90, 20)),
    Case("hopper-shared-bias-of-many-window", 200, 136, batch=9, heads=2, kv_heads=1, head_dim=64, bias="1hqk", window=(90, 20)),
    Case("hopper-shared-bias-of-many-key-mask", 197, 264, batch=10, heads=2, head_dim=72, mask="b11k", keep="random", bias="1hqk"),
    Case("hopper-shared-bias-tiles-left-over", 600, 648, batch=9, heads=5, head_dim=64, bias="1hqk"),  # of 150 on 132 processors
    Case("hopper-padded-heads-shared-bias", 400, 520, batch=9, heads=11, head_dim=40, bias="1hqk"),
    Case("hopper-padded-heads-mask-of-pairs", 400, 520, batch=3, heads=11, head_dim=40, mask="b1qk", keep="random-empty-rows"),
    Case("decoding-wide-heads", 2, 600, batch=40, heads=8, head_dim=192, causal=True),
    Case("hopper-shared-bias-of-two-causal", 197, 264, heads=3, head_dim=128, bias="1hqk", causal=True),
    Case("hopper-shared-bias-of-five-window", 200, 136, batch=5, heads=2, kv_heads=1, head_dim=64, bias="1hqk", window=(90, 20)),
    Case("hopper-shared-bias-of-eight-causal", 197, 264, batch=4, heads=2, head_dim=64, bias="11qk", causal=True),
    Case("hopper-shared-bias-of-four-causal", 197, 264, batch=2, heads=2, head_dim=128, bias="11qk", causal=True),
    Case("hopper-key-bias-odd-lengths", 131, 197, heads=2, head_dim=88, value_dim=72, bias="bh1k"),
    Case("hopper-cut-dims-exact-scale", 197, 264, batch=3, heads=2, head_dim=72, value_dim=80, bias="1hqk", scale=0.125),
    Case("hopper-several-blocks-a-program", 393, 263, batch=5, heads=9, head_dim=128, bias="1h1k"),
    Case("hopper-intervals-several-blocks-a-program", 520, 100, batch=4, heads=9, head_dim=128, intervals="random", bias="b11k"),
    Case("hopper-three-consumers-odd-dims", 190, 2051, heads=2, head_dim=40, value_dim=64),
    Case("hopper-three-consumers-dense-bias", 380, 2056, heads=2, head_dim=64, bias="bhqk"),
    Case("hopper-exact-scale-several-blocks-a-program", 393, 264, batch=5, heads=9, head_dim=128, bias="1hqk", scale=0.125),
    Case("hopper-high-scores", 200, 776, heads=2, head_dim=128, scale=2.0),
    Case("hopper-three-consumers-scale-one-dense-bias", 190, 2056, heads=2, head_dim=64, bias="bhqk", scale=1.0),
    Case("hopper-documents-grouped-no-bias", 200, heads=4, kv_heads=2, head_dim=64, intervals="documents"),
    Case("rows-shared-bias-and-mask", 97, 70, leading="bn", head_dim=40, bias="b1hqk", mask="1nhqk", keep="blocks"),
    Case("copies-axial-key-bias", 70, 97, leading="bnm", head_dim=40, bias="b1mh1k", intervals="1n1hk", transposed=True),
    Case("windows-of-some-axes", 49, leading="bn", batch=5, rows=3, bias="b1hqk", mask="1n1qk"),
    Case("hopper-rows-resident-bias", 192, 320, leading="bn", rows=140, heads=4, head_dim=32, bias="b1hqk"),
    Case("hopper-copies-resident-bias", 200, 136, leading="bnm", batch=40, rows=2, copies=4, heads=4, head_dim=16, bias="1n1hqk"),
    Case("hopper-rows-shared-bias-of-three", 136, 200, leading="bn", batch=4, head_dim=64, bias="b1hqk"),
    Case("hopper-rows-shared-bias-of-eight-causal", 197, 264, leading="bn", batch=8, heads=3, head_dim=64, bias="1nhqk", causal=True),
    Case(
        "hopper-rows-shared-bias-of-many-window",
        200,
        136,
        leading="bn",
        rows=9,
        heads=4,
        kv_heads=2,
        head_dim=64,
        bias="b1hqk",
        window=(90, 20),
    ),
    Case("hopper-rows-block-mask-key-bias", 520, 776, leading="bn", head_dim=128, mask="1nhqk", keep="blocks", bias="b1h1k"),
    Case("hopper-rows-intervals-key-bias", 520, leading="bn", heads=4, kv_heads=2, head_dim=128, intervals="1n1k", bias="1ng1k"),
    Case("hopper-rows-intervals-dense-bias", 392, 520, leading="bn", head_dim=128, intervals="b11k", bias="1nhqk", window=(100, 60)),
    Case("hopper-resident-bias", 192, 320, batch=7, heads=2, head_dim=32, bias="1hqk"),
    Case("hopper-shared-bias-mask-by-head", 197, 320, batch=133, heads=2, head_dim=32, bias="1hqk", mask="bh1k", keep="padding", sinks="far"),
    Case("hopper-resident-bias-of-all-heads", 320, 64, batch=5, heads=3, head_dim=16, bias="11qk"),
    Case("hopper-wide-odd-lengths", 197, 131, heads=2, head_dim=256),
    Case("hopper-wide-key-bias-causal-grouped", 197, 264, heads=4, kv_heads=2, head_dim=192, value_dim=128, bias="bg1k", causal=True),
    Case("hopper-wide-dense-bias-causal", 136, 264, heads=2, head_dim=256, bias="bhqk", causal=True),
    Case("hopper-wide-shared-bias-odd-dims", 200, 136, batch=3, heads=2, head_dim=160, value_dim=136, bias="1hqk"),
    Case("hopper-wide-shared-bias-fp32-causal", 197, 264, batch=3, heads=2, head_dim=256, bias="1hqk", bias_dtype=torch.float32, causal=True),
    Case("hopper-wide-mask-dense-bias", 136, 208, heads=2, head_dim=256, mask="b1qk", keep="blocks", bias="bhqk"),
    Case("hopper-wide-blocked-mask-window", 393, 523, head_dim=192, value_dim=128, mask="bhqk", keep="random", blocked=True, window=(300, 50)),
    Case("hopper-wide-documents-grouped", 200, heads=4, kv_heads=2, head_dim=256, intervals="documents", bias="bg1k"),
    Case("hopper-wide-intervals-dense-bias", 200, 264, head_dim=160, value_dim=96, intervals="random", bias="bhqk"),
    Case("hopper-wide-distances-sinks-causal", 200, 264, heads=2, head_dim=192, bias="1hr", distances=33, causal=True, sinks="far"),
    Case("hopper-wide-several-blocks-a-program", 393, 263, batch=5, heads=9, head_dim=256),
    Case("decoding-key-bias-grouped", 1, 1100, heads=4, kv_heads=2, bias="bg1k", head_dim=128),
    Case("decoding-masks-by-head-odd-dims", 3, 1101, heads=6, kv_heads=2, mask="bhqk", bias="bhqk", head_dim=40, value_dim=100, causal=True),
    Case("decoding-listed-mask-several-tiles", 20, 2000, batch=1, heads=8, kv_heads=2, mask="b1qk", keep="blocks", softcap=5.0),
    Case("decoding-listed-intervals-window", 2, 1999, intervals="padding", window=(1500, 0)),
    Case("sinks-window-grouped-bias-of-queries", 70, 130, heads=4, kv_heads=2, causal=True, window=(20, 0), bias="1hq1", sinks="random"),
    Case("sinks-in-one-tile", 37, 50, batch=5, heads=3, bias="1hqk", sinks="far", sinks_dtype=torch.float32),
    Case("sinks-summed-in-parts", 2100, 70, batch=3, heads=2, sinks="random"),
    Case("decoding-sinks-grouped", 2, 1101, heads=6, kv_heads=2, causal=True, sinks="far", head_dim=64),
    Case("decoding-sinks-without-splits", 1, 700, batch=200, heads=8, kv_heads=2, sinks="random", head_dim=64),
    Case("hopper-sinks-causal-grouped", 200, 264, heads=6, kv_heads=2, head_dim=128, causal=True, sinks="far"),
    Case("hopper-three-consumers-keys", 520, 1153, batch=1, heads=16, head_dim=64),
    Case("hopper-two-consumers-keys-window", 1100, batch=1, heads=16, head_dim=128, window=(200, 30)),
    Case("hopper-one-consumer-sinks-dense-bias", 380, 2056, heads=3, head_dim=64, bias="bhqk", sinks="far"),
    Case("hopper-resident-bias-sinks", 192, 320, batch=7, heads=3, head_dim=32, bias="1hqk", sinks="far"),
    Case("distances-odd-lengths", 97, 131, heads=2, bias="bhr", distances=33, zero=5),
    Case("distances-shared-mask", 131, 97, batch=3, bias="11r", distances=300, mask="b1qk", keep="blocks", causal=True),
    Case("distances-documents-grouped-dropout", 97, heads=4, kv_heads=2, bias="1gr", distances=41, intervals="documents", dropout_p=0.2),
    Case("hopper-distances-odd-lengths", 330, 2057, heads=2, head_dim=64, bias="bhr", distances=300, zero=7),
    Case("hopper-distances-causal-grouped", 200, 264, heads=4, kv_heads=2, head_dim=40, bias="1hr", distances=33, causal=True),
    Case("distances-in-one-tile", 49, batch=7, heads=2, bias="1hr", distances=31),
    Case("distances-decoding-grouped", 2, 1100, heads=4, kv_heads=2, bias="1hr", distances=257, head_dim=128),
    Case("hopper-narrow-key-bias-causal", 393, 400, heads=4, kv_heads=2, head_dim=24, bias="bg1k", causal=True),
    Case("hopper-narrow-own-bias", 393, 400, heads=2, head_dim=32, bias="bhqk"),
    Case("hopper-distances-padding", 197, 264, heads=2, head_dim=64, bias="1hr", distances=65, mask="b11k", keep="padding"),
    Case("hopper-distances-documents-grouped", 200, heads=4, kv_heads=2, head_dim=128, bias="1hr", distances=65, intervals="documents"),
    Case("hopper-resident-loaded-bias", 197, 317, batch=7, heads=2, head_dim=32, bias="1hqk"),
    Case("hopper-narrow-loaded-own-bias-even-rows", 100, 198, heads=2, head_dim=32, bias="bhqk"),
    Case("hopper-narrow-loaded-shared-bias-padding", 197, 265, batch=3, heads=2, head_dim=24, bias="1hqk", mask="b11k", keep="padding"),
    Case("hopper-narrow-key-mask", 393, 400, heads=2, head_dim=32, mask="b11k", keep="padding"),
    Case("hopper-loaded-bias-even-rows-causal", 197, 270, heads=2, head_dim=64, bias="bhqk", causal=True),
    Case("hopper-few-blocks-key-bias", 1153, 1301, batch=1, heads=4, kv_heads=2, head_dim=64, bias="bh1k"),
    Case("hopper-few-blocks-causal", 1291, batch=1, heads=4, kv_heads=2, head_dim=64, causal=True),
    Case("hopper-few-blocks-distances", 1100, 1153, batch=1, heads=3, head_dim=64, bias="1hr", distances=65),
    Case("factors-odd-dims", 97, 65, heads=4, kv_heads=2, head_dim=20, factors=("bh", "1g")),
    Case("factors-shared-sequence-first", 70, 97, heads=2, head_dim=64, factors=("b1", "b1"), transposed=True),
    *cases.FAULTS,
)
# Of sequences: the longest, and two more, are multiples of 8 and 16, as the copy engine reads rows; or odd; or enough for narrow heads on Hopper.
LENGTHS, ODD = dict(lengths_q=(198, 3, 0, 70), lengths_k=(206, 0, 40, 130)), dict(lengths_q=(70, 3, 33), lengths_k=(91, 0, 64))
LONG = dict(lengths_q=(400, 3, 130), lengths_k=(2070, 65, 130))
PACKED = (
    packed_cases.Case("packed-dense-bias-causal", bias="nhqk", **LENGTHS, head_dim=128, value_dim=128, options=dict(causal=True)),
    packed_cases.Case("packed-shared-bias-wide", bias="1hqk", **LENGTHS, head_dim=192, value_dim=128, options=dict(causal=True)),
    packed_cases.Case("packed-shared-bias-window", bias="1gqk", **LENGTHS, head_dim=64, value_dim=64, options=dict(window=(90, 20))),
    packed_cases.Case(
        "packed-mask-shared-bias-softcap", mask="nhqk", bias="1hqk", **LENGTHS, head_dim=64, value_dim=64, options=dict(softcap=3.0)
    ),
    packed_cases.Case("packed-mask-window", mask="n1qk", **LENGTHS, head_dim=128, value_dim=128, options=dict(window=(90, 20))),
    packed_cases.Case("packed-mask-key-bias", mask="n1qk", bias="nh1k", **LENGTHS, head_dim=128, value_dim=128),
    packed_cases.Case("packed-causal-cut-dims", **LENGTHS, head_dim=80, value_dim=72, options=dict(causal=True)),
    packed_cases.Case("packed-mask-query-bias-odd-lengths", mask="1hqk", bias="nhq1", **ODD, head_dim=40),
    packed_cases.Case("packed-distances-each-mask", mask="n1qk", bias="nhr", **LENGTHS, head_dim=128, value_dim=128),
    packed_cases.Case("packed-distances-dropout-odd-lengths", bias="1hr", **ODD, options=dict(causal=True, dropout_p=0.2)),
    packed_cases.Case("packed-long-shared-bias", bias="1hqk", **LONG, head_dim=64, value_dim=64),
    packed_cases.Case("packed-long-distances", bias="1gr", **LONG, head_dim=64, value_dim=64),
)
split_keys.LISTED_BYTES = 0  # lists for small problems too
hopper_resident.FEWEST_MEMBERS = 0  # and a bias on chip
group_parts.LEAST_QUERIES = group_parts.QUERIES_OF_FLOATS = group_parts.LEAST_HEADS = 1  # and groups of heads dealt out
narrow_heads.FULL = 0  # and Hopper's kernels for few narrow rows
hopper_shared_query_grad.LEAST_FILL = {1: 0.0, 2: 0.0}  # the same for dBias beside dQ


# Queries, keys and head dims of key and value: (300, 1300) sorts more than one run of keys, and the last is one for Hopper.
DYNAMIC = ((97, 97, 40, 24), (1, 150, 40, 24), (5, 150, 40, 24), (300, 1300, 40, 24), (300, 450, 128, 128))

JOINED = ((37, 40), (130, 128))  # queries and dims of values


def check_dynamic(len_q: int, len_k: int, head_dim: int, value_dim: int, dtype: torch.dtype, device: str = "cuda") -> list[str]:
    """What differs from attention with the same mask written out: the plan, the reordering and both passes by lists of blocks."""
    random = torch.Generator().manual_seed(0)
    shapes = ((2, 4, len_q, head_dim), (2, 2, len_k, head_dim), (2, 2, len_k, value_dim), (2, 2, len_k))
    inputs = [torch.randn(shape, generator=random).to(device, dtype).requires_grad_() for shape in shapes]
    valid = (torch.rand(2, len_k, generator=random) < 0.8).to(device)
    results = []
    for truth in (False, True):
        query, key, value, key_bias = (x.detach().double().requires_grad_() if truth else x for x in inputs)
        if truth:
            mask = reference.dynamic_mask(inputs[3], 20, len_q=len_q, valid=valid[:, None])
            out = reference.attention(query, key, value, mask=mask, bias=key_bias[:, :, None])
        else:
            out = dynamic_mask_attention(query, key, value, key_bias, keep=20, key_padding_mask=valid)
        gradients = torch.autograd.grad(out, (query, key, value, key_bias), torch.ones_like(out))
        results.append((out, *gradients))
    band = 16 * torch.finfo(dtype).eps
    pairs = zip(("out", "d_query", "d_key", "d_value", "d_key_bias"), *results, strict=True)
    return [name for name, got, want in pairs if not (got - want).abs().max() <= band * want.abs().max().clamp(min=1)]


def check_joined(len_q: int, value_dim: int, dtype: torch.dtype, device: str = "cuda") -> list[str]:
    """What differs from the same results joined by PyTorch, whether in place or not."""
    random = torch.Generator().manual_seed(0)
    parts = [
        (
            torch.randn((2, len_q, 3, value_dim), generator=random).to(device, dtype).transpose(1, 2),
            torch.randn((2, 3, len_q), generator=random).to(device),
        )
        for _ in range(2)
    ]
    true, true_lse = merge_attention([out for out, _ in parts], [lse for _, lse in parts])
    made = torch.empty_like(true), torch.empty_like(true_lse)
    for into in (made, parts[0]):
        kernels.join(*parts, into)
    band = 4 * torch.finfo(dtype).eps
    joined = (("out", made[0], true), ("lse", made[1], true_lse), ("out in place", parts[0][0], true))
    return [name for name, x, y in joined if not (x - y).abs().max() <= band * y.abs().max()]


def check_packed(case: packed_cases.Case, dtype: torch.dtype, device: str = "cuda") -> list[str]:
    """What differs from the reference of each sequence alone; with dropout, which that has in another way, what is not finite."""
    given = packed_cases.inputs(case, dtype, device)
    got = packed_cases.results(packed_cases.packed, case, given)
    if "dropout_p" in case.options:
        return [name for name, x in got.items() if name != "lse" and not x.isfinite().all()]
    true = packed_cases.results(packed_cases.one_by_one, case, given)
    band = 16 * torch.finfo(dtype).eps
    return [name for name, x in true.items() if not _error(got[name].double(), x.double()) <= band]


def _error(got: torch.Tensor, true: torch.Tensor) -> float:
    """The largest difference, relative to what is larger than 1; -inf and -inf are the same."""
    difference = (got - true).abs().masked_fill(got == true, 0.0)
    return (difference.max() / true.masked_fill(got == true, 0.0).abs().max().clamp(min=1)).item()


def tries(portable: bool) -> list[tuple[str, Callable[[], list[str]]]]:
    """Every case in every dtype by name, as a function that says what is wrong; dtype after dtype."""
    listed: list[tuple[str, Callable[[], list[str]]]] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        cases_ = [case for case in CASES if not (portable and case.name.startswith("hopper-"))]
        listed += [(f"{case.name} {dtype}", partial(check_case, case, dtype)) for case in cases_]
        listed += [(f"{packed.name} {dtype}", partial(check_packed, packed, dtype)) for packed in PACKED]
        listed += [(f"dynamic-mask {sizes} {dtype}", partial(check_dynamic, *sizes, dtype)) for sizes in DYNAMIC]
        listed += [(f"joined {sizes} {dtype}", partial(check_joined, *sizes, dtype)) for sizes in JOINED]
    return listed


def varied(listed: Sequence[T]) -> list[T]:
    """In a random order, but each case in one dtype before any in a second: of what :func:`tries` gives."""
    dtypes = 3
    cases_ = list(range(len(listed) // dtypes))
    random.Random(0).shuffle(cases_)
    return [listed[case + (place + turn) % dtypes * len(cases_)] for turn in range(dtypes) for place, case in enumerate(cases_)]


def check_case(case: Case, dtype: torch.dtype) -> list[str]:
    """What is beyond its budget."""
    return [str(verdict) for verdict in check(case, dtype, "cuda") if not verdict.passed]


def part(text: str) -> tuple[int, int]:
    """I/N, the I-th of N parts."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"expected I/N with 1 <= I <= N, received {text}")
    return int(number), int(of)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--portable", action="store_true", help="without the kernels for Hopper, and the cases that are there for them")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="I/N", help="the I-th of N parts of the cases, of which each has as many")
    parser.add_argument(
        "--until",
        type=float,
        metavar="T",
        help="begin no case after this, in seconds since 1970; cases are in another order then, so that all kinds come up",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases, and run none")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, packed sequences, dynamic masks and joined results, in every dtype; 0 when all are within their budgets."""
    faulthandler.enable()  # a process of several died of a segmentation fault on the host: it says in which threads
    options = parsed(arguments)
    traits.GLUON = traits.GLUON and not options.portable
    listed = tries(options.portable)
    if options.until is not None:
        listed = varied(listed)
    number, of = options.part
    listed = listed[number - 1 :: of]
    if options.list:
        print(*(name for name, _ in listed), sep="\n")
        return 0
    print(f"cases: {len(listed)} in this part", flush=True)
    failed = done = 0
    for name, wrongs in listed:
        if options.until is not None and time.time() >= options.until:
            break
        wrong = wrongs()
        failed += bool(wrong)
        done += 1
        print(name, "FAILED" if wrong else "ok", *wrong, flush=True)
    print(f"cases: {done} of {len(listed)} run, {failed} failed", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
