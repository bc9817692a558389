"""The columns of a factored bias by one kernel: in each bit those of PyTorch's operations, and their gradients likewise but for rounding."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from conftest import NEEDS_CUDA, few_in_the_interpreter
from torch import Tensor

from dmattn import FactoredBias, attention, factors
from dmattn.execution.backend import interpreting
from dmattn.factors import joined

pytest.importorskip("triton", reason="the kernels need Triton")

from dmattn import kernels

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")
interpreted = pytest.mark.skipif(not interpreting(), reason="the PyTorch path serves a CPU")
devices = pytest.mark.parametrize("device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=NEEDS_CUDA)])


class Columns(NamedTuple):
    """Factors of one shape beside queries (2, 4, 37, D) and keys (2, 2, 70, D)."""

    rows: tuple[int, ...]
    cols: tuple[int, ...]
    head_dim: int = 32
    scale: float | None = None
    sequence_first: bool = False
    is_packed: bool = False
    factors_first: bool = False  # in memory, before the tokens

    def tensors(self, dtype: torch.dtype, of: torch.dtype, device: str) -> list[Tensor]:
        """Query, key, rows and cols, numbers of many sizes, some without a finite one."""
        random = torch.Generator().manual_seed(len(self.rows) + self.head_dim)
        batch = 1 if self.is_packed else 2
        made = []
        for heads, length in ((4, 37), (2, 70)):
            shape = (batch, length, heads, self.head_dim) if self.sequence_first or self.is_packed else (batch, heads, length, self.head_dim)
            x = torch.randn(shape, generator=random)
            made.append((x.transpose(1, 2) if self.sequence_first or self.is_packed else x).to(device, dtype))
        for shape in (self.rows, self.cols):
            x = torch.randn(shape, generator=random) * torch.exp2(torch.randint(-12, 12, shape, generator=random))
            made.append(x.to(device, of).requires_grad_())
        return [x.requires_grad_() for x in made]


CASES = [
    Columns((37, 5), (70, 5)),
    Columns((2, 1, 37, 5), (2, 1, 70, 5), sequence_first=True),
    Columns((2, 4, 37, 3), (2, 2, 70, 3), head_dim=20, scale=-0.3),
    Columns((1, 2, 37, 4), (2, 70, 4), head_dim=64, scale=0.25),
    Columns((2, 2, 37, 1), (1, 1, 70, 1), head_dim=8, scale=-2.0, sequence_first=True),
    Columns((37, 4, 2), (70, 2), is_packed=True),
    Columns((37, 2, 2), (70, 2, 2), head_dim=40, scale=3.0, is_packed=True),
]
TYPES = [*product((BF16, FP16), (FP32, BF16, FP16)), (FP32, FP32), (FP32, BF16), (BF16, FP64)]


def named(given: Any) -> str:
    return "-".join(map(str, given)) if isinstance(given, Columns) else str(given)


cases = pytest.mark.parametrize("case", CASES, ids=named)


def by_turns(cases: list[Columns], types: list[tuple]) -> list[tuple]:
    """In the interpreter each case has every third of the types, and each of these every third case."""
    places = few_in_the_interpreter(product(range(len(cases)), range(len(types))), lambda case, of: (case + of) % 3 == 0)
    return [(cases[case], *types[of]) for case, of in places]


def both(case: Columns, dtype: torch.dtype, tensors: list[Tensor]) -> list[Any]:
    """What the kernel and what the operations make of the same."""
    query, key, rows, cols = tensors
    found = []
    for serves in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not serves:
                patch.setattr(factors, "_kernel_serves", lambda *tensors: False)
            made = joined(query, key, key.detach(), FactoredBias(rows, cols), case.scale, None, is_packed=case.is_packed)
        assert ("FactorColumns" in made.query.grad_fn.name()) == serves
        found.append(made)
    return found


def check_bits(x: Tensor, y: Tensor) -> None:
    assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    assert torch.equal(x.isnan(), y.isnan())
    assert torch.equal(x.detach().view(whole)[~x.isnan()], y.detach().view(whole)[~y.isnan()])


@devices
@pytest.mark.parametrize(("case", "dtype", "of"), by_turns(CASES, TYPES), ids=named)
def test_is_bit_for_bit_what_operations_make(dtype: torch.dtype, of: torch.dtype, case: Columns, device: str) -> None:
    tensors = case.tensors(dtype, of, device)
    by_kernel, by_operations = both(case, dtype, tensors)
    assert by_kernel.scale == by_operations.scale
    for x, y in zip(by_kernel[:2], by_operations[:2], strict=True):
        check_bits(x, y)
    d_joined = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype) for x in by_kernel[:2]]
    ours, theirs = (torch.autograd.grad(made[:2], tensors, d_joined) for made in (by_kernel, by_operations))
    for x, y, like in zip(ours, theirs, tensors, strict=True):
        assert (x.dtype, x.shape) == (like.dtype, like.shape)
        torch.testing.assert_close(x, y, rtol=2 * torch.finfo(of).eps, atol=1e-5 * y.abs().max().item())
    for x, y in zip(ours[:2], theirs[:2], strict=True):
        check_bits(x, y)
    assert all(map(torch.equal, ours, torch.autograd.grad(joined_again(case, tensors)[:2], tensors, d_joined)))


def joined_again(case: Columns, tensors: list[Tensor]) -> Any:
    query, key, rows, cols = tensors
    return joined(query, key, key.detach(), FactoredBias(rows, cols), case.scale, None, is_packed=case.is_packed)


@devices
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of NumPy, in Triton's interpreter
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("scale", [1.0, -0.3, 2.0**-20])
def test_numbers_without_room_are_the_same(scale: float, dtype: torch.dtype, device: str) -> None:
    """Infinite, NaN, too large for a part, and too small."""
    least = 1e-40 if device == "cuda" else 1e-30  # Triton's interpreter stores no subnormal bfloat16
    sizes = (INF, NAN, 0.0, 3.39e38, 3.4e38, 65519.0, 65520.0, 1e30, least, 6e-8, 1 + 2.0**-8, 1 + 3 * 2.0**-8)
    numbers = torch.tensor([sign * size for sign in (1, -1) for size in sizes])
    case = Columns((2, 1, 37, 24), (2, 1, 70, 24), scale=scale)
    tensors = [*case.tensors(dtype, FP32, device)[:2], *(numbers.to(device).expand(2, 1, n, 24).clone().requires_grad_() for n in (37, 70))]
    for x, y in zip(*(made[:2] for made in both(case, dtype, tensors)), strict=True):
        check_bits(x, y)


SIZES = (0.0, 2.0**-149, 1e-40, 1.5 * 2.0**-126, 3e-20, 1.0, 60000.0, 2.0**127, INF)  # of all finite numbers of a factor, but for the last
WIDE = [
    Columns((37, 81), (70, 81), head_dim=8, factors_first=True),
    Columns((2, 1, 37, 81), (2, 1, 70, 81), head_dim=8, scale=-0.3, sequence_first=True),
    Columns((1, 2, 37, 81), (2, 2, 70, 81), head_dim=8, scale=2.0**-20, factors_first=True),
    Columns((2, 4, 37, 81), (1, 1, 70, 81), head_dim=8, scale=3e6),
    Columns((37, 4, 81), (70, 81), head_dim=8, is_packed=True),
    Columns((37, 2, 81), (70, 2, 81), head_dim=8, scale=2.0**64, is_packed=True),
]


@devices
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of NumPy, in Triton's interpreter
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("case", "of"), by_turns(WIDE, [(FP32,), (FP16,), (FP64,)]), ids=named)
def test_float16_moves_the_powers_of_two_that_operations_do(of: torch.dtype, case: Columns, device: str) -> None:
    """Between factors of any two sizes, beside numbers that are not finite. Sums of whole numbers have the same bits in any order."""
    query, key, *given = case.tensors(FP16, FP32, device)
    sizes = [torch.tensor(each, device=device) for each in zip(*product(SIZES, SIZES), strict=True)]
    sides = []
    for x, size in zip(given, sizes, strict=True):
        x = (x.detach() / x.detach().abs().amax(tuple(range(x.ndim - 1))) * size).to(of)
        x.view(-1, 81)[2, ::2], x.view(-1, 81)[3, ::3] = INF, NAN
        x = x.mT.contiguous().mT if case.factors_first else x
        sides.append(x.requires_grad_())
    tensors, found = [query, key, *sides], []
    for made in both(case, FP16, tensors):
        d_joined = [torch.randint(-9, 9, x.shape, generator=torch.Generator().manual_seed(1)).to(device, FP16) for x in made[:2]]
        found.append([*made[:2], *torch.autograd.grad(made[:2], tensors, d_joined, retain_graph=True)])
        for x, d_x, leaf in zip(made[:2], d_joined, sides, strict=True):
            found[-1] += torch.autograd.grad(x, leaf, d_x, retain_graph=True)
    for x, y in zip(*found, strict=True):
        check_bits(x, y)


@devices
def test_parts_stored_in_float32_are_those_of_operations(device: str) -> None:
    """As beside TF32, which drops what a part has beyond its dtype."""
    query, key, *of = (x.detach() for x in CASES[1].tensors(FP32, FP32, device))
    width, form = 64, factors.Form((0x940, 0x124), (1.0, 1.0), BF16, 6)
    made = tuple(x.new_full((*x.shape[:-1], width), NAN) for x in (query, key))
    kernels.join_factors((query, key), tuple(of), made, None, form)
    pairs = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0))
    for side, (x, whole, tokens) in enumerate(zip(made, of, (query, key), strict=True)):
        parts = factors._parts(whole, BF16, 3, FP32)
        check_bits(x, factors._beside(tokens, [parts[pair[side]] for pair in pairs]).contiguous())


@devices
@pytest.mark.parametrize("wanted", range(4), ids=["query", "key", "rows", "cols"])
def test_a_side_without_a_gradient_has_none(wanted: int, device: str) -> None:
    tensors = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(CASES[0].tensors(FP16, FP32, device))]
    made = joined_again(CASES[0], tensors)
    assert [x.requires_grad for x in made[:2]] == [wanted % 2 == 0, wanted % 2 == 1]
    found = torch.autograd.grad(made[wanted % 2].float().sum(), tensors[wanted])[0]
    assert found.shape == tensors[wanted].shape
    assert (found != 0).all()


@devices
@cases
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_second_derivatives_are_those_of_operations(dtype: torch.dtype, case: Columns, device: str) -> None:
    tensors = case.tensors(dtype, FP32, device)
    found = []
    for made in both(case, dtype, tensors):
        first = torch.autograd.grad(sum(x.float().square().sum() for x in made[:2]), tensors, create_graph=True)
        weights = (torch.linspace(-1, 1, x.numel(), device=device).view(x.shape) for x in first)
        found.append([*first, *torch.autograd.grad(sum((x * weight).sum() for x, weight in zip(first, weights, strict=True)), tensors)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5 * y.abs().max().item())


@devices
@pytest.mark.parametrize("how", ["grad", "jvp", "no elements", "five axes", "float64"])
def test_operations_serve_what_the_kernel_does_not(how: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the results that the dense bias has; a call of the kernel would raise."""
    monkeypatch.setattr(factors, "_by_kernels", None)
    length, dtype = 0 if how == "no elements" else 9, FP64 if how == "float64" else FP32
    random = torch.Generator().manual_seed(0)
    tokens = torch.randn((1, 2, length, 8), generator=random).to(device, dtype)
    bias = FactoredBias(*(torch.randn((length, 2), generator=random).to(device) for _ in range(2)))
    if how == "five axes":
        tokens = tokens[None]

    def result(bias: Any) -> Any:
        def call(tokens: Tensor) -> Tensor:
            return attention(tokens, tokens, tokens, bias=bias).square()

        if how == "grad":
            return torch.func.grad(lambda tokens: call(tokens).sum())(tokens)
        return torch.func.jvp(call, (tokens,), (tokens,)) if how == "jvp" else call(tokens)

    torch.testing.assert_close(result(bias), result(bias.to_dense()), rtol=1e-4, atol=1e-5)


@devices
def test_a_factor_shared_by_many_is_summed_in_float32(device: str) -> None:
    """By programs that read a few of its slices at once."""
    tokens = torch.zeros((5, 13, 9, 8), dtype=FP16, device=device)
    rows = torch.zeros((9, 3), device=device, requires_grad=True)
    made = joined(tokens, tokens, tokens, FactoredBias(rows, torch.zeros((9, 3), device=device)), 0.3, None)
    d_query = torch.randn(made.query.shape, generator=torch.Generator().manual_seed(0)).to(device, FP16)
    (found,) = torch.autograd.grad(made.query, rows, d_query)
    pairs = 2  # whose first part is that of rows
    wanted = d_query[..., 8 : 8 + 3 * pairs].double().unflatten(-1, (pairs, 3)).sum((0, 1, 3)) / 0.3
    assert math.isclose(found.double().sum().item(), wanted.sum().item(), rel_tol=1e-5)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-5)
