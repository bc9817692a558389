"""Diffusers' attention by the backend "dmattn": outputs and gradients of tiny transformers beside its native backend, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from libraries import library
from torch import Tensor, nn

from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="whole models; the interpreter takes milliseconds for each tile")


@pytest.fixture
def integration() -> Iterator[ModuleType]:
    """Registered; Diffusers is as it was afterwards."""
    names = library("diffusers").models.attention_dispatch.AttentionBackendName
    before = list(names)
    module = library("dmattn.integrations.diffusers")
    module.register()
    yield module
    module.unregister()
    assert list(names) == before
    assert not hasattr(names, "DMATTN")


@pytest.fixture
def seen(integration: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks of all calls that reach dmattn."""
    masks: list[Any] = []
    inner = integration.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any) -> Tensor:
        masks.append(attn_mask)
        return inner(query, key, value, attn_mask, *rest, **options)

    monkeypatch.setattr(integration, "scaled_dot_product_attention", spy)
    return masks


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def small(name: str, len_text: int, **sizes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A transformer of Diffusers, and what both below are given: two pictures of 6 tokens, beside texts."""
    common = dict(in_channels=4, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=12, axes_dims_rope=(2, 2, 4))
    timestep = torch.tensor([0.3, 0.7]).double()
    inputs = dict(hidden_states=normal(2, 6, 4), encoder_hidden_states=normal(2, len_text, 12), timestep=timestep)
    return getattr(library("diffusers"), name)(**common, **sizes), inputs


def flux() -> tuple[nn.Module, dict[str, Any]]:
    """A block of two streams, and one of one."""
    model, inputs = small("FluxTransformer2DModel", 3, num_layers=1, num_single_layers=1, pooled_projection_dim=6)
    ids = torch.stack([torch.zeros(6), torch.arange(6) // 3, torch.arange(6) % 3], dim=1)
    return model, inputs | dict(pooled_projections=normal(2, 6), img_ids=ids, txt_ids=torch.zeros(3, 3))


def qwen() -> tuple[nn.Module, dict[str, Any]]:
    """Whose text is padded: a mask by key."""
    model, inputs = small("QwenImageTransformer2DModel", 5, num_layers=2, patch_size=1, out_channels=4)
    kept = torch.arange(5) < torch.tensor([[5], [3]])
    return model, inputs | dict(encoder_hidden_states_mask=kept, img_shapes=[[(1, 2, 3)]] * 2)


def step(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    out = model(**inputs).sample
    return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize(("build", "masked"), [(flux, False), (qwen, True)], ids=["flux", "qwen-image"])
@pytest.mark.parametrize("how", ["of-the-model", "of-a-block"])
def test_a_model_does_what_its_native_backend_does(
    build: Callable[[], tuple[nn.Module, dict[str, Any]]], masked: bool, how: str, integration: ModuleType, seen: list[Any]
) -> None:
    torch.manual_seed(0)
    model, inputs = build()
    model = model.double()
    want = step(model, inputs)
    assert not seen
    if how == "of-the-model":
        model.set_attention_backend("dmattn")
        got = step(model, inputs)
        model.reset_attention_backend()
    else:
        with library("diffusers").attention_backend("dmattn"):
            got = step(model, inputs)
    assert len(seen) == 2  # layers
    assert all((mask is not None) == masked for mask in seen)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9 * max(1.0, y.abs().max().item()))
    integration.unregister()
    for x, y in zip(step(model, inputs), want, strict=True):
        assert torch.equal(x, y)
    assert len(seen) == 2


def test_it_is_registered_and_taken_back_as_often_as_one_likes(integration: ModuleType) -> None:
    dispatch = library("diffusers.models.attention_dispatch")
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    integration.register()
    assert [name for name in names if name == "dmattn"] == [names.DMATTN]
    assert names("dmattn") is names["DMATTN"] is names.DMATTN
    assert repr(names.DMATTN) == "<AttentionBackendName.DMATTN: 'dmattn'>"
    assert names.DMATTN in registry.list_backends()
    registry.set_active_backend(names.DMATTN)
    integration.unregister()
    assert registry.get_active_backend()[0] is names.NATIVE
    assert "dmattn" not in registry.list_backends()
    with pytest.raises(ValueError, match="dmattn"):
        names("dmattn")
    integration.unregister()
    integration.register()


@pytest.mark.parametrize("kind", ["bool", "float", "by-key", "causal", "grouped"])
def test_arguments_are_those_of_the_native_backend(kind: str, integration: ModuleType) -> None:
    dispatch = library("diffusers.models.attention_dispatch")
    heads = 2 if kind == "grouped" else 4
    query, key, value = normal(2, 5, 4, 8), normal(2, 7, heads, 8), normal(2, 7, heads, 8)
    options: dict[str, Any] = {
        "bool": dict(attn_mask=normal(2, 1, 5, 7) > -1),
        "float": dict(attn_mask=normal(4, 5, 7)),
        "by-key": dict(attn_mask=torch.arange(7) < torch.tensor([[7], [4]])),
        "causal": dict(is_causal=True, scale=0.3),
        "grouped": dict(enable_gqa=True),
    }[kind]
    want = dispatch.dispatch_attention_fn(query, key, value, **options)
    got = dispatch.dispatch_attention_fn(query, key, value, **options, backend="dmattn")
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert got.is_contiguous()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(return_lse=True), r"return_lse: expected False .*, received True"),
        (dict(_parallel_config=SimpleNamespace()), r"_parallel_config: expected None, .*, received SimpleNamespace"),
        (dict(attn_mask=torch.ones(3, 5, 5, dtype=torch.bool)), r"attn_mask: expected a shape broadcastable"),
        (dict(query=torch.ones(5, 4, 8)), r"query: expected 4 axes \(batch, length, heads, head dim\), received shape \(5, 4, 8\)"),
        (dict(is_causal=True, attn_mask=torch.ones(5, 5)), r"(is_causal|attn_mask): expected"),
    ],
    ids=["lse", "parallel", "mask", "axes", "causal-and-mask"],
)
def test_it_refuses_and_says_so(options: dict[str, Any], message: str, integration: ModuleType) -> None:
    x = torch.ones(2, 5, 4, 8)
    with pytest.raises((TypeError, ValueError), match=f"^dmattn: {message}"):
        integration.attend(**dict(query=x, key=x, value=x) | options)
