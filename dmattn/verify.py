"""``dmattn verify``: is attention exact on this machine, and does a model trained with it learn what it learns with eager attention?

First a short table of cases against float64, judged by :mod:`dmattn.equivalence`. Then a small T5 (relative position bias, learned through
attention) and a small Llama (grouped-query, causal) with random weights, trained on the text of this package with eager attention and
with dmattn from the same seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import progress
from .equivalence import Case, check
from .report import show_stage, show_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Loss = Callable[[PreTrainedModel, Tensor], Tensor]

CASES = (
    Case("plain", 129),
    Case("causal-gqa", 127, heads=4, kv_heads=2, causal=True),
    Case("bias-per-batch-row", 100, bias="bhqk"),
    Case("bias-shared-by-the-batch", 65, 97, batch=3, bias="1hqk"),
    Case("bias-per-key-causal-mqa", 96, heads=4, kv_heads=1, bias="bg1k", causal=True),
    Case("topk-mask-and-bias", 127, mask="bhqk", keep="topk", bias="1hqk"),
    Case("documents-in-a-window", 130, intervals="documents", causal=True, window=(48, 0)),
    Case("softcap-with-empty-rows", 77, head_dim=64, mask="b1qk", keep="random-empty-rows", bias="11qk", softcap=20.0),
)
STEPS = 24
BATCH = 8
SOURCE_BYTES, TARGET_BYTES, WINDOW_BYTES = 64, 48, 112
VOCABULARY = 256 + 2  # the bytes, padding and end
LOSS_TOLERANCE = 2e-3  # of two loss curves in float32, relative, where rounding differs and Adam amplifies it
GRADIENT_TOLERANCE = 1e-3  # of every parameter's gradient at the first step, relative to the largest of that parameter


@dataclass(frozen=True)
class Training:
    """Loss of every step, and every parameter's gradient at the first."""

    losses: list[float]
    gradients: dict[str, Tensor]


class Compared(NamedTuple):
    """A tensor of a case: its largest error against float64, and what it may be."""

    error: float
    budget: float


class CaseFound(NamedTuple):
    """A case, and its tensors by name: out, lse, and the gradients that it has."""

    name: str
    agrees: bool
    tensors: dict[str, Compared]


class ModelFound(NamedTuple):
    """A model trained twice: losses by kind of attention, and how far they and the first gradients are apart, relative.

    `gradient` is the parameter whose gradients differ most. One that has none with either attention is infinitely far apart.
    """

    name: str
    agrees: bool
    losses: dict[str, list[float]]
    losses_apart: float
    gradients_apart: float
    gradient: str


class Found(NamedTuple):
    """What :func:`run` returns. `models_skipped` is the reason if `models` is empty."""

    device: str
    dtype: str
    agrees: bool
    seconds: float
    cases: list[CaseFound]
    models: list[ModelFound]
    models_skipped: str | None


def run(device: torch.device, *, steps: int = STEPS, models: bool = True) -> Found:
    """Print the comparison as it goes on. Without Transformers the models are skipped, which is said and is no failure."""
    start = time.perf_counter()
    trained: list[ModelFound] = []
    with _one_thread():
        show_stage(f"Comparing attention with float64 in {len(CASES)} cases ...")
        cases = show_equivalence(device)
        missing = None
        if models:
            show_stage("\nImporting Transformers ...")
            missing = _missing()
        if models and missing is None:
            trained = show_models(device, steps)
    agreed = all(case.agrees for case in cases) and all(model.agrees for model in trained)
    word = "agrees" if agreed else "DISAGREES"
    seconds = time.perf_counter() - start
    print(f"\ndmattn {word} on {device} ({seconds:.0f} s).")
    if missing is not None:
        print(f"The models were skipped: {missing}")
    skipped = missing if models else "--skip-models"
    return Found(str(device), _name_of(_dtype_on(device)), agreed, seconds, cases, trained, skipped)


def show_equivalence(device: torch.device) -> list[CaseFound]:
    """Print the largest error of each tensor of each case, and its share of the budget."""
    dtype = _dtype_on(device)
    rows, found = [], []
    for case in progress.track(CASES, "cases"):
        verdicts = {verdict.name: verdict for verdict in check(case, dtype, device)}
        share = max(v.error / v.budget if v.budget else float(v.error > 0) for v in verdicts.values())
        errors = [
            f"{verdicts[name].error:.1e}" if name in verdicts else "-" for name in ("out", "lse", "d_query", "d_key", "d_value", "d_bias")
        ]
        case_passed = all(v.passed for v in verdicts.values())
        tensors = {name: Compared(verdict.error, verdict.budget) for name, verdict in verdicts.items()}
        found.append(CaseFound(case.name, case_passed, tensors))
        rows.append([case.name, *errors, f"{100 * share:.0f} %", "ok" if case_passed else "FAILED"])
    title = f"Largest error against float64, {_name_of(dtype)} on {device}"
    show_table(("case", "out", "lse", "dQ", "dK", "dV", "dBias", "of budget", ""), rows, title)
    return found


def show_models(device: torch.device, steps: int) -> list[ModelFound]:
    """Train both models with eager attention and with dmattn; print the loss curves side by side."""
    from .integrations import transformers as integration

    integration.register()
    text, source = corpus()
    batches = sample(text, steps, device)
    show_stage(f"Training on {source}: {steps} steps of {BATCH} windows of {WINDOW_BYTES} bytes, float32, Adam, the same seed.")
    found, remarks = [], []
    for name, build, loss_of in (("T5", build_t5, t5_loss), ("Llama", build_llama, llama_loss)):
        trained = []
        for kind in ("eager", integration.NAME):
            show_stage(f"Training {name} with {kind} attention ...")
            trained.append(train(build(kind), loss_of, batches, device))
        eager, ours = trained
        apart = max(abs(a - b) / abs(a) for a, b in zip(eager.losses, ours.losses, strict=True))
        worst, gradient_apart = compare_gradients(eager, ours)
        good = apart <= LOSS_TOLERANCE and gradient_apart <= GRADIENT_TOLERANCE
        losses = {"eager": eager.losses, integration.NAME: ours.losses}
        found.append(ModelFound(name, good, losses, apart, gradient_apart, worst))
        remarks.append(
            f"{name}: losses differ by {apart:.1e} at most, relative (tolerance {LOSS_TOLERANCE:.0e}), first gradients by {gradient_apart:.1e} "
            f"of the largest, in {worst} (tolerance {GRADIENT_TOLERANCE:.0e}): {'ok' if good else 'FAILED'}"
        )
    shown = sorted({*range(0, steps, max(1, steps // 12)), steps - 1})
    rows = [[str(step + 1), *(f"{losses[step]:.5f}" for each in found for losses in each.losses.values())] for step in shown]
    columns = ("step", *(f"{each.name} {kind}" for each in found for kind in each.losses))
    show_table(columns, rows, "Loss in nats a byte")
    print("\n".join(remarks))
    return found


def corpus() -> tuple[bytes, str]:
    """Real text: the README and the Python files of the repository, or of the package where it is installed without one; and its name."""
    package = Path(__file__).parent
    root = package.parent
    if (root / "README.md").exists() and (root / "pyproject.toml").exists():
        files = [root / "README.md", *sorted(p for name in ("dmattn", "tests", "benchmarks", "examples") for p in (root / name).rglob("*.py"))]
    else:
        files = sorted(package.rglob("*.py"))
    text = b"\n".join(path.read_bytes() for path in files)
    return text, f"{len(text):,} bytes of {len(files)} files of {'the repository' if files[0].suffix == '.md' else 'the package'}"


def sample(text: bytes, steps: int, device: torch.device, seed: int = 0) -> list[Tensor]:
    """A batch for each step: random windows of bytes (BATCH, WINDOW_BYTES), int64."""
    random = torch.Generator().manual_seed(seed)
    symbols = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    starts = torch.randint(0, len(text) - WINDOW_BYTES, (steps, BATCH, 1), generator=random)
    return list(symbols[starts + torch.arange(WINDOW_BYTES)].long().to(device))


def build_t5(attention: str) -> PreTrainedModel:
    """A T5 (1.1) of two layers, float32, without dropout, the same weights each time.

    Its feed-forward layers are smooth. With ReLU a rounding turns a unit on or off in one of 200 texts, and moves a gradient by 1e-3.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=256,
        eos_token_id=257,
        decoder_start_token_id=256,
        attn_implementation=attention,
    )
    return T5ForConditionalGeneration(config)


def build_llama(attention: str) -> PreTrainedModel:
    """A Llama of two layers with grouped queries, float32, the same weights each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WINDOW_BYTES,
        pad_token_id=256,
        bos_token_id=257,
        eos_token_id=257,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def t5_loss(model: PreTrainedModel, batch: Tensor) -> Tensor:
    """Continue a text: the encoder reads its first bytes, padded to different lengths, and the decoder writes the rest."""
    source, target = batch.split([SOURCE_BYTES, TARGET_BYTES], dim=1)
    lengths = SOURCE_BYTES - torch.arange(len(batch), device=batch.device)[:, None]
    real = torch.arange(SOURCE_BYTES, device=batch.device) < lengths
    return model(input_ids=source.masked_fill(~real, 256), attention_mask=real.long(), labels=target.contiguous()).loss


def llama_loss(model: PreTrainedModel, batch: Tensor) -> Tensor:
    """Predict each byte from those before it."""
    return model(input_ids=batch, labels=batch).loss


def train(model: PreTrainedModel, loss: Loss, batches: list[Tensor], device: torch.device) -> Training:
    """Train `model`, a step a batch."""
    model.to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in progress.track(batches, "steps"):
        optimizer.zero_grad()
        step_loss = loss(model, batch)
        step_loss.backward()
        if not losses:
            gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(step_loss.item())
    return Training(losses, gradients)


def compare_gradients(eager: Training, ours: Training) -> tuple[str, float]:
    """The parameter whose first gradients differ most, and by how much, relative to the largest entry; infinite where one has none."""
    apart = {}
    for name in eager.gradients.keys() | ours.gradients.keys():
        if name in eager.gradients and name in ours.gradients:
            largest = eager.gradients[name].abs().max().item()
            apart[name] = (eager.gradients[name] - ours.gradients[name]).abs().max().item() / max(largest, torch.finfo(torch.float32).tiny)
        else:
            apart[name] = float("inf")
    return max(apart.items(), key=lambda item: item[1])


def _dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, PyTorch computes on one thread: more gain nothing at these sizes, and on busy cores they wait for each other for minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _missing() -> str | None:
    """Why the models cannot be built, None where they can."""
    try:
        from .integrations import transformers  # noqa: F401
    except ImportError as error:
        return str(error)
    return None
