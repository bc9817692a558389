"""Results over two sets of keys, joined by one kernel: like PyTorch's operations and, in float64, like attention over both."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from conftest import NEEDS_CUDA
from torch import Tensor

from dmattn.distributed import sums
from dmattn.execution.backend import interpreting

pytest.importorskip("triton", reason="the kernels need Triton")

from triton.runtime import driver, jit

from dmattn import kernels
from dmattn.kernels.base.no_device import NoDevice, gpu_target

interpreted = pytest.mark.skipif(not interpreting(), reason="the PyTorch path serves a CPU")
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=NEEDS_CUDA)]
SHAPES = ((2, 3, 37, 40), (1, 2, 130, 64), (2, 1, 5, 256))  # (B, H, Sq, Dv)
DTYPES = (torch.float16, torch.float32, *(() if interpreting() else (torch.bfloat16,)))  # which the interpreter computes wrongly
INF = float("inf")


def sets(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[tuple[Tensor, Tensor]]:
    """Two sets of keys, (out, lse): row 0 sees none of the first, row 1 none of the second, row 2 none, row 3 sees the first from afar."""
    random = torch.Generator().manual_seed(sum(shape))
    found = []
    for number in range(2):
        batch, heads, len_q, dim = shape
        out = torch.randn((batch, len_q, heads, dim), generator=random).transpose(1, 2)  # as results lie in memory
        lse = 8 * torch.randn(shape[:-1], generator=random)
        hidden = torch.zeros(len_q, dtype=torch.bool).index_fill(0, torch.tensor([number, 2]), True)
        lse[..., 3] += 1e4 * (1 - number)
        found.append((out.masked_fill(hidden[:, None], 0.0).to(device, dtype), lse.masked_fill(hidden, -INF).to(device)))
    return found


def exact(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    lse = torch.stack([x.double() for _, x in (first, second)])
    weights = torch.softmax(lse, 0).nan_to_num()[..., None]
    return weights[0] * first[0].double() + weights[1] * second[0].double(), lse.logsumexp(0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("made", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_joined(shape: tuple[int, ...], dtype: torch.dtype, made: torch.dtype | None, device: str) -> None:
    """Into new tensors of the same dtype or float32, then in place, which is the same in each bit."""
    first, second = sets(shape, dtype, device)
    out, lse = torch.full_like(first[0], float("nan"), dtype=made or dtype), torch.full_like(first[1], float("nan"))
    kernels.join(first, second, (out, lse))
    wanted, wanted_lse = exact(first, second)
    eps = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.double(), wanted, rtol=eps, atol=4 * torch.finfo(torch.float32).eps)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=4e-7, atol=1e-6)
    assert (out[..., 2, :] == 0).all()
    assert (lse[..., 2] == -INF).all()
    assert torch.equal(out[..., 0, :], second[0][..., 0, :].to(out.dtype))
    assert torch.equal(lse[..., 1], first[1][..., 1])
    by_torch = torch.empty_like(out), torch.empty_like(lse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "by_kernels", lambda x: False)
        sums.join(first, second, by_torch)
    torch.testing.assert_close((out, lse), by_torch, rtol=2 * eps, atol=1e-6)
    if made is None:
        kernels.join(first, second, first)
        assert torch.equal(first[0], out)
        assert torch.equal(first[1], lse)


@pytest.mark.compile_only
@pytest.mark.skipif(interpreting(), reason="compiles, which a process with TRITON_INTERPRET=1 cannot")
@pytest.mark.parametrize("dim", [64, 128])
def test_all_threads_have_read_before_one_writes(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place several read a number that one of them writes: a barrier lies between."""
    found: list[Any] = []
    compile_it = jit.JITFunction._do_compile
    monkeypatch.setattr(driver, "_active", NoDevice(gpu_target("sm_90")), raising=False)
    monkeypatch.setattr(jit.JITFunction, "_do_compile", lambda *given: found.append(compile_it(*given)))
    out, lse = (torch.empty((1, 4096, *sizes), device="meta").transpose(1, 2) for sizes in ((16, dim), (16,)))
    kernels.join((out, lse), (out, lse), (out, lse))
    (code,) = (kernel.asm["ptx"] for kernel in found)
    events = re.findall("ld.global|st.global|bar.sync", code)
    assert events.index("st.global") > events.index("bar.sync") > max(place for place, event in enumerate(events) if event == "ld.global")


@pytest.mark.parametrize("device", DEVICES)
def test_turns_are_joined(device: str) -> None:
    """By :class:`Merged`: all rows, some, and all again, over more leading axes than the kernel has."""
    shape = (2, 2, 3, 16, 32)
    query = torch.empty(shape, dtype=torch.float16, device=device)
    merged, turns = sums.Merged(query, shape[-1]), (slice(0, 16), slice(8, 16), slice(0, 16))
    total = torch.zeros(shape, dtype=torch.float64, device=device), torch.full(shape[:-1], -INF, dtype=torch.float64, device=device)
    first, second = sets((4, 3, 16, 32), torch.float16, device)
    for rows, (out, lse) in zip(turns, (first, second, first), strict=True):
        part = out.unflatten(0, (2, 2))[..., rows, :], lse.unflatten(0, (2, 2))[..., rows]
        joined = exact((total[0][..., rows, :], total[1][..., rows]), part)
        total[0][..., rows, :], total[1][..., rows] = joined
        merged.add(rows, *(x.clone() for x in part))
    out, lse = merged.result(None)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.double(), total[0], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(lse.double(), total[1], rtol=4e-7, atol=1e-6)
