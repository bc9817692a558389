"""Why a call runs as it does: the kernels that serve it, why faster ones do not, and the memory, work and time that follow from its shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .arguments import check_flag, refuse_arguments
from .biases import FactoredBias, RelativeBias
from .execution import backend, torch_kernel
from .factors import joined
from .functional import attention
from .masks import BOUNDS
from .problem import Gradients, Problem
from .rehearsal import without_storage
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

    `makes` says of each row which results it makes in this call: a row's name has all that it can make at once. One may make what others read.
    `memory` is in bytes, beyond inputs, results and a number from which programs draw their work; None where it is not counted. Under a
    :class:`dmattn.FactoredBias` it has the copies of query and key that are joined with columns, and in the backward pass their gradients but
    for d_query and d_key. Where `memory_is_least`, the kernels may add lists of blocks, columns of a bias of keys and sums in parts, as many as
    they find worth it, and joining query and key with columns may take factors in float32.
    `flops` are those of the rows' matrix products. `bytes` are those of each input and each result once, of query and key with their columns.
    `seconds` is the larger of the times
    that both take at the peak of the target; None where that is unknown. Pairs that causal or a window hides are left out. The values of a mask
    are not read: where `is_masked`, all three are those of a mask that hides nothing, and one that hides pairs may take less.
    """

    name: str
    rows: tuple[str, ...]
    makes: tuple[tuple[str, ...], ...]
    refusals: tuple[Refusal, ...]
    memory: int | None
    memory_is_least: bool
    flops: int
    bytes: int
    seconds: float | None
    is_masked: bool

    def __str__(self) -> str:
        reasons: dict[str, list[str]] = {}
        for refusal in self.refusals:
            reasons.setdefault(refusal.reason, []).append(f'"{refusal.row}"')
        names = [f'"{row}"{_unlike_its_name(row, made)}' for row, made in zip(self.rows, self.makes, strict=True)]
        seconds = "unknown" if self.seconds is None else f"{self.seconds * 1e3:.3g} ms"
        if self.seconds is not None:
            seconds += ", or less where the mask hides pairs" if self.is_masked else " or more"
        memory = "not counted" if self.memory is None else _scaled(self.memory)
        if self.memory_is_least:
            memory = f"at least {memory}, without lists of blocks, columns of a bias of keys, sums in parts and factors in float32"
        return "\n".join(
            [
                f"{self.name}: {', '.join(names) or 'nothing to compute'}",
                *(
                    line
                    for reason, rows in reasons.items()
                    for line in (f"  not {', '.join(rows)}:", *(f"    {one}" for one in reason.split("; ")))
                ),
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
    A forward pass has two. A backward pass has five, and those that its kernels repeat. ``seconds = max(flops / peak, bytes / bandwidth)``.

    Args:
        query: (B, H, Sq, D), key: (B, Hk, Sk, D), value: (B, Hk, Sk, Dv), as :func:`dmattn.attention` takes them, on "cpu", "meta" or a GPU.
            Shapes, dtypes, strides and addresses matter, and values do not, but on a CPU for whether PyTorch's own kernel is exact.
        target: family of a GPU, "sm_80", "sm_90", "sm_100" or "gfx942", whether it is there or not. By default the device of the tensors; for
            those on "meta" the current GPU.
        processors: multiprocessors of the target: by default 108 (A100), 132 (H100, H200), 148 (B200), 304 (MI300X). Other families need it.
        options: the keywords of :func:`dmattn.attention`. A :class:`dmattn.FactoredBias` is computed as columns of query and key.

    The backward pass is that for the inputs that require a gradient, for all of them if none does. Its incoming gradient is taken to lie in
    memory as `out` does.

    Returns:
        An :class:`Explanation`, whose text is for people: memory in bytes, products in FLOP, time in seconds in its fields.

    Raises:
        TypeError, ValueError: as :func:`dmattn.attention`; also for a target that is no family of GPUs, or whose `processors` are not known,
            and for `processors` of a CPU.
        RuntimeError: the GPU or Triton needed is missing.
    """
    defaults: dict[str, Any] = attention.__kwdefaults__ or {}
    unknown = {name: option for name, option in options.items() if name not in defaults}
    if unknown:
        refuse_arguments(attention, (), unknown)
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
    copies = _Copies(columns, (own[0].requires_grad or not some, own[1].requires_grad or not some)) if columns else None
    call = _Call(problem, needs, with_lse, served, copies)
    if served:
        forward, backward = _chosen(call, (_table_family(family), count))
        passes = (call.explained("forward", forward, peak), call.explained("backward", backward, peak))
    else:
        row = CPU_KERNEL if family == "cpu" and torch_kernel.serves(problem) else PYTORCH
        passes = (call.by_pytorch("forward", row, peak), call.by_pytorch("backward", PYTORCH, peak))
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


def _chosen(call: _Call, target: tuple[str, int]) -> tuple[tuple[Choice, ...], tuple[Choice, ...]]:
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


class _Seen(NamedTuple):
    """What causal and the window leave of one (batch, head)."""

    queries: int
    keys: int
    pairs: int

    @classmethod
    def of(cls, problem: Problem) -> _Seen:
        len_q, len_k = problem.query.shape[-2], problem.key.shape[-2]
        place = torch.arange(len_q, device="cpu") + (len_k - len_q)  # of the key that stands where a query does
        begin = torch.zeros_like(place) if problem.left is None else (place - problem.left).clamp(0, len_k)
        end = torch.full_like(place, len_k) if problem.right is None else (place + problem.right + 1).clamp(0, len_k)
        pairs = (end - begin).clamp(min=0)
        unseen = int(begin.min()) if len_q else 0
        return cls(int((pairs > 0).sum()), len_k - unseen if len_q else 0, int(pairs.sum()))


def _between_ends(problem: Problem) -> Problem:
    """A problem whose window leaves the pairs of other distances than the ends of its table stand for."""
    assert problem.bias is not None
    assert problem.zero is not None
    left, right = problem.zero - 1, problem.bias.shape[-1] - 2 - problem.zero
    left = left if problem.left is None else min(left, problem.left)
    return problem._replace(left=left, right=right if problem.right is None else min(right, problem.right))


class _Copies(NamedTuple):
    """Query and key with `columns` for the factors of a bias, and which of the two need a gradient themselves, not for the factors alone."""

    columns: int
    needs: tuple[bool, bool]


class _Call:
    """A problem and its results on tensors without storage, and which of `NAMES` get a gradient. Kernels make states of a mask."""

    def __init__(self, problem: Problem, needs: tuple[bool, ...], with_lse: bool, by_kernels: bool, copies: _Copies | None = None) -> None:
        placed: dict[str, Any] = {name: without_storage(x) for name, x in problem._asdict().items() if isinstance(x, Tensor)}
        self.problem = problem._replace(**placed)
        self.needs, self.with_lse, self.copies, self.seen = needs, with_lse, copies, _Seen.of(problem)
        self.between_ends = self.seen if problem.zero is None else _Seen.of(_between_ends(problem))
        self.out, self.lse, states = backend.allocate_forward(self.problem)
        self.states = states if by_kernels else None
        self.gradients = backend.allocate_backward(self.problem, needs)

    def explained(self, name: str, choices: tuple[Choice, ...], peak: Peak | None) -> Pass:
        """A pass by kernels."""
        refusals = dict.fromkeys(Refusal(*refusal) for choice in choices for refusal in choice.refusals)
        memory, is_least = self._memory(name, choices)
        if self.copies is not None:
            memory, is_least = memory + self._of_copies(name, self.copies), is_least or self._has_factors_besides(name)
        flops = sum(self._products(choice.makes, choice.row.reads) for choice in choices)
        rows = tuple((choice.row.name, _results(choice.makes)) for choice in choices)
        return self._costing(name, rows, tuple(refusals), memory, is_least, flops, peak)

    def by_pytorch(self, name: str, row: str, peak: Peak | None) -> Pass:
        """A pass by PyTorch's operations, whose memory is not counted."""
        made = {"out"} if name == "forward" else {f"d_{name}" for name, need in zip(NAMES, self.needs, strict=True) if need}
        return self._costing(name, ((row, _results(made)),), (), None, False, self._products(made, ()), peak)

    def _costing(
        self,
        name: str,
        rows: tuple[tuple[str, tuple[str, ...]], ...],
        refusals: tuple[Refusal, ...],
        memory: int | None,
        is_least: bool,
        flops: int,
        peak: Peak | None,
    ) -> Pass:
        moved = self._bytes(name) if rows else 0
        seconds = None
        if peak is not None and self.problem.query.dtype != torch.float64:
            rate = peak.flops / (2 if self.problem.query.dtype == torch.float32 else 1)
            seconds = max(flops / rate, moved / peak.bandwidth)
        is_masked = self.problem.is_masked or self.problem.first is not None
        names, makes = tuple(row for row, _ in rows), tuple(made for _, made in rows)
        return Pass(name, names, makes, refusals, memory, is_least, flops, moved, seconds, is_masked)

    def _products(self, makes: Iterable[str], reads: Iterable[str]) -> int:
        """Operations of the matrix products with which a row makes its results."""
        *sequences, _, dim = self.problem.query.shape
        value_dim = self.problem.value.shape[-1]
        made = {name for name in makes if name.startswith(("out", "d_", "sums")) and name not in ("d_bias of queries", "d_sinks")}
        if not made:
            return 0
        dims = {"out": value_dim, "d_query": dim, "d_key": dim, "d_value": value_dim}
        size = sum(dims.get(name, 0) for name in made)
        if "d_bias of pairs" not in reads:  # of which d_query is the product, with nothing to repeat
            size += dim + (value_dim if made - {"out", "d_value"} else 0)
        pairs = self.between_ends.pairs if "d_bias of distances" in made else self.seen.pairs
        return 2 * size * pairs * math.prod(sequences)

    def _bytes(self, name: str) -> int:
        """Those of each input and each result once, without what causal and the window hide."""
        problem, seen = self.problem, self.seen
        total = self._along(problem.query, seen.queries) + self._along(problem.key, seen.keys) + self._along(problem.value, seen.keys)
        total += sum(self._along(x[..., None], seen.keys) for name in BOUNDS if (x := getattr(problem, name)) is not None)
        if problem.bias is not None:
            total += self._between(problem.bias) if problem.zero is None else _size(problem.bias)
        total += _size(problem.sinks)
        if problem.mask is not None and (name == "forward" or self.states is None):  # whose states say that nothing is hidden
            total += self._between(problem.mask)
        total += _size(problem.blocks, problem.bits, problem.states)
        if name == "forward":
            return total + _size(self.out, self.lse, self.states)
        results = _size(*self.gradients)
        read = self._along(self.out, seen.queries) + self._along(self.out, seen.queries) + self._along(self.lse[..., None], seen.queries)
        return total + read + results + _size(self.states) + (_size(self.lse) if self.with_lse else 0)

    def _along(self, x: Tensor, length: int) -> int:
        *sequences, rows, cols = _sizes(x)
        return math.prod(sequences) * min(rows, length) * cols * x.element_size()

    def _between(self, x: Tensor) -> int:
        (*sequences, rows, cols), seen = _sizes(x), self.seen
        is_pairs = rows > 1 and cols > 1
        entries = seen.pairs if is_pairs else min(rows, seen.queries) * min(cols, seen.keys)
        return math.prod(sequences) * entries * x.element_size()

    def _memory(self, name: str, choices: tuple[Choice, ...]) -> tuple[int, bool]:
        """(bytes, whether there may be more)."""
        problem = self.problem
        if not choices:
            return 0, False
        is_of_keys = problem.key_bias is not None
        is_hopper = any(choice.row.targets is not None for choice in choices)
        is_least = problem.is_masked or problem.first is not None or ((is_of_keys or problem.zero is not None) and is_hopper)
        from .kernels.base.leading import flattened, flattened_gradients
        from .kernels.base.query_terms import Incoming

        problem, out, lse = flattened(problem, self.out, self.lse)
        d_query = None if name == "forward" else flattened_gradients(self.gradients, self.problem).query
        is_least |= any(_in_parts(problem, out, d_query, choice.row.name) for choice in choices)
        if name == "forward":
            return _size(self.states), is_least or choices[0].row.name == "split keys"
        d_bias = flattened_gradients(self.gradients, self.problem).bias
        makes = frozenset[str]().union(*(choice.makes for choice in choices))
        total = 0
        incoming = Incoming.without_terms(
            out,
            lse,
            as_vectors="query terms" in makes,
            as_delta="delta" in makes,
            as_columns="columns of query terms" in makes,
        )
        total += _size(incoming.terms, incoming.delta, incoming.term_columns)
        if d_bias is not None and is_of_keys:
            from .kernels.base.key_sums import empty_key_sums

            sums = empty_key_sums(d_bias, problem)
            total += 0 if sums is d_bias else _size(sums) + 4 * d_bias.numel()
        if "sums at the ends" in makes:
            total += 2 * _size(self.lse)
        by_one_program = any({"d_query", "d_bias of pairs, shared"} <= choice.row.needs for choice in choices)
        in_parts = not makes.isdisjoint({"d_bias of queries", "d_bias of distances", "d_sinks"})
        return total, is_least or ("d_bias of pairs, shared" in makes and not by_one_program) or in_parts

    def _of_copies(self, name: str, copies: _Copies) -> int:
        """Bytes of query and key with columns for factors; in a backward pass of their gradients, of which d_query and d_key are views."""
        if name == "forward":
            return _size(self.problem.query, self.problem.key)
        width, total = self.problem.query.shape[-1], 0
        for gradient, is_result in zip((self.gradients.query, self.gradients.key), copies.needs, strict=True):
            total += _size(gradient) * (copies.columns if is_result else width) // width
        return total

    def _has_factors_besides(self, name: str) -> bool:
        """Whether the columns of factors, or their gradients, take tensors besides: in float16, and where PyTorch's operations make them."""
        query, key = self.problem.query, self.problem.key
        some = name == "forward" or self.gradients.query is not None or self.gradients.key is not None
        return some and (query.dtype == torch.float16 or query.ndim != 4 or not (query.numel() and key.numel()))


def _in_parts(problem: Problem, out: Any, d_query: Any, row: str) -> bool:
    """Whether kernels may split the keys of each block of queries, and merge results of the parts."""
    kernel = row.removesuffix(", pairs loaded")
    if kernel not in ("Hopper", "Hopper: d_query"):
        return False
    from .kernels.hopper.backward_sizes import query_sizes
    from .kernels.hopper.copies import forward_dims
    from .kernels.hopper.forward_sizes import sizes_of
    from .kernels.hopper.walk import parts_of_keys

    batch, heads, len_q, _ = problem.query.shape
    forward = kernel == "Hopper"
    if forward:
        consumers = sizes_of(problem, *forward_dims(problem), loaded=row != kernel).consumers
    else:
        consumers = query_sizes(problem).consumers
    block = 64 * consumers
    return parts_of_keys(problem, batch * heads * -(-len_q // block), out if forward else d_query) > 1


def _results(makes: Iterable[str]) -> tuple[str, ...]:
    """The results among what a row makes, without the kind of a bias."""
    names = {name.partition(" of ")[0] for name in makes}
    return tuple(name for name in RESULTS if name in names)


def _unlike_its_name(row: str, made: tuple[str, ...]) -> str:
    """What a row makes in a call, for people, where its name has other results; else nothing."""
    named = re.findall(r"(?<!of )d_[a-z]+", row.partition(": ")[2])
    return f" (makes {', '.join(made) or 'what others read'})" if named and set(named) != set(made) else ""


def _sizes(x: Tensor) -> list[int]:
    """The lengths of all axes, 1 of one that was expanded."""
    return [size if stride else min(size, 1) for size, stride in zip(x.shape, x.stride(), strict=True)]


def _size(*tensors: Tensor | None) -> int:
    return sum(math.prod(x.shape) * x.element_size() for x in tensors if x is not None)


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
