"""Why a family of kernels does not serve a call, or why another is faster, beside features: the plans of the table's rows.

A plan gives all reasons in words for who makes the call, joined by "; ", or None where the row serves. None of them has a "; " of its own.
These are the plans of kernels for every GPU, and of one pass on Hopper, which "whole rows" stand beside; hopper_plans.py has the others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton

from ..growing import whole
from . import hopper_plans
from .base import tiles
from .base.tiles import FEW_ROWS, Tile, block_dim
from .features import DISTANCES, EVERY, MASKS, PACKED, PAIR_BIAS, WINDOW, named_feature
from .hopper.backward_sizes import one_pass_sizes
from .hopper.copies import NARROWEST
from .hopper.resident import bias as hopper_resident
from .portable import rows as portable_rows
from .portable import split_keys as portable_split_keys
from .portable import stored_scores
from .reasons import dims_of, grouped, joined, without_tile, word
from .traits import D_BIAS_OF_PAIRS, D_BIAS_SHARED, D_KEY, D_QUERY, D_VALUE, Traits

_KEYS_WITHOUT_LISTS = 256  # under a mask, up to which few queries read all keys
STORED_KEYS, STORED_PROGRAMS = 64, 3  # keys of a program that stores dS, and programs for each processor of a part of the batch
UNSPLIT_64, UNSPLIT = 4, 3  # programs of few queries of the kernel that splits no keys, at once on a processor of sm_90, to head dim 64 and 128
# NVIDIA H200, 2026-11-30, backward with a bias on chip and in one pass: 8 heads of 512 batch entries of 128 queries and keys 0.283 and 0.202
# ms, of 1024 of 256 1.24 and 1.07; 4 heads of 256 of 256 0.164 and 0.160; over 200 to 384 keys within 3 % or slower so (docs/history.md).
KEYS_OF_TWO_TILES, MANY_MEMBERS = 256, 512
LEAST_FILL = 0.8  # of the processors in all rounds, by (batch, head) that are one program each


def _find_tile(kernel: str, traits: Traits) -> Tile:
    """The tile of "one tile", "split keys" or "whole rows", which depends on less than others do (`tiles.pick`); whether "forward" has any."""
    return tiles.find((kernel,), traits.family, traits.dtype, traits.head_dim, traits.value_dim)


def always(traits: Traits) -> None:
    """The plan of a row that serves whatever it understands."""


def query_makes_terms(dtype: torch.dtype) -> bool:
    """Whether the kernel of dQ makes query terms: not of float32, whose products may not be fused with sums (base/query_terms.py)."""
    return dtype.itemsize == 2


def makes_terms(traits: Traits) -> str | None:
    """Refuses float32."""
    return None if query_makes_terms(traits.dtype) else "is for float16 and bfloat16: in float32 the sums of dO * O have a kernel of their own"


def portable(traits: Traits) -> str | None:
    """Float32 with head dims over 256 has no tile; the backward pass of such a call does not come to be."""
    if _find_tile("forward", traits).block_m:
        return None
    return f"{without_tile(traits)}: pass a head dim up to 256, or float16 or bfloat16, or float64, which PyTorch's operations serve"


@joined
def stores_scores(traits: Traits) -> Iterator[str]:
    """dS is stored where products are of float32, and that of few batch entries makes enough programs."""
    if traits.dtype.itemsize == 2:
        yield "is for float32, whose products take longer than dS takes to be written and read"
    if D_BIAS_OF_PAIRS in traits.wanted:
        yield "leaves d_bias (..., Sq, Sk) of a bias that no two (batch, head) share to kernels that make it beside d_query"
    if traits.left is not None:
        yield "leaves a window to kernels that write no dS of the pairs that it hides"
    entries = stored_scores.entries_at_once(traits.batch, traits.heads, traits.len_q, traits.len_k)
    most, least = stored_scores.ROOM >> 20, STORED_PROGRAMS * traits.processors
    if entries == 0:
        yield f"has no room in {most} MiB for dS of a batch entry, {traits.heads} heads of {traits.len_q} x {traits.len_k} pairs"
        return
    programs = entries * traits.kv_heads * triton.cdiv(traits.len_k, STORED_KEYS)
    if entries < traits.batch and programs < least:
        wanted = f"dS of all {traits.batch} batch entries, or of as many as make {least} programs"
        yield f"has no room in {most} MiB for {wanted}: there is room for {entries}, which make {programs}"


@joined
def one_tile(traits: Traits) -> Iterator[str | None]:
    """One tile holds all pairs of a (batch, head). Of a group of heads one program has all, and keeps no more than one tile of dBias."""
    if grouped(traits):
        group = traits.heads // traits.kv_heads
        if D_BIAS_SHARED in traits.wanted and traits.heads // traits.bias.heads % group:
            yield f"makes d_bias of a shared bias that has as many heads as keys, {traits.kv_heads}, or 1, not {traits.bias.heads}"
        fewest = traits.processors // 2
        if traits.batch * traits.kv_heads < fewest:
            yield f"is for at least {fewest} (batch, head of keys) where heads share them, not {traits.batch * traits.kv_heads}"
    yield _in_one_tile(traits)


@joined
def one_tile_forward(traits: Traits) -> Iterator[str | None]:
    """The same where heads share keys, too, but for queries so few that those of a group make one tile."""
    if 2 * traits.len_q <= FEW_ROWS and grouped(traits):
        yield f'leaves up to {FEW_ROWS // 2} queries of heads that share keys to "split keys"'
    yield _in_one_tile(traits)


@joined
def _in_one_tile(traits: Traits) -> Iterator[str]:
    tile = _find_tile("one tile", traits)
    if tile.block_m == 0:
        yield without_tile(traits)
        return
    if traits.len_k == 0:
        yield "there is no key"
    if traits.len_q > tile.block_m or traits.len_k > tile.block_n:
        of = " of float32" if traits.dtype.itemsize == 4 else ""
        yield f"serves up to {tile.block_m} queries and {tile.block_n} keys{of}, not {traits.len_q} and {traits.len_k}"


@joined
def split_keys(traits: Traits) -> Iterator[str]:
    """One tile holds the few queries of several heads; or the programs would leave processors room for more, and there are keys to split.

    And under a mask, few queries over keys so few that looking for blocks to leave out takes longer than reading all; few beside a bias, of
    which larger tiles have rows that are not there; and few of wide heads, or of so many programs that the last round of the kernel which
    splits no keys would be poorly filled. Results of packed sequences are merged anyway, which takes longer than reading few keys. Where 9
    queries or more of two heads fill a tile, and too few of them the processors, programs of their own are faster.
    """
    limits, group = _find_tile("split keys", traits), traits.heads // traits.kv_heads
    if limits.block_m == 0:
        yield without_tile(traits)
        return
    packing = portable_split_keys.Packing.of(limits, group, traits.len_q, traits.kv_heads * traits.batch)
    seen, are_few = portable_split_keys.visible_keys(traits.len_q, traits.len_k, traits.left, traits.right), traits.len_q <= FEW_ROWS
    visible = whole(seen)
    is_masked = not traits.features.isdisjoint(MASKS)
    in_one_tile, is_packed = group > 1 and traits.len_q <= packing.queries, not traits.features.isdisjoint(PACKED)
    is_small, are_many = 2 * traits.len_q <= FEW_ROWS and not is_packed, visible >= 2 * portable_split_keys.LEAST_KEYS
    if in_one_tile and (is_small or (are_many and (group > 2 or packing.programs >= traits.processors))):
        return
    if is_small and seen > 0 and portable_split_keys.is_wide(traits.dtype, traits.head_dim, traits.value_dim):
        return
    if is_small and not is_masked and visible >= portable_split_keys.LEAST_KEYS and _is_poorly_filled(traits, packing.programs):
        return
    read = portable_split_keys.bytes_of_keys(traits.batch * traits.kv_heads, traits.len_k, traits.head_dim + traits.value_dim, traits.dtype)
    if are_few and is_masked and visible <= _KEYS_WITHOUT_LISTS and not is_packed and read < portable_split_keys.LISTED_BYTES:
        return
    is_biased = traits.bias is not None and traits.features.isdisjoint(DISTANCES)
    if is_biased and are_few and seen > 0 and not is_packed and traits.dtype.itemsize == 2 and packing.programs <= traits.processors:
        return
    dims = traits.head_dim, traits.value_dim
    merge = portable_split_keys.keys_of_a_merge(traits.dtype, dims, traits.len_q, packing.programs, is_masked, is_biased)
    results = traits.batch * traits.heads * traits.len_q * traits.value_dim
    work = portable_split_keys.Work.of(group, traits.len_q, visible, results, dims, merge)
    if work.worthwhile(work.most) == 1:
        rows = f"{traits.len_q} queries" + ("" if group == 1 else f" of {group} heads that share keys")
        splits = f"its splits of {seen} visible keys of {rows}"
        yield f"is for few queries over more keys, as in decoding: {splits} would save less than merging takes"
    most = traits.processors if are_few else traits.processors // 2
    if packing.programs > most and not in_one_tile:
        others = " but for head dims 129 to 256" if is_small and traits.dtype.itemsize == 2 else ""
        if others and traits.family == "sm_90" and not is_masked:
            others += " or a last round that would be poorly filled"
        yield f"is for up to {most} programs before splitting{others}, on {traits.processors} multiprocessors, not {packing.programs}"


def _is_poorly_filled(traits: Traits, programs: int) -> bool:
    """Whether the last round of the forward pass that splits no keys would be, of so many programs of few queries of 16 bits on sm_90, and the
    kernel that splits keys has a lighter tile for them.

    NVIDIA H200, 2026-11-30: 512 programs of head dim 128, 1.29 rounds, 0.147 ms, by the lighter tile 0.133 (docs/history.md). Not timed at 64.
    """
    each, dim = programs / traits.processors, max(block_dim(traits.head_dim), block_dim(traits.value_dim))
    if traits.dtype.itemsize != 2 or traits.family != "sm_90" or not portable_split_keys.is_lighter_better(each, dim):
        return False
    return portable_split_keys.stretch(each / (UNSPLIT_64 if dim <= 64 else UNSPLIT)) >= portable_split_keys.POORLY_FILLED


@joined
def whole_rows(traits: Traits) -> Iterator[str | None]:
    """d_query of a (batch, head) stays in registers, which leaves none for bounds or for further rules.

    It serves short rows under a mask, which the rows with the bias on chip leave, and rows without a bias.
    """
    yield grouped(traits)
    tile = _find_tile("whole rows", traits)
    if tile.block_m == 0:
        yield without_tile(traits)
        return
    if traits.len_k == 0 or traits.len_q % tile.block_m or traits.len_k % tile.block_n:
        yield f"serves multiples of {tile.block_m} queries and {tile.block_n} keys, not {traits.len_q} and {traits.len_k}"
    if traits.features >= PAIR_BIAS | {"mask of keys"} and min(traits.len_q, traits.len_k) >= 256 and hopper_plans.query(traits) is None:
        yield "leaves a bias (..., Sq, Sk) beside a mask (..., 1, Sk) from 256 queries and keys on to the kernels for Hopper"
    if traits.head_dim != block_dim(traits.head_dim) or traits.value_dim != block_dim(traits.value_dim):
        yield f"serves head dims that are powers of 2 from 16 on, not {dims_of(traits)}"
    if traits.len_q > portable_rows.MOST_QUERIES:
        yield f"serves up to {portable_rows.MOST_QUERIES} queries, as many as fit in registers, not {traits.len_q}"
    sequences, fewest = traits.batch * traits.heads, portable_rows.PROGRAMS_PER_PROCESSOR * traits.processors
    if sequences < fewest:
        yield f"is for at least {fewest} (batch, head), not {sequences}"


@joined
def one_pass(traits: Traits, loads_pairs: bool = False) -> Iterator[str | None]:
    """All pairs of a (batch, head) are one program's, which keeps dQ on chip; so there must be many.

    Where shared memory has no room for tiles of a mask, too, there may be room for what a kernel that `loads_pairs` has.
    """
    stores = D_BIAS_OF_PAIRS in traits.wanted
    yield grouped(traits)
    if stores and traits.bias is not None and traits.bias.dtype != traits.dtype:
        yield f"stores d_bias in query's {word(traits.dtype)}, not {word(traits.bias.dtype)}"
    if stores and traits.softcap is not None:
        yield "makes no d_bias (..., Sq, Sk) beside a softcap, and it is wanted"
    sizes = one_pass_sizes(
        max(block_dim(traits.head_dim), block_dim(traits.value_dim), NARROWEST),
        traits.len_q,
        traits.len_k,
        biased=traits.features >= PAIR_BIAS,
        masked="mask of pairs" in traits.features and not loads_pairs,
        hides=not traits.features.isdisjoint(MASKS | WINDOW),
        stores=stores,
    )
    if sizes is None:
        named = [
            named_feature(name)
            for name in sorted(traits.features)
            if name.endswith("of pairs") and not (loads_pairs and name.startswith("mask"))
        ]
        beside = f" beside {' and '.join(named)}" if named else ""
        yield f"has no room on chip for {traits.len_q} queries with head dims {dims_of(traits)}{beside}"
    sequences = traits.batch * traits.heads
    rounds = triton.cdiv(sequences, traits.processors)
    if sequences < LEAST_FILL * rounds * traits.processors:
        filled = f"{LEAST_FILL:.0%} of whole rounds of {traits.processors} multiprocessors"
        part = f"{sequences / (rounds * traits.processors):.0%}"
        yield f"is for batch x heads that fill {filled}, not {sequences}, which fill {part} of {rounds}"
    if D_BIAS_SHARED in traits.wanted and traits.features <= PAIR_BIAS | WINDOW | EVERY and hopper_plans.shared_query(traits) is None:
        yield 'leaves d_query beside a shared d_bias to "Hopper: d_query, d_bias"'
    if max(traits.head_dim, traits.value_dim) <= 16 and "mask of keys" in traits.features and whole_rows(traits) is None:
        yield 'leaves head dims to 16 beside a mask (..., 1, Sk) to "whole rows", which is faster'
    copied = (*(("d_bias",) if stores else ()), *(() if loads_pairs else ("mask",)))
    yield hopper_plans.on_hopper(traits, (16, 32, 64), "d_out", *copied, loads_pairs=loads_pairs)


@joined
def resident_backward(traits: Traits) -> Iterator[str | None]:
    """With a bias on chip, unless one pass makes dQ, dK and dV where it is faster: over one tile of keys, or two whole ones of rows that share
    the bias with many.
    """
    yield hopper_plans.resident_backward(traits)
    if traits.bias is None or not traits.wanted >= {D_QUERY, D_KEY, D_VALUE}:
        return
    is_one_tile = hopper_resident.KEYS.value // 2 < traits.len_k <= hopper_resident.KEYS.value
    are_two = traits.len_q == traits.len_k == KEYS_OF_TWO_TILES and traits.members >= MANY_MEMBERS
    if (is_one_tile or are_two) and None in (one_pass(traits), one_pass(traits, loads_pairs=True)):
        yield f'leaves {traits.len_k} keys of {traits.members} (batch, head) that share a bias to "Hopper, one pass", which is faster'
