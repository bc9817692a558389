"""BlockMask: every constructor against the dense mask, what intervals say of a rule against all its pairs, errors, and a mask as PyTorch takes it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEEDS_CUDA, few_in_the_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask, noop_mask, or_masks
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten, treespec_dumps, treespec_loads

from dmattn import BlockMask, attention, attention_varlen, explain, reference
from dmattn.bits import BLOCK, EMPTY, FULL
from dmattn.block_mask import PAIRS_AT_ONCE
from dmattn.equivalence import Case, results
from dmattn.execution.backend import interpreting
from dmattn.mask_mods import UNKNOWN, kept_blocks
from dmattn.states import ATTENDED, GRANULE, HIDDEN

no_compile = pytest.mark.skipif(interpreting(), reason="Triton's interpreter and torch.compile do not combine")
about_masks = pytest.mark.skipif(interpreting(), reason="no kernel runs")
CPU = torch.device("cpu")


def blocky(*shape: int) -> Tensor:
    """A mask of blocks that are full, empty and partial, and are not those of a BlockMask."""
    random = torch.Generator().manual_seed(sum(shape))
    coarse = torch.rand([*shape[:-2], *(size // 100 + 2 for size in shape[-2:])], generator=random) < 0.5
    kept = coarse.repeat_interleave(100, -2).repeat_interleave(100, -1)[..., 30 : shape[-2] + 30, 60 : shape[-1] + 60]
    return kept ^ (torch.rand(shape, generator=random) < 0.0001)


def states_of(mask: Tensor) -> Tensor:
    """States of a mask with four axes, written out."""
    batch, heads, rows, cols = ((size + GRANULE - 1) // GRANULE if axis > 1 else size for axis, size in enumerate(mask.shape))
    found = torch.zeros((batch, heads, rows, cols), dtype=torch.uint8)
    for row in range(rows):
        for col in range(cols):
            part = mask[:, :, row * GRANULE : (row + 1) * GRANULE, col * GRANULE : (col + 1) * GRANULE].flatten(2)
            found[:, :, row, col] = part.any(2) * ATTENDED + (~part).any(2) * HIDDEN
    return found


@about_masks
@pytest.mark.parametrize("shape", [(5, 7), (128, 256), (130, 300), (2, 260, 129), (2, 3, 257, 384), (1, 1), (2, 2, 5, 0), (3, 0, 1, 5), (0, 9)])
def test_a_bool_tensors_mask_is_that_tensor(shape: tuple[int, ...]) -> None:
    mask = blocky(*shape)
    made = BlockMask.from_mask(mask)
    whole = mask[(None,) * (4 - mask.ndim)]
    assert made.shape == whole.shape
    assert torch.equal(made.to_dense(), whole)
    assert torch.equal(made.states, states_of(whole))
    own = made.bits.shape[0] - 2
    assert own == (made.blocks > FULL).sum() == len(set(made.blocks[made.blocks > FULL].tolist()))
    mask.logical_not_()
    assert torch.equal(made.to_dense(), ~whole), "later changes of the source change nothing"


@about_masks
def test_only_partial_blocks_have_bits() -> None:
    mask = torch.zeros(384, 384, dtype=torch.bool)
    mask[:128], mask[200, 300] = True, True
    made = BlockMask.from_mask(mask)
    assert made.blocks.tolist() == [[[[FULL] * 3, [EMPTY, EMPTY, 2], [EMPTY] * 3]]]
    assert made.bits.shape == (3, 2, 128, 4)
    assert made.sparsity() == pytest.approx(100 * 5 / 9)
    assert repr(made) == "BlockMask(shape=(1, 1, 384, 384), device=cpu, sparsity=55.56%, 1 of 9 blocks partial)"
    assert repr(made.to("meta")) == "BlockMask(shape=(1, 1, 384, 384), device=meta)"
    assert made.to("meta").device == torch.device("meta")


@about_masks
def test_an_expanded_axis_counts_as_one() -> None:
    mask = blocky(1, 1, 200, 150)
    assert BlockMask.from_mask(mask.expand(4, 3, 200, 150)).shape == (1, 1, 200, 150)


DOCUMENTS = (torch.arange(2000).view(2, 1000) * 7919 % 61 == 0).cumsum(-1)
PREFIX = torch.tensor([30, 170], dtype=torch.int32)
LENGTHS_OF_HEADS = torch.tensor([100, 300])
DENSE = blocky(1000, 1000)
RULES: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k <= 200),
    "both-sides": lambda b, h, q, k: (q - k).abs() < 130,
    "function-abs": lambda b, h, q, k: torch.abs(k - q) <= 99,
    "documents": lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k],
    "documents-causal": lambda b, h, q, k: (DOCUMENTS[0][q] == DOCUMENTS[0][k]) & (k <= q),
    "prefix": lambda b, h, q, k: (k < PREFIX[b]) | (q >= k),
    "by-head": lambda b, h, q, k: q - k <= LENGTHS_OF_HEADS[h],
    "slope-by-head": lambda b, h, q, k: q - k <= 90 * (h + 1),
    "chunks": lambda b, h, q, k: q // 200 == k // 200,
    "dilated": lambda b, h, q, k: ((q - k) % 7 == 0) & (k <= q),
    "global-keys": lambda b, h, q, k: (k % 256 < 10) | (q // 100 == k // 100),
    "remainder-of-a-chunk": lambda b, h, q, k: q % 500 >= k % 500,
    "not-and-xor": lambda b, h, q, k: ~(q < k) ^ (k > 500),
    "where": lambda b, h, q, k: torch.where(q > 300, k < 400, k <= q),
    "where-of-numbers": lambda b, h, q, k: torch.where(k > 500, q - 100, q + 100) > k,
    "product": lambda b, h, q, k: (q - 300) * (k - 400) > 1000,
    "negative": lambda b, h, q, k: -q < 3 - 2 * k,
    "minimum-maximum": lambda b, h, q, k: (torch.minimum(q, k) > 200) | (torch.maximum(q, k) < 300),
    "not-equal": lambda b, h, q, k: (q // 128 != k // 128) & torch.logical_not(q.eq(k)),
    "look-up-of-a-look-up": lambda b, h, q, k: q - PREFIX[DOCUMENTS[b, q] % 2] >= k,
    "everything": noop_mask,
    "nothing": lambda b, h, q, k: q.new_zeros((), dtype=torch.bool),
    "flex-and-or": or_masks(and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k < 64), lambda b, h, q, k: k < 5),
    "floats": lambda b, h, q, k: q * 0.5 >= k,
    "bits-of-numbers": lambda b, h, q, k: (q & k) == 0,
    "a-tensor-of-pairs": lambda b, h, q, k: DENSE[q, k],
}
BY_PAIRS = {"floats", "bits-of-numbers", "a-tensor-of-pairs"}  # of which bounds say nothing


@about_masks
@pytest.mark.parametrize("lengths", [(513, 900), (1000, 128)], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_a_rules_mask_is_flex_attentions(name: str, lengths: tuple[int, int]) -> None:
    """And what bounds say of whole blocks is right."""
    want = create_mask(RULES[name], 2, 2, *lengths, device="cpu").contiguous()
    made, dense = BlockMask.from_mask_mod(RULES[name], 2, 2, *lengths, "cpu"), BlockMask.from_mask(want)
    assert torch.equal(made.to_dense(), want)
    assert torch.equal(made.states, dense.states)
    for batch in range(2):
        for head in range(2):
            known, true = kept_blocks(RULES[name], batch, head, *lengths, CPU), dense.blocks[batch, head].clamp(max=UNKNOWN)
            assert torch.equal(known[known != UNKNOWN].int(), true[known != UNKNOWN])
            assert (known == UNKNOWN).all() if name in BY_PAIRS else (known != UNKNOWN).any() or (true == UNKNOWN).all()


NUMBERS = st.sampled_from(["q", "k"])


@st.composite
def rules(draw: st.DrawFn, depth: int = 3) -> str:
    """The text of a rule."""

    def number(depth: int) -> str:
        if depth == 0:
            return draw(st.sampled_from(["q", "k", "q", "k", "ids[q]", "ids[k]", str(draw(st.integers(-300, 300)))]))
        a, b = number(depth - 1), number(0)
        way = draw(st.integers(0, 6))
        return [f"({a} + {b})", f"({a} - {b})", f"(q - {a} * 2)", f"({a}) // 37", f"({a}) % 64", f"abs(q - {a})", f"-({a}) + q"][way]

    def condition(depth: int) -> str:
        if depth == 0 or draw(st.booleans()):
            sign = draw(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]))
            return f"(q + {number(2)} {sign} k + {number(1)})"
        joined = draw(st.sampled_from(["&", "|", "^"]))
        return f"({condition(depth - 1)} {joined} ~{condition(depth - 1)})"

    return condition(depth)


@about_masks
@settings(max_examples=60, deadline=None, derandomize=True)
@given(rules(), st.integers(0, 5))
def test_bounds_of_any_rule_are_right(text: str, seed: int) -> None:
    ids = torch.randint(-40, 40, (300,), generator=torch.Generator().manual_seed(seed)).cumsum(0)
    rule = eval(f"lambda b, h, q, k: {text}", {"ids": ids, "abs": abs})
    known = kept_blocks(rule, 0, 0, 300, 290, CPU)
    true = BlockMask.from_mask(create_mask(rule, 1, 1, 300, 290, device="cpu")).blocks[0, 0].clamp(max=UNKNOWN)
    assert torch.equal(known[known != UNKNOWN].int(), true[known != UNKNOWN]), text
    assert torch.equal(BlockMask.from_mask_mod(rule, None, None, 300, 290, "cpu").blocks[0, 0].clamp(max=UNKNOWN), true), text


@about_masks
def test_only_blocks_of_which_bounds_leave_something_open_are_evaluated() -> None:
    """So 131072 x 131072 pairs take no longer than their partial blocks."""
    asked = 0

    def rule(b: Tensor, h: Tensor, q: Any, k: Any) -> Any:
        nonlocal asked
        if isinstance(q, Tensor):
            asked += 1
        return (q >= k) & (q - k < 4096)

    length = 131072
    made = BlockMask.from_mask_mod(rule, None, None, length, length, "cpu")
    blocks = length // BLOCK
    partial = blocks + blocks - 4096 // BLOCK
    assert made.bits.shape[0] == partial + 2
    assert asked == -(-partial * BLOCK**2 // PAIRS_AT_ONCE)
    rows = torch.tensor([0, 5000, 131071])
    for row in rows.tolist():
        inside = made.blocks[0, 0, row // BLOCK]
        assert (inside != EMPTY).sum() == min(row // BLOCK, 4096 // BLOCK) + 1


@about_masks
def test_a_rule_without_bounds_is_evaluated_by_parts() -> None:
    """Of more pairs than are evaluated at once."""
    rule, length = RULES["floats"], 3000
    assert length**2 > 2 * PAIRS_AT_ONCE
    made = BlockMask.from_mask_mod(rule, None, None, length, length, "cpu")
    assert torch.equal(made.to_dense(), create_mask(rule, 1, 1, length, length, device="cpu"))


@about_masks
@pytest.mark.parametrize("size", [128, 64, 256, (64, 256), (256, 128), (96, 32), 48], ids=str)
@pytest.mark.parametrize("name", ["window", "documents", "by-head", "floats", "everything", "nothing"])
def test_flex_attentions_blocks_of_any_size_are_taken(name: str, size: int | tuple[int, int]) -> None:
    flex = create_block_mask(RULES[name], 2, 2, 513, 900, device="cpu", BLOCK_SIZE=size)
    made = BlockMask.from_flex(flex)
    assert torch.equal(made.to_dense(), create_mask(RULES[name], 2, 2, 513, 900, device="cpu"))
    assert torch.equal(made.states, states_of(made.to_dense()))


@about_masks
@pytest.mark.parametrize("size", [64, 128, 256])
def test_flex_attentions_lists_are_honoured(size: int) -> None:
    """A block that no list names hides its pairs and one listed as full keeps them, whatever the rule says."""
    count, order = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[1, 0], [1, 0]]]], dtype=torch.int32)
    full_count, full_order = torch.tensor([[[1, 0]]], dtype=torch.int32), torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    flex = FlexMask.from_kv_blocks(count, order, full_count, full_order, BLOCK_SIZE=size, mask_mod=lambda b, h, q, k: (q + k) % 3 == 0)
    dense = BlockMask.from_flex(flex).to_dense()[0, 0]
    place = torch.arange(2 * size)
    rule = (place[:, None] + place) % 3 == 0
    rule[:size, :size] = True
    assert torch.equal(dense, rule)
    alone = FlexMask.from_kv_blocks(count, order, BLOCK_SIZE=size, mask_mod=lambda b, h, q, k: (q + k) % 3 == 0)  # no list of full blocks
    rule[:size, :size] = False
    assert torch.equal(BlockMask.from_flex(alone).to_dense()[0, 0], rule)


@about_masks
@pytest.mark.parametrize("size", [128, 64])
def test_a_slice_of_flex_attentions_mask_has_lengths_and_a_rule_of_its_own(size: int) -> None:
    flex = create_block_mask(RULES["window"], None, None, 4 * size, 4 * size, device="cpu", BLOCK_SIZE=size)
    part = flex[:, :, 1:3]
    part.mask_mod = lambda b, h, q, k: RULES["window"](b, h, q + size, k)
    said = rf"as its seq_lengths \({4 * size}, {4 * size}\) and BLOCK_SIZE \({size}, {size}\) say"
    with pytest.raises(
        ValueError,
        match=rf"^dmattn: block_mask: expected lists for 4 blocks of queries, {said}, received 2; of a slice set seq_lengths and mask_mod$",
    ):
        BlockMask.from_flex(part)
    part.seq_lengths = (2 * size, 4 * size)
    whole = create_mask(RULES["window"], 1, 1, 4 * size, 4 * size, device="cpu")
    assert torch.equal(BlockMask.from_flex(part).to_dense(), whole[:, :, size : 3 * size])
    part.seq_lengths = (2 * size - 3, size + 5)  # fewer than the lists have
    assert torch.equal(BlockMask.from_flex(part).to_dense(), whole[:, :, size : 3 * size - 3, : size + 5])
    part.seq_lengths = (size - 3, size - 5)
    assert torch.equal(BlockMask.from_flex(part).to_dense(), whole[:, :, size : 2 * size - 3, : size - 5])


CASES = (
    Case("grouped-shared-bias", 140, 70, batch=1, heads=4, kv_heads=2, mask="1gqk", keep="blocks", bias="1hqk", causal=True),
    Case("dense-bias-window", 37, 150, batch=1, mask="b1qk", keep="random-empty-rows", bias="bhqk", window=(60, 90)),
    Case("key-bias-softcap", 70, 37, mask="bhqk", keep="topk", bias="bh1k", softcap=3.0),
    Case("dropout", 40, 33, mask="11qk", bias="bhq1", dropout_p=0.3),
    Case("one-query", 1, 300, heads=4, kv_heads=2, mask="bhqk"),
)
ON_A_GPU = (
    Case("hopper-grouped", 1000, 1500, heads=4, kv_heads=2, head_dim=128, mask="1gqk", keep="blocks"),
    Case("hopper-dense-bias-causal", 520, 776, heads=2, head_dim=128, mask="b1qk", bias="bhqk", causal=True),
    Case("hopper-narrow-shared-bias", 520, 776, batch=3, heads=2, head_dim=64, mask="1hqk", bias="1hqk", window=(300, 200)),
)


def assert_results_of_the_dense_mask(case: Case, dtype: torch.dtype, device: str) -> None:
    """Bitwise, as the same kernels run over the same blocks; but a GPU's compiler may fuse other operations where the mask is bits."""
    ours, dense = (results(attention, replace(case, blocked=blocked).inputs(dtype, device), case.options) for blocked in (True, False))
    for name, value in dense.items():
        rounding = 16 * torch.finfo(value.dtype).eps * float(value.nan_to_num(neginf=0.0).abs().max()) if device == "cuda" else 0.0
        torch.testing.assert_close(ours[name], value, rtol=0.0, atol=rounding, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_are_those_of_the_dense_mask(case: Case, device: str, half: torch.dtype) -> None:
    """In the interpreter cases have one dtype or the other by turns."""
    for _, dtype in few_in_the_interpreter(enumerate((torch.float32, half)), lambda turn, _: CASES.index(case) % 2 == turn):
        assert_results_of_the_dense_mask(case, dtype, device)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ON_A_GPU, ids=lambda case: case.name)
def test_results_on_a_gpu_are_those_of_the_dense_mask(case: Case, dtype: torch.dtype, device: str) -> None:
    assert_results_of_the_dense_mask(case, dtype, device)


WRAPPING = {
    "product": lambda b, h, q, k: q * 6364136223846793005 > k * 6364136223846793005,
    "sum": lambda b, h, q, k: (q + (2**63 - 100)) < k,
    "difference": lambda b, h, q, k: (-(2**63) + 50) - q < k,
}


@about_masks
@pytest.mark.parametrize("name", WRAPPING)
def test_a_rule_that_wraps_around_is_asked_for_all_pairs(name: str) -> None:
    place = torch.arange(300)
    made = BlockMask.from_mask_mod(WRAPPING[name], None, None, 300, 300).to_dense()[0, 0]
    assert torch.equal(made, WRAPPING[name](0, 0, place[:, None], place[None]))


@about_masks
def test_float64_and_the_reference_take_it() -> None:
    case = CASES[0]
    inputs = replace(case, blocked=True).inputs(torch.float64)
    dense = replace(case, blocked=False).inputs(torch.float64)
    for function in (attention, reference.attention):
        for name, value in results(function, dense, case.options).items():
            assert torch.equal(results(function, inputs, case.options)[name], value)


def test_a_mask_is_used_by_several_calls(device: str) -> None:
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn((2, 2, 40, 16), generator=random).to(device) for _ in range(3))
    dense = torch.rand((1, 2, 40, 40), generator=random) < 0.5
    mask = BlockMask.from_mask(dense).to(device)
    for x in (query, query.half(), 2 * query):
        given = x, key.to(x.dtype), value.to(x.dtype)
        torch.testing.assert_close(attention(*given, mask=mask), attention(*given, mask=dense.to(device)))


def made(batch: int, heads: int, len_q: int, len_k: int) -> BlockMask:
    return BlockMask.from_mask(torch.ones(batch, heads, len_q, len_k, dtype=torch.bool))


@about_masks
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (made(1, 1, 8, 12), "expected a BlockMask for 9 queries and 12 keys, as query and key have, received one for 8 queries and 12 keys"),
        (made(1, 1, 9, 11), "expected a BlockMask for 9 queries and 12 keys, .*, received one for 9 queries and 11 keys"),
        (made(1, 1, 1, 12), "received one for 1 queries and 12 keys"),
        (made(1, 1, 4, 2), r"received one for 4 queries and 2 keys; \(B, S, H, D\) layout"),
        (made(3, 1, 9, 12), "expected a BlockMask with 1 batch entry or query's 2, received 3"),
        (made(1, 3, 9, 12), "expected a BlockMask with 4 or 2 or 1 heads, received 3"),
        (made(1, 1, 9, 12).to("meta"), "expected query's device cpu, received meta"),
    ],
)
def test_a_mask_of_something_else_is_refused(mask: BlockMask, message: str) -> None:
    query, key = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 12, 8)
    for function in (attention, reference.attention, explain):
        with pytest.raises(ValueError, match=f"dmattn: mask: .*{message}"):
            function(query, key, key, mask=mask)


@about_masks
def test_what_takes_no_block_mask_says_so() -> None:
    packed, ends = torch.randn(9, 2, 8), torch.tensor([0, 9])
    with pytest.raises(TypeError, match=r"mask: expected a bool tensor or None, received dmattn\.block_mask\.BlockMask"):
        attention_varlen(packed, packed, packed, ends, ends, max_seqlen_q=9, max_seqlen_k=9, mask=made(1, 1, 9, 9))  # type: ignore[call-overload]


FOUR = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
MADE = made(1, 1, 5, 5)


ASKING: dict[str, Any] = {
    "and": lambda b, h, q, k: (q >= k) and (k > 3),
    "or": lambda b, h, q, k: (q >= k) or (k > 3),
    "not": lambda b, h, q, k: not (q < k),
    "a chain": lambda b, h, q, k: 3 < k < 9,
    "if": lambda b, h, q, k: (q >= k) if k > 3 else (q < k),
    "if of heads": lambda b, h, q, k: (q >= k) if h == 0 else (q < k),
    "max": lambda b, h, q, k: max(q, k) == q,
    "a number": lambda b, h, q, k: int(k) > 3,
    "an array": lambda b, h, q, k: torch.arange(300).numpy()[k] > 3,
}


@pytest.mark.parametrize("name", ASKING)
def test_a_rule_in_pythons_own_logic_is_told_of_the_operators(name: str) -> None:
    with pytest.raises(
        TypeError, match=r"^dmattn: mask_mod: expected operations on tensors alone \(& \| ~ .*torch\.where for if.*\), received a"
    ) as raised:
        BlockMask.from_mask_mod(ASKING[name], 1, 2, 300, 300, "cpu")
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_rules_own_error_stays_as_it_is() -> None:
    def rule(*places: Tensor) -> Tensor:
        raise RuntimeError("of the rule")

    with pytest.raises(RuntimeError, match=r"^of the rule$"):
        BlockMask.from_mask_mod(rule, 1, 1, 5, 5, "cpu")


@about_masks
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ~BlockMask.from_mask(torch.ones(3, 3, dtype=torch.bool)), TypeError, r"BlockMask: ~: expected .*; BlockMask.from_mask\(~mask.to_dense\(\)\) is its"),
        (lambda: BlockMask.from_mask(torch.ones(3, 3)), TypeError, "from_mask: mask: expected a bool tensor, received torch.float32 tensor"),
        (lambda: BlockMask.from_mask([[True]]), TypeError, r"from_mask: mask: expected a bool tensor, received list; torch.tensor\(mask\)$"),
        (lambda: BlockMask.from_mask(FOUR[0, 0, 0].bool()), ValueError, r"mask: expected 2 to 4 axes \(B, H, Sq, Sk\), received shape \(1,\)"),
        (
            lambda: BlockMask.from_mask_mod(lambda score, b, h, i, j: score, 1, 1, 5, 5),
            TypeError,
            r"mask_mod: expected a function of \(b, h, q_idx, kv_idx\), received one of \(score, b, h, i, j\); a score_mod that adds",
        ),
        (lambda: BlockMask.from_mask_mod(lambda b, h, q: q > 0, 1, 1, 5, 5, "cpu"), TypeError, r"received one of \(b, h, q\)$"),
        (lambda: BlockMask.from_mask_mod(3, 1, 1, 5, 5), TypeError, r"mask_mod: expected a function of \(b, h, q_idx, kv_idx\), received int"),
        (lambda: BlockMask.from_mask_mod(noop_mask, 0, 1, 5, 5), ValueError, "B: expected an integer of at least 1, received 0"),
        (lambda: BlockMask.from_mask_mod(noop_mask, 1, True, 5, 5), TypeError, "H: expected an integer or None, received bool"),
        (lambda: BlockMask.from_mask_mod(noop_mask, 1, 1, None, 5), TypeError, "Q_LEN: expected an integer, received NoneType"),
        (lambda: BlockMask.from_mask_mod(noop_mask, 1, 1, 5, -1), ValueError, "KV_LEN: expected an integer of at least 0, received -1"),
        (lambda: BlockMask.from_mask_mod(lambda b, h, q, k: True, 1, 1, 5, 5, "cpu"), TypeError, "mask_mod: .* bool tensor without axes, received one that returns bool$"),
        (lambda: BlockMask.from_mask_mod(lambda b, h, q, k: (q, k), 1, 1, 5, 5, "cpu"), TypeError, "mask_mod: .* received one that returns tuple$"),
        (lambda: BlockMask.from_mask(DENSE.to("meta")), ValueError, "from_mask: mask: expected a device whose tensors hold values, received meta"),
        (lambda: BlockMask.from_mask_mod(noop_mask, 1, 1, 5, 5, "gpu"), ValueError, "device: expected a device that PyTorch has here, received 'gpu'"),
        (lambda: BlockMask.from_mask_mod(noop_mask, 1, 1, 5, 5, "meta"), ValueError, "device: expected a device whose tensors hold values, received meta"),
        (lambda: MADE & DENSE, TypeError, "BlockMask: &: expected one mask_mod that says both, .* received a BlockMask beside torch.Tensor"),
        (lambda: DENSE | MADE, TypeError, r"BlockMask: \|: expected one mask_mod that says both, .* received a BlockMask beside torch.Tensor"),
        (lambda: MADE & MADE, TypeError, "BlockMask: &: expected one mask_mod that says both"),
        (lambda: BlockMask.from_mask_mod(lambda b, h, q, k: q - k, 1, 1, 5, 5, "cpu"), TypeError, "mask_mod: .* returns torch.int64 of shape"),
        (lambda: BlockMask.from_mask_mod(lambda b, h, q, k: DENSE[q] > 0, 1, 1, 5, 5, "cpu"), TypeError, r"mask_mod: .* torch.bool of shape \(1000,\)"),
        (lambda: BlockMask.from_flex(torch.ones(3, 3)), TypeError, "block_mask: expected a torch.nn.attention.flex_attention.BlockMask, received torch.Tensor"),
        (lambda: replace(MADE, blocks=FOUR.long()), TypeError, "blocks: expected a torch.int32 tensor, received torch.int64 tensor"),
        (lambda: replace(MADE, blocks=FOUR[0]), ValueError, r"blocks: expected shape \(1, 1, 1, 1\), received \(1, 1, 1\)"),
        (lambda: replace(MADE, states=3), TypeError, "states: expected a torch.uint8 tensor, received int"),
        (lambda: replace(MADE, len_q=130), ValueError, r"blocks: expected shape \(1, 1, 2, 1\), received \(1, 1, 1, 1\)"),
        (lambda: replace(MADE, bits=MADE.bits.to("meta")), ValueError, "bits: expected device cpu as blocks has, received meta"),
    ],
)  # fmt: skip
def test_errors(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        make()
    assert str(raised.value).startswith("dmattn: ")


@about_masks
def test_a_mask_is_a_tree_of_its_tensors() -> None:
    leaves, form = tree_flatten(MADE)
    assert [id(leaf) for leaf in leaves] == [id(MADE.blocks), id(MADE.bits), id(MADE.states)]
    again = tree_unflatten(leaves, form)
    assert (again.bits is MADE.bits, again.shape) == (True, MADE.shape)
    assert treespec_loads(treespec_dumps(form)) == form
    assert tree_map(lambda x: x.to("meta"), {"mask": MADE})["mask"].device.type == "meta"


def saved(mask: BlockMask) -> BlockMask:
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return torch.load(file)


@about_masks
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask)), saved], ids=["copy", "pickle", "save"])
def test_a_copy_is_the_same_mask(copied: Callable[[BlockMask], BlockMask]) -> None:
    mask = BlockMask.from_mask(blocky(2, 1, 150, 200))
    again = copied(mask)
    assert type(again) is BlockMask
    assert again.bits is not mask.bits
    assert torch.equal(again.to_dense(), mask.to_dense())


class Masked(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, mask: BlockMask) -> Tensor:
        return attention(query, key, key, mask=mask)


@no_compile
@pytest.mark.parametrize("way", ["compile", "export"])
def test_a_compiled_function_takes_a_mask(way: str) -> None:
    query, key = torch.randn(2, 4, 37, 8), torch.randn(2, 2, 140, 8)
    masks = [BlockMask.from_mask(torch.rand(1, 1, 37, 140) < share) for share in (0.3, 0.6)]
    torch.compiler.reset()
    if way == "compile":
        function: Any = torch.compile(Masked(), fullgraph=True, backend="aot_eager")
    else:
        function = torch.export.export(Masked(), (query, key, masks[0])).module()
    for mask in masks:
        assert torch.equal(function(query, key, mask), attention(query, key, key, mask=mask))
    torch.compiler.reset()


def test_vmap_takes_a_mask_that_it_does_not_map(device: str) -> None:
    query, key = torch.randn(3, 2, 4, 37, 8, device=device), torch.randn(3, 2, 2, 37, 8, device=device)
    for batch in (1, 2):
        mask = BlockMask.from_mask(torch.rand(batch, 2, 37, 37, device=device) < 0.5)
        together = torch.func.vmap(lambda q, k, mask=mask: attention(q, k, k, mask=mask))(query, key)
        for one, q, k in zip(together, query, key, strict=True):
            torch.testing.assert_close(one, attention(q, k, k, mask=mask))
    mapped = tree_map(lambda x: torch.stack([x, x, x]), mask)
    with pytest.raises(RuntimeError, match=r"mask: expected a BlockMask that torch\.func\.vmap does not map"):
        torch.func.vmap(Masked())(query, key, mapped)
    of_elements = BlockMask.from_mask(torch.arange(3, device=device)[:, None, None, None] > torch.eye(37, device=device))  # one of 3 is partial
    with pytest.raises(RuntimeError, match=r"mask: expected a BlockMask that torch\.func\.vmap does not map"):
        torch.func.vmap(Masked())(query, key, of_elements)


def test_lengths_of_a_rule_may_be_numpys() -> None:
    made, same = (BlockMask.from_mask_mod(noop_mask, one, one, length, length) for one, length in ((1, 150), (np.int64(1), np.int64(150))))
    assert (made.len_q, made.len_k) == (same.len_q, same.len_k)
    assert torch.equal(made.blocks, same.blocks)
    assert type(same.len_q) is int
