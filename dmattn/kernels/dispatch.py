"""Which kernels serve a call: one table for each pass, in order. The first row that serves makes a result.

A row names the features that it understands. A feature that it does not name refuses it, so that a new one may be slow and is never ignored.
Its `plan` (plans.py, hopper_plans.py) says what else keeps it from a call, or why another row is faster, in words for who makes the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ..notices import is_heard, slow
from . import hopper_plans, plans
from .features import (
    ALL,
    BIASES,
    DISTANCES,
    EVERY,
    FURTHER,
    INTERVALS,
    MASKS,
    PACKED,
    PAIR_BIAS,
    SINKS,
    SOFTCAP,
    WINDOW,
    named_family,
    named_feature,
)
from .reasons import stores_d_scores
from .traits import (
    ANY_FORM,
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
    LEADING_IN_RUNS,
    OUT,
    QUERY_TERMS,
    TERM_COLUMNS,
    Traits,
)

HOPPER = frozenset({"sm_90"})
ASKED_FOR = frozenset({DELTA, TERM_COLUMNS, ANY_FORM})  # forms of query terms that a row names; one that names none reads vectors


class Row(NamedTuple):
    """A family of kernels. `targets` are the GPU families that it is for, None for all.

    Of what it `makes`, a call gets what is wanted and no row before it makes; what it makes `besides`, it makes if no row before it does. It
    `reads` what other rows make. It is asked only where `needs` are wanted, all of them, and no row before it makes those that it makes itself.
    While it runs it `borrows` the memory of results of rows after it. Under a mask or intervals its kernels look for the blocks that are left,
    as a rule. A bool mask of pairs they read `by_bits`, which a scan makes (`run.reads_bits`), or the mask itself.
    """

    name: str
    makes: frozenset[str]
    understands: frozenset[str]
    plan: Callable[..., str | None]
    targets: frozenset[str] | None = None
    reads: frozenset[str] = frozenset()
    besides: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    borrows: frozenset[str] = frozenset()
    looks_for_blocks: bool = True
    by_bits: bool = False

    def serves(self, traits: Traits) -> bool:
        """Whether :meth:`refusal` has no reason, without its words: each call asks."""
        understood = traits.features <= self.understands and (self.targets is None or traits.family in self.targets)
        return understood and self.plan(traits) is None

    def refusal(self, traits: Traits) -> str | None:
        """Why the row does not serve a call, or should not: all reasons, joined by "; ", or None if it serves."""
        if self.targets is not None and traits.family not in self.targets:
            return f"is for {', '.join(sorted(self.targets))}, not {named_family(traits.family)}"
        named = [named_feature(feature) for feature in sorted(traits.features - self.understands)]
        unknown = [f"does not serve {', '.join(named)}"] if named else []
        return "; ".join([*unknown, *filter(None, [self.plan(traits)])]) or None


class Refusal(NamedTuple):
    """A row that was asked in vain, with its reasons."""

    row: str
    reason: str


class Choice(NamedTuple):
    """A row that serves, what it makes in this call, and the rows before it that could have made some of that and do not serve."""

    row: Row
    makes: frozenset[str]
    refusing: tuple[Row, ...]
    traits: Traits

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The reasons of these rows."""
        return tuple(Refusal(row.name, reason) for row in self.refusing if (reason := row.refusal(self.traits)) is not None)


def choose_forward(traits: Traits) -> Choice:
    """The row that serves a forward pass. Where an aligned copy of the bias pays and lets another row serve, it is that one, and its traits say
    so: `aligned`.
    """
    choice = _forward_row(traits)
    of_copy = _forward_row(traits.with_aligned("bias")) if hopper_plans.copies_pay(traits) else choice
    return choice if of_copy.row == choice.row else of_copy


def choose_backward(traits: Traits) -> tuple[Choice, ...]:
    """The rows that together make all that a backward pass wants, in the order in which they are to run. Where it pays they are
    those that an aligned copy of the bias lets serve, or that and an aligned dBias, which is copied in the end.
    """
    choices = _backward_rows(traits)
    if hopper_plans.copies_pay(traits):
        for copies in (("bias",), ("bias", "d_bias")):
            of_copies = _backward_rows(traits.with_aligned(*copies))
            if [choice.row for choice in of_copies] != [choice.row for choice in choices]:
                choices = of_copies
    return choices


def _forward_row(traits: Traits) -> Choice:
    """The first row that serves a forward pass."""
    for place, row in enumerate(FORWARD):
        if row.serves(traits):
            return Choice(row, row.makes, FORWARD[:place], traits)
    raise NotImplementedError(_nobody(traits, FORWARD))


def _backward_rows(traits: Traits) -> tuple[Choice, ...]:
    """The rows that make all that a backward pass wants, of its tensors as the traits have them."""
    chosen: list[Choice] = []
    refusing: list[Row] = []
    missing, made = traits.wanted, frozenset[str]()
    for row in BACKWARD:
        makes = row.makes & missing
        if not makes or not row.needs <= traits.wanted or not row.makes & row.needs <= missing:
            continue
        if not row.serves(traits):
            refusing.append(row)
            continue
        chosen.append(Choice(row, makes | row.besides - made, tuple(other for other in refusing if other.makes & makes), traits))
        made |= makes | row.besides
        missing = (missing | row.reads - ASKED_FOR) - made
    if missing:
        raise NotImplementedError(_nobody(traits, [row for row in refusing if row.makes & missing]))
    # Others read the terms of queries, and one the sums at the ends. What a row borrows is to be free yet.
    chosen.sort(key=lambda choice: (QUERY_TERMS not in choice.makes, not choice.row.borrows, END_SUMS in choice.row.reads))
    if chosen and QUERY_TERMS in chosen[0].makes:
        read = frozenset(_form_read(choice, traits) for choice in chosen if QUERY_TERMS in choice.row.reads - choice.makes)
        forms = read - {ANY_FORM} or {DELTA}
        if QUERY_TERMS in forms:
            forms -= {DELTA}  # which vectors have
        chosen[0] = chosen[0]._replace(makes=chosen[0].makes - TERMS | forms)
    return tuple(chosen)


def _form_read(choice: Choice, traits: Traits) -> str:
    """In which form a row reads the terms of queries."""
    for form in (ANY_FORM, DELTA):
        if form in choice.row.reads:
            return form
    return TERM_COLUMNS if _reads_columns(choice, traits) else QUERY_TERMS


def _reads_columns(choice: Choice, traits: Traits) -> bool:
    """Whether a row reads them as columns: for d_key and d_value, but for a bias of keys under intervals.

    That of d_key and d_value is 1 % slower with term columns beside bias columns. Beside head dims over 128 shared memory has no room for them,
    and beside a softcap lse is not to be part of products.
    """
    if {"intervals", "bias of keys"} <= traits.features or hopper_plans.are_wide(traits) or traits.softcap is not None:
        return False
    return TERM_COLUMNS in choice.row.reads and not choice.makes.isdisjoint({D_KEY, D_VALUE})


def _nobody(traits: Traits, rows: Sequence[Row]) -> str:
    """What is not supported, in words: the last row serves the most calls. The others' reasons do not help."""
    return f"dmattn: no kernel serves this call on {named_family(traits.family)}: {rows[-1].name} {rows[-1].refusal(traits)}"


def _loading(row: Row) -> Row:
    """A row whose kernels load a bias of pairs that the copy engine cannot address, and a mask of pairs by bits: slower than copies. Not by
    intervals.
    """
    return row._replace(
        name=f"{row.name}, pairs loaded",
        understands=row.understands - INTERVALS,
        plan=partial(row.plan, loads_pairs=True),
        by_bits=True,
    )


HOPPER_FORWARD = Row(
    "Hopper",
    frozenset({OUT}),
    MASKS | BIASES | DISTANCES | INTERVALS | WINDOW | EVERY | PACKED | SOFTCAP,
    hopper_plans.forward,
    targets=HOPPER,
    by_bits=True,
)
FORWARD = (
    Row("one tile", frozenset({OUT}), ALL - PACKED, plans.one_tile_forward, looks_for_blocks=False, by_bits=True),
    Row("split keys", frozenset({OUT}), ALL - {"dropout", "intervals by head"}, plans.split_keys),
    HOPPER_FORWARD,
    _loading(HOPPER_FORWARD),
    Row("portable", frozenset({OUT}), ALL, plans.portable),
)

KEYS_AND_VALUES = frozenset({D_KEY, D_VALUE})
OF_KEYS = KEYS_AND_VALUES | {D_BIAS_OF_KEYS}
OF_KEYS_AND_PAIRS = KEYS_AND_VALUES | {D_BIAS_OF_PAIRS}
OF_TOKENS = KEYS_AND_VALUES | {D_QUERY}
OF_QUERIES_AND_SHARED = frozenset({D_QUERY, D_BIAS_SHARED})
GRADIENTS = OF_KEYS | {D_QUERY, D_BIAS_OF_PAIRS}
TERMS = frozenset({QUERY_TERMS})
D_SCORES = frozenset({D_BIAS_OF_PAIRS})  # of a bias of pairs the gradient is dS
AS_DELTA = TERMS | {DELTA}  # for kernels that read lse beside it
ON_HOPPER = dict(targets=HOPPER, reads=TERMS)

WITH_COLUMNS = dict(targets=HOPPER, reads=TERMS | {TERM_COLUMNS})
HOPPER_KEYS = Row(
    "Hopper: d_key, d_value",
    OF_KEYS,
    MASKS | BIASES | DISTANCES | WINDOW | EVERY | PACKED | SOFTCAP,
    hopper_plans.keys,
    **WITH_COLUMNS,
)
HOPPER_INTERVAL_KEYS = Row(
    "Hopper: d_key, d_value by intervals",
    OF_KEYS,
    BIASES | DISTANCES | INTERVALS | WINDOW | EVERY | SOFTCAP,
    hopper_plans.interval_keys,
    **WITH_COLUMNS,
)
HOPPER_KEYS_AND_BIAS = HOPPER_KEYS._replace(
    name="Hopper: d_key, d_value, d_bias", makes=OF_KEYS_AND_PAIRS, plan=hopper_plans.keys_and_bias, needs=D_SCORES
)
ONE_PASS = Row(
    "Hopper, one pass",
    OF_TOKENS | D_SCORES,
    MASKS | PAIR_BIAS | WINDOW | EVERY | SOFTCAP,
    plans.one_pass,
    **WITH_COLUMNS,
    needs=OF_TOKENS,
)
HOPPER_QUERY = Row(
    "Hopper: d_query",
    frozenset({D_QUERY, END_SUMS}),
    MASKS | BIASES | DISTANCES | INTERVALS | WINDOW | EVERY | PACKED | SOFTCAP,
    hopper_plans.query,
    targets=HOPPER,
    besides=TERMS,
    by_bits=True,
)
HOPPER_BIAS = Row(
    "Hopper: d_bias",
    frozenset({D_BIAS_SHARED}),
    MASKS | PAIR_BIAS | INTERVALS | WINDOW | EVERY | PACKED | SOFTCAP,
    hopper_plans.shared,
    HOPPER,
    AS_DELTA,
    by_bits=True,
)
PORTABLE_QUERY = Row("portable: d_query, d_bias", frozenset({D_QUERY, D_BIAS_OF_PAIRS, END_SUMS}), ALL, plans.always, reads=AS_DELTA)
BACKWARD = (
    Row("one tile", GRADIENTS | {D_BIAS_SHARED}, ALL - PACKED - FURTHER, plans.one_tile, looks_for_blocks=False, by_bits=True),
    Row(
        "Hopper, bias on chip: d_query, d_bias",
        OF_QUERIES_AND_SHARED,
        PAIR_BIAS | EVERY,
        plans.resident_backward,
        borrows=frozenset({D_KEY, D_VALUE}),
        **ON_HOPPER,
    ),
    Row("Hopper, bias on chip: d_key, d_value", KEYS_AND_VALUES, PAIR_BIAS | EVERY, plans.resident_backward, **ON_HOPPER),
    ONE_PASS,
    _loading(ONE_PASS),
    Row(
        "whole rows",
        GRADIENTS,
        MASKS | BIASES | EVERY | {LEADING_IN_RUNS},
        plans.whole_rows,
        reads=AS_DELTA,
        looks_for_blocks=False,
    ),
    Row(
        "Hopper: d_query, d_bias",
        OF_QUERIES_AND_SHARED,
        PAIR_BIAS | WINDOW | EVERY,
        hopper_plans.shared_query,
        **ON_HOPPER,
        needs=OF_QUERIES_AND_SHARED,
    ),
    # d_bias of pairs is stored beside d_key and d_value where it is dS, of which d_query is then the product.
    HOPPER_KEYS_AND_BIAS,
    _loading(HOPPER_KEYS_AND_BIAS),
    HOPPER_INTERVAL_KEYS._replace(
        name="Hopper: d_key, d_value, d_bias by intervals",
        makes=OF_KEYS_AND_PAIRS,
        plan=hopper_plans.interval_keys_and_bias,
        needs=D_SCORES,
    ),
    Row("portable: d_key, d_value, d_bias", OF_KEYS_AND_PAIRS, ALL - SOFTCAP, stores_d_scores, reads=AS_DELTA, needs=D_SCORES),
    Row("portable: d_query of d_bias", frozenset({D_QUERY}), ALL - SOFTCAP, stores_d_scores, reads=D_SCORES, needs=D_SCORES),
    # A product of float32 takes so long that dS, where rows are short, is stored, and not made again.
    Row(
        "portable, dS stored",
        OF_TOKENS | {D_BIAS_OF_KEYS, D_BIAS_SHARED},
        MASKS | BIASES | WINDOW | SINKS | FURTHER,
        plans.stores_scores,
        reads=AS_DELTA,
        needs=OF_TOKENS,
    ),
    Row("portable: d_bias of distances", frozenset({D_BIAS_OF_DISTANCES}), ALL, plans.always, reads=AS_DELTA | {END_SUMS}),
    HOPPER_QUERY,
    _loading(HOPPER_QUERY),
    HOPPER_KEYS,
    _loading(HOPPER_KEYS),
    HOPPER_INTERVAL_KEYS,
    Row("portable: d_key, d_value", OF_KEYS, ALL, plans.always, reads=AS_DELTA),
    PORTABLE_QUERY._replace(plan=plans.makes_terms, besides=TERMS),
    PORTABLE_QUERY._replace(name="portable: d_query, d_bias of float32"),
    HOPPER_BIAS,
    _loading(HOPPER_BIAS),
    Row("portable: d_bias", frozenset({D_BIAS_SHARED}), ALL, plans.always, reads=AS_DELTA),
    Row("sums of d_lse", frozenset({D_BIAS_OF_QUERIES}), ALL - SINKS - FURTHER, plans.always, looks_for_blocks=False),
    Row("sums of d_lse and d_sinks", frozenset({D_BIAS_OF_QUERIES}), ALL - FURTHER, plans.always, reads=TERMS, looks_for_blocks=False),
    Row("d_sinks", frozenset({D_SINKS}), ALL, plans.always, reads=TERMS | {ANY_FORM}, looks_for_blocks=False),
    Row("query terms", TERMS, ALL, plans.always, looks_for_blocks=False),
)

NAMED_FOR = {row.name: row.targets for row in FORWARD + BACKWARD if row.targets is not None}


def say_what_is_slow(name: str, choices: tuple[Choice, ...], traits: Traits) -> None:
    """Log why kernels made for this GPU do not serve a pass."""
    if not is_heard():
        return
    for choice in choices:
        if choice.row.targets is None:
            for refusal in choice.refusals:
                if traits.family in NAMED_FOR.get(refusal.row, ()):
                    slow(f'{name} pass by "{choice.row.name}": "{refusal.row}" {refusal.reason}')
