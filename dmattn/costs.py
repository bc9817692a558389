"""What a call takes, from its shapes: the operations of its products, the bytes that it moves, and the memory of its kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .execution import backend
from .masks import BOUNDS
from .problem import Problem
from .rehearsal import without_storage

if TYPE_CHECKING:
    from .kernels.dispatch import Choice


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


class Copies(NamedTuple):
    """Query and key with `columns` for the factors of a bias, and which of the two need a gradient themselves, not for the factors alone."""

    columns: int
    needs: tuple[bool, bool]


class Call:
    """A problem and its results on tensors without storage, and which of `Gradients` get a gradient. Kernels make states of a mask."""

    def __init__(self, problem: Problem, needs: tuple[bool, ...], with_lse: bool, by_kernels: bool, copies: Copies | None = None) -> None:
        placed: dict[str, Any] = {name: without_storage(x) for name, x in problem._asdict().items() if isinstance(x, Tensor)}
        self.problem = problem._replace(**placed)
        self.needs, self.with_lse, self.copies, self.seen = needs, with_lse, copies, _Seen.of(problem)
        self.between_ends = self.seen if problem.zero is None else _Seen.of(_between_ends(problem))
        self.out, self.lse, states = backend.allocate_forward(self.problem)
        self.states = states if by_kernels else None
        self.gradients = backend.allocate_backward(self.problem, needs)

    def products(self, makes: Iterable[str], reads: Iterable[str]) -> int:
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

    def bytes_moved(self, name: str, reads_mask: bool = True) -> int:
        """Those of each input and each result once, without what causal and the window hide.

        A pass that does not read its mask goes by the mask's states, which may say that nothing is hidden.
        """
        problem, seen = self.problem, self.seen
        total = self._along(problem.query, seen.queries) + self._along(problem.key, seen.keys) + self._along(problem.value, seen.keys)
        total += sum(self._along(x[..., None], seen.keys) for name in BOUNDS if (x := getattr(problem, name)) is not None)
        if problem.bias is not None:
            total += self._between(problem.bias) if problem.zero is None else _size(problem.bias)
        total += _size(problem.sinks)
        if problem.mask is not None and reads_mask:
            total += self._between(problem.mask)
        total += _size(problem.blocks, problem.bits, problem.states)
        if name == "forward":
            return total + _size(self.out, self.lse, self.states)
        results = _size(*self.gradients)
        read = self._along(self.out, seen.queries) + self._along(self.out, seen.queries) + self._along(self.lse[..., None], seen.queries)
        return total + read + results + _size(self.states) + (_size(self.lse) if self.with_lse else 0)

    def reads_mask(self, choices: tuple[Choice, ...]) -> bool:
        """Whether a backward pass by these rows reads its mask again: for bits or states, or as none of its kernels goes by states."""
        from .kernels.base.leading import flattened
        from .kernels.run import bits_for, scans_itself

        if self.problem.mask is None:
            return False
        problem, out = flattened(self.problem, self.out)
        by_bytes = any(not choice.row.looks_for_blocks and not choice.makes.isdisjoint(("d_query", "d_key", "d_value")) for choice in choices)
        return by_bytes or bits_for(problem, choices) is not None or scans_itself(problem, out, choices)

    def _along(self, x: Tensor, length: int) -> int:
        *sequences, rows, cols = _sizes(x)
        return math.prod(sequences) * min(rows, length) * cols * x.element_size()

    def _between(self, x: Tensor) -> int:
        (*sequences, rows, cols), seen = _sizes(x), self.seen
        is_pairs = rows > 1 and cols > 1
        entries = seen.pairs if is_pairs else min(rows, seen.queries) * min(cols, seen.keys)
        return math.prod(sequences) * entries * x.element_size()

    def memory(self, name: str, choices: tuple[Choice, ...]) -> tuple[int, tuple[str, ...]]:
        """(bytes of a pass, beyond inputs and results, what else it may take)."""
        memory, besides = self._of_kernels(name, choices)
        if self.copies is not None:
            memory += self._of_copies(name, self.copies)
            besides |= {"factors in float32": self._has_factors_besides(name)}
        return memory, tuple(what for what, is_taken in besides.items() if is_taken)

    def parts(self, name: str, choices: tuple[Choice, ...]) -> int:
        """Into how many parts the keys of each block of queries are split in a pass, for programs to keep all processors busy."""
        if not choices:
            return 1
        from .kernels.base.leading import flattened, flattened_gradients
        from .kernels.portable.stored_scores import in_parts

        problem, out = flattened(self.problem, self.out)
        d_query = None if name == "forward" else flattened_gradients(self.gradients, self.problem).query
        found = [_of_parts(problem, out, d_query, choice.row.name)[0] for choice in choices]
        if d_query is not None and any(choice.row.name == "portable, dS stored" for choice in choices):
            found += [_of_parts(few, None, d_query[part], "portable: d_query of d_bias")[0] for part, few in in_parts(problem)]
        return max(found)

    def query_parts(self, choices: tuple[Choice, ...]) -> int:
        """Into how many parts the queries of each block of keys are split for dK and dV."""
        from .kernels.base.leading import flattened
        from .kernels.portable.stored_scores import in_parts

        problem = flattened(self.problem)[0]
        found = [1, *(_of_query_parts(problem, choice) for choice in choices)]
        for choice in choices:
            if choice.row.name == "portable, dS stored":
                found += [_of_query_parts(few, _as_keys(choice)) for _, few in in_parts(problem)]
        return max(found)

    def _of_kernels(self, name: str, choices: tuple[Choice, ...]) -> tuple[int, dict[str, bool]]:
        problem = self.problem
        if not choices:
            return 0, {}
        from .kernels.base.leading import by_entry, flattened, flattened_gradients
        from .kernels.base.query_terms import Incoming
        from .kernels.run import bits_for, looks_for_blocks, scans_itself

        is_of_keys, looks = problem.key_bias is not None, any(looks_for_blocks(problem, choice.row) for choice in choices)
        is_hopper = any(choice.row.targets is not None for choice in choices)
        problem, out, lse = flattened(problem, self.out, self.lse)
        d_query = None if name == "forward" else flattened_gradients(self.gradients, self.problem).query
        besides = {
            "lists of blocks": looks and (problem.is_masked or problem.first is not None),
            "columns of the bias of keys": is_of_keys and is_hopper,
            "the table in float32": problem.zero is not None and is_hopper,
        }
        total = sum(_of_parts(problem, out, d_query, choice.row.name)[1] for choice in choices)
        if copies := dict(choices[0].traits.aligned):
            from .kernels.hopper.aligned import empty_aligned

            copy = empty_aligned(by_entry(problem.bias))
            total += len(copies) * copy.shape[0] * copy.stride(0) * copy.element_size()
        bits = bits_for(problem, choices)
        total += 0 if bits is None else bits.untyped_storage().nbytes()
        if name == "forward":
            return total + _size(self.states), besides
        d_bias = flattened_gradients(self.gradients, self.problem).bias
        makes = frozenset[str]().union(*(choice.makes for choice in choices))
        incoming = Incoming.without_terms(
            out,
            lse,
            as_vectors="query terms" in makes,
            as_delta="delta" in makes,
            as_columns="columns of query terms" in makes,
        )
        total += _size(incoming.terms, incoming.delta, incoming.term_columns)
        if scans_itself(problem, out, choices):
            total += _size(self.states)
        if d_bias is not None and is_of_keys:
            from .kernels.base.key_sums import empty_key_sums

            sums = empty_key_sums(d_bias, problem)
            total += 0 if sums is d_bias else _size(sums) + 4 * d_bias.numel()
        total += sum(self._of_group_parts(problem, choice, d_bias) for choice in choices)
        shared = [choice.row for choice in choices if "d_bias of pairs, shared" in choice.makes]
        total += sum(_of_shared_parts(problem, d_bias, row.name) for row in shared)
        total += sum(self._of_stored_scores(problem, choice, d_query, d_bias) for choice in choices if choice.row.name == "portable, dS stored")
        if "sums at the ends" in makes:
            total += 2 * _size(self.lse)
        in_parts = not makes.isdisjoint({"d_bias of queries", "d_bias of distances"})
        besides["parts of d_bias"] = any(row.borrows for row in shared) or in_parts  # borrowed where there is room
        besides["parts of d_sinks"] = "d_sinks" in makes
        return total, besides

    def _of_group_parts(self, problem: Problem, choice: Choice, d_bias: Any) -> int:
        """Bytes of dK, dV and sums of dS by key in parts, where the query heads of a group, or queries of a head, are dealt out to programs."""
        name = choice.row.name.removesuffix(", pairs loaded")
        if choice.makes.isdisjoint({"d_key", "d_value", "d_bias of keys"}) or not name.startswith(("Hopper: d_key", "portable: d_key")):
            return 0
        from .kernels.hopper import key_grad as hopper_key_grad
        from .kernels.hopper import key_grad_intervals
        from .kernels.portable import key_grad
        from .kernels.portable.group_parts import count_parts

        kernels = key_grad if name.startswith("portable") else key_grad_intervals if name.endswith("by intervals") else hopper_key_grad
        programs, places = kernels.fill_of(problem, d_bias if "d_bias of pairs" in choice.makes else None)
        parts = count_parts(problem, programs, places, problem.order) * _of_query_parts(problem, choice)
        results = [x for key, x in (("d_key", problem.key), ("d_value", problem.value)) if key in choice.makes]
        if "d_bias of keys" in choice.makes and d_bias.shape[:2] == problem.key.shape[:2] and d_bias.shape[1] < problem.query.shape[1]:
            results.append(d_bias)
        return 4 * parts * sum(x.numel() for x in results) if parts > 1 else 0

    def _of_stored_scores(self, problem: Problem, choice: Choice, d_query: Any, d_bias: Any) -> int:
        """Bytes of dS of some batch entries, of the parts of their gradients, one after the other, and of the sums of a shared `d_bias`."""
        from .kernels.portable.stored_scores import entries_at_once, in_parts

        (batch, heads, len_q, _), len_k = problem.query.shape, problem.key.shape[2]
        entries = entries_at_once(batch, heads, len_q, len_k)
        total = 4 * entries * heads * len_q * len_k
        for part, few in in_parts(problem):
            total += _of_parts(few, None, d_query[part], "portable: d_query of d_bias")[1]
            total += self._of_group_parts(few, _as_keys(choice), None if d_bias is None else d_bias[part])
        if "d_bias of pairs, shared" in choice.makes:
            total += 4 * d_bias.numel() * (2 if entries < batch and d_bias.shape[0] == 1 else 1)  # the total, and the sum of a part
        return total

    def _of_copies(self, name: str, copies: Copies) -> int:
        """Bytes of query and key with columns for factors; in a backward pass of their gradients, of which d_query and d_key are views."""
        if name == "forward":
            return _size(self.problem.query, self.problem.key)
        width, total = self.problem.query.shape[-1], 0
        for gradient, is_result in zip((self.gradients.query, self.gradients.key), copies.needs, strict=True):
            total += _size(gradient) * (copies.columns if is_result else width) // width
        return total

    def _has_factors_besides(self, name: str) -> bool:
        """Whether the columns of factors, or their gradients, take tensors besides, as where PyTorch's operations make them."""
        query, key = self.problem.query, self.problem.key
        some = name == "forward" or self.gradients.query is not None or self.gradients.key is not None
        return some and (query.ndim != 4 or not (query.numel() and key.numel()))


def _as_keys(choice: Choice) -> Choice:
    """The choice of a kernel that makes dK and dV for another row."""
    return choice._replace(row=choice.row._replace(name="portable: d_key"))


def _of_query_parts(problem: Problem, choice: Choice) -> int:
    """Into how many parts a choice splits the queries of each block of keys for dK and dV."""
    if not choice.row.name.startswith("portable: d_key"):
        return 1
    from .kernels.portable.group_parts import count_query_parts
    from .kernels.portable.key_grad import fill_of

    return count_query_parts(problem, *fill_of(problem), "d_bias of keys" in choice.makes or None, problem.order)


def _of_parts(problem: Problem, out: Any, d_query: Any, row: str) -> tuple[int, int]:
    """(how many parts the keys of each block of queries have, bytes of results over them, in float32, which are merged).

    Those of out come with a maximum and a sum for each row.
    """
    kernel, (batch, heads, len_q, _) = row.removesuffix(", pairs loaded"), problem.query.shape
    value_dim, works = problem.value.shape[3], batch * heads
    of_out, of_query = (4 * batch * heads * len_q * width for width in (value_dim + 2, problem.query.shape[3]))
    if kernel == "split keys":
        from .kernels.portable.split_keys import plan_of

        splits = plan_of(problem).splits
        return splits, splits * of_out if splits > 1 or problem.ends_q is not None else 0
    if kernel == "portable" or kernel.startswith("portable: d_query"):
        from .kernels.base.tiles import pick
        from .kernels.portable import key_parts

        result, count = (out, key_parts.parts_of_out) if kernel == "portable" else (d_query, key_parts.parts_of_queries)
        if problem.ends_q is not None or result is None:
            return 1, 0
        tile = pick("forward" if kernel == "portable" else "queries of d_bias" if kernel.endswith("of d_bias") else "queries", problem)
        parts = count(problem, works * -(-len_q // tile.block_m), result)
        return parts, parts * (of_out if kernel == "portable" else of_query) if parts > 1 else 0
    if kernel not in ("Hopper", "Hopper: d_query"):
        return 1, 0
    from .kernels.hopper.backward_sizes import query_sizes
    from .kernels.hopper.copies import forward_dims
    from .kernels.hopper.forward_sizes import sizes_of
    from .kernels.hopper.walk import OF_OUT, OF_QUERIES, parts_of_keys

    forward = kernel == "Hopper"
    consumers = (sizes_of(problem, *forward_dims(problem), loaded=row != kernel) if forward else query_sizes(problem)).consumers
    result, merging = (out, OF_OUT) if forward else (d_query, OF_QUERIES)
    parts = parts_of_keys(problem, works * -(-len_q // (64 * consumers)), result, merging)
    return parts, parts * (of_out if forward else of_query) if parts > 1 else 0


def _of_shared_parts(problem: Problem, d_bias: Any, row: str) -> int:
    """Bytes of the parts, in float32, of the gradient of a bias that several (batch, head) share."""
    if row == "one tile":
        from .kernels.portable.one_tile import sharing_of
    elif row.startswith("Hopper: d_bias"):
        from .kernels.hopper.rest_of_tiles import divided

        return divided(problem, d_bias)[1].bytes(d_bias)
    elif row == "portable: d_bias":
        from .kernels.portable.bias_grad import sharing_of
    else:
        return 0
    splits: int = sharing_of(problem, d_bias).splits
    return 4 * splits * d_bias.numel() if splits > 1 else 0


def _sizes(x: Tensor) -> list[int]:
    """The lengths of all axes, 1 of one that was expanded."""
    return [size if stride else min(size, 1) for size, stride in zip(x.shape, x.stride(), strict=True)]


def _size(*tensors: Tensor | None) -> int:
    return sum(math.prod(x.shape) * x.element_size() for x in tensors if x is not None)
