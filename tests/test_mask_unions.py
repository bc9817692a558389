"""IntervalMask of two intervals a key: unions and intersections, the constructors that make them, errors, and what PyTorch transforms."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from conftest import NEEDS_CUDA
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten, treespec_dumps, treespec_loads

from dmattn import IntervalMask, attention, attention_varlen
from dmattn.equivalence import Case
from dmattn.execution import torch_path
from dmattn.execution.backend import interpreting
from dmattn.problem import Problem

no_compile = pytest.mark.skipif(interpreting(), reason="Triton's interpreter and torch.compile do not combine")
pytorch_path = pytest.mark.skipif(interpreting(), reason="tests the PyTorch path")
LEN_Q = 7


def by_pairs(len_q: int, len_k: int, rule: Callable[[int, int], bool]) -> Tensor:
    return torch.tensor([[bool(rule(i, j)) for j in range(len_k)] for i in range(len_q)])


def runs(dense: Tensor) -> int:
    """The most runs of queries that attend a key."""
    starts = dense.clone()
    starts[..., 1:, :] &= ~dense[..., :-1, :]
    return int(starts.sum(-2).max())


@st.composite
def masks(draw: st.DrawFn) -> IntervalMask:
    """Of three keys, with bounds before the first query and after the last, and intervals that are empty or overlap."""
    shapes = st.sampled_from([(3,), (2, 3), (2, 1, 3), (2, 2, 3), (1,)])
    bound = st.integers(-2, LEN_Q + 2)

    def bounds() -> Tensor:
        shape = draw(shapes)
        return torch.tensor(draw(st.lists(bound, min_size=12, max_size=12)), dtype=torch.int32)[: torch.Size(shape).numel()].view(shape)

    again = (bounds(), bounds()) if draw(st.booleans()) else (None, None)
    return IntervalMask(bounds(), bounds(), LEN_Q if draw(st.booleans()) else None, *again)


@pytest.mark.skipif(interpreting(), reason="masks are the same in both halves")
@settings(max_examples=300, deadline=None, derandomize=True)
@given(one=masks(), other=masks())
def test_unions_and_intersections_are_those_of_the_dense_masks(one: IntervalMask, other: IntervalMask) -> None:
    """They exist where no key needs a third interval, and have a second one where a key needs it."""
    dense = one.to_dense(LEN_Q), other.to_dense(LEN_Q)
    one = IntervalMask(one.first, one.last, LEN_Q, one.also_first, one.also_last)
    for join, wanted in ((lambda: one | other, dense[0] | dense[1]), (lambda: one & other, dense[0] & dense[1])):
        if runs(wanted) > 2:
            with pytest.raises(ValueError, match="expected at most two intervals of queries a key, received three"):
                join()
        else:
            assert torch.equal(join().to_dense(LEN_Q).expand(wanted.shape), wanted)
            assert join().len_q == LEN_Q
    if runs(dense[0] | dense[1]) <= 2:
        assert ((one | other).also_first is None) == (runs(dense[0] | dense[1]) <= 1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(mask=masks())
def test_from_mask_finds_the_intervals_of_a_dense_mask(mask: IntervalMask) -> None:
    dense = mask.to_dense(LEN_Q)
    found = IntervalMask.from_mask(dense)
    assert torch.equal(found.to_dense(LEN_Q), dense)
    assert found.len_q == LEN_Q
    assert (found.also_first is None) == (runs(dense) <= 1)


def test_from_mask_keeps_expanded_axes_and_empty_ones() -> None:
    dense = torch.ones(5, 6, dtype=torch.bool).tril()
    mask = IntervalMask.from_mask(dense.expand(3, 2, 5, 6))
    assert mask.first.shape == (1, 1, 6)
    assert torch.equal(mask.to_dense(5)[0, 0], dense)
    assert IntervalMask.from_mask(torch.ones(2, 0, 3, dtype=torch.bool)).first.shape == (2, 3)
    assert IntervalMask.from_mask(torch.ones(0, 3, dtype=torch.bool)).len_q == 0
    assert IntervalMask.from_mask(torch.ones(3, 0, dtype=torch.bool)).first.shape == (0,)


@pytest.mark.parametrize(("begin", "end"), [(0, 2), (4, 7), (9, 11), (0, 11), (3, 3)])
def test_global_tokens_beside_a_window(begin: int, end: int) -> None:
    is_global = (torch.arange(11) >= begin) & (torch.arange(11) < end)
    tokens = IntervalMask.global_tokens(is_global)
    assert torch.equal(tokens.to_dense(11), is_global | is_global[:, None])
    assert tokens.also_first is None
    near = by_pairs(11, 11, lambda i, j: abs(i - j) <= 2)
    mask = IntervalMask.window(11, 11, left=2, right=2) | tokens
    assert torch.equal(mask.to_dense(11), near | is_global | is_global[:, None])
    causal = mask & IntervalMask.causal(11, 11)
    assert torch.equal(causal.to_dense(11), mask.to_dense(11) & by_pairs(11, 11, lambda i, j: j <= i))


def test_global_tokens_of_each_batch_row_and_head() -> None:
    is_global = torch.zeros(2, 3, 6, dtype=torch.bool)
    is_global[0, 1, 2:4], is_global[1, :, 0], is_global[1, 2, 1:] = True, True, True
    mask = IntervalMask.global_tokens(is_global)
    assert mask.first.shape == (2, 3, 6)
    assert torch.equal(mask.to_dense(6), is_global[..., None, :] | is_global[..., :, None])
    assert IntervalMask.global_tokens(torch.zeros(1, 1, 0, dtype=torch.bool)).first.shape == (1, 1, 0)


def test_documents_with_a_prefix_each() -> None:
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2], [5, 5, 6, 6, 6, 6, 6, 6]])
    prefix = torch.tensor([[1, 1, 0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0, 1, 0]]).bool()
    mask = IntervalMask.documents(ids, prefix=prefix)
    assert mask.also_first is None
    for batch in range(2):
        rule = by_pairs(8, 8, lambda i, j, b=batch: ids[b, i] == ids[b, j] and (j <= i or prefix[b, j]))
        assert torch.equal(mask.to_dense(8)[batch, 0], rule)
    assert torch.equal(IntervalMask.documents(ids[0], prefix=prefix[0]).to_dense(8), mask.to_dense(8)[0, 0])
    assert IntervalMask.documents(ids[:, :0], prefix=prefix[:, :0]).first.shape == (2, 1, 0)


@pytest.mark.parametrize("size", [1, 3, 100, 2**63])
@pytest.mark.parametrize(("len_q", "len_k"), [(8, 8), (3, 10), (9, 4)])
def test_chunks(len_q: int, len_k: int, size: int) -> None:
    offset = len_k - len_q
    chunks = by_pairs(len_q, len_k, lambda i, j: (i + offset) // size == j // size)
    assert torch.equal(IntervalMask.chunked(len_q, len_k, size).to_dense(len_q), chunks)
    padding = torch.tensor([0, 2, 5], dtype=torch.uint8)
    mask = IntervalMask.chunked(len_q, len_k, size, left_padding=padding)
    assert mask.first.shape == (3, 1, len_k)
    for batch, pad in enumerate(padding.tolist()):
        chunks = by_pairs(len_q, len_k, lambda i, j, pad=pad: (i + offset - pad) // size == (j - pad) // size)
        assert torch.equal(mask.to_dense(len_q)[batch, 0], chunks)


def test_intervals_that_touch_are_one() -> None:
    bounds = [torch.tensor([place], dtype=torch.int32) for place in (0, 3, 5)]
    one, other = IntervalMask(bounds[0], bounds[1]), IntervalMask(bounds[1], bounds[2])
    both = one | other
    assert both.also_first is None
    assert (both.first.item(), both.last.item()) == (0, 5)
    apart = one | IntervalMask(bounds[2], bounds[2] + 2)
    assert (apart | other).also_first is None, "what lies between joins both"


INT, BOOL = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.bool)
STRIPES = torch.tensor([[True], [False], [True], [False], [True]])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: IntervalMask(INT, INT, None, INT), TypeError, "also_last: expected an int32 tensor beside also_first, received NoneType"),
        (
            lambda: IntervalMask(INT, INT, None, None, INT),
            TypeError,
            "also_first: expected an int32 tensor beside also_last, received NoneType",
        ),
        (
            lambda: IntervalMask(INT, INT, None, INT.long(), INT),
            TypeError,
            "also_first: expected an int32 tensor, received torch.int64 tensor",
        ),
        (lambda: IntervalMask(INT, INT, None, INT, INT[0]), ValueError, r"also_last: expected at least 1 axis .*received shape \(\)"),
        (lambda: IntervalMask(INT, INT, None, INT, INT.to("meta")), ValueError, "also_last: expected device cpu as first has, received meta"),
        (lambda: IntervalMask(INT, INT, None, INT[:2], INT), ValueError, r"also_first: expected a shape that broadcasts with first's \(3,\)"),
        (
            lambda: IntervalMask.from_mask(STRIPES),
            ValueError,
            r"from_mask: mask: expected at most two intervals of queries a key, received three at key 0; a bool mask or a BlockMask has any number",
        ),
        (lambda: IntervalMask.from_mask(STRIPES[:, 0]), ValueError, r"from_mask: mask: expected shape \(Sq, Sk\), .* received \(5,\)"),
        (
            lambda: IntervalMask.from_mask(STRIPES.int()),
            TypeError,
            r"from_mask: mask: expected a bool tensor, received torch.int32 tensor; mask.bool\(\) if nonzero means a query that attends a key",
        ),
        (
            lambda: IntervalMask.from_mask(STRIPES[:1]) | IntervalMask.from_mask(STRIPES[:2]),
            ValueError,
            r"\|: expected masks for the same number of queries, received 1 and 2",
        ),
        (
            lambda: IntervalMask(INT, INT) | IntervalMask(INT[:2], INT[:2]),
            ValueError,
            r"\|: expected masks of as many keys, received 3 and 2$",
        ),
        (
            lambda: IntervalMask(INT, INT) | IntervalMask(INT.to("meta"), INT.to("meta")),
            ValueError,
            r"\|: expected masks of broadcastable shapes on one device, .* on cpu and meta",
        ),
        (
            lambda: IntervalMask.from_mask(torch.stack([~STRIPES, STRIPES])[:, None].expand(2, 1, 5, 3)),
            ValueError,
            r"received three at key 0 of entry \(1, 0\); a bool mask or a BlockMask has any number",
        ),
        (
            lambda: IntervalMask(INT, INT) | torch.ones(3, 3, dtype=torch.bool),
            TypeError,
            r"IntervalMask: \|: expected an IntervalMask beside an IntervalMask, received torch.Tensor; mask.to_dense\(Sq\) \| a bool tensor is",
        ),
        (lambda: ~IntervalMask(INT, INT), TypeError, r"IntervalMask: ~: expected a bool tensor, .*; ~mask.to_dense\(Sq\) is one, which"),
        (
            lambda: torch.ones(3, 3, dtype=torch.bool) & IntervalMask(INT, INT),
            TypeError,
            "IntervalMask: &: expected .*, received torch.Tensor;",
        ),
        (
            lambda: IntervalMask.from_mask(STRIPES[[0, 1, 0, 1, 1]]) | IntervalMask(INT + 4, INT + 5),
            ValueError,
            r"at most two .* received three at key 0; a bool mask or a BlockMask has any number",
        ),
        (
            lambda: IntervalMask.from_mask(STRIPES[[0, 0, 0, 1, 0]]) & IntervalMask.from_mask(STRIPES[[0, 1, 0, 0, 0]]),
            ValueError,
            r"&: expected at most two intervals of queries a key, received three at key 0; a bool mask or a BlockMask has any number",
        ),
        (
            lambda: IntervalMask.global_tokens(torch.tensor([[[True, False, True]], [[True, True, False]]])),
            ValueError,
            r"is_global: expected one run of global tokens in each row, received several runs in row \(0, 0\)$",
        ),
        (lambda: IntervalMask.global_tokens(STRIPES[:, 0]), ValueError, "expected one run of global tokens in each row, received several runs"),
        (lambda: IntervalMask.global_tokens(BOOL[None]), ValueError, r"is_global: .* received \(1, 3\); is_global\[:, None\] of \(B, S\)"),
        (
            lambda: IntervalMask.global_tokens(INT),
            TypeError,
            r"is_global: expected a bool tensor, received torch.int32 tensor; is_global.bool\(\) if nonzero means a global token",
        ),
        (lambda: IntervalMask.documents(INT, prefix=INT), TypeError, r"prefix: expected a bool tensor, .*; prefix.bool\(\) if nonzero means"),
        (
            lambda: IntervalMask.documents(INT, prefix=BOOL[:2]),
            ValueError,
            r"prefix: expected shape \(3,\) on cpu as segment_ids has, received shape \(2,\)",
        ),
        (lambda: IntervalMask.documents(INT, prefix=BOOL.to("meta")), ValueError, r"prefix: .* received shape \(3,\) on meta"),
        (
            lambda: IntervalMask.padding(INT[None], 3),
            TypeError,
            r"received torch.int32 tensor; key_padding_mask.bool\(\) if nonzero means a real token",
        ),
        (lambda: IntervalMask.chunked(3, 3, 0), ValueError, "chunked: size: expected a positive integer, received 0"),
        (lambda: IntervalMask.chunked(3, 3, -3), ValueError, "chunked: size: expected a positive integer, received -3"),
        (
            lambda: IntervalMask(*[torch.zeros(3, dtype=torch.int32)] * 4),
            TypeError,
            "len_q: expected an integer or None, received Tensor; a second",
        ),
        (lambda: IntervalMask.chunked(3, 3, 2.0), TypeError, "chunked: size: expected an integer, received float"),
        (lambda: IntervalMask.chunked(3, 3, 2, left_padding=INT.bool()), TypeError, "left_padding: expected an integer tensor"),
        (lambda: IntervalMask.chunked(3, 3, 2, left_padding=INT[None]), ValueError, r"left_padding: expected shape \(B,\), received \(1, 3\)"),
        (lambda: IntervalMask.chunked(3, 3, 2, left_padding=INT, device="cpu"), ValueError, "device: expected None beside left_padding"),
    ],
)
def test_errors(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        make()
    assert str(raised.value).startswith("dmattn: ")


def test_a_mask_for_other_lengths_is_refused() -> None:
    query = torch.randn(2, 1, 9, 8)
    mask = IntervalMask.window(5, 5, left=1, right=1) | IntervalMask.global_tokens(torch.arange(5) < 1)
    with pytest.raises(ValueError, match=r"mask: expected an IntervalMask for 9 queries and 9 keys, .* received one for 5 queries and 5 keys"):
        attention(query, query, query, mask=mask)


def longformer(length: int, near: int, tokens: int) -> IntervalMask:
    return IntervalMask.window(length, length, left=near, right=near) | IntervalMask.global_tokens(torch.arange(length) < tokens)


def test_a_mask_is_a_tree_of_its_tensors() -> None:
    mask = longformer(9, 1, 2)
    leaves, form = tree_flatten(mask)
    assert [id(leaf) for leaf in leaves] == [id(mask.first), id(mask.last), id(mask.also_first), id(mask.also_last)]
    again = tree_unflatten(leaves, form)
    assert again.also_first is mask.also_first
    assert (again.also_last is mask.also_last, again.len_q) == (True, 9)
    assert treespec_loads(treespec_dumps(form)) == form
    for copied in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), mask.to("cpu"), tree_map(torch.clone, mask)):
        assert torch.equal(copied.to_dense(9), mask.to_dense(9))
    assert mask.to("meta").also_last.device.type == "meta"


class Masked(torch.nn.Module):
    def forward(self, query: Tensor, mask: IntervalMask) -> Tensor:
        return attention(query, query, query, mask=mask)


@no_compile
@pytest.mark.parametrize("strict", [False, True])
def test_exported_and_compiled_functions_take_a_mask(strict: bool) -> None:
    query, mask, other = torch.randn(2, 4, 9, 8), longformer(9, 1, 2), longformer(9, 0, 1)
    program = torch.export.export(Masked(), (query, mask), strict=strict)
    torch.compiler.reset()
    compiled = torch.compile(Masked(), fullgraph=True, backend="eager")
    for each in (mask, other, IntervalMask.causal(9, 9)):
        assert torch.equal(compiled(query, each), attention(query, query, query, mask=each))
    assert torch.equal(program.module()(query, other), attention(query, query, query, mask=other))


@no_compile
def test_a_compiled_function_joins_masks() -> None:
    """It cannot look at them: the result has two intervals, and the graph raises where there should be three."""

    def join(query: Tensor, one: IntervalMask, is_global: Tensor) -> Tensor:
        return attention(query, query, query, mask=one | IntervalMask.global_tokens(is_global))

    query, window, is_global = torch.randn(2, 4, 9, 8), IntervalMask.window(9, 9, left=1, right=1), torch.arange(9) < 2
    torch.compiler.reset()
    compiled = torch.compile(join, fullgraph=True, backend="eager")
    assert torch.equal(compiled(query, window, is_global), join(query, window, is_global))
    with pytest.raises(RuntimeError, match="expected one run of global tokens"):
        compiled(query, window, torch.arange(9) % 2 == 0)


def test_masks_whose_elements_cannot_be_read_have_two_intervals() -> None:
    near = IntervalMask.window(9, 9, left=1, right=1)
    assert (near.to("meta") | near.to("meta")).also_first.device.type == "meta"
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert (near | IntervalMask.global_tokens(torch.arange(9) < 2)).also_first.shape == (9,)
        assert IntervalMask.from_mask(torch.ones(4, 5, dtype=torch.bool)).also_first.shape == (5,)


def test_packed_tokens_under_a_union() -> None:
    """A global token at the beginning of each sequence, and a window, beside the same for each sequence by a bool mask."""
    lengths, heads = (30, 7, 18), 2
    ends = torch.tensor([0, *lengths]).cumsum(0)
    total, longest = sum(lengths), max(lengths)
    begin = torch.repeat_interleave(ends[:-1], torch.tensor(lengths)).int()
    is_global = begin == torch.arange(total)
    tokens = IntervalMask(begin, torch.where(is_global, total, begin + 1).int(), total)
    mask = (IntervalMask.window(total, total, left=3, right=3) | tokens) & IntervalMask.packed(ends, ends, total, total)
    place = torch.arange(longest)
    dense = ((place[:, None] - place).abs() <= 3) | (place == 0) | (place == 0)[:, None]
    query, key, value = (torch.randn(total, heads, 8) for _ in range(3))
    out = attention(*(x.transpose(0, 1)[None] for x in (query, key, value)), mask=mask)[0].transpose(0, 1)
    want = attention_varlen(query, key, value, ends, ends, max_seqlen_q=longest, max_seqlen_k=longest, mask=dense)
    torch.testing.assert_close(out, want)


def test_vmap_takes_and_joins_masks() -> None:
    query = torch.randn(3, 4, 9, 8)
    shared = longformer(9, 1, 2)
    is_global = torch.arange(9) < torch.arange(3)[:, None]

    def one(query: Tensor, is_global: Tensor) -> Tensor:
        mask = IntervalMask.window(9, 9, left=1, right=1) | IntervalMask.global_tokens(is_global)
        return attention(query[None], query[None], query[None], mask=mask)[0]

    own = IntervalMask.window(9, 9, left=1, right=1) | IntervalMask.global_tokens(is_global[:, None])
    torch.testing.assert_close(torch.func.vmap(one)(query, is_global), attention(query, query, query, mask=own))
    taken = torch.func.vmap(lambda x, mask: attention(x[None], x[None], x[None], mask=mask)[0], in_dims=(0, None))(query, shared)
    torch.testing.assert_close(taken, attention(query, query, query, mask=shared))


@pytorch_path
@pytest.mark.parametrize("window", [None, (60, 20)], ids=str)
def test_a_chunk_of_the_pytorch_path_has_the_keys_of_both_intervals_alone(window: tuple[int, int] | None) -> None:
    length, near, tokens = 1024, 8, 4
    query = torch.randn(1, 1, length, 8)
    problem = Problem.canonical(query, query, query, longformer(length, near, tokens), None, False, window, None, None)
    taken = 0
    for rows, _, chunk in torch_path.chunks(problem, torch_path.CHUNK_SCORES // 32):  # 32 rows at a time
        if rows.start >= tokens:
            assert chunk.key.shape[2] <= tokens + rows.stop - rows.start + 2 * near
        taken += rows.stop - rows.start
    assert taken == length


@pytest.mark.parametrize("bias", [None, "1hqk"])
def test_attention_is_that_of_the_dense_mask(device: str, bias: str | None) -> None:
    """Bit by bit from call to call, and within rounding that of a bool mask."""
    given = Case("two", 97, heads=2, intervals="global", bias=bias).inputs(torch.float32, device)
    tensors = [x.requires_grad_() for x in (given.query, given.key, given.value, given.bias) if x is not None]

    def results(mask: IntervalMask | Tensor) -> list[Tensor]:
        out, lse = attention(given.query, given.key, given.value, mask=mask, bias=given.bias, return_lse=True)
        return [out, lse, *torch.autograd.grad((out, lse), tensors, (given.d_out, given.d_lse))]

    first = results(given.mask)
    assert all(map(torch.equal, results(given.mask), first))
    for got, want in zip(first, results(given.mask.to_dense(97)), strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_masks_on_a_gpu_are_made_and_joined_there(device: str) -> None:
    is_global = (torch.arange(300) < 5).to(device)
    mask = IntervalMask.window(300, 300, left=9, right=9, device=device) | IntervalMask.global_tokens(is_global)
    assert torch.equal(mask.to_dense(300).cpu(), longformer(300, 9, 5).to_dense(300))
    assert (mask & IntervalMask.chunked(300, 300, 64, device=device)).also_first is not None
    with pytest.raises(ValueError, match="received three"):
        mask | IntervalMask.from_mask(torch.eye(300, dtype=torch.bool, device=device).flip(0))
