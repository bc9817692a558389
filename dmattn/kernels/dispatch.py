"""Which kernels serve a call: one table for each pass, in order. The first row that serves makes a result.

A row names the features that it understands. A feature that it does not name refuses it, so that a new one may be slow and is never ignored.
Its `plan` says what else keeps it from a call, or why another row is faster, in words for who makes the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

from .base import tiles
from .base.tiles import Tile, block_dim
from .hopper import shared_query_grad as hopper_shared_query_grad
from .hopper.copies import consumers_of
from .hopper.resident import bias as hopper_resident
from .hopper.resident import forward as hopper_resident_forward
from .hopper.shared_members import BLOCK_M
from .portable import rows, split_keys
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
    END_SUMS,
    LEADING,
    LEADING_IN_RUNS,
    OUT,
    PARTIAL,
    QUERY_TERMS,
    TERM_COLUMNS,
    Traits,
)

MASKS = frozenset({"mask of pairs", "mask of keys", "mask of queries", "mask of heads", "block mask"})
BIASES = frozenset({"bias of pairs", "bias of keys", "bias of queries", "bias of heads"})
DISTANCES = frozenset({"bias of distances"})
INTERVALS = frozenset({"intervals", "intervals by head", "order"})
WINDOW = frozenset({"window"})
PAIR_BIAS = frozenset({"bias of pairs"})
SINKS = frozenset({"sinks"})
SHARED = frozenset({LEADING})
FURTHER = frozenset({PARTIAL})
EVERY = SINKS | SHARED | FURTHER  # features that rows serve, but those that sum what they are given over the keys of the call
ALL = MASKS | BIASES | DISTANCES | INTERVALS | WINDOW | EVERY | {"two intervals", LEADING_IN_RUNS, "softcap", "dropout"}
HOPPER = frozenset({"sm_90"})


class Row(NamedTuple):
    """A family of kernels. `targets` are the GPU families that it is for, None for all.

    Of what it `makes`, a call gets what is wanted and no row before it makes; what it makes `besides`, it makes in any case. It `reads` what
    other rows make. It is asked only where `needs` are wanted, all of them. While it runs it `borrows` the memory of results of rows after it.
    """

    name: str
    makes: frozenset[str]
    understands: frozenset[str]
    plan: Callable[[Traits], str | None]
    targets: frozenset[str] | None = None
    reads: frozenset[str] = frozenset()
    besides: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    borrows: frozenset[str] = frozenset()

    def refusal(self, traits: Traits) -> str | None:
        """Why the row does not serve a call, or should not; None if it serves."""
        if self.targets is not None and traits.family not in self.targets:
            return f"is for {', '.join(sorted(self.targets))}, not {traits.family}"
        unknown = traits.features - self.understands
        named = ("causal or window" if feature == "window" else feature for feature in sorted(unknown))
        return f"does not serve {', '.join(named)}" if unknown else self.plan(traits)


class Refusal(NamedTuple):
    """A row that was asked in vain, with its reason."""

    row: str
    reason: str


class Choice(NamedTuple):
    """A row that serves, what it makes in this call, and the rows before it that could have made some of that."""

    row: Row
    makes: frozenset[str]
    refusals: tuple[Refusal, ...]


def choose_forward(traits: Traits) -> Choice:
    """The row that serves a forward pass."""
    refusals: list[Refusal] = []
    for row in FORWARD:
        reason = row.refusal(traits)
        if reason is None:
            return Choice(row, row.makes, tuple(refusals))
        refusals.append(Refusal(row.name, reason))
    raise NotImplementedError(_nobody(refusals))


def choose_backward(traits: Traits) -> tuple[Choice, ...]:
    """The rows that together make all that a backward pass wants, in the order in which they are to run."""
    chosen: list[Choice] = []
    refusals: list[tuple[Row, Refusal]] = []
    missing, made = traits.wanted, frozenset[str]()
    for row in BACKWARD:
        makes = row.makes & missing
        if not makes or not row.needs <= traits.wanted:
            continue
        reason = row.refusal(traits)
        if reason is not None:
            refusals.append((row, Refusal(row.name, reason)))
            continue
        chosen.append(Choice(row, makes | row.besides, tuple(refusal for other, refusal in refusals if other.makes & makes)))
        made |= makes | row.besides
        missing = (missing | row.reads - {TERM_COLUMNS}) - made
    if missing:
        raise NotImplementedError(_nobody([refusal for row, refusal in refusals if row.makes & missing]))
    # Others read the terms of queries, and one the sums at the ends. What a row borrows is to be free yet.
    chosen.sort(key=lambda choice: (QUERY_TERMS not in choice.makes, not choice.row.borrows, END_SUMS in choice.row.reads))
    if any(_reads_columns(choice, traits) for choice in chosen):
        chosen[0] = chosen[0]._replace(makes=chosen[0].makes | {TERM_COLUMNS})
    return tuple(chosen)


def _reads_columns(choice: Choice, traits: Traits) -> bool:
    """Whether a row reads query terms as columns, too: for d_key and d_value, but for a bias of keys under intervals.

    The kernel is 1 % slower then with term columns beside bias columns.
    """
    if {"intervals", "bias of keys"} <= traits.features:
        return False
    return TERM_COLUMNS in choice.row.reads and not choice.makes.isdisjoint({D_KEY, D_VALUE})


def _nobody(refusals: list[Refusal]) -> str:
    return "dmattn: no kernel serves this call: " + "; ".join(f"{refusal.row} {refusal.reason}" for refusal in refusals)


def _find_tile(kernel: str, traits: Traits) -> Tile:
    """The tile of "one tile", "split keys" or "whole rows", which depends on less than others do (`tiles.pick`)."""
    return tiles.find((kernel,), traits.family, traits.dtype, traits.head_dim, traits.value_dim)


_GROUPED = "heads share keys: kernels that sum over a group of heads serve them"


_OF_NARROW = "serves head dims from 33 to 64"


def _are_narrow(traits: Traits) -> bool:
    return block_dim(traits.head_dim) == block_dim(traits.value_dim) == 64


def _always(traits: Traits) -> None:
    """The plan of a row that serves whatever it understands."""


def _one_tile(traits: Traits) -> str | None:
    """One tile holds all pairs of a (batch, head)."""
    tile = _find_tile("one tile", traits)
    if traits.heads != traits.kv_heads:
        return _GROUPED
    if traits.len_k == 0:
        return "there is no key"
    if traits.len_q > tile.block_m or traits.len_k > tile.block_n:
        return f"{traits.len_q} x {traits.len_k} pairs are more than one tile of {tile.block_m} x {tile.block_n}"
    return None


def _split_keys(traits: Traits) -> str | None:
    """There are keys for two splits, and the programs would leave processors idle or one tile holds the queries of several heads."""
    limits, group = _find_tile("split keys", traits), traits.heads // traits.kv_heads
    visible, least = split_keys.visible_keys(traits.len_q, traits.len_k, traits.left, traits.right), split_keys.least_keys(group, traits.len_q)
    if visible < 2 * least:
        return f"is for few queries over many keys: {visible} visible keys are fewer than {2 * least}, two splits of them"
    if group > limits.block_m:
        return f"{group} heads share keys, more than the {limits.block_m} rows of a tile"
    _, queries, programs = split_keys.packing(limits, group, traits.len_q, traits.kv_heads * traits.batch)
    packed = group > 1 and traits.len_q <= queries
    if not packed and 2 * programs > traits.processors:
        return f"{programs} programs keep {traits.processors} processors busy with whole keys"
    return None


def _on_hopper(traits: Traits, dims: tuple[int, ...], *copied: str) -> str | None:
    """What any kernel for Hopper asks: 16-bit tensors that the copy engine addresses, those in `copied` too, and a positive scale.

    A larger product is a larger score then, and the scale leaves room to say a bias in units of the products.
    """
    if not traits.gluon:
        return "needs Triton 3.6 or later"
    dim, value_dim = block_dim(traits.head_dim), block_dim(traits.value_dim)
    if dim not in dims or (dim != value_dim and (dim, value_dim) != (128, 64)):  # values of 64 are copied as if they had 128
        return (
            f"serves head dims padded to {' or '.join(map(str, dims))} here, not {traits.head_dim} of queries and {traits.value_dim} of values"
        )
    if traits.len_q <= 64:
        return f"is for more than 64 queries, not {traits.len_q}"
    if traits.len_k == 0:
        return "there is no key"
    if "intervals" in traits.features and traits.len_q > 1 << 22:
        return f"{traits.len_q} queries under intervals are more than {1 << 22}, beyond which twice a place is not exact in float32"
    if not 2.0**-64 <= traits.scale <= 2.0**64:
        return f"scale {traits.scale} is not from 2**-64 to 2**64"
    if traits.wide:
        return f"{', '.join(sorted(traits.wide))}: a stride of 2**22 or more, with which an offset within a tile needs more than 32 bits"
    if traits.bias is not None and traits.bias.dtype == torch.float64:
        return "bias of float64 takes too many registers: convert it to float32"
    asked = {"query", "key", "value", "bias", *copied}
    return next((why for name, why in traits.uncopyable if name in asked), None)


def _hopper_forward(traits: Traits) -> str | None:
    """Narrow heads only where there are many keys and no rule but a bias of pairs or distances and sinks: the portable one is faster else."""
    if {"intervals", "bias of distances"} <= traits.features:
        return "keys of a tile lie apart under intervals, and have no distances in common"
    if _are_narrow(traits) and not (traits.features <= PAIR_BIAS | DISTANCES | EVERY and traits.len_k >= 2048):
        return f"{_OF_NARROW} from 2048 keys on, without rules but a bias of pairs or distances and sinks; the portable kernel is faster else"
    return _on_hopper(traits, _dims(traits))


def _dims(traits: Traits) -> tuple[int, ...]:
    """The padded head dims of forward and key kernels; beside numbers for each pair wider sums would leave registers."""
    return (64, 128) if traits.features.isdisjoint(DISTANCES) else (64,)


def _resident(traits: Traits, height: int, *copied: str) -> str | None:
    """Members enough of each slice of the bias, for programs that have so many of its rows."""
    most, fewest = hopper_resident.MOST_KEYS, hopper_resident.FEWEST_MEMBERS
    bias = traits.bias
    if bias is None:
        return "there is no bias to keep on chip"
    if bias.batch > 1 and bias.batch == traits.batch:
        return "batch entries do not share the bias"
    if traits.len_k > most:
        return f"{traits.len_k} keys are more than fit on chip, {most}"
    reason = _on_hopper(traits, (16, hopper_resident.DIM), *copied)
    if reason is not None:
        return reason
    if bias.dtype != traits.dtype:
        return f"bias of {bias.dtype} beside queries of {traits.dtype}: convert it"
    if traits.members < fewest:
        return f"{traits.members} (batch, head) share a slice of the bias, fewer than {fewest}"
    walked = triton.cdiv(traits.len_q, height) * traits.batch * traits.heads
    if walked < fewest * traits.processors:
        return f"{walked} blocks of queries are fewer than {fewest} for each of {traits.processors} processors"
    return None


def _resident_forward(traits: Traits) -> str | None:
    consumers = consumers_of(traits.len_q, hopper_resident.DIM)
    return _resident(traits, hopper_resident_forward.BLOCK_M.value * consumers, "out")


def _resident_backward(traits: Traits) -> str | None:
    """One answer for d_query and d_bias and for d_key and d_value, so that either both rows serve or none."""
    if traits.len_q > hopper_resident.MOST_KEYS:
        return f"{traits.len_q} queries are more than fit on chip, {hopper_resident.MOST_KEYS}"
    if traits.heads != traits.kv_heads:
        return _GROUPED
    return _resident(traits, 64, "d_out", "d_query")


def _whole_rows(traits: Traits) -> str | None:
    """d_query of a (batch, head) stays in registers, which leaves none for bounds or for further rules.

    It serves short rows under a mask, which the rows with the bias on chip leave.
    """
    if traits.heads != traits.kv_heads:
        return _GROUPED
    tile = _find_tile("whole rows", traits)
    if tile.block_m == 0:
        return (
            f"has no tile for {traits.dtype} with head dims {traits.head_dim} and {traits.value_dim} on {traits.family}, "
            "as it keeps all queries of a (batch, head) in registers"
        )
    if traits.len_k == 0 or traits.len_q % tile.block_m or traits.len_k % tile.block_n:
        return f"{traits.len_q} x {traits.len_k} pairs are no whole tiles of {tile.block_m} x {tile.block_n}"
    if traits.head_dim != block_dim(traits.head_dim) or traits.value_dim != block_dim(traits.value_dim):
        return f"head dims {traits.head_dim} and {traits.value_dim} are not both powers of 2 from 16 on"
    if traits.len_q > rows.MOST_QUERIES:
        return f"{traits.len_q} queries are more than registers hold, {rows.MOST_QUERIES}"
    sequences, fewest = traits.batch * traits.heads, rows.PROGRAMS_PER_PROCESSOR
    if sequences < fewest * traits.processors:
        return f"{sequences} (batch, head) are fewer than {fewest} for each of {traits.processors} processors"
    return None


def _shared_query(traits: Traits) -> str | None:
    """Few (batch, head) share the bias, so that one program has registers for d_query of all, and there are programs enough."""
    reason = _on_hopper(traits, (64, 128), "d_out", "d_bias")
    if reason is not None:
        return reason
    blocks = hopper_shared_query_grad.blocks_of(traits.members, block_dim(traits.head_dim))
    if blocks == 0:
        return f"{traits.members} (batch, head) share a slice of the bias, and registers are for few, but for more than one"
    programs = triton.cdiv(traits.len_q, blocks * BLOCK_M.value) * traits.bias.batch * traits.bias.heads
    places = triton.cdiv(programs, traits.processors) * traits.processors
    if programs < hopper_shared_query_grad.LEAST_FILL[blocks] * places:
        return f"{programs} programs leave many of {traits.processors} processors idle"
    return None


def _stores_d_scores(traits: Traits) -> str | None:
    """d_bias of pairs is dS, which the kernel of keys stores and d_query is the product of."""
    if traits.wanted.isdisjoint({D_KEY, D_VALUE}):
        return "neither d_key nor d_value is wanted, beside which d_bias would be made"
    if traits.bias.dtype not in (traits.dtype, torch.float32):
        return f"d_bias of {traits.bias.dtype} rounds dS more than products do: give the bias {traits.dtype} or float32"
    return None


def _hopper_keys_and_bias(traits: Traits) -> str | None:
    return _stores_d_scores(traits) or _on_hopper(traits, (64, 128), "d_out", "d_bias", "mask")


def _hopper_interval_keys_and_bias(traits: Traits) -> str | None:
    return _only_intervals(traits) or _hopper_keys_and_bias(traits)


def _hopper_query(traits: Traits) -> str | None:
    """Narrow heads only beside a bias of pairs, as the portable kernel is faster without pairs to load."""
    if D_BIAS_OF_PAIRS in traits.wanted:
        return "d_bias of pairs is wanted, too, and made beside d_query by another kernel"
    if _are_narrow(traits) and not traits.features >= PAIR_BIAS:
        return f"{_OF_NARROW} beside a bias of pairs; others are faster in the portable kernel"
    return _on_hopper(traits, (64, 128), "d_out", "out")


def _hopper_keys(traits: Traits) -> str | None:
    if "bias of distances" in traits.features and not traits.features.isdisjoint(MASKS):
        return "beside numbers of distances a mask takes too many registers"
    return _on_hopper(traits, _dims(traits), "d_out", "mask")


def _hopper_interval_keys(traits: Traits) -> str | None:
    return _only_intervals(traits) or _hopper_keys(traits)


def _only_intervals(traits: Traits) -> str | None:
    return None if "intervals" in traits.features else "is for intervals, of which there are none"


def _hopper_shared(traits: Traits) -> str | None:
    return _on_hopper(traits, (64, 128), "d_out")


FORWARD = (
    Row("one tile", frozenset({OUT}), ALL, _one_tile),
    Row("split keys", frozenset({OUT}), ALL - {"dropout", "intervals by head"}, _split_keys),
    Row("Hopper", frozenset({OUT}), MASKS | BIASES | DISTANCES | INTERVALS | WINDOW | EVERY, _hopper_forward, targets=HOPPER),
    Row("Hopper, bias on chip", frozenset({OUT}), PAIR_BIAS | EVERY, _resident_forward, targets=HOPPER),
    Row("portable", frozenset({OUT}), ALL, _always),
)

KEYS_AND_VALUES = frozenset({D_KEY, D_VALUE})
OF_KEYS = KEYS_AND_VALUES | {D_BIAS_OF_KEYS}
OF_KEYS_AND_PAIRS = KEYS_AND_VALUES | {D_BIAS_OF_PAIRS}
OF_QUERIES_AND_SHARED = frozenset({D_QUERY, D_BIAS_SHARED})
GRADIENTS = OF_KEYS | {D_QUERY, D_BIAS_OF_PAIRS}
TERMS, STORED = frozenset({QUERY_TERMS}), frozenset({D_BIAS_OF_PAIRS})
ON_HOPPER = dict(targets=HOPPER, reads=TERMS)

WITH_COLUMNS = dict(targets=HOPPER, reads=TERMS | {TERM_COLUMNS})
HOPPER_KEYS = Row("Hopper: d_key, d_value", OF_KEYS, MASKS | BIASES | DISTANCES | WINDOW | EVERY, _hopper_keys, **WITH_COLUMNS)
HOPPER_INTERVAL_KEYS = Row(
    "Hopper: d_key, d_value by intervals", OF_KEYS, BIASES | INTERVALS | WINDOW | EVERY, _hopper_interval_keys, **WITH_COLUMNS
)
BACKWARD = (
    Row("one tile", GRADIENTS | {D_BIAS_SHARED}, ALL - FURTHER, _one_tile),
    Row(
        "Hopper, bias on chip: d_query, d_bias",
        OF_QUERIES_AND_SHARED,
        PAIR_BIAS | EVERY,
        _resident_backward,
        borrows=frozenset({D_KEY, D_VALUE}),
        **ON_HOPPER,
    ),
    Row("Hopper, bias on chip: d_key, d_value", KEYS_AND_VALUES, PAIR_BIAS | EVERY, _resident_backward, **ON_HOPPER),
    Row("whole rows", GRADIENTS, MASKS | BIASES | EVERY | {LEADING_IN_RUNS}, _whole_rows, reads=TERMS),
    Row("Hopper: d_query, d_bias", OF_QUERIES_AND_SHARED, PAIR_BIAS | WINDOW | EVERY, _shared_query, **ON_HOPPER, needs=OF_QUERIES_AND_SHARED),
    # d_bias of pairs is stored beside d_key and d_value where it is dS, of which d_query is then the product.
    HOPPER_KEYS._replace(name="Hopper: d_key, d_value, d_bias", makes=OF_KEYS_AND_PAIRS, plan=_hopper_keys_and_bias, needs=STORED),
    HOPPER_INTERVAL_KEYS._replace(
        name="Hopper: d_key, d_value, d_bias by intervals", makes=OF_KEYS_AND_PAIRS, plan=_hopper_interval_keys_and_bias, needs=STORED
    ),
    Row("portable: d_key, d_value, d_bias", OF_KEYS_AND_PAIRS, ALL - {"softcap"}, _stores_d_scores, reads=TERMS, needs=STORED),
    Row("portable: d_query of d_bias", frozenset({D_QUERY}), ALL - {"softcap"}, _stores_d_scores, reads=TERMS | STORED, needs=STORED),
    Row("portable: d_bias of distances", frozenset({D_BIAS_OF_DISTANCES}), ALL, _always, reads=TERMS | {END_SUMS}),
    Row("Hopper: d_query", frozenset({D_QUERY}), MASKS | BIASES | INTERVALS | WINDOW | EVERY, _hopper_query, targets=HOPPER, besides=TERMS),
    HOPPER_KEYS,
    HOPPER_INTERVAL_KEYS,
    Row("portable: d_key, d_value", OF_KEYS, ALL, _always, reads=TERMS),
    Row("portable: d_query, d_bias", frozenset({D_QUERY, D_BIAS_OF_PAIRS, END_SUMS}), ALL, _always, reads=TERMS),
    Row("Hopper: d_bias", frozenset({D_BIAS_SHARED}), PAIR_BIAS | WINDOW | EVERY, _hopper_shared, **ON_HOPPER),
    Row("portable: d_bias", frozenset({D_BIAS_SHARED}), ALL, _always, reads=TERMS),
    Row("sums of d_lse", frozenset({D_BIAS_OF_QUERIES}), ALL - SINKS - FURTHER, _always),
    Row("sums of d_lse and d_sinks", frozenset({D_BIAS_OF_QUERIES}), ALL - FURTHER, _always, reads=TERMS),
    Row("d_sinks", frozenset({D_SINKS}), ALL, _always, reads=TERMS),
    Row("query terms", TERMS, ALL, _always),
)
