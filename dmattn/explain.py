"""Why a call runs as it does: the kernels that serve it, why faster ones do not, and the memory, work and time that follow from its shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .arguments import check_flag, refuse_arguments
from .biases import FactoredBias, RelativeBias
from .costs import Call, Copies
from .execution import backend, torch_kernel
from .factors import joined
from .functional import attention
from .problem import Gradients, Problem
from .targets import PEAKS, Peak, device_of

if TYPE_CHECKING:
    from .kernels.dispatch import Choice

__all__ = ["Explanation", "Pass", "Refusal", "explain"]


PYTORCH, CPU_KERNEL = "PyTorch, in chunks of query rows", "PyTorch's attention kernel for CPUs"
NAMES = Gradients._fields  # of what can require a gradient
RESULTS = ("out", *(f"d_{name}" for name in NAMES))


class Refusal(NamedTuple):
    """Kernels that were asked in vain, with all that keeps them from the call: reasons joined by "; "."""

    row: str
    reason: str


class Pass(NamedTuple):
    """One pass. `rows` are the kernels that make its results, in the order in which they run; `refusals` those that were asked before them.

    `makes` says of each row which results it makes in this call: a row's name has what it can make at once, but for `out` and
    the gradient of a bias of keys. One may make what others read. `memory` is in bytes, beyond inputs, results and a counter from which
    programs take their next block; None where it is not counted. Under a :class:`dmattn.FactoredBias` it has the copies of query and key that
    are joined with columns, and in the backward pass the gradients of these, of which d_query and d_key are views, not counted,
    nor are 8 bytes a factor in float16.
    `memory_besides` names what `memory` leaves out, some of it made only where it saves time: "lists of blocks" that a mask leaves; "columns of
    the bias of keys" and "the table in float32" of a :class:`dmattn.RelativeBias`, from which Hopper's kernels read these biases; "parts of
    d_bias" of a bias by query, on chip or by distance, and "parts of d_sinks", which are merged; and "factors in float32", where PyTorch's
    operations make their columns, as beside more leading axes. Results over parts of the keys are in `memory`, and parts of the gradient of any
    other bias that is shared; under a mask it has a byte of states for each 32 x 32 pairs of it, too.

    `flops` are those of the rows' matrix products. `bytes` are those of each input and each result once, of query and key with their columns.
    `seconds` is the larger of the times that both take at the peak of the target; None where that is unknown. Pairs that causal or a window
    hides are left out. The values of a mask are not read: where `is_masked`, `flops`, `bytes` and `seconds` are those of a mask that
    hides nothing, and one that hides pairs may take less. Where a pass works on an aligned copy of the bias, or of
    dBias, `copies` are what keeps the copy engine from the original: who removes these reasons saves the copy. Where blocks of queries would
    leave processors idle, the keys of each are split into `parts`, each for a program of its own. Where blocks of keys would, the queries of
    each are split into `query_parts`, for dK and dV in float32.
    """

    name: str
    rows: tuple[str, ...]
    makes: tuple[tuple[str, ...], ...]
    refusals: tuple[Refusal, ...]
    memory: int | None
    memory_besides: tuple[str, ...]
    flops: int
    bytes: int
    seconds: float | None
    is_masked: bool
    copies: tuple[str, ...] = ()
    parts: int = 1
    query_parts: int = 1

    def __str__(self) -> str:
        reasons: dict[str, list[str]] = {}
        for refusal in self.refusals:
            reasons.setdefault(refusal.reason, []).append(f'"{refusal.row}"')
        names = [f'"{row}"{_unlike_its_name(row, made)}' for row, made in zip(self.rows, self.makes, strict=True)]
        seconds = "unknown" if self.seconds is None else f"{self.seconds * 1e3:.3g} ms"
        if self.seconds is not None:
            seconds += ", or less where the mask hides pairs" if self.is_masked else " or more"
        memory = "not counted" if self.memory is None else _scaled(self.memory)
        if self.memory_besides:
            memory += f"; not counted, where made: {', '.join(self.memory_besides)}"
        return "\n".join(
            [
                f"{self.name}: {', '.join(names) or 'nothing to compute'}",
                *(f"  by an aligned copy: {reason}" for reason in self.copies),
                *(
                    line
                    for reason, rows in reasons.items()
                    for line in (f"  not {', '.join(rows)}:", *(f"    {one}" for one in reason.split("; ")))
                ),
                *([f"  keys of each block of queries: in {self.parts} parts"] if self.parts > 1 else []),
                *([f"  queries of each block of keys: in {self.query_parts} parts"] if self.query_parts > 1 else []),
                f"  memory beyond inputs and results: {memory}",
                f"  products: {_operations(self.flops)}; inputs and results: {_scaled(self.bytes)}",
                f"  time at the peak: {seconds}",
            ]
        )


class Explanation(NamedTuple):
    """What :func:`explain` returns. `target` is the family of the GPU, or "cpu"; `passes` are forward and backward.

    `head_dim` is that of queries and keys in the kernels, of which the last `columns` stand for the factors of a bias.
    """

    target: str
    passes: tuple[Pass, ...]
    head_dim: int
    columns: int

    def __str__(self) -> str:
        peak = PEAKS.get(self.target)
        known = "" if peak is None else f" ({peak.name}: {peak.flops / 1e12:.0f} TFLOP/s of 16-bit products, {peak.bandwidth / 1e12:.1f} TB/s)"
        joined = [f"queries and keys: head dim {self.head_dim}, of which {self.columns} columns for the factors"] if self.columns else []
        return "\n".join([f"target: {self.target}{known}", *joined, *map(str, self.passes)])


def explain(
    query: Tensor, key: Tensor, value: Tensor, *, target: str | None = None, processors: int | None = None, **options: Any
) -> Explanation:
    r"""Explain a call of :func:`dmattn.attention`: its kernels, why no faster ones serve it, and its work. Computes nothing.

    With P visible pairs of query and key in all batch entries and heads, a matrix product takes ``2 * P * D`` or ``2 * P * Dv`` operations.
    A forward pass has two. A backward pass has five, and those that its kernels repeat, but for one: in float32 over head dim 64 dV has a
    kernel of its own, whose scores are not counted. ``seconds = max(flops / peak, bytes / bandwidth)``, with the peak of 16-bit
    products. For float32 that is a sixth of it, as kernels add six products of bfloat16 parts, half of it where torch is asked for TF32, and
    the peak of plain float32 where torch is asked for "ieee", or on AMD's GPUs (:mod:`dmattn.precision`).

    Args:
        query: (..., H, Sq, D), key: (..., Hk, Sk, D), value: (..., Hk, Sk, Dv), as :func:`dmattn.attention` takes them: any number of axes
            before the heads, also none. On "cpu", "meta" or a GPU. Shapes, dtypes, strides and addresses matter, and values do not, but on a
            CPU for whether PyTorch's own kernel is exact.
        target: family of a GPU, "sm_80", "sm_90", "sm_100" or "gfx942", whether it is there or not. By default the device of the tensors; for
            those on "meta" the current GPU.
        processors: multiprocessors of the target: by default 108 (A100), 132 (H100, H200), 148 (B200), 304 (MI300X). Other families need it.
        options: the keywords of :func:`dmattn.attention`. A :class:`dmattn.FactoredBias` is computed as columns of query and key.

    The backward pass is that for the inputs that require a gradient, for all of them if none does. Its incoming gradient is taken to lie in
    memory as `out` does.

    Returns:
        An :class:`Explanation`, whose text is for people: memory in bytes, products in FLOP, time in seconds in its fields.

    Raises:
        TypeError, ValueError: as :func:`dmattn.attention`; also for a keyword that neither has, for a target that is no family of GPUs, or
            whose `processors` are not known, and for `processors` of a CPU.
        RuntimeError: the GPU or Triton needed is missing.
    """
    defaults: dict[str, Any] = attention.__kwdefaults__ or {}
    unknown = {name: option for name, option in options.items() if name not in defaults}
    if unknown:
        refuse_arguments(explain, (), unknown, tuple(defaults))
    given = {**defaults, **options}
    with_lse = given.pop("return_lse")
    check_flag("return_lse", with_lse)
    columns, own = 0, (query, key)
    if isinstance(given["bias"], FactoredBias):
        query, key, given["scale"] = joined(query, key, value, given["bias"], given["scale"], given["softcap"])
        given["bias"], columns = None, query.shape[-1] - own[0].shape[-1]
    problem = _canonical(query, key, value, given)
    table = given["bias"].table if isinstance(given["bias"], RelativeBias) else given["bias"]
    tensors = dict(query=query, key=key, value=value, **given | dict(bias=table))
    learned = {name: x for name in NAMES if (x := tensors[name]) is not None}
    some = any(x.requires_grad for x in learned.values())
    needs = tuple(name in learned and (learned[name].requires_grad or not some) for name in NAMES)
    family, count = device_of(problem, target, processors)
    served, peak = _by_kernels(problem, target), PEAKS.get(family)
    copies = Copies(columns, (own[0].requires_grad or not some, own[1].requires_grad or not some)) if columns else None
    call = Call(problem, needs, with_lse, served, copies)
    if served:
        forward, backward = _chosen(call, (_table_family(family), count))
        passes = (_by_rows(call, "forward", forward, peak), _by_rows(call, "backward", backward, peak))
    else:
        row = CPU_KERNEL if family == "cpu" and torch_kernel.serves(problem) else PYTORCH
        passes = (_by_pytorch(call, "forward", row, peak), _by_pytorch(call, "backward", PYTORCH, peak))
    return Explanation(family, passes, problem.query.shape[-1], columns)


def _canonical(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Problem:
    """The problem of a call; the generator that dropout would draw from is left as it was."""
    device = query.device if isinstance(query, Tensor) else torch.device("cpu")
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return Problem.canonical(query, key, value, **options)


def _by_kernels(problem: Problem, target: str | None) -> bool:
    """Whether Triton kernels serve a problem, on a GPU of the target if one is named."""
    return problem.query.dtype != torch.float64 if target is not None else backend.by_kernels(problem.query)


def _table_family(family: str) -> str:
    return "hip" if family.startswith("gfx") else family


def _chosen(call: Call, target: tuple[str, int]) -> tuple[tuple[Choice, ...], tuple[Choice, ...]]:
    """The rows of the table for both passes; none where there is nothing to compute."""
    backend.kernels(torch.device("meta"), backend.interpreting())  # which says that Triton is missing
    from .kernels import dispatch
    from .kernels.traits import Traits

    problem, out, lse = call.problem, call.out, call.lse
    forward = (dispatch.choose_forward(Traits.of(problem, out, target=target)),) if out.numel() or lse.numel() else ()
    gradients = Gradients(*(x if x is None or x.numel() else None for x in call.gradients))
    if not lse.numel() or all(x is None for x in gradients):
        return forward, ()
    return forward, dispatch.choose_backward(Traits.of(problem, out, out, gradients, target=target))


def _by_rows(call: Call, name: str, choices: tuple[Choice, ...], peak: Peak | None) -> Pass:
    """A pass by kernels."""
    from .kernels.base.device import rehearsed_for

    of_target = [(choice.traits.family, choice.traits.processors) for choice in choices[:1]]
    with rehearsed_for(*of_target[0]) if of_target else nullcontext():
        memory, parts = call.memory(name, choices), call.parts(name, choices)
        moved = call.bytes_moved(name, name == "forward" or call.reads_mask(choices)) if choices else 0
        query_parts = 1 if name == "forward" else call.query_parts(choices)
    refusals = dict.fromkeys(Refusal(*refusal) for choice in choices for refusal in choice.refusals)
    flops = sum(call.products(choice.makes, choice.row.reads) for choice in choices)
    rows = tuple((choice.row.name, _results(choice.makes)) for choice in choices)
    copies = tuple(reason for _, reason in choices[0].traits.aligned) if choices else ()
    return _costing(call, name, rows, tuple(refusals), memory, flops, moved, peak)._replace(copies=copies, parts=parts, query_parts=query_parts)


def _by_pytorch(call: Call, name: str, row: str, peak: Peak | None) -> Pass:
    """A pass by PyTorch's operations, whose memory is not counted."""
    made = {"out"} if name == "forward" else {f"d_{name}" for name, need in zip(NAMES, call.needs, strict=True) if need}
    return _costing(call, name, ((row, _results(made)),), (), (None, ()), call.products(made, ()), call.bytes_moved(name), peak)


def _costing(
    call: Call,
    name: str,
    rows: tuple[tuple[str, tuple[str, ...]], ...],
    refusals: tuple[Refusal, ...],
    memory: tuple[int | None, tuple[str, ...]],
    flops: int,
    moved: int,
    peak: Peak | None,
) -> Pass:
    seconds, dtype = None, call.problem.query.dtype
    if peak is not None and dtype != torch.float64:
        seconds = max(flops / peak.rate(dtype), moved / peak.bandwidth)
    is_masked = call.problem.is_masked or call.problem.first is not None
    names, makes = tuple(row for row, _ in rows), tuple(made for _, made in rows)
    return Pass(name, names, makes, refusals, *memory, flops, moved, seconds, is_masked)


def _results(makes: Iterable[str]) -> tuple[str, ...]:
    """The results among what a row makes, without the kind of a bias."""
    names = {name.partition(" of ")[0] for name in makes}
    return tuple(name for name in RESULTS if name in names)


def _unlike_its_name(row: str, made: tuple[str, ...]) -> str:
    """What a row makes in a call, for people, where its name has no gradients or others; else nothing."""
    named = re.findall(r"(?<!of )d_[a-z]+", row.partition(": ")[2] or row)
    are_gradients = bool(named) or any(name.startswith("d_") for name in made)
    return f" (makes {', '.join(made) or 'what others read'})" if are_gradients and set(named) != set(made) else ""


def _operations(count: int) -> str:
    """FLOP as people read them."""
    if count < 1e5:
        return f"{count} FLOP"
    return f"{count / 1e9:,.1f} GFLOP" if count >= 1e8 else f"{count / 1e6:,.1f} MFLOP"


def _scaled(count: int) -> str:
    """Bytes as people read them."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"
