"""Why a family of kernels for Hopper does not serve a call, or why another is faster, beside features: plans as plans.py has them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton

from .base.rules import MOST_SOFTCAP
from .base.tiles import block_dim
from .features import INTERVALS, MASKS, PACKED, PAIR_BIAS, PAIRWISE, WINDOW, named_feature
from .hopper import shared_query_grad as hopper_shared_query_grad
from .hopper.addressing import UNIT
from .hopper.resident import bias as hopper_resident
from .hopper.shared_members import BLOCK_M
from .narrow_heads import are_narrowest, narrowest_forward, narrowest_keys, narrowest_query
from .reasons import dims_of, grouped, joined, stores_d_scores, word
from .traits import D_BIAS_OF_PAIRS, D_QUERY, LEADING_IN_RUNS, Traits

_RESULTS = frozenset({"out", "d_out", "d_query"})
_UNBIASED = "is for a bias (..., Sq, Sk), and there is none"
_OF_NARROW = "with head dims of 64"
_MANY_KEYS = 257  # from which Hopper's kernel for d_query is the faster one for narrow heads
_PADDED_KEYS = 640  # likewise for the gradient of a shared bias, beside a mask of keys
LEAST_SOFTCAP = 2.0**-40  # leaves room for the scale over it
_OF_PRODUCTS = frozenset({"bias of keys", "bias of distances"})
FEW_QUERIES = 64  # of which Hopper's kernels make one block: up to so many the portable kernels are no slower
# NVIDIA H200, 2026-11-28: 64 queries and keys of head dim 160 forward 0.0157 instead of 0.0183 ms, backward 0.0337 instead of 0.0577.
FEW_QUERIES_WIDE = 32  # of head dims over 128, though a second consumer is idle to 64
DIMS = (16, 32, 64, 128, 256)  # of heads, padded to powers of two, that Hopper's general kernels serve

# NVIDIA H200, 2026-11-29: docs/history.md, "Rows of other models, and dS handed on" and "Biases loaded ahead".
FORWARD_READS, BACKWARD_READS = 2, 1  # of each number of a shared bias, at least
READS_OF_AHEAD = 3  # in a forward pass without lists of blocks, which loads the words of a bias a tile ahead
PAIRS_OF_A_COPY = 1 << 20  # of all (batch, head), at least
ROOM_OF_A_COPY = 1 << 28  # bytes of one copy, or as many as queries, keys and values have
# These hide pairs that nobody knows before the kernels do, most of them where documents are short: as if they left this part.
LEFT_BY_BLOCKS = 1 / 4
_LEAVING_BLOCKS = frozenset({"intervals", "block mask"})
_NEVER_COPIED_BESIDE = PACKED | {"two intervals", "intervals by head", "order", LEADING_IN_RUNS}  # not timed


def _are_narrow(traits: Traits) -> bool:
    """Head dims of 64, or of 64 and 32: the portable kernels lose by dims that they pad, which the copy engine fills up for
    nothing.
    """
    dims = traits.head_dim, traits.value_dim
    return max(dims) == 64 and all(dim == block_dim(dim) for dim in dims)


def are_wide(traits: Traits) -> bool:
    """Whether head dims are over 128, for which Hopper has kernels of their own."""
    return max(traits.head_dim, traits.value_dim) > 128


def copies_pay(traits: Traits) -> bool:
    """Whether a pass is expected to be faster by a copy of the bias of pairs in rows that the copy engine can address, the time of the copy
    included. One that is `wide` is not copied: the copy has offsets of 32 bits in its tiles.
    """
    bias, len_q, len_k = traits.bias, traits.len_q, traits.len_k
    if bias is None or bias.dtype.itemsize != 2 or "bias" not in dict(traits.uncopyable) or "bias" in traits.wide:
        return False
    if not traits.features.isdisjoint(_NEVER_COPIED_BESIDE):
        return False
    is_causal = traits.left is None and traits.right == 0
    seen = len_k - min(len_q, len_k) // 2 if is_causal else _window(traits)  # keys of a query in the middle
    seen = seen if traits.features.isdisjoint(_LEAVING_BLOCKS) else LEFT_BY_BLOCKS * seen
    pairs, reads = traits.batch * traits.heads * len_q * seen, traits.members * seen / max(len_k, 1)
    size = bias.batch * bias.heads * len_q * triton.cdiv(len_k, UNIT) * UNIT
    tokens = traits.heads * len_q * traits.head_dim + traits.kv_heads * len_k * (traits.head_dim + traits.value_dim)
    room = max(ROOM_OF_A_COPY, 2 * traits.batch * tokens)
    is_ahead = traits.features.isdisjoint(MASKS | INTERVALS) and bias.batch * bias.heads * len_q * len_k % 2 == 0  # else there are no words
    least = BACKWARD_READS if traits.wanted else READS_OF_AHEAD if is_ahead else FORWARD_READS
    pays = reads >= least and pairs >= PAIRS_OF_A_COPY
    return traits.members > 1 and pays and 2 * size <= room


def _window(traits: Traits) -> int:
    """How many keys a query in the middle sees."""
    left, right = (traits.len_k if side is None else side for side in (traits.left, traits.right))
    return min(left + 1 + right, traits.len_k)


@joined
def on_hopper(traits: Traits, dims: tuple[int, ...], *copied: str, loads_pairs: bool = False) -> Iterator[str]:
    """What any kernel for Hopper asks: 16-bit tensors that the copy engine addresses, those in `copied` too, and a positive scale.

    A larger product is a larger score then, and the scale leaves room to say a bias in units of the products. A kernel that `loads_pairs` does
    so where the copy engine does not address a bias, and reads a mask of pairs by bits.
    """
    if not traits.gluon:
        yield "needs Triton 3.6 or later"
    narrow, wide = sorted((block_dim(traits.head_dim), block_dim(traits.value_dim)))
    if wide not in dims:
        least = 1 if dims[0] == 16 else dims[0] // 2 + 1
        yield f"serves head dims from {least} to {dims[-1]}, by the larger, not {dims_of(traits)}"
    elif wide > 2 * narrow and not are_wide(traits):  # the backward pass pads the narrow one (`copies.padded_dims`)
        yield f"serves head dims that round up to the same power of 2 or the next one, not {dims_of(traits)}"
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


@joined
def forward(traits: Traits, loads_pairs: bool = False) -> Iterator[str | None]:
    """Narrow heads only where the portable kernel is not known to be the faster one."""
    if (_are_narrow(traits) or are_narrowest(traits)) and not traits.features.isdisjoint(PAIRWISE) and traits.features >= PACKED:
        yield f"{_OF_NARROW} or to 32 leaves a mask (..., Sq, Sk) of packed sequences to the portable kernel, which is faster at 64"
    if are_narrowest(traits):
        yield narrowest_forward(traits)
    yield on_hopper(traits, DIMS, loads_pairs=loads_pairs)


@joined
def resident_backward(traits: Traits) -> Iterator[str | None]:
    """Members enough of each slice of the bias, for programs that have a block of its rows each.

    One answer for d_query and d_bias and for d_key and d_value, so that either both rows serve or none.
    """
    most, fewest, height = hopper_resident.MOST_KEYS, hopper_resident.FEWEST_MEMBERS, 64
    if traits.len_q > most:
        yield f"serves up to {most} queries, not {traits.len_q}"
    yield grouped(traits)
    bias = traits.bias
    if bias is None:
        yield _UNBIASED
        return
    if bias.batch > 1 and bias.batch == traits.batch:
        yield "is for a bias that batch entries share"
    if traits.len_k > most:
        yield f"serves up to {most} keys, not {traits.len_k}"
    yield on_hopper(traits, (16, hopper_resident.DIM), "d_out", "d_query", loads_pairs=True)
    if bias.dtype != traits.dtype:
        yield f"serves a bias in query's {word(traits.dtype)}, not {word(bias.dtype)}"
    if traits.members < fewest:
        yield f"is for a bias that at least {fewest} (batch, head) share, not {traits.members}"
    walked = triton.cdiv(traits.len_q, height) * traits.batch * traits.heads
    if walked < fewest * traits.processors:
        yield f"is for at least {fewest * traits.processors} blocks of {height} queries, over batch and heads, not {walked}"


@joined
def shared_query(traits: Traits) -> Iterator[str | None]:
    """Few (batch, head) share the bias, so that one program has registers for d_query of all, and there are programs enough."""
    yield on_hopper(traits, (64, 128), "d_out", "d_bias")
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
def keys_and_bias(traits: Traits, loads_pairs: bool = False) -> Iterator[str | None]:
    """d_bias of pairs and a mask of them are copied, too, where the kernel loads no pairs."""
    d_bias = () if loads_pairs else ("d_bias", "mask")
    yield stores_d_scores(traits)
    if traits.softcap is not None and are_wide(traits):
        yield f"serves no softcap beside head dims over 128, not {dims_of(traits)}"
    if are_narrowest(traits):
        yield narrowest_keys(traits)
    yield on_hopper(traits, DIMS, "d_out", *d_bias, loads_pairs=loads_pairs)


@joined
def interval_keys_and_bias(traits: Traits) -> Iterator[str | None]:
    """The same by intervals."""
    yield _only_intervals(traits)
    yield keys_and_bias(traits)


def _is_stored_under_softcap(traits: Traits) -> bool:
    """Whether d_bias of pairs is stored beside d_key and d_value, but d_query is no product of it, as it lacks the slope of the cap."""
    if traits.softcap is None:
        return False
    if not traits.features.isdisjoint(INTERVALS):
        return traits.features.isdisjoint(MASKS) and interval_keys_and_bias(traits) is None
    return keys_and_bias(traits) is None or keys_and_bias(traits, loads_pairs=True) is None


@joined
def query(traits: Traits, loads_pairs: bool = False) -> Iterator[str | None]:
    """Narrow heads only beside a bias of pairs, or with many keys, as the portable kernel is faster else."""
    if D_BIAS_OF_PAIRS in traits.wanted and not _is_stored_under_softcap(traits):
        yield "another kernel makes d_query, of d_bias (..., Sq, Sk), which is wanted too"
    if "bias of distances" in traits.features and D_QUERY not in traits.wanted:
        yield "makes sums for the gradient of a RelativeBias beside d_query, and query needs no gradient"
    if _are_narrow(traits) and not traits.features >= PAIR_BIAS and (seen := _window(traits)) < _MANY_KEYS:
        yield (
            f"{_OF_NARROW} is for a bias (..., Sq, Sk), or for queries that see {_MANY_KEYS} keys and more, not {seen}, "
            f"as others are faster in the portable kernel"
        )
    if are_narrowest(traits):
        yield narrowest_query(traits)
    yield on_hopper(traits, DIMS, "d_out", "out", loads_pairs=loads_pairs)


@joined
def keys(traits: Traits, loads_pairs: bool = False) -> Iterator[str | None]:
    """A mask of pairs is copied, too, where the kernel loads no pairs."""
    if are_narrowest(traits):
        yield narrowest_keys(traits)
    yield on_hopper(traits, DIMS, "d_out", *(() if loads_pairs else ("mask",)), loads_pairs=loads_pairs)


@joined
def interval_keys(traits: Traits) -> Iterator[str | None]:
    """The same by intervals."""
    yield _only_intervals(traits)
    yield keys(traits)


@joined
def shared(traits: Traits, loads_pairs: bool = False) -> Iterator[str | None]:
    """Narrow heads only where the portable kernel is slower."""
    if _are_narrow(traits) and not traits.features.isdisjoint(INTERVALS):
        yield f"{_OF_NARROW} leaves an IntervalMask to the portable kernel, which is faster"
    if _are_narrow(traits) and "mask of keys" in traits.features:
        if not traits.features.isdisjoint(WINDOW | PACKED):
            yield f"{_OF_NARROW} leaves a mask (..., 1, Sk) beside causal, a window or packed sequences to the portable kernel"
        if traits.len_k < _PADDED_KEYS:
            yield f"{_OF_NARROW} beside a mask (..., 1, Sk) is for at least {_PADDED_KEYS} keys, not {traits.len_k}"
    if traits.features >= PACKED and not traits.features.isdisjoint(MASKS - {"mask of keys"}):
        yield "serves no mask of packed sequences but one (..., 1, Sk)"
    if "intervals" in traits.features and traits.features >= WINDOW:
        yield "leaves an IntervalMask beside causal or a window to the portable kernel, as registers for all three are too few"
    yield on_hopper(traits, (64, 128, 256), "d_out", loads_pairs=loads_pairs)
