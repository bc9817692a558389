"""Functions by the names of other libraries, against the formulas of their originals, written plainly in float64: values and all gradients."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import needs_cuda
from torch import Tensor
from torch.autograd import forward_ad

from dmattn import BlockMask, advice, attention, compat
from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="about arguments, which are the same in both halves")

B, N, H, HK, SQ, SK, D = 2, 3, 4, 2, 5, 9, 8


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def plain(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, softcap: float = 0.0, added: Any = 0.0, kept: Any = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of tensors (..., length, heads, head dim); what is added and kept broadcasts to (..., heads, Sq, Sk)."""
    groups = q.shape[-2] // k.shape[-2]
    k, v = (x.repeat_interleave(groups, dim=-2) for x in (k, v))
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + added
    if kept is not None:
        scores = scores.masked_fill(~kept, float("-inf"))
    hidden = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0)
    return torch.einsum("...hqk,...khd->...qhd", weights, v), torch.logsumexp(scores, -1)


def assert_equal(ours: Callable[..., Any], theirs: Callable[..., Any], inputs: Sequence[Tensor], device: str) -> None:
    """The same results and gradients of the same tensors: in float64 on a CPU, in float32 on a GPU, where kernels compute."""
    dtype, limits = (torch.float64, dict(rtol=1e-9, atol=1e-11)) if device == "cpu" else (torch.float32, dict(rtol=1e-4, atol=1e-5))
    given = [x.detach().to(device, dtype).requires_grad_() for x in inputs]
    exact = [x.detach().to(device, dtype).double().requires_grad_() for x in inputs]
    got, want = ours(*given), theirs(*exact)
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x.double(), y, **limits)
    weights = [torch.cos(torch.arange(x.numel(), device=device, dtype=torch.float64)).view(x.shape) for x in want]
    losses = [sum((x.nan_to_num(neginf=0.0) * w.to(x.dtype)).sum() for x, w in zip(some, weights, strict=True)) for some in (got, want)]
    gradients = zip(torch.autograd.grad(losses[0], given), torch.autograd.grad(losses[1], exact), strict=True)
    for gradient, expected in gradients:
        torch.testing.assert_close(gradient.double(), expected, **limits)


def place(len_q: int = SQ, len_k: int = SK, device: str = "cpu") -> Tensor:
    """j - (i + Sk - Sq) of each pair."""
    return torch.arange(len_k, device=device) - (torch.arange(len_q, device=device)[:, None] + len_k - len_q)


def padded(kv_heads: int = HK) -> list[Tensor]:
    return [normal(B, SQ, H, D), normal(B, SK, kv_heads, D), normal(B, SK, kv_heads, D) + 1]


def flash(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None, *, causal: bool = False, window: Sequence[int] = (-1, -1), **options: Any
) -> tuple:
    """FlashAttention's formula, as its docstrings have it."""
    away = place(q.shape[-3], k.shape[-3], q.device)
    kept = torch.ones_like(away, dtype=torch.bool)
    if causal:
        kept &= away <= 0
    if window[0] >= 0:
        kept &= away >= -window[0]
    if window[1] >= 0:
        kept &= away <= window[1]
    added = 0.0 if slopes is None else -slopes[..., None, None] * away.abs()
    return plain(q, k, v, added=added, kept=kept, **options)


FLASH = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(2, 1)),
    "window-left": dict(window_size=(3, -1)),
    "window-causal": dict(causal=True, window_size=(2, 0)),
    "softcap-scale": dict(softcap=1.5, softmax_scale=0.7),
    "everything": dict(causal=True, window_size=(4, -1), softcap=2.0, softmax_scale=0.5, deterministic=True),
}


@pytest.mark.parametrize("slopes", [None, (H,), (B, H)], ids=["no-slopes", "slopes", "slopes-by-batch"])
@pytest.mark.parametrize("name", FLASH)
def test_flash_attention(name: str, slopes: tuple[int, ...] | None, device: str) -> None:
    given = dict(FLASH[name])
    theirs = dict(
        causal=given.get("causal", False),
        window=given.get("window_size", (-1, -1)),
        scale=given.get("softmax_scale"),
        softcap=given.get("softcap", 0.0),
    )
    inputs = padded() + ([] if slopes is None else [normal(*slopes).abs()])

    def ours(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None) -> tuple:
        out, lse, empty = compat.flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True, **given)
        assert empty.numel() == 0
        assert out.is_contiguous()
        assert torch.equal(out, compat.flash_attn_func(q, k, v, alibi_slopes=slopes, **given))
        return out, lse

    assert_equal(ours, lambda *tensors: flash(*tensors, **theirs), inputs, device)


def test_flash_attention_of_more_queries_than_keys() -> None:
    """Queries before the first key see none: 0, as in the original."""
    inputs = [normal(B, SK, H, D), normal(B, SQ, HK, D), normal(B, SQ, HK, D)]
    assert_equal(lambda *x: compat.flash_attn_func(*x, causal=True), lambda *x: flash(*x, causal=True)[0], inputs, "cpu")


def test_flash_attention_by_position() -> None:
    """Arguments in the original's order."""
    got = compat.flash_attn_func(*padded(), 0.0, 0.3, True, (2, -1), 1.5, normal(H), False, False)
    torch.testing.assert_close(got, flash(*padded(), normal(H), causal=True, window=(2, -1), scale=0.3, softcap=1.5)[0], rtol=1e-9, atol=1e-11)


def test_flash_attention_packed_in_one_tensor(device: str) -> None:
    options = dict(causal=True, softcap=2.0)
    qkv, q, kv = normal(B, SK, 3, H, D), normal(B, SQ, H, D), normal(B, SK, 2, HK, D)
    assert_equal(lambda x: compat.flash_attn_qkvpacked_func(x, **options), lambda x: flash(*x.unbind(2), **options)[0], [qkv], device)
    assert_equal(
        lambda x, y: compat.flash_attn_kvpacked_func(x, y, **options), lambda x, y: flash(x, *y.unbind(2), **options)[0], [q, kv], device
    )


LENGTHS_Q, LENGTHS_K = (3, 1, 4), (5, 2, 4)


def ends(lengths: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def by_sequence(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, lengths: tuple, **options: Any) -> tuple[Tensor, Tensor]:
    parts = zip(*(x.split(sizes) for x, sizes in zip((q, k, v), (lengths[0], lengths[1], lengths[1]), strict=True)), strict=True)
    each = [flash(*three, None if slopes is None else slopes.expand(len(lengths[0]), -1)[n], **options) for n, three in enumerate(parts)]
    return torch.cat([out for out, _ in each]), torch.cat([lse for _, lse in each], -1)


@pytest.mark.parametrize("slopes", [None, (H,), (3, H)], ids=["no-slopes", "slopes", "slopes-by-sequence"])
def test_flash_attention_varlen(slopes: tuple[int, ...] | None, device: str) -> None:
    q, k, v = normal(sum(LENGTHS_Q), H, D), normal(sum(LENGTHS_K), HK, D), normal(sum(LENGTHS_K), HK, D) + 1
    of_q, of_k = ends(LENGTHS_Q, device), ends(LENGTHS_K, device)

    def ours(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None) -> tuple:
        options = dict(causal=True, window_size=(3, -1), alibi_slopes=slopes, return_attn_probs=True)
        return compat.flash_attn_varlen_func(q, k, v, of_q, of_k, 4, 5, **options)[:2]

    def theirs(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None) -> tuple:
        return by_sequence(q, k, v, slopes, (LENGTHS_Q, LENGTHS_K), causal=True, window=(3, -1))

    assert_equal(ours, theirs, [q, k, v] + ([] if slopes is None else [normal(*slopes).abs()]), device)


def test_flash_attention_varlen_packed_in_one_tensor() -> None:
    qkv, q, kv = normal(sum(LENGTHS_K), 3, H, D), normal(sum(LENGTHS_Q), H, D), normal(sum(LENGTHS_K), 2, HK, D)
    of_q, of_k = ends(LENGTHS_Q), ends(LENGTHS_K)
    assert_equal(
        lambda x: compat.flash_attn_varlen_qkvpacked_func(x, of_k, 5, causal=True),
        lambda x: by_sequence(*x.unbind(1), None, (LENGTHS_K, LENGTHS_K), causal=True)[0],
        [qkv],
        "cpu",
    )
    assert_equal(
        lambda x, y: compat.flash_attn_varlen_kvpacked_func(x, y, of_q, of_k, 4, 5, softmax_scale=0.3),
        lambda x, y: by_sequence(x, *y.unbind(1), None, (LENGTHS_Q, LENGTHS_K), scale=0.3)[0],
        [q, kv],
        "cpu",
    )


@pytest.mark.parametrize("heads", [1, HK, H])
def test_flash_dmattn(heads: int, device: str) -> None:
    kept = normal(B, heads, SQ, SK).to(device) > -0.5
    kept[:, :, 1] = False  # a query without keys
    groups = H // heads if heads > 1 else 1

    def theirs(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        visible = kept.repeat_interleave(groups, 1) & (place(device=device) <= 0)
        return plain(q, k, v, scale=0.3, added=bias.repeat_interleave(groups, 1), kept=visible)

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        options = dict(softmax_scale=0.3, is_causal=True, deterministic=True, return_attn_probs=True)
        return compat.flash_dmattn_func_auto("triton")(q, k, v, kept, bias, **options)[:2]

    assert_equal(ours, theirs, [*padded(), normal(1, heads, 1, SK)], device)


def test_flash_dmattn_varlen() -> None:
    inputs = [normal(sum(LENGTHS_Q), H, D), normal(sum(LENGTHS_K), HK, D), normal(sum(LENGTHS_K), HK, D)]
    assert_equal(
        lambda *x: compat.flash_dmattn_varlen_func(*x, ends(LENGTHS_Q), ends(LENGTHS_K), 4, 5, 0.3, True, 1.5),
        lambda *x: by_sequence(*x, None, (LENGTHS_Q, LENGTHS_K), causal=True, scale=0.3, softcap=1.5)[0],
        inputs,
        "cpu",
    )


def heads_second(function: Callable[..., Any]) -> Callable[..., Any]:
    """A formula of tensors (..., length, heads, dim), of tensors (..., heads, length, dim)."""

    def call(q: Tensor, k: Tensor, v: Tensor, *others: Tensor, **options: Any) -> Any:
        out, lse = function(*(x.transpose(-3, -2) for x in (q, k, v)), *others, **options)
        return out.transpose(-3, -2), lse

    return call


@pytest.mark.parametrize("batch", [1, B])
def test_flex_attention(batch: int, device: str) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    block_mask = flex.create_block_mask(lambda b, h, i, j: (j - i <= SK - SQ) & (j % 3 != 1), None, None, SQ, SK, device=device)
    kept = (place(device=device) <= 0) & (torch.arange(SK, device=device) % 3 != 1)
    inputs = [normal(B, H, SQ, D), normal(batch, HK, SK, D), normal(batch, HK, SK, D)]
    options = dict(block_mask=block_mask, scale=0.4, enable_gqa=True)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = compat.flex_attention(q, k, v, **options, return_lse=True)
        again, aux = compat.flex_attention(q, k, v, **options, return_aux=flex.AuxRequest(lse=True))
        assert torch.equal(out, again)
        assert torch.equal(lse, aux.lse)
        return out, lse

    assert_equal(ours, lambda *x: heads_second(plain)(*x, scale=0.4, kept=kept), inputs, device)
    own = BlockMask.from_flex(block_mask)
    given = [x.to(device) for x in inputs]
    assert torch.equal(
        compat.flex_attention(*given, block_mask=own, enable_gqa=True), compat.flex_attention(*given, block_mask=block_mask, enable_gqa=True)
    )


def test_a_block_mask_whose_mask_mod_is_replaced_is_read_again() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    block_mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, SQ, SQ, device="cpu")
    inputs = [normal(B, H, SQ, D) for _ in range(3)]
    compat.flex_attention(*inputs, block_mask=block_mask)
    block_mask.mask_mod = lambda b, h, i, j: (i >= j) & (i - j < 3)
    out = compat.flex_attention(*inputs, block_mask=block_mask)
    torch.testing.assert_close(out, attention(*inputs, causal=True, window=(2, None)))


def evoformer() -> list[Tensor]:
    return [normal(B, N, SQ, H, D), normal(B, N, SK, H, D), normal(B, N, SK, H, D)]


@pytest.mark.parametrize("which", ["none", "key", "pairs", "None-pairs", "both"])
def test_evoformer(which: str, device: str) -> None:
    """Both biases are learned here, and added as they are."""
    by_key, of_pairs = normal(B, N, 1, 1, SK), normal(B, 1, H, SQ, SK)
    by_key[0, 1, ..., 3] = -1e9
    biases = {"none": [], "key": [by_key], "pairs": [], "None-pairs": [of_pairs], "both": [by_key, of_pairs]}[which]

    def listed(given: Sequence[Tensor]) -> list:
        return [None, *given] if which == "None-pairs" else list(given)

    def ours(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        biases = listed(given)
        kept = list(biases)
        out = compat.DS4Sci_EvoformerAttention(q, k, v, biases)
        assert biases == kept  # the original appends to the list
        return out

    assert_equal(ours, lambda q, k, v, *given: plain(q, k, v, added=sum(given))[0], [*evoformer(), *biases], device)


def test_evoformer_in_float16_with_a_bias_of_a_mask_that_learns() -> None:
    """-1e9 is no number of float16."""
    mask = torch.zeros(B, N, 1, 1, SK, dtype=torch.float16)
    mask[..., 5:] = float("-inf")
    given, bias = [x.half() for x in evoformer()], normal(B, 1, H, SQ, SK).half()
    learned = mask.clone().requires_grad_()
    out = compat.DS4Sci_EvoformerAttention(*given, [learned, bias])
    torch.testing.assert_close(out, compat.DS4Sci_EvoformerAttention(*given, [mask, bias]), rtol=1e-2, atol=1e-2)
    out.float().sum().backward()
    assert learned.grad is not None
    assert learned.grad.isfinite().all()


@pytest.mark.parametrize("hides", [-1e9, -1e4, float("-inf"), None], ids=str)
def test_evoformer_with_the_bias_of_a_mask(hides: float | None, device: str) -> None:
    kept = normal(B, N, 1, 1, SK).to(device) > -0.5
    mask = kept if hides is None else torch.zeros(B, N, 1, 1, SK, dtype=torch.float64, device=device).masked_fill(~kept, hides)

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return compat.DS4Sci_EvoformerAttention(q, k, v, [mask, bias])

    assert_equal(ours, lambda q, k, v, bias: plain(q, k, v, added=bias, kept=kept)[0], [*evoformer(), normal(B, 1, H, SQ, SK)], device)


@pytest.mark.parametrize("kind", ["none", "mask", "float-mask", "lengths", "four-axes"])
def test_triangle_attention(kind: str, device: str) -> None:
    batch = 1 if kind == "four-axes" else B
    kept = normal(batch, N, 1, 1, SK).to(device) > -0.7
    lengths = torch.arange(2, 2 + batch * N, device=device).view(batch, N, 1, 1, 1)
    options = {
        "mask": dict(mask=kept),
        "float-mask": dict(mask=kept.float()),
        "lengths": dict(kv_lengths=lengths),
        "four-axes": dict(mask=kept[0]),
    }
    if kind == "lengths":
        kept = torch.arange(SK, device=device) < lengths
    inputs = [normal(batch, N, H, SQ, D), normal(batch, N, H, SK, D), normal(batch, N, H, SK, D), normal(batch, 1, H, SQ, SK)]

    def ours(*tensors: Tensor) -> Tensor:
        tensors = tuple(x[0] for x in tensors) if kind == "four-axes" else tensors
        return compat.triangle_attention(*tensors, scale=0.4, **options.get(kind, {}))

    def theirs(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return heads_second(plain)(q, k, v, scale=0.4, added=bias, kept=None if kind == "none" else kept)[0]

    assert_equal(ours, theirs, inputs, device)


class LowerTriangularMask:
    """Stands for xFormers'."""


class LowerTriangularFromBottomRightMask:
    """Stands for xFormers'."""


for each in (LowerTriangularMask, LowerTriangularFromBottomRightMask):
    each.__module__ = "xformers.ops.fmha.attn_bias"


@pytest.mark.parametrize("axes", [3, 4, 5])
@pytest.mark.parametrize("kind", ["tensor", "top-left", "bottom-right", "none"])
def test_xformers(kind: str, axes: int, device: str) -> None:
    heads = {3: (), 4: (H,), 5: (HK, H // HK)}[axes]
    inputs = [normal(B, n, *heads, D) for n in (SQ, SK, SK)]
    shape = {3: (B, SQ, SK), 4: (1, H, SQ, SK), 5: (B, HK, 1, SQ, SK)}[axes]
    bias = [normal(*shape)] if kind == "tensor" else []
    away = place(device=device) + (SK - SQ if kind == "top-left" else 0)

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        triangle = {"top-left": LowerTriangularMask(), "bottom-right": LowerTriangularFromBottomRightMask()}.get(kind, bias)
        return compat.memory_efficient_attention(q, k, v, triangle, scale=0.4)

    def theirs(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            bias = {3: lambda: bias[:, None], 4: lambda: bias, 5: lambda: bias.expand(B, HK, H // HK, SQ, SK).flatten(1, 2)}[axes]()
        flat = [x.reshape(B, x.shape[1], -1, D) for x in (q, k, v)]
        kept = away <= 0 if kind in ("top-left", "bottom-right") else None
        return plain(*flat, scale=0.4, added=0.0 if bias is None else bias, kept=kept)[0].reshape(q.shape)

    assert_equal(ours, theirs, [*inputs, *bias], device)


def test_a_head_shared_by_a_group_of_xformers() -> None:
    """Keys are expanded from one head of each group."""
    q, k, v = normal(B, SQ, HK, 2, D), normal(B, SK, HK, 1, D), normal(B, SK, HK, 1, D)
    got = compat.memory_efficient_attention(q, k.expand(B, SK, HK, 2, D), v.expand(B, SK, HK, 2, D))
    want = plain(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3))[0].reshape(q.shape)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


ORIGINALS = {  # their parameters, with what is no default None
    "flash_attn_func": "q k v dropout_p=0.0 softmax_scale causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes deterministic=False return_attn_probs=False",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 softmax_scale causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes deterministic=False return_attn_probs=False block_table",
    "flash_attn_qkvpacked_func": "qkv dropout_p=0.0 softmax_scale causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes deterministic=False return_attn_probs=False",
    "flash_attn_kvpacked_func": "q kv dropout_p=0.0 softmax_scale causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes deterministic=False return_attn_probs=False",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen dropout_p=0.0 softmax_scale causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes deterministic=False return_attn_probs=False",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 softmax_scale causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes deterministic=False return_attn_probs=False",
    "flash_dmattn_func": "query key value attn_mask attn_bias softmax_scale is_causal softcap deterministic return_attn_probs",
    "flash_dmattn_varlen_func": "query key value cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale is_causal softcap deterministic return_attn_probs block_table",
    "flash_dmattn_func_auto": "backend options",
    "flex_attention": "query key value score_mod block_mask scale enable_gqa=False return_lse=False kernel_options return_aux",
    "DS4Sci_EvoformerAttention": "Q K V biases",
    "triangle_attention": "q k v bias mask scale return_aux=False kv_lengths",
    "memory_efficient_attention": "query key value attn_bias p=0.0 scale op output_dtype",
}


@pytest.mark.parametrize("name", compat.__all__)
def test_parameters_are_the_originals(name: str) -> None:
    parameters = inspect.signature(getattr(compat, name)).parameters.values()
    written = [p.name if p.default in (None, p.empty) else f"{p.name}={p.default}".replace(" ", "") for p in parameters]
    assert " ".join(written) == ORIGINALS[name]


Q, K, PACKED, ENDS = normal(B, SQ, H, D), normal(B, SK, HK, D), normal(8, H, D), ends(LENGTHS_Q)
E3, PAIRS = evoformer(), normal(B, 1, H, SQ, SK)
ZEROS = torch.zeros(B, N, 1, 1, SK)
TRIANGLE = [x.transpose(2, 3) for x in E3]
WRONG: list[tuple[Callable[..., Any], tuple, dict, str]] = [
    (compat.flash_attn_func, (Q[0], K, K), {}, r"q: expected 4 axes \(batch, length, heads, head dim\), received shape \(5, 4, 8\)"),
    (compat.flash_attn_func, (Q, K[:1], K), {}, r"k: expected q's batch \(2,\), received shape \(1, 9, 2, 8\)"),
    (compat.flash_attn_func, (Q, K[:, :, :1].expand(-1, -1, 3, -1), K), {}, r"k: expected a number of heads that divides q's 4, received"),
    (compat.flash_attn_func, (Q, K, K[:, 1:]), {}, r"v: expected k's length 9 and 2 heads, received shape \(2, 8, 2, 8\)"),
    (compat.flash_attn_func, (Q, K[..., 1:], K), {}, r"k: expected q's head dim 8, received 7"),
    (compat.flash_attn_func, (Q, K.float(), K), {}, r"k: expected q's dtype torch.float64, received torch.float32"),
    (compat.flash_attn_func, (Q.int(), K, K), {}, r"q: expected a dtype of float16"),
    (compat.flash_attn_func, (Q, K, K), dict(softmax_scale="1"), r"softmax_scale: expected a real number, received str"),
    (compat.flash_attn_func, (Q, K, K), dict(window_size=2), r"window_size: expected a tuple \(left, right\), received 2"),
    (compat.flash_attn_func, (Q, K, K), dict(window_size=(None, 1)), r"window_size: expected integers, -1 for unbounded, received"),
    (compat.flash_attn_func, (Q, K, K), dict(softcap=-1.0), r"softcap: expected a positive number, or 0.0 for off, received -1.0"),
    (compat.flash_attn_func, (Q, K, K), dict(softcap=None), r"softcap: expected a real number, 0.0 for off, received NoneType"),
    (compat.flash_attn_func, (Q, K, K), dict(causal=1), r"causal: expected True or False, received int"),
    (compat.flash_attn_func, (Q, K, K), dict(alibi_slopes=normal(3)), r"alibi_slopes: expected shape \(H,\) or \(B, H\) = \(2, 4\), received \(3,\)"),
    (compat.flash_attn_func, (Q, K, K), dict(alibi_slopes=torch.ones(H, dtype=torch.int)), r"alibi_slopes: expected a float tensor, received torch.int32"),
    (compat.flash_attn_func, (Q, K, K), dict(dropout_p=0.1, return_attn_probs=True), r"return_attn_probs: expected False with dropout_p=0.1"),
    (compat.flash_attn_func, (Q, K, K), dict(dropout_p=2.0), r"dropout_p: expected a number from 0 to 1, received 2.0"),
    (compat.flash_attn_func, (Q, K, K), dict(scale=0.1), r"scale: expected softmax_scale, received a keyword that flash_attn_func does not have$"),
    (compat.flash_attn_func, (Q, K, K), dict(is_causal=True), r"is_causal: expected causal, received a keyword"),
    (compat.flash_attn_func, (Q, K, K), dict(bias=Q), r"bias: expected bias of dmattn.attention, whose tensors are \(\.\.\., H, S, D\), received a keyword"),
    (compat.flash_attn_func, (Q, K, K), dict(attn_mask=Q), r"attn_mask: expected mask of dmattn.attention, whose tensors are"),
    (compat.flash_attn_func, (Q, K, K), dict(s_aux=Q), r"s_aux: expected sinks of dmattn.attention, whose tensors are"),
    (compat.flash_attn_func, (Q, K, K), dict(num_splits=1), r"num_splits: expected nothing, as how keys are split follows from the call, received a keyword"),
    (compat.flash_attn_func, (Q, K, K), dict(qv=Q), r"qv: expected query and key with more dims, up to 512: torch.cat\(\(q, qv\), -1\) and torch.cat"),
    (compat.flash_attn_func, (Q, K, K), dict(seqused_k=Q), r"seqused_k: expected mask of dmattn.attention or attention_varlen, as of a cache's filled part"),
    (compat.flash_attn_func, (Q, K, K), dict(backend=1), r"backend: expected one of the arguments q, k, v, dropout_p"),
    (compat.flash_attn_varlen_func, (PACKED, PACKED, PACKED, ENDS, ENDS, 4, 4), dict(mask=Q), r"mask: expected mask of dmattn.attention_varlen, received"),
    (compat.flash_attn_qkvpacked_func, (Q,), dict(scale=0.1), r"scale: expected softmax_scale, received"),
    (compat.flash_dmattn_func, (Q, K, K), dict(bias=Q), r"bias: expected attn_bias, received"),
    (compat.memory_efficient_attention, (Q, K, K), dict(dropout_p=0.1), r"dropout_p: expected p, received"),
    (compat.flash_attn_qkvpacked_func, (Q,), {}, r"qkv: expected shape \(batch, length, 3, heads, head dim\), received \(2, 5, 4, 8\)"),
    (compat.flash_attn_kvpacked_func, (Q, Q), {}, r"kv: expected shape \(batch, length, 2, heads, head dim\)"),
    (compat.flash_attn_kvpacked_func, (Q, normal(1, SK, 2, HK, D)), {}, r"kv: expected q's batch \(2,\)"),
    (compat.flash_attn_varlen_func, (PACKED, PACKED, PACKED, ENDS, ENDS, 4, 4), dict(block_table=ENDS), r"block_table: expected None \(no paged cache\), received torch.Tensor"),
    (compat.flash_attn_varlen_func, (PACKED, PACKED, PACKED, ENDS, ENDS, 4, 2), {}, r"max_seqlen_k: expected"),
    (compat.flash_attn_varlen_func, (PACKED, PACKED, PACKED, ENDS, ENDS, 4, "4"), dict(alibi_slopes=normal(H)), r"max_seqlen_q: expected integers, received int and str"),
    (compat.flash_attn_varlen_qkvpacked_func, (normal(8, 3, H, D), ENDS, 2), {}, r"max_seqlen: expected"),
    (compat.flash_dmattn_func, (Q, K, K, Q > 0), {}, r"attn_mask: expected a shape broadcastable to"),
    (compat.flash_attn_func, (normal(2, 4, 5, 8), normal(2, 2, 9, 8), K), {}, r"k: expected a number of heads that divides q's 5, received shape \(2, 2, 9, 8\); \(B, H, S, D\) layout\? transpose"),
    (compat.flash_attn_func, (normal(2, 9, 8, 8), normal(2, 9, 3, 8), K), {}, r"k: expected a number of heads that divides q's 8, received shape \(2, 9, 3, 8\)$"),
    (compat.flash_dmattn_func, (Q, K, K, Q), {}, r"attn_mask: expected dtype torch.bool.*; attn_mask.bool\(\) if .* the argument attn_bias if it is added"),
    (compat.flash_dmattn_func, (Q, Q, Q, None, normal(H)), {}, r"attn_bias: .*attn_bias\[:, None, None\].* RelativeBias.alibi\(attn_bias, length\)"),
    (compat.flash_attn_func, (Q, K, K), dict(softmax_scale=1e30, softcap=1e-10), r"softcap: .*abs\(softmax_scale\)"),
    (compat.flash_dmattn_func, (Q, Q, Q, torch.ones(B, SQ, dtype=torch.bool)), {}, r"attn_mask: .*attn_mask\[:, None, None\]"),
    (compat.flash_dmattn_func, (Q, K, K, None, Q > 0), {}, r"attn_bias: .*which pairs are attended is the argument attn_mask"),
    (compat.flash_attn_varlen_func, (PACKED, PACKED, PACKED, ENDS[0], ENDS, 4, 4), dict(alibi_slopes=normal(H)), r"cu_seqlens_q: expected"),
    (compat.flash_dmattn_func, (Q, K, K, None, Q), {}, r"attn_bias: expected a shape broadcastable to"),
    (compat.flash_dmattn_func, (Q, K, K), dict(is_causal=1), r"is_causal: expected True or False, received int"),
    (compat.flash_dmattn_func_auto, ("cudnn",), {}, r"backend: expected None or cuda or triton or flex, received cudnn"),
    (compat.flex_attention, (Q, Q, Q, lambda s, b, h, i, j: s), {}, r"score_mod: expected None; a score_mod that adds a tensor is bias=tensor of dmattn.attention"),
    (compat.flex_attention, (Q, Q, Q, None, Q > 0), {}, r"block_mask: expected a torch.nn.attention.flex_attention.BlockMask, a dmattn.BlockMask or None, received torch.Tensor"),
    (compat.flex_attention, (Q, Q[:, :1], Q), {}, r"key: expected query's 5 heads \(or enable_gqa=True\), received 1"),
    (compat.flex_attention, (Q[0], Q, Q), {}, r"query: expected 4 axes"),
    (compat.DS4Sci_EvoformerAttention, (*E3, [ZEROS] * 3), {}, r"biases: expected a list of at most two tensors, received 3 of them"),
    (compat.DS4Sci_EvoformerAttention, (*E3, ZEROS), {}, r"biases: expected a list of at most two tensors, received torch.Tensor"),
    (compat.DS4Sci_EvoformerAttention, (*E3, [PAIRS]), {}, r"biases\[0\]: expected shape \(2, 3, 1, 1, 9\), received \(2, 1, 4, 5, 9\)"),
    (compat.DS4Sci_EvoformerAttention, (*E3, [None, ZEROS]), {}, r"biases\[1\]: expected shape \(2, 1, 4, 5, 9\), received"),
    (compat.DS4Sci_EvoformerAttention, (*E3, [ZEROS.int()]), {}, r"biases\[0\]: expected a dtype of"),
    (compat.DS4Sci_EvoformerAttention, (*E3, [ZEROS - 0.5, PAIRS]), {}, r"biases\[0\]: expected 0 for a key that is attended and at most -10000 for another.*received -0.5"),
    (compat.DS4Sci_EvoformerAttention, (*E3, [ZEROS + float("nan"), PAIRS]), {}, r"biases\[0\]: expected 0 for a key that is attended .*received nan"),
    (compat.DS4Sci_EvoformerAttention, (E3[0][0], *E3[1:], []), {}, r"Q: expected 5 axes \(batch, N, length, heads, head dim\)"),
    (compat.triangle_attention, (*TRIANGLE, PAIRS), dict(return_aux=True), r"return_aux: expected False; dmattn.attention\(..., return_lse=True\) returns lse, received True"),
    (compat.triangle_attention, (*TRIANGLE, PAIRS[..., 1:]), {}, r"bias: expected shape \(B, 1, H, Sq, Sk\) = \(2, 1, 4, 5, 9\), received"),
    (compat.triangle_attention, (*TRIANGLE, PAIRS, ZEROS[..., 1:]), {}, r"mask: expected shape \(2, 3, 1, 1, 9\), received"),
    (compat.triangle_attention, (*TRIANGLE, PAIRS), dict(kv_lengths=ZEROS[..., :1] + 7.5), r"kv_lengths: expected a tensor of integers, received torch.float32"),
    (compat.triangle_attention, (*TRIANGLE, PAIRS, ZEROS), dict(kv_lengths=ZEROS), r"kv_lengths: expected None beside a mask"),
    (compat.triangle_attention, (TRIANGLE[0][0, 0], *TRIANGLE[1:], PAIRS), {}, r"q: expected 5 axes"),
    (compat.triangle_attention, (TRIANGLE[0], TRIANGLE[1][:, :1], TRIANGLE[2], PAIRS), {}, r"k: expected q's leading axes"),
    (compat.memory_efficient_attention, (Q[0, 0], Q, Q), {}, r"query: expected 3, 4 or 5 axes"),
    (compat.memory_efficient_attention, (Q, Q, Q, object()), {}, r"attn_bias: expected a float tensor, one of LowerTriangularMask, .*attention_varlen"),
    (compat.memory_efficient_attention, (Q, Q, Q), dict(attn_bias=torch.ones(SQ, SQ, dtype=torch.bool)), r"attn_bias: expected a float tensor, as in xFormers, received a bool one; as mask, .* dmattn.attention takes one"),
    (compat.memory_efficient_attention, (Q, Q, Q), dict(attn_bias=torch.ones(SQ, SQ).int()), r"attn_bias: expected a float tensor, as in xFormers, received one of torch.int32$"),
    (compat.memory_efficient_attention, (Q, K, K), {}, r"key: expected query's 4 heads, or 1, received shape \(2, 9, 2, 8\); for fewer give groups an axis of their own"),
    (compat.memory_efficient_attention, (Q, Q, Q), dict(op=1), r"op: expected None, received 1"),
    (compat.memory_efficient_attention, (Q, Q, Q), dict(p=-1.0), r"p: expected a number from 0 to 1"),
    (compat.memory_efficient_attention, (Q, Q, Q), dict(output_dtype=torch.int8), r"output_dtype: expected None or torch.float64, received torch.int8"),
    (compat.memory_efficient_attention, (Q[0], Q[0], Q[0]), dict(attn_bias=normal(9)), r"attn_bias: expected a shape broadcastable to"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[f"{function.__name__}-{number}" for number, (function, *_) in enumerate(WRONG)])
def test_a_wrong_argument_is_named(number: int) -> None:
    function, arguments, options, message = WRONG[number]
    with pytest.raises((TypeError, ValueError), match=f"^dmattn: {message}"):
        function(*arguments, **options)


@needs_cuda
def test_a_mask_bias_on_a_gpu_is_read_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, where nobody has to wait for it."""
    given = [x.cuda().float() for x in E3], [ZEROS.cuda() - 0.5, PAIRS.cuda()]
    monkeypatch.setattr(advice, "asked", True)
    with pytest.raises(ValueError, match=r"biases\[0\]: expected 0 for a key that is attended"):
        compat.DS4Sci_EvoformerAttention(*given[0], given[1])


@needs_cuda
def test_a_bias_that_is_none_of_a_mask_does_not_go_unseen_on_a_gpu() -> None:
    """In a process of its own, which it ends."""
    code = """
import torch
from dmattn.compat import DS4Sci_EvoformerAttention
q = torch.randn(1, 2, 20, 2, 8, device="cuda")
given = [torch.full((1, 2, 1, 1, 20), -100.0, device="cuda"), torch.randn(1, 1, 2, 20, 20, device="cuda")]
DS4Sci_EvoformerAttention(q, q, q, given)
torch.cuda.synchronize()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "device-side assert" in run.stderr


@pytest.mark.parametrize("learned", [False, True])
def test_a_bias_that_is_none_of_a_mask_does_not_go_unseen_in_compiled_code(learned: bool) -> None:
    """What was compiled for a bias with a gradient is another function than what is for one without."""
    evo = [x.float() for x in E3]
    weight = torch.ones((), requires_grad=learned)

    def by_weight(weight: Tensor) -> Tensor:
        return compat.DS4Sci_EvoformerAttention(*evo, [(ZEROS - 0.5) * weight, PAIRS.float()])

    compiled = torch.compile(by_weight, backend="aot_eager", fullgraph=True)
    if learned:
        torch.testing.assert_close(compiled(weight), by_weight(weight))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"biases\[0\]: expected 0 for a key that is attended.*requires a gradient"):
        compiled(weight)


def test_a_bias_of_keys_is_added_under_transforms() -> None:
    """They see no values: so it is not taken for a mask's."""
    evo = [x.float() for x in E3]

    def of_pairs(pairs: Tensor) -> Tensor:
        return compat.DS4Sci_EvoformerAttention(*evo, [ZEROS - 0.5, pairs]).square().sum()

    given = PAIRS.float()
    soft = (ZEROS - 0.5 + given).expand(2, 3, *given.shape[2:])
    alone = attention(*(x.transpose(2, 3) for x in evo), bias=soft).square().sum()
    torch.testing.assert_close(torch.func.grad_and_value(of_pairs)(given)[1], alone)


def test_a_bias_of_keys_with_a_tangent_is_added() -> None:
    """In forward mode nothing requires a gradient."""
    evo = [x.float() for x in E3]
    with forward_ad.dual_level():
        out = compat.DS4Sci_EvoformerAttention(*evo, [forward_ad.make_dual(ZEROS, torch.randn_like(ZEROS)), PAIRS.float()])
        assert forward_ad.unpack_dual(out).tangent.norm() > 0


def test_dropout_is_that_of_attention() -> None:
    k = K.repeat_interleave(H // HK, 2)
    calls = (
        lambda: attention(*(x.transpose(1, 2) for x in (Q, k, k)), dropout_p=0.4).transpose(1, 2),
        lambda: compat.flash_attn_func(Q, k, k, 0.4),
        lambda: compat.memory_efficient_attention(Q, k, k, p=0.4),
    )
    results = []
    for call in calls:
        torch.manual_seed(0)
        results.append(call())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], compat.flash_attn_func(Q, k, k))


def test_in_compiled_code() -> None:
    """All but what reads a FlexAttention mask for the first time."""
    q, k = Q.float(), K.float()
    evo = [x.float() for x in E3]

    def every() -> list[Tensor]:
        return [
            compat.flash_attn_func(q, k, k, causal=True, alibi_slopes=q[0, 0, :, 0].abs()),
            compat.flash_dmattn_func(q, k, k, is_causal=True),
            compat.DS4Sci_EvoformerAttention(*evo, [ZEROS, PAIRS]),
            compat.triangle_attention(*(x.transpose(2, 3) for x in evo), PAIRS, ZEROS == 0),
            compat.memory_efficient_attention(q, q, q),
            compat.flex_attention(q, q, q),
        ]

    for ours, compiled in zip(every(), torch.compile(every, backend="aot_eager", fullgraph=True)(), strict=True):
        torch.testing.assert_close(compiled, ours)
