"""The two passes: `dispatch` chooses rows of its table for a call, and the functions of these rows are called here, in the order chosen."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..broadcast import per_query_gradient
from ..own_rows import begins_and_lengths, own_rows
from ..problem import Gradients, Problem
from .base.key_sums import empty_key_sums, sum_of_key_sums
from .base.launch import on_its_device
from .base.layout import first_rows_in_blocks
from .base.leading import by_entry, flattened, flattened_gradients, in_few_runs, in_parts, with_entries
from .base.query_terms import Incoming, fill_terms
from .base.tiles import FEW_ROWS
from .dispatch import Choice, Row, choose_backward, choose_forward, say_what_is_slow
from .hopper import bias_grad as hopper_bias_grad
from .hopper import forward as hopper_forward
from .hopper import key_grad as hopper_key_grad
from .hopper import key_grad_intervals as hopper_key_grad_intervals
from .hopper import one_pass as hopper_one_pass
from .hopper import query_grad as hopper_query_grad
from .hopper import shared_query_grad as hopper_shared_query_grad
from .hopper.aligned import aligned_copy, copy_pairs, empty_aligned
from .hopper.distances import spread_table
from .hopper.resident import key_grad as hopper_resident_key_grad
from .hopper.resident import query_grad as hopper_resident_query_grad
from .portable import bias_grad, distance_grad, key_grad, one_tile, one_tile_forward, query_grad, rows, sink_grad, split_keys, stored_scores
from .portable import forward as portable_forward
from .selection.reorder import reordered
from .traits import (
    D_BIAS_OF_DISTANCES,
    D_BIAS_OF_KEYS,
    D_BIAS_OF_PAIRS,
    D_BIAS_OF_QUERIES,
    D_BIAS_SHARED,
    D_KEY,
    D_QUERY,
    D_SINKS,
    D_VALUE,
    DELTA,
    END_SUMS,
    PARTIAL,
    QUERY_TERMS,
    TERM_COLUMNS,
    TERM_FORMS,
    Traits,
)
from .visits.lists import LISTED
from .visits.mask_blocks import BLOCK, empty_bits, scan, slices_of

D_BIASES = {D_BIAS_OF_PAIRS, D_BIAS_SHARED, D_BIAS_OF_KEYS, D_BIAS_OF_QUERIES, D_BIAS_OF_DISTANCES}
READERS_OF_BITS = 4  # (batch, head) for each slice of a mask, at least, for one tile to read it by bits
PAIRS_OF_BITS = 1 << 22  # and pairs of all of them
SMALLEST = 32  # keys or queries of the smallest tile of Hopper's kernels that read bits
Made = dict[str, Tensor]  # the results that a row makes in a call, by the names that `traits` gives them
# The module of each row of the table, whose `forward` fills out and lse of a problem.
FORWARD = {
    "one tile": one_tile_forward,
    "split keys": split_keys,
    "Hopper": hopper_forward,
    "Hopper, pairs loaded": hopper_forward,
    "portable": portable_forward,
}


@on_its_device
def forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Fill `out` (..., H, Sq, Dv) and `lse` (..., H, Sq) of a canonical `dmattn.problem.Problem`, and `states` of a mask if it reads them."""
    given, (problem, out, lse) = problem, flattened(problem, out, lse)
    traits = Traits.of(problem, out)
    choice = choose_forward(traits)
    say_what_is_slow("forward", (choice,), traits)
    kernels = FORWARD[choice.row.name]
    bits = bits_for(problem, (choice,))
    if problem.mask is not None:
        _scan(given, problem, bits, (choice,), with_states=_makes_states(problem, choice.row))
    problem = _by_bits(problem, bits)
    if problem.order is not None:
        problem = reordered(problem, reads_all=kernels is split_keys)
    if "bias" in dict(choice.traits.aligned):
        problem = problem._replace(bias=aligned_copy(problem.bias))
    kernels.forward(problem, out, lse)


def looks_for_blocks(problem: Problem, row: Row) -> bool:
    """Whether the kernels of a row look for the blocks that a mask or intervals leave."""
    return row.looks_for_blocks and (row.name != "split keys" or split_keys.reads_lists(problem))


def bits_for(problem: Problem, choices: tuple[Choice, ...]) -> Tensor | None:
    """Room for the bits of the mask of a flattened problem, if some of these rows read it so, and it has any (`empty_bits`)."""
    return empty_bits(problem.mask) if any(reads_bits(problem, choice.row) for choice in choices) else None


def reads_bits(problem: Problem, row: Row) -> bool:
    """Whether the kernels of a row read a mask of pairs by bits, where it has any, and not by bytes.

    In one tile they do where many (batch, head) read the same ones, as shifted windows do, and have many pairs.
    """
    if not row.by_bits or problem.pair_mask is None:
        return False
    if row.name != "one tile":
        return True
    programs, slices = math.prod(problem.query.shape[:2]), math.prod(slices_of(problem.mask))
    return programs >= READERS_OF_BITS * slices and programs * problem.query.shape[2] * problem.key.shape[2] >= PAIRS_OF_BITS


def _by_bits(problem: Problem, bits: Tensor | None) -> Problem:
    """A flattened problem with the bits of its mask in the place of that, if there are any."""
    return problem if bits is None else problem._replace(mask=None, bits=with_entries(bits, problem.mask))


def _makes_states(problem: Problem, row: Row) -> bool:
    """Whether a forward pass by a row makes the states of a mask: if it reads them, or has more than a few queries, but not for one tile."""
    return looks_for_blocks(problem, row) or (row.looks_for_blocks and problem.query.shape[2] > FEW_ROWS)


def scans_itself(problem: Problem, out: Any, choices: tuple[Choice, ...]) -> bool:
    """Whether a backward pass by these rows makes the states of a mask, as it reads them and the forward pass may have made none.

    That may have had other batch entries, where torch.vmap maps the backward pass alone, so nothing here depends on how many there are: for
    few queries states are made in any case, though some rows of the forward pass have made them.
    """
    if problem.mask is None or not any(choice.row.looks_for_blocks for choice in choices):
        return False
    return problem.query.shape[2] <= FEW_ROWS or not choose_forward(Traits.of(problem, out)).row.looks_for_blocks


def _scan(given: Problem, problem: Problem, bits: Tensor | None, choices: tuple[Choice, ...], with_states: bool) -> None:
    """Fill the bits of a problem's mask, if there is room for them, or its states, or both; `problem` is what was `given`, flattened."""
    if bits is not None:
        scan(by_entry(problem.mask), by_entry(problem.states) if with_states else None, bits, _go_by_lists(problem, choices))
    elif with_states:
        for mask, states in in_parts(given.mask, given.states):
            scan(mask, states)


def _go_by_lists(problem: Problem, choices: tuple[Choice, ...]) -> bool:
    """Whether all of these rows that read bits read none of a block without a pair.

    They do not if they look for blocks. Hopper's kernels go by lists then, where what they walk makes several tiles, and a list has room for
    all of them even with the smallest tiles: 32 keys, and for dK and dV 32 queries.
    """
    readers = [choice for choice in choices if choice.row.by_bits]
    walks_queries = any(not choice.row.makes.isdisjoint({D_KEY, D_VALUE}) for choice in readers)
    walked = [problem.key.shape[2], *([problem.query.shape[2]] if walks_queries else [])]
    has_lists = all(BLOCK.value < length <= SMALLEST * LISTED.value for length in walked)
    return has_lists and all(choice.row.looks_for_blocks for choice in readers)


class Given(NamedTuple):
    """Tensors with the caller's leading axes, of which `entries` are the sizes: packed sequences are one."""

    lse: Tensor
    d_lse: Tensor | None
    gradients: Gradients
    entries: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A backward pass: all that its rows read. Where there is an `order`, the keys of `problem` are copies in that order."""

    problem: Problem
    order: Tensor | None  # (B, Hk, listed)
    sinks: Tensor | None  # (H,), which kernels of scores need not know: lse has them in it
    out: Tensor
    lse: Tensor
    d_out: Tensor
    d_lse: Tensor | None
    incoming: Incoming  # d_out and lse with room for the terms of queries, which one row fills and others read
    results: dict[str, Tensor | None]  # of all rows; for a bias of keys the sums over queries of which its gradient is made
    given: Given
    spread_table: Callable[[], Any]  # gives the table of distances as Hopper's kernels read it, made when it is asked first; None without one


@on_its_device
def backward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    gradients: Gradients,
    partial: bool = False,
) -> None:
    """Fill the gradients that are not None; `problem` is a `dmattn.problem.Problem`, `out`, `lse` and its `states` are the forward pass's,
    or are made here (`scans_itself`).

    `partial`: `out` and `lse` are over further keys, too.
    """
    entries = tuple(lse.shape[:-2]) if problem.ends_q is None else (problem.ends_q.shape[0] - 1,)
    unflattened, given = problem, Given(lse, d_lse, gradients, entries)
    gradients = flattened_gradients(gradients, problem)
    d_out, d_lse = in_few_runs(d_out, entries), None if d_lse is None else in_few_runs(d_lse, entries)
    problem, out, lse, d_out, d_lse = flattened(problem, out, lse, d_out, d_lse)
    traits = Traits.of(problem, out, d_out, gradients)
    if partial:
        traits = traits._replace(features=traits.features | {PARTIAL})
    choices = choose_backward(traits)
    say_what_is_slow("backward", choices, traits)
    makes_states = scans_itself(problem, out, choices)
    if makes_states:
        unflattened = unflattened._replace(states=torch.empty_like(unflattened.states))  # those given are an argument, and not filled
        (problem,) = flattened(unflattened)
    bits = bits_for(problem, choices)
    _scan(unflattened, problem, bits, choices, makes_states)
    d_bias, order, len_k, sinks = gradients.bias, problem.order, problem.key.shape[2], problem.sinks
    problem = problem._replace(sinks=None)  # lse has them in it
    if order is not None:
        problem = reordered(problem)
    results = {D_QUERY: gradients.query, D_KEY: gradients.key, D_VALUE: gradients.value, D_SINKS: gradients.sinks}
    copies = dict(choices[0].traits.aligned) if choices else {}
    if "bias" in copies:
        problem = problem._replace(bias=aligned_copy(problem.bias))
    made_bias = empty_aligned(d_bias) if "d_bias" in copies else d_bias
    results |= dict.fromkeys(traits.wanted & D_BIASES, made_bias)
    if D_BIAS_OF_KEYS in results:
        results[D_BIAS_OF_KEYS] = empty_key_sums(d_bias, problem)
    if any(END_SUMS in choice.makes for choice in choices):
        results[END_SUMS] = lse.new_empty((2, *lse.shape))
    if problem.ends_q is not None:
        for summed in (results.get(D_BIAS_OF_KEYS), results.get(END_SUMS)):
            if summed is not None:
                summed.zero_()  # beyond the lengths of sequences
    if order is not None and order.shape[2] < len_k:
        for of_keys in (given.gradients.key, given.gradients.value, results.get(D_BIAS_OF_KEYS)):
            if of_keys is not None:
                of_keys.zero_()  # what the order does not name
    forms = TERM_FORMS & frozenset[str]().union(*(choice.makes for choice in choices))
    incoming = Incoming.without_terms(d_out, lse, as_vectors=QUERY_TERMS in forms, as_delta=DELTA in forms, as_columns=TERM_COLUMNS in forms)
    results |= {QUERY_TERMS: incoming.terms, DELTA: incoming.delta, TERM_COLUMNS: incoming.term_columns}
    table = cache(lambda: spread_table(problem))
    call = Call(problem, order, sinks, out, lse, d_out, d_lse, incoming, results, given, table)
    of_bits = call if bits is None else replace(call, problem=_by_bits(problem, bits))
    for choice in choices:
        BACKWARD[choice.row.name](
            of_bits if choice.row.by_bits else call, {name: x for name, x in results.items() if x is not None and name in choice.makes}
        )
    if made_bias is not d_bias:
        copy_pairs(made_bias, d_bias)
    key_sums = results.get(D_BIAS_OF_KEYS)
    if key_sums is not None and key_sums is not d_bias:
        sum_of_key_sums(key_sums, given.gradients.bias, given.entries)


def _one_tile(call: Call, made: Made) -> None:
    one_tile.gradients(
        call.problem,
        (call.d_out, call.lse, call.d_lse),
        *_of_inputs(made),
        made.get(D_BIAS_SHARED, made.get(D_BIAS_OF_PAIRS)),
        made.get(D_BIAS_OF_KEYS),
        call.order,
    )


def _resident_query(call: Call, made: Made) -> None:
    spare = call.results[D_KEY], call.results[D_VALUE]  # whose memory is free until they are made
    hopper_resident_query_grad.query_gradients(call.problem, call.incoming, made.get(D_QUERY), made.get(D_BIAS_SHARED), spare)


def _resident_keys(call: Call, made: Made) -> None:
    hopper_resident_key_grad.key_gradients(call.problem, call.incoming, made.get(D_KEY), made.get(D_VALUE))


def _whole_rows(call: Call, made: Made) -> None:
    rows.row_gradients(call.problem, call.incoming, *_of_inputs(made), made.get(D_BIAS_OF_PAIRS), made.get(D_BIAS_OF_KEYS))


def _shared_query(call: Call, made: Made) -> None:
    hopper_shared_query_grad.query_and_bias_gradients(call.problem, call.incoming, made[D_QUERY], made[D_BIAS_SHARED])


def _one_pass(call: Call, made: Made) -> None:
    hopper_one_pass.all_gradients(call.problem, call.incoming, *_of_inputs(made), made.get(D_BIAS_OF_PAIRS))


def _hopper_keys(call: Call, made: Made) -> None:
    hopper_key_grad.key_gradients(call.problem, call.incoming, call.spread_table(), *_of_keys(made))


def _hopper_interval_keys(call: Call, made: Made) -> None:
    hopper_key_grad_intervals.key_gradients(call.problem, call.incoming, call.spread_table(), *_of_keys(made), call.order)


def _portable_keys(call: Call, made: Made) -> None:
    key_grad.key_gradients(call.problem, call.incoming, *_of_keys(made), call.order)


def _query_of_d_bias(call: Call, made: Made) -> None:
    query_grad.query_gradients(call.problem, call.incoming, None, made[D_QUERY], call.results[D_BIAS_OF_PAIRS])


def _stored_scores(call: Call, made: Made) -> None:
    tokens = made[D_QUERY], made[D_KEY], made[D_VALUE]
    stored_scores.gradients(call.problem, call.incoming, tokens, made.get(D_BIAS_SHARED), made.get(D_BIAS_OF_KEYS))


def _hopper_query(call: Call, made: Made) -> None:
    hopper_query_grad.query_gradients(call.problem, call.incoming, call.spread_table(), call.out, call.d_lse, made[D_QUERY], made.get(END_SUMS))


def _portable_query(call: Call, made: Made) -> None:
    given = call.incoming.given(None if TERM_FORMS.isdisjoint(made) else call.out, call.d_lse)
    query_grad.query_gradients(call.problem, call.incoming, given, made.get(D_QUERY), made.get(D_BIAS_OF_PAIRS), made.get(END_SUMS))


def _portable_distances(call: Call, made: Made) -> None:
    end_sums = call.results[END_SUMS]
    d_table = call.given.gradients.bias
    assert end_sums is not None
    assert d_table is not None
    distance_grad.table_gradient(call.problem, call.incoming, end_sums, d_table, call.given.entries)


def _hopper_shared(call: Call, made: Made) -> None:
    hopper_bias_grad.shared_gradient(call.problem, call.incoming, made[D_BIAS_SHARED])


def _portable_shared(call: Call, made: Made) -> None:
    bias_grad.shared_gradient(call.problem, call.incoming, made[D_BIAS_SHARED])


def _sums_of_d_lse(call: Call, made: Made) -> None:
    per_query_gradient(_by_query(call, call.given.lse), _by_query(call, call.given.d_lse), None, call.given.gradients.bias)


def _sums_of_d_lse_and_sinks(call: Call, made: Made) -> None:
    of_sinks = sink_grad.gradients_by_query(call.sinks, call.incoming)
    if call.problem.ends_q is None:
        of_sinks = of_sinks.view(call.given.lse.shape)
    else:
        of_sinks = _by_query(call, of_sinks, in_blocks=True)
    per_query_gradient(_by_query(call, call.given.lse), _by_query(call, call.given.d_lse), of_sinks, call.given.gradients.bias)


def _by_query(call: Call, x: Tensor | None, in_blocks: bool = False) -> Any:
    """A vector by query with the caller's leading axes; of packed sequences, which may lie in whole blocks, in the coordinates of each."""
    ends, longest = call.problem.ends_q, call.problem.longest_q
    if x is None or ends is None or longest is None:
        return x
    begins, lengths = begins_and_lengths(ends, call.given.lse.shape[2], longest)
    if in_blocks:
        begins = first_rows_in_blocks(begins)
    return own_rows(x, begins, lengths, longest)


def _sinks(call: Call, made: Made) -> None:
    assert call.sinks is not None
    sink_grad.sink_gradients(call.problem, call.incoming, call.sinks, made[D_SINKS])


def _query_terms(call: Call, made: Made) -> None:
    fill_terms(call.problem, call.incoming, call.out, call.d_lse)


def _of_inputs(made: Made) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return made.get(D_QUERY), made.get(D_KEY), made.get(D_VALUE)


def _of_keys(made: Made) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    return made.get(D_KEY), made.get(D_VALUE), made.get(D_BIAS_OF_KEYS), made.get(D_BIAS_OF_PAIRS)


# The function of each row of the table.
BACKWARD: dict[str, Callable[[Call, Made], None]] = {
    "one tile": _one_tile,
    "Hopper, bias on chip: d_query, d_bias": _resident_query,
    "Hopper, bias on chip: d_key, d_value": _resident_keys,
    "Hopper, one pass": _one_pass,
    "Hopper, one pass, pairs loaded": _one_pass,
    "whole rows": _whole_rows,
    "Hopper: d_query, d_bias": _shared_query,
    "Hopper: d_key, d_value, d_bias": _hopper_keys,
    "Hopper: d_key, d_value, d_bias, pairs loaded": _hopper_keys,
    "Hopper: d_key, d_value, d_bias by intervals": _hopper_interval_keys,
    "portable: d_key, d_value, d_bias": _portable_keys,
    "portable: d_query of d_bias": _query_of_d_bias,
    "portable, dS stored": _stored_scores,
    "portable: d_bias of distances": _portable_distances,
    "Hopper: d_query": _hopper_query,
    "Hopper: d_query, pairs loaded": _hopper_query,
    "Hopper: d_key, d_value": _hopper_keys,
    "Hopper: d_key, d_value, pairs loaded": _hopper_keys,
    "Hopper: d_key, d_value by intervals": _hopper_interval_keys,
    "portable: d_key, d_value": _portable_keys,
    "portable: d_query, d_bias": _portable_query,
    "portable: d_query, d_bias of float32": _portable_query,
    "Hopper: d_bias": _hopper_shared,
    "Hopper: d_bias, pairs loaded": _hopper_shared,
    "portable: d_bias": _portable_shared,
    "sums of d_lse": _sums_of_d_lse,
    "sums of d_lse and d_sinks": _sums_of_d_lse_and_sinks,
    "d_sinks": _sinks,
    "query terms": _query_terms,
}
