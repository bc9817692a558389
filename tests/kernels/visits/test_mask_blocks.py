"""The states of a mask and the lists of tiles made from them, against both written out; and that the kernels go by them."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace

import pytest
import torch
from conftest import NEEDS_CUDA, needs_cuda
from torch import Tensor

from dmattn import BlockMask, attention
from dmattn.bits import BLOCK, WORD, packed
from dmattn.equivalence import Case, Standard, judge, results
from dmattn.execution import replay
from dmattn.execution.backend import interpreting
from dmattn.problem import Problem
from dmattn.states import ATTENDED, GRANULE, HIDDEN, states_shape

pytest.importorskip("triton", reason="the kernels need Triton")

from dmattn.kernels import hopper_plans, run
from dmattn.kernels.visits import mask_blocks

KERNELS = [
    pytest.param("cpu", marks=pytest.mark.skipif(not interpreting(), reason="the PyTorch path has no blocks")),
    pytest.param("cuda", marks=NEEDS_CUDA),
]


def blocky(*shape: int) -> Tensor:
    """A mask of empty, full and mixed blocks, not aligned with the granules, and of single entries."""
    random = torch.Generator().manual_seed(sum(shape))
    coarse = [*shape[:2], *(size // 50 + 2 for size in shape[2:])]
    kept = (torch.rand(coarse, generator=random) < 0.4).repeat_interleave(50, 2).repeat_interleave(50, 3)
    rows, cols = torch.randint(50, (2,), generator=random).tolist()
    kept = kept[..., rows : rows + shape[2], cols : cols + shape[3]].clone()
    return kept ^ (torch.rand(shape, generator=random) < 0.0005)


def block_states(mask: Tensor, block_m: int, block_n: int) -> Tensor:
    """ATTENDED and HIDDEN of every block of pairs, those past the end left out."""
    rows, cols = mask.shape[2:]
    spare = (0, -cols % block_n, 0, -rows % block_m)

    def some(x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x, spare)
        return x.unflatten(3, (-1, block_n)).unflatten(2, (-1, block_m)).any(5).any(3)

    return some(mask) * ATTENDED + some(~mask) * HIDDEN


MASKS = {
    "odd-lengths-read-in-bytes": lambda: blocky(2, 3, 37, 65),
    "several-programs-of-bytes": lambda: blocky(1, 2, 65, 523),
    "read-in-words": lambda: blocky(2, 1, 70, 300),
    "several-programs-of-words": lambda: blocky(1, 1, 33, 2100),
    "one-program-of-words-exactly": lambda: blocky(1, 1, 32, 1024),
    "read-by-fours-in-padded-rows": lambda: blocky(2, 3, 70, 160)[..., 16:160],
    "read-by-fours-of-every-second-head": lambda: blocky(2, 6, 70, 144)[:, ::2, :, :128],
    "words-that-start-within-a-four": lambda: blocky(2, 3, 70, 160)[..., 8:152],
    "words-that-start-at-an-odd-place": lambda: blocky(1, 2, 40, 129)[..., 1:],
    "words-in-rows-of-odd-length": lambda: blocky(1, 2, 40, 131)[..., :128],
    "rows-of-odd-length-in-several-programs": lambda: blocky(2, 3, 140, 661),
    "rows-of-odd-length-every-second": lambda: blocky(1, 2, 300, 197)[:, :, ::2],
    "rows-that-start-at-an-odd-place": lambda: blocky(1, 3, 140, 328)[..., 5:270],
    "every-second-row-and-key": lambda: blocky(1, 2, 100, 200)[:, :, ::2, ::2],
    "rows-dense-in-memory": lambda: blocky(2, 2, 132, 71).mT,
    "rows-dense-in-memory-of-odd-length": lambda: blocky(2, 2, 133, 71).mT,
    "heads-dense-in-memory": lambda: blocky(1, 37, 65, 3).permute(0, 3, 1, 2),
    "expanded": lambda: blocky(2, 1, 1, 70).expand(2, 3, 40, 70),
    "expanded-over-all": lambda: blocky(1, 1, 140, 70).expand(3, 2, 140, 70),
    "one-row-for-all": lambda: blocky(2, 1, 1, 77),
    "one-key-for-all": lambda: blocky(1, 2, 77, 1),
    "one-pair-for-all": lambda: blocky(3, 2, 1, 1),
    "nothing-kept": lambda: torch.zeros(1, 1, 50, 90, dtype=torch.bool),
    "nothing-hidden": lambda: torch.ones(1, 1, 50, 90, dtype=torch.bool),
    "nothing-hidden-in-words": lambda: torch.ones(1, 1, 50, 92, dtype=torch.bool),
    "a-single-pair-kept": lambda: torch.zeros(1, 1, 50, 92, dtype=torch.bool).index_fill_(3, torch.tensor([91]), True),
    "no-keys": lambda: torch.ones(1, 1, 50, 0, dtype=torch.bool),
}


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("name", MASKS)
def test_states_are_those_of_the_mask(name: str, device: str) -> None:
    from dmattn.kernels.visits.mask_blocks import scan

    mask = MASKS[name]()
    strides = mask.stride()
    mask = mask.to(device)
    assert mask.stride() == strides or device != "cpu"
    states = torch.full(states_shape(mask), 0xFF, dtype=torch.uint8, device=device)
    scan(mask, states)
    assert torch.equal(states.cpu(), block_states(mask.cpu(), GRANULE, GRANULE).to(torch.uint8))


@pytest.mark.skipif(not interpreting(), reason="watches loads of Triton's interpreter")
@pytest.mark.parametrize("place", [0, 1, 16, 31])
@pytest.mark.parametrize("row", [0, 1, 197, 224])
def test_rows_that_begin_anywhere_are_read_in_words_within_the_mask(row: int, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    shape, strides = (1, 3, 260, 197), (0, 259 * row + 197, row, 1)
    count = 3 * strides[1]
    memory = torch.rand(count + 64, generator=torch.Generator().manual_seed(row)) < 0.3
    mask = memory[place : place + count].as_strided(shape, strides, place)
    first, last = mask.data_ptr(), mask.data_ptr() + count
    load, words = InterpreterBuilder.create_masked_load, []

    def watched(builder, pointers, real, *others):
        read, size = pointers.data[real.data.astype(bool)], pointers.get_element_ty().primitive_bitwidth // 8
        if read.size:
            assert first <= read.min()
            assert read.max() + size <= last
            words.extend([size] * read.size)
        return load(builder, pointers, real, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched)
    states, bits = torch.empty(states_shape(mask), dtype=torch.uint8), mask_blocks.empty_bits(mask)
    mask_blocks.scan(mask, states, bits)
    assert states.equal(block_states(mask, GRANULE, GRANULE).to(torch.uint8))
    whole = torch.nn.functional.pad(mask[0], (0, -197 % BLOCK, 0, -260 % BLOCK))
    tiles = whole.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK)).transpose(2, 3)
    memory = bits.as_strided((*bits.shape[1:], BLOCK, BLOCK // WORD), (*bits.stride()[1:], BLOCK // WORD, 1))
    assert memory.equal(packed(tiles.flatten(0, 2))[:, 0].view(memory.shape))
    assert {1, 4} <= set(words)


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("by_lists", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_bits_are_those_of_the_mask(name: str, by_lists: bool, device: str) -> None:
    """Past the ends too, and of all blocks, or with lists of those of which a pair is kept; and the states are as without them."""
    from dmattn.kernels.visits.mask_blocks import empty_bits, scan

    mask = MASKS[name]().to(device)
    states = torch.full(states_shape(mask), 0xFF, dtype=torch.uint8, device=device)
    bits = empty_bits(mask)
    if bits is None:
        assert mask.shape[3] < 2 or mask.stride(2) < mask.stride(3)
        return
    if not mask.numel():
        assert not bits.numel()
        return
    memory = bits.as_strided((*bits.shape, BLOCK, BLOCK // WORD), (*bits.stride(), BLOCK // WORD, 1))
    memory.fill_(0x55555555)
    scan(mask, states, bits, by_lists)
    assert torch.equal(states.cpu(), block_states(mask.cpu(), GRANULE, GRANULE).to(torch.uint8))
    rows, cols = mask.shape[2:]
    whole = torch.nn.functional.pad(mask.cpu(), (0, -cols % BLOCK, 0, -rows % BLOCK))
    tiles = whole.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(3, 4)
    expected = packed(tiles.flatten(0, 3))[:, 0].view(*tiles.shape[:4], BLOCK, BLOCK // WORD)[: bits.shape[0], : bits.shape[1]]
    attended = tiles.any(5).any(4)
    attended = attended[: bits.shape[0], : bits.shape[1]]
    assert torch.equal(memory.cpu()[attended], expected[attended])
    assert (memory.cpu()[~attended] == (0x55555555 if by_lists else 0)).all()


@needs_cuda
@pytest.mark.parametrize(
    ("head_dim", "bias"),
    [
        (16, None),
        (32, None),
        (32, "bhqk"),
        (64, None),
        (64, "bhqk"),
        (64, "1hqk"),
        (128, None),
        (128, "bhqk"),
        (128, "1hqk"),
        (192, None),
        (256, None),
        (128, "b11k"),
        (192, "b11k"),
    ],
)
@pytest.mark.parametrize("lengths", [(600, 60), (700, 900), (300, 130), (100, 40000), (300, 66100), (60, 515), (66100, 300)], ids=str)
def test_no_call_reads_bits_that_nobody_wrote(
    lengths: tuple[int, int], head_dim: int, bias: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Also where blocks are visited that keep no pair: as keys or queries make one tile, or as a list has no room for all blocks."""
    poison, made = [0], []

    def poisoned(mask: Tensor) -> Tensor | None:
        bits = empty_bits(mask)
        if bits is not None:
            bits.as_strided((bits.untyped_storage().nbytes() // 4,), (1,), 0).fill_(poison[0])
            made.append(bits)
        return bits

    empty_bits = run.empty_bits
    monkeypatch.setattr(run, "empty_bits", poisoned)
    torch.manual_seed(0)
    batch, heads = (1, 4) if max(lengths) > 1000 else (8, 16)
    query, key, value = (torch.randn(batch, heads, length, head_dim, dtype=torch.bfloat16, device="cuda") for length in (*lengths, lengths[1]))
    mask = torch.rand(batch, 1, *lengths, device="cuda") < 0.5
    mask[:, :, 128:256] = False
    mask[:, :, 256:, 256:640] = False
    mask[:, :, :, 36864:36992] = False
    mask[:, :, 256:, 65450:65900] = False
    mask[:, :, 65450:65900, 128:] = False
    sizes = {"b": batch, "h": heads, "q": lengths[0], "k": lengths[1], "1": 1}
    shape = None if bias is None else [sizes[axis] for axis in bias]
    of_pairs = None if shape is None else torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    wanted = (of_pairs,) if bias == "b11k" else (query, key, value, of_pairs)  # alone, as another rule then says who walks queries
    leaves = [x.requires_grad_() for x in wanted if x is not None]
    d_out = torch.randn_like(query)
    found = []
    for poison[0] in (-1, 0):
        replay.forget()
        out, lse = attention(query, key, value, mask=mask, bias=of_pairs, return_lse=True)
        found.append((out, lse, *torch.autograd.grad(out, leaves, d_out)))
    replay.forget()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    out, lse, *gradients = (x.detach() for x in found[0])
    assert (out[:, :, 128:256] == 0).all()
    assert (lse[:, :, 128:256] == -math.inf).all()
    with torch.no_grad():
        expected = attention(
            *(x[:1].double() for x in (query, key, value)), mask=mask[:1], bias=None if of_pairs is None else of_pairs[:1].double()
        )
    torch.testing.assert_close(out[:1].double(), expected, atol=0.03, rtol=0.03)
    assert all(x.isfinite().all() for x in gradients)
    few = hopper_plans.FEW_QUERIES_WIDE if head_dim > 128 else hopper_plans.FEW_QUERIES  # queries, of which kernels for Hopper have none
    are_split = lengths == (100, 40000) and (bias is not None or head_dim == 16)  # keys in the forward pass, and nobody reads bits in the other
    assert bool(made) == (lengths[0] > few and not are_split) or torch.cuda.get_device_capability() != (9, 0)


@pytest.mark.parametrize("device", KERNELS)
def test_a_byte_that_is_not_0_is_a_pair_kept(device: str) -> None:
    from dmattn.kernels.visits.mask_blocks import empty_bits, scan

    for width in (128, 131, 144):
        octets = torch.arange(128 * width, dtype=torch.int32).remainder(256).to(torch.uint8).view(1, 1, 128, width).to(device)
        bits = empty_bits(octets.view(torch.bool))
        assert bits is not None
        scan(octets.view(torch.bool), torch.empty(1, 1, 4, (width + 31) // 32, dtype=torch.uint8, device=device), bits)
        found = bits.as_strided((BLOCK, BLOCK // WORD), (BLOCK // WORD, 1))
        assert torch.equal(found.cpu(), packed(octets[0, :, :, :128].cpu() != 0)[0, 0])


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("window", [None, (30, None), (40, 0)], ids=str)
@pytest.mark.parametrize("tile", [(32, 32), (128, 64), (16, 16)], ids=str)
@pytest.mark.parametrize("axes", ["1hqk", "b11k", "11q1", "1111"])
def test_lists_name_the_blocks_with_something_to_attend(axes: str, tile: tuple[int, int], window: tuple | None, device: str) -> None:
    """By window and mask; and say of which neither these nor the keys' end hide anything."""
    from dmattn.kernels.visits.mask_blocks import mask_lists, scan

    sizes = {"b": 2, "h": 2, "q": 300, "k": 389, "1": 1}
    mask = blocky(*(sizes[axis] for axis in axes)).to(device)
    query, key = (torch.empty(2, 2, sizes[axis], 16, device=device) for axis in "qk")
    given = dict(mask=mask, bias=None, causal=False, window=window, scale=None, softcap=None)
    problem = Problem.canonical(query, key, key, **given)
    problem = problem._replace(states=torch.empty(states_shape(mask), dtype=torch.uint8, device=device))
    scan(mask, problem.states)
    pairs = mask.cpu().expand(*mask.shape[:2], sizes["q"], sizes["k"])
    offset = torch.arange(sizes["k"]) - torch.arange(sizes["q"])[:, None] - (sizes["k"] - sizes["q"])
    left, right = (None, None) if window is None else window
    visible = (offset >= (-1000 if left is None else -left)) & (offset <= (1000 if right is None else right))
    near = block_states(visible.expand(1, 1, -1, -1), *tile)
    if sizes["k"] % tile[1]:
        near[..., -1] |= HIDDEN
    # the window is asked for whole tiles, queries past the end with the others
    longer = torch.arange(sizes["k"]) - torch.arange(sizes["q"] + -sizes["q"] % tile[0])[:, None] - (sizes["k"] - sizes["q"])
    visible = (longer >= (-1000 if left is None else -left)) & (longer <= (1000 if right is None else right))
    near |= block_states(visible.expand(1, 1, -1, -1), *tile) & HIDDEN
    whole = [max(GRANULE, size) for size in tile]  # what is known of a tile is what is known of its granules
    known = block_states(pairs, *whole)
    for axis, size in zip((2, 3), tile, strict=True):
        known = known.repeat_interleave(max(1, GRANULE // size), axis).narrow(axis, 0, near.shape[axis])
    for by_key in (False, True):
        lists = mask_lists(problem, *tile, by_key=by_key).cpu()
        for batch in range(mask.shape[0]):
            for head in range(mask.shape[1]):
                states = torch.where(near[0, 0] & ATTENDED > 0, known[batch, head] | near[0, 0] & HIDDEN, 0)
                for owner, row in enumerate((states.mT if by_key else states).tolist()):
                    zero, partial, full, *entries = lists[batch, head, owner].tolist()
                    assert zero == 0
                    assert entries[:partial] == [n for n, state in enumerate(row) if state == ATTENDED | HIDDEN], (by_key, batch, head, owner)
                    assert entries[::-1][:full] == [n for n, state in enumerate(row) if state == ATTENDED], (by_key, batch, head, owner)


BIASES = ["bhqk", "1hqk", "bh1k", None]


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize(("bias", "softcap"), [*((bias, None) for bias in BIASES), ("bhqk", 5.0)])
def test_tiles_without_a_pair_are_not_visited(bias: str | None, softcap: float | None, device: str, unwritten_shows: None) -> None:
    """NaN in all that they would load changes no result."""
    block = 32 if device == "cpu" else 128  # the largest tile
    case = Case("empty", 2 * block + 5, 3 * block, batch=2, heads=1, head_dim=16, bias=bias, softcap=softcap)
    inputs = case.inputs(torch.float32, device)
    mask = torch.rand(2, 1, case.len_q, case.sizes["k"], generator=torch.Generator().manual_seed(0)) < 0.8
    mask[:, :, block : 2 * block] = False
    mask[:, :, :, block : 2 * block] = False
    inputs = replace(inputs, mask=mask.to(device))

    def fill_masked(value: float) -> None:
        for name, axis in (("query", 2), ("d_out", 2), ("key", 2), ("value", 2), ("bias", 2), ("bias", 3)):
            x = getattr(inputs, name)
            if x is not None and x.shape[axis] > 1:
                x.narrow(axis, block, block).fill_(value)

    fill_masked(0.0)
    clean = results(attention, inputs, case.options)
    assert all(verdict.passed for verdict in judge(clean, Standard.of(inputs, case.options)))
    fill_masked(float("nan"))
    for name, value in results(attention, inputs, case.options).items():
        assert torch.equal(value, clean[name]), name


def several_tiles(bias: str | None, device: str) -> tuple[Case, torch.Tensor]:
    """A problem and a mask that hides nothing, of several tiles of queries and of keys, as of one there are no lists. Those of keys are whole:
    what passes their end has something to hide.
    """
    len_q, len_k = (37, 128) if device == "cpu" else (165, 512)
    return Case("full", len_q, len_k, bias=bias), torch.ones(2, 1, len_q, len_k, dtype=torch.bool, device=device)


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("bias", BIASES)
def test_tiles_without_a_hidden_pair_load_no_mask(bias: str | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told that a mask hides nothing, no kernel of either pass finds out that it hides everything."""
    case, mask = several_tiles(bias, device)
    inputs = replace(case.inputs(torch.float32, device), mask=mask)
    expected = results(attention, inputs, case.options)
    monkeypatch.setattr(importlib.import_module("dmattn.kernels.run"), "scan", lambda mask, states: states.fill_(ATTENDED))
    replay.forget()  # what the call above launched
    inputs = replace(inputs, mask=torch.zeros_like(mask))
    for name, value in results(attention, inputs, case.options).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("bias", BIASES)
def test_tiles_without_a_hidden_pair_load_no_bits(bias: str | None, device: str) -> None:
    """Told by its states that a block mask hides nothing, no kernel of either pass finds out that its bits hide everything."""
    case, mask = several_tiles(bias, device)
    inputs = replace(case.inputs(torch.float32, device), mask=BlockMask.from_mask(mask))
    expected = results(attention, inputs, case.options)
    hidden = BlockMask.from_mask(torch.zeros_like(mask))
    inputs = replace(inputs, mask=replace(hidden, states=torch.full_like(hidden.states, ATTENDED)))
    for name, value in results(attention, inputs, case.options).items():
        assert torch.equal(value, expected[name]), name


def test_states_have_no_gradient(device: str) -> None:
    """They are the operator's third result: the mask's own axes in granules, or nothing where no kernel asks for them."""
    for mask, shape in (("1hqk", (1, 2, 2, 3)), ("b11k", (2, 1, 1, 3)), (None, (0,))):
        inputs = Case("states", 37, 70, mask=mask).inputs(torch.float32, device)
        given = dict(mask=inputs.mask, bias=None, causal=False, window=None, scale=None, softcap=None)
        problem = Problem.canonical(inputs.query.requires_grad_(), inputs.key, inputs.value, **given)
        out, _, states = torch.ops.dmattn.forward(*problem)
        assert (out.requires_grad, states.requires_grad, states.dtype) == (True, False, torch.uint8)
        assert tuple(states.shape) == (shape if device == "cuda" or interpreting() else (0,))
