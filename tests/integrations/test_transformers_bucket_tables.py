"""T5 and its kin with dmattn: their position biases reach attention as tables, equal to eager's pairs, in O(N) memory."""

from __future__ import annotations

import copy
import functools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import NEEDS_CUDA, in_a_full_run
from models import LENGTH, PADDING, VOCABULARY, assert_equal_steps, batch_for, build, train_step
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dmattn.execution.backend import interpreting

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from test_transformers_described_bias import CROSS, HEADS, OWN, kinds  # noqa: E402

from dmattn.integrations import transformers as integration  # noqa: E402
from dmattn.integrations.transformers import bucket_tables  # noqa: E402
from dmattn.integrations.transformers.described import Described  # noqa: E402
from dmattn.integrations.transformers.described_bias import DescribedBias, _TableGradient  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered")
whole_model = pytest.mark.skipif(interpreting(), reason="a whole model; the interpreter takes milliseconds for each tile")
compiled = pytest.mark.skipif(interpreting(), reason="torch.compile and Triton's interpreter do not combine")

SIZES = dict(vocab_size=VOCABULARY, d_kv=8, d_ff=48, num_layers=2, num_heads=HEADS, dropout_rate=0.0, pad_token_id=0, eos_token_id=None)
SIZES |= dict(decoder_start_token_id=0, relative_attention_num_buckets=8, relative_attention_max_distance=9)


def pair(kind: str, **config: Any) -> nn.Module:
    return build(getattr(transformers, f"{kind}ForConditionalGeneration"), getattr(transformers, f"{kind}Config")(**SIZES | config))


def t5(**config: Any) -> nn.Module:
    return pair("T5", d_model=32, **config)


def switch() -> nn.Module:
    experts = dict(num_experts=2, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, router_jitter_noise=0.0)
    return pair("SwitchTransformers", d_model=32, **experts)


def udop() -> nn.Module:
    buckets = dict(relative_attention_num_buckets=32, relative_attention_max_distance=128)
    return pair("Udop", d_model=32, image_size=16, patch_size=8, **buckets)


def pix2struct() -> nn.Module:
    config = transformers.Pix2StructTextConfig(**SIZES, hidden_size=32, is_decoder=True, initializer_range=1.0)
    return build(transformers.Pix2StructTextModel, config)


def batch_of(model: nn.Module, padding: str) -> dict[str, Tensor]:
    """Of text, but for the models that read scores of music, pages and pictures."""
    kind, seed = type(model).__name__, torch.Generator().manual_seed(2)
    batch = batch_for(model, padding)
    states = torch.randn(2, LENGTH, 32, generator=seed)
    if kind.startswith("Pop2Piano"):
        del batch["input_ids"]
        batch["inputs_embeds"] = states
    elif kind.startswith("Udop"):
        batch["bbox"] = torch.rand(2, LENGTH, 4, generator=seed).sort(-1).values
    elif kind.startswith("Pix2Struct"):
        batch["encoder_hidden_states"] = states[:, :7]
    return batch


STACKS = [OWN, OWN, OWN, CROSS, OWN, CROSS]  # two layers of an encoder, and of a decoder with cross attention
MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = dict(
    t5=(t5, STACKS),
    mt5=(lambda: pair("MT5", d_model=32), STACKS),
    umt5=(lambda: pair("UMT5", d_model=32), STACKS),
    switch=(switch, STACKS),
    pop2piano=(lambda: pair("Pop2Piano", d_model=32), STACKS),
    longt5=(lambda: pair("LongT5", d_model=32, local_radius=3), STACKS[2:]),  # its encoder attends by itself
    udop=(udop, ["pairs", "pairs", *STACKS[2:]]),  # its encoder's bias depends on the places of words on a page
    pix2struct=(pix2struct, STACKS[2:]),
)


@whole_model
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_equals_eager_by_tables(name: str, padding: str, calls: list[dict]) -> None:
    make, want = MODELS[name]
    model = make()
    batch = batch_of(model, padding)
    eager = train_step(model, batch)
    with integration.using(model):
        ours = train_step(model, batch)
    assert kinds(calls) == want
    assert_equal_steps(ours, eager)
    tables = [name for name in ours.gradients if "relative_attention_bias" in name]
    assert len(tables) >= (2 if name != "pix2struct" else 1)
    assert all(ours.gradients[name].abs().max() > 1e-4 for name in tables)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_a_step_through_the_kernels(device: str, calls: list[dict]) -> None:
    """Small enough for the interpreter."""
    model = t5(num_layers=1).to(device)
    batch = {name: x.to(device) for name, x in batch_for(model, "left").items()}
    eager = train_step(model, batch)
    with integration.using(model):
        ours = train_step(model, batch)
    assert kinds(calls) == [OWN, OWN, CROSS]
    assert_equal_steps(ours, eager)


@whole_model
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ["model", "autocast"])
def test_lower_precision_is_as_exact_as_eager(way: str, dtype: torch.dtype, calls: list[dict]) -> None:
    """Truth is eager in float32; ours may err twice as much as eager in the lower dtype, over all gradients, plus four roundings."""
    model = t5()
    if way == "model":
        model = model.to(dtype)
    batch = batch_for(model, "left")
    truth = train_step(copy.deepcopy(model).float(), batch)

    def step() -> Any:
        with torch.autocast("cpu", dtype, enabled=way == "autocast"):
            return train_step(model, batch, plain=False)

    eager = step()
    with integration.using(model):
        ours = step()
    assert kinds(calls) == STACKS
    assert calls[0]["bias"].table.dtype == (dtype if way == "model" else torch.float32)
    for names in (["logits"], list(truth.gradients), [name for name in truth.gradients if "relative_attention_bias" in name]):
        want, got, plain = (torch.cat([results_of(each)[name].flatten().float() for name in names]) for each in (truth, ours, eager))
        assert (got - want).norm() <= 2 * (plain - want).norm() + 4 * torch.finfo(dtype).eps * want.norm()


def results_of(step: Any) -> dict[str, Tensor]:
    return dict(logits=step.logits) | step.gradients


@whole_model
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_keeps_the_description(reentrant: bool, calls: list[dict]) -> None:
    model = t5()
    batch = batch_for(model, "left")
    eager = train_step(model, batch)
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    model.enable_input_require_grads()
    with integration.using(model):
        ours = train_step(model, batch)
    assert len(calls) == 12
    assert set(kinds(calls)) == {OWN, CROSS}
    assert_equal_steps(ours, eager)


@whole_model
@pytest.mark.parametrize("way", [dict(), dict(num_beams=3), dict(cache_implementation="static"), dict(do_sample=True, top_k=5)], ids=str)
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_generation_equals_eager(name: str, way: dict[str, Any], calls: list[dict]) -> None:
    model = MODELS[name][0]().eval()
    batch = batch_for(model, "left")
    del batch["labels"]
    settings = dict(max_new_tokens=9, min_new_tokens=9, do_sample=False) | way
    torch.manual_seed(0)
    eager = model.generate(**batch, **settings)
    with integration.using(model):
        torch.manual_seed(0)
        ours = model.generate(**batch, **settings)
    assert torch.equal(ours, eager)
    assert kinds(calls)[:2] == [OWN, OWN]  # the encoder's
    assert OWN not in kinds(calls)[2:]  # one query at a time


@whole_model
def test_a_chunk_after_a_cache(calls: list[dict]) -> None:
    """Queries that are not the first: their distances count from the end."""
    model = t5().eval()
    batch = batch_for(model, "none")
    states = model.encoder(batch["input_ids"])
    logits = []
    for enabled in (False, True):
        if enabled:
            integration.enable(model)
        cache = None
        for chunk in batch["labels"].split([4, 1, 6], 1):
            result = model(encoder_outputs=states, decoder_input_ids=chunk, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
        logits.append(result.logits)
    torch.testing.assert_close(*logits, atol=2e-4, rtol=2e-4)
    assert kinds(calls) == [OWN, CROSS, OWN, CROSS, "pairs", CROSS, "pairs", CROSS, OWN, CROSS, OWN, CROSS]
    assert [call["key"].shape[2] for call in calls[-4::2]] == [11, 11]


@whole_model
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context: Callable, calls: list[dict]) -> None:
    model = t5().eval()
    batch = batch_for(model, "right")
    with context():
        eager = model(**batch).logits
        integration.enable(model)
        ours = model(**batch).logits
    assert kinds(calls) == STACKS
    torch.testing.assert_close(ours, eager, atol=2e-4, rtol=2e-4)


# Memory.


class Largest(TorchDispatchMode):
    """Records the most elements that an operation returned in one tensor."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(result):
            if isinstance(each, Tensor) and not isinstance(each, (Described, _TableGradient)):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return result


LONG = 2048


@whole_model
@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        *((name, False) for name in ("t5", "umt5", "switch")),
        ("t5", True),
        *(pytest.param(name, True, marks=in_a_full_run) for name in ("umt5", "switch")),
    ],
)
def test_no_tensor_of_quadratic_size_is_made(name: str, checkpointing: bool, calls: list[dict]) -> None:
    """In a step forward and backward; what attention computes inside, an operator here, is in chunks of its own."""
    model = MODELS[name][0]()
    model.config.use_cache = False
    integration.enable(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    tokens = torch.randint(1, VOCABULARY, (1, LONG), generator=torch.Generator().manual_seed(0))
    with Largest() as largest:
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert largest.elements < LONG * LONG / 16
    assert "pairs" not in kinds(calls)


# The description itself.


def layer_of(decoder: bool, buckets: int, furthest: int) -> Any:
    from transformers.models.t5.modeling_t5 import T5Attention

    torch.manual_seed(0)
    sizes = dict(relative_attention_num_buckets=buckets, relative_attention_max_distance=furthest)
    config = transformers.T5Config(**SIZES | sizes, d_model=32, is_decoder=decoder)
    config._attn_implementation = "dmattn"
    return T5Attention(config, has_relative_attention_bias=True, layer_idx=0)


def bias_of(layer: Any, len_q: int, past: Any = 0, len_k: int | None = None) -> Tensor:
    """As the layer's forward method asks for it."""
    view = bucket_tables._viewed(layer, torch.zeros(1))
    return view.compute_bias(len_q, len_q + past if len_k is None else len_k, past_seen_tokens=past)


@pytest.mark.parametrize("seed", range(3))
def test_a_description_is_the_tensor_it_stands_for(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(60):
        layer = layer_of(source.random() < 0.5, *source.choice(((4, 9), (8, 9), (8, 20), (32, 20), (32, 128))))
        len_q, past = source.choice((2, 3, 50, 300)), source.choice((0, 1, 40))
        got, want = bias_of(layer, len_q, past), layer.compute_bias(len_q, len_q + past, past_seen_tokens=past)
        assert isinstance(got, DescribedBias)
        assert got._exact.values is None
        assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)
        assert torch.equal(got.clone(), want)
        upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(seed))
        weight = layer.relative_attention_bias.weight
        ours, eager = (torch.autograd.grad((bias * upstream).sum(), weight)[0] for bias in (got, want))
        assert (ours - eager).abs().max() <= 1e-6 * len_q * (len_q + past)


class WithOwnBuckets:
    @staticmethod
    def _relative_position_bucket(relative_position: Tensor, **options: Any) -> Tensor:
        return relative_position.abs() % 4  # which never saturates


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda layer: bias_of(layer, 1, 6), id="one-query"),
        pytest.param(lambda layer: bias_of(layer, 3, 2, 9), id="room-in-a-static-cache"),
        pytest.param(lambda layer: bias_of(layer, 3, torch.tensor(2), 5), id="a-position-on-the-device"),
        pytest.param(lambda layer: layer.compute_bias(3, 5, past_seen_tokens=2), id="the-layers-own-method"),
        pytest.param(lambda layer: bias_of(layer_of(True, 32, 9), 12), id="more-single-distances-than-the-furthest"),
    ],
)
def test_other_calls_make_the_tensor(call: Callable) -> None:
    bias = call(layer_of(True, 8, 9))
    assert type(bias) is Tensor
    assert bias.grad_fn is not None


@pytest.mark.parametrize("of", ["instance", "subclass", "class"])
def test_a_layer_with_buckets_of_its_own_makes_the_tensor(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(True, 8, 9)
    stock, own = type(layer), WithOwnBuckets._relative_position_bucket
    view = bucket_tables._viewed(layer, torch.zeros(1))
    assert type(view.compute_bias(30, 30)) is DescribedBias  # until then
    if of == "instance":
        layer._relative_position_bucket = own
    elif of == "subclass":
        layer.__class__ = type("OwnAttention", (WithOwnBuckets, stock), {})
    else:
        monkeypatch.setattr(stock, "_relative_position_bucket", staticmethod(functools.wraps(stock._relative_position_bucket)(own)))
    view = bucket_tables._viewed(layer, torch.zeros(1))
    assert torch.equal(view.compute_bias(30, 30), layer.compute_bias(30, 30))
    assert type(view.compute_bias(30, 30)) is Tensor


# Where descriptions are, and where they are not.


def biases_of(model: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    """What T5's layers return as their position bias."""
    seen: list[Tensor] = []
    layers = [module for module in model.modules() if type(module).__name__ == "T5Attention"]
    hooks = [layer.register_forward_hook(lambda layer, inputs, result: seen.append(result[1])) for layer in layers]
    run()
    for hook in hooks:
        hook.remove()
    return seen


@whole_model
def test_only_models_that_are_set_to_dmattn_describe() -> None:
    ours, other = t5().eval(), t5().eval()
    batch = batch_for(ours, "left")
    kinds_of = lambda model: {type(bias) for bias in biases_of(model, lambda: model(**batch))}  # noqa: E731
    attributes = [sorted(vars(module)) for module in ours.modules()]
    assert kinds_of(ours) == {Tensor}
    with integration.using(ours):
        assert kinds_of(ours) == {DescribedBias}
        assert kinds_of(other) == {Tensor}
    assert kinds_of(ours) == {Tensor}
    integration.enable(ours)
    integration.disable(ours)
    assert kinds_of(ours) == {Tensor}
    assert [sorted(vars(module)) for module in ours.modules()] == attributes
    loaded = transformers.T5ForConditionalGeneration._from_config(ours.config, attn_implementation="dmattn").eval()
    assert kinds_of(loaded) == {DescribedBias}


@whole_model
def test_unregister_restores_the_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mt5.modeling_mt5 import MT5Attention
    from transformers.models.t5.modeling_t5 import T5Attention

    replaced = T5Attention.forward
    integration.register()
    assert T5Attention.forward is replaced
    integration.unregister()
    stock = T5Attention.forward
    assert stock is replaced.__wrapped__
    assert stock.__code__.co_filename.endswith("modeling_t5.py")
    integration.register()
    ours = T5Attention.forward
    monkeypatch.setattr(T5Attention, "forward", lambda self, *args, **kwargs: ours(self, *args, **kwargs))
    integration.unregister()
    integration.register()  # around a forward method that calls an earlier one of ours
    model = transformers.T5ForConditionalGeneration._from_config(t5().config, attn_implementation="dmattn").eval()
    assert {type(bias) for bias in biases_of(model, lambda: model(**batch_for(model, "left")))} == {DescribedBias}
    integration.unregister()
    T5Attention.forward = stock
    integration.register()
    another = lambda self, *args, **kwargs: None  # noqa: E731
    monkeypatch.setattr(MT5Attention, "forward", another)
    integration.unregister()
    assert (T5Attention.forward, MT5Attention.forward) == (stock, another)


@whole_model
def test_every_class_of_layers_with_such_a_bias_is_known() -> None:
    """By their source: a layer that uses the attention interface and has a method `compute_bias`."""
    found = set()
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        for code in re.split(r"^(?=class )", path.read_text(), flags=re.MULTILINE):
            if "def compute_bias(" in code and "ALL_ATTENTION_FUNCTIONS" in code:
                found.add(f"{path.parent.name}.{path.stem}.{re.findall(r'[A-Za-z0-9]+', code)[1]}")
    assert found == set(bucket_tables._CLASSES)


@compiled
def test_layers_compiled_one_by_one_take_the_description() -> None:
    """The first layer describes its bias outside of what is compiled, and the others are handed it."""
    model = t5()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    batch = batch_for(model, "left")
    eager = train_step(model, batch)
    integration.enable(model)
    torch.compiler.reset()
    for layer in (model.encoder.block[1], model.decoder.block[1]):
        layer.compile(backend="aot_eager", fullgraph=True)
    assert_equal_steps(train_step(model, batch), eager)


@whole_model
def test_a_model_without_memory_runs() -> None:
    """As when memory is planned."""
    model = t5().to("meta")
    batch = {name: x.to("meta") for name, x in batch_for(model, "none").items()}
    with integration.using(model):
        model(**batch).loss.backward()
    assert model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.shape == (8, HEADS)


def test_what_traces_makes_the_tensor() -> None:
    layer = layer_of(True, 8, 9)
    weight = layer.relative_attention_bias.weight
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert not isinstance(bias_of(layer, 5), DescribedBias)
    kinds = []

    def of_weight(weight: Tensor) -> Tensor:
        bias = torch.func.functional_call(Biased(layer), {"layer.relative_attention_bias.weight": weight}, (5,))
        kinds.append(type(bias))
        return bias.sum()

    torch.testing.assert_close(torch.func.grad(of_weight)(weight.detach()), torch.autograd.grad(of_weight(weight), weight)[0])
    torch.func.vmap(of_weight)(torch.stack([weight.detach()] * 2))
    torch.func.jvp(of_weight, (weight.detach(),), (weight.detach(),))
    assert kinds == [Tensor, DescribedBias, Tensor, Tensor]


class Biased(nn.Module):
    """A module whose output is the bias of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, length: int) -> Tensor:
        return bias_of(self.layer, length)
