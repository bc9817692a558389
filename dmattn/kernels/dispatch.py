"""Which kernels serve a call: one table for each pass, in order. The first row that serves makes a result.

A row names the features that it understands. A feature that it does not name refuses it, so that a new one may be slow and is never ignored.
Its `plan` says what else keeps it from a call, or why another row is faster, in words for who makes the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

from . import decoding, hopper_resident, hopper_resident_forward, tiles
from .hopper import consumers_of
from .tiles import Tile, block_dim
from .traits import OUT, PAIRS, Traits

MASKS = frozenset({"mask of pairs", "mask of keys", "mask of queries", "mask of heads"})
BIASES = frozenset({"bias of pairs", "bias of keys", "bias of queries", "bias of heads"})
INTERVALS = frozenset({"intervals", "intervals by head", "order"})
WINDOW = frozenset({"window"})
ALL = MASKS | BIASES | INTERVALS | WINDOW | {"softcap", "dropout"}
HOPPER = frozenset({"sm_90"})


class Row(NamedTuple):
    """A family of kernels. `targets` are the GPU families that it is for, None for all."""

    name: str
    makes: frozenset[str]
    understands: frozenset[str]
    plan: Callable[[Traits], str | None]
    targets: frozenset[str] | None = None

    def refusal(self, traits: Traits) -> str | None:
        """Why the row does not serve a call, or should not; None if it serves."""
        if self.targets is not None and traits.family not in self.targets:
            return f"is for {', '.join(sorted(self.targets))}, not {traits.family}"
        unknown = traits.features - self.understands
        return f"does not serve {', '.join(sorted(unknown))}" if unknown else self.plan(traits)


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


def _nobody(refusals: list[Refusal]) -> str:
    return "dmattn: no kernel serves this call: " + "; ".join(f"{refusal.row} {refusal.reason}" for refusal in refusals)


def tile_of(kernel: str, traits: Traits) -> Tile:
    """The tile of a kernel, a name of the table in tiles.py, as `pick` there has it."""
    if traits.family == "interpreter":
        return tiles._INTERPRETED
    table = tiles._TABLE.get(traits.family, tiles._DEFAULT)
    kinds = [f"{kernel} by intervals"] if "intervals" in traits.features else []
    if not traits.features.isdisjoint({"bias of pairs", "mask of pairs"}):
        kinds.append(f"{kernel} with pairs")
    rows = table[next((kind for kind in kinds if kind in table), kernel)]
    if traits.dtype == torch.float32:
        rows = {"windows": tiles._WIDE_WINDOWS, "rows": tiles._NO_ROWS}.get(kernel, tiles._WIDE_FLOATS)
    dim = max(block_dim(traits.head_dim), block_dim(traits.value_dim))
    tile = next(tile for largest, tile in rows if dim <= largest)
    crowded = not traits.features.isdisjoint(MASKS | {"dropout"})
    if tile.block_m > 64 and (traits.len_q <= 64 or (crowded and tile.warps == 4)):
        tile = Tile(64, tile.block_n, 4, tile.stages)
    return tile


def _always(traits: Traits) -> None:
    """The plan of a row that serves whatever it understands."""


def _one_tile(traits: Traits) -> str | None:
    """One tile holds all pairs of a (batch, head)."""
    tile = tile_of("windows", traits)
    if traits.heads != traits.kv_heads:
        return "heads share keys: kernels that sum over a group of heads serve them"
    if traits.len_k == 0:
        return "there is no key"
    if traits.len_q > tile.block_m or traits.len_k > tile.block_n:
        return f"{traits.len_q} x {traits.len_k} pairs are more than one tile of {tile.block_m} x {tile.block_n}"
    return None


def _split_keys(traits: Traits) -> str | None:
    """There are keys for two splits, and the programs would leave processors idle or one tile holds the queries of several heads."""
    limits, group = tile_of("decoding", traits), traits.heads // traits.kv_heads
    begin = 0 if traits.left is None else max(0, traits.len_k - traits.len_q - traits.left)
    end = traits.len_k if traits.right is None else min(traits.len_k, traits.len_k + traits.right)
    least = max(decoding.LEAST_KEYS, decoding.KEYS_PER_ROW * group * traits.len_q)
    if end - begin < 2 * least:
        return f"{max(0, end - begin)} visible keys are fewer than two splits of {least}"
    if group > limits.block_m:
        return f"{group} heads share keys, more than the {limits.block_m} rows of a tile"
    rows = min(limits.block_m, max(16, triton.next_power_of_2(triton.next_power_of_2(traits.len_q) * group)))
    queries = 1 << ((rows // group).bit_length() - 1)
    programs = triton.cdiv(traits.len_q, queries) * traits.kv_heads * traits.batch
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
    if block_dim(traits.head_dim) != block_dim(traits.value_dim) or block_dim(traits.head_dim) not in dims:
        return (
            f"serves head dims padded to {' or '.join(map(str, dims))} here, not {traits.head_dim} of queries and {traits.value_dim} of values"
        )
    if traits.len_q <= 64:
        return f"{traits.len_q} queries are no more than one consumer has, 64"
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
    """Narrow heads only where there are many keys and nothing hides any, as the portable kernel is faster with others."""
    open_keys = traits.features.isdisjoint(MASKS | INTERVALS | WINDOW) and (traits.bias is None or traits.bias.kind == PAIRS)
    return _on_hopper(traits, (64, 128) if open_keys and traits.len_k >= 2048 else (128,))


def _resident(traits: Traits, rows: int, *copied: str) -> str | None:
    """Members enough of each slice of the bias, for programs that have so many of its rows."""
    most, fewest = hopper_resident.MOST_KEYS, hopper_resident.FEWEST_MEMBERS
    bias = traits.bias
    if bias is None or bias.kind != PAIRS:
        return "there is no bias of pairs to keep on chip"
    if bias.batch > 1:
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
    walked = triton.cdiv(traits.len_q, rows) * traits.batch * traits.heads
    if walked < fewest * traits.processors:
        return f"{walked} blocks of queries are fewer than {fewest} for each of {traits.processors} processors"
    return None


def _resident_forward(traits: Traits) -> str | None:
    consumers = consumers_of(traits.len_q, hopper_resident.DIM)
    return _resident(traits, hopper_resident_forward.BLOCK_M.value * consumers, "out")


FORWARD = (
    Row("one tile", frozenset({OUT}), ALL, _one_tile),
    Row("split keys", frozenset({OUT}), ALL - {"dropout", "intervals by head"}, _split_keys),
    Row("Hopper", frozenset({OUT}), MASKS | BIASES | INTERVALS | WINDOW, _hopper_forward, HOPPER),
    Row("Hopper, bias on chip", frozenset({OUT}), frozenset({"bias of pairs"}), _resident_forward, HOPPER),
    Row("portable", frozenset({OUT}), ALL, _always),
)
