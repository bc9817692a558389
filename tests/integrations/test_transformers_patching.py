"""Patching and its undoing: copies, configurations, report, and what cannot be patched."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from models import assert_equal_steps, batch_for, train_step
from torch import nn

from dmattn.execution.backend import interpreting
from dmattn.masks import IntervalMask

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from off_interface import SIZES, Family, Tower, bloom, deberta, esmfold, falcon, named, tower_step  # noqa: E402
from off_interface_plain import FAMILIES, TOWERS, bigbird_pegasus, git, gpt_neo, gptj, sam, source  # noqa: E402

from dmattn.integrations import transformers as integration  # noqa: E402
from dmattn.integrations.transformers import families, interface  # noqa: E402

whole_model = pytest.mark.skipif(interpreting(), reason="a whole model; the interpreter takes milliseconds for each tile")


@whole_model
@pytest.mark.parametrize(
    "build",
    [bloom, falcon, functools.partial(falcon, "sdpa", alibi=True), gptj, gpt_neo],
    ids=["bloom", "falcon", "falcon-alibi", "gptj", "gpt-neo"],
)
def test_a_model_built_from_a_patched_ones_configuration_is_its_own(build: Callable[[], nn.Module]) -> None:
    """As reference models and averaged copies are."""
    model = build().eval()
    batch = batch_for(model, "none")
    integration.patch(model)
    other = type(model)(copy.deepcopy(model.config)).eval()
    other.load_state_dict(model.state_dict())
    assert {coverage.state for coverage in integration.report(other)} == {"patchable"}
    assert other(**batch).logits.isfinite().all()
    integration.patch(other)
    assert torch.equal(other(**batch).logits, model(**batch).logits)


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@whole_model
@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle, through_torch_save], ids=["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_a_patched_model_is_patched(way: Callable[[nn.Module], nn.Module], calls: list[dict]) -> None:
    model = bloom()
    batch = batch_for(model, "left")
    own = train_step(model, batch)
    integration.patch(model)
    other = way(model)
    assert_equal_steps(train_step(other, batch), own)
    assert len(calls) == 2
    integration.unpatch(other)
    assert other.config._attn_implementation == "eager"
    assert torch.equal(train_step(other, batch).logits, own.logits)
    assert integration.report(model)[0].state == "patched"


def test_patch_and_unpatch() -> None:
    """Twice is as good as once; inside a patched model `patched` changes nothing; a half of a model can be patched."""
    model = bloom()
    layer = model.transformer.h[0].self_attention
    stock = type(layer)
    for _ in range(2):
        integration.patch(model)
        assert isinstance(layer, stock)
        assert type(layer) is not stock
        assert type(layer).__qualname__ == stock.__qualname__
        assert repr(layer).startswith("BloomAttention(")
        assert integration.report(model) == [("BloomAttention", 2, "patched")]
    with integration.patched(model):
        pass
    assert integration.report(model) == [("BloomAttention", 2, "patched")]
    integration.unpatch(model.transformer.h[1])
    assert integration.report(model) == [("BloomAttention", 1, "patched"), ("BloomAttention", 1, "patchable")]
    integration.unpatch(model)
    assert integration.report(model) == [("BloomAttention", 2, "patchable")]
    assert type(layer) is stock
    assert model.config._attn_implementation == "eager"
    with pytest.raises(KeyError), integration.patched(model):
        raise KeyError
    assert type(layer) is stock


@whole_model
def test_models_that_share_a_configuration_do_not_disturb_each_other() -> None:
    """The configuration decides which mask is made: one that the other model can read as well."""
    first = bloom()
    batch = batch_for(first, "left")
    own = train_step(first, batch)
    second = type(first)(first.config).train()
    second.load_state_dict(first.state_dict())
    assert second.config is first.config
    integration.patch(first)
    for model in (second, first):
        assert_equal_steps(train_step(model, batch), own)
    integration.patch(second)
    integration.unpatch(first)
    for model in (second, first):
        assert_equal_steps(train_step(model, batch), own)


@whole_model
@pytest.mark.parametrize("patched_first", [False, True])
def test_patch_and_enable_compose(patched_first: bool, calls: list[dict]) -> None:
    """ESMFold's language model uses the interface, its folding trunk does not."""
    model, inputs = esmfold()
    own = tower_step(model, inputs)
    first, second = (integration.patched, integration.using) if patched_first else (integration.using, integration.patched)
    with first(model), second(model):
        states = {each.attention: each.state for each in integration.report(model)}
        ours = tower_step(model, inputs)
    assert states == {
        "EsmSelfAttention": "routed",
        "EsmFoldSelfAttention": "patched",
        "EsmFoldTriangleAttention": "patched",
        "EsmFoldInvariantPointAttention": "not covered",
    }
    assert len(calls) == 6
    assert_equal_steps(ours, own)
    assert torch.equal(tower_step(model, inputs).logits, own.logits)


@whole_model
@pytest.mark.parametrize("patched_first", [False, True])
@pytest.mark.parametrize(
    ("build", "own_calls", "all_calls"),
    [
        pytest.param(git, 2, 4, id="git"),
        pytest.param(functools.partial(source, bigbird_pegasus), 2, 6, id="bigbird-pegasus"),
        pytest.param(sam, 2, 9, id="sam"),
    ],
)
def test_layers_of_both_kinds_in_one_file(
    build: Callable[[], tuple[nn.Module, dict]], own_calls: int, all_calls: int, patched_first: bool, calls: list[dict]
) -> None:
    """Patched layers read the mask that enabled ones ask for; the others stay as they are until they are enabled."""
    model, inputs = build()
    own = tower_step(model, inputs)
    with integration.patched(model):
        assert_equal_steps(tower_step(model, inputs), own)
    assert len(calls) == own_calls
    first, second = (integration.patched, integration.using) if patched_first else (integration.using, integration.patched)
    with first(model), second(model):
        assert {coverage.state for coverage in integration.report(model)} == {"patched", "routed"}
        assert_equal_steps(tower_step(model, inputs), own)
    assert len(calls) == own_calls + all_calls
    assert torch.equal(tower_step(model, inputs).logits, own.logits)


@whole_model
def test_a_model_loaded_with_the_name_dmattn_is_patched_without_a_warning(calls: list[dict]) -> None:
    eager = bloom()
    batch = batch_for(eager, "left")
    integration.register()
    try:
        model = type(eager)._from_config(copy.deepcopy(eager.config), attn_implementation="dmattn").train()
        model.load_state_dict(eager.state_dict())
        integration.patch(model)
        integration.masks._known.pop(type(model).__module__, None)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            ours = train_step(model, batch)
    finally:
        integration.unregister()
    assert_equal_steps(ours, train_step(eager, batch))
    assert isinstance(calls[0]["mask"], IntervalMask)
    integration.unpatch(model)
    assert model.config._attn_implementation == "dmattn"


@whole_model
def test_a_layer_hooked_by_accelerate_is_patched() -> None:
    """Its device maps put a forward on the instance, which calls the bound method that it keeps beside it."""
    model = bloom()
    batch = batch_for(model, "left")
    own = train_step(model, batch)
    layer, passes = model.transformer.h[0].self_attention, []
    layer._old_forward = layer.forward
    layer.forward = lambda *args, **kwargs: passes.append(type(layer)) or layer._old_forward(*args, **kwargs)
    stock = type(layer)
    with integration.patched(model):
        assert layer._old_forward.__func__ is families.decoders.bloom
        assert_equal_steps(train_step(model, batch), own)
    assert torch.equal(train_step(model, batch, plain=False).logits, own.logits)
    assert [kind is stock for kind in passes] == [False, True]


def test_report_names_what_every_attention_layer_does() -> None:
    model = transformers.BertModel(transformers.BertConfig(vocab_size=8, **SIZES))
    assert integration.report(model) == [("BertSelfAttention", 2, "routed")]
    assert str(integration.report(model)) == "[Coverage(attention='BertSelfAttention', layers=2, state='routed')]"
    layer = model.encoder.layer[0].attention.self
    layer.__class__ = type("ShardedSelfAttention", (type(layer),), {})  # as wrappers do, without a file of its own
    assert integration.report(model) == [("ShardedSelfAttention", 1, "routed"), ("BertSelfAttention", 1, "routed")]
    assert integration.report(nn.TransformerEncoderLayer(8, 2)) == [("MultiheadAttention", 1, "not covered")]
    assert integration.report(nn.Linear(2, 2)) == []


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_family_is_a_class_of_transformers(name: str) -> None:
    """A class of another name would be left unpatched without a word."""
    module, _, kind = name.rpartition(".")
    if module.startswith("unlimited_ocr.") and not hasattr(transformers, "UnlimitedOcrConfig"):
        pytest.skip("of a later version of Transformers")
    stock = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
    family = families.family_of(stock)
    assert family is families.FAMILIES[name]
    for method in family.methods:
        assert callable(getattr(stock, method))


def test_a_class_that_uses_the_interface_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it may in another version of Transformers."""
    interface._source.cache_clear()
    monkeypatch.setattr(interface.inspect, "getsource", lambda kind: "ALL_ATTENTION_FUNCTIONS.get_interface(" * ("BloomAttention" in str(kind)))
    try:
        assert integration.report(bloom()) == [("BloomAttention", 2, "routed")]
        with pytest.raises(ValueError, match=r"received BloomForCausalLM with BloomAttention \(routed\)"):
            integration.patch(bloom())
    finally:
        interface._source.cache_clear()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param(
            lambda: transformers.BertModel(transformers.BertConfig(vocab_size=8, **SIZES)),
            r"expected a model with layers that patch\(\) covers .* received BertModel with BertSelfAttention \(routed\)",
            id="routed",
        ),
        pytest.param(lambda: nn.Linear(2, 2), "received Linear with no attention layer", id="no-attention"),
        pytest.param(
            lambda: bloom(slow_but_exact=True, pretraining_tp=2), r"BloomForCausalLM with BloomAttention \(not covered\)", id="slow-but-exact"
        ),
        pytest.param(
            lambda: deberta(talking_head=True), r"DebertaForMaskedLM with DisentangledSelfAttention \(not covered\)", id="talking-heads"
        ),
    ],
)
def test_a_model_with_nothing_to_patch_raises(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=f"dmattn: model: .*{message}"):
        integration.patch(model())


def test_what_cannot_be_patched_or_undone_raises() -> None:
    model = bloom()
    with pytest.raises(ValueError, match=r"expected a model that patch\(\) was called on, received a BloomForCausalLM that is not patched"):
        integration.unpatch(model)
    for function in (integration.patch, integration.unpatch, integration.report):
        with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, received str"):
            function("bloom")
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions: expected False in the configuration"):
        integration.patch(model)
    model.config.output_attentions = False
    layer = model.transformer.h[1].self_attention
    layer.forward = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match="expected layers with the forward method of their class, received BloomAttention"):
        integration.patch(model)
    assert integration.report(model) == [("BloomAttention", 2, "patchable")]
    assert model.config._attn_implementation == "eager"
    del layer.forward
    integration.patch(model)
    layer.__class__ = type("ShardedAttention", (type(layer),), {})
    with pytest.raises(ValueError, match="received ShardedAttention, wrapped or sharded since"):
        integration.unpatch(model)
    assert integration.report(model)[0] == ("BloomAttention", 2, "patched")


@whole_model
@pytest.mark.parametrize("family", FAMILIES, ids=named)
def test_attention_weights_raise(family: Family) -> None:
    model = family.build().eval()
    integration.patch(model)
    with pytest.raises(ValueError, match="output_attentions: expected False"):
        model(**batch_for(model, "none"), output_attentions=True)


@whole_model
@pytest.mark.parametrize("tower", [tower for tower in TOWERS if tower.name not in ("esmfold", "groupvit-vision")], ids=named)
def test_attention_weights_of_towers_raise(tower: Tower) -> None:
    """ESMFold has no such option; GroupViT's images give the weights of another attention, which is not patched."""
    model, inputs = tower.build()
    integration.patch(model)
    with pytest.raises(ValueError, match="output_attentions: expected False"):
        model(**inputs, output_attentions=True)
