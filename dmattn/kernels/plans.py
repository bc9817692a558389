"""Why a family of kernels does not serve a call whose features it understands, or why another is faster: the plans of the table's rows.

A plan gives the reason in words for who makes the call, or None where the row serves.
"""

from __future__ import annotations

import torch
import triton

from .base import tiles
from .base.tiles import Tile, block_dim
from .features import EVERY, INTERVALS, MASKS, PAIR_BIAS
from .hopper import shared_query_grad as hopper_shared_query_grad
from .hopper.copies import consumers_of
from .hopper.resident import bias as hopper_resident
from .hopper.resident import forward as hopper_resident_forward
from .hopper.shared_members import BLOCK_M
from .portable import rows as portable_rows
from .portable import split_keys as portable_split_keys
from .traits import D_BIAS_OF_PAIRS, D_KEY, D_QUERY, D_VALUE, Traits

_GROUPED = "heads share keys: kernels that sum over a group of heads serve them"
_CROWDED = "beside numbers of distances a mask takes too many registers"
_OF_NARROW = "serves head dims from 33 to 64"
_MANY_KEYS = 2048  # from which Hopper's kernel for d_query is the faster one for narrow heads under a causal mask
_WIDE_WINDOW = 1024  # keys from which Hopper's forward kernel is the faster one for narrow heads
_OF_NARROWEST = "serves head dims to 32"
_FULL = 4  # blocks of 128 queries for each processor from which Hopper's kernels are known to be the faster ones of the narrowest heads
_PAIRWISE = frozenset({"mask of pairs", "block mask", "intervals"})


def _find_tile(kernel: str, traits: Traits) -> Tile:
    """The tile of "one tile", "split keys" or "whole rows", which depends on less than others do (`tiles.pick`); whether "forward" has any."""
    return tiles.find((kernel,), traits.family, traits.dtype, traits.head_dim, traits.value_dim)


def _without_tile(traits: Traits) -> str:
    return f"has no tile for {traits.dtype} with head dims {traits.head_dim} and {traits.value_dim} on {traits.family}"


def _are_narrow(traits: Traits) -> bool:
    return block_dim(traits.head_dim) == block_dim(traits.value_dim) == 64


def _are_narrowest(traits: Traits) -> bool:
    return max(traits.head_dim, traits.value_dim) <= 32


def _narrowest(traits: Traits, loads_pairs: bool) -> str | None:
    """Why another row serves head dims to 32; None for rows of pair representations that are too long to keep their bias on chip.

    Of others these kernels are not known to be the faster ones.
    """
    most = hopper_resident.MOST_KEYS
    if loads_pairs or not PAIR_BIAS <= traits.features <= PAIR_BIAS | EVERY | {"mask of keys"}:
        return f"{_OF_NARROWEST} beside a bias of pairs that the copy engine addresses, with sinks or a mask of keys, and no other rule"
    if traits.bias.batch == traits.batch:
        return f"{_OF_NARROWEST} where batch entries share the bias"
    if min(traits.len_q, traits.len_k) <= most:
        return f"{_OF_NARROWEST} with more than {most} queries and keys, not {traits.len_q} and {traits.len_k}"
    blocks = triton.cdiv(traits.len_q, 128) * traits.heads * traits.batch
    if blocks < _FULL * traits.processors:
        return f"{_OF_NARROWEST} with {_FULL * traits.processors} blocks of 128 queries or more, not {blocks}"
    return None


def are_wide(traits: Traits) -> bool:
    return max(traits.head_dim, traits.value_dim) > 128


def _window(traits: Traits) -> int:
    """How many keys a query in the middle sees."""
    left, right = (traits.len_k if side is None else side for side in (traits.left, traits.right))
    return min(left + 1 + right, traits.len_k)


def _sees_all_before(traits: Traits) -> bool:
    """Queries see all keys before them, as under a causal mask."""
    return traits.left is None and traits.right is not None


def _on_hopper(traits: Traits, dims: tuple[int, ...], *copied: str, loads_pairs: bool = False) -> str | None:
    """What any kernel for Hopper asks: 16-bit tensors that the copy engine addresses, those in `copied` too, and a positive scale.

    A larger product is a larger score then, and the scale leaves room to say a bias in units of the products. A kernel that `loads_pairs` does
    so where the copy engine does not address a bias or mask of them.
    """
    if not traits.gluon:
        return "needs Triton 3.6 or later"
    dim, value_dim = block_dim(traits.head_dim), block_dim(traits.value_dim)
    alike = dim == value_dim or (dim, value_dim) == (128, 64)  # values of 64 are copied as if they had 128
    if max(dim, value_dim) not in dims or not (alike or are_wide(traits)):
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
    asked = {"query", "key", "value", *copied} | (set() if loads_pairs else {"bias"})
    return next((why for name, why in traits.uncopyable if name in asked), None)


def _only_intervals(traits: Traits) -> str | None:
    return None if "intervals" in traits.features else "is for intervals, of which there are none"


def always(traits: Traits) -> None:
    """The plan of a row that serves whatever it understands."""


def portable(traits: Traits) -> str | None:
    """Float32 with head dims over 256 has no tile; the backward pass of such a call does not come to be."""
    return _without_tile(traits) if _find_tile("forward", traits).block_m == 0 else None


def one_tile(traits: Traits) -> str | None:
    """One tile holds all pairs of a (batch, head)."""
    tile = _find_tile("one tile", traits)
    if tile.block_m == 0:
        return _without_tile(traits)
    if traits.heads != traits.kv_heads:
        return _GROUPED
    if traits.len_k == 0:
        return "there is no key"
    if traits.len_q > tile.block_m or traits.len_k > tile.block_n:
        return f"{traits.len_q} x {traits.len_k} pairs are more than one tile of {tile.block_m} x {tile.block_n}"
    return None


def split_keys(traits: Traits) -> str | None:
    """There are keys for two splits, and the programs would leave processors idle or one tile holds the queries of several heads."""
    limits, group = _find_tile("split keys", traits), traits.heads // traits.kv_heads
    if limits.block_m == 0:
        return _without_tile(traits)
    visible = portable_split_keys.visible_keys(traits.len_q, traits.len_k, traits.left, traits.right)
    least = portable_split_keys.least_keys(group, traits.len_q)
    if visible < 2 * least:
        return f"is for few queries over many keys: {visible} visible keys are fewer than {2 * least}, two splits of them"
    if group > limits.block_m:
        return f"{group} heads share keys, more than the {limits.block_m} rows of a tile"
    _, queries, programs = portable_split_keys.packing(limits, group, traits.len_q, traits.kv_heads * traits.batch)
    packed = group > 1 and traits.len_q <= queries
    if not packed and 2 * programs > traits.processors:
        return f"{programs} programs keep {traits.processors} processors busy with whole keys"
    return None


def hopper_forward(traits: Traits, loads_pairs: bool = False) -> str | None:
    """Narrow heads only where the portable kernel is not known to be the faster one."""
    if {"intervals", "bias of distances"} <= traits.features:
        return "keys of a tile lie apart under intervals, and have no distances in common"
    if _are_narrow(traits) and not traits.features.isdisjoint(_PAIRWISE):
        return f"{_OF_NARROW} without a mask of pairs, a block mask or intervals, beside which the portable kernel is faster"
    if _are_narrow(traits) and traits.left is not None and _window(traits) < _WIDE_WINDOW:
        return f"{_OF_NARROW} with a window of {_WIDE_WINDOW} keys or more, not {_window(traits)}"
    if "bias of distances" in traits.features and not traits.features.isdisjoint(MASKS):
        return _CROWDED
    if _are_narrowest(traits) and (reason := _narrowest(traits, loads_pairs)) is not None:
        return reason
    return _on_hopper(traits, (32, 64, 128, 256), loads_pairs=loads_pairs)


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


def resident_forward(traits: Traits) -> str | None:
    consumers = consumers_of(traits.len_q, hopper_resident.DIM)
    return _resident(traits, hopper_resident_forward.BLOCK_M.value * consumers, "out")


def resident_backward(traits: Traits) -> str | None:
    """One answer for d_query and d_bias and for d_key and d_value, so that either both rows serve or none."""
    if traits.len_q > hopper_resident.MOST_KEYS:
        return f"{traits.len_q} queries are more than fit on chip, {hopper_resident.MOST_KEYS}"
    if traits.heads != traits.kv_heads:
        return _GROUPED
    return _resident(traits, 64, "d_out", "d_query")


def whole_rows(traits: Traits) -> str | None:
    """d_query of a (batch, head) stays in registers, which leaves none for bounds or for further rules.

    It serves short rows under a mask, which the rows with the bias on chip leave.
    """
    if traits.heads != traits.kv_heads:
        return _GROUPED
    tile = _find_tile("whole rows", traits)
    if tile.block_m == 0:
        return f"{_without_tile(traits)}, as it keeps all queries of a (batch, head) in registers"
    if traits.len_k == 0 or traits.len_q % tile.block_m or traits.len_k % tile.block_n:
        return f"{traits.len_q} x {traits.len_k} pairs are no whole tiles of {tile.block_m} x {tile.block_n}"
    if traits.head_dim != block_dim(traits.head_dim) or traits.value_dim != block_dim(traits.value_dim):
        return f"head dims {traits.head_dim} and {traits.value_dim} are not both powers of 2 from 16 on"
    if traits.len_q > portable_rows.MOST_QUERIES:
        return f"{traits.len_q} queries are more than registers hold, {portable_rows.MOST_QUERIES}"
    sequences, fewest = traits.batch * traits.heads, portable_rows.PROGRAMS_PER_PROCESSOR
    if sequences < fewest * traits.processors:
        return f"{sequences} (batch, head) are fewer than {fewest} for each of {traits.processors} processors"
    return None


def shared_query(traits: Traits) -> str | None:
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


def stores_d_scores(traits: Traits) -> str | None:
    """d_bias of pairs is dS, which the kernel of keys stores and d_query is the product of."""
    if traits.wanted.isdisjoint({D_KEY, D_VALUE}):
        return "neither d_key nor d_value is wanted, beside which d_bias would be made"
    if traits.bias.dtype not in (traits.dtype, torch.float32):
        return f"d_bias of {traits.bias.dtype} rounds dS more than products do: give the bias {traits.dtype} or float32"
    return None


def hopper_keys_and_bias(traits: Traits, loads_pairs: bool = False) -> str | None:
    d_bias = () if loads_pairs else ("d_bias", "mask")
    return stores_d_scores(traits) or _on_hopper(traits, (64, 128, 256), "d_out", *d_bias, loads_pairs=loads_pairs)


def hopper_interval_keys_and_bias(traits: Traits) -> str | None:
    return _only_intervals(traits) or hopper_keys_and_bias(traits)


def hopper_query(traits: Traits, loads_pairs: bool = False) -> str | None:
    """Narrow heads only beside a bias of pairs, or causal ones with many keys, as the portable kernel is faster without pairs to load."""
    if D_BIAS_OF_PAIRS in traits.wanted:
        return "d_bias of pairs is wanted, too, and made beside d_query by another kernel"
    if "bias of distances" in traits.features:
        if not traits.features.isdisjoint(MASKS | INTERVALS):
            return "keys of a tile lie apart under a mask or intervals, and have no distances in common"
        if D_QUERY not in traits.wanted:
            return "d_query is not wanted, beside which sums at the ends of a table are made"
    if _are_narrow(traits) and not (traits.features >= PAIR_BIAS or (_sees_all_before(traits) and traits.len_k >= _MANY_KEYS)):
        return f"{_OF_NARROW} beside a bias of pairs, or causal ones of {_MANY_KEYS} keys; others are faster in the portable kernel"
    if _are_narrowest(traits):
        if "mask of keys" not in traits.features:
            return f"{_OF_NARROWEST} beside a mask of keys, without which the portable kernel is faster"
        if (reason := _narrowest(traits, loads_pairs)) is not None:
            return reason
    return _on_hopper(traits, (32, 64, 128, 256), "d_out", "out", loads_pairs=loads_pairs)


def hopper_keys(traits: Traits, loads_pairs: bool = False) -> str | None:
    if "bias of distances" in traits.features and not traits.features.isdisjoint(MASKS):
        return _CROWDED
    if _are_narrowest(traits) and (reason := _narrowest(traits, loads_pairs)) is not None:
        return reason
    return _on_hopper(traits, (32, 64, 128, 256), "d_out", *(() if loads_pairs else ("mask",)), loads_pairs=loads_pairs)


def hopper_interval_keys(traits: Traits) -> str | None:
    return _only_intervals(traits) or hopper_keys(traits)


def hopper_shared(traits: Traits, loads_pairs: bool = False) -> str | None:
    if loads_pairs and block_dim(traits.head_dim) > 64 and traits.bias is not None and traits.bias.dtype.itemsize > 2:
        return f"bias of {traits.bias.dtype} leaves no room in shared memory beside head dims over 64"
    return _on_hopper(traits, (64, 128), "d_out", loads_pairs=loads_pairs)
