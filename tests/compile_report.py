"""Compile every kind of kernel launch for one GPU target without a GPU, and report what the compiler made of it.

python tests/compile_report.py sm_90        prints a table, one line per kernel: registers, spilled bytes, shared memory
python tests/compile_report.py gfx942 --json
python tests/compile_report.py sm_80 --fewer   compiles few launches that have each kernel, and each flag, argument and type of any
python tests/compile_report.py sm_90 --beside  compiles what --fewer would, but what it compiles for sm_80 too once of each kernel
python tests/compile_report.py gfx942 --once   compiles each kernel for the first launch that has it

The launches are the real ones, on tensors of the "meta" device; each becomes a compilation with exactly the specialisation that a launch
would have. One process per compilation.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import jit
from triton.runtime.driver import driver

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import covers

from dmattn import BlockMask, RelativeBias, kernels
from dmattn.bits import BLOCK, WORD
from dmattn.equivalence import Case
from dmattn.execution import backend
from dmattn.execution.passes import learned_of
from dmattn.factors import Form
from dmattn.kernels.base.no_device import NoDevice, gpu_target
from dmattn.problem import Problem
from dmattn.states import GRANULE

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAUNCHES = (
    (Case("dense-bias-causal-d128", 4096, heads=16, head_dim=128, bias="bhqk", causal=True), BF16),
    (Case("shared-bias-d64", 4096, heads=16, head_dim=64, bias="1hqk"), BF16),
    (Case("shared-bias-of-four-window-d64", 4096, batch=4, heads=16, head_dim=64, bias="1hqk", window=(512, 64)), BF16),
    (Case("shared-bias-of-eight-window-d64", 4096, batch=8, heads=16, head_dim=64, bias="1hqk", window=(512, 64)), BF16),
    (Case("shared-bias-of-nine-tiles-left-over-d64", 600, 648, batch=9, heads=5, head_dim=64, bias="1hqk"), BF16),
    (Case("shared-bias-d32-short", 64, batch=64, heads=8, head_dim=32, bias="1hqk"), FP16),
    (Case("windows-of-49-mask-d32", 49, batch=64, heads=8, head_dim=32, mask="b1qk", bias="1hqk"), BF16),
    (Case("windows-dense-bias-dropout-d64", 64, batch=64, heads=8, head_dim=64, bias="bhqk", dropout_p=0.1), BF16),
    (Case("windows-key-bias-softcap-d128", 64, 33, batch=64, heads=8, head_dim=128, bias="b11k", softcap=30.0), BF16),
    (Case("windows-of-groups-mask-d64", 49, batch=64, heads=8, kv_heads=4, head_dim=64, mask="b1qk", bias="1gqk"), BF16),
    (Case("windows-of-groups-key-bias-d128", 64, 25, batch=64, heads=12, kv_heads=4, head_dim=128, bias="bg1k", causal=True), BF16),
    (Case("windows-of-groups-d128", 64, batch=64, heads=8, kv_heads=4, head_dim=128, bias="bhqk", softcap=30.0), FP16),
    (Case("rows-shared-bias-d32", 384, batch=256, heads=4, head_dim=32, bias="1hqk"), BF16),
    (Case("long-rows-shared-bias-d32", 768, batch=256, heads=4, head_dim=32, bias="1hqk"), BF16),
    (Case("long-rows-shared-bias-mask-d32", 768, batch=256, heads=4, head_dim=32, mask="b11k", bias="1hqk"), BF16),
    (Case("one-pass-d64", 197, batch=128, heads=12, head_dim=64, transposed=True), BF16),
    (Case("one-pass-dense-bias-causal-d64", 256, 264, batch=33, heads=4, head_dim=64, value_dim=48, bias="bhqk", causal=True), FP16),
    (Case("one-pass-mask-softcap-window-d48", 300, 400, batch=33, heads=4, head_dim=48, mask="b1qk", softcap=30.0, window=(100, 20)), BF16),
    (Case("rows-dense-bias-mask-d32", 256, 192, batch=256, heads=4, head_dim=32, mask="b11k", bias="bhqk"), BF16),
    (Case("rows-key-bias-d16", 128, 320, batch=256, heads=4, head_dim=16, mask="b1qk", bias="b11k"), FP16),
    (Case("rows-shared-bias-mask-d32", 384, batch=256, heads=4, head_dim=32, mask="b11k", bias="1hqk"), BF16),
    (Case("leading-rows-shared-bias-d32", 384, leading="bn", rows=128, heads=4, head_dim=32, bias="b1hqk"), BF16),
    (Case("leading-windows-of-49-mask-d32", 49, leading="bn", batch=64, rows=4, heads=8, head_dim=32, mask="1n1qk", bias="b1hqk"), BF16),
    (Case("leading-shared-bias-of-four-d64", 4096, leading="bn", rows=4, heads=8, head_dim=64, bias="b1hqk"), BF16),
    (Case("mask-distances-d64", 1000, batch=4, heads=12, head_dim=64, mask="b1qk", bias="1hr", distances=257), BF16),
    (Case("mask-distances-d32", 1001, batch=16, heads=8, head_dim=32, mask="b1qk", bias="1hr", distances=257), BF16),
    (Case("mask-bias-of-queries-causal-d24", 200, batch=149, heads=8, head_dim=24, mask="b1qk", bias="1hq1", causal=True), BF16),
    (Case("mask-key-bias-gqa-d32", 1024, batch=16, heads=8, kv_heads=4, head_dim=32, mask="bhqk", bias="bh1k"), FP16),
    (
        Case(
            "documents-distances-window-d32",
            1024,
            batch=8,
            heads=8,
            head_dim=32,
            intervals="documents",
            bias="1hr",
            distances=65,
            window=(64, 64),
        ),
        BF16,
    ),
    (Case("prepared-mask-shared-bias-d24", 2048, batch=4, heads=8, head_dim=24, mask="b1qk", blocked=True, bias="1hqk", causal=True), BF16),
    (Case("prepared-mask-distances-d128", 2048, batch=4, heads=12, head_dim=128, mask="b1qk", blocked=True, bias="1hr", distances=257), BF16),
    (Case("documents-shared-bias-d128", 4096, batch=9, heads=8, head_dim=128, intervals="documents", bias="1hqk"), BF16),
    (Case("leading-shared-bias-of-eight-mask-d128", 2048, leading="bn", rows=8, heads=8, head_dim=128, mask="1nhqk", bias="b1hqk"), BF16),
    (Case("leading-shared-bias-of-many-d64", 1024, leading="bnm", rows=16, heads=4, head_dim=64, bias="1n1hqk"), BF16),
    (Case("leading-intervals-key-bias-d128", 2048, leading="bn", heads=8, head_dim=128, intervals="1n1k", bias="1nh1k"), BF16),
    (Case("leading-in-runs-mask-d64", 1000, leading="bn", heads=4, head_dim=64, mask="1nhqk", bias="b1hqk", transposed=True), BF16),
    (Case("windows-fp32-d64", 31, 32, batch=64, heads=8, head_dim=64, bias="1hqk"), FP32),
    (Case("shared-bias-of-four-d128", 4096, batch=4, heads=16, head_dim=128, bias="1hqk"), BF16),
    (Case("shared-bias-of-many-d128", 4096, batch=5, heads=16, head_dim=128, bias="1hqk"), BF16),
    (Case("shared-bias-of-many-key-mask-d128", 4096, batch=5, heads=16, head_dim=128, mask="b11k", bias="1hqk"), BF16),
    (Case("key-bias-gqa-causal-d128", 4096, heads=16, kv_heads=4, head_dim=128, bias="bg1k", causal=True), BF16),
    (Case("parts-of-keys-d128", 512, 50176, heads=8, head_dim=128), BF16),
    (Case("parts-of-keys-causal-d72", 300, 20001, heads=2, head_dim=72, causal=True, transposed=True), BF16),
    (Case("mask-softcap-d128", 4096, heads=16, head_dim=128, mask="11qk", softcap=30.0, bias="bhqk"), BF16),
    (Case("documents-gqa-d128", 4096, heads=16, kv_heads=8, head_dim=128, intervals="b1k"), BF16),
    (Case("documents-d96", 4096, heads=16, head_dim=96, intervals="b1k"), FP16),
    (Case("window-d96", 4096, heads=16, head_dim=96, window=(1023, 0)), BF16),
    (Case("dynamic-gqa-d64", 4096, heads=16, kv_heads=8, head_dim=64, intervals="b1k", bias="bg1k", causal=True), BF16),
    (Case("softcap-causal-gqa-d128", 4096, heads=32, kv_heads=16, head_dim=128, softcap=50.0, causal=True), BF16),
    (Case("softcap-shared-bias-d128", 2048, batch=2, heads=16, head_dim=128, softcap=30.0, bias="1hqk"), BF16),
    (Case("softcap-dense-bias-d64", 2048, batch=2, heads=16, head_dim=64, softcap=30.0, bias="bhqk"), FP16),
    (Case("softcap-window-gqa-d256", 4096, heads=8, kv_heads=4, head_dim=256, softcap=50.0, window=(1023, 0)), BF16),
    (Case("softcap-documents-gqa-d128", 4096, heads=16, kv_heads=8, head_dim=128, softcap=50.0, intervals="b1k"), BF16),
    (Case("causal-d64", 4096, batch=4, heads=32, head_dim=64, causal=True), BF16),
    (Case("causal-gqa-d112", 2048, batch=2, heads=16, kv_heads=8, head_dim=112, causal=True), BF16),
    (Case("dense-bias-causal-d48", 2048, batch=2, heads=16, head_dim=48, bias="bhqk", causal=True), BF16),
    (Case("shared-bias-d160", 2048, batch=2, heads=8, head_dim=160, bias="1hqk"), BF16),
    (Case("causal-gqa-d224", 2048, batch=2, heads=16, kv_heads=8, head_dim=224, causal=True), FP16),
    (Case("dynamic-gqa-d72", 2048, heads=16, kv_heads=8, head_dim=72, intervals="b1k", bias="bg1k", causal=True), BF16),
    (Case("documents-d208", 4096, heads=16, head_dim=208, intervals="b1k"), BF16),
    (Case("block-mask-d128", 4096, heads=16, head_dim=128, mask="1hqk"), BF16),
    (Case("prepared-mask-d128", 4096, heads=16, head_dim=128, mask="1hqk", blocked=True), BF16),
    (Case("prepared-mask-dense-bias-causal-d128", 4096, heads=16, head_dim=128, mask="1hqk", blocked=True, bias="bhqk", causal=True), BF16),
    (
        Case(
            "prepared-mask-shared-bias-softcap-d64",
            4001,
            heads=16,
            kv_heads=4,
            head_dim=64,
            mask="1gqk",
            blocked=True,
            bias="1hqk",
            softcap=30.0,
        ),
        BF16,
    ),
    (Case("mask-shared-bias-d64", 4096, heads=16, head_dim=64, mask="1hqk", bias="1hqk"), BF16),
    (Case("intervals-window-d64", 4096, heads=16, head_dim=64, intervals="padding", window=(128, 0)), BF16),
    (Case("documents-bias-by-head-gqa-d128", 4096, heads=16, kv_heads=4, head_dim=128, intervals="documents", bias="bh1k"), BF16),
    (Case("global-tokens-d64", 4096, heads=16, head_dim=64, intervals="global"), BF16),
    (Case("two-intervals-shared-bias-causal-d128", 4096, heads=16, head_dim=128, intervals="random-two", bias="1hqk", causal=True), BF16),
    (Case("dense-bias-d256", 4096, heads=16, head_dim=256, bias="bhqk"), BF16),
    (Case("exact-scale-shared-bias-causal-d256", 4096, heads=16, kv_heads=8, head_dim=256, bias="1hqk", scale=0.0625, causal=True), BF16),
    (Case("mask-shared-bias-d192", 4096, heads=16, head_dim=192, mask="1hqk", bias="1hqk"), BF16),
    (Case("key-bias-gqa-causal-d192-128", 4096, heads=16, kv_heads=4, head_dim=192, value_dim=128, bias="bg1k", causal=True), BF16),
    (Case("prepared-mask-window-d192-128", 4001, heads=16, head_dim=192, value_dim=128, mask="1hqk", blocked=True, window=(900, 0)), BF16),
    (Case("documents-bias-by-head-gqa-d256", 4096, heads=16, kv_heads=4, head_dim=256, intervals="documents", bias="bh1k"), BF16),
    (Case("intervals-dense-bias-d160-96", 4096, heads=16, head_dim=160, value_dim=96, intervals="random", bias="bhqk"), BF16),
    (Case("distances-causal-d256", 4096, heads=16, head_dim=256, bias="1hr", distances=257, causal=True), BF16),
    (Case("causal-gqa-d512", 4096, heads=8, kv_heads=1, head_dim=512, causal=True), BF16),
    (Case("mask-dense-bias-d512", 4096, heads=4, head_dim=512, mask="11qk", bias="bhqk"), BF16),
    (Case("shared-bias-softcap-d320", 4096, heads=4, head_dim=320, bias="1hqk", softcap=30.0), FP16),
    (Case("documents-key-bias-d512", 4096, heads=4, head_dim=512, intervals="documents", bias="bh1k"), BF16),
    (Case("distances-d512", 4096, heads=4, head_dim=512, bias="1hr", distances=257), BF16),
    (Case("dropout-d512", 1023, heads=4, head_dim=512, bias="bhqk", dropout_p=0.1), BF16),
    (Case("distances-d64", 4096, batch=4, heads=16, head_dim=64, bias="1hr", distances=257), BF16),
    (Case("distances-key-mask-d64", 4096, batch=4, heads=16, head_dim=64, bias="1hr", distances=257, mask="b11k"), BF16),
    (Case("distances-padding-d128", 2048, batch=4, heads=16, head_dim=128, bias="1hr", distances=257, mask="b11k"), BF16),
    (Case("distances-documents-d128", 2048, batch=4, heads=16, head_dim=128, bias="1hr", distances=257, intervals="b1k"), BF16),
    (Case("distances-causal-d128", 4096, batch=2, heads=16, head_dim=128, bias="1hr", distances=8191, causal=True), BF16),
    (Case("distances-mask-causal-d128", 4096, heads=16, kv_heads=4, head_dim=128, bias="1hr", distances=8191, mask="1hqk", causal=True), BF16),
    (Case("odd-lengths-d20", 1023, 777, heads=4, head_dim=20, value_dim=40, mask="b11k", bias="bhqk", bias_dtype=FP32), FP16),
    (Case("loaded-dense-bias-d32", 100, batch=512, heads=16, head_dim=32, bias="bhqk"), FP16),
    (Case("loaded-rows-shared-bias-d32", 317, batch=317, heads=4, head_dim=32, bias="1hqk"), BF16),
    (Case("copied-long-rows-shared-bias-mask-d32", 769, batch=256, heads=4, head_dim=32, mask="b11k", bias="1hqk"), BF16),
    (Case("copied-shared-bias-d64", 1001, batch=4, heads=16, head_dim=64, bias="1hqk"), BF16),
    (Case("loaded-shared-bias-d64", 301, batch=4, heads=2, head_dim=64, bias="1hqk"), BF16),
    (Case("loaded-shared-bias-d128", 301, batch=4, heads=2, head_dim=128, bias="1hqk"), BF16),
    (Case("loaded-mask-dense-bias-fp32-d128", 1001, heads=16, head_dim=128, mask="11qk", bias="bhqk", bias_dtype=FP32), BF16),
    (
        Case(
            "loaded-shared-bias-fp32-softcap-window-d256",
            1001,
            batch=3,
            heads=16,
            head_dim=256,
            bias="1hqk",
            bias_dtype=FP32,
            softcap=30.0,
            window=(500, 90),
        ),
        BF16,
    ),
    (Case("shared-bias-key-mask-d192-128", 2048, batch=3, heads=16, head_dim=192, value_dim=128, bias="1hqk", mask="b11k"), BF16),
    (Case("loaded-dense-bias-causal-d256", 1001, heads=16, head_dim=256, bias="bhqk", causal=True), BF16),
    (Case("dropout-shared-bias-d64", 4096, heads=16, head_dim=64, bias="1hqk", dropout_p=0.1), BF16),
    (Case("one-kv-head-causal-d64", 2048, batch=1, heads=71, kv_heads=1, head_dim=64, causal=True), BF16),
    (Case("one-kv-head-key-bias-d128", 2048, batch=1, heads=16, kv_heads=1, head_dim=128, bias="bg1k"), BF16),
    (Case("one-kv-head-documents-d128", 2048, batch=1, heads=16, kv_heads=1, head_dim=128, intervals="b1k"), BF16),
    (Case("one-kv-head-key-bias-fp32-d128", 1024, batch=1, heads=8, kv_heads=1, head_dim=128, bias="bg1k"), FP32),
    (Case("narrowest-shared-bias-mask-d16", 640, batch=64, heads=8, head_dim=16, mask="b11k", bias="1hqk"), BF16),
    (Case("sinks-causal-gqa-d128", 4096, heads=16, kv_heads=4, head_dim=128, causal=True, sinks="random", sinks_dtype=FP32), BF16),
    (Case("sinks-window-causal-gqa-d64", 4096, heads=64, kv_heads=8, head_dim=64, causal=True, window=(127, 0), sinks="random"), BF16),
    (Case("fp32-d128", 1024, heads=4, head_dim=128, bias="1hqk"), FP32),
    (Case("fp32-d256", 1023, heads=4, head_dim=256, bias="bhqk", mask="11qk"), FP32),
    (Case("few-queries-fp32-d128", 49, 130, heads=4, head_dim=128, bias="1hqk"), FP32),
)
FORWARD = (  # the forward pass alone: the backward pass is that of any other problem
    (Case("documents-dense-bias-d128", 4096, heads=16, head_dim=128, intervals="documents", bias="bhqk"), BF16),
    (Case("exact-scale-dense-bias-d128", 4096, heads=16, head_dim=128, bias="bhqk", scale=0.125), BF16),
    (Case("sinks-dense-bias-d64", 4096, heads=16, head_dim=64, bias="bhqk", sinks="random"), BF16),
    (Case("sinks-rows-shared-bias-d32", 384, batch=256, heads=4, head_dim=32, bias="1hqk", sinks="random"), BF16),
    (Case("sinks-windows-of-49-d32", 49, batch=64, heads=8, head_dim=32, bias="1hqk", sinks="random"), BF16),
    (Case("decoding-sinks-gqa-d64", 1, 131072, batch=1, heads=64, kv_heads=8, head_dim=64, sinks="random"), BF16),
    (Case("decoding-one-split-sinks-gqa-d64", 1, 8192, batch=64, heads=64, kv_heads=8, head_dim=64, sinks="random"), BF16),
    (Case("dense-bias-fp16-d64", 4096, heads=16, head_dim=64, bias="bhqk"), FP16),
    (Case("no-bias-d64", 4096, heads=16, head_dim=64), BF16),
    (Case("causal-many-keys-d128", 16384, 1 << 23, batch=1, heads=2, head_dim=128, causal=True), BF16),
    (Case("few-blocks-d64", 2048, batch=1, heads=16, head_dim=64), BF16),
    (Case("few-blocks-key-bias-causal-d64", 2048, batch=1, heads=16, head_dim=64, bias="bh1k", causal=True), BF16),
    (Case("few-blocks-distances-d64", 2048, batch=1, heads=16, head_dim=64, bias="1hr", distances=129), BF16),
    (Case("no-bias-d72", 729, batch=32, heads=16, head_dim=72), BF16),
    (Case("causal-gqa-d80", 4096, heads=16, kv_heads=4, head_dim=80, causal=True), FP16),
    (Case("exact-scale-shared-bias-d80", 4096, heads=16, head_dim=80, bias="1hqk", scale=0.125), BF16),
    (Case("key-bias-block-mask-d80", 4096, heads=16, head_dim=80, mask="1hqk", bias="bh1k"), BF16),
    (Case("decoding-key-bias-gqa-d128", 1, 131072, batch=1, heads=32, kv_heads=8, head_dim=128, bias="bg1k"), BF16),
    (Case("decoding-one-split-gqa-d128", 1, 8192, batch=64, heads=32, kv_heads=8, head_dim=128), BF16),
    (Case("decoding-causal-mask-bias-d64", 16, 32767, heads=8, head_dim=64, mask="bhqk", bias="bhqk", causal=True), BF16),
    (Case("decoding-64-rows-gqa-causal-d128", 16, 32768, heads=32, kv_heads=8, head_dim=128, causal=True), BF16),
    (Case("decoding-prepared-mask-by-head-d64", 16, 32767, heads=8, kv_heads=2, head_dim=64, mask="bhqk", blocked=True), BF16),
    (Case("decoding-by-head-odd", 3, 8191, heads=6, kv_heads=2, head_dim=80, value_dim=40, mask="bhqk", bias="bhqk", softcap=30.0), FP16),
    (Case("decoding-intervals-window-d256", 4, 131072, heads=8, kv_heads=4, head_dim=256, intervals="padding", window=(65536, 0)), BF16),
    (Case("decoding-64-rows-bias-d256", 16, 32768, heads=32, kv_heads=8, head_dim=256, bias="bhqk"), BF16),
    (Case("decoding-gqa-d512", 1, 32768, heads=8, kv_heads=1, head_dim=512), BF16),
    (Case("decoding-64-rows-bias-d512", 16, 32768, heads=8, kv_heads=2, head_dim=512, bias="bhqk"), BF16),
    (Case("decoding-distances-gqa-d128", 1, 131072, batch=1, heads=32, kv_heads=8, head_dim=128, bias="1hr", distances=257), BF16),
    (Case("decoding-fp32-d128", 1, 8192, heads=8, kv_heads=2, head_dim=128, bias="1h1k"), FP32),
    (Case("decoding-fp32-d256", 4, 8192, heads=8, kv_heads=2, head_dim=256, causal=True), FP32),
)
PACKED = (  # as many sequences as the batch has entries, none longer than the lengths
    (Case("packed-causal-gqa-d128", 2048, batch=8, heads=16, kv_heads=4, head_dim=128, causal=True), BF16),
    (Case("packed-d64", 512, batch=16, heads=12, head_dim=64), BF16),
    (Case("packed-short-d64", 200, batch=40, heads=12, head_dim=64), BF16),
    (Case("packed-short-shared-bias-d64", 200, batch=40, heads=12, head_dim=64, bias="1hqk"), BF16),
    (Case("packed-causal-d64", 2048, batch=8, heads=16, head_dim=64, causal=True, sinks="random"), BF16),
    (Case("packed-key-mask-bias-window-d64", 1000, batch=8, heads=16, head_dim=64, mask="b11k", bias="bh1k", window=(512, 64)), BF16),
    (Case("packed-decoding-gqa-sinks-d128", 2, 8192, batch=4, heads=32, kv_heads=8, head_dim=128, causal=True, sinks="random"), BF16),
    (Case("packed-dense-bias-causal-d128", 2048, batch=8, heads=16, head_dim=128, bias="bhqk", causal=True), BF16),
    (Case("packed-dense-bias-softcap-d64", 1000, batch=8, heads=16, head_dim=64, bias="bhqk", softcap=30.0, bias_dtype=FP32), BF16),
    (Case("packed-shared-bias-mask-gqa-d128", 2048, batch=8, heads=16, kv_heads=4, head_dim=128, bias="1hqk", mask="bhqk"), BF16),
    (Case("packed-shared-bias-d64", 2048, batch=8, heads=16, head_dim=64, bias="1hqk"), BF16),
    (Case("packed-shared-bias-query-mask-d64", 2048, batch=8, heads=16, head_dim=64, bias="1hqk", mask="b1q1"), BF16),
    (Case("packed-mask-key-bias-window-d128", 2048, batch=8, heads=16, head_dim=128, mask="b1qk", bias="bh1k", window=(512, 0)), FP16),
    (Case("packed-shared-bias-dropout-d64", 1024, batch=16, heads=16, head_dim=64, bias="1hqk", dropout_p=0.1), BF16),
    (Case("packed-distances-d64", 4096, batch=4, heads=16, head_dim=64, bias="1hr", distances=257), BF16),
    (Case("packed-causal-gqa-d80", 2048, batch=8, heads=16, kv_heads=4, head_dim=80, causal=True), BF16),
    (Case("packed-distances-sinks-d128", 4096, batch=4, heads=16, head_dim=128, bias="bhr", distances=8191, sinks="random"), BF16),
    (Case("packed-query-mask-bias-d256", 1000, batch=3, heads=4, head_dim=256, mask="b1q1", bias="bhqk", causal=True), BF16),
    (Case("packed-dense-bias-causal-d192", 1000, batch=3, heads=4, head_dim=192, value_dim=128, bias="bhqk", causal=True), BF16),
    (Case("packed-mask-key-bias-d256", 1000, batch=3, heads=4, kv_heads=2, head_dim=256, mask="b1qk", bias="bg1k"), BF16),
    (Case("packed-shared-bias-fp32-d64", 1000, batch=3, heads=4, head_dim=64, bias="1hqk"), FP32),
)
DYNAMIC = Case("dynamic-gqa-d128", 4096, heads=16, kv_heads=8, head_dim=128, bias="bg1k")  # keys in another order
JOINED = "joined-d128"  # results over two sets of keys
FACTORS = (("factors-d32", BF16, BF16, 6, 64), ("factors-d32-fp16", FP16, FP16, 3, 48), ("factors-d32-tf32", FP32, BF16, 6, 64))  # of float32
PLANS = (("plan-1k", 1000), ("plan-16k", 16384), ("plan-128k", 131072), ("plan-1m", 1 << 20))  # of a dynamic mask: lengths

MOST_AT_ONCE = 4  # compilations, each in some hundred megabytes


@triton.jit
def nothing():
    pass


class Compiler:
    """Inside, launches for `target` are noted in `launches`, and those that are `wanted` become compilations: `rows` gets one for each.

    A launch is a kernel with a key of Triton's, and is noted with its types and constants, by which covers.py chooses. Each compiles in a
    process of its own, because bad code generation may abort it, and a few at once. A process is forked at the launch: it compiles as the
    launch would have, with the assembler that is set for it, and what has to be passed to a compiler cannot be sent.
    """

    def __init__(self, target: GPUTarget, wanted: Iterable[tuple] = ()) -> None:
        self.target, self.wanted = target, set(wanted)
        self.case = ""
        self.launches: covers.Launches = {}
        self.rows: list[dict[str, Any]] = []
        self.running: dict[Connection, tuple[dict[str, Any], Any]] = {}
        self.at_once = min(MOST_AT_ONCE, len(os.sched_getaffinity(0)))

    def __enter__(self) -> Compiler:
        self.active, self.compile = driver._active, jit.JITFunction._do_compile
        driver.set_active(NoDevice(self.target))
        triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.disable_line_info = True  # it changes no code and takes a seventh of the time
        with contextlib.redirect_stdout(io.StringIO()):
            nothing.warmup(grid=(1,))  # Triton looks many things up at its first compilation, and forked processes then have them
        jit.JITFunction._do_compile = lambda function, key, *others: self.launched(function, key, others)
        return self

    def __exit__(self, *error: object) -> None:
        jit.JITFunction._do_compile = self.compile
        driver._active = self.active
        while self.running:
            self.collect()

    def launched(self, function: jit.JITFunction, key: Any, others: tuple) -> None:
        launch = function, key
        if launch in self.launches:
            return
        self.launches[launch] = others[0], others[2]
        if launch not in self.wanted:
            return
        while len(self.running) >= self.at_once:
            self.collect()
        forked = multiprocessing.get_context("fork")
        receiving, sending = forked.Pipe(duplex=False)
        process = forked.Process(target=self.compile_here, args=(function, (key, *others), sending))
        process.start()
        sending.close()  # so that the pipe ends with the process
        row = {"case": self.case, "kernel": function.fn.__name__, "module": function.fn.__module__}
        self.rows.append(row)
        self.running[receiving] = row, process

    def compile_here(self, function: jit.JITFunction, arguments: tuple, results: Connection) -> None:
        gc.disable()  # it would look through all that the process was forked with, and copy it by that
        with contextlib.redirect_stdout(io.StringIO()) as log:
            compiled = self.compile(function, *arguments)
        results.send({"hash": compiled.hash, **measures(compiled, log.getvalue(), self.target)})

    def collect(self) -> None:
        """Wait until a process ends, and complete its row: with `ended`, its exit status, if it has sent nothing."""
        for receiving in wait(list(self.running)):
            row, process = self.running.pop(receiving)
            with receiving, contextlib.suppress(EOFError):
                row.update(receiving.recv())
            process.join()
            if "hash" not in row:
                row["ended"] = process.exitcode


def measures(compiled: Any, log: str, target: GPUTarget) -> dict[str, Any]:
    """Registers, spilled bytes (stores), shared memory, atomics on global memory, uneven sums, early starts, barriers in memory where a number is
    stored, too (`shared_barriers`), and stores of two and of four bytes to global memory.

    Atomics on shared memory are how tl.histogram counts, relaxed sums of integers how programs draw numbers, and relaxed maxima of integers how
    they find the largest factor: none is a sum of rounded numbers, which would depend on the order. An uneven sum adds another lane's rounded product to the unrounded product of its own: the lanes
    then hold different sums of the same numbers. A kernel that is launched before another ends has to wait for it before it touches global
    memory, or starts early. A barrier that no instruction uses has the memory of another one, or of what partitions of warps are told as they
    begin, which PTX forbids before `mbarrier.inval`: on an H200 that ran several processes at once, a consumer read a barrier for the number of
    its last member, and waited for ever.
    """
    if target.backend == "hip":
        code = compiled.asm["amdgcn"]
        fields = {key: int(value) for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", code)}
        registers, spilled = fields["vgpr_count"], fields["vgpr_spill_count"] * 4
        atomics = re.findall(r"(?:global|buffer)_atomic_(?!s?max)", code)
        uneven: list[str] = []
    else:
        registers = max(map(int, re.findall(r"Used (\d+) registers", log)))
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", log)))
        code = compiled.asm["ptx"]
        atomics = re.findall(r"\b(?:atom|red)\.(?!shared|global\.(?:gpu\.relaxed|relaxed\.gpu)\.(?:add\.u32|max\.s32))", code)
        from_lanes = set(re.findall(r"shfl\.sync\.\w+\.b32\s+(%\w+)", code))
        uneven = [addend for addend in re.findall(r"fma\.rn\.f32\s+%\w+, %\w+, %\w+, (%\w+);", code) if addend in from_lanes]
    waits = [found.start() for found in re.finditer(r"griddepcontrol\.wait", code)]
    touches = re.search(r"(?:ld|st|red|atom)\.global|cp\.async", code)
    early = getattr(compiled.metadata, "launch_pdl", False) != (len(waits) == 1) or bool(waits and touches and touches.start() < waits[0])
    counts = {"atomics": len(atomics), "uneven": len(uneven), "early": int(early), "shared_barriers": shared_barriers(code)}
    counts |= {name: len(re.findall(rf"st\.global\.[bu]{bits}", code)) for name, bits in (("halves", 16), ("words", 32))}
    return {"registers": registers, "spilled": spilled, "shared": compiled.metadata.shared, **counts}


def shared_barriers(code: str) -> int:
    """How many barriers of PTX are made where another is, where a number is stored at a constant address, or at one that is not known here."""
    at = r"\[\s*(%?\w+)\s*(?:\+\s*(\d+)\s*)?\]"
    offsets = dict.fromkeys(["global_smem", *re.findall(r"mov\.b32\s+(%\w+), global_smem;", code)], 0)
    for name, base, offset in re.findall(r"add\.s32\s+(%\w+), (%\w+), (\d+);", code):
        if base in offsets and name not in offsets:  # else it is one that a loop moves on
            offsets[name] = offsets[base] + int(offset)
    found = re.findall(r"mbarrier\.init\.shared::cta\.b64\s+" + at, code)
    made = {offsets[base] + int(more or 0) for base, more in found if base in offsets}
    stored: set[int] = set()
    for count, bits, base, offset in re.findall(r"st\.shared(?:\.v(\d))?\.[bfsu](\d+)\s+" + at, code):
        if base in offsets:
            first = offsets[base] + int(offset or 0)
            stored |= {place // 8 for place in range(first, first + int(count or 1) * int(bits) // 8)}
    return code.count("mbarrier.init") - len(made) + sum(place // 8 in stored for place in made)


def meta(case: Case, dtype: torch.dtype) -> Problem:
    """The canonical problem of a case, without storage."""

    def tensor(axes: str, last: int | None, of: torch.dtype) -> torch.Tensor:
        return torch.empty([case.sizes[axis] for axis in axes] + ([] if last is None else [last]), dtype=of, device="meta")

    value_dim = case.value_dim or case.head_dim
    query, key, value = (
        tensor(case.leading + axes, dim, dtype) for axes, dim in (("hq", case.head_dim), ("gk", case.head_dim), ("gk", value_dim))
    )
    if case.transposed:
        before = -3 if len(case.leading) < 2 else -4
        query, key, value = (x.movedim(-2, before).contiguous().movedim(before, -2) for x in (query, key, value))
    mask: Any = None if case.mask is None else tensor(case.mask, None, torch.bool)
    if case.blocked:
        mask = block_mask(mask)
    bias = None if case.bias is None else tensor(case.bias, None, case.bias_dtype or dtype)
    if case.padded and bias is not None:
        bias = torch.nn.functional.pad(bias, (0, -bias.shape[3] % 8))[..., : bias.shape[3]]
    sinks = None if case.sinks is None else tensor("h", None, case.sinks_dtype or dtype)
    given = bias if bias is None or case.table_zero is None else RelativeBias(bias, case.table_zero)
    problem = Problem.canonical(query, key, value, mask=mask, bias=given, sinks=sinks, **case.options)
    if case.intervals is not None:
        axes = "b1k" if case.leading == "b" else case.intervals.removeprefix("random-two")
        bound = torch.empty([case.sizes[axis] for axis in axes], dtype=torch.int32, device="meta")
        again = bound if case.has_two_intervals else None
        problem = problem._replace(first=bound, last=bound, also_first=again, also_last=again)
    return problem


def block_mask(mask: torch.Tensor) -> BlockMask:
    """The block mask of a mask without storage: some of its blocks are partial."""
    batch, heads, len_q, len_k = mask.shape
    blocks, states = (
        torch.empty((batch, heads, -(-len_q // size), -(-len_k // size)), dtype=dtype, device="meta")
        for size, dtype in ((BLOCK, torch.int32), (GRANULE, torch.uint8))
    )
    bits = torch.empty((7, 2, BLOCK, BLOCK // WORD), dtype=torch.int32, device="meta")
    return BlockMask(blocks, bits, states, len_q, len_k)


def dynamic(case: Case, dtype: torch.dtype) -> Problem:
    """The same under a dynamic mask, without its plan."""
    problem = meta(case, dtype)
    first, last, order = (torch.empty(problem.key.shape[:3], dtype=torch.int32, device="meta") for _ in range(3))
    return problem._replace(first=first, last=last, order=order)


def packed(case: Case, dtype: torch.dtype) -> Problem:
    """The problem of a case whose batch entries are packed sequences."""
    problem = meta(case, dtype)
    tokens = {name: x.movedim(0, -3).flatten(-3, -2)[None] for name in ("query", "key", "value") if (x := getattr(problem, name)) is not None}
    ends = torch.empty(case.batch + 1, dtype=torch.int64, device="meta")
    return problem._replace(**tokens, ends_q=ends, ends_k=ends, longest_q=case.len_q, longest_k=problem.key.shape[2])


def launch_all(compiler: Compiler) -> None:
    """Everything above, with the case's name in `compiler`."""
    problems = [(case.name, meta(case, dtype)) for case, dtype in LAUNCHES]
    problems += [(case.name, packed(case, dtype)) for case, dtype in PACKED]
    for compiler.case, problem in (*problems, (DYNAMIC.name, dynamic(DYNAMIC, BF16))):
        out, lse, states = backend.allocate_forward(problem)
        problem = problem.with_states(states)
        gradients = backend.allocate_backward(problem, [x is not None for x in learned_of(problem)])
        kernels.forward(problem, out, lse)
        kernels.backward(problem, out, lse, torch.empty_like(out), lse, gradients)
    for case, dtype in FORWARD:
        compiler.case, problem = case.name, meta(case, dtype)
        out, lse, states = backend.allocate_forward(problem)
        kernels.forward(problem.with_states(states), out, lse)
    for compiler.case, length in PLANS:
        key_bias = torch.empty((1, length, 8), dtype=BF16, device="meta").transpose(1, 2)
        valid = torch.empty((1, 1, length), dtype=torch.bool, device="meta").expand(1, 8, length)
        for scores in (key_bias, key_bias.float().contiguous()):
            kernels.lifetimes(scores, valid, 1024, length)
        for scores in (key_bias, key_bias.half(), key_bias.float().contiguous()):
            kernels.best(scores, valid, *backend.allocate_best(scores, 100, 1), 1)
    compiler.case = JOINED
    out, lse = (torch.empty((1, 4096, *sizes), device="meta").transpose(1, 2) for sizes in ((16, 128), (16,)))
    for into in (out.to(BF16), out):
        kernels.join((out.to(BF16), lse), (out.to(BF16), lse), (into, lse))
    for compiler.case, dtype, part, pairs, width in FACTORS:
        tokens, columns = (torch.empty((4, 2048, 8, dim), dtype=dtype, device="meta").transpose(1, 2) for dim in (32, width))
        factors, form = torch.empty((4, 1, 2048, 5), device="meta"), Form((1, 4), (0.3, 1.0), part, pairs)
        largest = torch.empty((2, 5), dtype=torch.int32, device="meta") if part == FP16 else None
        kernels.join_factors((tokens, tokens), (factors, factors), (columns, columns), largest, form)
        kernels.factor_gradients((columns, columns), (factors, factors), largest, form, 32)


@functools.cache
def noted(name: str) -> covers.Launches:
    """The launches for a target, none of which is compiled."""
    with Compiler(gpu_target(name)) as compiler:
        launch_all(compiler)
    return compiler.launches


CHOSEN = {
    "all": list,
    "fewer": covers.fewer,
    "beside": lambda launches: covers.beside(launches, noted("sm_80")),
    "once": covers.first_of_each_kernel,
}


def report(name: str, which: str = "all") -> list[dict[str, Any]]:
    """A record of each compilation for a target, of all launches or of those that `which`, an option of the command line, chooses.

    A record has `ended`, the exit status, and no numbers where the compiler broke off.
    """
    launches = noted(name)
    with Compiler(gpu_target(name), CHOSEN[which](launches)) as compiler:
        launch_all(compiler)
    assert list(compiler.launches) == list(launches)
    by_hash: dict[Any, dict[str, Any]] = {}  # different keys may compile the same
    for number, row in enumerate(compiler.rows):
        by_hash.setdefault(row.pop("hash", number), {"target": name, **row})
    return list(by_hash.values())


if __name__ == "__main__":
    found = report(sys.argv[1], next((which for which in CHOSEN if f"--{which}" in sys.argv), "all"))
    if "--json" in sys.argv:
        print(json.dumps(found))
    else:
        for row in found:
            numbers = "  ".join(f"{field} {value}" for field, value in row.items() if isinstance(value, int))
            print(f"{row['target']:7s} {row['case']:26s} {row['kernel']:26s} {numbers}")
