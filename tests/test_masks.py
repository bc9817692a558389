"""IntervalMask: every constructor against a mask written out pair by pair, intersection, errors, and a mask as an argument of what PyTorch transforms."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten, treespec_dumps, treespec_loads

from dmattn import IntervalMask, attention
from dmattn.execution.backend import interpreting

no_compile = pytest.mark.skipif(interpreting(), reason="Triton's interpreter and torch.compile do not combine")


def by_pairs(len_q: int, len_k: int, rule) -> torch.Tensor:
    return torch.tensor([[bool(rule(i, j)) for j in range(len_k)] for i in range(len_q)])


@pytest.mark.parametrize(("len_q", "len_k"), [(5, 5), (3, 8), (8, 3), (1, 4)])
def test_causal_and_window(len_q: int, len_k: int) -> None:
    offset = len_k - len_q
    assert torch.equal(IntervalMask.causal(len_q, len_k).to_dense(len_q), by_pairs(len_q, len_k, lambda i, j: j <= i + offset))
    for left, right in ((0, 0), (2, 1), (None, 3), (1, None), (None, None)):
        dense = by_pairs(
            len_q,
            len_k,
            lambda i, j, left=left, right=right: (left is None or j - i - offset >= -left) and (right is None or j - i - offset <= right),
        )
        assert torch.equal(IntervalMask.window(len_q, len_k, left=left, right=right).to_dense(len_q), dense)


@pytest.mark.parametrize("side", [2**31 - 5, 2**31 - 1, 2**31, 2**63])
def test_a_side_too_large_for_an_int32_is_unbounded(side: int) -> None:
    for len_q, len_k in ((4, 6), (6, 4)):
        wide, unbounded = (IntervalMask.window(len_q, len_k, left=bound, right=bound).to_dense(len_q) for bound in (side, None))
        assert torch.equal(wide, unbounded)


def test_documents_are_runs_of_equal_ids() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1, 0], [7, 7, 7, 7, 7, 7]])
    runs = [[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]]
    mask = IntervalMask.documents(ids)
    assert mask.first.shape == (2, 1, 6)
    for batch in range(2):
        assert torch.equal(mask.to_dense(6)[batch, 0], by_pairs(6, 6, lambda i, j, of=runs[batch]: of[i] == of[j]))
    assert torch.equal(IntervalMask.documents(ids[0]).to_dense(6), mask.to_dense(6)[0, 0])
    assert IntervalMask.documents(torch.zeros(2, 0, dtype=torch.int64)).first.shape == (2, 1, 0)


def test_documents_whose_tokens_lie_apart_are_whole_once_they_are_sorted() -> None:
    """The causal mask of ids, row by row in the order that the docstring names: it keeps tokens of a document in theirs."""
    ids = torch.tensor([[4, 0, 4, 1, 0, 4], [2, 2, 9, 2, 9, 9]])
    order = ids.argsort(dim=-1, stable=True)
    mask = IntervalMask.documents(ids.gather(-1, order)) & IntervalMask.causal(6, 6)
    for batch, places in enumerate(order):
        wanted = by_pairs(6, 6, lambda i, j, of=ids[batch]: of[i] == of[j] and j <= i)
        assert torch.equal(mask.to_dense(6)[batch, 0], wanted[places][:, places])
        assert not torch.equal(IntervalMask.documents(ids).to_dense(6)[batch, 0].tril(), wanted)


@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (2, 1), (0, None), (2**63, 2**63)])
def test_packed_sequences_attend_within_themselves(left: int | None, right: int | None) -> None:
    """Each by the rule of a window of its own lengths, also where one has no queries or no keys."""
    lengths_q, lengths_k = (3, 0, 5, 2, 1), (4, 2, 2, 0, 1)
    ends_q, ends_k = (torch.tensor([0, *lengths], dtype=torch.uint8).cumsum(0) for lengths in (lengths_q, lengths_k))
    alone = [IntervalMask.window(*lengths, left=left, right=right).to_dense(lengths[0]) for lengths in zip(lengths_q, lengths_k, strict=True)]
    for dtype in (torch.int32, torch.uint8):
        mask = IntervalMask.packed(ends_q.to(dtype), ends_k.to(dtype), 11, 9, left=left, right=right)
        assert mask.first.shape == mask.last.shape == (9,)
        assert torch.equal(mask.to_dense(11), torch.block_diag(*alone).bool())
    assert IntervalMask.packed(torch.tensor([0, 0]), torch.tensor([0, 0]), 0, 0).first.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int16, torch.int64], ids=str)
def test_lengths_of_prefixes_may_have_any_integer_dtype(dtype: torch.dtype) -> None:
    lengths = torch.tensor([0, 3, 9])
    assert torch.equal(IntervalMask.prefix_lm(lengths.to(dtype), 5, 7).to_dense(5), IntervalMask.prefix_lm(lengths, 5, 7).to_dense(5))


@pytest.mark.parametrize("len_q", ["5", 5.0, True, torch.tensor(5), -1], ids=str)
def test_a_number_of_queries_is_a_number(len_q: Any) -> None:
    bound = torch.zeros(3, dtype=torch.int32)
    for made in (lambda: IntervalMask(bound, bound, len_q), lambda: IntervalMask(bound, bound).to_dense(len_q)):
        with pytest.raises((TypeError, ValueError), match=r"^dmattn: IntervalMask(\.to_dense)?: len_q: expected a.* integer, received "):
            made()


def test_a_mask_is_shown_without_its_numbers() -> None:
    bound = torch.zeros(2, 1, 300, dtype=torch.int32)
    assert repr(IntervalMask(bound, bound, 5)) == "IntervalMask(first of shape (2, 1, 300), len_q=5, device=cpu)"
    assert repr(IntervalMask(bound, bound, None, bound, bound)).startswith(
        "IntervalMask(first of shape (2, 1, 300) and (2, 1, 300), len_q=None"
    )


def test_prefix_and_padding() -> None:
    prefix = torch.tensor([0, 3])
    dense = IntervalMask.prefix_lm(prefix, 5, 6).to_dense(5)
    for batch in range(2):
        assert torch.equal(dense[batch, 0], by_pairs(5, 6, lambda i, j, p=int(prefix[batch]): j < p or j <= i + 1))
    real = torch.tensor([[True, True, False], [False, True, True]])
    assert torch.equal(IntervalMask.padding(real, 4).to_dense(4), real[:, None, None, :].expand(2, 1, 4, 3))


def test_intersection() -> None:
    documents = IntervalMask.documents(torch.tensor([[0, 0, 0, 1, 1]]))
    both = documents & IntervalMask.causal(5, 5)
    assert torch.equal(both.to_dense(5), documents.to_dense(5) & IntervalMask.causal(5, 5).to_dense(5))
    with pytest.raises(TypeError):
        documents & torch.ones(5, 5, dtype=torch.bool)


def test_attention_is_that_of_the_dense_mask(device: str) -> None:
    random = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn((2, 2, 37, 16), generator=random).to(device) for _ in range(3))
    ids = torch.tensor([[0] * 20 + [1] * 17, [3] * 5 + [4] * 32]).to(device)
    mask = IntervalMask.documents(ids) & IntervalMask.causal(37, 37, device=device)
    torch.testing.assert_close(attention(query, key, value, mask=mask), attention(query, key, value, mask=mask.to_dense(37)))


INT = torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: IntervalMask(INT.long(), INT), TypeError, r"first: expected an int32 tensor, received torch.int64 tensor"),
        (lambda: IntervalMask(INT, 3), TypeError, r"last: expected an int32 tensor, received int"),
        (lambda: IntervalMask(INT[0], INT), ValueError, r"first: expected at least 1 axis .*received shape \(\)"),
        (lambda: IntervalMask(INT, INT.to("meta")), ValueError, r"last: expected device cpu as first has, received meta"),
        (lambda: IntervalMask(INT, INT[:2]), ValueError, r"last: expected a shape that broadcasts with first's \(3,\), received \(2,\)"),
        (
            lambda: IntervalMask.window(3, 3, left=-1, right=0),
            ValueError,
            r"left: expected a non-negative integer, or None for off, received -1",
        ),
        (lambda: IntervalMask.documents(INT.bool()), TypeError, r"segment_ids: expected an integer tensor, received torch.bool"),
        (
            lambda: IntervalMask.documents([0, 0, 1]),
            TypeError,
            r"segment_ids: expected an integer tensor, received list; torch.tensor\(segment_ids\)$",
        ),
        (lambda: IntervalMask.packed([0, 3], INT, 3, 3), TypeError, r"packed: cu_seqlens_q: .* received list; torch.tensor\(cu_seqlens_q\)$"),
        (lambda: IntervalMask.documents(INT.float()), TypeError, r"segment_ids: expected an integer tensor, received torch.float32"),
        (lambda: IntervalMask.documents(INT[None, None]), ValueError, r"segment_ids: expected shape \(B, S\) or \(S,\), received \(1, 1, 3\)"),
        (lambda: IntervalMask.packed(INT, [0, 1], 3, 3), TypeError, r"packed: cu_seqlens_k: expected an integer tensor, received list"),
        (
            lambda: IntervalMask.packed(INT.bool(), INT, 3, 3),
            TypeError,
            r"packed: cu_seqlens_q: expected an integer tensor, received torch.bool",
        ),
        (lambda: IntervalMask.packed(INT[:1], INT, 3, 3), ValueError, r"cu_seqlens_q: expected shape \(sequences \+ 1,\), received \(1,\)"),
        (
            lambda: IntervalMask.packed(INT, INT[:2], 3, 3),
            ValueError,
            r"packed: cu_seqlens_k: expected shape \(3,\) on cpu as cu_seqlens_q has, received shape \(2,\) on cpu",
        ),
        (lambda: IntervalMask.packed(INT, INT.to("meta"), 3, 3), ValueError, r"cu_seqlens_k: expected .* received shape \(3,\) on meta"),
        (
            lambda: IntervalMask.packed(torch.tensor([4, 6]), torch.tensor([0, 10]), 10, 10),
            ValueError,
            r"packed: cu_seqlens_q: expected places where sequences begin, that rise from 0, and last the total 10, received \[4, 6\]; of lengths",
        ),
        (
            lambda: IntervalMask.packed(torch.tensor([0, 3, 10]), torch.tensor([0, 8, 4, 10], dtype=torch.uint8)[:3], 10, 10),
            ValueError,
            r"packed: cu_seqlens_k: expected places .* last the total 10, received \[0, 8, 4\]$",
        ),
        (lambda: IntervalMask.packed(INT, INT, 3, -1), ValueError, r"packed: len_k: expected a non-negative integer, received -1"),
        (lambda: IntervalMask.packed(INT, INT, 3, 3, right=-1), ValueError, r"packed: right: expected a non-negative integer, or None for off"),
        (lambda: IntervalMask.prefix_lm(INT.bool(), 3, 3), TypeError, r"prefix_lengths: expected an integer tensor, received torch.bool"),
        (lambda: IntervalMask.prefix_lm(INT.float(), 3, 3), TypeError, r"prefix_lengths: expected an integer tensor"),
        (lambda: IntervalMask.prefix_lm(INT[None], 3, 3), ValueError, r"prefix_lengths: expected shape \(B,\), received \(1, 3\)"),
        (lambda: IntervalMask.padding(INT[None], 3), TypeError, r"key_padding_mask: expected a bool tensor, received torch.int32"),
        (lambda: IntervalMask.padding(INT[None], 3), TypeError, r"; key_padding_mask.bool\(\) if nonzero means a real token$"),
        (lambda: IntervalMask.padding(INT, 3), TypeError, r"int32 tensor; of lengths: torch.arange\(Sk\) < lengths\[:, None\]$"),
        (lambda: IntervalMask.padding([[True]], 3), TypeError, r"received list; torch.tensor\(key_padding_mask\)$"),
        (lambda: IntervalMask.prefix_lm([1], 3, 3), TypeError, r"received list; torch.tensor\(prefix_lengths\)$"),
        (
            lambda: IntervalMask.padding(INT.bool(), 3),
            ValueError,
            r"key_padding_mask: expected shape \(B, Sk\), received \(3,\); for a batch of one, .* key_padding_mask\[None\]$",
        ),
    ],
)
def test_errors(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        make()
    assert str(raised.value).startswith("dmattn: ")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: IntervalMask.window(4, 4, left="a", right=0),
            TypeError,
            "window: left: expected a non-negative integer or None, received str",
        ),
        (lambda: IntervalMask.window(4, 4, left=0, right=1.5), TypeError, "window: right: .* received float"),
        (lambda: IntervalMask.window(4.0, 4, left=0, right=1), TypeError, "window: len_q: expected an integer, received float"),
        (lambda: IntervalMask.causal(4, -1), ValueError, "causal: len_k: expected a non-negative integer, received -1"),
        (lambda: IntervalMask.causal([3], 4), TypeError, "causal: len_q: expected an integer, received list"),
        (lambda: IntervalMask.padding(torch.ones(1, 3, dtype=torch.bool), "9"), TypeError, "padding: len_q: expected an integer, received str"),
        (
            lambda: IntervalMask.causal(4, 5) & IntervalMask.causal(4, 6),
            ValueError,
            r"&: expected masks of as many keys, received 5 and 6$",
        ),
    ],
)
def test_errors_of_constructors(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        make()
    assert str(raised.value).startswith("dmattn: ")


def test_to_another_device() -> None:
    mask = IntervalMask.causal(3, 4).to("meta")
    assert mask.first.device == mask.last.device == torch.device("meta")


def test_a_mask_fits_the_number_of_queries_it_was_made_for() -> None:
    query, key = torch.randn(2, 1, 9, 8), torch.randn(2, 1, 9, 8)
    for mask in (
        IntervalMask.causal(4, 9),
        IntervalMask.padding(torch.ones(2, 9, dtype=torch.bool), 4),
        IntervalMask.prefix_lm(torch.tensor([2, 3]), 4, 9),
        IntervalMask.causal(4, 9) & IntervalMask(torch.zeros(9, dtype=torch.int32), torch.full((9,), 9, dtype=torch.int32)),
    ):
        with pytest.raises(
            ValueError,
            match="mask: expected an IntervalMask for 9 queries and 9 keys, as query and key have, received one for 4 queries and 9 keys",
        ):
            attention(query, key, key, mask=mask)
    with pytest.raises(ValueError, match=r"an IntervalMask for 1 queries and 9 keys, .*, received one for 9 queries and 9 keys"):
        attention(query[:, :, -1:], key, key, mask=IntervalMask.documents(torch.arange(9) // 3))
    with pytest.raises(ValueError, match="expected masks for the same number of queries, received 3 and 5"):
        IntervalMask.causal(3, 3) & IntervalMask.causal(5, 3)
    with pytest.raises(ValueError, match="to_dense: len_q: expected 3, for which the mask was made, received 4"):
        IntervalMask.causal(3, 3).to_dense(4)
    assert torch.equal(IntervalMask.causal(3, 3).to_dense(), IntervalMask.causal(3, 3).to_dense(3))
    with pytest.raises(ValueError, match="to_dense: len_q: expected an integer, received None, and the mask knows no number of queries"):
        IntervalMask(torch.zeros(3, dtype=torch.int32), torch.full((3,), 3, dtype=torch.int32)).to_dense()
    attention(query, key, key, mask=IntervalMask.causal(9, 9).to("cpu") & IntervalMask.causal(9, 9))


def test_a_mask_is_a_tree_of_its_tensors() -> None:
    mask = IntervalMask.documents(torch.tensor([[0, 0, 1], [0, 1, 1]]))
    leaves, form = tree_flatten(mask)
    assert [id(leaf) for leaf in leaves] == [id(mask.first), id(mask.last)]
    again = tree_unflatten(leaves, form)
    assert (again.first is mask.first, again.last is mask.last, again.len_q) == (True, True, 3)
    assert treespec_loads(treespec_dumps(form)) == form
    assert [keystr(path) for path, _ in tree_flatten_with_path(mask)[0]] == [".first", ".last"]
    assert tree_map(lambda x: tuple(x.shape), mask).first == (2, 1, 3)  # whatever a transformation puts there
    moved = tree_map(lambda x: x.to("meta"), {"mask": mask})["mask"]
    assert (moved.first.device.type, moved.last.device.type, moved.len_q) == ("meta", "meta", 3)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask)), lambda mask: saved(mask, torch.save, torch.load)]
)
def test_a_copy_is_the_same_mask(copied: Callable[[IntervalMask], IntervalMask]) -> None:
    mask = IntervalMask.causal(3, 5)
    again = copied(mask)
    assert type(again) is IntervalMask
    assert again.first is not mask.first
    assert again.len_q == 3
    assert torch.equal(again.to_dense(3), mask.to_dense(3))


def saved(value: Any, save: Callable, load: Callable) -> Any:
    """What is read back of a value that was written."""
    file = io.BytesIO()
    save(value, file)
    file.seek(0)
    return load(file)


class Masked(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, mask: IntervalMask) -> torch.Tensor:
        return attention(query, key, key, mask=mask)


def tensors(len_q: int, len_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(len_q)
    return torch.randn((2, 4, len_q, 8), generator=random), torch.randn((2, 2, len_k, 8), generator=random)


@no_compile
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_takes_other_masks(strict: bool) -> None:
    query, key = tensors(5, 7)
    program = torch.export.export(Masked(), (query, key, IntervalMask.causal(5, 7)), strict=strict)
    other = IntervalMask.window(5, 7, left=1, right=0)
    for found in (program, saved(program, torch.export.save, torch.export.load)):
        assert torch.equal(found.module()(query, key, other), attention(query, key, key, mask=other))
    with pytest.raises(ValueError, match="IntervalMask, 5"):  # len_q is a constant of the program
        program.module()(query, key, IntervalMask(other.first, other.last))


@no_compile
def test_an_exported_program_takes_other_lengths_without_len_q() -> None:
    free = [IntervalMask(mask.first, mask.last) for mask in (IntervalMask.causal(5, 7), IntervalMask.causal(9, 11))]
    len_q, len_k = (torch.export.Dim(name, min=2, max=64) for name in ("len_q", "len_k"))
    shapes = ({2: len_q}, {2: len_k}, [{0: len_k}, {0: len_k}])
    program = torch.export.export(Masked(), (*tensors(5, 7), free[0]), dynamic_shapes=shapes)
    query, key = tensors(9, 11)
    torch.testing.assert_close(program.module()(query, key, free[1]), attention(query, key, key, causal=True))


@no_compile
def test_a_compiled_function_takes_a_mask() -> None:
    query, key = tensors(5, 7)
    torch.compiler.reset()
    compiled = torch.compile(Masked(), fullgraph=True, backend="eager")
    for mask in (IntervalMask.causal(5, 7), IntervalMask.window(5, 7, left=1, right=0)):
        assert torch.equal(compiled(query, key, mask), attention(query, key, key, mask=mask))


def test_vmap_takes_a_mask() -> None:
    query, key = tensors(5, 7)
    shared, own = IntervalMask.causal(5, 7), IntervalMask.padding(torch.tensor([[True] * 7, [True] * 4 + [False] * 3]), 5)

    def one(query: torch.Tensor, key: torch.Tensor, mask: IntervalMask) -> torch.Tensor:
        return attention(query[None], key[None], key[None], mask=mask)[0]

    together = torch.func.vmap(one, in_dims=(0, 0, None))(query, key, shared)
    torch.testing.assert_close(together, attention(query, key, key, mask=shared))
    torch.testing.assert_close(torch.func.vmap(one)(query, key, own), attention(query, key, key, mask=own))
