"""Models whose layers add the mask they are given, cut it or join it with another: it has to be eager's float mask, whoever reads it.

Both sides compute in float64, where rounding hides nothing: a bool mask that is added moves logits by tenths, a right one by less than 1e-6.
"""

from __future__ import annotations

import copy
import gc
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from models import VOCABULARY, build
from torch import Tensor, nn

from dmattn.execution.backend import interpreting

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from transformers.masking_utils import (  # noqa: E402
    bidirectional_mask_function,
    create_causal_mask,
    eager_mask,
    sliding_window_causal_mask_function,
)

from dmattn.integrations import transformers as integration  # noqa: E402
from dmattn.integrations.transformers.described_mask import DescribedMask  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.skipif(interpreting(), reason="whole models; the interpreter takes milliseconds for each tile"),
]

TOLERANCE = 1e-6  # of the largest: some eager layers round their softmax to float32 all the same
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
PAIR = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
PAIR |= dict(encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)


def tokens(length: int, padded: int = 0) -> dict[str, Tensor]:
    """Two rows, of which the first ends in padding."""
    ids = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(ids)
    real[0, length - padded :] = 0
    return dict(input_ids=ids * real, attention_mask=real)


def deepseek_v4() -> tuple[nn.Module, dict]:
    layers = dict(layer_types=["compressed_sparse_attention", "heavily_compressed_attention"], mlp_layer_types=["moe", "moe"])
    latent = dict(q_lora_rank=16, o_lora_rank=8, o_groups=2, head_dim=16, num_key_value_heads=1, sliding_window=6, hc_mult=2)
    indexer = dict(index_n_heads=2, index_head_dim=16, index_topk=2, compress_rates=dict.fromkeys(layers["layer_types"], 4))
    experts = dict(moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2)
    sizes = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
    config = transformers.DeepseekV4Config(vocab_size=VOCABULARY, pad_token_id=0, **sizes, **layers, **latent, **indexer, **experts)
    config._experts_implementation = "eager"  # grouped products have no float64
    return build(transformers.DeepseekV4Model, config), tokens(19) | dict(use_cache=False)


def git() -> tuple[nn.Module, dict]:
    vision = dict(SIZES, image_size=8, patch_size=4)
    config = transformers.GitConfig(vision_config=vision, vocab_size=VOCABULARY, pad_token_id=0, hidden_dropout_prob=0.0, **SIZES)
    config.attention_probs_dropout_prob = 0.0
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    return build(transformers.GitModel, config), tokens(11, 3) | dict(pixel_values=pixels, use_cache=False)


def informer(distil: bool = False) -> tuple[nn.Module, dict]:
    sizes = dict(prediction_length=6, context_length=12, lags_sequence=[1, 2], num_time_features=2, sampling_factor=2)
    config = transformers.InformerConfig(**sizes, **PAIR, distil=distil)
    assert config.attention_type == "prob"
    seed = torch.Generator().manual_seed(1)
    past, future = 14, 6
    values = dict(past_values=torch.randn(2, past, generator=seed), past_observed_mask=torch.ones(2, past))
    times = dict(past_time_features=torch.randn(2, past, 2, generator=seed), future_time_features=torch.randn(2, future, 2, generator=seed))
    return build(transformers.InformerModel, config), dict(**values, **times, future_values=torch.randn(2, future, generator=seed))


def bigbird_pegasus(attention_type: str = "original_full") -> tuple[nn.Module, dict]:
    config = transformers.BigBirdPegasusConfig(vocab_size=VOCABULARY, attention_type=attention_type, pad_token_id=0, **PAIR)
    inputs = tokens(17, 5)
    return build(transformers.BigBirdPegasusModel, config), inputs | dict(decoder_input_ids=inputs["input_ids"][1:].expand(2, -1)[:, :7])


def gemma4_audio() -> tuple[nn.Module, dict]:
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, output_proj_dims=16, subsampling_conv_channels=[8, 4])
    config = transformers.models.gemma4.Gemma4AudioConfig(**sizes, attention_chunk_size=4, attention_context_left=5)
    real = torch.ones(2, 40, dtype=torch.bool)
    real[0, 28:] = False
    features = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(1))
    return build(transformers.models.gemma4.modeling_gemma4.Gemma4AudioModel, config), dict(input_features=features, attention_mask=real)


MODELS = {
    "deepseek-v4-joins-it-with-a-bias-of-compressed-keys": deepseek_v4,
    "git-has-own-attention-for-text-beside-routed-vision": git,
    "informer-has-own-attention-for-probable-queries": informer,
    "informer-halves-its-length-under-the-mask": lambda: informer(distil=True),
    "bigbird-pegasus-has-own-attention-in-its-encoder": bigbird_pegasus,
    "bigbird-pegasus-falls-back-from-blocks": lambda: bigbird_pegasus("block_sparse"),
    "gemma-4-audio-cuts-it-into-blocks": gemma4_audio,
}


def step(model: nn.Module, inputs: dict) -> tuple[Tensor, dict[str, Tensor]]:
    """What a pass gives at real positions, and the gradients of a loss of random weights."""
    torch.manual_seed(0)  # Informer samples keys
    model.zero_grad()
    out = model(**inputs)[0]
    real = inputs.get("attention_mask")
    if real is not None and real.shape == out.shape[:2]:
        out = out[real.bool()]
    (out * torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))).mean().backward()
    return out.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_results_and_gradients_are_those_of_eager(make: Callable[[], tuple[nn.Module, dict]]) -> None:
    model, inputs = make()
    if make is not gemma4_audio:  # whose scores are float32 whatever the model is
        model = model.double()
        inputs = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in inputs.items()}
    route(model, "sdpa" if model._supports_sdpa else "eager")  # Gemma's audio in Transformers 5.17, whose eager inverts a float mask
    want, want_gradients = step(model, inputs)
    route(model)
    got, gradients = step(model, inputs)
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    assert gradients.keys() == want_gradients.keys()
    largest = max(gradient.abs().max() for gradient in want_gradients.values())
    for name, gradient in want_gradients.items():
        assert (gradients[name] - gradient).abs().max() <= TOLERANCE * largest, name


def route(model: nn.Module, implementation: str = integration.NAME) -> None:
    """As a model that is loaded by name: a part of a larger one, as Gemma's audio tower, may have nothing of its own to route."""
    for inner in model.modules():
        if isinstance(inner, transformers.PreTrainedModel):
            inner.config._attn_implementation = implementation


@pytest.mark.parametrize("make", [deepseek_v4, git], ids=["deepseek-v4", "git"])
def test_no_position_sees_later_tokens(make: Callable[[], tuple[nn.Module, dict]]) -> None:
    model, inputs = make()
    model.eval()
    route(model)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    length, changed = inputs["input_ids"].shape[1], copy.deepcopy(inputs)
    changed["input_ids"][:, -8:] = 3 + (changed["input_ids"][:, -8:] - 2) % (VOCABULARY - 3)
    with torch.no_grad():
        before, after = (model(**each)[0][:, -length:] for each in (inputs, changed))
    assert (before[:, :-8] - after[:, :-8]).abs().max() <= 1e-5 * before.abs().max()
    assert (before[:, -8:] - after[:, -8:]).abs().max() > 1e-3 * before.abs().max()


def made(config: Any, **place: Any) -> Tensor:
    return integration.make_mask(2, 5, 7, q_offset=2, config=config, dtype=torch.bfloat16, **place)


@pytest.mark.parametrize("padding", [None, torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]]).bool()], ids=["none", "padding"])
@pytest.mark.parametrize("rule", [None, sliding_window_causal_mask_function(3)], ids=["causal", "window"])
def test_a_float_mask_is_described_and_is_eagers_to_whoever_reads_it(padding: Tensor | None, rule: Any) -> None:
    place = dict(attention_mask=padding, **({} if rule is None else dict(mask_function=rule)))
    mask = made(transformers.SwitchTransformersModel.config_class(), **place)
    want = eager_mask(2, 5, 7, q_offset=2, dtype=torch.bfloat16, **place)
    assert isinstance(mask, DescribedMask)
    assert mask.dtype == torch.bfloat16
    assert torch.equal(mask + 0, want)
    assert torch.equal(torch.cat([mask, want], dim=-1)[..., :7], want)
    assert torch.equal(mask.float(), want.float())
    assert isinstance(mask.to(torch.bfloat16), DescribedMask)


def test_a_float_mask_that_was_edited_counts_as_edited(calls: list[dict]) -> None:
    config = transformers.SwitchTransformersModel.config_class()
    mask = made(config, attention_mask=torch.arange(7) < torch.tensor([[6], [7]]))
    mask[..., 0] = torch.finfo(mask.dtype).min
    layer = nn.Module()
    states = torch.randn(3, 2, 4, 7, 8).to(torch.bfloat16).unbind()
    integration.attend(layer, states[0][:, :, 2:], *states[1:], mask)
    assert torch.equal(calls[-1]["bias"], mask.dense())
    assert calls[-1]["mask"] is None


def test_an_unread_float_mask_costs_no_pairs(calls: list[dict]) -> None:
    states = torch.randn(3, 2, 4, 5, 8).unbind()
    mask = integration.make_mask(2, 5, 5, config=transformers.SwitchTransformersModel.config_class(), dtype=torch.float32)
    integration.attend(nn.Module(), *states, mask)
    assert (calls[-1]["mask"], calls[-1]["bias"], calls[-1]["causal"]) == (None, None, True)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param("LlamaModel", torch.bool, id="declares-sdpa"),
        pytest.param("GptOssModel", torch.bool, id="declares-flash-and-flex-but-not-sdpa"),
        pytest.param("DeepseekV4Model", torch.bfloat16, id="declares-none"),
        pytest.param("InformerModel", torch.bfloat16, id="says-nothing"),
    ],
)
def test_what_a_class_declares_decides(model: str, dtype: torch.dtype) -> None:
    assert made(getattr(transformers, model).config_class()).dtype == dtype


def test_a_configuration_takes_after_the_one_it_is_derived_from() -> None:
    class OwnConfig(transformers.LlamaModel.config_class):
        pass

    class UnknownConfig(transformers.PreTrainedConfig):
        pass

    assert made(OwnConfig()).dtype == torch.bool
    assert made(UnknownConfig()).dtype == torch.bfloat16
    assert made(None).dtype == torch.bool


def bridgetower_layer(own_forward: bool | None = None) -> nn.Module:
    """Of a class of BridgeTower's, or of one derived from it."""
    from transformers.models.bridgetower import modeling_bridgetower as bridgetower

    kind = bridgetower.BridgeTowerSelfAttention
    if own_forward is not None:
        kind = type("Own", (kind,), dict(forward=lambda self, *states: None) if own_forward else {})
    return kind(transformers.BridgeTowerTextConfig(), is_causal=True)


def align_layer() -> nn.Module:
    """It has no attribute `is_causal`, as its eager attention would not read one."""
    kind = importlib.import_module("transformers.models.align.modeling_align").AlignTextSelfAttention
    layer = kind(transformers.AlignTextConfig())
    assert not hasattr(layer, "is_causal")
    return layer


def llama_layer() -> nn.Module:
    return transformers.models.llama.modeling_llama.LlamaAttention(transformers.LlamaModel.config_class(num_hidden_layers=1), 0)


class OwnLayer(nn.Module):
    is_causal = True

    def forward(self) -> None:
        pass


LAYERS = {
    "bridgetower": (bridgetower_layer, False),
    "derived-from-it": (lambda: bridgetower_layer(own_forward=False), False),
    "align": (align_layer, False),
    "llama": (llama_layer, True),
    "own": (OwnLayer, True),
}


@pytest.mark.parametrize(("make", "causal"), LAYERS.values(), ids=LAYERS)
def test_without_a_mask_a_layer_is_causal_but_where_its_forward_is_in_a_file_of_eager_attention(
    make: Callable[[], nn.Module], causal: bool, calls: list[dict]
) -> None:
    integration.attend(make(), *torch.randn(3, 2, 4, 5, 8).unbind(), None)
    assert calls[-1]["causal"] == causal


def test_a_causal_layer_derived_from_one_that_ignores_causality_has_to_say(calls: list[dict]) -> None:
    """Eager attention gives it every key, SDPA those before: there is no right answer to guess."""
    layer, states = bridgetower_layer(own_forward=True), torch.randn(3, 2, 4, 5, 8)
    with pytest.raises(ValueError, match="is_causal: expected True or False as an argument in a call without a mask, as Own derives from"):
        integration.attend(layer, *states.unbind(), None)
    for given in (True, False):
        integration.attend(layer, *states.unbind(), None, is_causal=given)
        assert calls[-1]["causal"] == given
    integration.attend(layer, states[0, :, :, -1:], *states[1:].unbind(), None)
    layer.is_causal = False
    integration.attend(layer, *states.unbind(), None)
    assert not calls[-1]["causal"]


def test_a_module_that_is_none_of_torchs_is_taken(calls: list[dict]) -> None:
    integration.attend(SimpleNamespace(is_causal=True, training=False), *torch.randn(3, 2, 4, 5, 8).unbind(), None)
    assert calls[-1]["causal"]


def bidirectional(config: Any, padding: Tensor | None = None) -> Tensor | None:
    place = dict(mask_function=bidirectional_mask_function, attention_mask=padding, allow_is_bidirectional_skip=True)
    return integration.make_mask(2, 5, 5, config=config, dtype=torch.float32, **place)


@pytest.mark.parametrize("derived", [False, True], ids=["itself", "derived"])
def test_no_mask_is_made_only_where_all_models_of_a_configuration_ignore_causality(derived: bool) -> None:
    """Where a layer would take its absence for causality, a mask that hides nothing says so."""
    bridgetower = transformers.BridgeTowerModel.config_class.sub_configs["text_config"]
    config = type("OwnConfig", (bridgetower,), {})() if derived else bridgetower()
    assert bidirectional(config) is None
    assert bidirectional(config, torch.arange(5) < torch.tensor([[3], [5]])) is not None
    assert bidirectional(transformers.LlamaModel.config_class()) is not None
    from transformers.models.bridgetower import modeling_bridgetower

    kin = type("Kin", (modeling_bridgetower.BridgeTowerTextModel,), {})
    assert bidirectional(config) is None
    silent = type("Silent", (AddsMasks,), {})
    silent.config_class = None
    assert bidirectional(config) is None
    own = type("Own", (transformers.PreTrainedModel,), dict(config_class=bridgetower))
    mask = bidirectional(config)
    assert mask is not None
    assert not (mask + 0).any()
    del own, kin, silent
    gc.collect()
    assert bidirectional(config) is None
    assert bidirectional(OwnConfig()) is not None, "no model is known"


class OwnConfig(transformers.PreTrainedConfig):
    pass


class OtherConfig(transformers.PreTrainedConfig):
    pass


class AddsMasks(transformers.PreTrainedModel):
    """Declares eager attention alone, as all that say nothing."""

    config_class = OtherConfig  # so that it is no model of the others' configurations


class TakesBool(transformers.PreTrainedModel):
    config_class = OtherConfig
    _supports_sdpa = True


@pytest.mark.parametrize("later", [AddsMasks, TakesBool], ids=["beside-it", "derived-from-one-that-declares-more"])
def test_a_model_that_is_defined_later_counts(later: Any) -> None:
    first = type("First", (TakesBool,), dict(config_class=OwnConfig))
    assert made(OwnConfig()).dtype == torch.bool
    second = type("Second", (later,), dict(config_class=OwnConfig, _supports_sdpa=False))
    assert made(OwnConfig()).dtype == torch.bfloat16
    del first, second
    gc.collect()


def test_a_model_in_the_place_of_one_that_is_gone_counts() -> None:
    stays = type("Stays", (TakesBool,), dict(config_class=OwnConfig))
    first = type("First", (TakesBool,), dict(config_class=OwnConfig))
    assert made(OwnConfig()).dtype == torch.bool
    del first
    gc.collect()
    second = type("Second", (AddsMasks,), dict(config_class=OwnConfig))
    assert made(OwnConfig()).dtype == torch.bfloat16
    del second, stays
    gc.collect()
    assert made(OwnConfig()).dtype == torch.bfloat16, "no model is known, which counts as one that adds"
    silent = type("Silent", (TakesBool,), {})
    silent.config_class = None
    assert made(OwnConfig()).dtype == torch.bfloat16, "nor does one count that may run with anything"
    del silent
    gc.collect()


LATER = {
    "names-none": dict(),
    "names-a-base": dict(config_class=transformers.PreTrainedConfig),
    "names-it-in-a-string": dict(config_class="OwnConfig | None"),
    "names-it-in-a-union": dict(config_class=OwnConfig | OtherConfig),
    "names-a-derived-one": dict(config_class=type("DerivedConfig", (OwnConfig,), {})),
    "names-a-variable": dict(config_class=TypeVar("T", bound=OwnConfig)),
}


@pytest.mark.parametrize("names", LATER.values(), ids=LATER)
def test_a_model_that_may_run_with_a_configuration_counts_however_it_names_it(names: dict) -> None:
    first = type("First", (TakesBool,), dict(config_class=OwnConfig))
    assert made(OwnConfig()).dtype == torch.bool
    second = type("Second", (AddsMasks,), {})
    second.config_class = names.get("config_class")
    assert made(OwnConfig()).dtype == torch.bfloat16
    del first, second
    gc.collect()


@pytest.mark.parametrize("wrapped", ["DeepseekV4Model", "GitModel"])
def test_a_model_that_wraps_one_of_transformers_does_not_hide_it(wrapped: str) -> None:
    config = type("WrappingConfig", (getattr(transformers, wrapped).config_class,), {})
    head = type("Head", (TakesBool,), dict(config_class=config))
    assert made(config()).dtype == torch.bfloat16
    del head
    gc.collect()


def test_models_of_transformers_run_with_their_own_configuration_alone() -> None:
    """One that derives its configuration from another's takes bool masks, whatever the other's models take."""
    derived = type("DerivedConfig", (OwnConfig,), {})
    of_transformers = dict(__module__="transformers.models.own.modeling_own")
    base = type("Base", (AddsMasks,), of_transformers | dict(config_class=OwnConfig))
    model = type("Model", (TakesBool,), of_transformers | dict(config_class=derived))
    assert made(OwnConfig()).dtype == torch.bfloat16
    assert made(derived()).dtype == torch.bool
    del base, model
    gc.collect()


def test_what_a_class_declares_is_read_at_each_call() -> None:
    first = type("First", (TakesBool,), dict(config_class=OwnConfig))
    assert made(OwnConfig()).dtype == torch.bool
    first._supports_sdpa = False
    assert made(OwnConfig()).dtype == torch.bfloat16
    first._supports_sdpa = property(lambda self: True)
    assert made(OwnConfig()).dtype == torch.bfloat16, "unknown before there is a model"
    del first
    gc.collect()


def test_under_tracing_the_float_mask_is_eagers() -> None:
    config = transformers.SwitchTransformersConfig(attn_implementation="dmattn")

    def mask(states: Tensor) -> Tensor:
        return create_causal_mask(config=config, inputs_embeds=states, attention_mask=None, past_key_values=None) + 0

    states = torch.zeros(2, 5, 8)
    assert torch.equal(torch.compile(mask, backend="eager")(states), eager_mask(2, 5, 5))
