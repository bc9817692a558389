"""Small models of Transformers with random weights, their batches and training steps, and the rule by which two steps are equal.

The rule for float32: a tensor may differ from eager's by TOLERANCE of its largest entry. A gradient that is zero but for rounding (BERT's
key bias: a softmax ignores it) is held to TOLERANCE of a twentieth of the model's largest gradient instead. Only real positions are
compared: what a padded query attends is each implementation's own choice, and no real token reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = 2e-5
VOCABULARY = 64
LENGTH = 13
PADDED = 4  # tokens of padding in the first row of the batch
PADDING = ("none", "left", "right")


def build(kind: type, config: Any) -> nn.Module:
    """A model with eager attention and weights large enough that attention is far from uniform."""
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                torch.nn.init.normal_(parameter, std=1.0 if "relative_attention_bias" in name or "bias_table" in name else 0.2)
    return model.train()


def batch_for(model: nn.Module, padding: str, device: str = "cpu") -> dict[str, Tensor]:
    """Tokens, their mask and labels, the same at every call. Padded positions carry the label that every loss ignores."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (2, LENGTH), generator=random)
    attends = torch.ones_like(tokens)
    if padding == "left":
        attends[0, :PADDED] = 0
    elif padding == "right":
        attends[0, -PADDED:] = 0
    batch = dict(input_ids=tokens * attends, attention_mask=attends)
    if model.config.is_encoder_decoder:
        batch["labels"] = torch.randint(1, VOCABULARY, (2, LENGTH - 2), generator=random)
    else:
        batch["labels"] = torch.where(attends == 1, batch["input_ids"], -100)
        if padding == "left":
            batch["labels"][0, PADDED] = -100  # a causal model predicts it from the last padded position
    if padding == "none":
        del batch["attention_mask"]
    return {name: tensor.to(device) for name, tensor in batch.items()}


def distinct_batch(padding: str = "none", repeat: bool = False, device: str = "cpu", length: int = 23) -> dict[str, Tensor]:
    """Tokens, labels and mask; no token twice in a row of the batch unless `repeat`."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.stack([torch.randperm(VOCABULARY - 1, generator=random)[:length] + 1 for _ in range(2)])
    if repeat:
        tokens = tokens % 5 + 1
    real = torch.ones_like(tokens)
    if padding != "none":
        real[0, slice(0, PADDED) if padding == "left" else slice(-PADDED, None)] = 0
    labels = torch.where(real == 1, tokens, -100)
    if padding == "left":
        labels[0, PADDED] = -100  # predicted from the last padded position
    batch = dict(input_ids=tokens * real, labels=labels) | ({} if padding == "none" else dict(attention_mask=real))
    return {name: tensor.to(device) for name, tensor in batch.items()}


@dataclass
class Step:
    """Results of one training step, logits at real positions only."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def train_step(model: nn.Module, batch: dict[str, Tensor]) -> Step:
    model.zero_grad()
    result = model(**batch)
    result.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    logits = result.logits.detach()
    if "attention_mask" in batch and batch["attention_mask"].shape == logits.shape[:2]:
        logits = logits[batch["attention_mask"] == 1]
    return Step(logits, result.loss.detach(), gradients)


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    assert got.isfinite().all()
    return (got.double() - want.double()).abs().max().item()


def largest(x: Tensor) -> float:
    return x.abs().max().item()


def assert_equal_steps(got: Step, want: Step) -> None:
    assert error(got.logits, want.logits) <= TOLERANCE * largest(want.logits)
    assert error(got.loss, want.loss) <= TOLERANCE * largest(want.loss)
    assert got.gradients.keys() == want.gradients.keys()
    floor = 0.05 * max(map(largest, want.gradients.values()))
    for name, gradient in want.gradients.items():
        difference, allowed = error(got.gradients[name], gradient), TOLERANCE * max(largest(gradient), floor)
        assert difference <= allowed, f"gradient of {name}: off by {difference:.2e}, allowed {allowed:.2e}"
