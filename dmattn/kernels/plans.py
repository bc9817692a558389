"""Why a family of kernels does not serve a call, or why another is faster, beside features: the plans of the table's rows.

A plan gives all reasons in words for who makes the call, joined by "; ", or None where the row serves. None of them has a "; " of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton

from .base import tiles
from .base.tiles import FEW_ROWS, Tile, block_dim
from .features import EVERY, INTERVALS, MASKS, PACKED, PAIR_BIAS, WINDOW, named_family, named_feature
from .hopper import shared_query_grad as hopper_shared_query_grad
from .hopper.backward_sizes import one_pass_sizes
from .hopper.copies import NARROWEST, consumers_of
from .hopper.resident import bias as hopper_resident
from .hopper.resident import forward as hopper_resident_forward
from .hopper.shared_members import BLOCK_M
from .narrow_heads import are_narrowest, narrowest
from .portable import rows as portable_rows
from .portable import split_keys as portable_split_keys
from .reasons import joined, word
from .traits import D_BIAS_OF_PAIRS, D_BIAS_SHARED, D_KEY, D_QUERY, D_VALUE, Traits

_RESULTS = frozenset({"out", "d_out", "d_query"})
_UNBIASED = "is for a bias (..., Sq, Sk), and there is none"
_OF_NARROW = "with head dims of 64"
_KEYS_WITHOUT_LISTS = 256  # under a mask, up to which few queries read all keys
_MANY_KEYS = 257  # from which Hopper's kernel for d_query is the faster one for narrow heads
# A tanh (`hopper.registers.capped`) is off by 1e-7 or so, and scores by that times the softcap: by the most a tenth of float16's rounding. The
# least leaves room for the scale over it.
LEAST_SOFTCAP, MOST_SOFTCAP = 2.0**-40, 256
_OF_PRODUCTS = frozenset({"bias of keys", "bias of distances"})
_PAIRWISE = frozenset({"mask of pairs", "block mask"})
FEW_QUERIES = 64  # of which Hopper's kernels make one block: up to so many the portable kernels are no slower
# NVIDIA H200, 2026-11-28: 64 queries and keys of head dim 160 forward 0.0157 instead of 0.0183 ms, backward 0.0337 instead of 0.0577.
FEW_QUERIES_WIDE = 32  # of head dims over 128, though a second consumer is idle to 64
LEAST_FILL = 0.8  # of the processors in all rounds, by (batch, head) that are one program each
DIMS = (16, 32, 64, 128, 256)  # of heads, padded to powers of two, that Hopper's general kernels serve


def _find_tile(kernel: str, traits: Traits) -> Tile:
    """The tile of "one tile", "split keys" or "whole rows", which depends on less than others do (`tiles.pick`); whether "forward" has any."""
    return tiles.find((kernel,), traits.family, traits.dtype, traits.head_dim, traits.value_dim)


def _dims(traits: Traits) -> str:
    return f"{traits.head_dim} of queries and {traits.value_dim} of values"


def _without_tile(traits: Traits) -> str:
    return f"does not serve {word(traits.dtype)} with head dims {_dims(traits)} on {named_family(traits.family)}"


def _grouped(traits: Traits) -> str | None:
    if traits.heads == traits.kv_heads:
        return None
    return f"needs as many heads of keys as of queries, not {traits.kv_heads} for {traits.heads}"


def _are_narrow(traits: Traits) -> bool:
    """Head dims of 64, or of 64 and 32: the portable kernels lose by dims that they pad, which the copy engine fills up for
    nothing.
    """
    dims = traits.head_dim, traits.value_dim
    return max(dims) == 64 and all(dim == block_dim(dim) for dim in dims)


def are_wide(traits: Traits) -> bool:
    """Whether head dims are over 128, for which Hopper has kernels of their own."""
    return max(traits.head_dim, traits.value_dim) > 128


def _window(traits: Traits) -> int:
    """How many keys a query in the middle sees."""
    left, right = (traits.len_k if side is None else side for side in (traits.left, traits.right))
    return min(left + 1 + right, traits.len_k)


@joined
def _on_hopper(traits: Traits, dims: tuple[int, ...], *copied: str, loads_pairs: bool = False) -> Iterator[str]:
    """What any kernel for Hopper asks: 16-bit tensors that the copy engine addresses, those in `copied` too, and a positive scale.

    A larger product is a larger score then, and the scale leaves room to say a bias in units of the products. A kernel that `loads_pairs` does
    so where the copy engine does not address a bias or mask of them.
    """
    if not traits.gluon:
        yield "needs Triton 3.6 or later"
    narrow, wide = sorted((block_dim(traits.head_dim), block_dim(traits.value_dim)))
    if wide not in dims:
        least = 1 if dims[0] == 16 else dims[0] // 2 + 1
        yield f"serves head dims from {least} to {dims[-1]}, by the larger, not {_dims(traits)}"
    elif wide > 2 * narrow and not are_wide(traits):  # the backward pass pads the narrow one (`copies.padded_dims`)
        yield f"serves head dims that round up to the same power of 2 or the next one, not {_dims(traits)}"
    few = FEW_QUERIES_WIDE if are_wide(traits) else FEW_QUERIES
    if traits.len_q <= few:
        yield f"is for more than {few} queries, not {traits.len_q}"
    if traits.len_k == 0:
        yield "there is no key"
    if "intervals" in traits.features and traits.len_q > 1 << 22:
        yield f"serves up to {1 << 22} queries under an IntervalMask, not {traits.len_q}, as twice a place is to be exact in float32"
    if not 2.0**-64 <= traits.scale <= 2.0**64:
        yield f"serves a scale from 2**-64 to 2**64, not {traits.scale}"
    if traits.softcap is not None:
        if not traits.features.isdisjoint(_OF_PRODUCTS):
            yield f"serves no softcap beside {named_feature(min(traits.features & _OF_PRODUCTS))}, which it adds where the cap is still to come"
        if not LEAST_SOFTCAP <= traits.softcap <= MOST_SOFTCAP:
            yield f"serves a softcap from 2**-40 to {MOST_SOFTCAP}, not {traits.softcap}"
    if traits.wide:
        yield f"{', '.join(sorted(traits.wide))}: a stride of 2**22 elements or more between queries or keys needs offsets of more than 32 bits"
    if traits.bias is not None and traits.bias.dtype == torch.float64:
        yield "bias: float64 takes too many registers: convert it to float32"
    asked = {"query", "key", "value", *copied} | (set() if loads_pairs else {"bias"})
    yield from _uncopyable(traits, asked)


def _uncopyable(traits: Traits, asked: set[str]) -> Iterator[str]:
    """Why the copy engine cannot address those tensors of a call; one reason for all that share it.

    A result lies as its input does, so that what is said of the input is enough.
    """
    names: dict[tuple[str, str], list[str]] = {}
    by_name = dict(traits.uncopyable)
    for name, why in traits.uncopyable:
        follows = (name == "d_bias" and "bias" in by_name) or (name in _RESULTS and traits.dtype.itemsize > 2)
        if name in asked and not (follows and {"query", "bias"} & asked & by_name.keys()):
            before, _, after = why.partition(name)
            names.setdefault((before, after), []).append(name)
    for (before, after), named in names.items():
        yield f"{before}{', '.join(named)}{after}"


def _only_intervals(traits: Traits) -> str | None:
    return None if "intervals" in traits.features else "is for an IntervalMask, and there is none"


def _without_distances(traits: Traits) -> str | None:
    """Masks of other kinds than by key were not tried beside numbers of distances; one of pairs takes too many registers."""
    if "bias of distances" not in traits.features or traits.features.isdisjoint(MASKS - {"mask of keys"}):
        return None
    return "serves no mask beside a RelativeBias but one (..., 1, Sk), as of padding, or an IntervalMask"


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
    return f"{_without_tile(traits)}: pass a head dim up to 256, or float16 or bfloat16, or float64, which PyTorch's operations serve"


@joined
def one_tile(traits: Traits) -> Iterator[str | None]:
    """One tile holds all pairs of a (batch, head)."""
    tile = _find_tile("one tile", traits)
    if tile.block_m == 0:
        yield _without_tile(traits)
        return
    yield _grouped(traits)
    if traits.len_k == 0:
        yield "there is no key"
    if traits.len_q > tile.block_m or traits.len_k > tile.block_n:
        yield f"serves up to {tile.block_m} queries and {tile.block_n} keys, not {traits.len_q} and {traits.len_k}"


@joined
def split_keys(traits: Traits) -> Iterator[str]:
    """One tile holds the few queries of several heads; or the programs would leave processors room for more, and there are keys to split.

    And under a mask, few queries over keys so few that looking for blocks to leave out takes longer than reading all. Results of packed
    sequences are merged anyway, which takes longer than reading few keys. Where 9 queries or more of two heads fill a tile, and too few of them
    the processors, programs of their own are faster.
    """
    limits, group = _find_tile("split keys", traits), traits.heads // traits.kv_heads
    if limits.block_m == 0:
        yield _without_tile(traits)
        return
    packing = portable_split_keys.Packing.of(limits, group, traits.len_q, traits.kv_heads * traits.batch)
    visible, are_few = portable_split_keys.visible_keys(traits.len_q, traits.len_k, traits.left, traits.right), traits.len_q <= FEW_ROWS
    is_masked = not traits.features.isdisjoint(MASKS)
    in_one_tile, is_packed = group > 1 and traits.len_q <= packing.queries, not traits.features.isdisjoint(PACKED)
    is_small, are_many = 2 * traits.len_q <= FEW_ROWS and not is_packed, visible >= 2 * portable_split_keys.LEAST_KEYS
    if in_one_tile and (is_small or (are_many and (group > 2 or packing.programs >= traits.processors))):
        return
    read = traits.batch * traits.kv_heads * traits.len_k * (traits.head_dim + traits.value_dim) * traits.dtype.itemsize
    if are_few and is_masked and visible <= _KEYS_WITHOUT_LISTS and not is_packed and read < portable_split_keys.LISTED_BYTES:
        return
    work = portable_split_keys.Work(group, traits.len_q, visible, traits.batch * traits.heads * traits.len_q * traits.value_dim, is_masked)
    if work.worthwhile(work.most) == 1:
        rows = f"{traits.len_q} queries" + ("" if group == 1 else f" of {group} heads that share keys")
        yield f"is for few queries over more keys, as in decoding: to split {visible} visible keys of {rows} would save less than merging takes"
    most = traits.processors if are_few else traits.processors // 2
    if packing.programs > most and not in_one_tile:
        yield f"is for keys that fewer programs would read: {packing.programs} fill {traits.processors} multiprocessors, it splits up to {most}"


@joined
def hopper_forward(traits: Traits, loads_pairs: bool = False) -> Iterator[str | None]:
    """Narrow heads only where the portable kernel is not known to be the faster one."""
    yield _without_distances(traits)
    if _are_narrow(traits) and not traits.features.isdisjoint(_PAIRWISE):
        yield f"{_OF_NARROW} leaves a mask (..., Sq, Sk) or a BlockMask to the portable kernel, which is faster"
    if are_narrowest(traits):
        yield narrowest(traits, loads_pairs, forward=True)
    yield _on_hopper(traits, DIMS, loads_pairs=loads_pairs)


@joined
def _resident(traits: Traits, height: int, *copied: str) -> Iterator[str | None]:
    """Members enough of each slice of the bias, for programs that have so many of its rows."""
    most, fewest = hopper_resident.MOST_KEYS, hopper_resident.FEWEST_MEMBERS
    bias = traits.bias
    if bias is None:
        yield _UNBIASED
        return
    if bias.batch > 1 and bias.batch == traits.batch:
        yield "is for a bias that batch entries share"
    if traits.len_k > most:
        yield f"serves up to {most} keys, not {traits.len_k}"
    yield _on_hopper(traits, (16, hopper_resident.DIM), *copied, loads_pairs=True)
    if bias.dtype != traits.dtype:
        yield f"serves a bias in query's {word(traits.dtype)}, not {word(bias.dtype)}"
    if traits.members < fewest:
        yield f"is for a bias that at least {fewest} (batch, head) share, not {traits.members}"
    walked = triton.cdiv(traits.len_q, height) * traits.batch * traits.heads
    if walked < fewest * traits.processors:
        yield f"is for at least {fewest * traits.processors} blocks of {height} queries, over batch and heads, not {walked}"


def resident_forward(traits: Traits) -> str | None:
    """As `_resident`, for programs of one block of queries for each consumer."""
    consumers = consumers_of(traits.len_q, hopper_resident.DIM)
    return _resident(traits, hopper_resident_forward.BLOCK_M.value * consumers, "out")


@joined
def resident_backward(traits: Traits) -> Iterator[str | None]:
    """One answer for d_query and d_bias and for d_key and d_value, so that either both rows serve or none."""
    if traits.len_q > hopper_resident.MOST_KEYS:
        yield f"serves up to {hopper_resident.MOST_KEYS} queries, not {traits.len_q}"
    yield _grouped(traits)
    yield _resident(traits, 64, "d_out", "d_query")


@joined
def whole_rows(traits: Traits) -> Iterator[str | None]:
    """d_query of a (batch, head) stays in registers, which leaves none for bounds or for further rules.

    It serves short rows under a mask, which the rows with the bias on chip leave, and rows without a bias.
    """
    yield _grouped(traits)
    tile = _find_tile("whole rows", traits)
    if tile.block_m == 0:
        yield _without_tile(traits)
        return
    if traits.len_k == 0 or traits.len_q % tile.block_m or traits.len_k % tile.block_n:
        yield f"serves multiples of {tile.block_m} queries and {tile.block_n} keys, not {traits.len_q} and {traits.len_k}"
    if traits.features >= PAIR_BIAS | {"mask of keys"} and min(traits.len_q, traits.len_k) >= 256 and hopper_query(traits) is None:
        yield "leaves a bias (..., Sq, Sk) beside a mask (..., 1, Sk) from 256 queries and keys on to the kernels for Hopper"
    if traits.head_dim != block_dim(traits.head_dim) or traits.value_dim != block_dim(traits.value_dim):
        yield f"serves head dims that are powers of 2 from 16 on, not {_dims(traits)}"
    if traits.len_q > portable_rows.MOST_QUERIES:
        yield f"serves up to {portable_rows.MOST_QUERIES} queries, as many as fit in registers, not {traits.len_q}"
    sequences, fewest = traits.batch * traits.heads, portable_rows.PROGRAMS_PER_PROCESSOR * traits.processors
    if sequences < fewest:
        yield f"is for at least {fewest} (batch, head), not {sequences}"


@joined
def one_pass(traits: Traits, loads_pairs: bool = False) -> Iterator[str | None]:
    """All pairs of a (batch, head) are one program's, which keeps dQ on chip; so there must be many."""
    stores = D_BIAS_OF_PAIRS in traits.wanted
    yield _grouped(traits)
    if stores and traits.bias is not None and traits.bias.dtype != traits.dtype:
        yield f"stores d_bias in query's {word(traits.dtype)}, not {word(traits.bias.dtype)}"
    if stores and traits.softcap is not None:
        yield "makes no d_bias (..., Sq, Sk) beside a softcap, and it is wanted"
    sizes = one_pass_sizes(
        max(block_dim(traits.head_dim), block_dim(traits.value_dim), NARROWEST),
        traits.len_q,
        traits.len_k,
        biased=traits.features >= PAIR_BIAS,
        masked="mask of pairs" in traits.features,
        hides=not traits.features.isdisjoint(MASKS | WINDOW),
        stores=stores,
    )
    if sizes is None:
        beside = "".join(f", {name}" for name in sorted(traits.features) if name.endswith("of pairs"))
        yield f"has no room on chip for {traits.len_q} queries with head dims {_dims(traits)}{beside}"
    sequences = traits.batch * traits.heads
    rounds = triton.cdiv(sequences, traits.processors)
    if sequences < LEAST_FILL * rounds * traits.processors:
        filled = f"{LEAST_FILL:.0%} of the rounds of {traits.processors} multiprocessors"
        yield f"is for (batch, head) that fill {filled}, not {sequences} in {rounds}"
    if D_BIAS_SHARED in traits.wanted and traits.features <= PAIR_BIAS | WINDOW | EVERY and shared_query(traits) is None:
        yield 'leaves d_query beside a shared d_bias to "Hopper: d_query, d_bias"'
    if max(traits.head_dim, traits.value_dim) <= 16 and "mask of keys" in traits.features and whole_rows(traits) is None:
        yield 'leaves head dims to 16 beside a mask (..., 1, Sk) to "whole rows", which is faster'
    copied = (*(("d_bias",) if stores else ()), *(() if loads_pairs else ("mask",)))
    yield _on_hopper(traits, (16, 32, 64), "d_out", *copied, loads_pairs=loads_pairs)


@joined
def shared_query(traits: Traits) -> Iterator[str | None]:
    """Few (batch, head) share the bias, so that one program has registers for d_query of all, and there are programs enough."""
    yield _on_hopper(traits, (64, 128), "d_out", "d_bias")
    if traits.bias is None:
        yield _UNBIASED
        return
    dim = max(block_dim(traits.head_dim), block_dim(traits.value_dim))
    served = [members for members in range(2, 9) if hopper_shared_query_grad.blocks_of(members, dim)]
    blocks = hopper_shared_query_grad.blocks_of(traits.members, dim)
    if blocks == 0:
        if served:
            all_between = served == list(range(served[0], served[-1] + 1))
            numbers = f"{served[0]} to {served[-1]}" if all_between else " or ".join(map(str, served))
            yield f"is for a bias that {numbers} (batch, head) share, not {traits.members}"
        return
    programs = triton.cdiv(traits.len_q, blocks * BLOCK_M.value) * traits.bias.batch * traits.bias.heads
    places = triton.cdiv(programs, traits.processors) * traits.processors
    if programs < hopper_shared_query_grad.LEAST_FILL[blocks] * places:
        yield f"rows of the bias make {programs} programs, which leave many of {traits.processors} multiprocessors idle"


@joined
def stores_d_scores(traits: Traits) -> Iterator[str]:
    """d_bias of pairs is dS, which the kernel of keys stores and d_query is the product of."""
    if traits.wanted.isdisjoint({D_KEY, D_VALUE}):
        yield "makes d_bias beside d_key or d_value, and neither is wanted"
    if traits.bias is not None and traits.bias.dtype not in (traits.dtype, torch.float32):
        own = word(traits.dtype)
        yield f"d_bias in {word(traits.bias.dtype)} loses more than {own} does: convert the bias to {own} or float32"


@joined
def hopper_keys_and_bias(traits: Traits, loads_pairs: bool = False) -> Iterator[str | None]:
    """d_bias of pairs and a mask of them are copied, too, where the kernel loads no pairs."""
    d_bias = () if loads_pairs else ("d_bias", "mask")
    yield stores_d_scores(traits)
    if traits.softcap is not None and are_wide(traits):
        yield f"serves no softcap beside head dims over 128, not {_dims(traits)}"
    if are_narrowest(traits):
        yield narrowest(traits, loads_pairs)
    yield _on_hopper(traits, DIMS, "d_out", *d_bias, loads_pairs=loads_pairs)


@joined
def hopper_interval_keys_and_bias(traits: Traits) -> Iterator[str | None]:
    """The same by intervals."""
    yield _only_intervals(traits)
    yield hopper_keys_and_bias(traits)


def _is_stored_under_softcap(traits: Traits) -> bool:
    """Whether d_bias of pairs is stored beside d_key and d_value, but d_query is no product of it, as it lacks the slope of the cap."""
    if traits.softcap is None:
        return False
    if not traits.features.isdisjoint(INTERVALS):
        return traits.features.isdisjoint(MASKS) and hopper_interval_keys_and_bias(traits) is None
    return hopper_keys_and_bias(traits) is None or hopper_keys_and_bias(traits, loads_pairs=True) is None


@joined
def hopper_query(traits: Traits, loads_pairs: bool = False) -> Iterator[str | None]:
    """Narrow heads only beside a bias of pairs, or with many keys, as the portable kernel is faster else."""
    if D_BIAS_OF_PAIRS in traits.wanted and not _is_stored_under_softcap(traits):
        yield "another kernel makes d_query, of d_bias (..., Sq, Sk), which is wanted too"
    yield _without_distances(traits)
    if "bias of distances" in traits.features and D_QUERY not in traits.wanted:
        yield "makes sums for the gradient of a RelativeBias beside d_query, and query needs no gradient"
    if _are_narrow(traits) and not traits.features >= PAIR_BIAS:
        if _window(traits) < _MANY_KEYS:
            yield f"{_OF_NARROW} is for a bias (..., Sq, Sk), or {_MANY_KEYS} keys and more, as others are faster in the portable kernel"
        if not traits.features.isdisjoint(_PAIRWISE):
            yield f"{_OF_NARROW} leaves a mask (..., Sq, Sk) or a BlockMask to the portable kernel, which is faster"
    if are_narrowest(traits):
        yield narrowest(traits, loads_pairs)
    yield _on_hopper(traits, DIMS, "d_out", "out", loads_pairs=loads_pairs)


@joined
def hopper_keys(traits: Traits, loads_pairs: bool = False) -> Iterator[str | None]:
    """A mask of pairs is copied, too, where the kernel loads no pairs."""
    yield _without_distances(traits)
    if are_narrowest(traits):
        yield narrowest(traits, loads_pairs)
    yield _on_hopper(traits, DIMS, "d_out", *(() if loads_pairs else ("mask",)), loads_pairs=loads_pairs)


@joined
def hopper_interval_keys(traits: Traits) -> Iterator[str | None]:
    """The same by intervals."""
    yield _only_intervals(traits)
    yield hopper_keys(traits)


@joined
def hopper_shared(traits: Traits, loads_pairs: bool = False) -> Iterator[str | None]:
    """Narrow heads only where the portable kernel is slower."""
    if _are_narrow(traits) and "mask of keys" in traits.features:
        yield f"{_OF_NARROW} leaves a mask (..., 1, Sk) to the portable kernel, which is faster"
    yield _on_hopper(traits, (64, 128, 256), "d_out", loads_pairs=loads_pairs)
