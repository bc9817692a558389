"""Which problems the kernels for Hopper take, and that a GPU of that kind uses them; what they compute is tested by cases.HOPPER."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import NEEDS_CUDA, needs_cuda
from torch import Tensor

from dmattn import BlockMask, IntervalMask, RelativeBias, attention, attention_varlen
from dmattn.equivalence import Case, check
from dmattn.execution import replay
from dmattn.problem import Gradients, Problem

pytest.importorskip("triton", reason="the kernels need Triton")

from dmattn.kernels import dispatch
from dmattn.kernels.base import leading
from dmattn.kernels.hopper import backward_sizes, forward_sizes, walk
from dmattn.kernels.hopper import bias_grad as hopper_bias_grad
from dmattn.kernels.hopper import copies as hopper
from dmattn.kernels.hopper import forward as hopper_forward
from dmattn.kernels.hopper import key_grad as hopper_key_grad
from dmattn.kernels.hopper import key_grad_intervals as hopper_key_grad_intervals
from dmattn.kernels.hopper import query_grad as hopper_query_grad
from dmattn.kernels.hopper import shared_query_grad as hopper_shared_query_grad
from dmattn.kernels.traits import Traits

LENGTH = 128


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def problem(head_dim: int = 128, length: int = LENGTH, kv_heads: int = 2, **given) -> Problem:
    query, key, value = tensor(2, 4, length, head_dim), tensor(2, kv_heads, length, head_dim), tensor(2, kv_heads, length, head_dim)
    arguments = dict(query=query, key=key, value=value, mask=None, bias=None, causal=False, window=None, scale=None, softcap=None) | given
    return Problem.canonical(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)


ROWS = {row.name: row for row in (*dispatch.FORWARD, *dispatch.BACKWARD)}


def serves(row: str, one: Problem, d_out: Tensor | None = None, d_bias: Tensor | None = None, processors: int = 132) -> bool:
    """Whether a row of the table serves a problem on a Hopper GPU, where `d_out` and `out` lie as its queries do."""
    d_out = one.query if d_out is None else d_out
    traits = Traits.of(one, one.query, d_out, Gradients(bias=d_bias), target=("sm_90", processors))
    return ROWS[row].refusal(traits._replace(gluon=True)) is None


@pytest.mark.parametrize(
    "given",
    [
        dict(),
        dict(causal=True, window=(20, 0)),
        dict(head_dim=72),
        dict(bias=tensor(2, 4, LENGTH, LENGTH)),
        dict(bias=tensor(1, 2, LENGTH, LENGTH, dtype=torch.float16)),
        dict(bias=tensor(1, 1, 1, LENGTH + 1, dtype=torch.float32)[..., 1:]),
        dict(query=tensor(2, LENGTH, 4, 128).transpose(1, 2)),
        dict(length=131),
    ],
    ids=["plain", "window", "padded", "pairs", "shared-fp16", "by-key-fp32", "models-layout", "odd-length"],
)
def test_takes(given: dict) -> None:
    one = problem(**given)
    assert serves("Hopper", one)
    assert serves("Hopper: d_query", one)
    assert serves("Hopper: d_key, d_value", one)
    assert serves("Hopper: d_bias", one) == (one.bias is None or one.bias.shape[2] > 1)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(256, 256), (192, 128), (136, 40), (64, 256)])
@pytest.mark.parametrize("bias", [None, tensor(1, 4, LENGTH, LENGTH)], ids=["plain", "bias"])
def test_takes_wide_heads_but_for_d_query_and_a_shared_bias_at_once(head_dim: int, value_dim: int, bias: Tensor | None) -> None:
    one = problem(head_dim, value=tensor(2, 2, LENGTH, value_dim), bias=bias)
    out = tensor(2, 4, LENGTH, value_dim)
    assert serves("Hopper", one, out)
    assert serves("Hopper: d_query", one, out)
    assert serves("Hopper: d_key, d_value", one, out)
    assert serves("Hopper: d_bias", one, out)
    assert not serves("Hopper: d_query, d_bias", one, out)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("bias", [None, tensor(1, 4, LENGTH, LENGTH)], ids=["plain", "bias"])
@pytest.mark.parametrize("kind", ["pairs", "odd rows", "keys"])
def test_takes_masks(kind: str, bias: Tensor | None, head_dim: int) -> None:
    """But with head dims of 64 for dQ of few keys without a bias, and for dBias under a mask of keys."""
    masks = {
        "pairs": torch.ones(LENGTH, LENGTH, dtype=torch.bool),
        "odd rows": torch.ones(LENGTH, LENGTH + 1, dtype=torch.bool)[:, :LENGTH],
        "keys": torch.ones(2, 1, 1, LENGTH, dtype=torch.bool),
    }
    one = problem(mask=masks[kind], bias=bias, head_dim=head_dim)
    assert serves("Hopper", one)
    assert serves("Hopper: d_query", one) == (head_dim > 64 or bias is not None)
    assert serves("Hopper: d_key, d_value", one) == (kind != "odd rows")
    assert serves("Hopper: d_key, d_value, pairs loaded", one)
    assert not serves("Hopper: d_key, d_value by intervals", one)
    assert serves("Hopper: d_bias", one) == (kind != "keys" or head_dim > 64)


@pytest.mark.parametrize(
    "bias",
    [
        tensor(1, 4, LENGTH, LENGTH, dtype=torch.float32),
        tensor(1, 4, LENGTH, LENGTH + 4)[..., :LENGTH],
        tensor(1, 4, LENGTH, LENGTH).mT,
        tensor(1, 4, LENGTH, LENGTH + 8)[..., 4 : LENGTH + 4],
        tensor(1, 4, LENGTH, 1).expand(2, 4, LENGTH, LENGTH),
    ],
    ids=["float32", "rows-unaligned", "transposed", "begins-unaligned", "expanded"],
)
def test_a_bias_that_the_copy_engine_cannot_address_is_loaded_but_under_intervals(bias: Tensor) -> None:
    one, within = problem(bias=bias), problem(bias=bias, mask=IntervalMask.causal(LENGTH, LENGTH))
    for row in ("Hopper", "Hopper: d_query", "Hopper: d_key, d_value", "Hopper: d_bias"):
        assert not serves(row, one)
        assert serves(f"{row}, pairs loaded", one)
        assert not serves(f"{row}, pairs loaded", within)


def test_takes_intervals() -> None:
    one = problem(mask=IntervalMask.causal(LENGTH, LENGTH))
    assert serves("Hopper", one)
    assert serves("Hopper: d_query", one)
    assert serves("Hopper: d_key, d_value by intervals", one)
    assert not serves("Hopper: d_key, d_value", one)
    for head_dim in (64, 128):
        other = problem(mask=IntervalMask.causal(LENGTH, LENGTH), bias=tensor(1, 4, LENGTH, LENGTH), head_dim=head_dim)
        assert serves("Hopper: d_bias", other) == (head_dim > 64)


@pytest.mark.parametrize(
    "given",
    [
        dict(query=tensor(2, 4, LENGTH, 128, dtype=torch.float32), key=tensor(2, 2, LENGTH, 128, dtype=torch.float32), value=tensor(2, 2, LENGTH, 128, dtype=torch.float32)),
        dict(softcap=500.0),
        dict(dropout_p=0.1),
        dict(value=tensor(2, 2, LENGTH, 32)),
        dict(length=64),
        dict(bias=tensor(1, 4, LENGTH, LENGTH, dtype=torch.float32)),
        dict(bias=tensor(1, 4, LENGTH, LENGTH + 4)[..., :LENGTH]),
        dict(bias=tensor(1, 4, LENGTH, LENGTH).mT),
        dict(bias=tensor(1, 4, LENGTH, LENGTH + 8)[..., 4 : LENGTH + 4]),
        dict(key=tensor(2, 1, LENGTH, 128).expand(2, 2, LENGTH, 128)),
        dict(query=tensor(2, 4, LENGTH, 132)[..., :128]),
    ],
    ids=[
        "float32", "softcap", "dropout", "other-values", "few-queries", "bias-float32", "bias-rows-unaligned",
        "bias-transposed", "bias-begins-unaligned", "expanded-key", "rows-unaligned",
    ],
)  # fmt: skip
def test_leaves(given: dict) -> None:
    one = problem(**given)
    assert not serves("Hopper", one)
    assert not serves("Hopper: d_query", one)
    assert not serves("Hopper: d_key, d_value", one)
    assert not serves("Hopper: d_key, d_value by intervals", one)
    assert not serves("Hopper: d_bias", one)


def test_a_bias_whose_keys_lie_far_apart_is_left() -> None:
    """Further than 32-bit offsets in a tile reach; without storage, on the meta device."""
    far = torch.empty((1, 1, 1, LENGTH << 22), dtype=torch.bfloat16, device="meta")[..., :: 1 << 22]
    query = torch.empty((2, 4, LENGTH, 128), dtype=torch.bfloat16, device="meta")
    assert not serves("Hopper", problem(query=query, key=query, value=query, bias=far))
    assert serves("Hopper", problem(query=query, key=query, value=query, bias=far.contiguous()))


def test_head_dims_to_64_are_taken_where_they_gain() -> None:
    one = problem(head_dim=64)
    long = problem(head_dim=64, length=2048)
    for other in (one, long, long._replace(right=0), long._replace(right=0, left=100)):
        assert serves("Hopper", other)
    assert serves("Hopper", problem(head_dim=64, mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool)))
    for pitch in (304, 300):  # rows that the copy engine reads for dK and dV, and others
        assert serves("Hopper: d_query", problem(head_dim=64, length=300, mask=torch.ones(300, pitch, dtype=torch.bool)[:, :300]))
    for length, window, served in ((256, None, False), (257, None, True), (2048, 255, False), (2048, 256, True)):
        other = problem(head_dim=64, length=length)
        assert serves("Hopper: d_query", other if window is None else other._replace(right=0, left=window)) == served
    assert serves("Hopper", problem(head_dim=64, length=2048, bias=tensor(2, 1, 1, 2048)))
    assert serves("Hopper", problem(head_dim=64, length=2048, bias=tensor(1, 1, 2048, 2048)))
    assert serves("Hopper: d_query", problem(head_dim=64, bias=tensor(1, 4, LENGTH, LENGTH)))
    assert serves("Hopper: d_key, d_value", one)


def test_head_dims_to_32_are_taken_where_they_gain() -> None:
    odd, whole = (problem(head_dim=32, length=length) for length in (1100, 2048))
    for row in ("Hopper", "Hopper: d_query", "Hopper: d_key, d_value"):
        assert serves(row, odd)
        assert serves(row, whole) == (row == "Hopper: d_key, d_value")  # few programs, and no tile at an edge
        assert serves(row, whole._replace(right=0))
        assert serves(row, problem(head_dim=32, length=2048, mask=torch.ones(2048, 2048, dtype=torch.bool)))
        assert serves(row, problem(head_dim=32, length=2048, bias=tensor(1, 1, 2048, 2048)))
        assert serves(row, problem(head_dim=32, length=1100, bias=tensor(1, 4, 1, 1100)))
        assert not serves(row, problem(head_dim=32, length=700, mask=torch.ones(700, 700, dtype=torch.bool)))  # too few pairs
        assert serves(row, problem(head_dim=32, length=130, bias=tensor(1, 4, 130, 136)[..., :130]))
    many = problem(head_dim=32, length=1024)
    assert serves("Hopper", many)
    assert not serves("Hopper: d_query", many)
    assert not serves("Hopper: d_bias", problem(head_dim=32, bias=tensor(1, 4, LENGTH, LENGTH)))


def test_head_dims_to_16_are_taken_where_they_gain() -> None:
    one = problem(head_dim=16, length=1100)
    keeping = problem(head_dim=16, length=1100, mask=torch.ones(1100, 1104, dtype=torch.bool)[:, :1100])
    biased = problem(head_dim=16, length=1100, bias=tensor(1, 4, 1100, 1104)[..., :1100])
    assert [serves("Hopper", x) for x in (one, keeping, biased)] == [False, True, True]
    assert [serves("Hopper: d_query", x) for x in (one, keeping, biased)] == [False, False, True]
    assert all(serves("Hopper: d_key, d_value", x) for x in (one, keeping, biased))


def test_packed_sequences_without_a_key_are_not_taken() -> None:
    ends = torch.tensor((0, 100, 200))
    packed = problem(query=tensor(1, 4, 200, 128), key=tensor(1, 2, 200, 128), value=tensor(1, 2, 200, 128))
    packed = packed._replace(bias=tensor(2, 4, 128, 128), ends_q=ends, ends_k=ends, longest_q=128, longest_k=128)
    assert serves("Hopper", packed)
    assert not serves("Hopper", packed._replace(key=tensor(1, 2, 0, 128), value=tensor(1, 2, 0, 128), ends_k=0 * ends))


@pytest.mark.parametrize(
    ("batch", "head_dim", "bias_shape", "processors", "taken"),
    [
        (4, 64, (1, 4), 8, True),
        (4, 40, (1, 4), 8, True),
        (2, 64, (2, 2), 8, True),
        (2, 128, (1, 4), 8, True),
        (3, 128, (1, 4), 8, False),
        (4, 128, (1, 4), 11, True),
        (5, 128, (1, 4), 8, False),
        (5, 64, (1, 4), 8, True),
        (2, 64, (1, 1), 2, True),
        (9, 64, (1, 4), 8, False),
        (4, 64, (1, 4), 9, False),
        (4, 128, (1, 4), 12, False),
        (4, 128, (1, 4), 7, False),
        (4, 128, (1, 4), 4, True),
    ],
    ids=[
        "four",
        "four-padded",
        "two-heads",
        "two-wide",
        "three-wide",
        "four-wide",
        "five-wide",
        "five",
        "eight",
        "nine",
        "few-programs",
        "few-of-wide",
        "second-round-nearly-empty",
        "two-rounds",
    ],
)
def test_dbias_is_made_with_dq_where_few_share_it_and_fill_the_gpu(
    batch: int, head_dim: int, bias_shape: tuple[int, int], processors: int, taken: bool
) -> None:
    query, key, bias = tensor(batch, 4, LENGTH, head_dim), tensor(batch, 2, LENGTH, head_dim), tensor(*bias_shape, LENGTH, LENGTH)
    one = problem(query=query, key=key, value=key, bias=bias)
    assert serves("Hopper: d_query, d_bias", one, query, bias, processors) == taken
    assert not serves("Hopper: d_query, d_bias", one, query, bias.float(), processors)
    assert not serves("Hopper: d_query, d_bias", one, query[..., :1].expand(query.shape), bias, processors)
    masked = one._replace(mask=torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool))
    assert not serves("Hopper: d_query, d_bias", masked, query, bias, processors)


def test_an_incoming_gradient_that_is_expanded_is_left() -> None:
    one = problem()
    assert not serves("Hopper: d_key, d_value", one, tensor(1, 1, 1, 1).expand(one.query.shape))
    assert not serves("Hopper: d_bias", one, tensor(1, 1, 1, 1).expand(one.query.shape))


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-40, math.nextafter(2.0**-64, 0.0), math.nextafter(2.0**64, math.inf)])
def test_a_scale_that_turns_products_round_or_away_is_left(scale: float) -> None:
    assert serves("Hopper", problem(scale=2.0**-64))
    assert serves("Hopper", problem(scale=2.0**64))
    one = problem(scale=scale)
    assert not serves("Hopper", one)
    assert not serves("Hopper: d_query", one)
    assert not serves("Hopper: d_key, d_value", one)


@pytest.mark.parametrize(
    ("scale", "dtype", "exactly"),
    [
        (0.125, torch.bfloat16, True),
        (1.0, torch.bfloat16, True),
        (1.0, torch.float16, True),
        (0.125, torch.float16, False),  # small numbers lose digits
        (2.0, torch.bfloat16, False),  # large ones would be infinite
        (128**-0.5, torch.bfloat16, False),
    ],
)
def test_queries_are_scaled_where_that_leaves_all_digits(scale: float, dtype: torch.dtype, exactly: bool) -> None:
    query = tensor(1, 2, 128, 64, dtype=dtype)
    assert hopper_forward.scales_exactly(problem(query=query, key=query, value=query, scale=scale)) == exactly


@pytest.mark.parametrize(
    ("longest", "sequences", "total", "head_dim", "options", "tiles"),
    [
        (1114, 16, 8192, 64, {}, (1, 64)),
        (512, 16, 8192, 64, {"causal": True}, (1, 64)),
        (4096, 4, 16384, 64, {"bias": (1, 4, 4096, 4096)}, (1, 64)),
        (4096, 4, 16384, 64, {}, (3, 128)),
        (512, 16, 8192, 128, {}, (1, 64)),
        (1024, 8, 8192, 128, {}, (2, 128)),
        (1024, 8, 8192, 128, {"causal": True}, (1, 64)),
        (4096, 4, 16384, 128, {"causal": True}, (2, 128)),
        # one sequence has almost all tokens: tiles are those of its length
        (8192, 64, 8192, 64, {}, (3, 128)),
        (8192, 301, 20192, 64, {"causal": True}, (3, 128)),
    ],
)
def test_tiles_of_packed_sequences_follow_their_lengths(
    longest: int, sequences: int, total: int, head_dim: int, options: dict, tiles: tuple[int, int]
) -> None:
    query = tensor(1, 4, total, head_dim)
    bias = None if "bias" not in options else tensor(*options["bias"])
    one = problem(query=query, key=query, value=query, packed=(sequences, longest, longest), **{**options, "bias": bias})
    ends = torch.zeros(sequences + 1, dtype=torch.int64)
    one = leading.flattened(one._replace(ends_q=ends, ends_k=ends, longest_q=longest, longest_k=longest))[0]
    assert forward_sizes.sizes_of(one, head_dim, head_dim, loaded=False)[:2] == tiles


@pytest.mark.parametrize(
    ("length", "head_dim", "options", "sizes"),
    [
        (1024, 64, {}, (1, 64, 3, 3)),
        (2048, 64, {}, (3, 128, 2, 1)),
        (2048, 64, {"causal": True}, (1, 64, 3, 3)),
        (4096, 64, {"causal": True}, (3, 128, 2, 1)),
        (4096, 64, {"causal": True, "window": (1023, 0)}, (1, 64, 3, 3)),
        (4096, 64, {"bias": (1, 4, 4096, 4096)}, (1, 64, 2, 3)),
        (4096, 32, {"bias": (1, 4, 4096, 4096)}, (2, 64, 3, 2)),
        (4096, 32, {"bias": (1, 4, 4096, 4096), "causal": True}, (1, 64, 3, 4)),
        (4096, 32, {}, (3, 64, 4, 1)),
        (512, 128, {}, (1, 64, 2, 2)),
        (1024, 128, {}, (2, 128, 2, 1)),
        (1024, 128, {"bias": (1, 4, 1024, 1024)}, (1, 64, 2, 2)),
        (512, 80, {}, (2, 64, 3, 1)),
        (257, 80, {}, (1, 64, 2, 2)),
        (257, 72, {}, (2, 64, 3, 1)),
        (600, 80, {"bias": (1, 4, 600, 600)}, (1, 64, 2, 2)),
        (512, 256, {}, (2, 64, 2, 1)),
        (512, 160, {}, (2, 64, 2, 1)),
    ],
)
def test_programs_have_one_consumer_where_queries_meet_few_keys(
    length: int, head_dim: int, options: dict, sizes: tuple[int, int, int, int]
) -> None:
    bias = {"bias": tensor(*options["bias"])} if "bias" in options else {}
    one = leading.flattened(problem(head_dim, length, **options | bias))[0]
    assert forward_sizes.sizes_of(one, *hopper.forward_dims(one), loaded=False) == sizes


@pytest.mark.parametrize(
    ("batch", "heads", "length", "head_dim", "options", "sizes"),
    [
        (9, 3, 1536, 40, {}, (3, 64, 3, 1)),  # 2 rounds of 192 rows a processor, or of 256
        (8, 12, 1024, 40, {}, (2, 64, 2, 2)),  # 5, or 3
        (1, 16, 6000, 48, {}, (3, 64, 3, 1)),  # 4, or 3
        (4, 8, 2048, 48, {}, (2, 64, 2, 2)),  # 3, or 2
        (4, 16, 2048, 40, {"bias": None, "mask": True}, (2, 128, 2, 1)),
        (4, 16, 2048, 48, {"bias": None, "mask": True}, (1, 64, 3, 3)),
        (4, 8, 2048, 40, {"causal": True}, (3, 64, 3, 1)),  # whose programs draw their blocks, so that no round is whole
        (8, 12, 1024, 48, {}, (1, 64, 2, 3)),  # of whole sectors, over few keys
        (8, 12, 1024, 64, {}, (1, 64, 2, 3)),
        (1, 4, 1024, 40, {}, (1, 64, 2, 3)),  # too few blocks
        (8, 12, 1024, 40, {"window": (200, 0)}, (1, 64, 2, 3)),
    ],
)
def test_padded_heads_beside_a_bias_or_mask_of_pairs_share_copies(
    batch: int, heads: int, length: int, head_dim: int, options: dict, sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One consumer a program took up to 1.6 times as long (docs/history.md)."""
    monkeypatch.setattr(forward_sizes, "processors", lambda device: 132)
    tokens = tensor(1, 1, 1, head_dim).expand(batch, heads, length, head_dim)
    given = dict(bias=tensor(1, 1, 1, 1).expand(1, heads, length, length)) | options
    if "mask" in options:
        given["mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(batch, 1, length, length)
    one = leading.flattened(problem(query=tokens, key=tokens, value=tokens, **given))[0]
    assert forward_sizes.sizes_of(one, *hopper.forward_dims(one), loaded=False) == sizes
    if given["bias"] is not None:
        assert forward_sizes.sizes_of(one, *hopper.forward_dims(one), loaded=True).consumers == 1


@pytest.mark.parametrize(
    ("batch", "heads", "length", "sizes"),
    [
        (512, 8, 128, (2, 64, 3, 2)),
        (512, 8, 160, (1, 64, 3, 4)),  # 0.139 ms, by two consumers a program 0.222
        (512, 8, 192, (1, 64, 3, 4)),  # the second block of 128 queries half empty
        (372, 8, 200, (1, 64, 3, 4)),
        (256, 4, 384, (2, 64, 3, 2)),
        (64, 8, 520, (1, 64, 3, 4)),
        (8, 8, 2240, (2, 64, 3, 2)),  # one of 36 consumers is idle
    ],
)
def test_two_narrow_consumers_share_a_program_where_blocks_are_full(
    batch: int, heads: int, length: int, sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_sizes, "processors", lambda device: 132)
    tokens = tensor(1, 1, 1, 32).expand(batch, heads, length, 32)
    one = leading.flattened(problem(query=tokens, key=tokens, value=tokens, bias=tensor(1, 1, 1, 1).expand(1, heads, length, length)))[0]
    assert forward_sizes.sizes_of(one, *hopper.forward_dims(one), loaded=False) == sizes


@pytest.mark.parametrize(
    ("batch", "heads", "len_q", "len_k", "options", "sizes"),
    [
        (1, 16, 2048, 2048, {}, (1, 128, 2, 2)),  # 0.043 ms, by three consumers 0.054
        (1, 12, 2048, 2048, {}, (3, 128, 2, 1)),  # 0.032 ms, by programs of one 0.042
        (1, 20, 2048, 2048, {}, (3, 128, 2, 1)),
        (1, 4, 8192, 8192, {}, (1, 128, 2, 2)),
        (4, 32, 4096, 4096, {}, (3, 128, 2, 1)),
        (1, 16, 2048, 2048, {"bias": (1, 16, 1, 2048)}, (1, 128, 2, 2)),
        (1, 16, 2048, 2048, {"bias": (1, 16, 2048, 2048)}, (1, 64, 2, 3)),
        (1, 16, 2048, 2048, {"window": (1500, 1500)}, (1, 64, 3, 3)),
        (2, 12, 512, 8192, {}, (1, 128, 2, 2)),  # three would leave rows idle
        (1, 16, 2048, 2048, {"causal": True}, (1, 128, 2, 2)),  # two rounds
        (1, 20, 2048, 2048, {"causal": True}, (1, 64, 3, 3)),
        (1, 4, 8192, 8192, {"causal": True}, (1, 128, 2, 2)),  # the longest blocks are all that counts
        (4, 32, 4096, 4096, {"causal": True}, (3, 128, 2, 1)),
        (1, 16, 1024, 1024, {}, (1, 64, 3, 3)),
        (4, 16, 256, 256, {"causal": True}, (1, 64, 3, 3)),
        (1, 40, 128, 8192, {}, (2, 128, 2, 1)),  # in three parts of the keys
        (1, 4, 300, 8192, {}, (3, 128, 2, 1)),
        (1, 2, 4096, 4096, {"causal": True}, (3, 128, 2, 1)),
        (1, 4, 2048, 2048, {}, (1, 128, 2, 2)),  # not split: 0.019 ms, by three consumers 0.029
    ],
)
def test_programs_of_one_consumer_where_blocks_of_three_are_few_in_a_round(
    batch: int, heads: int, len_q: int, len_k: int, options: dict, sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (forward_sizes, walk):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    query, key = (tensor(1, 1, 1, 64).expand(batch, heads, length, 64) for length in (len_q, len_k))
    bias = {"bias": tensor(1, 1, 1, 1).expand(*options["bias"])} if "bias" in options else {}
    one = leading.flattened(problem(query=query, key=key, value=key, **options | bias))[0]
    assert forward_sizes.sizes_of(one, *hopper.forward_dims(one), loaded=False) == sizes


@pytest.mark.parametrize(
    ("batch", "heads", "length", "consumers"),
    [(1, 16, 2048, 1), (1, 12, 2048, 3), (1, 20, 2048, 3), (1, 4, 8192, 2), (1, 6, 8192, 3), (4, 32, 4096, 3)],
)
def test_keys_have_three_consumers_where_their_rounds_end_sooner(
    batch: int, heads: int, length: int, consumers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward_sizes, "processors", lambda device: 132)
    tokens = tensor(1, 1, 1, 64).expand(batch, heads, length, 64)
    one = problem(query=tokens, key=tokens, value=tokens)
    assert backward_sizes.key_sizes(one, None).consumers == consumers
    narrow = tokens[..., :32]  # was not timed
    assert backward_sizes.key_sizes(problem(query=tokens, key=tokens, value=narrow), None).consumers == 3


def test_keys_are_split_whatever_the_layout_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of one consumer would be so many that keys had fewer parts; `out` lies dense where no single stride walks the queries."""
    for module in (forward_sizes, walk):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    key = tensor(1, 1, 1, 1, 1).expand(2, 2, 1, 16384, 64)
    for query in (tensor(2, 2, 1, 2048, 64), tensor(2, 3, 1, 2048, 64)[:, :2]):
        one = leading.flattened(problem(query=query, key=key, value=key))[0]
        assert forward_sizes.sizes_of(one, 64, 64, loaded=False) == (3, 128, 2, 1)


@pytest.mark.parametrize("dims", [(136, 72), (192, 128), (200, 64), (250, 128)], ids=str)
def test_wide_queries_beside_values_to_128_have_two_consumers(dims: tuple[int, int]) -> None:
    """However few keys they meet: programs of one consumer took 0.096 ms where two take 0.058 (bias_192_128 of the matrix)."""
    one = problem(query=tensor(1, 2, 300, dims[0]), key=tensor(1, 2, 300, dims[0]), value=tensor(1, 2, 300, dims[1]))
    assert forward_sizes.sizes_of(one, *hopper.forward_dims(one), loaded=False).consumers == 2


@pytest.mark.parametrize(
    ("consumers", "have_one_block", "keys", "options", "in_turn"),
    [
        (2, True, 8192, {}, True),
        (2, True, 8192, {"bias": (1, 2, 1, 8192)}, True),
        (2, True, 8191, {}, False),
        (2, False, 8192, {}, False),
        (2, True, 8192, {"bias": (1, 2, 70, 8192)}, False),
        (2, True, 8192, {"causal": True}, False),
        (2, True, 8192, {"mask": IntervalMask.padding(torch.ones(1, 8192, dtype=torch.bool), 70)}, False),
        (3, False, 4096, {"causal": True}, True),
        (1, True, 8192, {}, False),
    ],
)
def test_two_consumers_multiply_in_turn_where_they_might_stay_in_step(
    consumers: int, have_one_block: bool, keys: int, options: dict, in_turn: bool
) -> None:
    """512 queries over 50176 keys took 0.371 ms where in turn they take 0.312 (perceiver_cross_50k of the matrix)."""
    key = tensor(1, 2, keys, 128)
    bias = {"bias": tensor(*options["bias"])} if "bias" in options else {}
    one = problem(query=tensor(1, 2, 70, 128), key=key, value=key, **options | bias)
    assert forward_sizes.are_in_turn(one, consumers, have_one_block) == in_turn


@pytest.mark.parametrize(("keys", "window", "consumers"), [(640, None, 2), (4096, (319, 320), 1), (4096, (320, 320), 2)])
def test_programs_of_wide_heads_have_one_consumer_to_640_keys_of_a_window(keys: int, window: tuple[int, int] | None, consumers: int) -> None:
    one = problem(128, keys, window=window)
    assert forward_sizes.sizes_of(one, 128, 128, loaded=False).consumers == consumers


def test_programs_have_one_consumer_in_place_of_two_to_twice_the_keys() -> None:
    key = tensor(2, 2, 1500, 64)
    for len_q, consumers in ((448, 1), (384, 3)):  # of 448 three would leave rows idle
        one = problem(query=tensor(2, 4, len_q, 64), key=key, value=key)
        assert forward_sizes.sizes_of(one, 64, 64, loaded=False).consumers == consumers


@pytest.mark.parametrize(
    ("length", "head_dim", "batch", "options", "sizes"),
    [
        (256, 64, 99, {}, (1, 32, 3)),
        (512, 64, 99, {}, (1, 64, 2)),
        (2048, 64, 99, {}, (3, 64, 1)),
        (1152, 64, 99, {}, (3, 64, 1)),
        (1024, 64, 99, {}, (1, 64, 2)),  # of which 192 waste rows
        (2048, 64, 99, {"causal": True}, (1, 64, 2)),
        (2112, 64, 99, {"causal": True}, (3, 64, 1)),
        (2112, 64, 20, {"causal": True}, (2, 64, 1)),  # not so many
        (2112, 64, 99, {"causal": True, "softcap": 9.0}, (2, 64, 1)),
        (2112, 64, 99, {"softcap": 9.0}, (2, 64, 1)),
        (2112, 64, 2, {"causal": True}, (1, 64, 2)),  # few programs
        (1024, 32, 99, {}, (1, 32, 4)),
        (512, 128, 99, {"causal": True}, (1, 64, 2)),
        (576, 128, 99, {"causal": True}, (2, 64, 1)),
        (256, 256, 99, {}, (2, 64, 1)),
        (1025, 48, 99, {"pairs": True}, (2, 64, 1)),  # padded head dims, of which two consumers share copies
        (1024, 48, 99, {"pairs": True}, (1, 64, 2)),
        (1025, 64, 99, {"pairs": True}, (1, 64, 2)),
        (496, 40, 99, {"pairs": True}, (3, 64, 1)),  # rows that the copy engine is slow with
        (1024, 40, 99, {}, (3, 64, 1)),
        (256, 40, 99, {}, (1, 32, 3)),
        (1024, 40, 9, {}, (1, 64, 2)),  # fewer blocks than processors
        (1025, 40, 99, {"pairs": True, "causal": True}, (1, 64, 2)),
        (1025, 40, 99, {"softcap": 9.0}, (1, 64, 2)),
    ],
)
def test_programs_of_keys_have_one_consumer_where_sequences_are_short_or_few(
    length: int, head_dim: int, batch: int, options: dict, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward_sizes, "processors", lambda device: 132)
    query, key = (tensor(1, heads, 1, head_dim).expand(batch, heads, length, head_dim) for heads in (4, 2))
    bias = tensor(1, 1, 1, 1).expand(1, 4, length, length) if options.get("pairs") else None
    one = problem(query=query, key=key, value=key, bias=bias, **{name: x for name, x in options.items() if name != "pairs"})
    chosen = backward_sizes.key_sizes(one, None)
    assert (chosen.consumers, chosen.queries, chosen.programs) == sizes


@pytest.mark.parametrize(
    ("head_dim", "options", "heads", "sizes"),
    [
        (64, {}, 2, (1, 2)),
        (64, {"bias": (2, 4, 4096, 4096)}, 2, (1, 2)),
        (128, {}, 2, (1, 2)),
        (128, {}, 1, (2, 1)),  # no more programs than processors
        (128, {"bias": (2, 4, 4096, 1)}, 2, (1, 2)),
        (128, {"bias": (2, 4, 4096, 4096)}, 2, (2, 1)),  # no room for two programs
        (64, {"bias": (2, 2, 1, 4096)}, 2, (2, 1)),  # a dynamic mask
        (256, {}, 2, (2, 1)),
    ],
)
def test_programs_under_intervals_have_one_consumer_where_two_fit(
    head_dim: int, options: dict, heads: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward_sizes, "processors", lambda device: 132)
    first = torch.zeros(2, 1, 4096, dtype=torch.int32)
    bias = torch.empty(1, dtype=torch.bfloat16).expand(options["bias"]) if "bias" in options else None
    query, key = (torch.empty(1, dtype=torch.bfloat16).expand(2, of, 4096, head_dim) for of in (4, heads))
    one = problem(query=query, key=key, value=key, mask=IntervalMask(first, first + 700), bias=bias)
    chosen = backward_sizes.interval_key_sizes(one, bias if options.get("bias", (1,))[-2:] == (4096, 4096) else None)
    assert (chosen.consumers, chosen.programs) == sizes


@pytest.mark.parametrize(
    ("head_dim", "batch", "options", "consumers"),
    [
        (64, 2, {}, 1),
        (64, 2, {"bias": (2, 2, 1, 4096)}, 1),
        (96, 1, {}, 1),
        (128, 1, {}, 1),
        (128, 2, {}, 2),  # may be padding
        (128, 1, {"bias": (1, 2, 1, 4096)}, 2),
        (80, 1, {}, 1),
        (256, 1, {}, 2),
    ],
)
def test_the_forward_pass_under_intervals_has_one_consumer_where_they_are_documents(
    head_dim: int, batch: int, options: dict, consumers: int
) -> None:
    first = torch.zeros(batch, 1, 4096, dtype=torch.int32)
    query, key = (torch.empty(1, dtype=torch.bfloat16).expand(batch, heads, 4096, head_dim) for heads in (4, 2))
    bias = tensor(*options["bias"]) if "bias" in options else None
    one = problem(query=query, key=key, value=key, mask=IntervalMask(first, first + 700), bias=bias)
    assert forward_sizes.sizes_of(one, *hopper.forward_dims(one), loaded=False).consumers == consumers


@pytest.mark.parametrize(("consumers", "programs"), [(2, 1), (3, 1), (1, 2), (1, 3), (1, 4)])
def test_registers_of_all_programs_fit_a_processor(consumers: int, programs: int) -> None:
    launched, own = hopper.launch_registers(consumers, programs), hopper.consumer_registers(consumers, programs)
    assert launched % 8 == own % 8 == 0
    assert programs * 128 * (consumers + 1) * launched <= 65536
    assert consumers * own + hopper.PRODUCER_REGISTERS.value <= (consumers + 1) * launched
    assert own <= 240


@pytest.mark.parametrize(
    ("dim", "consumers", "programs", "of_pairs", "lists", "fit"),
    [
        (32, 1, 4, True, False, True),
        (32, 3, 1, False, True, True),
        (32, 1, 4, True, True, False),
        (64, 1, 3, False, True, True),
        (64, 1, 3, True, True, False),
        (64, 2, 2, False, False, False),
        (64, 3, 1, False, False, False),
        (128, 1, 3, False, False, False),
    ],
)
def test_queries_are_in_registers_where_these_have_room(
    dim: int, consumers: int, programs: int, of_pairs: bool, lists: bool, fit: bool
) -> None:
    assert hopper_forward.fit_in_registers(dim, consumers, programs, of_pairs=of_pairs, lists=lists) == fit


FORMS = (
    Case("mask-dense-bias-causal", 200, 264, heads=4, kv_heads=2, head_dim=128, mask="b1qk", keep="blocks", bias="bhqk", causal=True),
    Case("loaded-dense-bias-window", 201, 263, heads=2, head_dim=128, bias="bhqk", window=(90, 20)),
    Case("key-bias-gqa-sinks", 387, 523, heads=4, kv_heads=2, head_dim=72, bias="bg1k", causal=True, sinks="random"),
    Case("padding-shared-bias", 260, 391, batch=3, heads=2, head_dim=128, mask="b11k", keep="padding", bias="1hqk"),
    Case("window-dense-bias", 393, 528, heads=2, head_dim=64, bias="bhqk", window=(100, 30)),
    Case("window-gqa", 460, 520, heads=4, kv_heads=2, head_dim=40, window=(40, 20)),
    Case("block-mask", 393, 523, head_dim=128, mask="1hqk", keep="random", blocked=True),
    Case("distances-causal", 400, 700, heads=2, head_dim=64, bias="1hr", distances=129, causal=True),
    Case("causal-gqa", 460, 720, heads=4, kv_heads=2, head_dim=64, causal=True),
    Case("causal-d32", 500, 700, batch=12, heads=12, kv_heads=4, head_dim=24, causal=True),
)


@needs_cuda
@pytest.mark.parametrize(
    ("forward", "keys"),
    [
        ((2, 128, 2, 1), (2, 64, 2, 1)),
        ((3, 128, 2, 1), (3, 64, 2, 1)),
        ((2, 64, 2, 1), (1, 64, 2, 2)),
        ((1, 64, 2, 2), (1, 32, 2, 2)),
        ((1, 128, 2, 2), (2, 64, 2, 1)),
    ],
    ids=["two", "three", "two-and-one", "one", "one-of-many-keys"],
)
@pytest.mark.parametrize("case", FORMS, ids=lambda case: case.name)
def test_all_numbers_of_consumers_are_exact(
    case: Case, forward: tuple[int, ...], keys: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small problems have them here that only large ones have else."""
    if (forward[0] == 3 or forward[:2] == (1, 128)) and (case.head_dim > 64 or (case.bias or "")[-2:] == "qk"):
        pytest.skip("three consumers have no registers for it, nor have programs of one with 128 keys a tile")
    fewer = forward[1] // 2 if case.head_dim <= 32 or (forward[1] == 128 and "loaded" in case.name) else forward[1]
    sizes = forward_sizes.Sizes(forward[0], fewer, *forward[2:])
    monkeypatch.setattr(hopper_forward, "sizes_of", lambda *given, **named: sizes)
    monkeypatch.setattr(hopper_key_grad, "key_sizes", lambda *given: backward_sizes.KeySizes(*keys))
    replay.forget()
    wrong = [str(verdict) for verdict in check(case, torch.bfloat16, "cuda") if not verdict.passed]
    replay.forget()
    assert not wrong, wrong


ONE_TILE_OF_QUERIES = (
    Case("padding-gqa-own-bias-64x64", 64, batch=3, heads=8, kv_heads=1, head_dim=256, mask="b11k", keep="padding", bias="bgqk"),
    Case("padding-40x200", 40, 200, batch=3, heads=2, head_dim=192, mask="b11k", keep="padding"),
    Case("mask-of-pairs-own-bias-64x128", 64, 128, heads=2, head_dim=160, mask="bhqk", keep="random", bias="bhqk"),
    Case("mask-of-pairs-loaded-63x65", 63, 65, heads=2, head_dim=256, mask="b1qk", keep="random", causal=True),
    Case("block-mask-64x192", 64, 192, heads=2, head_dim=256, mask="1hqk", keep="random", blocked=True),
)


@needs_cuda
@pytest.mark.parametrize("case", ONE_TILE_OF_QUERIES, ids=lambda case: case.name)
def test_a_mask_hides_pairs_of_the_only_tile_of_queries(case: Case) -> None:
    """No list names that tile for dK and dV; heads of other widths have the portable kernels to 64 queries."""
    wrong = [str(verdict) for verdict in check(case, torch.bfloat16, "cuda") if not verdict.passed]
    assert not wrong, wrong


@needs_cuda
@pytest.mark.parametrize("consumers", [2, 3])
def test_packed_sequences_by_all_numbers_of_consumers(consumers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = torch.tensor((0, 300, 300, 1, 190, 64, 521))
    ends = lengths.cumsum(0).int().cuda()
    query, key, value = (tensor(int(ends[-1]), 4, 64, device="cuda").requires_grad_() for _ in range(3))

    def results() -> list[Tensor]:
        replay.forget()
        out = attention_varlen(query, key, value, ends, ends, max_seqlen_q=521, max_seqlen_k=521, causal=True)
        return [out, *torch.autograd.grad(out.float().square().sum(), (query, key, value))]

    expected = results()
    monkeypatch.setattr(hopper_forward, "sizes_of", lambda *given, **named: forward_sizes.Sizes(consumers, 128, 2, 1))
    monkeypatch.setattr(hopper_key_grad, "key_sizes", lambda *given: backward_sizes.KeySizes(consumers, 64, 2, 1))
    for own, other in zip(results(), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=2e-2, atol=2e-2)
    replay.forget()


@needs_cuda
def test_a_bias_that_a_mask_of_keys_hides_changes_nothing() -> None:
    """Be it in tiles that are left out, also the first ones, or beside other keys; members without a key have nothing."""
    query, key, value = (tensor(133, 2, length, 32, device="cuda") for length in (129, 320, 320))
    bias = tensor(1, 2, 129, 320, device="cuda")
    places = torch.arange(320, device="cuda")
    first, last = (torch.randint(-100, 420, (133, 1, 1, 1), device="cuda") for _ in range(2))
    mask = (first <= places) & (places < last) & (places % 7 != 3)
    mask[5::4] = places % 7 != 3
    hidden = bias.masked_fill(places % 7 == 3, float("nan"))
    hidden[..., 17] = float("inf")
    out, lse = attention(query, key, value, mask=mask, bias=hidden, return_lse=True)
    hidden[..., places % 7 == 3] = 0
    again, lse_again = attention(query, key, value, mask=mask, bias=hidden, return_lse=True)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
    empty = ~mask[:, 0, 0].any(1)
    assert 20 < empty.sum() < 110
    assert (out[empty] == 0).all()
    assert (lse[empty] == float("-inf")).all()
    scores = (query.double() @ key.double().mT * 32**-0.5 + hidden.double()).masked_fill(~mask, float("-inf"))
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.double(), scores.softmax(-1).nan_to_num(0) @ value.double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("length", "head_dim", "consumers"), [(4096, 64, 3), (190, 64, 3), (400, 64, 2), (4096, 128, 2)])
def test_three_consumers_where_registers_and_lengths_allow(length: int, head_dim: int, consumers: int) -> None:
    assert hopper.consumers_of(length, head_dim) == consumers


@pytest.mark.parametrize(
    ("dims", "forward", "backward"),
    [
        ((20, 20), (32, 32), (32, 32)),
        ((40, 40), (48, 64), (48, 48)),
        ((64, 64), (64, 64), (64, 64)),
        ((72, 72), (80, 128), (80, 80)),
        ((64, 72), (64, 128), (80, 80)),
        ((80, 88), (80, 128), (96, 96)),
        ((96, 40), (96, 64), (96, 96)),
        ((97, 20), (112, 32), (112, 112)),
        ((128, 128), (128, 128), (128, 128)),
        ((160, 96), (160, 128), (160, 128)),
        ((40, 161), (128, 256), (128, 176)),
        ((256, 250), (256, 256), (256, 256)),
    ],
    ids=str,
)
def test_padding_is_not_summed_over(dims: tuple[int, int], forward: tuple[int, int], backward: tuple[int, int]) -> None:
    """But for parts of 16 dims. The forward pass has whole columns of values."""
    one = problem(query=tensor(1, 2, 9, dims[0]), key=tensor(1, 2, 9, dims[0]), value=tensor(1, 2, 9, dims[1]))
    assert hopper.forward_dims(one) == forward
    assert hopper.backward_dims(one) == backward
    assert tuple(map(hopper.copied_dims, backward)) == hopper.padded_dims(one)
    assert hopper.copied_dims(forward[1]) == forward[1]


@pytest.mark.parametrize("dim", range(32, 257, 16))
def test_pieces_of_head_dims_lie_within_tiles(dim: int) -> None:
    """Those summed over are all the dims, those of results as many or more; each is a power of 2 in one tile, and results begin one by PANELs."""
    whole = hopper.whole_of(dim)
    widths, columns = hopper.widths_of(dim), hopper.columns_of(dim)
    assert sum(widths) == dim <= sum(columns) <= hopper.copied_dims(dim) == hopper.tiles_of(dim) * whole
    for pieces in (widths, columns):
        for i, width in enumerate(pieces):
            first = hopper.first_of(pieces, i)
            assert width & (width - 1) == 0
            assert first % whole + width <= whole
            assert first % width == 0
    assert len(columns) == (-(-dim // 64) if dim == 80 or 128 < dim <= 224 else 1)
    assert all(hopper.first_of(columns, i) == i * hopper.PANEL.value for i in range(len(columns)))


@needs_cuda
@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "by-key"])
def test_scores_below_all_of_float32_are_hidden(pairs: bool) -> None:
    """A bias of the lowest number everywhere, as float masks have it, is below it in base 2."""
    query, key, value = (tensor(1, 2, LENGTH, 128, device="cuda").requires_grad_() for _ in range(3))
    bias = torch.zeros(1, 1, LENGTH if pairs else 1, LENGTH, dtype=torch.bfloat16, device="cuda")
    hidden = slice(3, 70) if pairs else slice(None)
    bias[:, :, hidden] = torch.finfo(torch.bfloat16).min
    out, lse = attention(query, key, value, bias=bias, return_lse=True)
    (out.sum() + lse.where(lse.isfinite(), 0.0).sum()).backward()
    assert (out[:, :, hidden] == 0).all()
    assert (lse[:, :, hidden] == float("-inf")).all()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in (query, key, value))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("offset", [-1e4, -1e9, 1e9, -1e30, -1e38])
@pytest.mark.parametrize("bias_shape", [(1, 1, 1, 2048), (1, 1, 192, 2048), (6, 2, 1, 2048)], ids=["by-key", "pairs", "by-key-and-head"])
def test_a_row_far_from_zero_has_its_mean(bias_shape: tuple[int, ...], offset: float, dtype: torch.dtype) -> None:
    """Exponents that share an offset leave nothing of its rounding in weights, and the gradients of others alone."""
    query, key, value = (tensor(6, 2, length, 128, dtype=dtype, device="cuda") for length in (192, 2048, 2048))
    query.zero_()
    by_pair = bias_shape[2] > 1
    if by_pair and dtype == torch.float16 and abs(offset) > 65504:
        pytest.skip("beyond float16")
    bias = torch.full(bias_shape, offset, device="cuda", dtype=dtype if by_pair else torch.float32)
    far = slice(64, 130) if by_pair else slice(None)
    if by_pair:
        bias[:, :, :64] = bias[:, :, 130:] = 0.0
    leaves = [x.requires_grad_() for x in (query, key, value, bias)]
    out, lse = attention(query, key, value, bias=bias, return_lse=True)
    torch.testing.assert_close(out.float(), value.float().mean(2, keepdim=True).expand(out.shape), rtol=0.0, atol=2e-3)
    if offset > -1e38:
        torch.testing.assert_close(
            lse[:, :, far],
            torch.full_like(lse[:, :, far], float(bias.flatten()[-1] if not by_pair else bias[0, 0, 70, 0])),
            rtol=1e-6,
            atol=8.0,
        )
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)


def rising(kind: str, len_q: int, len_k: int, lowest: float) -> Tensor:
    """A bias (1, 2, Sq, Sk) under which the first tiles say little of the maximum."""
    query, key = torch.arange(len_q, device="cuda")[:, None], torch.arange(len_k, device="cuda")[None, :]
    slopes = torch.tensor([0.5, 0.03], device="cuda")[:, None, None]
    bias = {
        "alibi": -slopes * (query + len_k - len_q - key).abs(),
        "rises by 8 a tile": (key // 128 * 8.0).expand(len_q, len_k),
        "rises by 150 a tile, then falls": 150.0 * torch.minimum(key // 128, 12 - key // 128).expand(len_q, len_k),
        "few much higher": torch.where(torch.rand(2, len_q, len_k, device="cuda") < 0.002, 40.0, 0.0),
        "late keys alone": torch.where(key + 0 * query < 1400, float("-inf"), 0.0),
        "late keys far above": torch.where(key + 0 * query < 1400, lowest, 0.0),
        "some rows late, some empty": torch.where(((query % 3 == 0) & (key < 900)) | (query % 5 == 0), float("-inf"), 0.0),
    }[kind]
    return bias.expand(1, 2, len_q, len_k)


def assert_rounded_twice(out: Tensor, weights: Tensor, value: Tensor) -> None:
    """Weights and out are rounded to the dtype of the values, each by half of `eps` at most; 1e-3 is for scores in float32."""
    expected, size = weights @ value.double(), weights @ value.double().abs()
    beyond = (out.double() - expected).abs() - torch.finfo(value.dtype).eps * size
    assert beyond.max() < 1e-3, f"{beyond.max().item():.3g} beyond two roundings at {beyond.argmax().item()}"


@needs_cuda
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        "alibi",
        "rises by 8 a tile",
        "rises by 150 a tile, then falls",
        "few much higher",
        "late keys alone",
        "late keys far above",
        "some rows late, some empty",
    ],
)
def test_a_maximum_that_rises_late_is_found(kind: str, dtype: torch.dtype, head_dim: int, causal: bool) -> None:
    """Tiles are weighed with the maximum of those before while that will do, which their sums say."""
    len_q, len_k = 392, 2056
    query, key, value = (tensor(1, 2, length, head_dim, dtype=dtype, device="cuda") for length in (len_q, len_k, len_k))
    bias = rising(kind, len_q, len_k, -1e9 if dtype == torch.bfloat16 else -60000.0).to(dtype).contiguous()
    for scale in (head_dim**-0.5, 0.25):
        out, lse = attention(query, key, value, bias=bias, causal=causal, scale=scale, return_lse=True)
        again, _ = attention(query, key, value, bias=bias, causal=causal, scale=scale, return_lse=True)
        assert torch.equal(out, again)
        scores = scale * query.double() @ key.double().mT + bias.double()
        if causal:
            scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1 + len_k - len_q), float("-inf"))
        expected = scores.logsumexp(-1)
        weights = (scores - expected.where(expected.isfinite(), 0.0)[..., None]).exp()
        torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-5)
        assert_rounded_twice(out, weights, value)


@needs_cuda
@pytest.mark.parametrize("prepared", [False, True], ids=["mask", "block mask"])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kept", ["half", "keys from a query's own on", "one key in 200", "few tiles"])
@pytest.mark.parametrize("kind", ["none", "rises by 8 a tile", "few much higher"])
def test_a_maximum_that_rises_late_is_found_under_a_mask_of_pairs(
    kind: str, kept: str, dtype: torch.dtype, head_dim: int, prepared: bool
) -> None:
    """Tiles that hide pairs are weighed so, too. In any of them rows may get their first pair; every seventh row gets none."""
    len_q, len_k = 392, 180 if kept == "few tiles" else 2056  # three tiles of 64 keys, as many as `few_edges`
    query, key, value = (tensor(1, 2, length, head_dim, dtype=dtype, device="cuda") for length in (len_q, len_k, len_k))
    bias = None if kind == "none" else rising(kind, len_q, len_k, 0.0).to(dtype).contiguous()
    rows, random = torch.arange(len_q, device="cuda")[:, None], torch.rand(2, len_q, len_k, device="cuda")
    mask = {
        "half": random < 0.5,
        "keys from a query's own on": (random < 0.5) & (torch.arange(len_k, device="cuda") >= rows * 29 % 1900),
        "one key in 200": random < 0.005,
        "few tiles": random < 0.5,
    }[kept] & (rows % 7 != 0)
    mask = mask[None]
    given: Any = BlockMask.from_mask(mask) if prepared else mask
    for scale in (head_dim**-0.5, 1.0):
        out, lse = attention(query, key, value, bias=bias, mask=given, scale=scale, return_lse=True)
        again, _ = attention(query, key, value, bias=bias, mask=given, scale=scale, return_lse=True)
        assert torch.equal(out, again)
        scores = scale * query.double() @ key.double().mT + (0.0 if bias is None else bias.double())
        scores.masked_fill_(~mask, float("-inf"))
        expected = scores.logsumexp(-1)
        weights = (scores - expected.where(expected.isfinite(), 0.0)[..., None]).exp()
        torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-5)
        assert_rounded_twice(out, weights, value)


@needs_cuda
@pytest.mark.parametrize("offset", [-100.0, -9984.0, -1e6])
def test_a_bias_far_from_zero_rounds_lse_a_little(offset: float) -> None:
    """Products are added to it at head dim 64, step by step."""
    query, key, value = (tensor(1, 2, length, 64, device="cuda") for length in (392, 2056, 2056))
    bias = torch.full((1, 2, 392, 2056), offset, dtype=torch.bfloat16, device="cuda")
    _, lse = attention(query, key, value, bias=bias, return_lse=True)
    expected = (query.double() @ key.double().mT / 8 + bias.double()).logsumexp(-1)
    torch.testing.assert_close(lse.double(), expected, rtol=2e-6, atol=1e-5)


@needs_cuda
def test_tiles_of_a_row_far_from_zero_weigh_alike() -> None:
    """What the tiles before are multiplied by is 1 where the maximum stays; 512 times a little more would show in lse."""
    query, key, value = (tensor(1, 1, length, 128, device="cuda") for length in (128, 65536, 65536))
    bias = tensor(1, 1, 1, 65536, dtype=torch.float32, device="cuda")
    _, near = attention(query, key, value, bias=bias, return_lse=True)
    for shift in (5000.0, 16001.0, -16001.0):
        _, far = attention(query, key, value, bias=bias + shift, return_lse=True)
        torch.testing.assert_close(far - shift, near, rtol=0.0, atol=6e-3)


@needs_cuda
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("head_dim", [72, 112])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_far_from_zero_have_finite_gradients_or_none(dtype: torch.dtype, head_dim: int, biased: bool) -> None:
    """What lowers their scores within the products rounds exponents, but to no more than 16 bits hold; beyond 2 ** 26 no weight is left."""
    for lse_wanted, any_left in ((2.0**25.9, True), (2.0**26.2, False)):
        entry = (lse_wanted / math.sqrt(head_dim)) ** 0.5
        query, key, value = (torch.full((2, 2, length, head_dim), entry, dtype=dtype, device="cuda") for length in (200, 2048, 2048))
        value.copy_(torch.randn(value.shape, device="cuda"))
        leaves = [x.requires_grad_() for x in (query, key, value)]
        bias = torch.randn(1, 2, 200, 2048, device="cuda", dtype=dtype) if biased else None
        out, lse = attention(*leaves, bias=bias, return_lse=True)
        assert (lse.abs() > 2.0**26).all() != any_left
        out.backward(torch.randn_like(out))
        assert all(x.grad.isfinite().all() for x in leaves)
        assert value.grad.any() == any_left


@needs_cuda
@pytest.mark.parametrize("highest", [60.0, 70.0])
@pytest.mark.parametrize("form", ["plain", "pairs", "table", "sinks below", "sinks above"])
def test_weights_far_above_the_first_maximum_and_large_values(form: str, highest: float) -> None:
    """The maximum of the first tile does until weights pass 2 ** 64, here by one score or not; values as large as docs/limits.md allows."""
    query, key, value = (torch.zeros(1, 2, length, 128, dtype=torch.bfloat16, device="cuda") for length in (200, 640, 640))
    query[..., 0] = 1.0
    key[..., 300, 0] = highest * math.log(2)
    key[..., 200, 0] = key[..., 400, 0] = 50.0 * math.log(2)
    value.copy_(torch.randn(value.shape, device="cuda") * 1e12)
    given: dict[str, Any] = {"scale": 1.0}
    if form == "pairs":
        given["bias"] = torch.randn(1, 2, 200, 640, dtype=torch.bfloat16, device="cuda")
    if form == "table":
        given["bias"] = RelativeBias(torch.randn(2, 65, dtype=torch.bfloat16, device="cuda"))
    if form.startswith("sinks"):
        given["sinks"] = torch.full((2,), 20.0 if form.endswith("below") else 60.0, device="cuda")
    out, lse = attention(query, key, value, return_lse=True, **given)
    wide = {
        name: x.double() if isinstance(x, Tensor) else RelativeBias(x.table.double()) if isinstance(x, RelativeBias) else x
        for name, x in given.items()
    }
    true, true_lse = attention(*(x.double() for x in (query, key, value)), return_lse=True, **wide)
    torch.testing.assert_close(lse.double(), true_lse, rtol=0, atol=3e-5)
    torch.testing.assert_close(out.double(), true, rtol=1e-2, atol=1e10)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_row_without_weights_gives_none_whatever_its_bias(dtype: torch.dtype) -> None:
    """Its scores are lowered within the products, to which the bias is added: one by query, of another type where 16 bits do not hold it."""
    query, key, value = (torch.randn(2, 2, length, 64, dtype=dtype, device="cuda").requires_grad_() for length in (200, 256, 256))
    for shape, bias_dtype in (((1, 2, 200, 256), torch.bfloat16), ((1, 2, 200, 1), torch.float32)):
        bias = torch.zeros(shape, dtype=bias_dtype, device="cuda")
        bias[:, :, 5] = 2e38
        out, lse = attention(query, key, value, bias=bias, return_lse=True)
        assert (lse[:, :, 5] > 1e38).all()
        d_out = torch.zeros_like(out)
        d_out[:, :, 5] = 1.0
        gradients = torch.autograd.grad(out, (query, key, value), d_out)
        assert not any(x.any() for x in gradients)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gradient_of_lse_that_is_no_number_is_seen(dtype: torch.dtype) -> None:
    """By whoever scales losses: in the gradients of keys and values, beside a bias."""
    query, key, value = (torch.randn(2, 2, length, 64, dtype=dtype, device="cuda").requires_grad_() for length in (200, 256, 256))
    out, lse = attention(query, key, value, bias=torch.zeros(1, 2, 200, 256, dtype=dtype, device="cuda"), return_lse=True)
    d_lse = torch.zeros_like(lse)
    d_lse[:, :, 7] = float("nan")
    gradients = torch.autograd.grad((out, lse), (query, key), (torch.zeros_like(out), d_lse))
    assert all(x.isnan().any() for x in gradients)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_keys_far_from_zero_beside_a_bias_have_finite_gradients(dtype: torch.dtype) -> None:
    """Exponents are rounded there, but weights are no larger than 2, whose product with dO and dP 16 bits hold."""
    query, key, value = (torch.randn(1, 2, length, 72, dtype=dtype, device="cuda").requires_grad_() for length in (200, 256, 256))
    bias = 6e7 * (1 + 0.1 * torch.rand(1, 2, 200, 1, device="cuda"))
    mask = (torch.arange(256, device="cuda") < 2)[None, None, None]
    out = attention(query, key, value, bias=bias, mask=mask)
    gradients = torch.autograd.grad(out, (query, key, value), 8 * torch.randn_like(out))
    assert all(x.isfinite().all() for x in gradients)


@needs_cuda
@pytest.mark.parametrize("head_dim", [64, 128])
def test_without_a_bias_any_gradient_alone_is_the_same(head_dim: int) -> None:
    """Of dLSE, too, which may be anything for a query with nothing to attend."""
    query, key, value = (tensor(2, heads, 2050, head_dim, device="cuda") for heads in (4, 2, 2))
    mask = torch.rand(2, 1, 2050, 2050, device="cuda") < 0.5
    empty = slice(70, 75)
    mask[:, :, empty] = False
    gradients = {}
    for wanted in ("all", "query", "key", "value", "NaN"):
        leaves = {
            name: x.clone().requires_grad_(wanted in ("all", "NaN", name)) for name, x in (("query", query), ("key", key), ("value", value))
        }
        out, lse = attention(*leaves.values(), mask=mask, return_lse=True)
        torch.manual_seed(1)
        d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
        d_out[:, :, empty] = 0.0
        d_lse[:, :, empty] = float("nan") if wanted == "NaN" else 1.0
        torch.autograd.backward((out, lse), (d_out, d_lse))
        gradients[wanted] = {name: x.grad for name, x in leaves.items()}
    for name, whole in gradients["all"].items():
        assert whole.isfinite().all()
        assert torch.equal(whole, gradients["NaN"][name])
        # delta is made by another kernel where dQ is not wanted
        torch.testing.assert_close(gradients[name][name], whole, rtol=2.0**-7, atol=2e-3)


@needs_cuda
@pytest.mark.parametrize("intervals", [False, True], ids=["dense", "intervals"])
def test_a_bias_of_keys_is_as_exact_as_float32(intervals: bool) -> None:
    """It is part of the products, in three parts: far from 0 it shifts lse and no probability, and -inf hides."""
    query, key, value = (tensor(1, 2, LENGTH, 128, device="cuda").requires_grad_() for _ in range(3))
    near = torch.randint(-1024, 1024, (1, 2, 1, LENGTH), device="cuda") / 256  # 2 ** 12 more or less, nothing of it is lost
    near[..., 5:90:3] = float("-inf")
    mask = IntervalMask.causal(LENGTH, LENGTH, device="cuda") if intervals else None
    d_out = torch.randn_like(query)
    results = []
    for shift in (0.0, 4096.0, -4096.0):
        bias = (near + shift).requires_grad_()
        out, lse = attention(query, key, value, mask=mask, bias=bias, return_lse=True)
        results.append((out, lse - shift, *torch.autograd.grad(out, (query, key, value, bias), d_out)))
    visible = near.isfinite() & torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda").tril() if intervals else near.isfinite()
    reference = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), near.double().where(visible, float("-inf"))
    )
    torch.testing.assert_close(results[0][0].double(), reference, rtol=2e-2, atol=1e-2)
    for shifted in results[1:]:
        torch.testing.assert_close(shifted[1], results[0][1], rtol=0.0, atol=2e-3)  # two parts of three would be off by 6e-2
        for before, after in zip(results[0], shifted, strict=True):
            torch.testing.assert_close(after, before, rtol=2e-2, atol=4e-2)
    assert all((gradient[..., 5:90:3, :] == 0).all() for gradient in results[0][3:5])
    assert (results[0][5][..., 5:90:3] == 0).all()


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the passes that ran in a kernel for Hopper."""
    names: list[str] = []

    def recording(name: str, launch: Callable) -> Callable:
        def run(*arguments, **named):
            names.append(name)
            return launch(*arguments, **named)

        return run

    for module, name in (
        (hopper_forward, "forward"),
        (hopper_key_grad, "key_gradients"),
        (hopper_key_grad_intervals, "key_gradients"),
        (hopper_query_grad, "query_gradients"),
        (hopper_bias_grad, "shared_gradient"),
        (hopper_shared_query_grad, "query_and_bias_gradients"),
    ):
        monkeypatch.setattr(module, name, recording(name, getattr(module, name)))
    return names


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_a_gpu_of_that_kind_uses_them(device: str, reached: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0) or not hopper.GLUON:
        pytest.skip("needs a Hopper GPU and Triton 3.6")
    query, key, value = (tensor(2, 4, LENGTH, 128, device=device).requires_grad_() for _ in range(3))
    bias = tensor(1, 4, LENGTH, LENGTH, device=device).requires_grad_()
    out = attention(query, key, value, bias=bias, causal=True)
    assert reached == ["forward"]
    out.backward(torch.randn_like(out))
    assert reached == ["forward", "query_gradients", "key_gradients", "shared_gradient"]
    reached.clear()
    monkeypatch.setattr(hopper_shared_query_grad, "LEAST_FILL", {1: 0.0, 2: 0.0})
    replay.forget()  # what the calls above launched
    attention(query, key, value, bias=bias, causal=True).backward(torch.randn_like(out))
    assert reached == ["forward", "query_and_bias_gradients", "key_gradients"]
    reached.clear()
    attention(query, key, value, mask=IntervalMask.causal(LENGTH, LENGTH, device=device)).backward(torch.randn_like(out))
    assert reached == ["forward", "query_gradients", "key_gradients"]
    reached.clear()
    attention(query, key, value, mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device)).backward(torch.randn_like(out))
    assert reached == ["forward", "query_gradients", "key_gradients"]


@pytest.mark.parametrize(
    ("length", "head_dim", "sizes"),
    [
        (4096, 64, (1, 2)),
        (4096, 32, (1, 3)),
        (4096, 40, (2, 1)),
        (1024, 40, (2, 1)),  # rows that the copy engine is slow with
        (1024, 48, (1, 2)),
        (256, 40, (1, 2)),
        (1024, 24, (1, 3)),
        (4096, 24, (2, 1)),
        (1024, 96, (2, 1)),
    ],
)
def test_programs_of_queries_have_one_consumer_up_to_head_dim_64(length: int, head_dim: int, sizes: tuple[int, int]) -> None:
    chosen = backward_sizes.query_sizes(problem(head_dim, length))
    assert (chosen.consumers, chosen.programs) == sizes
