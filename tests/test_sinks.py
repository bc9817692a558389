"""Attention sinks: a key without a value whose score is a learned number for each query head."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dmattn import IntervalMask, attention, attention_varlen, dynamic_mask_attention, merge_attention, reference
from dmattn.equivalence import Case, Inputs, Standard, judge, results

GROUPED = Case("grouped", 37, 65, heads=6, kv_heads=2, causal=True, sinks="random", sinks_dtype=torch.float32)


def inputs_of(case: Case, device: str) -> Inputs:
    return case.inputs(torch.float32, device)


def test_a_sink_is_a_key_of_zeros_without_a_value(device: str) -> None:
    """Beside the same call with one more key, whose bias is the sink's score and whose value is 0."""
    inputs = inputs_of(Case("more", 37, 65, sinks="random"), device)
    key, value = (torch.cat((x, torch.zeros_like(x[:, :, :1])), 2) for x in (inputs.key, inputs.value))
    bias = torch.cat((torch.zeros(2, 65, device=device), inputs.sinks[:, None]), 1)[None, :, None]
    got = attention(inputs.query, inputs.key, inputs.value, sinks=inputs.sinks, return_lse=True)
    want = attention(inputs.query, key, value, bias=bias, return_lse=True)
    for ours, same in zip(got, want, strict=True):
        torch.testing.assert_close(ours, same)


def test_a_sink_of_minus_infinity_is_none(device: str) -> None:
    """In values and gradients; so is one below the lowest float32 number in base 2, as bfloat16's and float32's lowest are."""
    inputs = inputs_of(GROUPED, device)
    want = results(attention, Inputs(**(vars(inputs) | dict(sinks=None))), GROUPED.options)
    for score in (float("-inf"), torch.finfo(torch.bfloat16).min, torch.finfo(torch.float32).min):
        got = results(attention, Inputs(**(vars(inputs) | dict(sinks=torch.full_like(inputs.sinks, score)))), GROUPED.options)
        assert (got.pop("d_sinks") == 0).all()
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("score", [float("inf"), float("nan")])
def test_a_sink_that_is_no_score_spreads_to_its_head_alone(score: float, device: str) -> None:
    inputs = inputs_of(GROUPED, device)
    sinks = inputs.sinks.clone()
    sinks[2] = score
    others = [head for head in range(6) if head != 2]
    clean_out, clean_lse = attention(inputs.query, inputs.key, inputs.value, causal=True, sinks=inputs.sinks, return_lse=True)
    for function in (attention, reference.attention):
        out, lse = function(inputs.query, inputs.key, inputs.value, causal=True, sinks=sinks, return_lse=True)
        assert out[:, 2].isnan().all()
        assert not lse[:, 2].isfinite().any()
        torch.testing.assert_close(out[:, others], clean_out[:, others])
        torch.testing.assert_close(lse[:, others], clean_lse[:, others])


def test_a_row_without_keys_has_the_sink_alone(device: str) -> None:
    query, sinks = torch.randn(2, 3, 9, 16, device=device), torch.tensor([0.5, -80.0, 1e5], device=device, requires_grad=True)
    keys = torch.randn(2, 3, 0, 16, device=device)
    hidden = torch.zeros(9, 5, dtype=torch.bool, device=device)
    for key, mask in ((keys, None), (torch.randn(2, 3, 5, 16, device=device), hidden)):
        out, lse = attention(query, key, key, mask=mask, sinks=sinks, return_lse=True)
        assert (out == 0).all()
        torch.testing.assert_close(lse, sinks.detach()[:, None].expand(2, 3, 9))
        weights = torch.rand(2, 3, 9, device=device)
        (gradient,) = torch.autograd.grad(lse, sinks, weights)
        torch.testing.assert_close(gradient, weights.sum((0, 2)))


@pytest.mark.parametrize("offset", [-1e4, 1e4], ids=["far-below-0", "far-above-0"])
def test_scores_and_sinks_far_from_0_share_their_weight(offset: float, device: str) -> None:
    """The maximum of both is taken before anything is exponentiated."""
    query, value = torch.zeros(1, 2, 5, 16, device=device), torch.ones(1, 2, 3, 16, device=device)
    sinks, bias = torch.full((2,), offset, device=device), torch.full((1, 1, 1, 3), offset, device=device)
    out, lse = attention(query, value, value, bias=bias, sinks=sinks, return_lse=True)
    torch.testing.assert_close(out, torch.full_like(out, 0.75))
    torch.testing.assert_close(lse, torch.full_like(lse, offset + math.log(4)))


@pytest.mark.parametrize(("len_q", "keep"), [(40, 12), (1, 12), (9, 12), (40, 100)], ids=["prefill", "decoding", "chunk", "all-kept"])
def test_dynamic_masks_beside_sinks(len_q: int, keep: int, device: str) -> None:
    """As attention with the mask written out."""
    inputs = inputs_of(Case("dynamic", len_q, 40, heads=6, kv_heads=2, sinks="far", bias="bg1k"), device)
    bias = inputs.bias[:, :, 0]
    mask = reference.dynamic_mask(bias, keep, len_q=len_q)
    want = results(attention, Inputs(**(vars(inputs) | dict(mask=mask))), {})

    def dynamic(query: Tensor, key: Tensor, value: Tensor, *, mask: None, bias: Tensor, **options: Any) -> Any:
        return dynamic_mask_attention(query, key, value, bias[:, :, 0], keep=keep, **options)

    for name, value in results(dynamic, inputs, {}).items():
        torch.testing.assert_close(value, want[name], rtol=1e-4, atol=1e-5)


def test_any_strides(device: str) -> None:
    inputs = inputs_of(GROUPED, device)
    apart = torch.stack((inputs.sinks, inputs.sinks + 1), 1)
    want = results(attention, inputs, GROUPED.options)
    for name, value in results(attention, Inputs(**(vars(inputs) | dict(sinks=apart[:, 0]))), GROUPED.options).items():
        assert torch.equal(value, want[name]), name


def test_the_gradient_of_sinks_alone(device: str) -> None:
    inputs = inputs_of(GROUPED, device)
    standard = Standard.of(inputs, GROUPED.options)
    sinks = inputs.sinks.clone().requires_grad_()
    out, lse = attention(inputs.query, inputs.key, inputs.value, sinks=sinks, return_lse=True, **GROUPED.options)
    gradients = [torch.autograd.grad((out, lse), sinks, (inputs.d_out, inputs.d_lse), retain_graph=True)[0] for _ in range(3)]
    (verdict,) = judge(dict(d_sinks=gradients[0]), standard)
    assert verdict.passed, verdict
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def test_one_share_alone_carries_the_sinks_of_a_merge(device: str) -> None:
    inputs = inputs_of(Case("merged", 19, 65, heads=4, kv_heads=2, sinks="random"), device)
    want = attention(inputs.query, inputs.key, inputs.value, sinks=inputs.sinks, return_lse=True)
    shares = [
        attention(inputs.query, inputs.key[:, :, keys], inputs.value[:, :, keys], sinks=sinks, return_lse=True)
        for keys, sinks in ((slice(0, 30), None), (slice(30, None), inputs.sinks))
    ]
    for got, whole in zip(merge_attention(*zip(*shares, strict=True)), want, strict=True):
        torch.testing.assert_close(got, whole)


@pytest.mark.parametrize("bias", [None, "1hqk", "1hq1", "nh1k"], ids=str)
def test_packed_sequences_share_the_sinks(bias: str | None, device: str) -> None:
    """As calls of their own, one of which has no key; the gradient is summed over them."""
    random = torch.Generator().manual_seed(0)
    lengths_q, lengths_k = (5, 0, 9, 3), (7, 4, 9, 0)
    ends_q, ends_k = (torch.tensor((0, *lengths)).cumsum(0).to(device) for lengths in (lengths_q, lengths_k))
    sizes = dict(n=4, h=4, q=9, k=9)
    query, d_out = (torch.randn(17, 4, 16, generator=random).to(device) for _ in range(2))
    key, value = (torch.randn(20, 2, 16, generator=random).to(device) for _ in range(2))
    bias = None if bias is None else torch.randn([sizes.get(axis, 1) for axis in bias], generator=random).to(device)
    sinks = torch.randn(4, generator=random).to(device).requires_grad_()
    d_lse = torch.randn(4, 17, generator=random).to(device)
    leaves = [x for x in (query, key, value, bias, sinks) if x is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    options = dict(max_seqlen_q=9, max_seqlen_k=9, bias=bias, causal=True, sinks=sinks, return_lse=True)
    out, lse = attention_varlen(query, key, value, ends_q, ends_k, **options)
    parts = [_part(n, query, key, value, ends_q.tolist(), ends_k.tolist(), bias, sinks) for n in range(4)]
    torch.testing.assert_close(out, torch.cat([part[0] for part in parts]))
    torch.testing.assert_close(lse, torch.cat([part[1] for part in parts], 1))
    want = torch.autograd.grad([x for part in parts for x in part], leaves, [x for n in range(4) for x in _of(n, ends_q, d_out, d_lse)])
    for got, whole in zip(torch.autograd.grad((out, lse), leaves, (d_out, d_lse)), want, strict=True):
        torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-5)


def _of(n: int, ends: Tensor, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor, Tensor]:
    rows = slice(*ends.tolist()[n : n + 2])
    return d_out[rows], d_lse[:, rows]


def _part(n: int, query: Tensor, key: Tensor, value: Tensor, ends_q: list, ends_k: list, bias: Tensor | None, sinks: Tensor) -> tuple:
    """(out, lse) of a packed sequence by itself."""
    rows, cols = slice(*ends_q[n : n + 2]), slice(*ends_k[n : n + 2])
    if bias is not None:
        bias = bias[n if bias.shape[0] > 1 else 0, :, : rows.stop - rows.start, : cols.stop - cols.start]
    each = (x.transpose(0, 1)[None] for x in (query[rows], key[cols], value[cols]))
    out, lse = reference.attention(*each, bias=bias, causal=True, sinks=sinks, return_lse=True)
    return out[0].transpose(0, 1), lse[0]


def test_intervals_beside_sinks(device: str) -> None:
    """A window as an IntervalMask gives what the window gives."""
    inputs = inputs_of(Case("window", 70, heads=4, kv_heads=2, sinks="random"), device)
    mask = IntervalMask.window(70, 70, left=9, right=0, device=device)
    want = results(attention, inputs, dict(causal=True, window=(9, 0)))
    for name, value in results(attention, Inputs(**(vars(inputs) | dict(mask=mask))), {}).items():
        torch.testing.assert_close(value, want[name], rtol=1e-4, atol=1e-5)


def test_autocast_leaves_the_sinks_alone(device: str, half: torch.dtype) -> None:
    inputs = inputs_of(GROUPED, device)
    sinks = inputs.sinks.clone().requires_grad_()
    with torch.autocast(device, dtype=half):
        out = attention(inputs.query, inputs.key, inputs.value, sinks=sinks)
    assert out.dtype == half
    assert torch.equal(out, attention(*(x.to(half) for x in (inputs.query, inputs.key, inputs.value)), sinks=sinks))
    assert torch.autograd.grad(out.float().sum(), sinks)[0].dtype == torch.float32


def test_vmap_takes_sinks_that_it_does_not_map(device: str) -> None:
    query, sinks = torch.randn(3, 2, 4, 9, 16, device=device), torch.randn(4, device=device)
    got = torch.func.vmap(lambda x: attention(x, x, x, sinks=sinks))(query)
    torch.testing.assert_close(got, torch.stack([attention(x, x, x, sinks=sinks) for x in query]))
    with pytest.raises(RuntimeError, match=r"sinks: expected the same for all elements under torch.func.vmap, received a mapped axis"):
        torch.func.vmap(lambda x, scores: attention(x, x, x, sinks=scores))(query, torch.stack([sinks] * 3))
