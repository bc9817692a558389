"""A bias by factors: its precision, distances of points as the worked example, and what it goes together with."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest
import torch
from conftest import needs_cuda
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dmattn import FactoredBias, IntervalMask, attention, attention_varlen, explain, factors, reference, scaled_dot_product_attention
from dmattn.broadcast import per_query_head
from dmattn.equivalence import Case, results
from dmattn.execution.backend import interpreting
from dmattn.factors import joined

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
STATED = 2.0**-20  # of the sum over factors of the largest row times the largest column
no_compile = pytest.mark.skipif(interpreting(), reason="Triton's interpreter and torch.compile do not combine")


def normal(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, dtype)


def distances(x: Tensor, y: Tensor, coefficient: Tensor | float) -> FactoredBias:
    """-coefficient * |x_i - y_j|^2 of points (..., 3), as five factors."""
    size_x, size_y = (points.square().sum(-1, keepdim=True) for points in (x, y))
    rows = torch.cat([torch.ones_like(size_x), size_x, -2 * x], -1)
    return FactoredBias(-coefficient * rows, torch.cat([size_y, torch.ones_like(size_y), y], -1))


def factors_of_size(rows: float, cols: float, kind: str, dtype: torch.dtype = FP32) -> FactoredBias:
    shape_r, shape_c = (2, 4, 37, 3), (2, 2, 65, 3)
    x, y = normal(*shape_r) * rows, normal(*shape_c) * cols
    if kind == "wide":  # numbers of very different size in one factor
        x, y = x * torch.exp(3 * normal(*shape_r, seed=1)), y * torch.exp(3 * normal(*shape_c, seed=1))
    if kind == "lopsided":
        x, y = x * torch.tensor([1e3, 1.0, 1e-3]), y * torch.tensor([1e-3, 1e2, 1e3])
    return FactoredBias(x.to(dtype), y.to(dtype))


@pytest.mark.skipif(interpreting(), reason="about what kernels are given, which is the same in both halves")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
@pytest.mark.parametrize("kind", ["even", "wide", "lopsided"])
@pytest.mark.parametrize("of", [BF16, FP16, FP32, FP64], ids=str)
def test_the_bias_has_the_precision_that_is_stated(kind: str, of: torch.dtype, dtype: torch.dtype) -> None:
    """Whatever products in float32 add to it: those here are in float64."""
    query, key, value = normal(2, 4, 37, 16, dtype=dtype), normal(2, 2, 65, 16, dtype=dtype), normal(2, 2, 65, 8, dtype=dtype)
    compared = 0
    for sizes, scale in product(((1.0, 1.0), (300.0, 0.01), (1e-3, 1e3), (30.0, 30.0)), (0.25, 1.0, -0.3, 0.0, 1e-4, 1e4, 2.0**-60)):
        bias = factors_of_size(*sizes, kind, of)
        largest = [x.double().abs().amax((0, 1, 2)) for x in (bias.rows, bias.cols)]
        terms, unit = largest[0] * largest[1], abs(scale) or 1.0
        if not terms.sum().isfinite() or (dtype == FP16 and (terms / unit).max() >= 2**30):
            continue  # no numbers of float16
        given = joined(query, key, value, bias, scale, None)
        products = scale * query.double() @ per_query_head(key, 4).double().mT
        got = given.scale * given.query.double() @ per_query_head(given.key, 4).double().mT
        error = (got - products - per_query_head(bias.to_dense(FP64), 4)).abs().max().item()
        stated = STATED * terms.sum().item() + 1e-14 * got.abs().max().item()
        if dtype == FP16:
            stated += 2.0**-23 * (terms * unit).sqrt().sum().item()
        assert error <= stated, (sizes, scale, error / stated)
        compared += 1
    assert compared >= (5 if FP16 in (dtype, of) else 28)


def test_float16_reaches_from_one_end_of_float32_to_the_other() -> None:
    tokens, rows, cols = torch.zeros(1, 1, 3, 4, dtype=FP16), torch.full((3, 1), 2.0**127), torch.full((3, 1), 3 * 2.0**-133)
    given = joined(tokens, tokens, tokens, FactoredBias(rows, cols), 1.0, None)
    assert torch.equal(given.query.double() @ given.key.double().mT, torch.full((1, 1, 3, 3), 3 * 2.0**-6, dtype=FP64))


def widths(query: torch.dtype, rows: torch.dtype, cols: torch.dtype, scale: float) -> tuple[int, int]:
    tokens = torch.zeros(1, 1, 5, 16, dtype=query)
    given = joined(tokens, tokens, tokens, FactoredBias(torch.ones(5, 8, dtype=rows), torch.ones(5, 8, dtype=cols)), scale, None)
    return (given.query.shape[-1] - 16) // 8, (given.key.shape[-1] - 16) // 8


@pytest.mark.parametrize(
    ("query", "rows", "cols", "scale", "columns"),
    [
        (FP64, FP64, FP64, 0.3, 1),
        (FP32, FP32, FP32, 0.3, 1),
        (FP32, FP64, BF16, 0.3, 1),
        (BF16, FP32, FP32, 0.3, 6),
        (BF16, FP16, FP32, 0.25, 6),
        (BF16, BF16, FP32, 0.25, 3),
        (BF16, FP32, BF16, 0.25, 3),
        (BF16, BF16, BF16, 0.25, 1),
        (BF16, BF16, BF16, 0.3, 3),
        (FP16, FP32, FP32, 0.3, 3),
        (FP16, FP16, FP32, 0.25, 2),
        (FP16, FP16, FP16, 0.25, 1),
        (FP16, FP16, FP16, 0.3, 2),
    ],
    ids=str,
)
def test_a_factor_takes_the_columns_that_are_stated(
    query: torch.dtype, rows: torch.dtype, cols: torch.dtype, scale: float, columns: int
) -> None:
    assert widths(query, rows, cols, scale) == (columns, columns)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_distances_of_points_are_the_dense_bias(device: str, dtype: torch.dtype) -> None:
    """Values, and the gradients of points and coefficient through the factors, beside those of the dense bias."""
    if dtype == BF16 and device == "cpu" and interpreting():
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    query, key, value = (normal(2, 4, 37 if i == 0 else 65, 32, seed=i, device=device, dtype=dtype) for i in range(3))
    points = normal(2, 1, 37, 3, device=device), normal(2, 1, 65, 3, device=device)
    found = []
    for is_dense, of in ((False, dtype), (True, dtype), (True, FP64)):
        x, y = (each.detach().to(FP64 if of == FP64 else FP32).requires_grad_() for each in points)
        coefficient = torch.tensor([0.2, 0.5, 1.0, 0.0], device=device, dtype=x.dtype)[:, None, None].requires_grad_()
        bias: Any = distances(x, y, coefficient)
        if is_dense:
            bias = -coefficient * (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1)
        out, lse = attention(query.to(of), key.to(of), value.to(of), bias=bias, return_lse=True)
        given = (
            (out, lse),
            (x, y, coefficient),
            (normal(*out.shape, device=device, dtype=of), normal(*lse.shape, device=device, dtype=lse.dtype)),
        )
        found.append([out, lse, *torch.autograd.grad(*given)])
    rounding = torch.finfo(dtype).eps
    for ours, dense, true in zip(*found, strict=True):
        size = true.abs().max().item()
        assert (ours - true).abs().max().item() <= 4 * (dense - true).abs().max().item() + 8 * max(rounding, 1e-6) * size
    lse, true = found[0][1].double(), found[2][1]
    assert (lse - true).abs().max().item() <= 1e-5 * true.abs().max().item()  # of distances in bfloat16 it would be 1e-2


def test_the_coefficients_of_distances_are_learned(device: str) -> None:
    """From bad ones, those that made the results are found again."""
    points, tokens = normal(1, 1, 33, 3, device=device), normal(1, 4, 33, 16, device=device)
    made = attention(tokens, tokens, tokens, bias=distances(points, points, torch.tensor([0.1, 0.4, 0.7, 1.0], device=device)[:, None, None]))
    coefficient = torch.full((4, 1, 1), 0.5, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([coefficient], lr=0.05)
    for _ in range(10 if interpreting() else 200):
        optimizer.zero_grad()
        loss = (attention(tokens, tokens, tokens, bias=distances(points, points, coefficient)) - made).square().mean()
        loss.backward()
        optimizer.step()
    found = coefficient.detach().flatten().cpu()
    wanted = torch.tensor([0.1, 0.4, 0.7, 1.0])
    assert ((found - wanted).abs() < (0.5 - wanted).abs()).all()
    assert interpreting() or (found - wanted).abs().max() < 1e-2


@pytest.mark.parametrize("dtype", [FP32, FP64, FP16, BF16], ids=str)
def test_a_factor_that_is_given_no_gradient_costs_none(dtype: torch.dtype) -> None:
    tokens = normal(1, 2, 9, 8, dtype=FP32)
    rows, cols = normal(9, 2, dtype=dtype).requires_grad_(), normal(9, 2, seed=1, dtype=dtype)
    attention(tokens, tokens, tokens, bias=FactoredBias(rows, cols)).sum().backward()
    assert rows.grad is not None
    assert (rows.grad.dtype, rows.grad.shape) == (dtype, rows.shape)
    assert tokens.grad is None
    with torch.no_grad():
        assert not attention(tokens, tokens, tokens, bias=FactoredBias(rows, cols)).requires_grad


def test_gradients_are_summed_in_float32_over_the_axes_of_a_broadcast_factor(device: str) -> None:
    """bfloat16 sums of 4 * 64 heads would be off by percents."""
    tokens, rows, cols = normal(4, 64, 17, 8, device=device), normal(17, 1, device=device), normal(17, 1, seed=1, device=device)
    found = []
    for dtype in (FP32, FP64):
        leaves = [x.to(dtype).requires_grad_() for x in (rows, cols)]
        out = attention(*(tokens.to(dtype) for _ in range(3)), bias=FactoredBias(*leaves))
        found.append(torch.autograd.grad(out.double().square().sum(), leaves))
    for ours, true in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=1e-3, atol=1e-4 * true.abs().max().item())


def test_zero_rows_have_gradients(device: str, half: torch.dtype) -> None:
    """As at the start of a product that is learned."""
    tokens = normal(1, 2, 19, 16, device=device, dtype=half)
    rows, cols = torch.zeros(19, 2, device=device, requires_grad=True), (100 * normal(19, 2, device=device)).requires_grad_()
    out = attention(tokens, tokens, tokens, bias=FactoredBias(rows, cols))
    d_rows, d_cols = torch.autograd.grad(out.float().square().sum(), (rows, cols))
    true = [x.double().detach().requires_grad_() for x in (rows, cols)]
    wanted = torch.autograd.grad(
        reference.attention(tokens.double(), tokens.double(), tokens.double(), bias=FactoredBias(*true)).square().sum(), true
    )
    torch.testing.assert_close(d_rows.double(), wanted[0], rtol=0, atol=0.03 * wanted[0].abs().max().item())
    assert (d_cols == 0).all()


def test_a_bias_is_shown_without_its_numbers() -> None:
    bias = FactoredBias(torch.zeros(4, 9, 5), torch.zeros(7, 5, dtype=torch.bfloat16))
    assert repr(bias) == "FactoredBias(rows of shape (4, 9, 5) in torch.float32, cols of shape (7, 5) in torch.bfloat16)"


def test_the_dense_tensor_is_the_product() -> None:
    rows, cols = normal(2, 4, 5, 3), normal(2, 2, 7, 3)
    bias = FactoredBias(rows, cols)
    assert torch.equal(bias.to_dense(FP64), rows.double() @ per_query_head(cols, 4).double().mT)
    assert torch.equal(bias.to_dense(), bias.to_dense(FP64).float())
    assert FactoredBias(rows.half(), cols.double()).to_dense().dtype == FP64
    assert FactoredBias(rows.half(), cols.bfloat16()).to_dense(BF16).dtype == BF16
    for one, other, shape in (((5, 3), (7, 3), (5, 7)), ((4, 5, 3), (2, 7, 3), (4, 5, 7)), ((2, 5, 3), (3, 4, 7, 3), (3, 4, 5, 7))):
        assert FactoredBias(normal(*one), normal(*other)).to_dense().shape == shape


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, "float32"], ids=str)
def test_the_dense_tensor_has_a_float_dtype(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"FactoredBias\.to_dense: dtype: expected a float dtype, received "):
        FactoredBias(torch.randn(5, 2), torch.randn(7, 2)).to_dense(dtype)


def test_the_dense_tensor_is_of_heads_that_divide() -> None:
    with pytest.raises(ValueError, match=r"bias\.cols: expected bias\.rows' 4 heads, or a number that divides or is divided by it, received 3"):
        FactoredBias(torch.randn(4, 5, 2), torch.randn(3, 7, 2)).to_dense()
    with pytest.raises(ValueError, match=r"bias\.cols: expected bias\.rows' 0 heads, .* received 3"):
        FactoredBias(torch.randn(0, 5, 2), torch.randn(3, 7, 2)).to_dense()


def test_the_dense_tensor_is_of_leading_axes_that_broadcast() -> None:
    with pytest.raises(
        ValueError, match=r"^dmattn: bias\.cols: expected leading axes that broadcast with those of bias\.rows, \(3,\), received \(2,\)$"
    ):
        FactoredBias(torch.randn(3, 4, 5, 2), torch.randn(2, 2, 7, 2)).to_dense()
    with pytest.raises(ValueError, match=r"those of bias\.rows, \(3,\), received \(2, 5\)$"):
        FactoredBias(torch.randn(3, 4, 5, 2), torch.randn(2, 5, 1, 7, 2)).to_dense()
    assert FactoredBias(torch.randn(3, 1, 4, 5, 2), torch.randn(2, 2, 7, 2)).to_dense().shape == (3, 2, 4, 5, 7)


@pytest.mark.parametrize("heads_first", [True, False], ids=["heads-first", "sequence-first"])
def test_columns_join_queries_in_the_order_of_memory(heads_first: bool) -> None:
    sizes = dict(zip("bhsd", (2, 3, 70, 24), strict=True))
    query, key = (torch.randn(*(sizes[axis] for axis in ("bhsd" if heads_first else "bshd"))) for _ in range(2))
    if not heads_first:
        query, key = query.transpose(1, 2), key.transpose(1, 2)
    made = joined(query, key, key, FactoredBias(torch.randn(70, 4), torch.randn(70, 4)), None, None)
    for x in made[:2]:
        assert (x.stride(-2) < x.stride(-3)) == heads_first
        assert x.stride(-1) == 1


def test_nothing_of_another_batch_entry_or_hidden_key_is_seen(device: str) -> None:
    """Beyond NaN, which counts as in keys."""
    tokens, rows, cols = normal(2, 2, 33, 16, device=device, dtype=FP16), normal(2, 1, 33, 2, device=device), normal(2, 1, 33, 2, device=device)
    mask = IntervalMask.causal(33, 33, device=device)
    whole = attention(tokens, tokens, tokens, mask=mask, bias=FactoredBias(rows, cols))
    changed = cols.clone()
    changed[:, :, 20:] += 1
    assert torch.equal(attention(tokens, tokens, tokens, mask=mask, bias=FactoredBias(rows, changed))[:, :, :20], whole[:, :, :20])


def test_packed_sequences_have_factors_of_their_tokens(device: str) -> None:
    lengths_q, lengths_k = [0, 5, 5, 17, 20], [0, 9, 13, 30, 37]
    ends_q, ends_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (lengths_q, lengths_k))
    query, key, value = normal(20, 4, 16, device=device), normal(37, 2, 16, device=device), normal(37, 2, 8, device=device)
    for axes in ((4, 2), (2, 1), (1, 2), (None, None)):
        rows, cols = (
            normal(n, *([] if heads is None else [heads]), 3, device=device).requires_grad_() for n, heads in zip((20, 37), axes, strict=True)
        )
        whole = attention_varlen(
            query, key, value, ends_q, ends_k, max_seqlen_q=12, max_seqlen_k=17, bias=FactoredBias(rows, cols), causal=True
        )
        parts = []
        for n in range(4):
            q, k = slice(*lengths_q[n : n + 2]), slice(*lengths_k[n : n + 2])
            own = FactoredBias(*(x[s] if x.ndim == 2 else x[s].transpose(0, 1) for x, s in ((rows, q), (cols, k))))
            out = attention(*(x[None].transpose(1, 2) for x in (query[q], key[k], value[k])), bias=own, causal=True)
            parts.append(out[0].transpose(0, 1))
        torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-5, atol=1e-5)
        d_out = normal(*whole.shape, device=device)
        for ours, each in zip(*(torch.autograd.grad(x, (rows, cols), d_out) for x in (whole, torch.cat(parts))), strict=True):
            torch.testing.assert_close(ours, each, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@no_compile
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(dynamic: bool, dtype: torch.dtype, device: str) -> None:
    """Inductor keeps the parts of a factor, which conversions would be optimised away from.

    On a CPU, where its C++ compiler takes seconds for each kernel, sizes that vary run through it in bfloat16 alone, sizes that do not in float32,
    and others as traced, but in a full run.
    """
    tokens, points = normal(2, 4, 19, 16, device=device, dtype=dtype), 10 * normal(2, 1, 19, 3, device=device)

    def loss(tokens: Tensor, points: Tensor) -> Tensor:
        return attention(tokens, tokens, tokens, bias=distances(points, points, 0.05), return_lse=True)[1]

    torch.compiler.reset()
    found = []
    through_inductor = device == "cuda" or os.environ.get("DMATTN_FULL") or dtype == (BF16 if dynamic else FP32)
    backend = "inductor" if through_inductor else "aot_eager"
    for function in (loss, torch.compile(loss, fullgraph=True, dynamic=dynamic, backend=backend)):
        leaves = [x.detach().requires_grad_() for x in (tokens, points)]
        lse = function(*leaves)
        found.append([lse, *torch.autograd.grad(lse.square().sum(), leaves)])
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)
    for compiled, eager in zip(found[1][1:], found[0][1:], strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=8 * max(rounding, 1e-5) * eager.abs().max().item())


@no_compile
def test_is_an_argument_of_compiled_and_exported_functions() -> None:
    tokens, bias = normal(1, 2, 9, 8), FactoredBias(normal(9, 2), normal(9, 2, seed=1))
    wanted = attention(tokens, tokens, tokens, bias=bias)

    class Layer(torch.nn.Module):
        def forward(self, tokens: Tensor, bias: FactoredBias) -> Tensor:
            return attention(tokens, tokens, tokens, bias=bias)

    torch.testing.assert_close(torch.compile(Layer(), fullgraph=True)(tokens, bias), wanted)
    torch.testing.assert_close(torch.export.export(Layer(), (tokens, bias)).module()(tokens, bias), wanted)


def test_autocast_leaves_the_factors_alone(device: str, half: torch.dtype) -> None:
    tokens, points = normal(1, 2, 33, 16, device=device), (20 * normal(1, 1, 33, 3, device=device)).requires_grad_()
    with torch.autocast(device, dtype=half):
        out, lse = attention(tokens, tokens, tokens, bias=distances(points, points, 0.02), return_lse=True)
    short = tokens.to(half)
    same, same_lse = attention(short, short, short, bias=distances(points, points, 0.02), return_lse=True)
    assert out.dtype == half
    assert torch.equal(out, same)
    assert torch.equal(lse, same_lse)
    lse.sum().backward()
    assert points.grad.dtype == FP32


def test_vmap_takes_factors_mapped_or_not(device: str) -> None:
    tokens, rows, cols = normal(3, 2, 2, 9, 8, device=device), normal(3, 1, 1, 9, 2, device=device), normal(1, 2, 9, 2, device=device)

    def call(tokens: Tensor, rows: Tensor) -> Tensor:
        return attention(tokens, tokens, tokens, bias=FactoredBias(rows, cols))

    mapped = torch.func.vmap(call)(tokens, rows)
    torch.testing.assert_close(mapped, torch.stack([call(*each) for each in zip(tokens, rows, strict=True)]))
    shared = torch.func.vmap(call, in_dims=(0, None))(tokens, rows[0])
    torch.testing.assert_close(shared, torch.stack([call(each, rows[0]) for each in tokens]))
    halves = torch.func.vmap(call)(tokens.half(), rows)
    torch.testing.assert_close(halves, torch.stack([call(*each) for each in zip(tokens.half(), rows, strict=True)]))


def test_checkpoints_and_repeats_bitwise(device: str, half: torch.dtype) -> None:
    case = Case("repeats", 37, 65, heads=4, kv_heads=2, factors=("bh", "1g"), bias_dtype=FP32, causal=True)
    inputs = case.inputs(half, device)
    first, second = results(attention, inputs, case.options), results(attention, inputs, case.options)
    again = results(lambda *given, **options: checkpoint(attention, *given, use_reentrant=False, **options), inputs, case.options)
    for name, value in first.items():
        assert torch.equal(second[name], value), name
        assert torch.equal(again[name], value), name


@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0), (2, 2, 0, 0)], ids=str)
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_zero_lengths(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    batch, heads, len_q, len_k = shape
    query, key = normal(batch, heads, len_q, 8, device=device, dtype=dtype), normal(batch, heads, len_k, 8, device=device, dtype=dtype)
    rows, cols = normal(len_q, 2, device=device).requires_grad_(), normal(1, 1, len_k, 2, device=device).requires_grad_()
    out = attention(query, key, key, bias=FactoredBias(rows, cols))
    assert out.shape == query.shape
    for leaf, gradient in zip((rows, cols), torch.autograd.grad(out.sum(), (rows, cols)), strict=True):
        assert gradient.shape == leaf.shape
        assert (gradient == 0).all()


def test_explain_counts_the_columns() -> None:
    pytest.importorskip("triton", reason="the kernels need Triton")
    tokens, factors = torch.empty(2, 16, 4096, 96, dtype=BF16, device="meta"), torch.empty(2, 1, 4096, 5, device="meta")
    explained = explain(tokens, tokens, tokens, bias=FactoredBias(factors, factors), target="sm_90")
    assert (explained.head_dim, explained.columns) == (128, 32)
    assert explained.passes[0].rows == ("Hopper",)
    assert "queries and keys: head dim 128, of which 32 columns for the factors" in str(explained)
    narrow = tokens[..., :64]
    explained = explain(narrow, narrow, narrow, bias=FactoredBias(factors, factors), target="sm_90")
    assert all(row.startswith("Hopper") for each in explained.passes for row in each.rows)
    plain = explain(tokens, tokens, tokens, target="sm_90")
    assert (plain.head_dim, plain.columns) == (96, 0)
    assert "factors" not in str(plain)


QUERY, KEY = normal(2, 4, 5, 8), normal(2, 2, 7, 8)
ERRORS = [
    ("rows-list", lambda: FactoredBias([1.0], normal(7, 3)), TypeError, r"bias.rows: expected a float16, bfloat16, float32 or float64 tensor, received list; torch.tensor\(bias.rows\)$"),
    ("rows-int", lambda: FactoredBias(torch.ones(5, 3, dtype=torch.int64), normal(7, 3)), TypeError, r"bias.rows: expected a float16, .* received torch.int64 tensor$"),
    ("cols-complex", lambda: FactoredBias(normal(5, 3), normal(7, 3).cfloat()), TypeError, r"bias.cols: expected a float16, .* received torch.complex64 tensor$"),
    ("rows-one-axis", lambda: FactoredBias(normal(3), normal(7, 3)), ValueError, r"bias.rows: expected shape \(..., Sq, R\) with R of at least 1, received \(3,\)$"),
    ("cols-no-factor", lambda: FactoredBias(normal(5, 3), normal(7, 0)), ValueError, r"bias.cols: expected shape \(..., Sk, R\) with R of at least 1, received \(7, 0\)$"),
    ("cols-other-rank", lambda: FactoredBias(normal(5, 3), normal(7, 4)), ValueError, r"bias.cols: expected shape \(..., Sk, R\) with R = 3, as bias.rows \(5, 3\) has, received \(7, 4\)$"),
    ("other-rank-of-as-many-tokens", lambda: FactoredBias(normal(40, 3), normal(40, 5)), ValueError, r"bias.cols: .*, received \(40, 5\)$"),
    ("other-rank-of-heads", lambda: FactoredBias(normal(4, 40, 3), normal(4, 40, 5)), ValueError, r"bias.cols: .*, received \(4, 40, 5\)$"),
    ("other-rank-packed", lambda: FactoredBias(normal(100, 8, 16), normal(90, 8, 12)), ValueError, r"bias.cols: .*, received \(90, 8, 12\)$"),
    ("both-rank-first", lambda: FactoredBias(normal(3, 5), normal(3, 7)), ValueError, r"bias.cols: expected .* R = 5, as bias.rows \(3, 5\) has, received \(3, 7\); \(..., R, S\) layout\? rows.mT and cols.mT$"),
    ("cols-rank-first", lambda: FactoredBias(normal(2, 5, 3), normal(2, 3, 7)), ValueError, r"bias.cols: .*; \(..., R, S\) layout\? cols.mT$"),
    ("rows-rank-first", lambda: FactoredBias(normal(3, 5), normal(7, 3)), ValueError, r"bias.cols: .*; \(..., R, S\) layout\? rows.mT$"),
    ("one-rank-first", lambda: FactoredBias(normal(5, 3), normal(3, 5)), ValueError, r"bias.cols: .*; \(..., R, S\) layout\? cols.mT or rows.mT$"),
    ("cols-device", lambda: FactoredBias(normal(5, 3), normal(7, 3).to("meta")), ValueError, r"bias.cols: expected device cpu as bias.rows has, received meta$"),
]  # fmt: skip
CALLS = [
    ("rows-length", (6, 3), (7, 3), {}, r"bias.rows: expected factors of query, a shape broadcastable to \(B, H, Sq, R\) = \(2, 4, 5, 3\) with 4 or 2 or 1 heads, received \(6, 3\)$"),
    ("rows-of-length-1", (1, 3), (7, 3), {}, r"bias.rows: expected .* received \(1, 3\); its axis Sq is not broadcast$"),
    ("cols-length", (5, 3), (2, 2, 5, 3), {}, r"bias.cols: expected factors of key, a shape broadcastable to \(B, Hk, Sk, R\) = \(2, 2, 7, 3\) with 2 or 1 heads, received \(2, 2, 5, 3\)$"),
    ("rows-heads", (3, 5, 3), (7, 3), {}, r"bias.rows: expected .* 4 or 2 or 1 heads.* received \(3, 5, 3\)$"),
    ("cols-of-query-heads", (5, 3), (4, 7, 3), {}, r"bias.cols: .*2 or 1 heads.*\(4, 7, 3\); for factors of each query head repeat key and value to as many heads$"),
    ("rows-batch", (3, 4, 5, 3), (7, 3), {}, r"bias.rows: expected .* received \(3, 4, 5, 3\)$"),
    ("rows-five-axes", (1, 2, 4, 5, 3), (7, 3), {}, r"bias.rows: expected .* received \(1, 2, 4, 5, 3\); rows.flatten\(0, 1\) fits$"),
    ("cols-five-axes", (5, 3), (3, 2, 2, 7, 3), {}, r"bias.cols: expected .* received \(3, 2, 2, 7, 3\); leading axes before the heads are the query's, which has fewer$"),
    ("too-many", (5, 505), (7, 505), {}, r"bias.rows: expected at most 504 factors, a column each beside query's head dim 8 of at most 512, received shape \(5, 505\)$"),
    ("softcap", (5, 3), (7, 3), {"softcap": 2.0}, r"softcap: expected None beside a FactoredBias, which would be capped with the products, received 2.0$"),
    ("scale-small", (5, 3), (7, 3), {"scale": 1e-30}, r"scale: expected 0, or a size from 2\*\*-64 to 2\*\*64 beside a FactoredBias, received 1e-30$"),
    ("scale-nan", (5, 3), (7, 3), {"scale": float("nan")}, r"scale: expected a finite number .* received nan$"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), [row[1:] for row in ERRORS], ids=[row[0] for row in ERRORS])
def test_wrong_factors(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"^dmattn: {message}"):
        make()


@pytest.mark.parametrize(("rows", "cols", "options", "message"), [row[1:] for row in CALLS], ids=[row[0] for row in CALLS])
def test_factors_of_something_else(rows: tuple[int, ...], cols: tuple[int, ...], options: dict, message: str) -> None:
    bias = FactoredBias(normal(*rows), normal(*cols))
    for function in (attention, explain):
        with pytest.raises(ValueError, match=rf"^dmattn: {message}"):
            function(QUERY, KEY, KEY, bias=bias, **options)


def test_other_errors_of_a_call() -> None:
    bias = FactoredBias(normal(5, 3), normal(7, 3))
    with pytest.raises(ValueError, match=r"^dmattn: bias.rows: expected query's device meta, received cpu$"):
        attention(*(x.to("meta") for x in (QUERY, KEY, KEY)), bias=bias)
    with pytest.raises(
        ValueError, match=r"^dmattn: bias.rows: expected at most 84 factors, 6 columns of torch.bfloat16 each .* received shape \(5, 85\)$"
    ):
        attention(*(x.bfloat16() for x in (QUERY, KEY, KEY)), bias=FactoredBias(normal(5, 85), normal(7, 85)))
    with pytest.raises(ValueError, match=r"^dmattn: key: expected query's head dim 8, received 6$"):
        attention(QUERY, KEY[..., :6], KEY, bias=bias)
    with pytest.raises(
        TypeError,
        match=r"^dmattn: attn_mask: expected a bool or float tensor or None, received dmattn.biases.FactoredBias; dmattn.attention takes one as bias$",
    ):
        scaled_dot_product_attention(KEY, KEY, KEY, attn_mask=bias)
    packed = dict(cu_seqlens_q=torch.tensor([0, 5]), cu_seqlens_k=torch.tensor([0, 7]), max_seqlen_q=5, max_seqlen_k=7)
    with pytest.raises(
        ValueError,
        match=r"^dmattn: bias.rows: expected factors of query, shape \(total_q, H, R\) = \(5, 4, 3\) with 4 or 2 or 1 heads, or \(total_q, R\) = \(5, 3\), "
        r"received \(4, 5, 3\)$",
    ):
        attention_varlen(*(x[0].transpose(0, 1) for x in (QUERY, KEY, KEY)), bias=FactoredBias(normal(4, 5, 3), normal(7, 3)), **packed)


def test_factors_before_tokens_are_told_to_be_transposed() -> None:
    """Of as many queries as keys both sides have as many numbers on their last axis, so that only a call sees it."""
    query, key = QUERY, KEY[:, :, :5]
    for heads in ((), (4,), (2, 1)):
        rows, cols = normal(*heads, 3, 5), normal(3, 5)
        with pytest.raises(
            ValueError, match=r"R\) = \(2, 4, 5, 3\) with .*, received \(.*3, 5\); \(..., R, S\) layout\? FactoredBias\(rows.mT, cols.mT\)$"
        ):
            attention(query, key, key, bias=FactoredBias(rows, cols))
        attention(query, key, key, bias=FactoredBias(rows.mT, cols.mT))
    with pytest.raises(ValueError, match=r"^dmattn: bias.rows: .*received \(7, 5\)$"):  # the points of the keys on both sides
        attention(query, KEY[:, :, :7], KEY[:, :, :7], bias=FactoredBias(normal(7, 5), normal(7, 5)))
    with pytest.raises(ValueError, match=r"^dmattn: bias.rows: .*received \(5, 1\)$"):  # those of all queries, of which there is one now
        attention(query[:, :, :1], key, key, bias=FactoredBias(normal(5, 1), normal(5, 1)))
    for rows, cols in ((normal(3, 4, 5), normal(3, 5)), (normal(6, 5), normal(3, 5))):  # which would not fit
        with pytest.raises(ValueError, match=r"^dmattn: bias.rows: .*received \([0-9, ]*\)$"):
            attention(query, key, key, bias=FactoredBias(rows, cols))
    packed = dict(cu_seqlens_q=torch.tensor([0, 5]), cu_seqlens_k=torch.tensor([0, 5]), max_seqlen_q=5, max_seqlen_k=5)
    tokens = [x[0].transpose(0, 1) for x in (query, key, key)]
    with pytest.raises(
        ValueError, match=r"or \(total_q, R\) = \(5, 3\), received \(3, 5\); \(..., R, S\) layout\? FactoredBias\(rows.mT, cols.mT\)$"
    ):
        attention_varlen(*tokens, bias=FactoredBias(normal(3, 5), normal(3, 5)), **packed)
    attention_varlen(*tokens, bias=FactoredBias(normal(5, 3), normal(5, 3)), **packed)


def test_points_of_batch_entries_without_heads_are_told_their_axis() -> None:
    query, key = normal(3, 4, 5, 8), normal(3, 2, 7, 8)
    points, others = normal(3, 5, 2), normal(3, 7, 2)
    with pytest.raises(ValueError, match=r"received \(3, 5, 2\); with the axis that is missing rows\[:, None\]$"):
        attention(query, key, key, bias=FactoredBias(points, others))
    with pytest.raises(ValueError, match=r"received \(3, 7, 2\); with the axis that is missing cols\[:, None\]$"):
        attention(query, key, key, bias=FactoredBias(points[:, None], others))
    attention(query, key, key, bias=FactoredBias(points[:, None], others[:, None]))


@pytest.mark.parametrize("graph", [False, True])
def test_parts_stored_in_float32_are_bfloat16_numbers(graph: bool) -> None:
    """As TF32 drops what a part has beyond its dtype."""
    whole = (normal(5, 7) * 2.0 ** torch.arange(-30, 40, 10)).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: graph)
        parts = factors._parts(whole, torch.bfloat16, 3, torch.float32)
    assert all(torch.equal(part, part.bfloat16().float()) for part in parts)
    assert torch.equal(sum(part.double() for part in parts), whole.double())
    assert torch.equal(torch.autograd.grad(sum(part.sum() for part in parts), whole)[0], torch.ones_like(whole))


@needs_cuda
def test_products_in_tf32_keep_the_precision() -> None:
    query, key = 0.1 * normal(1, 2, 129, 32, device="cuda"), 0.1 * normal(1, 2, 257, 32, device="cuda")
    bias = distances(20 * normal(129, 3, device="cuda"), 20 * normal(257, 3, device="cuda"), 0.05)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert joined(query, key, key, bias, None, None).query.shape[-1] == 64
        _, lse = attention(query, key, key, bias=bias, return_lse=True)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    _, true = reference.attention(query, key, key, bias=bias, return_lse=True, dtype=FP64)
    assert (lse - true).abs().max().item() <= 1e-4 * (1 + true.abs().max().item())
