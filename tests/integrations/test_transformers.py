"""Random-weight Transformers models give eager's logits, loss and parameter gradients through dmattn, by the rule of models.py."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from conftest import NEEDS_CUDA, in_a_full_run, needs_cuda
from models import (
    LENGTH,
    PADDING,
    TOLERANCE,
    VOCABULARY,
    Step,
    assert_equal_steps,
    batch_for,
    build,
    cost_of_rounding,
    error,
    gradients_of,
    largest,
    train_step,
    with_truth,
)
from torch import Tensor, nn

import dmattn
from dmattn.execution.backend import interpreting

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from dmattn.integrations import transformers as integration  # noqa: E402

SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)

slow_interpreted = pytest.mark.skipif(interpreting(), reason="hundreds of small calls; the interpreter takes milliseconds for each tile")


pytestmark = pytest.mark.usefixtures("registered")


def llama(**changes) -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0, **changes)
    return build(transformers.LlamaForCausalLM, config)


def bert() -> nn.Module:
    config = transformers.BertConfig(**SIZES, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    return build(transformers.BertForMaskedLM, config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=None,
    )
    return build(transformers.T5ForConditionalGeneration, config)


def mistral() -> nn.Module:
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=5, pad_token_id=0)
    return build(transformers.MistralForCausalLM, config)


def gemma2() -> nn.Module:
    config = transformers.Gemma2Config(
        **SIZES, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, sliding_window=5, attn_logit_softcapping=0.5, pad_token_id=0
    )
    return build(transformers.Gemma2ForCausalLM, config)


def gpt_oss() -> nn.Module:
    config = transformers.GptOssConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, sliding_window=5, num_local_experts=2, num_experts_per_tok=2, pad_token_id=0
    )
    return build(transformers.GptOssForCausalLM, config)


@dataclass(frozen=True)
class Family:
    """A model, how many attention layers it has, and why it is here."""

    name: str
    build: Callable[[], nn.Module]
    layers: int
    reason: str


FAMILIES = (
    Family("llama", llama, 2, "rotary embedding, two query heads per key-value head, causal mask"),
    Family("bert", bert, 2, "bidirectional, padding alone in its mask"),
    Family("t5", t5, 6, "relative bias with a gradient, scale 1, cross attention"),
    Family("mistral", mistral, 2, "sliding window inside the mask"),
    Family("gemma2", gemma2, 2, "softcap; window and full attention by turns"),
    Family("gpt-oss", gpt_oss, 2, "attention sinks with a gradient"),
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_training_step_equals_eager(family: Family, padding: str, device: str, calls: list[dict]) -> None:
    if interpreting() and padding == "right" and family.name != "t5":
        pytest.skip("the interpreter is slow, and left padding covers the same kernels")
    model = family.build().to(device)
    batch = batch_for(model, padding, device)
    eager = train_step(model, batch)
    with integration.using(model):
        ours = train_step(model, batch)
    assert len(calls) == family.layers
    assert_equal_steps(ours, eager)
    assert set(ours.gradients) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("padding", ["left"])
@needs_cuda
def test_a_bfloat16_step_is_as_exact_as_eager(family: Family, padding: str) -> None:
    """Truth is eager in float32 with the same rounded weights; ours may err twice as much as eager in bfloat16, plus four roundings."""
    model = family.build().to("cuda", torch.bfloat16)
    batch = batch_for(model, padding, "cuda")
    eager = train_step(model, batch)
    truth = train_step(copy.deepcopy(model).float(), batch)
    with integration.using(model):
        ours = train_step(model, batch)
    band = 4 * 2.0**-8
    pairs = [(ours.logits, eager.logits, truth.logits), (ours.loss, eager.loss, truth.loss)]
    pairs += [(ours.gradients[name], eager.gradients[name], truth.gradients[name]) for name in truth.gradients]
    floor = 0.05 * max(map(largest, truth.gradients.values()))  # a key's projection bias has none but cancelled gradient
    for got, plain, want in pairs:
        assert error(got, want) <= 2 * error(plain, want) + band * max(largest(want), floor)


@pytest.mark.parametrize("padding", PADDING)
def test_the_relative_bias_of_t5_learns(padding: str) -> None:
    """Encoder and decoder tables receive a gradient, and it is eager's."""
    model = t5()
    batch = batch_for(model, padding)
    eager = train_step(model, batch)
    with integration.using(model):
        ours = train_step(model, batch)
    tables = [name for name in ours.gradients if "relative_attention_bias" in name]
    assert len(tables) == 2
    for name in tables:
        assert largest(ours.gradients[name]) > 1e-3
        assert error(ours.gradients[name], eager.gradients[name]) <= TOLERANCE * largest(eager.gradients[name])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_models_can_tell_a_wrong_attention(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison has teeth: an attention that forgets mask, bias and softcap fails it."""
    model = family.build()
    batch = batch_for(model, "left")
    eager = train_step(model, batch)
    forgetful = lambda query, key, value, scale=None, return_lse=False, **_: dmattn.attention(  # noqa: E731
        query, key, value, scale=scale, return_lse=return_lse
    )
    monkeypatch.setattr(integration.attention, "attention", forgetful)
    with integration.using(model):
        ours = train_step(model, batch)
    with pytest.raises(AssertionError):
        assert_equal_steps(ours, eager)


@pytest.mark.skipif(interpreting(), reason="the interpreter computes bfloat16 wrongly")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_autocast_unifies_the_dtypes_of_rotary_models(device: str) -> None:
    """Under autocast Llama passes q and k in float32 and v in bfloat16."""
    model = llama().to(device)
    batch = batch_for(model, "left", device)
    truth = train_step(model, batch)

    def autocast_step() -> Step:
        with torch.autocast(device, torch.bfloat16):
            return train_step(model, batch)

    eager = autocast_step()
    with integration.using(model):
        ours = autocast_step()
    assert error(ours.logits, truth.logits) <= 2 * error(eager.logits, truth.logits) + 4 * 2.0**-8 * largest(truth.logits)


def test_a_model_that_asks_for_no_mask_equals_eager(calls: list[dict]) -> None:
    """CLIP's image tower: no mask, and its layers say that they are not causal."""
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    model = build(transformers.CLIPVisionModel, transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=2, num_channels=1))
    pixels = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    eager = model(pixels).last_hidden_state
    model.set_attn_implementation("dmattn")
    assert error(model(pixels).last_hidden_state, eager) <= TOLERANCE * largest(eager)
    assert len(calls) == 2
    assert all(call["mask"] is None and not call["causal"] for call in calls)


def test_the_relative_bias_of_swin_learns(calls: list[dict]) -> None:
    """Swin passes its bias, and its shifted windows, as one float mask with a gradient."""
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, num_channels=1, embed_dim=16, depths=[2], num_heads=[2], window_size=4, drop_path_rate=0.0
    )
    model = build(transformers.SwinModel, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_position_bias_table" in name:
                parameter.normal_()
    pixels = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(2, 16, generator=torch.Generator().manual_seed(2))

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Step:
        pooled = model(batch["pixels"]).pooler_output
        loss = (pooled * batch["weight"]).sum()
        loss.backward()
        return Step(pooled.detach(), loss.detach(), gradients_of(model))

    batch = dict(pixels=pixels, weight=weight)
    eager = with_truth(step, model, batch)
    with integration.using(model):
        ours = with_truth(step, model, batch)
    assert len(calls) == 2
    assert all(call["bias"].requires_grad for call in calls)
    tables = [name for name in ours.gradients if "relative_position_bias_table" in name]
    assert len(tables) == 2
    assert all(largest(ours.gradients[name]) > 1e-3 for name in tables)
    assert_equal_steps(ours, eager)


@pytest.mark.parametrize("kind", ["bool", "float", "learned"])
def test_a_mask_of_the_users_own(kind: str) -> None:
    """A 4-axis mask reaches the attention untouched: bool as a mask, float as a bias that may learn."""
    model = llama()
    batch = batch_for(model, "none")
    random = torch.Generator().manual_seed(2)
    keep = (torch.rand(2, 1, LENGTH, LENGTH, generator=random) < 0.7) | torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    if kind == "learned":
        added = torch.randn(1, 4, LENGTH, LENGTH, generator=random).requires_grad_()
    eager = train_step(model, batch | dict(attention_mask=added))
    gradient, added.grad = added.grad, None
    with integration.using(model):
        ours = train_step(model, batch | dict(attention_mask=keep if kind == "bool" else added))
    assert_equal_steps(ours, eager)
    if kind == "learned":
        assert largest(gradient) > 1e-4
        assert error(added.grad, gradient) <= TOLERANCE * largest(gradient)


@slow_interpreted
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_greedy_generation_gives_the_tokens_of_eager(family: Family, cache: str, device: str) -> None:
    if family.name == "bert":
        pytest.skip("BERT does not generate")
    if cache == "static" and device == "cuda":
        pytest.skip("Transformers compiles the model there, which is another test's subject")
    model = family.build().to(device).eval()
    batch = batch_for(model, "left", device)
    del batch["labels"]
    settings = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, cache_implementation=cache)
    eager = model.generate(**batch, **settings)
    with integration.using(model):
        ours = model.generate(**batch, **settings)
    assert eager.shape[1] >= 9
    assert torch.equal(ours, eager)


@pytest.mark.skipif(interpreting(), reason="torch.compile and Triton's interpreter do not combine")
@pytest.mark.parametrize(
    ("make", "padding", "device"),
    [
        (llama, "none", "cpu"),
        pytest.param(llama, "left", "cpu", marks=in_a_full_run),
        pytest.param(t5, "none", "cpu", marks=in_a_full_run),
        (t5, "left", "cpu"),
        *(pytest.param(make, padding, "cuda", marks=NEEDS_CUDA) for make in (llama, t5) for padding in ("none", "left")),
    ],
)
def test_a_compiled_model_has_no_graph_break(make: Callable[[], nn.Module], padding: str, device: str) -> None:
    """The whole model is one graph, forward and backward. On a CPU it runs as traced, without inductor's C++ compiler.

    Inductor has a float32 arithmetic of its own. So the cost of rounding is that of plain PyTorch, or of plain PyTorch compiled likewise.
    """
    model = make().to(device)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False  # Transformers 5.17 builds T5's cache in a way that cannot be traced
    batch = batch_for(model, padding, device)
    plain = train_step(model, batch)
    if device == "cuda":
        compiled = compiled_step(model, batch, "inductor")
        plain = max(plain, replace(compiled, truth=plain.truth), key=lambda step: cost_of_rounding(step.tensors, step.truth.tensors))
    integration.enable(model)
    assert_equal_steps(compiled_step(model, batch, "inductor" if device == "cuda" else "aot_eager"), plain)


def compiled_step(model: nn.Module, batch: dict[str, Tensor], backend: str) -> Step:
    """A step of the model as one graph."""
    torch.compiler.reset()
    forward = model.forward
    model.forward = torch.compile(forward, fullgraph=True, backend=backend)
    try:
        return train_step(model, batch, plain=False)
    finally:
        model.forward = forward


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        pytest.param("BloomForCausalLM", dict(hidden_size=32, n_layer=2, n_head=4), id="bloom"),
        pytest.param("MptForCausalLM", dict(d_model=32, n_layers=2, n_heads=4, max_seq_len=32), id="mpt"),
        pytest.param(
            "MPNetForMaskedLM",
            dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48),
            id="mpnet",
        ),
    ],
)
def test_a_model_off_the_interface_keeps_its_own_attention(kind: str, config: dict, calls: list[dict]) -> None:
    """It accepts the name without using it; a bool mask would give it wrong logits."""
    model_type = getattr(transformers, kind)
    settings = model_type.config_class(vocab_size=VOCABULARY, **config)
    eager = build(model_type, settings).eval()
    ours = model_type._from_config(copy.deepcopy(settings), attn_implementation="dmattn").eval()
    ours.load_state_dict(eager.state_dict())
    batch = batch_for(eager, "right")
    integration.masks._known.pop(model_type.__module__, None)
    with pytest.warns(UserWarning, match=r"modeling_\w+ does not use Transformers' attention interface; .*, until .*patch\(model\) is called"):
        logits = ours(**batch).logits
    assert torch.equal(logits, eager(**batch).logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours(**batch)
    assert not calls
    with pytest.raises(ValueError, match=f"model: expected a model with layers that use .* received {kind} with"):
        integration.enable(eager)
    assert eager.config._attn_implementation == "eager"


@pytest.mark.skipif(interpreting(), reason="about imports, which are the same in both halves")
def test_importing_dmattn_does_not_import_transformers() -> None:
    code = "import sys, dmattn, dmattn.integrations; assert not any(name.split('.')[0] == 'transformers' for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_register_and_unregister_can_be_repeated() -> None:
    integration.register()
    model = llama()
    model.set_attn_implementation("dmattn")
    for _ in range(2):
        integration.unregister()
        assert "dmattn" not in transformers.AttentionInterface()
        assert "dmattn" not in transformers.AttentionMaskInterface()
    with pytest.raises(KeyError, match="dmattn"):
        model(**batch_for(model, "none"))
    with pytest.raises(ValueError, match="dmattn"):
        llama().set_attn_implementation("dmattn")
    with pytest.raises(ValueError, match="dmattn") as raised:
        transformers.LlamaForCausalLM._from_config(llama().config, attn_implementation="dmattn")
    (quoted,) = re.findall(r"``(Specified .*?)``", (Path(__file__).parents[2] / "docs" / "errors.md").read_text())
    assert str(raised.value).startswith(quoted)
    integration.register()
    assert model(**batch_for(model, "none")).logits.isfinite().all()


def implementations(model: nn.Module) -> set[str]:
    return {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}


def test_enable_reaches_every_inner_model_and_disable_undoes_it() -> None:
    model = t5()
    model.decoder.config._attn_implementation = "sdpa"
    for _ in range(2):
        integration.enable(model)
        assert implementations(model) == {"dmattn"}
    with integration.using(model):
        assert implementations(model) == {"dmattn"}
    assert implementations(model) == {"dmattn"}
    integration.disable(model)
    assert model.config._attn_implementation == model.encoder.config._attn_implementation == "eager"
    assert model.decoder.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="model: expected a model that enable"):
        integration.disable(model)
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, received str"):
        integration.enable("t5")


@pytest.mark.parametrize("part", ["encoder.block", "encoder.block.0", "encoder.block.0.layer.0.SelfAttention"])
def test_enable_refuses_layers_whose_setting_lies_in_a_model_around_them(part: str) -> None:
    model = t5()
    layers = model.get_submodule(part)
    message = rf"model: expected a PreTrainedModel or .* received {type(layers).__name__} with T5Attention \(routed\); pass the model that holds them$"
    with pytest.raises(ValueError, match=message):
        integration.enable(layers)
    with pytest.raises(ValueError, match=message), integration.using(layers):
        pass
    with integration.using(nn.Sequential(model.encoder)):
        assert model.encoder.config._attn_implementation == "dmattn"


def test_using_restores_after_an_error() -> None:
    model = t5()
    with pytest.raises(KeyError), integration.using(model):
        raise KeyError
    assert implementations(model) == {"eager"}


class Layer(nn.Module):
    """A stand-in for an attention layer."""

    def __init__(self, is_causal: bool | None = None) -> None:
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def random_qkv(len_q: int = 5, len_k: int = 5) -> list[Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randn(2, heads, length, 8, generator=random) for heads, length in ((4, len_q), (2, len_k), (2, len_k))]


def test_without_a_mask_the_layer_says_whether_it_is_causal() -> None:
    qkv = random_qkv()
    causal, full = (dmattn.attention(*qkv, causal=flag).transpose(1, 2) for flag in (True, False))
    for layer, flag, want in (
        (Layer(True), None, causal),
        (Layer(False), None, full),
        (Layer(False), True, causal),
        (Layer(True), False, full),
    ):
        out, weights = integration.attend(layer, *qkv, None, is_causal=flag)
        assert weights is None
        assert out.is_contiguous()
        assert torch.equal(out, want)


def test_without_a_mask_a_single_query_attends_everything() -> None:
    qkv = random_qkv(len_q=1)
    out, _ = integration.attend(Layer(True), *qkv, None)
    assert torch.equal(out, dmattn.attention(*qkv).transpose(1, 2))
    assert torch.equal(integration.attend(Layer(), *qkv, None)[0], out)


def test_without_a_mask_the_sliding_window_is_applied() -> None:
    query, key, value = random_qkv()
    out, _ = integration.attend(Layer(True), query, key, value, None, sliding_window=2)
    mask = torch.ones(5, 5, dtype=torch.bool).tril().triu(-1)
    assert error(out, dmattn.attention(query, key, value, mask=mask).transpose(1, 2)) <= 1e-6


def test_with_a_mask_the_sliding_window_and_causality_are_inside_it() -> None:
    qkv = random_qkv()
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    out, _ = integration.attend(Layer(True), *qkv, mask, sliding_window=2, is_causal=True, position_ids=None, use_cache=False)
    assert torch.equal(out, dmattn.attention(*qkv, mask=mask).transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_float_mask_and_a_position_bias_add_up(dtype: torch.dtype) -> None:
    """The lowest float16 plus a bias would be -inf in float16. Both get their gradient, as does a row with no key left."""
    qkv = random_qkv()
    random = torch.Generator().manual_seed(4)
    lowest = torch.finfo(dtype).min
    mask = torch.randn(2, 1, 5, 5, generator=random).to(dtype)
    mask[:, :, 1:4, 3] = lowest
    mask[0, :, 4] = lowest
    bias = torch.randn(1, 4, 5, 5, generator=random).to(dtype)
    bias[..., 2, 1] = lowest
    mask.requires_grad_()
    bias.requires_grad_()
    out, _ = integration.attend(Layer(), *qkv, mask, position_bias=bias, scaling=1.0)
    weight = torch.randn(out.shape, generator=random)
    weight[0, 4] = 0  # a row without a key: its value is each implementation's own
    got = torch.autograd.grad((out * weight).sum(), (mask, bias))
    wide = [x.detach().double().requires_grad_() for x in (mask, bias)]
    query, key, value = (x.double() for x in qkv)
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) + wide[0] + wide[1]
    want_out = (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
    want = torch.autograd.grad((want_out * weight.double()).sum(), wide)
    assert out.isfinite().all()
    assert error(out[1], want_out[1]) <= 1e-5
    assert error(out[0, :4], want_out[0, :4]) <= 1e-5
    for got_gradient, want_gradient in zip(got, want, strict=True):
        assert got_gradient.dtype == dtype
        assert error(got_gradient, want_gradient) <= (2e-3 if dtype == torch.float16 else 1e-5)


def test_sinks_take_part_in_the_softmax() -> None:
    """Against the sink as one more key whose value is zero; a row with no key gives zero, and every gradient is finite."""
    qkv = [x.requires_grad_() for x in random_qkv()]
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(5), requires_grad=True)
    mask = torch.ones(5, 5, dtype=torch.bool).tril(-1)[None, None]
    out, _ = integration.attend(Layer(), *qkv, mask, s_aux=sinks)
    query, key, value = qkv
    scores = (query @ key.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5).masked_fill(~mask, float("-inf"))
    weights = torch.cat([scores, sinks[None, :, None, None].expand(2, 4, 5, 1)], -1).softmax(-1)[..., :-1]
    want = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    assert error(out, want) <= 1e-5
    assert not out[:, 0].any()
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(6))
    inputs = (*qkv, sinks)
    got_gradients, want_gradients = (torch.autograd.grad((result * weight).sum(), inputs) for result in (out, want))
    for got, expected in zip(got_gradients, want_gradients, strict=True):
        assert error(got, expected) <= 1e-5


def test_sinks_of_a_model_are_those_of_attention(calls: list[dict]) -> None:
    """In each layer, as its parameters are; out is not scaled by lse afterwards."""
    model = gpt_oss().eval()
    with integration.using(model):
        model(input_ids=torch.arange(6)[None])
    sinks = [layer.self_attn.sinks for layer in model.model.layers]
    assert [call["sinks"] is sink for call, sink in zip(calls, sinks, strict=True)] == [True] * len(sinks)
    assert not any(call.get("return_lse") for call in calls)


def attend(layer: nn.Module | None = None, lengths: tuple[int, int] = (5, 5), **arguments) -> tuple[Tensor, Tensor | None]:
    mask = arguments.pop("attention_mask", torch.ones(2, 1, *lengths, dtype=torch.bool))
    return integration.attend(layer or Layer(False), *random_qkv(*lengths), mask, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(dict(dropout=1.1), "dropout_p: expected a number from 0 to 1, received 1.1", id="dropout"),
        pytest.param(dict(output_attentions=True), "output_attentions: expected False", id="weights"),
        pytest.param(dict(head_mask=torch.ones(4)), "head_mask: expected None", id="head-mask"),
        pytest.param(dict(cache=object()), "cache: expected None", id="paged-cache"),
        pytest.param(dict(s_aux=torch.zeros(3)), r"s_aux: expected shape \(H,\) = \(4,\), received \(3,\)", id="sinks-of-other-heads"),
        pytest.param(dict(attention_mask=torch.ones(2, 5)), r"attention_mask: expected 4 axes .* \(2, 5\)", id="mask-of-two-axes"),
        pytest.param(
            dict(attention_mask=torch.ones(2, 1, 5, 5, dtype=torch.long)), "attention_mask: expected a bool .* torch.int64", id="integer-mask"
        ),
        pytest.param(
            dict(attention_mask=torch.ones(2, 1, 5, 7, dtype=torch.bool)), r"mask: expected a shape .* \(2, 1, 5, 7\)", id="longer-mask"
        ),
        pytest.param(
            dict(attention_mask=torch.ones(2, 1, 5, 3, dtype=torch.bool)), r"mask: expected a shape .* \(2, 1, 5, 3\)", id="shorter-mask"
        ),
        pytest.param(
            dict(attention_mask=None, layer=Layer(True), lengths=(3, 5)), "attention_mask: expected a mask, .* 3 queries to 5", id="alignment"
        ),
        pytest.param(dict(attention_mask=None, layer=Layer()), "is_causal: expected True or False .* of Layer", id="causal-unknown"),
        pytest.param(dict(attention_mask=None, sliding_window=2), "attention_mask: expected a mask, as a sliding window", id="window"),
        pytest.param(dict(attention_mask=None, cu_seq_lens_q=torch.tensor([0, 5])), "cu_seq_lens_q: expected a batch of 1", id="packed-batch"),
    ],
)
def test_what_is_not_supported_raises(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(**arguments)


def test_a_mask_that_is_no_tensor_raises() -> None:
    with pytest.raises(TypeError, match=r"attention_mask: expected a torch\.Tensor or None, received str"):
        attend(attention_mask="causal")


def test_dropout_is_ignored_in_evaluation() -> None:
    torch.manual_seed(0)
    dropped, _ = attend(Layer(False).eval(), dropout=0.1)
    torch.manual_seed(0)
    kept, _ = attend(Layer(False).eval())
    assert torch.equal(dropped, kept)


@pytest.mark.skipif(interpreting(), reason="the interpreter computes bfloat16 wrongly")
def test_dtypes_that_differ_without_autocast_raise() -> None:
    query, key, value = random_qkv()
    for context, raises in ((nullcontext(), True), (torch.autocast("cpu", torch.bfloat16), False)):
        with context, pytest.raises(ValueError, match="value: expected query's dtype") if raises else nullcontext():
            integration.attend(Layer(False), query, key, value.bfloat16(), None)


def test_dropout_while_training_is_that_of_the_library() -> None:
    qkv, mask = random_qkv(), torch.ones(2, 1, 5, 5, dtype=torch.bool)
    torch.manual_seed(0)
    want = dmattn.attention(*qkv, mask=mask, dropout_p=0.4)
    torch.manual_seed(0)
    got, _ = integration.attend(Layer(False).train(), *qkv, mask, dropout=0.4)
    assert torch.equal(got, want.transpose(1, 2))


@slow_interpreted
def test_a_model_trains_with_attention_dropout() -> None:
    """Evaluation is eager's; training drops other weights than eager, and the mean of many losses is the same."""
    model = llama(attention_dropout=0.3)
    batch = batch_for(model, "left")
    losses: dict[str, list[float]] = {}
    torch.manual_seed(0)
    for name in ("eager", "dmattn"):
        model.set_attn_implementation(name)
        losses[name] = [model.train()(**batch).loss.item() for _ in range(60)]
        losses[f"{name} whole"] = [model.eval()(**batch).loss.item()]
    means = {name: sum(values) / len(values) for name, values in losses.items()}
    deviations = {name: torch.tensor(losses[name]).std().item() for name in ("eager", "dmattn")}
    assert abs(means["eager whole"] - means["dmattn whole"]) <= TOLERANCE * means["eager whole"]
    assert deviations["dmattn"] > 1e-3
    assert abs(means["eager"] - means["dmattn"]) < 5 * deviations["eager"] * (2 / 60) ** 0.5
    model.train()
    model.zero_grad()
    model(**batch).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_weights_that_a_layer_is_not_told_of_are_refused() -> None:
    """SigLIP's layers get no keyword of the call; the model collects what they return."""
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    model = build(transformers.SiglipVisionModel, transformers.SiglipVisionConfig(**sizes, image_size=8, patch_size=2, num_channels=1))
    pixels = torch.randn(2, 1, 8, 8)
    assert len(model(pixels, output_attentions=True).attentions) == 2
    with integration.using(model), pytest.raises(ValueError, match="output_attentions: expected False"):
        model(pixels, output_attentions=True)


def test_padding_beyond_a_window_is_what_differs_from_eager() -> None:
    """Right padding and a window of 5: from the fifth padded token on nothing real is in sight, and eager gives the mean of all values."""
    model = mistral().eval()
    tokens, real = batch_for(model, "none")["input_ids"], torch.ones(2, LENGTH, dtype=torch.long)
    real[0, -6:] = 0
    logits = {}
    for name in ("eager", "sdpa", "dmattn"):
        model.set_attn_implementation(name)
        logits[name] = model(tokens * real, attention_mask=real).logits
    off = (logits["dmattn"] - logits["eager"]).abs().amax(-1)
    assert (off > 1e-3).nonzero().tolist() == [[0, LENGTH - 2], [0, LENGTH - 1]]
    assert error(logits["dmattn"], logits["sdpa"]) <= TOLERANCE * largest(logits["sdpa"])


def test_continuous_batching_is_refused_by_name() -> None:
    """By Transformers, whose list of implementations for paged caches is its own."""
    model = llama(eos_token_id=None).eval()
    model.set_attn_implementation("dmattn")
    options = transformers.GenerationConfig(max_new_tokens=2, eos_token_id=None, pad_token_id=0)
    with pytest.raises(ValueError, match=r"dmattn.* is not supported"):
        model.generate_batch([[1, 2, 3]], generation_config=options)
