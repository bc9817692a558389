"""Every architecture, in every way that Transformers calls it: logits, loss and all gradients are those of its own eager attention.

The rule is that of models.py. ``make test`` tries a training step of each architecture with each padding, and the other
ways with a few; ``make test-full`` (``DMATTN_FULL=1``) tries all of them with all, on a GPU too.
"""

from __future__ import annotations

import copy
import math
import os
from typing import Any

import pytest
import torch
from conftest import NEEDS_CUDA
from models import LENGTH, PADDING, TOLERANCE, VOCABULARY, assert_equal_steps, error, largest, train_step
from torch import Tensor, nn

import dmattn
from dmattn.execution.backend import interpreting

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from architectures import ARCHITECTURES, Architecture, batch_of  # noqa: E402

from dmattn.integrations import transformers as integration  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.skipif(interpreting(), reason="whole models; the interpreter takes milliseconds for each tile"),
]

FULL = bool(os.environ.get("DMATTN_FULL"))
FEW = ("LlamaForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM", "ModernBertForMaskedLM", "T5ForConditionalGeneration")
TEXT = ("decoder", "encoder", "pair")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]
in_a_full_run_on_a_gpu_too = pytest.mark.parametrize("device", DEVICES if FULL else DEVICES[:1])


def architectures(*inputs: str) -> pytest.MarkDecorator:
    """Those with the given inputs: all in a full run, else a few."""
    chosen = [each for each in ARCHITECTURES if each.inputs in (inputs or (each.inputs,)) and (FULL or each.name in FEW)]
    return pytest.mark.parametrize("architecture", chosen, ids=lambda each: each.name)


def no_cache(architecture: Architecture) -> dict:
    return dict(use_cache=False) if architecture.inputs in ("decoder", "pair") else {}


PADDED_OR_NOT = [
    pytest.param(each, padding, id=f"{each.name}-{padding}")
    for each in ARCHITECTURES
    for padding in (PADDING if each.inputs not in ("image", "speech") else PADDING[:1])
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("architecture", "padding"), PADDED_OR_NOT)
def test_a_training_step(architecture: Architecture, padding: str, device: str, calls: list[dict]) -> None:
    model, batch = architecture.build().to(device), batch_of(architecture, padding, device)
    eager = train_step(model, batch)
    with integration.using(model):
        ours = train_step(model, batch)
    assert len(calls) == architecture.layers
    assert_equal_steps(ours, eager)


@pytest.mark.parametrize("device", DEVICES)
@architectures()
def test_training_steps_in_bfloat16(architecture: Architecture, device: str) -> None:
    """Truth is eager in float32 with the same rounded weights. Over four models, ours may be twice as far from it as eager in bfloat16.

    All gradients as one vector: a rounding that turns the sign of what enters a ReLU moves one of them by more than all others.
    """
    if architecture.name in ROUTED:
        pytest.skip("roundings choose its experts or keys")
    model, distances = architecture.build().to(device), {"eager": 0.0, "ours": 0.0}
    for seed in range(4):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.float().parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        model.bfloat16()
        batch = batch_of(architecture, "left", device)
        halves = {name: value.bfloat16() if value.is_floating_point() else value for name, value in batch.items()}
        eager = train_step(model, halves)
        with integration.using(model):
            ours = train_step(model, halves)
        truth = train_step(model.float(), {name: value.float() if value.is_floating_point() else value for name, value in halves.items()})
        for name, step in (("eager", eager), ("ours", ours)):
            assert step.gradients.keys() == truth.gradients.keys()
            off = norm([step.gradients[key].float() - want for key, want in truth.gradients.items()])
            distances[name] += off / norm(list(truth.gradients.values()))
    assert math.isfinite(distances["ours"])
    assert distances["ours"] <= 2 * distances["eager"] + 2.0**-8


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


ROUTED = {each.name for each in ARCHITECTURES if any("expert" in name for name in each.config)} | {"DogeForCausalLM"}


@pytest.mark.parametrize("wanted", ["by the call", "by the configuration"])
@architectures()
def test_attention_weights_are_refused(architecture: Architecture, wanted: str) -> None:
    """Wherever eager returns them: models collect the weights that layers return, and dmattn has none to return."""
    model, batch = architecture.build(), batch_of(architecture, "none")
    if wanted == "by the configuration":
        model.config.output_attentions = True  # Transformers refuses it itself once another implementation is set
    call = dict(output_attentions=True) if wanted == "by the call" else {}
    weights = [value for name, value in model(**batch, **call).items() if name.endswith("attentions") and value]
    with integration.using(model):
        if weights:
            with pytest.raises(ValueError, match="dmattn: output_attentions: expected False, as attention weights are never formed"):
                model(**batch, **call)
        else:  # T5 and SigLIP read the configurations of their parts, copied when the model was built
            assert wanted == "by the configuration"
            assert not any(value for name, value in model(**batch).items() if name.endswith("attentions"))


@in_a_full_run_on_a_gpu_too
@pytest.mark.parametrize("kind", ["bool", "float"])
@architectures("decoder", "encoder")
def test_a_mask_of_four_axes(architecture: Architecture, kind: str, device: str) -> None:
    """Of the user's own: it replaces every mask that the model would make."""
    model, batch = architecture.build(), batch_of(architecture, "none") | no_cache(architecture)
    seed = torch.Generator().manual_seed(2)
    keep = (torch.rand(2, 1, LENGTH, LENGTH, generator=seed) < 0.7) | torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    try:  # on the CPU: an index beyond a tensor ends a process that has it on a GPU
        eager = train_step(model, batch | dict(attention_mask=added))
    except (IndexError, RuntimeError) as refusal:
        pytest.skip(f"eager attention cannot: {refusal}")
    if device != "cpu":
        model, keep, added = model.to(device), keep.to(device), added.to(device)
        batch = batch_of(architecture, "none", device) | no_cache(architecture)
        eager = train_step(model, batch | dict(attention_mask=added))
    with integration.using(model):
        ours = train_step(model, batch | dict(attention_mask=keep if kind == "bool" else added))
    assert_equal_steps(ours, eager)


@in_a_full_run_on_a_gpu_too
@architectures("decoder")
def test_packed_sequences(architecture: Architecture, device: str) -> None:
    """Two sequences in each row, told by their positions."""
    model, batch = architecture.build().to(device), batch_of(architecture, "none", device) | no_cache(architecture)
    batch["position_ids"] = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(2, -1).to(device)
    eager = train_step(model, batch)
    with integration.using(model):
        ours = train_step(model, batch)
    assert_equal_steps(ours, eager)


@in_a_full_run_on_a_gpu_too
@architectures()
def test_gradient_checkpointing(architecture: Architecture, device: str, calls: list[dict]) -> None:
    model, batch = architecture.build().to(device), batch_of(architecture, "left", device) | no_cache(architecture)
    if not model.supports_gradient_checkpointing:
        pytest.skip("the model has none")
    eager = train_step(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    with integration.using(model):
        ours = train_step(model, batch)
    assert len(calls) > architecture.layers
    assert_equal_steps(ours, eager)


@in_a_full_run_on_a_gpu_too
@pytest.mark.parametrize("padding", ["none", "left"])
@architectures("decoder")
def test_a_cache_filled_in_chunks(architecture: Architecture, padding: str, device: str) -> None:
    """5 tokens, then 7 after them, then one: the logits of real tokens, past the windows too."""
    model, batch = architecture.build().to(device).eval(), batch_of(architecture, padding, device)
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])) == 1

    @torch.no_grad()
    def logits() -> Tensor:
        parts, cache = [], transformers.DynamicCache(config=model.config)
        for begin, end in ((0, 5), (5, 12), (12, 13)):
            mask = batch["attention_mask"][:, :end] if "attention_mask" in batch else None
            parts.append(model(input_ids=batch["input_ids"][:, begin:end], attention_mask=mask, past_key_values=cache, use_cache=True).logits)
        return torch.cat(parts, 1)[real]

    eager = logits()
    with integration.using(model):
        ours = logits()
    assert error(ours, eager) <= TOLERANCE * largest(eager)


WAYS: dict[str, Any] = dict(
    dynamic=dict(cache_implementation="dynamic"),
    static=dict(cache_implementation="static"),
    beams=dict(num_beams=3),
    lookup=dict(prompt_lookup_num_tokens=3),
)


@in_a_full_run_on_a_gpu_too
@pytest.mark.parametrize("way", WAYS)
@architectures("decoder", "pair", "speech")
def test_generation(architecture: Architecture, way: str, device: str, calls: list[dict]) -> None:
    """The tokens of eager, well past the windows; greedy but for the beams. Several tokens at once are looked up in the prompt."""
    if way == "lookup" and architecture.inputs != "decoder":
        pytest.skip("looks tokens up in the prompt of a decoder")
    if way == "static" and device == "cuda":
        pytest.skip("Transformers compiles the model there, which is another test's subject")
    model, batch = architecture.build().to(device).eval(), batch_of(architecture, "none" if way == "lookup" else "left", device)
    del batch["labels"]
    if way == "lookup":
        batch = dict(input_ids=batch["input_ids"][:1].repeat(1, 2))
    settings = dict(max_new_tokens=9, min_new_tokens=9, do_sample=False) | WAYS[way]
    try:
        eager = model.generate(**batch, **settings)
    except (ValueError, TypeError) as refusal:
        pytest.skip(f"eager attention cannot: {refusal}")
    with integration.using(model):
        ours = model.generate(**batch, **settings)
    assert calls
    assert torch.equal(ours, eager)


def assistant(model: nn.Module) -> nn.Module:
    """A model that is often right about the next token: the same with other last weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.model.layers[-1].parameters():
            parameter.mul_(0.9)
    return other


def test_assisted_generation() -> None:
    (architecture,) = (each for each in ARCHITECTURES if each.name == "LlamaForCausalLM")
    model = architecture.build().eval()
    helper, tokens = assistant(model), batch_of(architecture, "none")["input_ids"][:1]
    settings: dict[str, Any] = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False)
    eager = model.generate(tokens, **settings)
    with integration.using(model), integration.using(helper):
        assert torch.equal(model.generate(tokens, assistant_model=helper, **settings), eager)


@architectures()
def test_the_comparison_has_teeth(architecture: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention that forgets each query's own key, and what hides the others, is noticed."""

    def forgetful(query, key, value, mask=None, causal=False, **options):
        others = ~torch.eye(query.shape[2], key.shape[2], dtype=torch.bool)
        return dmattn.attention(query, key, value, mask=others, **options)

    model, batch = architecture.build(), batch_of(architecture, "none")
    eager = train_step(model, batch)
    monkeypatch.setattr(integration.attention, "attention", forgetful)
    with integration.using(model):
        ours = train_step(model, batch)
    with pytest.raises(AssertionError):
        assert_equal_steps(ours, eager)


def test_there_are_as_many_architectures_as_promised() -> None:
    assert len({each.name for each in ARCHITECTURES}) == len(ARCHITECTURES) >= 30
    assert set(FEW) <= {each.name for each in ARCHITECTURES}
    assert all(0 <= batch_of(each, "none").get("input_ids", torch.zeros(1)).max() < VOCABULARY for each in ARCHITECTURES)
