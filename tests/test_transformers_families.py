"""Patched models of the families off Transformers' attention interface give their own logits, loss and gradients, by the rule of models.py."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import NEEDS_CUDA
from models import LENGTH, PADDED, PADDING, TOLERANCE, VOCABULARY, Step, assert_equal_steps, batch_for, build, error, largest, train_step
from torch import Tensor, nn

import dmattn
from dmattn.masks import IntervalMask
from dmattn.ops import interpreting

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from transformers.models.maskformer.modeling_maskformer_swin import MaskFormerSwinModel  # noqa: E402

from dmattn.integrations import transformers as integration  # noqa: E402
from dmattn.integrations.transformers import families, interface  # noqa: E402

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
NO_DROPOUT = dict(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
WINDOWS = dict(image_size=16, patch_size=2, num_channels=1, embed_dim=16, depths=[2], num_heads=[2], window_size=4, drop_path_rate=0.0)

whole_model = pytest.mark.skipif(interpreting(), reason="a whole model; the interpreter takes milliseconds for each tile")


def language_model(kind: str, implementation: str = "eager", **config: Any) -> nn.Module:
    model_type = getattr(transformers, kind)
    model = build(model_type, model_type.config_class(vocab_size=VOCABULARY, **config))
    model.config._attn_implementation = implementation
    return model


bloom = functools.partial(language_model, "BloomForCausalLM", hidden_size=32, n_layer=2, n_head=4, pad_token_id=0)
mpt = functools.partial(language_model, "MptForCausalLM", d_model=32, n_layers=2, n_heads=4, max_seq_len=32)
falcon = functools.partial(language_model, "FalconForCausalLM", hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
grouped_falcon = functools.partial(falcon, new_decoder_architecture=True, num_kv_heads=2)
deberta = functools.partial(language_model, "DebertaForMaskedLM", **SIZES, **NO_DROPOUT, relative_attention=True, max_relative_positions=8)
deberta_v2 = functools.partial(
    language_model, "DebertaV2ForMaskedLM", **SIZES, **NO_DROPOUT, relative_attention=True, max_relative_positions=8, position_buckets=4
)
mpnet = functools.partial(language_model, "MPNetForMaskedLM", **SIZES, **NO_DROPOUT)
BOTH_WAYS = dict(pos_att_type=["c2p", "p2c"])


@dataclass(frozen=True)
class Family:
    """A language model and why it is here."""

    name: str
    build: Callable[[], nn.Module]
    reason: str
    biased: bool = True


FAMILIES = (
    Family("bloom", functools.partial(bloom, hidden_size=48, n_head=6), "ALiBi by real tokens, slopes of 6 heads"),
    Family("mpt", functools.partial(mpt, attn_config=dict(clip_qkv=1.0)), "ALiBi by position, an inverted mask, clipped projections"),
    Family("falcon", falcon, "rotary, one key-value head", biased=False),
    Family(
        "falcon-heads", functools.partial(falcon, multi_query=False, parallel_attn=False), "rotary, a key for each query head", biased=False
    ),
    Family("falcon-grouped", grouped_falcon, "rotary, the new decoder: two query heads per key-value head", biased=False),
    Family("falcon-alibi", functools.partial(falcon, "sdpa", alibi=True, bias=True), "ALiBi inside the mask; eager adds it twice"),
    Family("deberta", functools.partial(deberta, pos_att_type=["c2p", "p2c"]), "content by position, both ways"),
    Family("deberta-plain", functools.partial(deberta, relative_attention=False), "no bias at all", biased=False),
    Family(
        "deberta-v2", functools.partial(deberta_v2, pos_att_type=["c2p", "p2c"], share_att_key=True, conv_kernel_size=3), "shared projections"
    ),
    Family("deberta-v2-one", functools.partial(deberta_v2, pos_att_type=["p2c"]), "one way, projections of its own"),
    Family("mpnet", mpnet, "a table that learns, padding as a float mask"),
)
DECODERS = [family for family in FAMILIES if family.name.startswith(("bloom", "mpt", "falcon"))]


def named(family: Any) -> str:
    return family.name


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
    assert len(calls) == 2
    assert all((call["bias"] is not None) == family.biased for call in calls)
    assert_equal_steps(ours, own)
    assert set(ours.gradients) == {name for name, _ in model.named_parameters()}
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(train_step(model, batch).logits, own.logits)


@whole_model
@pytest.mark.parametrize("forgotten", ["bias", "mask"])
@pytest.mark.parametrize("family", FAMILIES, ids=named)
def test_the_models_can_tell_a_wrong_attention(family: Family, forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison has teeth: an attention that forgets its bias, or its mask, fails it."""
    if forgotten == "bias" and not family.biased:
        pytest.skip("no bias to forget")
    model = family.build()
    batch = batch_for(model, "left")
    own = train_step(model, batch)
    without = dict(bias=None) if forgotten == "bias" else dict(mask=None, causal=False, window=None)
    monkeypatch.setattr(integration.attention, "attention", lambda *qkv, **options: dmattn.attention(*qkv, **(options | without)))
    with integration.patched(model):
        ours = train_step(model, batch)
    with pytest.raises(AssertionError):
        assert_equal_steps(ours, own)


def pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def vision(kind: str, size: tuple[int, ...] = (1, 16, 16), **config: Any) -> tuple[nn.Module, dict]:
    model_type = MaskFormerSwinModel if kind == "MaskFormerSwin" else getattr(transformers, f"{kind}Model")
    return build(model_type, getattr(transformers, f"{kind}Config")(**NO_DROPOUT, **config)), dict(pixel_values=pixels(2, *size))


def clap() -> tuple[nn.Module, dict]:
    sizes = dict(spec_size=32, num_mel_bins=8, patch_size=4, patch_stride=[4, 4], patch_embeds_hidden_size=16, hidden_size=16)
    windows = dict(depths=[2], num_attention_heads=[2], window_size=4, drop_path_rate=0.0, enable_fusion=False, fusion_num_hidden_layers=0)
    model = build(transformers.ClapAudioModel, transformers.ClapAudioConfig(**sizes, **windows, **NO_DROPOUT))
    return model, dict(input_features=pixels(2, 1, 128, 8), is_longer=None)


data2vec = functools.partial(vision, "Data2VecVision", (1, 8, 8), image_size=8, patch_size=2, num_channels=1, drop_path_rate=0.0, **SIZES)


def sdpa_data2vec() -> tuple[nn.Module, dict]:
    """A class of layers of its own."""
    eager, inputs = data2vec(use_relative_position_bias=True)
    model = type(eager)._from_config(copy.deepcopy(eager.config), attn_implementation="sdpa")
    model.load_state_dict(eager.state_dict())
    return model.train(), inputs


def wavlm(**config: Any) -> tuple[nn.Module, dict]:
    convolutions = dict(conv_dim=[16], conv_kernel=[4], conv_stride=[4], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    buckets = dict(num_buckets=8, max_bucket_distance=16, apply_spec_augment=False, layerdrop=0.0)
    no_dropout = dict(hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0)
    model = build(transformers.WavLMModel, transformers.WavLMConfig(**SIZES, **convolutions, **buckets, **no_dropout, **config))
    return model, dict(input_values=pixels(2, 64), attention_mask=(torch.arange(64) < torch.tensor([[40], [64]])).long())


def layoutlmv3(**config: Any) -> tuple[nn.Module, dict]:
    sizes = SIZES | dict(hidden_size=36, coordinate_size=6, shape_size=6, input_size=8, patch_size=4, max_2d_position_embeddings=64)
    buckets = dict(rel_pos_bins=8, rel_2d_pos_bins=8, max_rel_pos=16, max_rel_2d_pos=16)
    settings = transformers.LayoutLMv3Config(vocab_size=VOCABULARY, pad_token_id=0, **sizes, **buckets, **NO_DROPOUT, **config)
    random = torch.Generator().manual_seed(2)
    tokens, boxes = torch.randint(1, VOCABULARY, (2, 9), generator=random), torch.randint(0, 30, (2, 9, 4), generator=random).sort(-1).values
    mask = (torch.arange(9) < torch.tensor([[6], [9]])).long()
    return build(transformers.LayoutLMv3Model, settings), dict(
        input_ids=tokens, bbox=boxes, attention_mask=mask, pixel_values=pixels(2, 3, 8, 8)
    )


def esmfold() -> tuple[nn.Module, dict]:
    structure = dict(sequence_dim=16, pairwise_dim=16, ipa_dim=4, resnet_dim=8, num_heads_ipa=2, num_qk_points=2, num_v_points=2, num_blocks=1)
    trunk = dict(num_blocks=1, sequence_state_dim=16, pairwise_state_dim=16, sequence_head_width=8, pairwise_head_width=8, position_bins=4)
    folding = dict(fp16_esm=False, trunk=trunk | dict(chunk_size=None, structure_module=structure | dict(dropout_rate=0.0)))
    language = dict(vocab_size=33, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, pad_token_id=1)
    model = build(
        transformers.EsmForProteinFolding,
        transformers.EsmConfig(**language, **NO_DROPOUT, mask_token_id=32, is_folding_model=True, esmfold_config=folding),
    )
    tokens = torch.randint(0, 19, (2, 7), generator=torch.Generator().manual_seed(1))
    return model, dict(input_ids=tokens, attention_mask=(torch.arange(7) < torch.tensor([[5], [7]])).long(), num_recycles=0)


@dataclass(frozen=True)
class Tower:
    """A model without a loss of its own, how many patched layers' calls a pass makes, and why it is here."""

    name: str
    build: Callable[[], tuple[nn.Module, dict]]
    calls: int
    reason: str


TOWERS = (
    Tower("swinv2", functools.partial(vision, "Swinv2", **WINDOWS), 2, "cosines; a bias by a small network; a shifted window"),
    Tower("swin2sr", functools.partial(vision, "Swin2SR", **WINDOWS | dict(patch_size=1)), 2, "a clone of Swinv2"),
    Tower("donut", functools.partial(vision, "DonutSwin", **WINDOWS), 2, "a table of its own in each layer; a shifted window"),
    Tower("maskformer", functools.partial(vision, "MaskFormerSwin", **WINDOWS), 2, "a clone of Donut's"),
    Tower("clap", clap, 2, "a clone of Donut's, in a file that uses the interface elsewhere"),
    Tower("data2vec", functools.partial(data2vec, use_relative_position_bias=True), 2, "a table in each layer"),
    Tower("data2vec-shared", functools.partial(data2vec, use_shared_relative_position_bias=True), 2, "a table for all layers"),
    Tower(
        "data2vec-both",
        functools.partial(data2vec, use_relative_position_bias=True, use_shared_relative_position_bias=True),
        2,
        "both, which add up",
    ),
    Tower("data2vec-sdpa", sdpa_data2vec, 2, "the class of layers that calls SDPA"),
    Tower("wavlm", wavlm, 2, "a gate by content on a shared table; padding"),
    Tower("wavlm-stable", functools.partial(wavlm, do_stable_layer_norm=True), 2, "the other encoder layer"),
    Tower("layoutlmv3", layoutlmv3, 2, "biases in one and two dimensions; padding in the middle"),
    Tower("layoutlmv3-text", functools.partial(layoutlmv3, has_spatial_attention_bias=False), 2, "one dimension only"),
    Tower("esmfold", esmfold, 5, "pair biases shared by rows and by columns; padding"),
)


def read(result: Any, inputs: dict) -> Tensor:
    """What a pass gives at real positions."""
    if "s_z" in result:  # ESMFold
        real = inputs["attention_mask"].bool()
        pairs = real[:, :, None] & real[:, None]
        return torch.cat([result.s_s[real].flatten(), result.s_z[pairs].flatten(), result.positions[-1][real].flatten()])
    out = result.last_hidden_state
    mask = inputs.get("attention_mask")
    if mask is None:
        return out
    keep = torch.ones(out.shape[:2], dtype=torch.bool)  # LayoutLMv3's image comes after its text; WavLM has a position for 4 samples
    mask = mask[:, ::4] if "input_values" in inputs else mask
    keep[:, : mask.shape[1]] = mask.bool()
    return out[keep]


def tower_step(model: nn.Module, inputs: dict) -> Step:
    """As train_step, with a loss of random weights."""
    torch.manual_seed(0)  # ESMFold masks tokens at random
    model.zero_grad()
    out = read(model(**inputs), inputs)
    loss = (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(3))).mean()
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Step(out.detach(), loss.detach(), gradients)


def with_strong_tables(model: nn.Module) -> dict[str, Tensor]:
    """The tables and gates of a model's biases, drawn so that they matter."""
    marks = ("relative_position_bias_table", "rel_attn_embed", "gru_rel_pos", "logit_scale", "continuous_position", "pair_to_sequence.linear")
    found = {name: parameter for name, parameter in model.named_parameters() if any(mark in name for mark in marks)}
    with torch.no_grad():
        for parameter in found.values():
            parameter.normal_(std=0.7)
    return found


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
    assert all(call["bias"] is not None for call in calls)
    assert_equal_steps(ours, own)
    for name in tables:
        assert largest(ours.gradients[name]) > 1e-6
        assert error(ours.gradients[name], own.gradients[name]) <= 5 * TOLERANCE * largest(own.gradients[name])
    assert torch.equal(tower_step(model, inputs).logits, own.logits)


@whole_model
@pytest.mark.parametrize("tower", TOWERS, ids=named)
def test_the_towers_can_tell_a_wrong_attention(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tower.build()
    with_strong_tables(model)
    own = tower_step(model, inputs)
    monkeypatch.setattr(integration.attention, "attention", lambda *qkv, **options: dmattn.attention(*qkv, **(options | dict(bias=None))))
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
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", DECODERS, ids=named)
def test_greedy_generation_gives_the_models_own_tokens(family: Family, cache: str, calls: list[dict]) -> None:
    if family.name == "falcon-alibi" and cache == "static":
        pytest.skip("Falcon itself cannot use ALiBi with a static cache")
    model = family.build().eval()
    batch = batch_for(model, "left")
    del batch["labels"]
    how = dict(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    if cache == "static":
        how |= dict(cache_implementation="static", disable_compile=True)
    own = model.generate(**batch, **how)
    with integration.patched(model):
        ours = model.generate(**batch, **how)
    assert len(calls) == 2 * 5
    assert torch.equal(ours, own)


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
@pytest.mark.parametrize("build", [grouped_falcon, mpnet], ids=["falcon", "mpnet"])
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
@pytest.mark.parametrize("build", [bloom, falcon, functools.partial(falcon, "sdpa", alibi=True)], ids=["bloom", "falcon", "falcon-alibi"])
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
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, calls: list[dict]) -> None:
    model = bloom()
    batch = batch_for(model, "left")
    own = train_step(model, batch)
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    model.enable_input_require_grads()
    with integration.patched(model):
        assert_equal_steps(train_step(model, batch), own)
    assert len(calls) == 4


@whole_model
@pytest.mark.parametrize("build", [bloom, mpt], ids=["bloom", "mpt"])
def test_a_patched_model_compiles_into_one_graph(build: Callable[..., nn.Module]) -> None:
    model = build(**{"n_layer" if build is bloom else "n_layers": 1}).eval()
    batch = batch_for(model, "left")
    del batch["labels"]
    real = batch["attention_mask"] == 1
    with torch.no_grad(), integration.patched(model):
        want = model(**batch, use_cache=False).logits[real]
        got = torch.compile(model, backend="aot_eager", fullgraph=True)(**batch, use_cache=False).logits[real]
    assert error(got, want) <= TOLERANCE * largest(want)


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
def test_a_model_loaded_with_the_name_dmattn_is_patched_without_a_warning(calls: list[dict]) -> None:
    eager = bloom()
    batch = batch_for(eager, "left")
    integration.register()
    try:
        model = type(eager)._from_config(copy.deepcopy(eager.config), attn_implementation="dmattn").train()
        model.load_state_dict(eager.state_dict())
        integration.patch(model)
        integration.interface._known.pop(type(model).__module__, None)
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
        assert layer._old_forward.__func__ is families.bloom
        assert_equal_steps(train_step(model, batch), own)
    assert torch.equal(train_step(model, batch).logits, own.logits)
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
    stock = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
    family = families.family_of(stock)
    assert family is families.FAMILIES[name]
    for method in family.methods:
        assert callable(getattr(stock, method))


def test_a_class_that_uses_the_interface_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it may in another version of Transformers."""
    interface._source.cache_clear()
    monkeypatch.setattr(interface.inspect, "getsource", lambda kind: "attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)")
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
    with pytest.raises(ValueError, match=r"expected a model that patch\(\) was called on, received another BloomForCausalLM"):
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
@pytest.mark.parametrize("tower", [tower for tower in TOWERS if tower.name != "esmfold"], ids=named)
def test_attention_weights_of_towers_raise(tower: Tower) -> None:
    model, inputs = tower.build()
    integration.patch(model)
    with pytest.raises(ValueError, match="output_attentions: expected False"):
        model(**inputs, output_attentions=True)


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
def test_rotary_falcon_trains_with_the_dropout_that_it_never_applies(calls: list[dict]) -> None:
    model = falcon(attention_dropout=0.1)
    batch = batch_for(model, "left")
    own = train_step(model, batch)
    with integration.patched(model):
        assert_equal_steps(train_step(model, batch), own)


@whole_model
def test_a_causal_layer_without_a_mask_raises() -> None:
    """Nothing else would hide later tokens."""
    model = bloom(n_layer=1)
    integration.patch(model)
    states = torch.zeros(1, 3, 32)
    with pytest.raises(ValueError, match=r"is_causal: expected True or False in a call without a mask .* of BloomAttention"):
        model.transformer.h[0].self_attention(states, states, torch.zeros(4, 1, 3), None)


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
