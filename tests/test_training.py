"""Training with the tools that people train with gives eager's loss curve: Trainer, Accelerate, peft, autocast and checkpoints."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import TOLERANCE, build
from torch import Tensor, nn

from dmattn.execution.backend import interpreting

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from dmattn.integrations import transformers as integration  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.skipif(interpreting(), reason="whole models; the interpreter takes milliseconds for each tile"),
]

STEPS, BATCH, LENGTH, VOCABULARY = 5, 4, 12, 64
SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)


def llama() -> nn.Module:
    return build(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0))


def t5() -> nn.Module:
    config = dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, dropout_rate=0.0)
    return build(transformers.T5ForConditionalGeneration, transformers.T5Config(**config, decoder_start_token_id=0, pad_token_id=0))


MODELS = dict(llama=llama, t5=t5)


def examples() -> list[dict[str, Tensor]]:
    """For STEPS batches; every other one is padded."""
    seed = torch.Generator().manual_seed(0)
    found = []
    for i in range(STEPS * BATCH):
        tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=seed)
        mask = (torch.arange(LENGTH) < LENGTH - 3 * (i % 2)).long()
        found.append(dict(input_ids=tokens * mask, attention_mask=mask, labels=torch.where(mask == 1, tokens, -100)))
    return found


def batches() -> list[dict[str, Tensor]]:
    found = examples()
    return [{name: torch.stack([example[name] for example in found[i : i + BATCH]]) for name in found[0]} for i in range(0, len(found), BATCH)]


def descend(model: nn.Module, context: Callable = nullcontext, backward: Callable = Tensor.backward) -> list[float]:
    """Losses of plain steepest descent, whose steps are as large as their gradients and no rounding is amplified."""
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.05)
    losses = []
    for batch in batches():
        with context():
            loss = model(**batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def llama_with(implementation: str) -> nn.Module:
    model = llama()
    model.set_attn_implementation(implementation)
    return model


def assert_same_curve(ours: list[float], eager: list[float], tolerance: float = 10 * TOLERANCE) -> None:
    """Roundings grow from step to step."""
    assert len(ours) == len(eager) >= 2
    assert max(eager) - min(eager) > 0.01 * max(eager)
    assert max(abs(x - y) for x, y in zip(ours, eager, strict=True)) <= tolerance * max(eager), (ours, eager)


@pytest.mark.parametrize("name", MODELS)
def test_trainer(name: str, tmp_path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs it")
    curves = []
    for implementation in ("eager", "dmattn"):
        model = MODELS[name]()
        if implementation == "dmattn":
            integration.enable(model)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=0.05, lr_scheduler_type="constant",
            optim="sgd", logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, dataloader_num_workers=0,
            gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=False), max_grad_norm=0.0,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=examples())
        trainer.train()
        curves.append([record["loss"] for record in trainer.state.log_history if "loss" in record])
    assert len(curves[0]) == STEPS
    assert_same_curve(curves[1], curves[0], 1e-3)  # Trainer's log is rounded


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    curves = []
    for implementation in ("eager", "dmattn"):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        curves.append(descend(accelerator.prepare(llama_with(implementation)), backward=accelerator.backward))
    assert_same_curve(curves[1], curves[0], 10 * TOLERANCE if precision == "no" else 2e-2)


@pytest.mark.parametrize("name", MODELS)
def test_autocast_keeps_the_curve(name: str) -> None:
    curves = []
    for implementation in ("eager", "dmattn"):
        model = MODELS[name]()
        with integration.using(model) if implementation == "dmattn" else nullcontext():
            curves.append(descend(model, lambda: torch.autocast("cpu", torch.bfloat16)))
    assert_same_curve(curves[1], curves[0], 3e-2)


def tuned_curve(implementation: str, config: Any) -> list[float]:
    """Losses of a model whose few tuned parameters, random at the start, alone are trained."""
    model = llama_with(implementation)
    tuned = importlib.import_module("peft").get_peft_model(model, config)
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    assert 0 < sum(parameter.numel() for parameter in trained) < 3000
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trained:
            parameter.normal_(std=0.5)
    return descend(tuned)


@pytest.mark.parametrize("way", ["lora", "prefix"])
def test_peft(way: str) -> None:
    """A prefix is a cache that the queries do not begin with, and its mask is longer than the text."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    config = lora if way == "lora" else peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    assert_same_curve(tuned_curve("dmattn", config), tuned_curve("eager", config))
