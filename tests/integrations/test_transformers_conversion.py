"""Converted models compute dynamic mask attention: as the formula with its mask written out, with every gradient, cached and not.

The rule is that of models.py. Keys that tie by their values, as a token that
is repeated has in the first layer, may differ in the last bit of their scores, and a kept key with them: where A is not 0 no token repeats.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import NEEDS_CUDA, needs_cuda
from models import PADDING, TOLERANCE, VOCABULARY, Step, assert_equal_steps, build, distinct_batch, error, largest, train_step
from test_transformers import SIZES, Family
from torch import Tensor, nn
from torch.nn import functional as F

from dmattn.execution.backend import interpreting

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from transformers.masking_utils import sdpa_mask  # noqa: E402

from dmattn.integrations import transformers as integration  # noqa: E402
from dmattn.integrations.transformers import converted_layer  # noqa: E402

whole_models = pytest.mark.skipif(interpreting(), reason="whole models; the interpreter takes milliseconds for each tile")
everywhere = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])

LENGTH, KEEP = 23, 6


def make(name: str, **changes: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**(SIZES | dict(num_key_value_heads=2, pad_token_id=0) | changes))
    return build(getattr(transformers, f"{name}ForCausalLM"), config)


def llama(**changes: Any) -> nn.Module:
    return make("Llama", **changes)


def half_windowed() -> nn.Module:
    """Two layers with full attention and two with a window, by turns."""
    types = ["sliding_attention", "full_attention"] * 2
    return make("Qwen2", num_hidden_layers=4, use_sliding_window=True, sliding_window=5, layer_types=types)


FAMILIES = (
    Family("llama", llama, 2, "two query heads per key-value head"),
    Family("mistral", lambda: make("Mistral", sliding_window=None), 2, "passes its window, here None"),
    Family("qwen2", lambda: make("Qwen2"), 2, "biases in its projections; layer types"),
    Family("qwen3", lambda: make("Qwen3", head_dim=16), 2, "norms of queries and keys; heads wider than hidden / heads"),
    Family("gemma", lambda: make("Gemma", head_dim=8, num_key_value_heads=1), 2, "one key-value head"),
    Family("phi3", lambda: make("Phi3", eos_token_id=None, bos_token_id=None), 2, "one projection for queries, keys and values"),
    Family("olmo2", lambda: make("Olmo2"), 2, "norms over all heads"),
    Family("gpt-neox", lambda: make("GPTNeoX"), 2, "one projection that interleaves the heads; no groups; other names"),
)
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def convert(model: nn.Module, keep: int = KEEP, A: float = 1.0, **options: Any) -> nn.Module:
    """Converted, with scores that differ from key to key and head to head unless A is 0."""
    integration.convert_to_dynamic_mask(model, keep=keep, **options)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dynamic_mask.A"):
                parameter.copy_(torch.linspace(A, -0.7 * A, len(parameter)))
            elif "dynamic_mask" in name:
                parameter.normal_(std=0.2)
    return model


def kept(key_bias: Tensor, visible: Tensor, keep: int) -> Tensor:
    """The mask (B, Hk, Q, K) of the `keep` visible keys of largest (score, position), one query at a time."""
    batch, kv_heads, len_k = key_bias.shape
    mask = torch.zeros(batch, kv_heads, visible.shape[2], len_k, dtype=torch.bool)
    for b in range(batch):
        for i, seen in enumerate(visible[b, 0].tolist()):
            for h, scores in enumerate(key_bias[b].tolist()):
                best = sorted((j for j in range(len_k) if seen[j]), key=lambda j: (scores[j], j))[-keep:]
                mask[b, h, i, best] = True
    return mask.to(key_bias.device)


def by_formula(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: Any):
    """Transformers' attention function with everything written out: scores, the mask of kept keys, softmax."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT * scaling
    mask = attention_mask.expand(-1, query.shape[1], -1, -1)
    if hasattr(module, "dynamic_mask"):
        steps = F.linear(value.transpose(1, 2).flatten(2), module.dynamic_mask.dt_proj.weight)
        key_bias = torch.exp(module.dynamic_mask.A * F.softplus(steps)).transpose(1, 2)
        mask = kept(key_bias.detach(), attention_mask, module.config.dynamic_mask["keep"]).repeat_interleave(groups, 1)
        scores = scores + key_bias[:, :, None].repeat_interleave(groups, 1)
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1) * mask.any(-1, keepdim=True)
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module, dict[str, Tensor]], Step]:
    """A training step of a converted model whose layers compute by :func:`by_formula`."""

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Step:
        mask = lambda **call: sdpa_mask(**(call | dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)))  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setitem(transformers.AttentionInterface._global_mapping, converted_layer.NAME, by_formula)
            patch.setitem(transformers.AttentionMaskInterface._global_mapping, converted_layer.NAME, mask)
            return train_step(model, batch, plain=True)

    return step


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The mask of every call that reaches the attention function."""
    seen: list[Any] = []

    def spy(module, query, key, value, attention_mask, **call):
        seen.append(attention_mask)
        return converted_layer.attend_converted(module, query, key, value, attention_mask, **call)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, converted_layer.NAME, spy)
    return seen


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def without_new(step: Step) -> Step:
    return replace(step, gradients={name: gradient for name, gradient in step.gradients.items() if "dynamic_mask" not in name})


# What a conversion is at its start


@whole_models
@pytest.mark.parametrize("padding", PADDING)
@families
def test_up_to_keep_tokens_a_new_conversion_is_the_original(family: Family, padding: str) -> None:
    model = family.build()
    batch = distinct_batch(padding)
    eager = train_step(model, batch)
    integration.convert_to_dynamic_mask(model, keep=LENGTH)
    assert len(model.config.dynamic_mask["layers"]) == family.layers
    assert_equal_steps(without_new(train_step(model, batch)), eager)


@whole_models
@pytest.mark.parametrize("padding", PADDING)
def test_beyond_keep_tokens_a_new_conversion_is_the_original_with_a_sliding_window(padding: str) -> None:
    model, batch = llama(), distinct_batch(padding, repeat=True)
    real = batch.get("attention_mask", torch.ones(2, LENGTH)).bool()
    window = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(1 - KEEP) & real[:, None, None]
    eager = train_step(model, batch | dict(attention_mask=torch.zeros(window.shape).masked_fill(~window, torch.finfo(torch.float32).min)))
    for step in (eager, eager.truth):
        step.logits = step.logits[real] if padding != "none" else step.logits
    integration.convert_to_dynamic_mask(model, keep=KEEP)
    assert_equal_steps(without_new(train_step(model, batch)), eager)
    model.config.dynamic_mask["keep"] = KEEP + 1
    with pytest.raises(AssertionError):
        assert_equal_steps(without_new(train_step(model, batch)), eager)


@whole_models
def test_both_new_parameters_learn() -> None:
    """A from the first step, dt_proj from the second: its gradient is a multiple of A."""
    model, batch = llama(), distinct_batch()
    integration.convert_to_dynamic_mask(model, keep=KEEP)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("dynamic_mask" in name)
    new = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(new) == 4
    before = {name: parameter.detach().clone() for name, parameter in new.items()}
    optimizer = torch.optim.SGD(new.values(), lr=1.0)
    for first in (True, False):
        gradients = train_step(model, batch).gradients
        assert gradients.keys() == new.keys()
        assert all(gradient.any() for name, gradient in gradients.items() if not first or name.endswith(".A"))
        assert not any(gradient.any() for name, gradient in gradients.items() if first and not name.endswith(".A"))
        optimizer.step()
    assert all(not torch.equal(parameter, before[name]) for name, parameter in new.items())


def test_new_parameters_are_initialised_as_documented() -> None:
    model = llama(initializer_range=0.3, hidden_size=64).half()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    integration.convert_to_dynamic_mask(model.eval(), keep=KEEP)
    layer = model.model.layers[1].self_attn
    assert not layer.dynamic_mask.A.any()
    assert layer.dynamic_mask.A.shape == (2,)
    assert layer.dynamic_mask.dt_proj.weight.shape == (2, 32)
    assert 0.2 < layer.dynamic_mask.dt_proj.weight.std() < 0.4
    assert layer.dynamic_mask.dt_proj.bias is None
    assert {parameter.dtype for parameter in layer.dynamic_mask.parameters()} == {torch.float16}
    assert not layer.dynamic_mask.training
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters() if name in before)


def test_beside_quantised_weights_the_new_parameters_have_the_dtype_of_the_configuration() -> None:
    model = llama()
    model.config.dtype = torch.float16
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight = nn.Parameter(torch.zeros(16, 32, dtype=torch.uint8), requires_grad=False)
    integration.convert_to_dynamic_mask(model, keep=KEEP)
    assert {parameter.dtype for name, parameter in model.named_parameters() if "dynamic_mask" in name} == {torch.float16}


# What a converted model computes


@whole_models
@pytest.mark.parametrize("padding", PADDING)
@families
def test_a_training_step_equals_the_formula(family: Family, padding: str, formula: Callable) -> None:
    """In float64, as the gradient of A is a sum over all keys in which much cancels."""
    model, batch = convert(family.build().double()), distinct_batch(padding)
    want = formula(model, batch)
    got = train_step(model, batch)
    assert_equal_steps(got, want)
    assert set(got.gradients) == {name for name, _ in model.named_parameters()}
    assert all(largest(gradient) > 0 for name, gradient in got.gradients.items() if "dynamic_mask" in name)


@whole_models
@needs_cuda
def test_a_training_step_equals_the_formula_on_a_gpu(formula: Callable) -> None:
    """In float32, which the kernels take there."""
    model, batch = convert(llama()).to("cuda"), distinct_batch("left", device="cuda")
    assert_equal_steps(train_step(model, batch), formula(model, batch))


@whole_models
@pytest.mark.parametrize("keep", [KEEP - 1, KEEP + 1])
def test_one_key_more_or_less_is_told_apart(keep: int, formula: Callable) -> None:
    model, batch = convert(llama()), distinct_batch()
    want = formula(model, batch)
    model.config.dynamic_mask["keep"] = keep
    with pytest.raises(AssertionError):
        assert_equal_steps(train_step(model, batch), want)


@whole_models
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("layers", [[1], [0, 2]], ids=["one-of-three", "two-of-three"])
def test_the_other_layers_attend_densely(layers: list[int], padding: str, formula: Callable) -> None:
    """In float64, as is the next, for the same reason."""
    model, batch = convert(llama(num_hidden_layers=3).double(), layers=layers), distinct_batch(padding)
    assert model.config.dynamic_mask == {"keep": KEEP, "layers": layers}
    assert [hasattr(layer.self_attn, "dynamic_mask") for layer in model.model.layers] == [number in layers for number in range(3)]
    assert_equal_steps(train_step(model, batch), formula(model, batch))


@whole_models
@pytest.mark.parametrize("padding", PADDING)
def test_layers_with_a_window_keep_it(padding: str, formula: Callable) -> None:
    model, batch = convert(half_windowed().double()), distinct_batch(padding)
    assert model.config.dynamic_mask["layers"] == [1, 3]
    assert_equal_steps(train_step(model, batch), formula(model, batch))


@whole_models
def test_no_mask_of_pairs_is_made(masks: list[Any]) -> None:
    model = convert(llama(), layers=[1])
    for padding in ("none", "left"):
        batch = distinct_batch(padding)
        model(**batch)
        real = batch.get("attention_mask", torch.ones(2, LENGTH)).bool()
        assert len(masks) == 2
        assert all(torch.equal(mask, real) for mask in masks)
        masks.clear()


@whole_models
def test_gradient_checkpointing_changes_nothing() -> None:
    model, batch = convert(llama()), distinct_batch("left")
    plain = train_step(model, batch)
    model.gradient_checkpointing_enable()
    assert_equal_steps(train_step(model, batch), plain)


@whole_models
@pytest.mark.parametrize("mode", ["weights", "autocast"])
def test_scores_in_bfloat16_models_are_not_rounded_to_it(mode: str) -> None:
    """With A near 0 all scores would round to 1, and the mask to a sliding window."""
    model, tokens = llama().eval(), distinct_batch()["input_ids"]
    model = model.bfloat16() if mode == "weights" else model
    convert(model, A=1e-3)
    scores = []
    model.model.layers[1].self_attn.dynamic_mask.register_forward_hook(lambda module, args, out: scores.append(out))
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        assert model(tokens).logits.dtype == torch.bfloat16
    assert scores[0].dtype == torch.float32
    assert all(len(row.unique()) > LENGTH // 2 for row in scores[0].flatten(0, 1))
    assert all(len(row.unique()) <= 2 for row in scores[0].bfloat16().flatten(0, 1))


@whole_models
@pytest.mark.parametrize("layers", [[0], [1]], ids=["converted", "dense"])
def test_a_compiled_model_has_no_graph_break(layers: list[int]) -> None:
    """One layer is traced, converted or not."""
    model, batch = convert(llama(use_cache=False), layers=layers), distinct_batch("left")
    model.model.layers = model.model.layers[:1]
    plain = train_step(model, batch)
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert_equal_steps(train_step(model, batch), plain)


# Caches


@whole_models
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("make_model", [llama, half_windowed], ids=["llama", "half-windowed"])
def test_cached_generation_gives_the_tokens_of_recomputation(make_model: Callable, padding: str, cache: str) -> None:
    model, batch = convert(make_model()).eval(), distinct_batch(padding)
    del batch["labels"]
    settings = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, no_repeat_ngram_size=1)
    recomputed = model.generate(**batch, **settings, use_cache=False)
    assert torch.equal(model.generate(**batch, **settings, cache_implementation=cache), recomputed)
    assert recomputed.shape == (2, LENGTH + 12)
    model.config.dynamic_mask["keep"] = LENGTH + 12
    assert not torch.equal(model.generate(**batch, **settings), recomputed)


@whole_models
@pytest.mark.parametrize("A", [0.0, 1.0])
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("make_model", [llama, half_windowed], ids=["llama", "half-windowed"])
def test_cached_logits_are_those_of_the_full_pass(make_model: Callable, kind: str, padding: str, A: float) -> None:
    """Prompt, then several tokens, then one at a time. At A = 0 with nothing but ties."""
    model, batch = convert(make_model(), A=A).eval(), distinct_batch(padding, repeat=A == 0)
    tokens, real = batch["input_ids"], batch.get("attention_mask", torch.ones(2, LENGTH, dtype=torch.long))
    with torch.no_grad():
        full = model(tokens, attention_mask=real).logits
        static = dict(max_cache_len=LENGTH + 5) if kind == "static" else {}
        cache = (transformers.StaticCache if static else transformers.DynamicCache)(config=model.config, **static)
        parts, done = [], 0
        for step in tokens.split([9, 3, *[1] * (LENGTH - 12)], 1):
            done += step.shape[1]
            mask = None if padding == "none" else real[:, :done]
            parts.append(model(step, attention_mask=mask, past_key_values=cache, use_cache=True).logits)
    seen = real == 1
    assert error(torch.cat(parts, 1)[seen], full[seen]) <= TOLERANCE * largest(full[seen])


@whole_models
def test_the_rest_of_a_static_cache_does_not_matter() -> None:
    """Slots beyond the last query may hold anything, as after a cache was reset."""
    model, tokens = convert(llama()).eval(), distinct_batch()["input_ids"]

    def logits(junk: float) -> Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 5)
        with torch.no_grad():
            parts = [model(tokens[:, :9], past_key_values=cache).logits]
            for layer in cache.layers:
                layer.keys[:, :, 9:] = junk
                layer.values[:, :, 9:] = junk
            for step in tokens[:, 9:].split([3, *[1] * (LENGTH - 12)], 1):
                parts.append(model(step, past_key_values=cache).logits)
        return torch.cat(parts, 1)

    assert error(logits(50.0), logits(0.0)) <= TOLERANCE * largest(logits(0.0))


# Training with other libraries


@whole_models
def test_lora_trains_beside_the_new_parameters(tmp_path) -> None:
    """An adapter with the new parameters; loaded on a model that was converted alike; merged, saved, and loaded as a converted model."""
    peft = pytest.importorskip("peft")
    model, batch = llama(), distinct_batch("left")
    original = copy.deepcopy(model)
    integration.convert_to_dynamic_mask(model, keep=KEEP)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["dynamic_mask"])
    adapted = peft.get_peft_model(model, settings)
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert sum("dynamic_mask" in name for name in trained) == 4
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    optimizer = torch.optim.SGD(trained.values(), lr=0.5)
    for _ in range(2):
        train_step(adapted, batch)
        optimizer.step()
    assert all(not torch.equal(parameter, before[name]) for name, parameter in trained.items())
    logits = adapted.eval()(**batch).logits.detach()
    adapted.save_pretrained(tmp_path / "adapter")
    integration.convert_to_dynamic_mask(original, keep=KEEP)
    again = peft.PeftModel.from_pretrained(original, tmp_path / "adapter").eval()
    assert error(again(**batch).logits, logits) <= TOLERANCE * largest(logits)
    with pytest.raises(ValueError, match=r"model: expected a model without adapters, .* whose dynamic_mask is a ModulesToSaveWrapper"):
        integration.revert_dynamic_mask(adapted)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    loaded = integration.load_dynamic_mask(transformers.AutoModelForCausalLM, tmp_path / "merged")
    assert error(loaded(**batch).logits, logits) <= TOLERANCE * largest(logits)
    integration.revert_dynamic_mask(merged)
    assert hooks(merged) == 0


@whole_models
def test_trainer_trains_the_new_parameters_and_its_checkpoint_is_loaded(tmp_path) -> None:
    pytest.importorskip("accelerate")
    model, batch = llama(), distinct_batch("left")
    integration.convert_to_dynamic_mask(model, keep=KEEP)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("dynamic_mask" in name)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = [{name: tensor[number] for name, tensor in batch.items()} for number in range(2)]
    steps = dict(max_steps=2, save_steps=2, save_strategy="steps", learning_rate=0.1, per_device_train_batch_size=2)
    settings = transformers.TrainingArguments(str(tmp_path), **steps, report_to=[], use_cpu=True, disable_tqdm=True)
    transformers.Trainer(model, settings, train_dataset=rows).train()
    assert all(torch.equal(tensor, before[name]) != ("dynamic_mask" in name) for name, tensor in model.state_dict().items())
    loaded = integration.load_dynamic_mask(transformers.AutoModelForCausalLM, tmp_path / "checkpoint-2")
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())


# What is refused


@whole_models
def test_another_implementation_does_not_drop_the_masks_silently() -> None:
    model, tokens = convert(llama()), distinct_batch()["input_ids"]
    message = "attn_implementation: expected 'dmattn_dynamic' in a converted model, which revert_dynamic_mask.* received "
    try:
        with integration.using(model), pytest.raises(ValueError, match=message + "'dmattn'"):
            model(tokens)
    finally:
        integration.unregister()
    model(tokens)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=message + "'sdpa'"):
        model(tokens)
    integration.revert_dynamic_mask(model)
    assert model.config._attn_implementation == "sdpa"
    model(tokens)


@whole_models
def test_a_model_built_anew_from_the_configuration_is_refused() -> None:
    model = convert(llama(), layers=[1])
    with pytest.raises(ValueError, match="model: expected layer 1 with a dynamic mask, as its configuration says; load_dynamic_mask"):
        type(model)(model.config)(distinct_batch()["input_ids"])


@whole_models
@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(
            dict(attention_mask=torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)),
            r"attention_mask: expected a mask \(B, Sk\) .* received one of shape \(2, 1, 23, 23\)",
            id="mask-of-four-axes",
        ),
        pytest.param(
            dict(position_ids=(torch.arange(LENGTH) % 9)[None], use_cache=False),
            "attention_mask: expected a causal mask, and no packed sequences",
            id="packed-by-positions",
        ),
        pytest.param(dict(cu_seq_lens_q=torch.tensor([0, 9, LENGTH])), "cu_seq_lens_q: expected None", id="packed-by-lengths"),
        pytest.param(dict(softcap=5.0), "softcap: expected None", id="softcap"),
        pytest.param(dict(s_aux=torch.zeros(4)), "s_aux: expected None", id="sinks"),
    ],
)
def test_what_a_call_cannot_have_is_named(call: dict[str, Any], message: str) -> None:
    model = convert(llama())
    with pytest.raises(ValueError, match=message):
        model(distinct_batch()["input_ids"], **call)


@whole_models
def test_dropout_is_refused_while_training_only() -> None:
    model, tokens = convert(llama(attention_dropout=0.1)), distinct_batch()["input_ids"]
    with pytest.raises(ValueError, match=r"dropout: expected 0.0 while training, .* received 0.1; give attention_dropout=0.0"):
        model(tokens)
    assert model.eval()(tokens).logits.isfinite().all()


@whole_models
def test_a_model_that_is_no_longer_causal_is_refused() -> None:
    model = convert(llama())
    model.config.is_causal = False
    with pytest.raises(ValueError, match=r"attention_mask: expected a mask \(B, Sk\)"):
        model(distinct_batch()["input_ids"])


@whole_models
def test_attention_weights_are_refused() -> None:
    layer = convert(llama()).model.layers[0].self_attn
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    with pytest.raises(ValueError, match="output_attentions: expected False"):
        converted_layer.attend_converted(layer, query, key, key, torch.ones(2, 5, dtype=torch.bool), output_attentions=True)


def test_compiled_calls_that_cannot_be_told_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dict(batch_size=2, q_length=3, kv_length=9, device="cpu")
    assert converted_layer.make_key_mask(**sizes, q_offset=torch.tensor(2)).shape == (2, 5)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match=r"past_key_values: expected one token at a time with a static cache in torch.compile, received 3"):
        converted_layer.make_key_mask(**sizes, q_offset=torch.tensor(2))
    with pytest.raises(ValueError, match="past_key_values: expected a cache of at least 12 keys for 3 queries, received 9"):
        converted_layer.make_key_mask(**sizes, q_offset=9)


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )


def doge() -> nn.Module:
    return transformers.DogeForCausalLM(transformers.DogeConfig(**SIZES, num_key_value_heads=2))


def latent() -> nn.Module:
    sizes = SIZES | dict(num_hidden_layers=1, moe_intermediate_size=16, first_k_dense_replace=1, n_routed_experts=4, n_group=1, topk_group=1)
    heads = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes, **heads, num_key_value_heads=4))


def gemma2() -> nn.Module:
    return make("Gemma2", head_dim=8, query_pre_attn_scalar=8, sliding_window=5, attn_logit_softcapping=0.5)


def gpt_oss() -> nn.Module:
    return make("GptOss", head_dim=8, sliding_window=5, num_local_experts=2, num_experts_per_tok=2)


def two_decoders() -> nn.Module:
    return nn.ModuleList([llama(num_hidden_layers=1), llama(num_hidden_layers=1)])


def own_attention() -> nn.Module:
    """Its layers look like Llama's, and never ask Transformers' interface for a function."""

    class OwnAttention(transformers.models.llama.modeling_llama.LlamaAttention):
        def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
            return self.o_proj(self.q_proj(hidden_states)), None

    model = llama()
    for layer in model.model.layers:
        layer.self_attn.__class__ = OwnAttention
    return model


def converted() -> nn.Module:
    return convert(llama())


@pytest.mark.parametrize(
    ("build_model", "options", "kind", "message"),
    [
        pytest.param(lambda: "gpt2", dict(keep=4), TypeError, r"model: expected a torch.nn.Module, received str", id="no-module"),
        pytest.param(llama, dict(keep=2.0), TypeError, "keep: expected an integer, received float", id="keep-float"),
        pytest.param(llama, dict(keep=True), TypeError, "keep: expected an integer, received bool", id="keep-bool"),
        pytest.param(llama, dict(keep=0), ValueError, "keep: expected at least 1, received 0", id="keep-none"),
        pytest.param(llama, dict(keep=4, layers=1), TypeError, "layers: expected integers or None, received int", id="layers-int"),
        pytest.param(llama, dict(keep=4, layers="01"), TypeError, "layers: expected integers or None, received str", id="layers-str"),
        pytest.param(llama, dict(keep=4, layers=[1.0]), TypeError, "layers: expected an integer, received float", id="layer-float"),
        pytest.param(llama, dict(keep=4, layers=[]), ValueError, "layers: expected at least one layer", id="layers-empty"),
        pytest.param(
            llama, dict(keep=4, layers=[0, 2]), ValueError, r"layers: expected numbers out of \[0, 1\], received 2$", id="no-such-layer"
        ),
        pytest.param(
            half_windowed,
            dict(keep=4, layers=[1, 2]),
            ValueError,
            r"out of \[1, 3\], received 2, which attends within a window",
            id="layer-window",
        ),
        pytest.param(converted, dict(keep=4), ValueError, "model: expected a model that is not converted", id="converted"),
        pytest.param(doge, dict(keep=4), ValueError, r"dmattn.integrations.doge.enable\(model\) lets a Doge", id="doge"),
        pytest.param(
            two_decoders, dict(keep=4), ValueError, "model: expected one decoder, received a ModuleList with several", id="two-decoders"
        ),
        pytest.param(lambda: nn.Linear(2, 2), dict(keep=4), ValueError, "received a Linear: no causal layer was found", id="linear"),
        pytest.param(own_attention, dict(keep=4), ValueError, "no causal layer was found", id="off-the-interface"),
        pytest.param(t5, dict(keep=4), ValueError, "received a T5ForConditionalGeneration: ", id="t5"),
        pytest.param(latent, dict(keep=4), ValueError, "DeepseekV3Attention has none of v_proj, qkv_proj", id="latent-values"),
        pytest.param(
            lambda: make("Mistral", sliding_window=5), dict(keep=4), ValueError, "MistralAttention attends within a window", id="window"
        ),
        pytest.param(gemma2, dict(keep=4), ValueError, "Gemma2Attention caps its scores", id="softcap"),
        pytest.param(gpt_oss, dict(keep=4), ValueError, "GptOssAttention has attention sinks", id="sinks"),
    ],
)
def test_what_cannot_be_converted_is_named(build_model: Callable, options: dict[str, Any], kind: type, message: str) -> None:
    model = build_model()
    with pytest.raises(kind, match=message):
        integration.convert_to_dynamic_mask(model, **options)
    if build_model is llama:
        assert not hasattr(model.config, "dynamic_mask")
        assert not any("dynamic_mask" in name for name in model.state_dict())


def test_what_cannot_be_reverted_is_named() -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, received str"):
        integration.revert_dynamic_mask("gpt2")
    with pytest.raises(ValueError, match="model: expected one that convert_to_dynamic_mask was called on, received a Llama"):
        integration.revert_dynamic_mask(llama())
    model = converted()
    model.model.layers[0].self_attn.dynamic_mask = nn.Sequential(model.model.layers[0].self_attn.dynamic_mask)
    with pytest.raises(ValueError, match=r"model: expected a model without adapters, .* whose dynamic_mask is a Sequential"):
        integration.revert_dynamic_mask(model)


# One call, which the interpreter can take


@pytest.mark.parametrize("dynamic", [True, False])
def test_an_attention_call_equals_the_formula(dynamic: bool) -> None:
    layer = convert(llama(), keep=3).model.layers[0].self_attn
    if not dynamic:
        del layer.dynamic_mask, layer.config.dynamic_mask
    random = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, heads, length, 8, generator=random, requires_grad=True) for heads, length in ((4, 5), (2, 9), (2, 9)))
    real = torch.ones(1, 7, dtype=torch.bool)  # two more slots are in the cache
    real[0, :2] = False
    visible = torch.ones(5, 7, dtype=torch.bool).tril(2) & real[:, None, None]
    out, weights = converted_layer.attend_converted(layer, query, key, value, real, scaling=0.3)
    want, _ = by_formula(layer, query, key[:, :, :7], value[:, :, :7], visible, scaling=0.3)
    assert weights is None
    assert error(out, want) <= TOLERANCE * largest(want)
    weight = torch.randn(out.shape, generator=random)
    leaves = (query, key, value, *(layer.dynamic_mask.parameters() if dynamic else ()))
    for got, expected in zip(*(torch.autograd.grad((result * weight).sum(), leaves) for result in (out, want)), strict=True):
        assert error(got, expected) <= TOLERANCE * largest(expected)


def test_report_tells_converted_layers_apart() -> None:
    model = llama()
    layers = integration.report(model)[0].layers
    integration.convert_to_dynamic_mask(model, keep=KEEP, layers=[1])
    assert integration.report(model) == [("LlamaAttention", layers - 1, "routed"), ("LlamaAttention", 1, "dynamic mask")]
