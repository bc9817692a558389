"""``dmattn.explain``: the kernels of named calls with their reasons, and numbers that agree with what a pass allocates, computes and reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dmattn
from dmattn import BlockMask, FactoredBias, IntervalMask, RelativeBias, attention, explain, factors, targets
from dmattn.equivalence import Case
from dmattn.execution import backend
from dmattn.execution.passes import learned_of
from dmattn.explain import Explanation, Pass
from dmattn.problem import Problem

pytest.importorskip("triton", reason="the kernels need Triton")

from cases import CASES, HOPPER, LARGE, WIDEST
from compile_report import FORWARD, LAUNCHES, meta
from triton.runtime.jit import JITFunction

from dmattn import kernels
from dmattn.kernels.base.no_device import on_gpu

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
not_interpreted = pytest.mark.skipif(backend.interpreting(), reason="asks what a GPU or PyTorch serves")
PAD = "stride 1001 is no multiple of 8: pad the key axis to a multiple of 8 and pass a slice"
ONE_TILE = "serves up to 64 queries and 64 keys, not 1001 and 1001"


def empty(*shape: int, dtype: torch.dtype = BF16, needs_grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=needs_grad)


def same(*shape: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    return empty(*shape, dtype=dtype), empty(*shape, dtype=dtype), empty(*shape, dtype=dtype)


def reasons(explained: Pass) -> dict[str, str]:
    return dict(explained.refusals)


def t5(length: int, bias: Tensor) -> Explanation:
    return explain(*same(4, 16, length, 64), bias=bias, scale=1.0, target="sm_90")


def test_the_time_of_a_mask_that_hides_nothing_is_no_bound() -> None:
    """README's mask of 10 % takes 1.581 and 1.216 ms on an H200."""
    query, mask = (
        torch.empty(1, 16, 16384, 128, dtype=torch.bfloat16, device="meta"),
        torch.empty(1, 16, 16384, 16384, dtype=torch.bool, device="meta"),
    )
    masked, plain = (explain(query, query, query, target="sm_90", mask=given) for given in (mask, None))
    for some, every in zip(masked.passes, plain.passes, strict=True):
        assert some.is_masked
        assert not every.is_masked
        assert "ms, or less where the mask hides pairs" in str(some)
        assert "ms or more" in str(every)
        assert "more" not in str(some).splitlines()[-1]


def test_t5_at_1001_keys_is_told_to_pad_its_bias() -> None:
    """The question that a reader of the tree asks: which kernels, and why not the faster ones. In float32 no copy helps."""
    forward, backward = t5(1001, empty(1, 16, 1001, 1001)).passes
    assert forward.rows == ("Hopper",)
    assert forward.copies == (f"rows of bias: {PAD}",)
    assert forward.memory == 16 * 1001 * 1008 * 2
    assert f"by an aligned copy: rows of bias: {PAD}" in str(forward)
    assert backward.rows == ("query terms", "Hopper: d_query, d_bias", "Hopper: d_key, d_value")
    assert backward.copies == (f"rows of bias: {PAD}", f"rows of d_bias: {PAD}")
    assert t5(1001, empty(1, 16, 1001, 1008)[..., :1001]).passes[1].copies == ()


def test_small_t5_at_101_keys_loads_its_bias() -> None:
    """A copy would take longer than it saves, so the reasons are those of refusals."""
    forward, backward = t5(101, empty(1, 16, 101, 101)).passes
    pad = PAD.replace("1001", "101")
    assert forward.copies == backward.copies == ()
    assert forward.rows == ("Hopper, pairs loaded",)
    assert reasons(forward)["Hopper"] == f"rows of bias: {pad}"
    assert backward.rows == ("Hopper: d_query, pairs loaded", "Hopper: d_key, d_value, pairs loaded", "Hopper: d_bias, pairs loaded")
    refused = reasons(backward)
    for row in ("Hopper: d_query, d_bias", "Hopper: d_key, d_value", "Hopper: d_query", "Hopper: d_bias"):
        assert refused[row].partition("; ")[0] == f"rows of bias: {pad}"
    assert refused["one tile"] == ONE_TILE.replace("1001", "101")


def test_t5_with_the_bias_that_it_was_told_to_make_has_the_faster_kernels() -> None:
    padded = t5(1001, empty(1, 16, 1001, 1008)[..., :1001]).passes[1]
    assert padded.rows == ("query terms", "Hopper: d_query, d_bias", "Hopper: d_key, d_value")
    whole = t5(4096, empty(1, 16, 4096, 4096))
    assert [explained.rows for explained in whole.passes] == [("Hopper",), padded.rows]


def test_a_refusal_names_all_that_is_in_the_way() -> None:
    """Whoever does all of it has the faster kernels, and is not refused for another reason. A copy that is made has the same reasons."""
    wanted = ("query terms", "Hopper: d_query, d_bias", "Hopper: d_key, d_value")
    cut = empty(1, 16, 1001, 1001, dtype=FP32)
    transposed = t5(1001, cut.mT)
    copied = "key axis of bias: stride 1001 is not 1: copy it, with the key axis padded to a multiple of 8, and pass a slice"
    halved = "bias: float32 elements have more than 16 bits: convert to 16 bits, then pad"
    assert reasons(transposed.passes[0])["Hopper"] == f"{halved}; {copied}"
    assert t5(1001, cut.bfloat16().mT).passes[0].copies == (copied,)
    assert reasons(t5(1001, empty(1, 16, 1001, 1008, dtype=FP32)[..., :1001]).passes[0])["Hopper"] == halved
    refused = reasons(explain(*same(4, 16, 1001, 128), bias=cut, dropout_p=0.1, scale=-1.0, target="sm_90").passes[1])["Hopper: d_bias"]
    assert refused == f"does not serve dropout; serves a scale from 2**-64 to 2**64, not -1.0; {halved}; rows of bias: {PAD}"
    for bias in (cut, cut.mT, cut.bfloat16().mT):
        done = torch.nn.functional.pad(bias.bfloat16(), (0, 7)).contiguous()[..., :1001]
        assert t5(1001, done).passes[1].rows == wanted


def test_a_call_that_no_kernel_serves_says_what_to_do_instead() -> None:
    instead = "pass a head dim up to 256, or float16 or bfloat16, or float64, which PyTorch's operations serve$"
    words = rf"^dmattn: no kernel serves this call on sm_90: portable does not serve float32 with head dims 320 .* on sm_90: {instead}"
    with pytest.raises(NotImplementedError, match=words):
        explain(*same(2, 8, 300, 320, dtype=FP32), target="sm_90")
    for dtype in (BF16, FP64):
        assert explain(*same(2, 8, 300, 320, dtype=dtype), target="sm_90").passes[0].rows


def test_leading_axes_that_no_stride_walks_are_the_only_reason_for_how_a_tensor_lies() -> None:
    query = empty(8, 2, 16, 512, 128).transpose(0, 1)
    forward, backward = explain(query, query, query, target="sm_90").passes
    assert reasons(forward)["Hopper"] == "does not serve leading axes that no single stride walks"
    assert reasons(backward)["Hopper: d_query"] == "does not serve leading axes that no single stride walks"


def test_hopper_serves_masks_beside_a_table_of_distances() -> None:
    table = RelativeBias(empty(16, 257, dtype=FP32))
    query, ends = same(4, 16, 1024, 64), torch.empty(4, 1, 1024, dtype=torch.int32, device="meta")
    padding = torch.empty(4, 1, 1, 1024, dtype=torch.bool, device="meta")
    keys = "Hopper: d_key, d_value"
    of_pairs, odd = (torch.empty(4, 1, 1024, pitch, dtype=torch.bool, device="meta")[..., :1024] for pitch in (1024, 1025))
    of_intervals = IntervalMask(ends, ends, 1024), f"{keys} by intervals"
    for mask, of_keys in ((None, keys), (padding, keys), of_intervals, (of_pairs, keys), (odd, f"{keys}, pairs loaded")):
        forward, backward = explain(*query, bias=table, mask=mask, scale=1.0, target="sm_90").passes
        assert forward.rows == ("Hopper",)
        assert {"Hopper: d_query", of_keys} <= set(backward.rows)


QUERY = same(2, 8, 300, 128)
HEADS = (empty(4, 32, 4096, 128), empty(4, 8, 4096, 128), empty(4, 8, 4096, 128))
MASK = torch.empty(2, 1, 300, 300, dtype=torch.bool, device="meta")
ENDS = torch.empty(2, 1, 300, dtype=torch.int32, device="meta")
KEYS, QUERIES = "Hopper: d_key, d_value", "Hopper: d_query"
PORTABLE = ("portable: d_query, d_bias", "portable: d_key, d_value")
STORED = ("query terms", "portable, dS stored")
OF_FLOAT32 = ("query terms", "portable: d_key, d_value", "portable: d_query, d_bias of float32")

# name: tensors, options, target, rows of both passes, {a row: words of its refusal}
NAMED: dict[str, tuple[tuple[Tensor, ...], dict[str, Any], str, tuple[str, ...], tuple[str, ...], dict[str, str]]] = {
    "plain": (QUERY, {}, "sm_90", ("Hopper",), (QUERIES, KEYS), {"one tile": "serves up to 64 queries and 64 keys, not 300 and 300"}),
    "a mask whose rows are odd": (
        QUERY, dict(mask=MASK), "sm_90", ("Hopper",), (QUERIES, f"{KEYS}, pairs loaded"),
        {KEYS: "rows of mask: stride 300 is no multiple of 16: pad the key axis to a multiple of 16"},
    ),
    "intervals": (
        QUERY, dict(mask=IntervalMask(ENDS, ENDS, 300)), "sm_90", ("Hopper",), (QUERIES, f"{KEYS} by intervals"), {KEYS: "does not serve an IntervalMask"},
    ),
    "two intervals": (
        QUERY, dict(mask=IntervalMask(ENDS, ENDS, 300, ENDS, ENDS)), "sm_90", ("portable",), PORTABLE, {"Hopper": "does not serve two intervals a key"},
    ),
    "a learned score per key, heads that share keys": (
        HEADS, dict(bias=empty(4, 8, 1, 4096), causal=True), "sm_90", ("Hopper",), (QUERIES, KEYS),
        {"one tile": "serves up to 64 queries and 64 keys", "whole rows": "does not serve causal or window"},
    ),
    "dropout": (QUERY, dict(dropout_p=0.1), "sm_90", ("portable",), PORTABLE, {"Hopper": "does not serve dropout", QUERIES: "does not serve dropout"}),
    "softcap": (QUERY, dict(softcap=30.0), "sm_90", ("Hopper",), (QUERIES, KEYS), {"whole rows": "does not serve softcap"}),
    "a large softcap": (QUERY, dict(softcap=300.0), "sm_90", ("portable",), PORTABLE, {"Hopper": "serves a softcap from 2**-40 to 256, not 300.0"}),
    "an Ampere GPU": (QUERY, {}, "sm_80", ("portable",), PORTABLE, {"Hopper": "is for sm_90, not sm_80"}),
    "one of AMD's": (QUERY, {}, "gfx942", ("portable",), PORTABLE, {"Hopper": "is for sm_90, not AMD's GPUs"}),
    "float32": (same(2, 8, 2100, 128, dtype=FP32), {}, "sm_90", ("portable",), OF_FLOAT32, {"portable, dS stored": "has no room in 128 MiB for dS of a batch entry"}),
    "short rows of float32": (same(2, 8, 300, 128, dtype=FP32), {}, "sm_90", ("portable",), STORED, {"Hopper": "query, key, value: float32 elements have more than 16 bits: convert to 16 bits"}),
    "head dim 100": (
        same(2, 8, 300, 100), {}, "sm_90", ("portable",), PORTABLE,
        {"Hopper": "rows of query, key, value: stride 100 is no multiple of 8: pad the dim axis to a multiple of 8 and pass a slice"},
    ),
    "head dim 100, padded": (
        tuple(x[..., :100] for x in same(2, 8, 300, 104)), {}, "sm_90", ("Hopper",), PORTABLE,
        {QUERIES: "head axis of out, d_out: stride 100 is no multiple of 8: pad value with zeros to a head dim that is a multiple of 8"},
    ),
    "an expanded bias": (
        QUERY, dict(bias=empty(1, 8, 300, 304).expand(2, -1, -1, -1)[..., :300]), "sm_90", ("Hopper, pairs loaded",),
        ("query terms", "Hopper: d_key, d_value, d_bias, pairs loaded", "portable: d_query of d_bias"),
        {"Hopper": "batch axis of bias: stride 0: it is expanded, give it a length of 1"},
    ),
    "decoding": (
        (empty(1, 32, 1, 128), empty(1, 8, 131072, 128), empty(1, 8, 131072, 128)), dict(causal=True), "sm_90", ("split keys",), PORTABLE,
        {QUERIES: "is for more than 64 queries, not 1"},
    ),
    "windows": (same(2048, 8, 64, 32), dict(bias=empty(1, 8, 64, 64)), "sm_90", ("one tile",), ("one tile",), {}),
    "rows of a pair representation": (
        same(256, 4, 384, 32), dict(bias=empty(1, 4, 384, 384)), "sm_90", ("Hopper",),
        ("query terms", "Hopper, bias on chip: d_query, d_bias", "Hopper, bias on chip: d_key, d_value"),
        {"one tile": "serves up to 64 queries and 64 keys, not 384 and 384"},
    ),
    "no key": (
        (QUERY[0], QUERY[1][:, :, :0], QUERY[2][:, :, :0]), {}, "sm_90", ("portable",), ("portable: d_query, d_bias",),
        {"Hopper": "there is no key"},
    ),
    "no query": ((QUERY[0][:, :, :0], *QUERY[1:]), {}, "sm_90", (), (), {}),
    "no batch": (tuple(x[:0] for x in QUERY), {}, "sm_90", (), (), {}),
    "float64": (same(2, 8, 300, 64, dtype=FP64), {}, "sm_90", ("PyTorch, in chunks of query rows",), ("PyTorch, in chunks of query rows",), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_named_calls_have_these_kernels_for_these_reasons(name: str) -> None:
    tensors, options, target, forward, backward, words = NAMED[name]
    explained = explain(*tensors, **options, target=target)
    assert [explained.target, *(one.rows for one in explained.passes)] == [target, forward, backward]
    told = {row: reason for one in explained.passes[::-1] for row, reason in one.refusals}
    assert {row: reason for row, reason in words.items() if not told[row].startswith(reason)} == {}
    for one in explained.passes:
        assert all(f'"{row}"' in str(one) for row in one.rows)
        assert all(f"    {reason}\n" in str(explained) for _, reasons in one.refusals for reason in reasons.split("; "))


@pytest.mark.parametrize(
    ("wanted", "rows"),
    [
        ("query", (QUERIES,)),
        ("key", ("query terms", KEYS)),
        ("bias", ("query terms", KEYS)),  # whose kernel sums dS by key
    ],
)
def test_the_backward_pass_is_that_of_the_inputs_that_require_a_gradient(wanted: str, rows: tuple[str, ...]) -> None:
    query, key, value, bias = *QUERY, empty(2, 8, 1, 300)
    tensors = {name: x.detach().requires_grad_(name == wanted) for name, x in dict(query=query, key=key, value=value, bias=bias).items()}
    assert explain(**tensors, target="sm_90").passes[1].rows == rows


def test_a_row_whose_name_has_other_results_says_what_it_makes() -> None:
    """The kernel for dQ is that for dBias, too, and is named so without a bias."""
    plain = explain(*QUERY, target="sm_80").passes
    assert [one.makes for one in plain] == [(("out",),), (("d_query",), ("d_key", "d_value"))]
    assert str(plain[1]).startswith('backward: "portable: d_query, d_bias" (makes d_query), "portable: d_key, d_value"\n')
    constant = explain(*(x.detach().requires_grad_() for x in QUERY), bias=empty(2, 8, 300, 300), target="sm_80").passes[1]
    assert constant.makes == plain[1].makes
    learned = explain(*QUERY, bias=empty(2, 8, 300, 300), target="sm_80").passes[1]
    assert learned.makes == ((), ("d_key", "d_value", "d_bias"), ("d_query",))
    assert "makes" not in str(learned)
    of_keys = explain(*QUERY, bias=empty(2, 8, 1, 300), sinks=empty(8), target="sm_90").passes[1]
    assert dict(zip(of_keys.rows, of_keys.makes, strict=True)) == {
        QUERIES: ("d_query",),
        KEYS: ("d_key", "d_value", "d_bias"),
        "d_sinks": ("d_sinks",),
    }
    assert f'"{QUERIES}", "{KEYS}" (makes d_key, d_value, d_bias), "d_sinks"\n' in str(of_keys)
    table = RelativeBias(empty(1, 8, 33, needs_grad=True), 16)
    ends = explain(*same(2, 8, 300, 16), bias=table, target="sm_80").passes[1]
    assert ends.makes[ends.rows.index("portable: d_query, d_bias")] == ()
    assert '"portable: d_query, d_bias" (makes what others read)' in str(ends)
    double = explain(*same(2, 8, 30, 64, dtype=FP64), target="sm_80").passes
    assert [one.makes for one in double] == [(("out",),), (("d_query", "d_key", "d_value"),)]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(target="h200"), ValueError, "target: expected a family of GPUs such as sm_80, sm_90"),
        (dict(target=90), ValueError, "target: expected a family of GPUs"),
        (dict(target="sm_120"), ValueError, "target: expected the number of multiprocessors beside sm_120, processors=N or"),
        (dict(processors=0), ValueError, "processors: expected a positive integer"),
        (dict(processors=True), ValueError, "processors: expected a positive integer"),
        (dict(is_causal=True), TypeError, "is_causal: expected causal"),
        (dict(return_lse=1), TypeError, "return_lse"),
        (dict(key=3), TypeError, "key: expected a torch.Tensor"),
        (dict(bias=empty(3, 8, 300, 300)), ValueError, "bias"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    given = dict(zip(("query", "key", "value"), QUERY, strict=True)) | dict(target="sm_90") | arguments
    with pytest.raises(error, match=words):
        explain(**given)


def test_a_cpu_has_no_processors_to_count() -> None:
    query = torch.zeros(1, 2, 40, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="processors: expected None for a call on a CPU, received 3"):
        explain(query, query, query, processors=3)


def test_tensors_of_no_device_need_a_target_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"target: expected a family such as .* for tensors on meta without a GPU"):
        explain(*QUERY)


def test_processors_decide_whether_keys_are_split() -> None:
    tensors = (empty(1, 40, 1, 128), empty(1, 40, 8192, 128), empty(1, 40, 8192, 128))
    assert explain(*tensors, target="sm_80").passes[0].rows == ("split keys",)
    assert explain(*tensors, target="sm_80", processors=39).passes[0].rows == ("portable",)


@pytest.mark.parametrize(
    ("query", "key", "dtype", "parts"),
    [
        ((1, 1, 2048, 128), (1, 1, 20000, 128), torch.float32, (8, 16)),
        ((1, 1, 2048, 128), (1, 1, 20000, 128), BF16, (8, 8)),
        ((1, 4, 1024, 192), (1, 4, 1024, 192), BF16, (1, 4)),
        ((24, 12, 1, 64), (24, 2, 65536, 64), BF16, (8, 1)),
        ((1, 2, 1024, 256), (1, 2, 1024, 256), torch.float32, (8, 4)),
        ((4, 16, 1024, 64), (4, 16, 1024, 64), BF16, (1, 1)),
    ],
    ids=str,
)
def test_parts_are_those_of_keys_that_are_split(query: tuple, key: tuple, dtype: torch.dtype, parts: tuple[int, int]) -> None:
    explained = explain(empty(*query, dtype=dtype), empty(*key, dtype=dtype), empty(*key, dtype=dtype), target="sm_90", processors=132)
    assert tuple(each.parts for each in explained.passes) == parts
    for each in explained.passes:
        assert (f"keys of each block of queries: in {each.parts} parts" in str(each)) == (each.parts > 1)


@pytest.mark.parametrize(
    ("query", "dtype", "causal", "parts"),
    [
        ((1, 2, 1024, 256), torch.float32, False, 8),
        ((1, 2, 1024, 128), torch.float32, True, 8),  # by the kernel that stores dS
        ((1, 2, 1024, 256), BF16, False, 1),
        ((4, 16, 1024, 64), torch.float32, False, 1),
    ],
    ids=str,
)
def test_query_parts_are_those_of_queries_that_are_split(query: tuple, dtype: torch.dtype, causal: bool, parts: int) -> None:
    forward, backward = explain(*(empty(*query, dtype=dtype) for _ in range(3)), causal=causal, target="sm_90", processors=132).passes
    assert (forward.query_parts, backward.query_parts) == (1, parts)
    assert (f"queries of each block of keys: in {parts} parts" in str(backward)) == (parts > 1)


def test_memory_has_the_parts_of_queries() -> None:
    """Two of dK and dV, 1 MiB each for (1, 1, 2048, 64) of both, beside two of dQ and the 4 bytes of a query's delta."""
    query, key = empty(1, 1, 8192, 64, dtype=torch.float32), empty(1, 1, 2048, 64, dtype=torch.float32)
    backward = explain(query, key, key, window=(128, 0), target="sm_90", processors=132).passes[1]
    assert backward.query_parts == 2
    assert backward.memory == 2 * 2 * 4 * key.numel() + backward.parts * 4 * query.numel() * (backward.parts > 1) + 4 * 8192


@not_interpreted
def test_a_cpu_has_the_kernel_of_pytorch_where_that_is_exact() -> None:
    query = torch.randn(2, 4, 32, 16)
    plain, capped = explain(query, query, query), explain(query, query, query, softcap=30.0)
    assert plain.target == capped.target == "cpu"
    assert plain.passes[0].rows == ("PyTorch's attention kernel for CPUs",)
    assert capped.passes[0].rows == plain.passes[1].rows == ("PyTorch, in chunks of query rows",)
    assert plain.passes[0].memory is None
    assert plain.passes[0].memory_besides == ()
    assert plain.passes[0].seconds is None


@not_interpreted
def test_a_cpu_reads_the_mask_in_both_passes_and_makes_no_states() -> None:
    query, mask = torch.randn(2, 4, 40, 16), torch.ones(40, 40, dtype=torch.bool)
    plain, masked = explain(query, query, query).passes, explain(query, query, query, mask=mask).passes
    assert [after.bytes - before.bytes for before, after in zip(plain, masked, strict=True)] == [40 * 40, 40 * 40]


def test_nothing_is_drawn_for_dropout() -> None:
    before = torch.random.get_rng_state()
    query = torch.randn(1, 1, 4, 16)
    between = torch.random.get_rng_state()
    explain(query, query, query, dropout_p=0.5, target="sm_90")
    assert not before.equal(between)
    assert between.equal(torch.random.get_rng_state())


class Allocated(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make inside, but for the one number that a kernel's programs draw their turns from."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(returned.alias_info for returned in func._schema.returns):  # neither a view nor in place
            made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in made if not (func is torch.ops.aten.zeros.default and x.numel() == 1))
        return result


@pytest.fixture(params=["sm_80", "sm_90"])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Tensors without storage stand for this GPU, and launches do nothing."""
    monkeypatch.setattr(JITFunction, "run", lambda *arguments, **named: None)
    with on_gpu(request.param):
        yield request.param


def options_of(problem: Problem) -> dict[str, Any]:
    again = problem.also_first, problem.also_last
    intervals = None if problem.first is None else IntervalMask(problem.first, problem.last, problem.query.shape[-2], *again)
    window = None if problem.left is problem.right is None else (problem.left, problem.right)
    mask: Any = intervals if problem.mask is None else problem.mask
    if problem.bits is not None:
        blocks, states = (x[(0,) * (x.ndim - 4)] for x in (problem.blocks, problem.states))  # with one leading axis, as callers have them
        mask = BlockMask(blocks, problem.bits, states, problem.query.shape[-2], problem.key.shape[-2])
    bias = problem.bias if problem.bias is None or problem.zero is None else RelativeBias(problem.bias[..., 0, :], problem.zero)
    return dict(
        mask=mask,
        bias=bias,
        window=window,
        scale=problem.scale,
        softcap=problem.softcap,
        dropout_p=problem.dropout_p,
        sinks=problem.sinks,
    )


@not_interpreted
def test_memory_is_that_which_the_passes_allocate(target: str) -> None:
    exact = 0
    named = (*CASES, *LARGE, *HOPPER)
    cases = [(case, BF16) for case in (*named, *WIDEST)] + [(case, FP32) for case in named[:: 1 if os.environ.get("DMATTN_FULL") else 3]]
    for head_dim, value_dim, keys in ((96, 128, 8000), (128, 256, 9000), (192, 128, 14000), (64, 128, 9000)):
        cases.append((Case(f"parts-{head_dim}-{value_dim}", 128, keys, batch=1, heads=8, head_dim=head_dim, value_dim=value_dim), BF16))
    for case, dtype in (*cases, *LAUNCHES, *FORWARD):
        problem = meta(case, dtype)
        if any(side is not None and side < 0 for side in (problem.left, problem.right)):  # aligned at the first key, as attention is not
            continue
        forward, backward = explain(problem.query, problem.key, problem.value, **options_of(problem), target=target, processors=132).passes
        out, lse, states = backend.allocate_forward(problem)  # as of a GPU with so many
        gradients = backend.allocate_backward(problem, [x is not None for x in learned_of(problem)])
        problem = problem.with_states(states)
        with Allocated() as by_forward:
            kernels.forward(problem, out, lse)
        with Allocated() as by_backward:
            kernels.backward(problem, out, lse, out, None, gradients)
        of_states = 0 if states is None else states.numel()
        for explained, allocated in ((forward, by_forward.bytes + of_states), (backward, by_backward.bytes)):
            assert explained.memory is not None
            if explained.memory_besides:
                assert explained.memory <= allocated, f"{case.name}: {explained}"
            else:
                assert explained.memory == allocated, f"{case.name}: {explained}"
                exact += allocated > 0
    assert exact > 20


PARTS, LISTS, COLUMNS = "parts of d_bias", "lists of blocks", "columns of the bias of keys"
BESIDES: tuple[tuple[Case, tuple[str, ...], tuple[str, ...]], ...] = (
    (Case("plain", 512, head_dim=64), (), ()),
    (Case("mask", 512, head_dim=64, mask="b1qk"), (LISTS,), (LISTS,)),
    (Case("documents", 512, head_dim=64, intervals="documents"), (LISTS,), (LISTS,)),
    (Case("one-tile-mask", 49, head_dim=32, mask="b1qk"), (), ()),
    (Case("bias-of-keys", 512, head_dim=64, bias="bh1k"), (COLUMNS,), (COLUMNS,)),
    (Case("table", 512, head_dim=64, bias="1hr", distances=65, zero=32), ("the table in float32",), ("the table in float32", PARTS)),
    (Case("shared-bias", 512, batch=8, head_dim=64, bias="1hqk"), (), ()),
    (Case("copied-bias", 501, batch=8, head_dim=64, bias="1hqk"), (), ()),
    (Case("shared-bias-on-chip", 384, batch=256, heads=4, head_dim=32, bias="1hqk"), (), (PARTS,)),
    (Case("sinks", 512, head_dim=64, sinks="random"), (), ("parts of d_sinks",)),
    (Case("decoding", 1, 8192, batch=1, head_dim=64), (), ()),
    (Case("decoding-mask", 1, 100, batch=32, heads=8, head_dim=64, mask="b11k"), (), (LISTS,)),
    (Case("decoding-mask-many", 1, 9000, batch=32, heads=8, kv_heads=4, head_dim=128, mask="b11k"), (LISTS,), (LISTS,)),
    (Case("few-queries", 128, 14000, batch=1, heads=8, head_dim=192, value_dim=128), (), ()),
)  # fmt: skip


@not_interpreted
@pytest.mark.parametrize(("case", "forward", "backward"), BESIDES, ids=lambda x: x.name if isinstance(x, Case) else "")
def test_memory_names_what_may_come_besides(case: Case, forward: tuple[str, ...], backward: tuple[str, ...]) -> None:
    problem = meta(case, BF16)
    passes = explain(problem.query, problem.key, problem.value, **options_of(problem), target="sm_90").passes
    assert [one.memory_besides for one in passes] == [forward, backward], passes
    for one in passes:
        assert ("not counted, where made: " + ", ".join(one.memory_besides) in str(one)) is bool(one.memory_besides)


@not_interpreted
def test_memory_has_the_copies_that_are_made_for_factors(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of query and key, and of their gradients: those of query and key themselves are views of these."""
    monkeypatch.setattr(factors, "_kernel_serves", lambda *tensors: True)  # as of tensors on the GPU that "meta" stands for
    monkeypatch.setattr(factors, "_columns", factors._columns.__wrapped__)  # which no record is made of
    given = dict(query=empty(2, 8, 300, 64), key=empty(2, 4, 200, 64), rows=empty(2, 1, 300, 5, dtype=FP32), cols=empty(4, 200, 5, dtype=FP32))
    value = empty(2, 4, 200, 64)
    for learned in (set(given), {"query"}, {"rows"}, {"rows", "cols"}):
        query, key, rows, cols = (x.detach().requires_grad_(name in learned) for name, x in given.items())
        bias = FactoredBias(rows, cols)
        with Allocated() as made:
            joined = factors.joined(query, key, value, bias, None, None)
        whole = explain(query, key, value, bias=bias, target=target)
        plain = explain(joined.query, joined.key, value, scale=joined.scale, target=target)
        (forward, backward), (plain_forward, plain_backward) = whole.passes, plain.passes
        assert [x.rows for x in whole.passes] == [x.rows for x in plain.passes]
        assert made.bytes == 2 * (joined.query.numel() + joined.key.numel())
        assert forward.memory == plain_forward.memory + made.bytes
        assert not forward.memory_besides
        of_gradients = 0
        for own, of_bias, x in ((query, rows, joined.query), (key, cols, joined.key)):
            if own.requires_grad:
                (gradient,) = torch.autograd.grad(x, own, torch.empty_like(x), retain_graph=True)
                assert gradient.untyped_storage().nbytes() == x.untyped_storage().nbytes()
                of_gradients += 2 * (x.numel() - own.numel())
            elif of_bias.requires_grad:
                of_gradients += 2 * x.numel()
        assert backward.memory == plain_backward.memory + of_gradients
    monkeypatch.undo()
    halves = [given[name].half() for name in ("query", "key")]
    bias = FactoredBias(given["rows"], given["cols"])
    assert not any(one.memory_besides for one in explain(*halves, value.half(), bias=bias, target=target).passes)
    more_axes = [x[:, None] for x in (given["query"], given["key"], value)]
    assert all(
        "factors in float32" in one.memory_besides
        for one in explain(*more_axes, bias=FactoredBias(given["rows"][:, None], given["cols"]), target=target).passes
    )


SHAPES = {"square": (7, 7), "more keys": (3, 9), "more queries": (9, 4)}
RULES: tuple[dict[str, Any], ...] = (
    {}, dict(causal=True), dict(window=2), dict(window=(1, 0)), dict(window=(None, 1)), dict(causal=True, window=(0, None)),
)  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rules", RULES)
def test_products_and_bytes_are_those_of_the_pairs_that_are_visible(shape: str, rules: dict[str, Any]) -> None:
    len_q, len_k = SHAPES[shape]
    query, key, value = torch.randn(2, 6, len_q, 8), torch.randn(2, 3, len_k, 8), torch.randn(2, 3, len_k, 24)
    bias = torch.zeros(1, 6, len_q, len_k, dtype=torch.float16)
    seen = visible(len_q, len_k, rules)
    pairs, queries = int(seen.sum()), int(seen.any(1).sum())
    forward, backward = explain(query, key, value, bias=bias, **rules, target="sm_80").passes
    assert forward.rows == ("split keys" if len_q <= 8 else "one tile",)
    stored = rules.get("window", (None, None)) in ((None, None), (None, 1))  # no bound before a query
    assert backward.rows == (STORED if stored else (*OF_FLOAT32, "portable: d_bias"))
    products = 2 * pairs * 2 * 6  # operations for each element of a head
    assert forward.flops == products * (8 + 24)
    # d_key and d_value: scores, dP, dV, dK; d_query: dQ; and where no dS is stored, scores, dP, and those for d_bias again
    assert backward.flops == products * ((8 + 24 + 24 + 8) + 8 + (0 if stored else 2 * (8 + 24)))
    keys = len_k - int(seen.any(0).nonzero()[0])  # all from the first that is seen
    read = 4 * (2 * 6 * queries * 8 + 2 * 3 * keys * (8 + 24)) + 2 * 6 * pairs
    out, lse = 4 * 2 * 6 * len_q * 24, 4 * 2 * 6 * len_q
    assert forward.bytes == read + out + lse
    gradients = sum(x.numel() * x.element_size() for x in (query, key, value, bias))
    assert backward.bytes == read + 4 * 2 * 6 * queries * (24 + 24 + 1) + gradients


def visible(len_q: int, len_k: int, rules: dict[str, Any]) -> Tensor:
    """(Sq, Sk): the pairs whose bias changes lse in the reference."""
    query, value = torch.zeros(1, 1, len_q, 1, dtype=FP64), torch.arange(1.0, len_k + 1, dtype=FP64).view(1, 1, -1, 1)
    bias = torch.zeros(1, 1, len_q, len_k, dtype=FP64, requires_grad=True)
    _, lse = dmattn.reference.attention(query, torch.zeros_like(value), value, bias=bias, return_lse=True, **rules)
    lse[lse.isfinite()].sum().backward()
    assert bias.grad is not None
    return bias.grad[0, 0] > 0


def test_five_products_are_those_of_a_backward_pass_that_repeats_none() -> None:
    explained = explain(*same(2, 3, 40, 16), target="sm_80").passes[1]
    assert (explained.rows, explained.flops) == (("one tile",), 5 * 2 * 2 * 3 * 40 * 40 * 16)


@pytest.mark.parametrize("rules", RULES)
def test_the_gradient_of_a_table_has_the_products_of_pairs_between_its_ends(rules: dict[str, Any]) -> None:
    query, key, table = empty(2, 3, 9, 16), empty(2, 3, 7, 16), empty(3, 5, dtype=FP32, needs_grad=True)
    explained = explain(query, key, key, bias=RelativeBias(table, 3), **rules, target="sm_80").passes[1]
    assert explained.rows == ("portable: d_query, d_bias", "portable: d_bias of distances")
    seen = visible(9, 7, rules)
    distance = torch.arange(7) - torch.arange(9)[:, None] + 2
    between = seen & (distance + 3 > 0) & (distance + 3 < 4)
    assert explained.flops == 2 * 2 * 3 * 2 * 16 * int(seen.sum() + between.sum())


def test_a_broadcast_axis_is_read_once() -> None:
    expanded = empty(1, 8, 1, 128).expand(2, 8, 300, 128)
    plain, read_once = explain(*QUERY, target="sm_90").passes[0], explain(QUERY[0], expanded, QUERY[2], target="sm_90").passes[0]
    assert plain.bytes - read_once.bytes == 2 * (2 * 300 - 1) * 8 * 128


def test_time_is_the_larger_of_products_and_bytes_at_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = explain(*same(1, 1, 8192, 128), target="sm_90").passes[0], explain(*same(64, 64, 16, 128), target="sm_90").passes[0]
    assert long.seconds == pytest.approx(4 * 8192**2 * 128 / 989e12)
    assert short.seconds == pytest.approx(short.bytes / 4.8e12)
    wide = same(1, 1, 8192, 128, dtype=FP32)
    for precision, of_nvidia in (("bf16x6", 989e12 / 6), ("tf32", 989e12 / 2), ("ieee", 67e12)):
        monkeypatch.setattr(targets, "dot_precision", lambda dtype, precision=precision: precision)
        assert explain(*wide, target="sm_90").passes[0].seconds == pytest.approx(4 * 8192**2 * 128 / of_nvidia)
        assert explain(*wide, target="gfx942").passes[0].seconds == pytest.approx(4 * 8192**2 * 128 / 163.4e12)
    assert explain(*QUERY, target="sm_120", processors=170).passes[0].seconds is None


@pytest.mark.parametrize(("target", "is_scanned"), [("sm_90", True), ("sm_80", False)])
def test_a_backward_pass_by_bits_reads_its_mask_again(target: str, is_scanned: bool) -> None:
    """Kernels of other GPUs go by states of the forward pass, which may say that nothing is hidden."""
    mask = torch.empty((10, 2, 2000, 2000), dtype=torch.bool, device="meta")
    masked, plain = (explain(*same(10, 2, 2000, 24), mask=given, target=target).passes[1] for given in (mask, None))
    states = 10 * 2 * 63 * 63
    assert masked.bytes - plain.bytes == states + (mask.numel() if is_scanned else 0)
    mask = torch.empty((512, 12, 49, 49), dtype=torch.bool, device="meta")  # in one tile, by bytes
    masked, plain = (explain(*same(512, 12, 49, 32), mask=given, target=target).passes[1] for given in (mask, None))
    assert masked.rows[0] == "one tile"
    assert masked.bytes - plain.bytes == mask.numel() + 512 * 12 * 2 * 2


def test_lse_that_is_returned_brings_a_gradient_to_read() -> None:
    with_lse, without = (explain(*QUERY, return_lse=given, target="sm_90") for given in (True, False))
    assert with_lse.passes[1].bytes - without.passes[1].bytes == 2 * 8 * 300 * 4
    assert with_lse.passes[0] == without.passes[0]


def test_options_are_those_of_attention() -> None:
    options = dict(attention.__kwdefaults__)
    assert explain(*QUERY, **options, target="sm_90") == explain(*QUERY, target="sm_90")
