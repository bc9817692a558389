"""Tiles of a shared dBias that are left over: how many programs make each, and what their parts sum to."""

from __future__ import annotations

import pytest
import torch
from conftest import NEEDS_CUDA

from dmattn import attention
from dmattn.equivalence import Case, check, results
from dmattn.execution import replay
from dmattn.execution.backend import interpreting
from dmattn.problem import Problem

pytest.importorskip("triton", reason="the kernels need Triton")

from dmattn.kernels.hopper import rest_of_tiles
from dmattn.kernels.hopper.rest_of_tiles import Division

ON_A_GPU = [pytest.param("cuda", marks=NEEDS_CUDA)]
TILE = 1 << 16  # bytes of one in float32
FEW = Case("few-tiles", 200, 392, batch=7, heads=3, head_dim=64, bias="11qk", padded=True, transposed=True)


@pytest.mark.parametrize(
    ("shape", "members", "memory", "division"),
    [
        ((1, 2500, 896), 216, 1 << 23, (132, 8, 16)),
        ((12, 512, 512), 16, 1 << 23, (132, 60, 2)),
        ((12, 512, 512), 16, 60 * TILE, (192, 0, 1)),  # no room for two parts
        ((8, 640, 640), 1000, 400 * TILE, (132, 68, 5)),  # in three more rounds of a fifth
        ((15, 256, 256), 32, 1 << 23, (0, 60, 2)),
        ((3, 577, 577), 260, 3 * 4 * 3 * 577**2, (0, 75, 3)),  # whole gradients, which have no padding
        ((8, 300, 300), 128, 5 * 4 * 8 * 300**2, (0, 72, 5)),
        ((66, 256, 256), 100, 1 << 30, (264, 0, 1)),  # none is left over
        ((30, 128, 128), 2, 1 << 23, (30, 0, 1)),  # to add parts takes longer
        ((1, 100, 100), 9, 1 << 23, (0, 1, 9)),
    ],
)
def test_tiles_left_over_are_those_of_the_last_round(
    shape: tuple[int, int, int], members: int, memory: int, division: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a gradient (1, H, Sq, Sk) in tiles of 128 x 128, one of which each of 132 processors makes at once."""
    monkeypatch.setattr(rest_of_tiles, "processors", lambda device: 132)
    monkeypatch.setattr(rest_of_tiles, "bytes_for_parts", lambda problem, least: memory)
    x = torch.empty(1, 1, 1, 16)
    problem = Problem.canonical(x, x, x, mask=None, bias=None, **Case("any", 1).options)
    d_bias = torch.empty(1, *shape, dtype=torch.bfloat16, device="meta")
    found = rest_of_tiles.divide(problem, d_bias, rest_of_tiles.tiles_of(d_bias, 128, 128), members)
    assert found == division
    parts = found.empty(d_bias)
    assert found.bytes(d_bias) == (0 if parts is None else 4 * parts.numel()) <= memory


@pytest.mark.skipif(not interpreting(), reason="runs a kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parts_are_added_where_their_tiles_are(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five whole tiles of two heads of two entries, and nineteen left over, of blocks of 32 queries and 16 keys, in a gradient that is a view."""
    monkeypatch.setattr(rest_of_tiles, "QUERIES", 32)
    monkeypatch.setattr(rest_of_tiles, "KEYS", 16)
    d_bias = torch.full((2, 2, 40, 37), float("nan"), dtype=dtype)[..., :35]
    division = Division(5, 2 * 2 * 2 * 3 - 5, 3)
    parts = torch.randn(3, division.rest, 32, 16)
    rest_of_tiles.add_parts(division, parts, d_bias)
    expected = torch.full((2, 2, 64, 48), float("nan"))
    for number, tile in enumerate(parts.sum(0)):
        head, place = divmod(division.whole + number, 2 * 3)
        row, col = place % 2 * 32, place // 2 * 16
        expected.view(4, 64, 48)[head, row : row + 32, col : col + 16] = tile
    torch.testing.assert_close(d_bias, expected[..., :40, :35].to(dtype), equal_nan=True)


@pytest.mark.parametrize("device", ON_A_GPU)
@pytest.mark.parametrize("count", [3, 132])
def test_parts_sum_to_what_whole_tiles_are(device: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a GPU had few processors, of which some tiles are left over, or so many that all are."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    divisions = []
    divide = rest_of_tiles.divide
    monkeypatch.setattr(rest_of_tiles, "divide", lambda *given: (divisions.append(divide(*given)), divisions[-1])[1])
    monkeypatch.setattr(rest_of_tiles, "processors", lambda device: count)
    assert not [str(verdict) for verdict in check(FEW, torch.bfloat16, device) if not verdict.passed]
    inputs = FEW.inputs(torch.bfloat16, device)
    split, again = (results(attention, inputs, FEW.options)["d_bias"] for _ in range(2))
    assert torch.equal(split, again)
    assert divisions
    assert all(division.rest > 0 and (division.whole > 0) == (count < 8) for division in divisions)
    monkeypatch.setattr(rest_of_tiles, "WORTH_WHILE", 0.0)
    replay.forget()  # what the calls above launched
    torch.testing.assert_close(results(attention, inputs, FEW.options)["d_bias"], split, rtol=2e-2, atol=1e-3)
    assert divisions[-1].rest == 0
