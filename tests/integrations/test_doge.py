"""Doge through DynamicMaskAttention gives the logits, loss, gradients and tokens of Transformers' own Doge.

The rule of test_transformers.py: a tensor may differ by 2e-5 of its largest entry in float32. Scores must differ from key to key: of equal
scores Doge keeps whichever `torch.topk` returns, which no one can match. All scores of a head are equal at initialisation, where A is 0;
and in the first layer, whose values do not know their position, wherever a token is repeated. So A is random and tokens do not repeat; the
tests of ties compare with a Doge whose top-k is told to keep the later key.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from conftest import NEEDS_CUDA
from models import PADDING, TOLERANCE, VOCABULARY, Step, assert_equal_steps, distinct_batch, error, largest, train_step
from test_examples import load
from torch import Tensor, nn

from dmattn import DynamicMaskAttention
from dmattn.execution.backend import interpreting

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from transformers.models.doge import modeling_doge  # noqa: E402

from dmattn.integrations import doge  # noqa: E402
from dmattn.integrations import transformers as integration  # noqa: E402

pytestmark = pytest.mark.skipif(interpreting(), reason="whole models; the interpreter takes milliseconds for each tile")

everywhere = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
LENGTH, KEEP = 23, 6


def config_of(**changes: Any) -> transformers.DogeConfig:
    sizes = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    rest = dict(intermediate_size=48, keep_window_size=KEEP, max_position_embeddings=128, pad_token_id=0, attn_implementation="eager")
    return transformers.DogeConfig(**(sizes | rest | changes))


def randomise(module: nn.Module, A: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.split(".")[-1] == "A":
                parameter.copy_(torch.linspace(A, -0.7 * A, len(parameter)))
            elif parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                torch.nn.init.normal_(parameter, std=0.2)
    return module


def model_of(A: float = 1.0, **changes: Any) -> nn.Module:
    return randomise(transformers.DogeForCausalLM._from_config(config_of(**changes), attn_implementation="eager"), A).train()


@pytest.fixture
def later_key_wins() -> Iterator[None]:
    """Doge's top-k keeps the later of equal scores."""
    with load("train_doge").later_key_wins():
        yield


class Layers(NamedTuple):
    """One layer of Transformers, ours with its weights, and what both take."""

    eager: nn.Module
    ours: DynamicMaskAttention
    tokens: Tensor
    rotation: tuple[Tensor, Tensor]
    real: Tensor  # bool, (B, S)

    def run_eager(self) -> Tensor:
        length = self.tokens.shape[1]
        attends = torch.ones(length, length, dtype=torch.bool).tril() & self.real[:, None, None]
        mask = torch.zeros(attends.shape, dtype=self.tokens.dtype).masked_fill(~attends, torch.finfo(self.tokens.dtype).min)
        return self.eager(self.tokens, position_embeddings=self.rotation, attention_mask=mask)[0]

    def run_ours(self) -> Tensor:
        return self.ours(self.tokens, position_embeddings=self.rotation, attention_mask=self.real)

    def step(self, run: Callable[[], Tensor]) -> Step:
        """Output at real tokens, and the gradients of a weighted sum of it."""
        module = self.eager if run == self.run_eager else self.ours
        out = run()[self.real]
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
        loss = (out * weight).sum()
        leaves = dict(module.named_parameters()) | dict(tokens=self.tokens)
        return Step(out.detach(), loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)))


def layers_of(padding: str = "none", dtype: torch.dtype = torch.float32, A: float = 1.0, **changes: Any) -> Layers:
    config = config_of(**changes)
    eager = randomise(modeling_doge.DogeAttention(config, layer_idx=0), A).to(dtype)
    ours = DynamicMaskAttention(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        keep=config.keep_window_size,
        eps=config.rms_norm_eps,
        bias=config.attention_bias,
        dtype=dtype,
    )
    ours.load_state_dict(eager.state_dict(), strict=True)
    tokens = torch.randn(2, LENGTH, config.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    rotation = modeling_doge.DogeRotaryEmbedding(config)(tokens, torch.arange(LENGTH)[None])
    real = distinct_batch(padding).get("attention_mask", torch.ones(2, LENGTH)).bool()
    return Layers(eager, ours, tokens, rotation, real)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(dict(), id="grouped"),
        pytest.param(dict(num_key_value_heads=4), id="one-head-each"),
        pytest.param(dict(num_key_value_heads=1, attention_bias=True), id="one-key-head-biases"),
        pytest.param(dict(keep_window_size=LENGTH), id="keep-all"),
        pytest.param(dict(keep_window_size=2), id="keep-two"),
    ],
)
def test_a_layer_with_the_weights_of_doge_equals_it(changes: dict[str, Any], padding: str) -> None:
    layers = layers_of(padding, **changes)
    assert_equal_steps(layers.step(layers.run_ours), layers.step(layers.run_eager))


@pytest.mark.parametrize("keep", [KEEP - 1, KEEP + 1])
def test_one_key_more_or_less_is_told_apart(keep: int) -> None:
    layers = layers_of()
    layers.ours.keep = keep
    with pytest.raises(AssertionError):
        assert_equal_steps(layers.step(layers.run_ours), layers.step(layers.run_eager))


@pytest.mark.usefixtures("later_key_wins")
def test_ties_keep_the_later_key() -> None:
    """A = 0: every score of both heads is equal."""
    layers = layers_of("left", A=0.0)
    assert_equal_steps(layers.step(layers.run_ours), layers.step(layers.run_eager))


@pytest.mark.usefixtures("later_key_wins")
@pytest.mark.parametrize("mode", ["weights", "autocast"])
def test_bfloat16_selects_the_keys_of_doge(mode: str) -> None:
    """Scores in bfloat16 tie. Both layers compute the same scores, so they differ by the attention's own roundings only."""
    layers = layers_of("left", torch.bfloat16 if mode == "weights" else torch.float32, A=0.1)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        eager, ours = layers.run_eager()[layers.real], layers.run_ours()[layers.real]
        layers.ours.keep += 1
        other = layers.run_ours()[layers.real]
    allowed = 2 * 2.0**-8 * largest(eager)
    assert ours.dtype == eager.dtype == torch.bfloat16
    assert error(ours, eager) <= allowed
    assert error(other, eager) > 4 * allowed


@everywhere
@pytest.mark.parametrize("padding", PADDING)
def test_a_training_step_of_the_model_equals_eager(padding: str, device: str) -> None:
    model, batch = model_of().to(device), distinct_batch(padding, device=device)
    eager = train_step(model, batch)
    doge.enable(model)
    ours = train_step(model, batch)
    assert_equal_steps(ours, eager)
    assert set(ours.gradients) == {name for name, _ in model.named_parameters()}
    assert all(largest(gradient) > 0 for gradient in ours.gradients.values())


@pytest.mark.usefixtures("later_key_wins")
@pytest.mark.parametrize("A", [0.0, 1.0])
def test_repeated_tokens_keep_the_later_one(A: float) -> None:
    model, batch = model_of(A), distinct_batch("left", repeat=True)
    eager = train_step(model, batch)
    doge.enable(model)
    assert_equal_steps(train_step(model, batch), eager)


@everywhere
@pytest.mark.parametrize("padding", ["none", "left"])
def test_cached_generation_gives_the_tokens_of_eager(padding: str, device: str) -> None:
    model, batch = model_of().to(device).eval(), distinct_batch(padding, device=device)
    del batch["labels"]
    settings = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, no_repeat_ngram_size=1)
    eager = model.generate(**batch, **settings)
    doge.enable(model)
    assert torch.equal(model.generate(**batch, **settings), eager)
    assert torch.equal(model.generate(**batch, **settings, use_cache=False), eager)
    assert eager.shape == (2, LENGTH + 12)


@pytest.mark.parametrize("A", [0.0, 1.0])
def test_cached_logits_are_those_of_the_full_pass(A: float) -> None:
    """At A = 0 with nothing but ties, which Transformers' own Doge breaks by the length of the sequence.

    Elsewhere no token repeats: its values, of one product with a matrix or of several, would differ in their last bit and not tie.
    """
    model = model_of(A).eval()
    doge.enable(model)
    tokens = distinct_batch(repeat=A == 0)["input_ids"]
    full = model(tokens).logits
    cache, parts = transformers.DynamicCache(config=model.config), []
    for step in tokens.split([9, 3, *[1] * (LENGTH - 12)], 1):
        parts.append(model(step, past_key_values=cache, use_cache=True).logits)
    assert error(torch.cat(parts, 1), full) <= TOLERANCE * largest(full)


def test_no_mask_of_pairs_is_made() -> None:
    model, seen = model_of(), []
    doge.enable(model)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda _, args, call: seen.append(call["attention_mask"]), with_kwargs=True)
    model(**distinct_batch())
    assert seen == [None, None]
    batch = distinct_batch("left")
    model(**batch)
    assert all(torch.equal(mask, batch["attention_mask"].bool()) for mask in seen[2:])


def test_parameters_stay_the_same_objects_and_disable_returns_to_eager() -> None:
    model, batch = model_of(), distinct_batch("left")
    eager, parameters = train_step(model, batch), dict(model.named_parameters())
    doge.enable(model)
    enabled = dict(model.named_parameters())
    assert enabled.keys() == parameters.keys() == model.state_dict().keys()
    assert all(enabled[name] is parameters[name] for name in parameters)
    assert all(isinstance(layer.self_attn, DynamicMaskAttention) for layer in model.model.layers)
    model.eval()
    doge.disable(model)
    assert all(type(layer.self_attn) is modeling_doge.DogeAttention and not layer.self_attn.training for layer in model.model.layers)
    assert model.config._attn_implementation == "eager"
    again = train_step(model.train(), batch)
    assert torch.equal(again.logits, eager.logits)
    assert all(torch.equal(again.gradients[name], eager.gradients[name]) for name in parameters)


def attentions(model: nn.Module) -> set[type[nn.Module]]:
    return {type(layer.self_attn) for layer in model.model.layers}


def test_a_report_says_that_dynamic_masks_serve_an_enabled_model() -> None:
    """Layer by layer; a DynamicMaskAttention of one's own counts alike."""
    model = model_of()
    assert integration.report(model) == [("DogeAttention", 2, "routed")]
    doge.enable(model.model.layers[0])
    assert integration.report(model) == [("DogeAttention", 1, "dynamic mask"), ("DogeAttention", 1, "routed")]
    doge.enable(model)
    assert integration.report(model) == integration.report(pickle.loads(pickle.dumps(model))) == [("DogeAttention", 2, "dynamic mask")]
    doge.disable(model)
    assert integration.report(model) == [("DogeAttention", 2, "routed")]
    own = DynamicMaskAttention(hidden_size=8, num_heads=2, keep=4)
    assert integration.report(own) == [("DynamicMaskAttention", 1, "dynamic mask")]


def test_a_part_enabled_first_is_disabled_with_the_whole() -> None:
    model, tokens = model_of().eval(), distinct_batch()["input_ids"]
    eager = model(tokens).logits
    doge.enable(model.model.layers[0])
    with pytest.raises(ValueError, match="model: expected the whole model, as another part of it is enabled, received DogeDecoderLayer"):
        doge.enable(model.model.layers[1])
    doge.enable(model)
    assert error(model(tokens).logits, eager) <= TOLERANCE * largest(eager)
    doge.disable(model)
    assert attentions(model) == {modeling_doge.DogeAttention}
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(tokens).logits, eager)


def test_an_implementation_set_by_hand_stays() -> None:
    model = model_of()
    doge.enable(model)
    model.set_attn_implementation("sdpa")
    doge.disable(model)
    assert model.config._attn_implementation == "sdpa"


def test_an_implementation_set_since_is_named_when_it_brings_another_mask() -> None:
    model, tokens = model_of(), distinct_batch()["input_ids"]
    doge.enable(model)
    with pytest.raises(ValueError, match="received DogeForCausalLM that is enabled already"):
        doge.enable(model)
    integration.enable(model)
    with pytest.raises(ValueError, match=r"attn_implementation: expected 'dmattn_doge', received 'dmattn', set since doge\.enable"):
        model(tokens)
    integration.disable(model)
    model(tokens)


def test_an_enabled_layer_is_released() -> None:
    layer = model_of().model.layers[0]
    doge.enable(layer)
    left = weakref.ref(layer)
    del layer
    gc.collect()
    assert left() is None


def test_hooks_fire_on_whatever_computes() -> None:
    model, tokens, calls = model_of(), distinct_batch()["input_ids"], []
    attention = model.model.layers[0].self_attn
    before = attention.register_forward_hook(lambda *_: calls.append("before"))
    attention.A.register_hook(lambda _: calls.append("gradient"))
    doge.enable(model)
    enabled = model.model.layers[0].self_attn
    enabled.register_forward_hook(lambda *_: calls.append("while"))
    enabled.register_full_backward_hook(lambda *_: calls.append("backward"))
    model(tokens).logits.sum().backward()
    assert sorted(calls) == ["backward", "before", "gradient", "while"]
    before.remove()
    doge.disable(model)
    calls.clear()
    model(tokens).logits.sum().backward()
    assert sorted(calls) == ["backward", "gradient", "while"]


def test_disable_keeps_what_was_replaced_meanwhile() -> None:
    model = model_of()
    doge.enable(model)
    layer = model.model.layers[0].self_attn
    layer.A, layer.q_proj = nn.Parameter(torch.ones(2)), nn.Linear(32, 32)
    replaced = layer.A, layer.q_proj
    doge.disable(model)
    attention = model.model.layers[0].self_attn
    assert (attention.A, attention.q_proj) == replaced


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_copy_of_an_enabled_model_computes_the_same(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model, tokens = model_of().eval(), distinct_batch()["input_ids"]
    doge.enable(model)
    again = duplicate(model)
    assert again.model.layers[0].self_attn.A is not model.model.layers[0].self_attn.A
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    doge.disable(again)
    assert attentions(again) == {modeling_doge.DogeAttention}
    assert (again.config._attn_implementation, model.config._attn_implementation) == ("eager", doge.NAME)
    assert {id(parameter) for parameter in again.parameters()}.isdisjoint(map(id, model.parameters()))
    eager = again(tokens).logits
    assert error(eager, model(tokens).logits) <= TOLERANCE * largest(eager)
    doge.enable(again)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_gradient_checkpointing_changes_nothing() -> None:
    model, batch = model_of(), distinct_batch("left")
    doge.enable(model)
    plain = train_step(model, batch)
    model.gradient_checkpointing_enable()
    again = train_step(model, batch)
    assert torch.equal(again.logits, plain.logits)
    for name, gradient in plain.gradients.items():  # values get gradients from two sides, added in either order
        torch.testing.assert_close(again.gradients[name], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()), msg=name)


def test_a_compiled_model_has_no_graph_break() -> None:
    """One graph, forward and backward, which Transformers' own Doge is not."""
    model, batch = model_of(use_cache=False, num_hidden_layers=1), distinct_batch("left")
    eager = train_step(model, batch)
    doge.enable(model)
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert_equal_steps(train_step(model, batch), eager)


def test_what_the_layer_cannot_honour_is_named() -> None:
    model, tokens = model_of(), distinct_batch()["input_ids"]
    doge.enable(model)
    with pytest.raises(ValueError, match="attention_mask: expected a bool or integer tensor of shape"):
        model(tokens, attention_mask=torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool))
    with pytest.raises(ValueError, match="attention_mask: expected a causal model without sliding window or packed sequences"):
        model(tokens, position_ids=(torch.arange(LENGTH) % 9)[None], use_cache=False)
    static = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 5)
    with pytest.raises(ValueError, match=r"past_key_values: expected a cache that grows, received a StaticCache"):
        model(tokens, past_key_values=static)
    assert static.get_seq_length() == 0
    model.config.sliding_window = 4
    with pytest.raises(ValueError, match="attention_mask: expected a causal model without sliding window"):
        model(tokens)


@pytest.mark.parametrize("use_cache", [True, False])
def test_packed_sequences_are_refused(use_cache: bool) -> None:
    model, tokens = model_of(), distinct_batch()["input_ids"]
    doge.enable(model)
    with pytest.raises(ValueError, match="packed sequences"):
        model(tokens, position_ids=(torch.arange(LENGTH) % 9)[None], use_cache=use_cache)
    ends = torch.tensor([0, 9, LENGTH], dtype=torch.int32)
    for name, value in dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=14, max_length_k=14, seq_idx=tokens).items():
        with pytest.raises(ValueError, match=f"{name}: expected None, as packed sequences are not supported"):
            model(tokens, use_cache=use_cache, **{name: value})
    later = model(tokens, position_ids=torch.arange(5, 5 + LENGTH)[None], use_cache=use_cache).logits  # only differences count
    assert error(later, model(tokens, use_cache=use_cache).logits) <= TOLERANCE * largest(later)


def test_dropout_is_refused_while_training_only() -> None:
    model, tokens = model_of(attention_dropout=0.1), distinct_batch()["input_ids"]
    doge.enable(model)
    with pytest.raises(ValueError, match=r"attention_dropout: expected 0.0 while training, received 0.1"):
        model(tokens)
    assert model.eval()(tokens).logits.isfinite().all()


def test_wrong_models_are_named() -> None:
    model = model_of()
    with pytest.raises(ValueError, match="model: expected a model that enable"):
        doge.disable(model)
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, received str"):
        doge.enable("SmallDoge/Doge-320M")
    with pytest.raises(ValueError, match="model: expected a model with DogeAttention layers, received Linear"):
        doge.enable(nn.Linear(2, 2))
    doge.enable(model)
    with pytest.raises(ValueError, match="expected a model with DogeAttention layers"):
        doge.enable(model)
