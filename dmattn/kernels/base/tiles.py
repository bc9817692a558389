"""Tile sizes: those timed on the GPU at hand, else a frozen table, a rule to pick from both, and the launch options that follow."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...precision import dot_precision
from ...problem import Problem
from .device import device_family
from .layout import strided
from .timed_tiles import FLOATS, FOUR_PROGRAMS, HEAD_DIMS, NARROW, THREE_PROGRAMS, WHOLE, Place, Tile, timed_tile

_NOTHING_FITS = Tile(0, 0, 1, 1)  # of "one tile" and "whole rows", which keep whole lengths on chip, and of what no kernel serves
_NO_WHOLE_ROWS = ((256, _NOTHING_FITS),)

# Device family -> kernel -> rows of (largest padded head dim, tile), for 16-bit inputs. A family not listed takes the default, which fits
# 99 KiB of shared memory; it and hip are chosen by the compile-only report (tests/kernels/test_compile_targets.py), not by time.
_DEFAULT = {
    "forward": ((64, Tile(64, 64, 4, 3)), (128, Tile(64, 64, 4, 2)), (256, Tile(64, 32, 4, 1))),
    "keys": ((64, Tile(32, 64, 4, 2)), (128, Tile(64, 32, 4, 1)), (256, Tile(32, 32, 4, 1))),
    "queries": ((64, Tile(64, 64, 4, 2)), (128, Tile(64, 32, 4, 1)), (256, Tile(32, 32, 4, 1))),
    "queries of d_bias": ((64, Tile(64, 64, 4, 2)), (128, Tile(64, 64, 4, 2)), (256, Tile(64, 32, 4, 1))),
    "bias": ((64, Tile(64, 64, 4, 2)), (128, Tile(64, 32, 4, 1)), (256, Tile(16, 32, 8, 1))),
    "one tile": ((32, Tile(64, 64, 8, 2)), (128, Tile(64, 64, 8, 1)), (256, Tile(32, 32, 4, 1))),
    "split keys": ((128, Tile(64, 64, 4, 3)), (256, Tile(64, 32, 4, 2))),  # its rows are the most: it takes as many as there are
    "whole rows": _NO_WHOLE_ROWS,
}
_FOUR_TO_A_PROCESSOR = Tile(64, 64, 4, 3, registers=FOUR_PROGRAMS)
_THREE_TO_A_PROCESSOR = Tile(64, 64, 4, 3, registers=THREE_PROGRAMS)
TIMED_ON = "NVIDIA H200"  # the name of the GPU on which the table's tiles of sm_90 were timed
_TABLE = {
    # NVIDIA H200, 2026-11-21, by a script that `dmattn tune` has replaced (benchmarks/results/tune_nvidia_h200.json, where "split keys" are
    # "decoding" and "queries of d_bias" are "products"); head dim 256 untimed. NVIDIA H100, 2026-11-26, by `dmattn tune` and then on the
    # matrix's own rows (docs/history.md): "forward" at 64, "forward by intervals" to 128, "keys with pairs" to 64, "queries by intervals" to
    # 64, "queries with pairs" and "queries of d_bias" to 64. NVIDIA H200, 2026-11-26, on those rows: the most registers. "with pairs" is with
    # a bias or mask of pairs, whose tiles take registers and shared memory; "by intervals" with intervals, whose tiles are full of short lives,
    # so that smaller ones waste less. Of "one tile" head dim 32 alone was timed (t5_window in speed_nvidia_h200_at_43752e4.json), and so of
    # "whole rows" (evoformer_row, docs/history.md); with two stages ptxas serialises the matrix products of "whole rows". "one tile of out" is
    # its forward pass, at 128 by 50 x 50 pairs of head dims 80 and 96, which took 0.112 and 0.109 ms with 8 warps and take 0.066; "of few" is
    # the backward pass of at most 32 queries and keys, or where heads share keys of either; "of groups" that of more where they do (NVIDIA
    # H200, 2026-11-28, shared_and_capped_nvidia_h200.json).
    "sm_90": {
        "forward": ((64, _FOUR_TO_A_PROCESSOR), (128, Tile(64, 64, 4, 3)), (256, Tile(64, 64, 8, 2))),
        "forward with pairs": ((32, Tile(64, 64, 4, 3)), (64, Tile(128, 64, 4, 3)), (128, Tile(128, 64, 8, 3)), (256, Tile(64, 64, 8, 2))),
        "forward by intervals": ((64, _FOUR_TO_A_PROCESSOR), (128, Tile(64, 64, 4, 3)), (256, Tile(64, 64, 8, 2))),
        "keys": ((64, Tile(32, 64, 4, 3)), (128, Tile(64, 128, 8, 3)), (256, Tile(32, 64, 8, 1))),
        "keys with pairs": ((32, Tile(32, 64, 4, 2)), (64, Tile(64, 64, 4, 2)), (128, Tile(32, 64, 4, 2)), (256, Tile(32, 64, 8, 1))),
        "keys by intervals": ((128, Tile(32, 64, 4, 3)), (256, Tile(32, 64, 8, 1))),
        "queries": ((64, Tile(64, 32, 4, 3)), (128, Tile(128, 64, 8, 3)), (256, Tile(64, 32, 8, 1))),
        "queries with pairs": ((32, Tile(64, 64, 4, 3)), (64, Tile(64, 32, 4, 3)), (128, Tile(128, 64, 8, 3)), (256, Tile(64, 32, 8, 1))),
        "queries by intervals": ((32, Tile(64, 32, 4, 3)), (128, Tile(64, 64, 4, 3)), (256, Tile(64, 32, 8, 1))),
        "queries of d_bias": ((32, Tile(128, 128, 8, 2)), (64, Tile(64, 128, 4, 3)), (128, Tile(128, 64, 8, 3)), (256, Tile(64, 64, 8, 2))),
        "bias": ((64, Tile(64, 64, 4, 3)), (128, Tile(64, 128, 8, 2)), (256, Tile(64, 32, 8, 1))),
        "bias by intervals": ((64, _THREE_TO_A_PROCESSOR), (128, Tile(64, 128, 8, 2)), (256, Tile(64, 32, 8, 1))),
        "one tile": ((32, Tile(64, 64, 4, 3)), (64, Tile(64, 64, 4, 2)), (128, Tile(64, 64, 8, 2)), (256, Tile(32, 32, 4, 1))),
        "one tile of few": ((128, Tile(64, 64, 4, 3)), (256, Tile(32, 32, 4, 1))),
        "one tile of groups": ((64, Tile(64, 64, 4, 3)), (128, Tile(64, 64, 8, 1)), (256, Tile(32, 32, 4, 1))),
        "one tile of out": ((32, Tile(64, 64, 4, 3)), (128, Tile(64, 64, 4, 2)), (256, Tile(32, 32, 4, 1))),
        "split keys": ((64, Tile(64, 128, 4, 3)), (128, Tile(64, 64, 4, 3)), (256, Tile(64, 32, 4, 3))),
        "whole rows": ((32, Tile(64, 64, 4, 1)), (256, _NOTHING_FITS)),
    },
    "hip": {"whole rows": _NO_WHOLE_ROWS}
    | {
        kernel: ((64, Tile(64, 64, 4, 1)), (128, Tile(64, 32, 4, 1)), (256, Tile(32, 32, 4, 1)))
        for kernel in ("forward", "keys", "queries", "queries of d_bias", "bias", "one tile", "split keys")
    },
}
# Head dims over 256, for 16-bit inputs alone, as those of float32 take more shared memory than most GPUs have. By what compiles with the fewest
# spills, untimed.
_WIDEST = {
    "sm_90": {
        "forward": Tile(32, 64, 8, 1),
        "split keys": Tile(32, 64, 8, 1),
        "queries of d_bias": Tile(64, 32, 8, 1),
        "bias": Tile(16, 32, 8, 1),
    }
    | dict.fromkeys(("keys", "queries"), Tile(32, 32, 8, 1)),
    "hip": dict.fromkeys(("forward", "keys", "queries", "queries of d_bias", "bias", "split keys"), Tile(16, 16, 4, 1)),
}
_WIDEST_DEFAULT = dict.fromkeys(("forward", "queries of d_bias", "split keys"), Tile(32, 32, 8, 1)) | {
    "keys": Tile(16, 16, 4, 1),
    "queries": Tile(16, 16, 4, 1),
    "bias": Tile(16, 32, 8, 1),
}
# float32 inputs, with products of parts. NVIDIA H200, 2026-11-28, on problems without a bias, with one of pairs and with documents
# (docs/history.md): with a second stage nearly all kernels take longer, to head dim 32 up to 2.7 times as long. That of "queries" to head dim
# 32 was not timed with pairs. On other GPUs they are those that spill least, untimed, and fit 99 KiB. A wide head is in pieces of as many dims
# as a tile's last number.
_FLOATS = {
    "sm_90": {
        "forward": ((64, Tile(64, 64, 4, 1)), (96, Tile(128, 64, 8, 1, 32)), (256, Tile(128, 64, 8, 1, 64))),
        "keys": ((64, Tile(64, 64, 4, 1)), (96, Tile(64, 64, 4, 1, 32)), (256, Tile(32, 64, 4, 1, 64))),
        "queries": ((32, Tile(64, 32, 4, 1)), (64, Tile(64, 64, 4, 1)), (128, Tile(128, 64, 8, 1, 64)), (256, Tile(64, 32, 4, 1, 64))),
        "bias": ((64, Tile(64, 64, 4, 1)), (128, Tile(64, 32, 4, 2, 32)), (256, Tile(128, 32, 8, 1, 64))),
    },
}
_FLOATS_DEFAULT = {
    "forward": ((64, Tile(64, 32, 4, 2)), (128, Tile(32, 32, 4, 2, 64)), (256, Tile(32, 32, 8, 1, 64))),
    "keys": ((64, Tile(32, 32, 4, 2)), (128, Tile(32, 32, 8, 1, 64)), (256, Tile(16, 16, 4, 1, 64))),
    "queries": ((32, Tile(64, 32, 4, 2)), (64, Tile(32, 32, 4, 2)), (128, Tile(32, 32, 8, 1, 64)), (256, Tile(16, 32, 8, 1, 64))),
    "bias": ((32, Tile(64, 32, 4, 2)), (128, Tile(32, 32, 4, 2, 32)), (256, Tile(16, 32, 8, 1, 64))),
}
_FLOATS_ALWAYS = {"split keys": ((128, Tile(32, 32, 4, 1)), (256, Tile(32, 32, 8, 1)))}  # on every GPU
_OF_QUERIES = {"queries of d_bias": "queries"}  # the tiles for one are those for the other
# The same of other kernels, and of all whose products are not made of parts.
_WIDE_FLOATS = ((64, Tile(32, 32, 4, 1)), (128, Tile(32, 32, 4, 1)), (256, Tile(16, 16, 4, 1)))
_WIDE_ONE_TILE = ((64, Tile(32, 32, 4, 1)), (256, _NOTHING_FITS))  # for "one tile", which spills where heads are wider
_INTERPRETED = Tile(32, 32, 4, 1)
_INTERPRETED_PIECES = dict.fromkeys(_FLOATS_DEFAULT, Tile(32, 32, 4, 1, 64))
FEW_ROWS = 16  # queries of all heads that share keys: as many as a matrix product takes at least
_OVER_QUERIES = {"forward", "keys", "queries", "queries of d_bias"}  # kernels that may have tiles of so many
_RULING = ("mask", "bias", "first", "last", "also_first", "also_last")  # fields of a problem, loaded by places of queries or keys


def pick(kernel: str, problem: Problem, is_frozen: bool = False) -> Tile:
    """The tile of `kernel`, a name of the table, for a problem's head dims, dtype and device; `is_frozen` asks for no timed one."""
    query = problem.query
    tile = find(kinds_of(kernel, problem), device_family(query.device), query.dtype, query.shape[3], problem.value.shape[3], is_frozen)
    few_rows = query.shape[2] <= 64  # rows that no query fills cost as much as the others
    # a mask takes registers, and so do dropout, a table and a cap on scores
    crowded = problem.is_masked or problem.seed is not None or problem.zero is not None
    if crowded or problem.softcap is not None:
        tile = tile._replace(registers=0)
    if tile.block_m > 64 and (few_rows or (crowded and tile.warps == 4)):
        # Half of the warps have no registers for as many keys in pieces, but in the forward pass to head dim 128 (docs/history.md).
        fewer = tile.dims < WHOLE and (kernel != "forward" or max(query.shape[3], problem.value.shape[3]) > 128)
        tile = tile._replace(block_m=64, warps=4, block_n=min(32, tile.block_n) if fewer else tile.block_n)
    is_timed = tile.dims >= WHOLE or (kernel == "keys" and tile.block_m == 64)
    if is_timed and dot_precision(query.dtype) == "bf16x6" and device_family(query.device) == "sm_90":
        tile = _fitted(kernel, tile, problem)
    if kernel in _OVER_QUERIES and query.shape[2] <= FEW_ROWS and (kernel != "forward" or tile.warps == 4) and _may_have_few_rows(problem):
        tile = tile._replace(block_m=FEW_ROWS, warps=tile.warps if kernel == "keys" else 4)
    return tile


def _fitted(kernel: str, tile: Tile, problem: Problem) -> Tile:
    """A tile of float32 with fewer of the rows that a program walks, queries or keys, where that leaves out much of their padding.

    NVIDIA H200, 2026-11-30, 80 x 80 pairs: with 32 rows a kernel takes 0.81 to 0.93 of the time of 64, with 16, which those of dK, dV and of a
    shared dBias are slower with, 0.75 to 0.84.
    """
    by_queries = kernel == "keys"
    length, block = (problem.query.shape[2], tile.block_m) if by_queries else (problem.key.shape[2], tile.block_n)
    by_block, by_32, by_16 = (triton.cdiv(length, rows) * rows for rows in (block, 32, 16))
    if by_16 <= 0.65 * by_block and kernel not in ("keys", "bias"):
        block = 16
    elif by_32 <= 0.8 * by_block:
        block = 32
    return tile._replace(block_m=block) if by_queries else tile._replace(block_n=block)


def _may_have_few_rows(problem: Problem) -> bool:
    """Whether a tile may have FEW_ROWS queries, and be faster where there are no more, or as fast.

    NVIDIA H200, 2026-11-27: one query of 512 (batch, head) beside a bias, over 512 keys of head dim 64 0.032 to 0.029 ms, over 2048 with
    padding 0.081 to 0.072, head dims 128 and 256 as before. 2026-11-28: the backward pass of (758, 8 on 4, 4 x 512, 128) 2.01 to 1.08, of
    (256, 16, 1 x 729, 72) 1.63 to 1.21.
    """
    query, pairwise = problem.query, problem.pair_mask is not None or problem.bits is not None
    if pairwise or problem.first is not None or max(query.shape[3], problem.value.shape[3]) > 256:
        return False
    return query.dtype.itemsize == 2 and device_family(query.device) == "sm_90"


def kinds_of(kernel: str, problem: Problem) -> tuple[str, ...]:
    """Names under which a table may have `kernel` for a problem, the most particular first; the last is the kernel's own."""
    kinds = [f"{kernel} by intervals"] if problem.first is not None else []
    if problem.pair_bias is not None or problem.pair_mask is not None or problem.bits is not None:
        kinds.append(f"{kernel} with pairs")
    if kernel.startswith("one tile of "):
        return (*kinds, kernel, "one tile")
    return (*kinds, kernel)


def find(
    kinds: tuple[str, ...], family: str, dtype: torch.dtype, head_dim: int, value_dim: int, is_frozen: bool = False
) -> Tile:  # fmt: skip
    """The tile of the first of `kinds`, if it was timed on this GPU; else of the first that the frozen table has, which has the last.

    A tile that was timed serves no other kind: what is not in that kind's problems may take more shared memory than there is. `is_frozen` asks
    for no timed one.
    """
    products = _precision(family, dtype) if dtype == torch.float32 else None
    dim = max(block_dim(head_dim), block_dim(value_dim))
    frozen = _frozen(kinds, family, products, -(-max(head_dim, value_dim) // 32) * 32)
    if is_frozen or family == "interpreter" or dim > HEAD_DIMS[-1] or products not in (None, "bf16x6"):
        return frozen
    timed = timed_tile(family, Place(kinds[0], NARROW if products is None else FLOATS, max(HEAD_DIMS[0], dim)))
    if timed is None:
        return frozen
    # By the rows of split keys the table of kernels decides whether they serve a call (plans.py): they stay.
    return timed._replace(block_m=frozen.block_m) if kinds[-1] == "split keys" else timed


@cache
def _frozen(kinds: tuple[str, ...], family: str, products: str | None, dim: int) -> Tile:
    """That for a head dim in 32s; `products` are those of float32, None for 16-bit inputs."""
    if family == "interpreter":
        return _INTERPRETED_PIECES.get(kinds[-1], _INTERPRETED)
    if dim > 256:
        return _WIDEST.get(family, _WIDEST_DEFAULT).get(kinds[-1], _NOTHING_FITS) if products is None else _NOTHING_FITS
    table = _TABLE.get(family, _DEFAULT)
    rows = table[next(kind for kind in kinds if kind in table)]
    if products is not None:
        rows = {"one tile": _WIDE_ONE_TILE, "whole rows": _NO_WHOLE_ROWS}.get(kinds[-1], _WIDE_FLOATS)
        if products != "ieee":
            floats = _FLOATS_ALWAYS | _FLOATS.get(family, _FLOATS_DEFAULT)
            rows = floats.get(_OF_QUERIES.get(kinds[-1], kinds[-1]), rows)
    return next(tile for largest, tile in rows if dim <= largest)


def pick_storing(problem: Problem) -> Tile:
    """The tile of "keys" for a launch that stores dS: of float32 with fewer queries where that is faster, as more programs share a processor.

    NVIDIA H200, 2026-11-30, dK and dV with 32 queries and 64: (64, 12 on 4, 200², 64) 0.548 and 0.655 ms, under a mask of pairs 0.688 and
    0.943, (6, 8, 500², 80) beside a shared bias 0.381 and 0.423, (16, 12, 320², 64) 0.264 and 0.262, (44, 24 on 6, 197², 96) under a mask of
    pairs, backward, 1.81 and 2.21. The backward pass of (128, 4, 256², 32) took 7 % more with 32, of (9, 12 on 6, 500², 96) beside a bias of
    keys 2 % (docs/history.md).
    """
    tile, dim = pick("keys", problem), max(problem.query.shape[3], problem.value.shape[3])
    of_pairs = problem.pair_bias is not None or problem.pair_mask is not None or problem.bits is not None
    is_faster = 32 < dim <= 64 or (64 < dim <= 96 and of_pairs)
    if problem.query.dtype != torch.float32 or not is_faster or tile != pick("keys", problem, is_frozen=True):
        return tile
    return tile._replace(block_m=min(32, tile.block_m))


def in_pieces(problem: Problem, tile: Tile) -> bool:
    """Whether a tile has a head's dims in several pieces (:mod:`.pieces`)."""
    return max(problem.query.shape[3], problem.value.shape[3]) > tile.dims


def launch_options(problem: Problem, tile: Tile, *outputs: Tensor | None) -> dict[str, Any]:
    """Keyword arguments that every attention kernel takes, from the problem's tensors, lengths and head dims and the tile.

    A kernel that needs no value replaces that one by None.
    """
    query, key, value = problem.query, problem.key, problem.value
    (_, heads, len_q, head_dim), len_k, value_dim = query.shape, key.shape[2], value.shape[3]
    return dict(
        q=strided(query, heads),
        k=strided(key, heads),
        v=strided(value, heads),
        heads=heads,
        len_q=len_q,
        len_k=len_k,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=min(block_dim(head_dim), tile.dims),
        BLOCK_DV=min(block_dim(value_dim), tile.dims),
        EVEN_M=problem.ends_q is None and len_q % tile.block_m == 0,
        EVEN_N=problem.ends_q is None and len_k % tile.block_n == 0,
        INDEX=tl.int64 if _needs_wide_index(query, key, value, *(getattr(problem, name) for name in _RULING), *outputs) else tl.int32,
        PRECISION=_precision(device_family(query.device), query.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **({"maxnreg": tile.registers} if tile.registers else {}),
    )


def _precision(family: str, dtype: torch.dtype) -> str:
    """That of products, for the compiler: AMD's splits no float32, nor does the interpreter, whose products are exact to float32 anyway."""
    return "ieee" if family in ("hip", "interpreter") else dot_precision(dtype)


@cache
def block_dim(dim: int) -> int:
    """A head dim padded to what a matrix product takes."""
    return max(16, triton.next_power_of_2(dim))


def _needs_wide_index(*tensors: Tensor | None) -> bool:
    """Whether an offset inside one tile may pass 2**31 elements, so that indices must be 64-bit."""
    return any(x is not None and max(x.stride()[2:]) >= 1 << 22 for x in tensors)
