"""Small models of Transformers with random weights, their batches and training steps, and the rule by which two steps are equal.

The rule is that of dmattn/equivalence.py for whole models. Truth is the same step in float64. A model's cost of rounding is the largest error
of the plain float32 step, in parts of the tensor it stands in; ours may have twice that in every tensor, and two roundings of the tensor and
of its terms, as these remain where the terms cancel (BERT's key bias: a softmax ignores it). The model's largest gradient stands for the
terms of every gradient, and the largest logit for those of the loss; no tensor counts as smaller than a twentieth of them. Only real
positions are compared: what a padded query attends is each implementation's own choice, and no real token reads it. On a GPU both steps have
float32's own products, so that the models' ways are compared and not the products'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dmattn.equivalence import BAND_ROUNDINGS, PLAIN_FACTOR

TOLERANCE = 2e-5  # of the largest entry, where one float32 computation is compared with another and neither is plain PyTorch's
WIDE_TOLERANCE = 1e-10  # the same in float64
SMALLEST = 0.05  # of its terms: what a smaller tensor counts as
MOST_COST = 1e-4  # of plain PyTorch in float32; a truth that is further away took another way
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
    """Results of one training step, logits at real positions only. A plain PyTorch step in float32 carries itself in float64."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    truth: Step | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        return dict(logits=self.logits, loss=self.loss) | {f"gradient of {name}": gradient for name, gradient in self.gradients.items()}


def train_step(model: nn.Module, batch: dict[str, Tensor], plain: bool | None = None) -> Step:
    """A step with the loss that the model computes."""

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Step:
        result = model(**batch)
        result.loss.backward()
        logits = result.logits.detach()
        if "attention_mask" in batch and batch["attention_mask"].shape == logits.shape[:2]:
            logits = logits[batch["attention_mask"] == 1]
        return Step(logits, result.loss.detach(), gradients_of(model))

    return with_truth(step, model, batch, plain)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def with_truth(step: Callable[[nn.Module, Any], Step], model: nn.Module, batch: Any, plain: bool | None = None) -> Step:
    """`step` of the model, and once more in float64 if it is plain PyTorch (by default: if no part of the model is dmattn's) in float32."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        return _with_truth(step, model, batch, plain)
    finally:
        matmul.fp32_precision = before


def _with_truth(step: Callable[[nn.Module, Any], Step], model: nn.Module, batch: Any, plain: bool | None) -> Step:
    model.zero_grad()
    plain = is_plain(model) if plain is None else plain
    if {parameter.dtype for parameter in model.parameters()} == {torch.float64}:
        with Widened():
            return step(model, batch)
    if not plain or {parameter.dtype for parameter in model.parameters()} != {torch.float32}:
        return step(model, batch)
    first = Recorded()
    with first:
        found = step(model, batch)
    try:
        with torch.random.fork_rng(), in_float64(model), Widened(first.results):
            found.truth = step(model, {name: widened(value) for name, value in batch.items()})
    except RuntimeError as wrong:
        if "does not have dtype torch.float32" not in str(wrong):  # ImageGPT's upcast insists on it
            raise
    return found


def is_plain(model: nn.Module) -> bool:
    """Whether neither a name that a configuration gives nor a class is dmattn's."""
    parts = list(model.modules())
    names = {str(getattr(getattr(part, "config", None), "_attn_implementation", "")) for part in parts}
    return not any(name.startswith("dmattn") for name in names | {base.__module__ for part in parts for base in type(part).__mro__})


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """The model's parameters and buffers in float64; afterwards the same tensors as before, and the same gradients."""
    parameters = [(parameter, parameter.data, parameter.grad) for parameter in model.parameters()]
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    default = torch.get_default_dtype()
    model.zero_grad()
    try:
        torch.set_default_dtype(torch.float64)
        model.double()
        yield
    finally:
        torch.set_default_dtype(default)
        for parameter, data, gradient in parameters:
            parameter.grad = None
            parameter.data = data
            parameter.grad = gradient
        for own, before in buffers:
            own.update(before)


def widened(value: Any) -> Any:
    """In float64, for a tensor in float32 a leaf of its own; other things as they are."""
    if isinstance(value, Tensor) and value.dtype == torch.float32:
        return value.detach().double()
    return torch.float64 if value is torch.float32 else value


CHOICES = {torch.topk, Tensor.topk, torch.argmax, Tensor.argmax}
DRAWS = {torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint, torch.randperm, torch.bernoulli}
DRAWS |= {torch.multinomial, Tensor.multinomial, Tensor.bernoulli}

GROUPED = {getattr(torch, "_grouped_mm", None), getattr(nn.functional, "grouped_mm", None)}


class Recorded(TorchFunctionMode):
    """Keeps what is chosen and drawn inside, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __torch_function__(self, function: Callable, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        result = function(*arguments, **(options or {}))
        if function in CHOICES | DRAWS:
            self.results.append(result)
        return result


class Widened(TorchFunctionMode):
    """Inside, code that asks for float32 by name gets float64, and what is chosen and drawn is what was `recorded`.

    Models ask for float32 in norms and softmax. A rounding may turn a choice of experts, and truth about another choice says nothing.
    """

    def __init__(self, recorded: list[Any] | None = None) -> None:
        super().__init__()
        self.recorded = None if recorded is None else iter(recorded)

    def __torch_function__(self, function: Callable, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        options = {name: torch.float64 if value is torch.float32 else value for name, value in (options or {}).items()}
        arguments = tuple(torch.float64 if value is torch.float32 else value for value in arguments)
        if function in (torch.topk, Tensor.topk) and self.recorded is not None:
            indices = next(self.recorded).indices
            dim = options.get("dim", arguments[2] if len(arguments) > 2 else -1)
            return torch.return_types.topk((arguments[0].gather(dim, indices), indices))
        if function in CHOICES | DRAWS and self.recorded is not None:
            return widened(next(self.recorded))
        if function in GROUPED:  # float64 has no kernel of its own
            x, weights = arguments
            ends = options["offs"].tolist()
            return torch.cat([x[begin:end] @ each for begin, end, each in zip([0, *ends[:-1]], ends, weights, strict=True)])
        return function(*arguments, **options)


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    assert got.isfinite().all()
    return (got.double() - want.double()).abs().max().item()


def largest(x: Tensor) -> float:
    return x.abs().max().item()


def assert_equal_steps(got: Step, want: Step) -> None:
    """The rule at the top of this file; without a truth, where `want` is not plain PyTorch in float32, they agree to a tolerance."""
    ours, plain, truth = got.tensors, want.tensors, want.truth
    if truth is not None and cost_of_rounding(plain, truth.tensors) > MOST_COST:
        truth = None  # it chose or drew something else, as in a scripted function (DeBERTa's buckets by logarithms on a GPU)
    true = (truth or want).tensors
    assert ours.keys() == plain.keys() == true.keys()
    counts_as, terms = sizes_of(true)
    cost = cost_of_rounding(plain, true)
    agreement = WIDE_TOLERANCE if want.loss.dtype == torch.float64 else TOLERANCE
    for name, size in counts_as.items():
        band = BAND_ROUNDINGS * torch.finfo(torch.float32).eps * (size + terms[name])
        allowed = agreement * size if truth is None else PLAIN_FACTOR * cost * size + band
        off = error(ours[name], true[name])
        assert off <= allowed, f"{name}: off by {off:.2e}, allowed {allowed:.2e}"


def sizes_of(true: dict[str, Tensor]) -> tuple[dict[str, float], dict[str, float]]:
    """What the largest entry of each tensor of a step counts as, and of its terms."""
    sizes = {name: largest(x) for name, x in true.items()}
    steepest = max((size for name, size in sizes.items() if name.startswith("gradient")), default=0.0)
    terms = {name: steepest if name.startswith("gradient") else sizes["logits"] for name in sizes}
    return {name: max(size, SMALLEST * terms[name]) for name, size in sizes.items()}, terms


def cost_of_rounding(plain: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    return max(error(plain[name], true[name]) / size for name, size in sizes_of(true)[0].items() if size)
