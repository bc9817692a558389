"""Any number of leading axes, each shared by mask and bias on its own, without a copy of either or of the bias's gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dmattn import IntervalMask, attention, reference, scaled_dot_product_attention
from dmattn.equivalence import Case, results
from dmattn.execution import passes, torch_path
from dmattn.execution.backend import interpreting
from dmattn.problem import Problem

LENGTH = 17 if interpreting() else 96


class Largest(TorchDispatchMode):
    """The bytes of the largest memory that results of operations inside lie in."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: tuple = (), keywords: dict[str, Any] | None = None) -> Any:
        made = operator(*arguments, **(keywords or {}))
        self.bytes = max([self.bytes, *(x.untyped_storage().nbytes() for x in tree_leaves(made) if isinstance(x, torch.Tensor))])
        return made


def leaves(*shapes: tuple[int, ...], device: str = "cpu") -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random).to(device).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("case", [
    Case("pair bias with batch and a mask of rows", LENGTH, leading="bn", rows=6, head_dim=4, bias="b1hqk", mask="bn11k"),
    Case("shifted windows", LENGTH, leading="bn", rows=6, head_dim=4, bias="11hqk", mask="1n1qk"),
    Case("a bias of the second axis", LENGTH, leading="bn", batch=6, rows=2, head_dim=4, bias="1nhqk"),
    Case("a bias of the outer axes", LENGTH, leading="bnm", rows=6, head_dim=4, bias="b1mhqk", transposed=True),
], ids=lambda case: case.name)  # fmt: skip
def test_nothing_is_as_large_as_what_is_shared_would_be(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_path, "CHUNK_SCORES", 1)
    inputs = case.inputs(torch.float32)
    problem = Problem.canonical(inputs.query, inputs.key, inputs.value, inputs.mask, inputs.bias, **case.options)
    with Largest() as largest, torch.no_grad():
        out, lse, states, *_ = passes.forward(problem)
        d_bias = passes.backward(inputs.d_out, inputs.d_lse, out, lse, (True,) * 5, True, problem._replace(states=states))[3]
    assert d_bias.shape == problem.bias.shape
    expanded = inputs.query[..., 0].numel() * LENGTH  # pairs
    assert largest.bytes < expanded * (2 if interpreting() else 4)


@pytest.mark.parametrize("mask", [None, "1n1qk"])
def test_a_bias_that_vmap_does_not_map_keeps_its_shape(mask: str | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """AlphaFold's rows, mapped over: bias and mask stay as large as they are, and the gradient is summed over the mapped axis."""
    seen: list[Problem] = []
    forward = passes.forward
    monkeypatch.setattr(passes, "forward", lambda problem: seen.append(problem) or forward(problem))
    query, key, value, bias = leaves((2, 5, 3, 9, 8), (2, 5, 3, 9, 8), (2, 5, 3, 9, 8), (2, 3, 9, 9), device=device)
    mask = None if mask is None else torch.rand(2, 3, 9, 9, generator=torch.Generator().manual_seed(0)).to(device) < 0.7
    out = torch.func.vmap(lambda q, k, v: attention(q, k, v, bias=bias, mask=mask), in_dims=1, out_dims=1)(query, key, value)
    assert [problem.bias.numel() for problem in seen] == [bias.numel()]
    want = attention(query, key, value, bias=bias[:, None], mask=None if mask is None else mask[:, None])
    torch.testing.assert_close(out, want)
    for got, wanted in zip(*(torch.autograd.grad(x.square().sum(), (query, key, value, bias)) for x in (out, want)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (1, 1), (3, 1, 2), (2, 1, 3, 2)], ids=str)
def test_results_have_the_leading_axes_of_the_query(leading: tuple[int, ...], device: str) -> None:
    query, key, value, bias = leaves((*leading, 4, 5, 8), (*leading, 2, 7, 8), (*leading, 2, 7, 6), (4, 5, 7), device=device)
    out, lse = attention(query, key, value, bias=bias, causal=True, return_lse=True)
    assert out.shape == (*leading, 4, 5, 6)
    assert lse.shape == (*leading, 4, 5)
    assert out.transpose(-2, -3).is_contiguous()
    want = reference.attention(query, key, value, bias=bias, causal=True)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(x.square().sum(), (query, key, value, bias)) for x in (out, want)]
    for x, got, wanted in zip((query, key, value, bias), *gradients, strict=True):
        assert got.shape == x.shape
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3, 0), (0,)], ids=str)
@pytest.mark.parametrize("empty", ["leading", "queries", "keys"])
def test_axes_of_size_0(shape: tuple[int, ...], empty: str, device: str) -> None:
    leading = shape if empty == "leading" else tuple(size or 2 for size in shape)
    len_q, len_k = 0 if empty == "queries" else 5, 0 if empty == "keys" else 7
    query, key, value = leaves((*leading, 2, len_q, 8), (*leading, 2, len_k, 8), (*leading, 2, len_k, 8), device=device)
    bias = torch.ones(1, *leading[1:], 2, len_q, len_k, device=device, requires_grad=True)
    out, lse = attention(query, key, value, bias=bias, return_lse=True)
    assert out.shape == query.shape
    assert lse.shape == query.shape[:-1]
    gradients = torch.autograd.grad(out.sum() + lse.nan_to_num(neginf=0.0).sum(), (query, key, value, bias))
    for x, gradient in zip((query, key, value, bias), gradients, strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))


def test_queries_of_leading_axes_in_any_order_of_memory(device: str) -> None:
    """Axial attention down the columns: no single stride walks its leading axes, and nothing is copied for it."""
    projected = (
        torch.randn(2, 5, 7, 3, 2, 8, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    )  # (b, h, w, qkv, head, dim)
    query, key, value = projected.permute(3, 0, 2, 4, 1, 5)  # (b, w, head, h, dim)
    bias = torch.randn(2, 1, 2, 5, 5, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    out = attention(query, key, value, bias=bias)
    want = attention(*(x.contiguous() for x in (query, key, value)), bias=bias)
    torch.testing.assert_close(out, want)
    for got, wanted in zip(*(torch.autograd.grad(x.square().sum(), (projected, bias)) for x in (out, want)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


SIX = (2, 2, 2, 2, 2, 2)


@pytest.mark.skipif(not interpreting() and not torch.cuda.is_available(), reason="the PyTorch path takes them")
def test_a_gradient_that_comes_in_may_have_its_axes_in_any_order(device: str) -> None:
    """Kernels refuse queries of such memory, but who called attention has no gradient to copy."""
    query = torch.randn(*SIX, 1, 3, 8, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    incoming = torch.randn(*SIX, 1, 3, 8, generator=torch.Generator().manual_seed(1)).to(device).permute(5, 4, 3, 2, 1, 0, 6, 7, 8)
    out = attention(query, query, query)
    (got,), (wanted,) = (torch.autograd.grad(out, query, x, retain_graph=True) for x in (incoming, incoming.contiguous()))
    assert torch.equal(got, wanted)


@pytest.mark.skipif(not interpreting() and not torch.cuda.is_available(), reason="the PyTorch path takes them")
def test_patterns_of_many_axes_that_kernels_refuse(device: str) -> None:
    query = torch.randn(2, 2, 2, 2, 2, 1, 3, 8, device=device)
    mask = torch.ones(2, 1, 2, 1, 2, 1, 3, 3, dtype=torch.bool, device=device)
    received = r"received \(2, 1, 2, 1, 2\) beside query's \(2, 2, 2, 2, 2\): expand it along an axis of 1, and make that contiguous"
    with pytest.raises(ValueError, match=r"mask: expected leading axes that change between full and 1 at most 3 times, " + received):
        attention(query, query, query, mask=mask)
    attention(query, query, query, mask=mask.expand(2, 2, 2, 1, 2, 1, 3, 3).contiguous())
    turned = torch.randn(*SIX, 1, 3, 8, device=device).permute(5, 4, 3, 2, 1, 0, 6, 7, 8)
    with pytest.raises(ValueError, match=r"query: expected leading axes that lie in memory in at most 4 runs, .*: make it contiguous"):
        attention(turned, turned, turned)


def test_gradients_repeat_bit_by_bit(device: str) -> None:
    case = Case("repeated", 37, leading="bn", batch=3, rows=5, bias="b1hqk", mask="1n1qk")
    inputs = case.inputs(torch.float16, device)
    first, second = (results(attention, inputs, case.options) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_intervals_and_their_leading_axes(device: str) -> None:
    query, key, value = leaves((2, 3, 4, 9, 8), (2, 3, 2, 9, 8), (2, 3, 2, 9, 8), device=device)
    position = torch.arange(9, dtype=torch.int32, device=device)
    mask = IntervalMask((position - 2).expand(3, 1, 9), (position + torch.tensor([1, 3], device=device)[:, None, None, None]).int())
    got = attention(query, key, value, mask=mask)
    torch.testing.assert_close(got, attention(query, key, value, mask=mask.to_dense(9)), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(interpreting(), reason="the interpreter has no torch.compile")
def test_compiled(device: str) -> None:
    case = Case("compiled", 19, leading="bn", bias="b1hqk", mask="1n1qk", transposed=True)
    inputs = case.inputs(torch.float32, device)
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    got, want = (results(function, inputs, case.options) for function in (compiled, attention))
    for name in want:
        torch.testing.assert_close(got[name], want[name], msg=name)


def test_torchs_function_takes_a_mask_of_some_leading_axes(device: str) -> None:
    query, key, value, mask = leaves((2, 1, 3, 5, 8), (2, 4, 3, 9, 8), (1, 4, 3, 9, 8), (4, 1, 5, 9), device=device)
    got = scaled_dot_product_attention(query, key, value, mask)
    want = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (query, key, value, mask)))
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    pairs = [torch.autograd.grad(x.square().sum(), (query, key, value, mask)) for x in (got, want)]
    for gradient, wanted in zip(*pairs, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(interpreting(), reason="float64 takes the PyTorch path in either half")
def test_second_derivatives() -> None:
    inputs = [x.detach().double().requires_grad_() for x in leaves((2, 3, 2, 3, 4), (2, 3, 2, 4, 4), (2, 3, 2, 4, 4), (2, 1, 2, 3, 4))]
    torch.autograd.gradgradcheck(lambda q, k, v, b: attention(q, k, v, bias=b), inputs)


def test_the_gradient_for_each_element_of_a_bias_that_vmap_does_not_map(device: str) -> None:
    query, key, value, bias = (x.detach() for x in leaves((5, 2, 3, 9, 8), (5, 2, 3, 9, 8), (5, 2, 3, 9, 8), (1, 3, 9, 9), device=device))

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, bias=b).square().sum()

    together = torch.func.vmap(torch.func.grad(loss, 3), in_dims=(0, 0, 0, None))(query, key, value, bias)
    for i, got in enumerate(together):
        wanted = bias.clone().requires_grad_()
        torch.testing.assert_close(got, torch.autograd.grad(loss(query[i], key[i], value[i], wanted), wanted)[0], rtol=1e-4, atol=1e-5)
