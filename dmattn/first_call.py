"""The first call of each of MKL's vector functions, made at import on one element."""

from __future__ import annotations

import torch

VECTOR_FUNCTIONS = (
    "acos",
    "asin",
    "atan",
    "cos",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "log",
    "log10",
    "log2",
    "sin",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
)


def resolve_vector_functions() -> None:
    """Call everything that PyTorch hands to MKL's vector math, in float32 and float64.

    MKL chooses the code of such a function when it is first called. Where two threads make that call at once, MKL 2024.2, which PyTorch's
    wheels contain, may run code of low accuracy for the share of one of them: thousands of roundings, in that call only
    (https://github.com/pytorch/pytorch/issues/188792). One element is computed by one thread. All functions take a millisecond
    together, so the code around attention is exact from its first call on too: positions, activations and optimizers compute on two threads.
    """
    if not torch.backends.mkl.is_available():
        return
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype, device="cpu")
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(one)
