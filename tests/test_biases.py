"""RelativeBias: its forms against the formula, attention with it against the dense bias, and what is refused."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from cases import DISTANCES
from torch.utils import _pytree as pytree

import dmattn
from dmattn import RelativeBias, attention
from dmattn.equivalence import check
from dmattn.execution import torch_path
from dmattn.execution.backend import interpreting


@pytest.mark.skipif(interpreting(), reason="float64 takes the PyTorch path")
def test_in_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of rows and keys keep the distances of the whole."""
    monkeypatch.setattr(torch_path, "CHUNK_SCORES", 1)
    for case in DISTANCES[::4]:
        assert all(verdict.passed for verdict in check(case, torch.float64)), case.name


def test_dense_is_the_formula() -> None:
    table = torch.randn(2, 3, 5, dtype=torch.float64)
    for len_q, len_k in ((4, 7), (7, 4), (1, 9), (0, 3)):
        for given, zero in ((table, 3), (table[0], None), (table[0, 0], 0)):
            bias = RelativeBias(given, zero)
            dense = bias.to_dense(len_q, len_k)
            assert dense.shape == (*given.shape[:-1], len_q, len_k)
            for i in range(len_q):
                for j in range(len_k):
                    place = min(max(j - (i + len_k - len_q) + bias.zero, 0), 4)
                    assert torch.equal(dense[..., i, j], given[..., place])


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 100), (8, 20), (7, 11), (320, 800)])
def test_t5_is_the_bias_of_transformers(bidirectional: bool, buckets: int, max_distance: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    from transformers import T5Config

    heads = 3
    config = T5Config(
        num_heads=heads,
        d_kv=4,
        d_model=12,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance,
        is_decoder=not bidirectional,
    )
    layer = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double()
    weight = layer.relative_attention_bias.weight
    bias = RelativeBias.t5(weight, bidirectional=bidirectional, max_distance=max_distance)
    assert bias.table.shape == (heads, 2 * max_distance + 1)
    for len_q, len_k in ((150, 150), (5, 300), (1, 1), (60, 60)):
        wanted = layer.compute_bias(len_q, len_k, past_seen_tokens=len_k - len_q)
        dense = bias.to_dense(len_q, len_k)
        assert torch.equal(dense, wanted[0])
        d_bias = torch.randn(heads, len_q, len_k, dtype=torch.float64)
        gradients = [torch.autograd.grad(x, weight, d_bias.view(x.shape), retain_graph=True)[0] for x in (dense, wanted)]
        torch.testing.assert_close(*gradients)


def test_alibi_is_its_formula() -> None:
    slopes = torch.tensor([0.5, 0.25, 2**-8], dtype=torch.float64, requires_grad=True)
    bias = RelativeBias.alibi(slopes, 9)
    for len_q, len_k in ((9, 9), (4, 9), (9, 4), (1, 1)):
        distance = torch.arange(len_k) - (torch.arange(len_q)[:, None] + len_k - len_q)
        assert torch.equal(bias.to_dense(len_q, len_k), -slopes[:, None, None] * distance.abs())
    assert RelativeBias.alibi(slopes.detach().bfloat16(), 9).table.dtype == torch.float32


def test_slopes_of_batch_entries_as_the_message_has_them() -> None:
    slopes, length = torch.tensor([[0.5, 0.25], [0.125, 1.0]]), 9
    with pytest.raises(ValueError, match="of slopes") as raised:
        RelativeBias.alibi(slopes, length)
    bias = eval(str(raised.value).partition("it is ")[2])
    for entry in range(2):
        assert torch.equal(bias.to_dense(4, 9)[entry], RelativeBias.alibi(slopes[entry], length).to_dense(4, 9))


def test_slopes_and_weights_are_learned(device: str) -> None:
    """The gradient goes on from the table to what it was made of."""
    query, key, value = (torch.randn(2, 2, 21, 8, device=device) for _ in range(3))
    slopes = torch.tensor([0.5, 0.1], device=device, requires_grad=True)
    weight = torch.randn(8, 2, device=device, requires_grad=True)
    biases = (RelativeBias.alibi(slopes, 21), RelativeBias.t5(weight, bidirectional=True, max_distance=10))
    for leaf, bias in zip((slopes, weight), biases, strict=True):
        got, wanted = (
            torch.autograd.grad(attention(query, key, value, bias=x).square().sum(), leaf, retain_graph=True)[0]
            for x in (bias, bias.to_dense(21, 21))
        )
        torch.testing.assert_close(got, wanted, rtol=2e-3 if query.is_cuda else 1e-5, atol=1e-4 if query.is_cuda else 1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_entries_that_hidden_pairs_alone_read_change_nothing(bad: float, device: str) -> None:
    query, key, value = (torch.randn(1, 2, 70, 16, device=device, requires_grad=True) for _ in range(3))
    table = torch.randn(2, 90, device=device)
    poisoned = table.clone()
    poisoned[:, 51:] = bad  # after the query
    poisoned[:, :10] = bad  # farther back than the window
    results = []
    for given in (table, poisoned):
        leaf = given.requires_grad_()
        out = attention(query, key, value, bias=RelativeBias(leaf, 50), causal=True, window=(40, None))
        results.append((out, *torch.autograd.grad(out.square().sum(), (query, key, value, leaf))))
    for plain, beside_bad in zip(*results, strict=True):
        assert torch.equal(plain, beside_bad)


def test_an_entry_of_minus_infinity_masks(device: str) -> None:
    query, key, value = (torch.randn(1, 2, 40, 16, device=device, requires_grad=True) for _ in range(3))
    table = torch.zeros(2, 79, device=device)
    table[:, 40:] = -math.inf
    leaf = table.requires_grad_()
    out, lse = attention(query, key, value, bias=RelativeBias(leaf), return_lse=True)
    wanted, wanted_lse = attention(query, key, value, causal=True, return_lse=True)
    torch.testing.assert_close(out, wanted, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, wanted_lse, rtol=2e-3, atol=2e-3)
    (gradient,) = torch.autograd.grad(out.square().sum(), leaf)
    assert torch.equal(gradient[:, 40:], torch.zeros_like(gradient[:, 40:]))
    empty, _ = attention(query, key, value, bias=RelativeBias(torch.full((1,), -math.inf, device=device)), return_lse=True)
    assert torch.equal(empty, torch.zeros_like(empty))


def test_empty_lengths(device: str) -> None:
    for len_q, len_k in ((0, 5), (5, 0), (0, 0)):
        table = torch.randn(2, 5, device=device, requires_grad=True)
        query, key = torch.randn(1, 2, len_q, 8, device=device), torch.randn(1, 2, len_k, 8, device=device)
        out = attention(query, key, key, bias=RelativeBias(table))
        (gradient,) = torch.autograd.grad(out.sum(), table)
        assert torch.equal(gradient, torch.zeros_like(table))


def test_repeats_bitwise(device: str) -> None:
    query, key, value = (torch.randn(2, 2, 96, 16, device=device) for _ in range(3))
    table = torch.randn(2, 41, device=device, requires_grad=True)
    gradients = [torch.autograd.grad(attention(query, key, value, bias=RelativeBias(table)).square().sum(), table)[0] for _ in range(3)]
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


@pytest.mark.skipif(interpreting(), reason="the interpreter has no torch.compile")
def test_compiled() -> None:
    """One graph, made within it and given to it, with lengths that it keeps symbolic."""

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def layer(query: torch.Tensor, weight: torch.Tensor, bias: RelativeBias) -> torch.Tensor:
        own = RelativeBias.t5(weight, bidirectional=True, max_distance=16)
        return attention(query, query, query, bias=own) + attention(query, query, query, bias=bias, causal=True)

    weight = torch.randn(8, 2, requires_grad=True)
    table = torch.randn(2, 33, requires_grad=True)
    for length in (20, 33):
        query = torch.randn(2, 2, length, 8)
        out = layer(query, weight, RelativeBias(table, 30))
        own, given = RelativeBias.t5(weight, bidirectional=True, max_distance=16), RelativeBias(table, 30)
        wanted = attention(query, query, query, bias=own.to_dense(length, length))
        wanted = wanted + attention(query, query, query, bias=given.to_dense(length, length), causal=True)
        torch.testing.assert_close(out, wanted)
        gradients = [torch.autograd.grad(x.square().sum(), (weight, table)) for x in (out, wanted)]
        torch.testing.assert_close(*gradients)


@pytest.mark.skipif(interpreting(), reason="the interpreter has no torch.compile")
def test_an_exported_program_takes_other_tables() -> None:
    class Biased(torch.nn.Module):
        def forward(self, query: torch.Tensor, bias: RelativeBias) -> torch.Tensor:
            return attention(query, query, query, bias=bias)

    query, file, other = torch.randn(2, 4, 6, 4), io.BytesIO(), RelativeBias(torch.randn(4, 5), 1)
    program = torch.export.export(Biased(), (query, RelativeBias(torch.randn(4, 5), 1)))
    torch.export.save(program, file)
    file.seek(0)
    for found in (program, torch.export.load(file)):
        assert torch.equal(found.module()(query, other), attention(query, query, query, bias=other))


@pytest.mark.skipif(interpreting(), reason="float64 takes the PyTorch path")
def test_opcheck_and_gradcheck() -> None:
    query, key, value = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    table = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)

    def function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor) -> Any:
        return attention(query, key, value, bias=RelativeBias(table, 1), return_lse=True)

    assert torch.autograd.gradcheck(function, (query, key, value, table))


def test_vmap(device: str) -> None:
    query = torch.randn(3, 2, 2, 9, 8, device=device)
    tables = torch.randn(3, 2, 7, device=device)
    shared = torch.vmap(lambda q, t: attention(q, q, q, bias=RelativeBias(t)), in_dims=(0, None))(query, tables[0])
    mapped = torch.vmap(lambda q, bias: attention(q, q, q, bias=bias))(query, RelativeBias(tables, 2))
    for entry in range(3):
        x = query[entry]
        torch.testing.assert_close(shared[entry], attention(x, x, x, bias=RelativeBias(tables[0])))
        torch.testing.assert_close(mapped[entry], attention(x, x, x, bias=RelativeBias(tables[entry], 2)))


def test_a_tree_of_its_table() -> None:
    bias = RelativeBias.alibi(torch.ones(2), 4)
    leaves, spec = pytree.tree_flatten(bias)
    again = pytree.tree_unflatten(leaves, spec)
    assert (again.table is bias.table, again.zero, again.longest) == (True, bias.zero, 4)
    assert repr(bias) == "RelativeBias(table of shape (2, 7) in torch.float32, zero=3)"
    with pytest.raises(FrozenInstanceError):
        bias.zero = 9  # which nothing would check


@pytest.mark.skipif(interpreting(), reason="the PyTorch path, in a process of its own")
def test_memory_of_a_cpu_is_not_that_of_pairs() -> None:
    """Forward and backward of 8192 x 8192 pairs of one head, whose dense bias would take 256 MiB, in the room of some chunks."""
    code = """
import resource, torch, dmattn
from dmattn import RelativeBias, attention
query = torch.randn(1, 1, 8192, 8, requires_grad=True)
table = torch.randn(1, 257, requires_grad=True)
attention(query[:, :, :64], query[:, :, :64], query[:, :, :64], bias=RelativeBias(table)).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attention(query, query, query, bias=RelativeBias(table)).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert int(done.stdout) < 160, done.stdout


QUERY = torch.zeros(2, 4, 6, 8)
KEY = torch.zeros(2, 2, 6, 8)


def of(*shape: int, **options: Any) -> RelativeBias:
    return RelativeBias(torch.zeros(*shape, **options))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RelativeBias([1.0]), TypeError, "RelativeBias: table: expected a float16, bfloat16, float32 or float64 tensor, received list"),
        (lambda: RelativeBias(torch.zeros(3).to(torch.float8_e5m2)), TypeError, "float32 or float64 tensor, received torch.float8_e5m2 tensor"),
        (lambda: of(3, dtype=torch.int64), TypeError, "RelativeBias: table: expected a float16, bfloat16, float32 or float64 tensor, received torch.int64 tensor"),
        (lambda: RelativeBias(torch.tensor(1.0)), ValueError, r"RelativeBias: table: expected shape \(R,\) or \(..., H, R\), R from 1, received \(\)"),
        (lambda: of(2, 0), ValueError, "RelativeBias: table: expected shape"),
        (lambda: RelativeBias(torch.zeros(5), 5), ValueError, "RelativeBias: zero: expected an index of the table, from 0 to 4, received 5"),
        (lambda: RelativeBias(torch.zeros(5), -1), ValueError, r"RelativeBias: zero: expected an index of the table, .*; the last axis of the table \(5,\) is the distances$"),
        (lambda: RelativeBias(torch.zeros(257, 4), 128), ValueError, r"from 0 to 3, received 128; the last axis of the table \(257, 4\) is the distances, as that of table.t\(\) would be$"),
        (lambda: RelativeBias(torch.zeros(5), 1.0), TypeError, "RelativeBias: zero: expected an integer or None, received float"),
        (lambda: RelativeBias(torch.zeros(5), True), TypeError, "RelativeBias: zero: expected an integer or None, received bool"),
        (lambda: of(5).to_dense(-1, 2), ValueError, "RelativeBias.to_dense: len_q: expected a non-negative integer, received -1"),
        (lambda: of(5).to_dense(1, 2.0), TypeError, "RelativeBias.to_dense: len_k: expected an integer, received float"),
        (lambda: RelativeBias.t5(None, bidirectional=True), TypeError, "RelativeBias.t5: weight: expected a float16, bfloat16, float32 or float64 tensor, received NoneType"),
        (lambda: RelativeBias.t5(torch.zeros(3, 2), bidirectional=True), ValueError, r"t5: weight: expected shape \(buckets from 4, H\), received"),
        (lambda: RelativeBias.t5(torch.zeros(3, 32), bidirectional=True), ValueError, r"received \(3, 32\); \(H, buckets\) layout\? pass weight\.t\(\)$"),
        (
            lambda: dmattn.attention(*[torch.zeros(2, 8, 5, 4)] * 3, bias=RelativeBias.t5(torch.zeros(8, 32), bidirectional=True)),
            ValueError,
            r"bias\.table: expected .* 8 or 1 heads, received \(32, 257\); its axes are .* of RelativeBias\.t5's weight \(buckets, heads\)",
        ),
        (lambda: RelativeBias.t5(torch.zeros(32), bidirectional=False), ValueError, r"t5: weight: expected shape \(buckets from 2, H\), received"),
        (lambda: RelativeBias.t5(torch.zeros(8, 2), bidirectional=1), TypeError, "bidirectional: expected True or False, received int"),
        (
            lambda: RelativeBias.t5(torch.zeros(32, 2), bidirectional=True, max_distance=8),
            ValueError,
            "t5: max_distance: expected more than 8, half of 16 buckets, received 8",
        ),
        (lambda: RelativeBias(torch.zeros(3)) + torch.zeros(4, 4), TypeError, r"RelativeBias: \+: expected tensors, received a RelativeBias beside torch.Tensor; bias.to_dense\(Sq, Sk\) is"),
        (lambda: torch.zeros(4, 4) + RelativeBias(torch.zeros(3)), TypeError, r"RelativeBias: \+: expected tensors, received a RelativeBias beside torch.Tensor;"),
        (lambda: torch.zeros(4, 4) + dmattn.FactoredBias(torch.zeros(4, 2), torch.zeros(4, 2)), TypeError, r"FactoredBias: \+: .*; bias.to_dense\(\) is a tensor"),
        (lambda: RelativeBias.alibi([1.0], 3), TypeError, "RelativeBias.alibi: slopes: expected a float16, bfloat16, float32 or float64 tensor, received list"),
        (lambda: RelativeBias.alibi(torch.zeros(2, 1), 3), ValueError, r"alibi: slopes: expected shape \(H,\), received \(2, 1\); of slopes \(B, H\) it is RelativeBias\(-slopes\[\.\.\., None\]"),
        (lambda: RelativeBias.alibi(torch.zeros(2), 0), ValueError, "alibi: length: expected at least 1, received 0"),
        (lambda: RelativeBias.alibi(torch.zeros(2), 3).to_dense(2, 4), ValueError, "to_dense: len_k: expected at most 3, the length of RelativeBias.alibi"),
    ],
)  # fmt: skip
def test_refused_where_it_is_made(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        (
            of(3, 7),
            ValueError,
            r"bias.table: expected a shape broadcastable to \(B, H, R\) = \(2, 4, 7\) with 4 or 2 or 1 heads, received \(3, 7\); its axes are",
        ),
        (of(3, 4, 7), ValueError, r"bias.table: expected a shape broadcastable to \(B, H, R\) .* received \(3, 4, 7\)$"),
        (
            of(2, 1, 1, 7),
            ValueError,
            r"bias.table: expected a shape broadcastable to \(B, H, R\) .* received \(2, 1, 1, 7\); table.flatten\(0, 1\) fits$",
        ),
        (
            of(7, 4),
            ValueError,
            r"bias.table: expected .* \(B, H, R\) = \(2, 4, 4\) with 4 or 2 or 1 heads, received \(7, 4\); its axes are .*: table.t\(\)$",
        ),
        (of(7, 2), ValueError, r"bias.table: expected .* received \(7, 2\); its axes are .*: table.t\(\)$"),
        (of(7, device="meta"), ValueError, "bias.table: expected query's device cpu, received meta"),
        (
            RelativeBias.alibi(torch.zeros(4), 5),
            ValueError,
            "bias: expected a `length` given to RelativeBias.alibi of at least query's 6, received 5",
        ),
        (3.0, TypeError, "bias: expected a float tensor, a FactoredBias, a RelativeBias or None, received float"),
    ],
)
def test_refused_by_attention(bias: Any, error: type[Exception], message: str) -> None:
    for function in (attention, dmattn.reference.attention):
        with pytest.raises(error, match=f"dmattn: {message}"):
            function(QUERY, KEY, KEY, bias=bias)


def test_a_table_of_batch_entries_without_heads_is_told_its_axis() -> None:
    query, key = torch.zeros(3, 4, 6, 8), torch.zeros(3, 2, 9, 8)
    received = r"bias.table: expected a shape broadcastable to .* with 4 or 2 or 1 heads, received"
    with pytest.raises(ValueError, match=rf"{received} \(3, 7\); its axes are .*: table\[:, None\]$"):
        attention(query, key, key, bias=of(3, 7))
    with pytest.raises(ValueError, match=rf"{received} \(3, 4\); its axes are .*: table\[:, None\] or table.t\(\), by what its axes are$"):
        attention(query, key, key, bias=of(3, 4))
    fitting = of(3, 7).table[:, None]
    assert attention(query, key, key, bias=RelativeBias(fitting)).shape == query.shape
