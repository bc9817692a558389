"""A few small launches of every kernel, to run under a memory checker on a GPU: `make memcheck`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # an allocation each, or what lies past the end of a tensor is another's memory

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cases

from dmattn.equivalence import Case, check

CASES = (
    Case("dense-bias-causal", 65, 37, heads=2, bias="bhqk", causal=True),
    Case("shared-bias-mask", 37, 65, batch=3, bias="1hqk", mask="b1qk", keep="random-empty-rows"),
    Case("key-bias-grouped-window", 130, heads=4, kv_heads=2, bias="bg1k", window=(20, 3)),
    Case("intervals-softcap-odd-dims", 97, heads=2, head_dim=20, value_dim=40, intervals="documents", softcap=5.0, bias="1hq1"),
    Case("block-mask-large-head", 129, head_dim=200, mask="11qk", keep="blocks"),
    Case("dropout-shared-bias-grouped-causal", 65, 97, heads=4, kv_heads=2, bias="1hqk", causal=True, dropout_p=0.2),
    Case("dropout-dense-bias", 97, 65, bias="bhqk", dropout_p=0.2),
    *cases.FAULTS,
)


def main() -> int:
    """Run the cases in every dtype; 0 when all are within their budgets."""
    failed = 0
    for case in CASES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            wrong = [str(verdict) for verdict in check(case, dtype, "cuda") if not verdict.passed]
            failed += bool(wrong)
            print(case.name, dtype, "FAILED" if wrong else "ok", *wrong, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
