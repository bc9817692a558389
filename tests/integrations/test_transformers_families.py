"""Patched models of the families off Transformers' attention interface give their own logits, loss and gradients, by the rule of models.py."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import NEEDS_CUDA
from models import LENGTH, PADDED, PADDING, TOLERANCE, assert_equal_steps, batch_for, error, largest, train_step
from torch import nn

import dmattn
from dmattn.execution.backend import interpreting
from dmattn.masks import IntervalMask

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from off_interface import (  # noqa: E402
    WINDOWS,
    Family,
    Tower,
    bloom,
    deberta,
    deberta_v2,
    falcon,
    grouped_falcon,
    mpnet,
    mpt,
    named,
    tower_step,
    vision,
    with_strong_tables,
)
from off_interface_plain import FAMILIES, TOWERS, codegen, gpt_neo, gptj, rembert, xglm  # noqa: E402

from dmattn.integrations import transformers as integration  # noqa: E402

whole_model = pytest.mark.skipif(interpreting(), reason="a whole model; the interpreter takes milliseconds for each tile")


@whole_model
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("family", FAMILIES, ids=named)
def test_a_training_step_equals_the_models_own(family: Family, padding: str, device: str, calls: list[dict]) -> None:
    model = family.build().to(device)
    batch = batch_for(model, padding, device)
    names, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    own = train_step(model, batch)
    with integration.patched(model):
        ours = train_step(model, batch)
        assert list(model.state_dict()) == names
    assert len(calls) == family.calls
    assert any(call["bias"] is not None for call in calls) == (family.biased or (family.float_mask and padding != "none"))
    assert_equal_steps(ours, own)
    used = {name for name, _ in model.named_parameters() if not any(part in name for part in family.unused)}
    assert set(ours.gradients) == used
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(train_step(model, batch).logits, own.logits)


FORGOTTEN = [(family, "mask") for family in FAMILIES] + [(family, "bias") for family in FAMILIES if family.biased]


@whole_model
@pytest.mark.parametrize(("family", "forgotten"), FORGOTTEN, ids=lambda each: each if isinstance(each, str) else each.name)
def test_the_models_can_tell_a_wrong_attention(family: Family, forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison has teeth: an attention that forgets its bias, or its mask, fails it."""
    model = family.build()
    batch = batch_for(model, "left")
    own = train_step(model, batch)
    without = dict(bias=None) if forgotten == "bias" or family.float_mask else {}
    without |= dict(mask=None, causal=False, window=None) if forgotten == "mask" else {}
    monkeypatch.setattr(integration.attention, "attention", lambda *qkv, **options: dmattn.attention(*qkv, **(options | without)))
    with integration.patched(model):
        ours = train_step(model, batch)
    with pytest.raises(AssertionError):
        assert_equal_steps(ours, own)


@whole_model
@pytest.mark.parametrize("tower", TOWERS, ids=named)
def test_a_tower_equals_its_own_attention(tower: Tower, calls: list[dict]) -> None:
    model, inputs = tower.build()
    tables = with_strong_tables(model)
    names = list(model.state_dict())
    own = tower_step(model, inputs)
    with integration.patched(model):
        ours = tower_step(model, inputs)
        assert list(model.state_dict()) == names
    assert len(calls) == tower.calls
    assert any(call["bias"] is not None for call in calls) == tower.biased
    assert_equal_steps(ours, own)
    for name in tables:
        assert largest(ours.gradients[name]) > 1e-6
        assert error(ours.gradients[name], own.gradients[name]) <= 5 * TOLERANCE * largest(own.gradients[name])
    assert torch.equal(tower_step(model, inputs).logits, own.logits)


@whole_model
@pytest.mark.parametrize("tower", TOWERS, ids=named)
def test_the_towers_can_tell_a_wrong_attention(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without its bias, or with another scale where it has none."""

    def wrong(query: torch.Tensor, *others: torch.Tensor, **options: Any) -> torch.Tensor:
        return dmattn.attention(query if tower.biased else 1.01 * query, *others, **(options | dict(bias=None)))

    model, inputs = tower.build()
    with_strong_tables(model)
    own = tower_step(model, inputs)
    monkeypatch.setattr(integration.attention, "attention", wrong)
    with integration.patched(model):
        ours = tower_step(model, inputs)
    with pytest.raises(AssertionError):
        assert_equal_steps(ours, own)


@whole_model
@pytest.mark.parametrize("kind", ["Swinv2", "DonutSwin"])
def test_the_mask_of_a_window_is_a_number_and_not_infinity(kind: str) -> None:
    """Scores that lie further apart than it outweigh it; Swinv2's own code adds it twice."""
    model, _ = vision(kind, **WINDOWS)
    random = torch.Generator().manual_seed(1)
    layer = model.encoder.layers[0].blocks[0].attention.self
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.fill_(10.0) if name == "logit_scale" else parameter.mul_(8.0)  # Swinv2's scale is cut off at 100
    states = 3 * torch.randn(6, 16, 16, generator=random)
    mask = -100.0 * (torch.rand(2, 16, 16, generator=random) < 0.95)
    own = layer(states, mask)[0]
    with integration.patched(layer):
        ours = layer(states, mask)[0]
    hidden = layer(states, mask * 1e4)[0]
    assert error(ours, own) <= 5 * TOLERANCE * largest(own)
    assert error(hidden, own) > 100 * TOLERANCE * largest(own)


@whole_model
def test_biases_and_masks_keep_their_small_shapes(calls: list[dict]) -> None:
    """ALiBi has one row, BLOOM's mask is an interval, grouped keys stay grouped, and the images of a batch share the biases of windows."""
    for model in (bloom(), mpt(), falcon("sdpa", alibi=True), grouped_falcon()):
        with integration.patched(model):
            cache = model(**batch_for(model, "left"), use_cache=True).past_key_values
    assert [tuple(call["bias"].shape) for call in calls[:6:2]] == [(2, 4, 1, LENGTH), (1, 4, 1, LENGTH), (2, 4, 1, LENGTH)]
    assert isinstance(calls[0]["mask"], IntervalMask)
    assert isinstance(calls[6]["mask"], IntervalMask)
    assert calls[6]["key"].shape[1] == cache.layers[0].keys.shape[1] == 2
    model, inputs = vision("DonutSwin", **WINDOWS)
    with integration.patched(model):
        model(**inputs)
    assert [tuple(call["bias"].shape) for call in calls[8:]] == [(1, 2, 16, 16), (1, 4 * 2, 16, 16)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_one_layer_of_bloom_equals_its_own(device: str) -> None:
    """A single call, so Triton's interpreter runs it, too."""
    model = bloom(n_layer=1).to(device)
    batch = batch_for(model, "left", device)
    del batch["labels"]
    own = model(**batch).logits
    with integration.patched(model):
        ours = model(**batch).logits
    real = batch["attention_mask"] == 1
    assert error(ours[real], own[real]) <= TOLERANCE * largest(own[real])
    assert ours.isfinite().all()


@pytest.mark.skipif(interpreting(), reason="the interpreter computes bfloat16 wrongly")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("family", FAMILIES, ids=named)
def test_a_bfloat16_step_is_as_exact_as_the_models_own(family: Family, device: str) -> None:
    """Truth is its own attention in float32 with the same rounded weights; ours may err twice as much as its own, plus four roundings."""
    model = family.build().to(device, torch.bfloat16)
    batch = batch_for(model, "left", device)
    own = train_step(model, batch)
    truth = train_step(copy.deepcopy(model).float(), batch)
    with integration.patched(model):
        ours = train_step(model, batch)
    band = 4 * 2.0**-8
    floor = 0.05 * max(map(largest, truth.gradients.values()))
    pairs = [(ours.logits, own.logits, truth.logits)]
    pairs += [(ours.gradients[name], own.gradients[name], truth.gradients[name]) for name in truth.gradients]
    for got, plain, want in pairs:
        assert error(got, want) <= 2 * error(plain, want) + band * max(largest(want), floor)


@whole_model
@pytest.mark.parametrize("build", [grouped_falcon, mpnet, codegen, gpt_neo, rembert], ids=["falcon", "mpnet", "codegen", "gpt-neo", "rembert"])
def test_a_float_mask_of_the_users_own_is_a_bias_that_may_learn(build: Callable[[], nn.Module]) -> None:
    model = build()
    batch = batch_for(model, "none")
    added = torch.randn(1, 4, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
    batch["attention_mask"] = added
    own = train_step(model, batch)
    gradient, added.grad = added.grad, None
    with integration.patched(model):
        ours = train_step(model, batch)
    assert_equal_steps(ours, own)
    assert largest(gradient) > 1e-4
    assert error(added.grad, gradient) <= TOLERANCE * largest(gradient)


@whole_model
def test_what_is_written_into_a_mask_counts() -> None:
    """A hook that hides the first key from everybody, in the float mask that the model's own attention reads."""
    model, batch = bloom().eval(), batch_for(bloom(), "left")

    def hide(module: nn.Module, args: tuple, kwargs: dict) -> None:
        kwargs["attention_mask"][..., 5].fill_(torch.finfo(torch.float32).min)

    for layer in model.transformer.h:
        layer.register_forward_pre_hook(hide, with_kwargs=True)
    own = model(**batch).logits
    with integration.patched(model):
        ours = model(**batch).logits
    real = batch["attention_mask"] == 1
    assert error(ours[real], own[real]) <= TOLERANCE * largest(own[real])


@whole_model
def test_a_mask_that_has_lost_what_it_stands_for_is_read_as_it_is(calls: list[dict]) -> None:
    """As on another device, where a layer receives a copy."""
    model = bloom()
    batch = batch_for(model, "left")
    own = train_step(model, batch)
    for layer in model.transformer.h:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | dict(attention_mask=kwargs["attention_mask"].clone())), with_kwargs=True
        )
    with integration.patched(model):
        assert_equal_steps(train_step(model, batch), own)
    assert calls[0]["mask"] is None


@whole_model
@pytest.mark.parametrize("build", [bloom, gptj, rembert], ids=["bloom", "gptj", "rembert"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(build: Callable[[], nn.Module], reentrant: bool, calls: list[dict]) -> None:
    model = build()
    batch = batch_for(model, "left")
    own = train_step(model, batch)
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    model.enable_input_require_grads()
    with integration.patched(model):
        assert_equal_steps(train_step(model, batch), own)
    assert len(calls) == 4


@whole_model
@pytest.mark.parametrize(("build", "layers"), [(bloom, "n_layer"), (mpt, "n_layers"), (xglm, "num_layers")], ids=["bloom", "mpt", "xglm"])
def test_a_patched_model_compiles_into_one_graph(build: Callable[..., nn.Module], layers: str) -> None:
    model = build(**{layers: 1}).eval()
    batch = batch_for(model, "left")
    del batch["labels"]
    real = batch["attention_mask"] == 1
    with torch.no_grad(), integration.patched(model):
        want = model(**batch, use_cache=False).logits[real]
        got = torch.compile(model, backend="aot_eager", fullgraph=True)(**batch, use_cache=False).logits[real]
    assert error(got, want) <= TOLERANCE * largest(want)


def with_dropout(model: nn.Module, name: str) -> nn.Module:
    """For MPT, whose configuration takes none but a whole number."""
    for module in model.modules():
        if hasattr(module, name):
            setattr(module, name, 0.1)
    return model


@whole_model
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: bloom(attention_dropout=0.1), id="bloom"),
        pytest.param(lambda: with_dropout(mpt(), "attn_dropout_p"), id="mpt"),
        pytest.param(lambda: falcon("sdpa", alibi=True, attention_dropout=0.1), id="falcon-alibi"),
        pytest.param(lambda: deberta(attention_probs_dropout_prob=0.1), id="deberta"),
        pytest.param(lambda: deberta_v2(attention_probs_dropout_prob=0.1), id="deberta-v2"),
        pytest.param(lambda: mpnet(attention_probs_dropout_prob=0.1), id="mpnet"),
        pytest.param(lambda: gptj(attn_pdrop=0.1), id="gptj"),
        pytest.param(lambda: rembert(attention_probs_dropout_prob=0.1), id="rembert"),
        pytest.param(lambda: xglm(attention_dropout=0.1), id="xglm"),
    ],
)
def test_a_patched_model_trains_with_its_attention_dropout(build: Callable[[], nn.Module], calls: list[dict]) -> None:
    model = build()
    batch = batch_for(model, "left")
    with integration.patched(model):
        torch.manual_seed(1)
        first = train_step(model, batch)
        torch.manual_seed(1)
        assert_equal_steps(train_step(model, batch), first)
        assert not torch.equal(train_step(model, batch).loss, first.loss)
        assert {call["dropout_p"] for call in calls} == {0.1}
        calls.clear()
        model.eval()(**batch)
        assert {call["dropout_p"] for call in calls} == {0.0}


@whole_model
def test_dropout_in_another_mode_than_its_layer(calls: list[dict]) -> None:
    """Frozen, it drops nothing. Alone in training, as for samples of a trained model's uncertainty, it is refused rather than ignored."""
    model = bloom(attention_dropout=0.1)
    batch = batch_for(model, "left")
    for layer in model.transformer.h:
        layer.self_attention.attention_dropout.eval()
    own = train_step(model, batch)
    with integration.patched(model):
        assert_equal_steps(train_step(model, batch), own)
        model.eval()
        model.transformer.h[1].self_attention.attention_dropout.train()
        with pytest.raises(ValueError, match="dropout: expected BloomAttention in the mode of its dropout"):
            model(**batch)


@whole_model
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_falcon_adds_alibi_once_and_says_so_where_its_own_attention_adds_it_twice(implementation: str) -> None:
    model = falcon(implementation, alibi=True).eval()
    batch = batch_for(model, "none")
    own = model(**batch).logits
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with integration.patched(model):
            pass
        integration.patch(model)
        integration.patch(model)
    said = [str(warning.message) for warning in caught]
    assert [text.partition(";")[0] for text in said] == (
        2 * ['dmattn: model: a patched FalconAttention adds ALiBi once, as Transformers\' "sdpa" does'] if implementation == "eager" else []
    )
    assert all(Path(warning.filename) == Path(__file__) for warning in caught)
    patched = model(**batch).logits
    integration.unpatch(model)
    model.config._attn_implementation = "sdpa"
    assert error(patched, model(**batch).logits) <= 1e-5
    assert (error(patched, own) <= 1e-5) == (implementation == "sdpa"), "eager's ALiBi counts once too: the warning is wrong"


def test_no_other_family_has_a_warning() -> None:
    models = [bloom(), mpt(), falcon(), grouped_falcon()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in models:
            integration.patch(model)
    assert [str(warning.message) for warning in caught if str(warning.message).startswith("dmattn")] == []
    assert all({coverage.state for coverage in integration.report(model)} == {"patched"} for model in models)


@whole_model
def test_rotary_falcon_trains_with_the_dropout_that_it_never_applies(calls: list[dict]) -> None:
    model = falcon(attention_dropout=0.1)
    batch = batch_for(model, "left")
    own = train_step(model, batch)
    with integration.patched(model):
        assert_equal_steps(train_step(model, batch), own)


@whole_model
def test_a_layer_that_is_called_without_a_mask_attends_everything_as_its_own() -> None:
    model = bloom(n_layer=1)
    layer = model.transformer.h[0].self_attention
    own = layer(states := torch.randn(1, 3, 32), states, torch.zeros(4, 1, 3), None)[0]
    with integration.patched(model):
        torch.testing.assert_close(layer(states, states, torch.zeros(4, 1, 3), None)[0], own)


@whole_model
def test_a_padded_query_gives_zero() -> None:
    """Its own attention gives the mean of all values; no NaN comes of it."""
    model = bloom(n_layer=1)
    layer = model.transformer.h[0].self_attention
    seen = []
    layer.dense.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with integration.patched(model):
        model(**batch_for(model, "left"))
    assert not seen[0][0, :PADDED].any()
    assert seen[0][0, PADDED:].any(-1).all()
