"""The drop-in against torch's scaled_dot_product_attention: signature, ranks, conventions."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
import torch.nn.functional as F

from dmattn import scaled_dot_product_attention


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_signature_is_torchs() -> None:
    """Names, order, defaults and what may be given by position; torch's own is in C, and is read from its documentation."""
    written = re.match(r"scaled_dot_product_attention\((.*?)\) -> Tensor:", F.scaled_dot_product_attention.__doc__, re.DOTALL)
    parameters = [
        p for p in inspect.signature(scaled_dot_product_attention).parameters.values() if p.kind is not p.VAR_KEYWORD
    ]  # for a message
    ours = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters)
    assert ours == " ".join(written[1].split())
    inputs = (normal(5, 8), normal(9, 8), normal(9, 8), None, 0.0, False)
    for function in (F.scaled_dot_product_attention, scaled_dot_product_attention):
        function(*inputs)
        with pytest.raises(TypeError, match="positional argument"):
            function(*inputs, 0.5)
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ["scale", "enable_gqa"]


BROADCASTS = {
    "batch": ((2, 3), (1, 3), (1, 3)),
    "batch-of-the-query": ((1, 3), (2, 3), (2, 3)),
    "one-key-head": ((2, 3), (2, 1), (2, 1)),
    "one-query-head": ((2, 1), (2, 3), (2, 3)),
    "one-value-head-for-all": ((2, 3), (2, 3), (1, 1)),
    "query-without-heads": ((), (2, 3), (2, 3)),
    "keys-without-batch": ((2, 3), (3,), (3,)),
    "three-axes": ((1,), (3,), (3,)),
    "five-axes": ((2, 1, 3), (1, 4, 3), (2, 4, 1)),
    "grouped-batch": ((2, 4), (1, 2), (1, 2)),
    "grouped-one-value-head": ((2, 4), (2, 2), (2, 1)),
    "grouped-one-key-head": ((2, 4), (2, 1), (2, 2)),
}


@pytest.mark.parametrize("name", BROADCASTS)
@pytest.mark.parametrize("masked", [False, True])
def test_leading_axes_broadcast(name: str, masked: bool, device: str) -> None:
    axes = [(*leading, n, 8) for leading, n in zip(BROADCASTS[name], (5, 9, 9), strict=True)]
    mask = normal(5, 9).to(device) if masked else None
    options = dict(enable_gqa=name.startswith("grouped"))
    ours = [normal(*shape).to(device).requires_grad_() for shape in axes]
    theirs = [x.detach().double().requires_grad_() for x in ours]
    got = scaled_dot_product_attention(*ours, mask, **options)
    want = F.scaled_dot_product_attention(*theirs, None if mask is None else mask.double(), **options)
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    gradients = zip(torch.autograd.grad(got.square().sum(), ours), torch.autograd.grad(want.square().sum(), theirs), strict=True)
    for gradient, expected in gradients:
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3), (2, 2, 1, 3)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_every_rank(leading: tuple[int, ...], causal: bool, device: str) -> None:
    query, key, value = (normal(*leading, n, d).to(device) for n, d in ((5, 8), (9, 8), (9, 4)))
    got = scaled_dot_product_attention(query, key, value, is_causal=causal, scale=0.3)
    want = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), is_causal=causal, scale=0.3)
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("leading", "mask_shape"),
    [((2, 3), (5, 9)), ((2, 3), (1, 9)), ((2, 3), (2, 1, 5, 9)), ((2, 3), (3, 5, 9)), ((2, 2, 3), (2, 1, 1, 5, 9)), ((2, 2, 3), (1, 1, 3, 5, 9)),
     ((3,), (3, 5, 9)), ((), (5, 9)), ((), (9,))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_every_mask(leading: tuple[int, ...], mask_shape: tuple[int, ...], kind: str, device: str) -> None:
    query, key, value = (normal(*leading, n, 8).to(device) for n in (5, 9, 9))
    mask = normal(*mask_shape).to(device)
    mask = mask > -1.0 if kind == "bool" else mask
    got = scaled_dot_product_attention(query, key, value, mask)
    want = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), mask if kind == "bool" else mask.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_grouped_heads(device: str) -> None:
    query, key, value = normal(2, 4, 5, 8).to(device), normal(2, 2, 9, 8).to(device), normal(2, 2, 9, 8).to(device) + 1
    got = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(query, key, value, enable_gqa=True), rtol=1e-4, atol=1e-5)


def test_a_float_mask_learns(device: str) -> None:
    query, key, value = (normal(2, 3, n, 8).to(device) for n in (5, 9, 9))
    masks = [normal(3, 5, 9).to(device, torch.float32 if ours else torch.float64).requires_grad_() for ours in (True, False)]
    scaled_dot_product_attention(query, key, value, masks[0]).square().sum().backward()
    F.scaled_dot_product_attention(query.double(), key.double(), value.double(), masks[1]).square().sum().backward()
    torch.testing.assert_close(masks[0].grad.double(), masks[1].grad, rtol=1e-4, atol=1e-5)


def test_leading_axes_of_the_mask_must_broadcast() -> None:
    message = r"attn_mask: expected a shape broadcastable to \(\.\.\., H, Sq, Sk\) = \(2, 2, 3, 5, 9\) .*received \(3, 1, 3, 5, 9\)"
    with pytest.raises(ValueError, match=message):
        scaled_dot_product_attention(normal(2, 2, 3, 5, 8), normal(2, 2, 3, 9, 8), normal(2, 2, 3, 9, 8), normal(3, 1, 3, 5, 9))
