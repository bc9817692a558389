"""The layer is its formula, computed pair by pair; a cache, torch.compile and pickling change nothing; what it refuses, it names.

Against Transformers' own layer: test_doge.py. A tensor may differ by TOLERANCE of its largest entry; everything is float32.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dmattn import DynamicMaskAttention, attention, dynamic_bias, reference
from dmattn.execution.backend import interpreting

TOLERANCE = 2e-5
HIDDEN = 24
no_compile = pytest.mark.skipif(interpreting(), reason="Triton's interpreter and torch.compile do not combine")


@dataclass(frozen=True)
class Case:
    """A layer and its input, and why it is here."""

    name: str
    reason: str
    length: int = 19
    options: dict[str, Any] = field(default_factory=dict)
    rotary: bool = True
    padding: str = "none"


CASES = (
    Case("shorter-than-keep", "every visible key is kept", options=dict(keep=32)),
    Case("longer-than-keep", "the dynamic mask at work", options=dict(keep=5)),
    Case("keep-one", "each query reads the best key alone", options=dict(keep=1)),
    Case("grouped-queries", "one selection for the query heads of a group", options=dict(keep=5, num_kv_heads=2)),
    Case("wide-heads", "head_dim is not hidden_size / num_heads", options=dict(keep=5, head_dim=16, num_kv_heads=1)),
    Case("biases", "all five projections have a bias", options=dict(keep=5, bias=True)),
    Case("bare", "neither norm nor rotation, and a scale of one's own", options=dict(keep=5, qk_norm=False, scale=0.2), rotary=False),
    Case("not-causal", "one selection for all queries", options=dict(keep=5, causal=False)),
    Case("left-padding", "padded keys are never kept", options=dict(keep=5, num_kv_heads=2), padding="left"),
    Case("right-padding", "padded keys lie beyond the real queries", options=dict(keep=5), padding="right"),
    Case("not-causal-padding", "fewer real keys than are kept", options=dict(keep=17, causal=False), padding="left"),
    Case("one-token", "the shortest sequence", length=1, options=dict(keep=5)),
)


def layer_of(device: str = "cpu", **options: Any) -> DynamicMaskAttention:
    """A layer whose scores differ from key to key, and whose attention is far from uniform."""
    torch.manual_seed(0)
    layer = DynamicMaskAttention(**(dict(hidden_size=HIDDEN, num_heads=4, keep=5) | options))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            else:
                torch.nn.init.normal_(parameter, std=0.1 if name == "dt_proj.weight" else 0.3)
            if name == "A":
                parameter.copy_(torch.linspace(1.5, -1.0, len(parameter)))
    return layer.to(device)


def tokens_of(length: int, batch: int = 2, device: str = "cpu") -> Tensor:
    return torch.randn(batch, length, HIDDEN, generator=torch.Generator().manual_seed(length)).to(device)


def rotation_of(length: int, head_dim: int, device: str = "cpu", start: int = 0) -> tuple[Tensor, Tensor]:
    """cos and sin as rotary embeddings of Transformers give them, (1, S, head_dim)."""
    frequency = 100.0 ** -torch.arange(0, 1, 2 / head_dim)
    angle = torch.outer(torch.arange(start, start + length).float(), frequency)[None].repeat(1, 1, 2).to(device)
    return angle.cos(), angle.sin()


def padding_of(kind: str, length: int, device: str = "cpu") -> Tensor | None:
    """Four padded tokens in the first of two rows."""
    if kind == "none":
        return None
    real = torch.ones(2, length, dtype=torch.long, device=device)
    real[0, slice(0, 4) if kind == "left" else slice(-4, None)] = 0
    return real


def inputs_of(case: Case, layer: DynamicMaskAttention, device: str = "cpu") -> tuple[Tensor, dict[str, Any]]:
    rotation = rotation_of(case.length, layer.head_dim, device) if case.rotary else None
    call = dict(position_embeddings=rotation, attention_mask=padding_of(case.padding, case.length, device))
    return tokens_of(case.length, device=device).requires_grad_(), call


def heads_of(layer: DynamicMaskAttention, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value and the bias of each key, by the formula."""

    def split(y: Tensor, norm: torch.nn.Module | None = None) -> Tensor:
        y = y.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        return y if norm is None else F.rms_norm(y, (layer.head_dim,), norm.weight, norm.eps)

    def rotate(y: Tensor) -> Tensor:
        if rotation is None:
            return y
        cos, sin = (part[:, None, :, : layer.head_dim // 2] for part in rotation)
        real, imaginary = y.chunk(2, -1)
        return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), -1)

    value = layer.v_proj(x)
    step = torch.logaddexp(layer.dt_proj(value), torch.zeros(()).to(x))
    query, key = rotate(split(layer.q_proj(x), layer.q_norm)), rotate(split(layer.k_proj(x), layer.k_norm))
    return query, key, split(value), (layer.A * step).exp().transpose(1, 2)


def by_hand(layer: DynamicMaskAttention, x: Tensor, position_embeddings: Any = None, attention_mask: Tensor | None = None) -> Tensor:
    """The layer pair by pair: every query sorts the keys that it sees."""
    query, key, value, key_bias = heads_of(layer, x, position_embeddings)
    batch, kv_heads, length = key_bias.shape
    kept = torch.zeros(batch, kv_heads, length, length, dtype=torch.bool)
    for b in range(batch):
        for h in range(kv_heads):
            for i in range(length):
                visible = [j for j in range(length) if (j <= i or not layer.causal) and (attention_mask is None or attention_mask[b, j])]
                kept[b, h, i, sorted(visible, key=lambda j: (key_bias[b, h, j].item(), j))[-layer.keep :]] = True
    out = reference.attention(query, key, value, mask=kept.to(x.device), bias=key_bias[:, :, None], scale=layer.scale)
    return layer.o_proj(out.transpose(1, 2).flatten(2))


def gradients(layer: DynamicMaskAttention, x: Tensor, out: Tensor) -> dict[str, Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.device)
    leaves = dict(layer.named_parameters()) | dict(tokens=x)
    return dict(zip(leaves, torch.autograd.grad((out * weight).sum(), list(leaves.values())), strict=True))


def assert_near(name: str, got: Tensor, want: Tensor, floor: float = 0.0) -> None:
    assert got.shape == want.shape
    difference, allowed = (got - want).abs().max().item(), TOLERANCE * max(want.abs().max().item(), floor)
    assert difference <= allowed, f"{name}: off by {difference:.2e}, allowed {allowed:.2e}"


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """What is zero but for rounding (a key's bias: the softmax ignores it) is held to a tenth of the largest gradient."""
    floor = 0.1 * max(x.abs().max().item() for x in want.values())
    assert got.keys() == want.keys()
    for name in want:
        assert_near(f"gradient of {name}", got[name], want[name], floor)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_layer_is_its_formula(case: Case, device: str) -> None:
    layer = layer_of(device, **case.options)
    x, call = inputs_of(case, layer, device)
    out, want = layer(x, **call), by_hand(layer, x, **call)
    assert_near("out", out, want)
    assert_same_gradients(gradients(layer, x, out), gradients(layer, x, want))


def test_the_bias_is_its_formula() -> None:
    torch.manual_seed(0)
    value, A = torch.randn(2, 3, 7, 5, requires_grad=True), torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
    dt_proj = torch.nn.Linear(15, 3)
    key_bias = dynamic_bias(value, A, dt_proj)
    side_by_side = torch.cat([value[:, head] for head in range(3)], -1)
    want = torch.stack([torch.exp(A[head] * F.softplus(dt_proj(side_by_side)[..., head])) for head in range(3)], 1)
    assert key_bias.shape == (2, 3, 7)
    torch.testing.assert_close(key_bias, want)
    assert (key_bias[:, 1] == 1).all()
    leaves = [value, A, *dt_proj.parameters()]
    for got, expected in zip(torch.autograd.grad(key_bias.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_new_layer_is_a_sliding_window(device: str) -> None:
    """At A = 0 all scores are equal and the later key wins; A learns at once, dt_proj only after it."""
    layer = layer_of(device, keep=5, num_kv_heads=2)
    torch.nn.init.zeros_(layer.A)
    x, rotation = tokens_of(19, device=device), rotation_of(19, layer.head_dim, device)
    out = layer(x, position_embeddings=rotation)
    query, key, value, key_bias = heads_of(layer, x, rotation)
    assert (key_bias == 1).all()
    window = attention(query, key, value, causal=True, window=(4, 0))
    assert_near("out", out, layer.o_proj(window.transpose(1, 2).flatten(2)))
    assert DynamicMaskAttention(hidden_size=8, num_heads=2, keep=3).A.tolist() == [0.0, 0.0]
    out.square().sum().backward()
    assert layer.A.grad.abs().min() > 0
    assert (layer.dt_proj.weight.grad == 0).all()


class GrowingCache:
    """The two methods of Transformers' DynamicCache that the layer calls."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.layers[layer_idx][0].shape[2] if layer_idx in self.layers else 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        if layer_idx in self.layers:
            key, value = (torch.cat(pair, 2) for pair in zip(self.layers[layer_idx], (key, value), strict=True))
        self.layers[layer_idx] = key, value
        return key, value


@pytest.mark.parametrize("A", ["distinct", "zero"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_decoding_with_a_cache_is_the_full_pass(padding: str, A: str, device: str) -> None:
    """A prefill longer than keep, a chunk, then single tokens; ties (A = 0) included."""
    layer = layer_of(device, keep=5, num_kv_heads=2, layer_idx=3)
    if A == "zero":
        torch.nn.init.zeros_(layer.A)
    x, cos_sin, real = tokens_of(19, device=device), rotation_of(19, layer.head_dim, device), padding_of(padding, 19, device)
    full = layer(x, position_embeddings=cos_sin, attention_mask=real)
    cache, parts = GrowingCache(), []
    for start, stop in ((0, 9), (9, 12), *((i, i + 1) for i in range(12, 19))):
        here = tuple(part[:, start:stop] for part in cos_sin)
        mask = None if real is None else real[:, :stop]
        parts.append(layer(x[:, start:stop], position_embeddings=here, attention_mask=mask, past_key_values=cache))
    assert_near("out", torch.cat(parts, 1), full)
    assert cache.get_seq_length(3) == 19


def test_a_token_that_sees_no_key_is_finite(device: str) -> None:
    layer = layer_of(device, bias=True)
    x = tokens_of(19, device=device).requires_grad_()
    out = layer(x, attention_mask=padding_of("left", 19, device))
    assert torch.equal(out[0, :4], layer.o_proj.bias.expand(4, -1))
    assert all(gradient.isfinite().all() for gradient in gradients(layer, x, out).values())


@no_compile
@pytest.mark.parametrize(("name", "dynamic"), [("longer-than-keep", True), ("left-padding", False)])
def test_compiles_into_one_graph(name: str, dynamic: bool, device: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    layer = layer_of(device, **case.options)
    x, call = inputs_of(case, layer, device)
    want = layer(x, **call)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="inductor" if device == "cuda" else "aot_eager")
    out = compiled(x, **call)
    assert_near("out", out, want)
    assert_same_gradients(gradients(layer, x, out), gradients(layer, x, want))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["deepcopy", "pickle"])
def test_a_copy_computes_the_same(duplicate: Callable[[DynamicMaskAttention], DynamicMaskAttention]) -> None:
    layer = layer_of()
    again = duplicate(layer)
    assert again.A is not layer.A
    assert torch.equal(again(tokens_of(19)), layer(tokens_of(19)))


def test_parameters_are_made_where_and_as_asked() -> None:
    layer = DynamicMaskAttention(hidden_size=8, num_heads=2, keep=3, bias=True, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(hidden_size=0), ValueError, "hidden_size: expected at least 1, received 0"),
        (dict(num_heads=2.0), TypeError, "num_heads: expected an integer, received float"),
        (dict(num_kv_heads=3), ValueError, "num_kv_heads: expected a divisor of num_heads = 4, received 3"),
        (dict(hidden_size=25), ValueError, "hidden_size: expected a multiple of num_heads = 4 where head_dim is None, received 25"),
        (dict(head_dim=513), ValueError, "head_dim: expected 1 to 512, received 513"),
        (dict(keep=0), ValueError, "keep: expected at least 1, received 0"),
        (dict(keep=True), TypeError, "keep: expected an integer, received bool"),
        (dict(causal=1), TypeError, "causal: expected True or False, received int"),
        (dict(qk_norm=None), TypeError, "qk_norm: expected True or False, received NoneType"),
        (dict(layer_idx="0"), TypeError, "layer_idx: expected an integer or None, received str"),
        (dict(eps="1e-6"), TypeError, "eps: expected a number, received str"),
        (dict(eps=None), TypeError, "eps: expected a number, received NoneType"),
        (dict(eps=-1e-6), ValueError, "eps: expected at least 0, received -1e-06"),
        (dict(eps=float("inf")), ValueError, "eps: expected a finite float32 number, received inf"),
        (dict(scale=float("nan")), ValueError, "scale: expected a finite float32 number, received nan"),
        (dict(scale="0.5"), TypeError, "scale: expected a number, received str"),
        (dict(dtype="float32"), TypeError, "dtype: expected a torch.dtype or None, received str"),
        (dict(dtype=torch.int32), ValueError, "dtype: expected float16, bfloat16, float32 or float64, received torch.int32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_wrong_layer_is_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DynamicMaskAttention(**(dict(hidden_size=HIDDEN, num_heads=4, keep=5) | options))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (dict(hidden_states=None), TypeError, "hidden_states: expected a torch.Tensor, received NoneType"),
        (dict(hidden_states=torch.zeros(2, 19)), ValueError, r"hidden_states: expected shape \(B, S, 24\), received \(2, 19\)"),
        (dict(hidden_states=torch.zeros(2, 19, 24).int()), ValueError, "hidden_states: expected a dtype of .* received torch.int32"),
        (dict(position_embeddings=torch.zeros(1)), TypeError, r"position_embeddings: expected a tuple \(cos, sin\), received torch.Tensor"),
        (dict(position_embeddings=rotation_of(18, 6)), ValueError, r"position_embeddings cos: expected shape .* received \(1, 18, 6\)"),
        (dict(position_embeddings=rotation_of(19, 4)), ValueError, r"position_embeddings cos: expected shape .* received \(1, 19, 4\)"),
        (
            dict(position_embeddings=tuple(x.double() for x in rotation_of(19, 6))),
            ValueError,
            "position_embeddings cos: expected the queries' dtype torch.float32, received torch.float64",
        ),
        (dict(attention_mask="causal"), TypeError, "attention_mask: expected a torch.Tensor or None, received str"),
        (dict(attention_mask=torch.ones(2, 19)), ValueError, "attention_mask: expected a bool or integer .* received torch.float32"),
        (dict(attention_mask=torch.ones(2, 18).bool()), ValueError, r"attention_mask: expected .* \(2, 19\) .* received .* \(2, 18\)"),
        (dict(attention_mask=torch.ones(2, 1, 19, 19).bool()), ValueError, r"attention_mask: .* received .* \(2, 1, 19, 19\)"),
        (
            dict(past_key_values=3),
            TypeError,
            "past_key_values: expected a cache with the methods get_seq_length and update, or None, received int",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_wrong_call_is_named(call: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        layer_of()(**(dict(hidden_states=tokens_of(19)) | call))


def test_a_rotation_wider_than_the_layer_is_for_autocast_only(device: str, half: torch.dtype) -> None:
    layer, x, rotation = layer_of(device), tokens_of(19, device=device), rotation_of(19, 6, device)
    with torch.autocast(device, half):
        assert layer(x, position_embeddings=rotation).dtype == half
    with pytest.raises(ValueError, match=f"position_embeddings cos: expected the queries' dtype {half}, received torch.float32"):
        layer.to(half)(x.to(half), position_embeddings=rotation)


def test_caches_of_bounded_length_are_refused_untouched() -> None:
    transformers = pytest.importorskip("transformers", reason="its caches")
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=HIDDEN, num_attention_heads=4, sliding_window=8, layer_types=["sliding_attention"]
    )
    layer = layer_of(layer_idx=0)
    for cache in (
        transformers.StaticCache(config=transformers.LlamaConfig(num_hidden_layers=1), max_cache_len=19),
        transformers.DynamicCache(config=config),
    ):
        with pytest.raises(
            ValueError, match=f"past_key_values: expected a cache that grows, received a {type(cache).__name__} of bounded length"
        ):
            layer(tokens_of(19), past_key_values=cache)
        assert cache.get_seq_length(0) == 0
        assert not cache.layers[0].is_initialized
    layer(tokens_of(19), past_key_values=transformers.DynamicCache())


def test_caches_that_do_not_fit_are_named() -> None:
    class Window(GrowingCache):
        def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
            return tuple(x[:, :, -4:] for x in super().update(key, value, layer_idx))

    class Fixed(GrowingCache):
        def get_seq_length(self, layer_idx: int = 0) -> Tensor:
            return torch.tensor(0)

    for options, cache, message in (
        (dict(), GrowingCache(), "in a layer without layer_idx"),
        (dict(layer_idx=0, causal=False), GrowingCache(), "in a layer that is not causal"),
        (dict(layer_idx=0), Window(), "expected a cache that grows, to 19 keys now, received a Window that returns 4"),
        (dict(layer_idx=0), Fixed(), "expected a cache that grows, received a Fixed"),
    ):
        with pytest.raises(ValueError, match=f"past_key_values: .*{message}"):
            layer_of(**options)(tokens_of(19), past_key_values=cache)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(value=torch.zeros(2, 7, 5)), ValueError, r"value: expected 4 axes \(B, Hk, Sk, Dv\), received shape \(2, 7, 5\)"),
        (dict(value=[1.0]), TypeError, "value: expected a torch.Tensor, received list"),
        (dict(A=torch.zeros(2)), ValueError, r"A: expected shape \(Hk,\) = \(3,\), received \(2,\)"),
        (dict(A=torch.zeros(3).long()), ValueError, "A: expected a dtype of .* received torch.int64"),
        (dict(dt_proj=torch.nn.Linear(15, 5)), ValueError, r"dt_proj: expected a result of shape .* = \(2, 7, 3\), received \(2, 7, 5\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_wrong_dynamic_bias_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dynamic_bias(**(dict(value=torch.zeros(2, 3, 7, 5), A=torch.zeros(3), dt_proj=torch.nn.Linear(15, 3)) | change))


def test_a_refused_mask_leaves_the_cache_as_it_was() -> None:
    layer = DynamicMaskAttention(hidden_size=32, num_heads=4, num_kv_heads=2, keep=3, layer_idx=0)
    cache = pytest.importorskip("transformers").DynamicCache()
    layer(torch.randn(1, 5, 32), past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask: expected .* \(1, 6\) .* received .* \(1, 5\)"):
        layer(torch.randn(1, 1, 32), past_key_values=cache, attention_mask=torch.ones(1, 5).bool())
    assert cache.get_seq_length(0) == 5


def test_sizes_may_be_numpys() -> None:
    layer = DynamicMaskAttention(hidden_size=np.int64(16), num_heads=np.int64(2), keep=np.int64(3), layer_idx=np.int64(0))
    assert all(type(size) is int for size in (layer.hidden_size, layer.num_heads, layer.head_dim, layer.keep, layer.layer_idx))
    assert layer(torch.randn(1, 5, 16)).shape == (1, 5, 16)
