"""Which tiles a problem's products get."""

import pytest
import torch

from dmattn.kernels.base import tiles
from dmattn.kernels.base.tiles import Tile, find
from dmattn.problem import Problem

DIMS = (16, 32, 64, 96, 128, 192, 256)


@pytest.fixture
def asked(monkeypatch):
    """Take float32 products for those of a name."""

    def ask(name):
        monkeypatch.setattr(tiles, "dot_precision", lambda dtype: name if dtype == torch.float32 else "ieee")

    return ask


@pytest.mark.parametrize("kernel", ["forward", "keys", "queries", "queries of d_bias", "bias"])
@pytest.mark.parametrize("family", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_float32_tiles_are_those_of_its_products(asked, kernel, family):
    """Wide heads are in pieces where products are made of parts, and else whole, as 16-bit inputs have them."""
    for dim in DIMS:
        asked("bf16x6")
        tile = find((kernel,), family, torch.float32, dim, dim)
        assert dim <= 64 or tile.dims < dim, (dim, tile)
        asked("ieee")
        assert find((kernel,), family, torch.float32, dim, dim).dims >= dim
        assert find((kernel,), family, torch.bfloat16, dim, dim).dims >= dim


def test_float32_products_are_not_split_on_amd(asked):
    asked("bf16x6")
    assert find(("keys",), "hip", torch.float32, 64, 64) == Tile(32, 32, 4, 1)


@pytest.mark.parametrize(
    ("kernel", "head_dim", "tile"),
    [
        ("queries", 128, Tile(64, 32, 4, 1, 64)),
        ("forward", 128, Tile(64, 64, 4, 1, 64)),
        ("forward", 256, Tile(64, 32, 4, 1, 64)),
    ],
)
def test_few_queries_of_float32_have_tiles_that_were_timed(monkeypatch, asked, kernel, head_dim, tile):
    asked("bf16x6")
    monkeypatch.setattr(tiles, "device_family", lambda device: "sm_90")
    x = torch.empty(1, 1, 49, head_dim)
    assert tiles.pick(kernel, Problem.canonical(x, x, x, mask=None, bias=None, causal=False, window=None, scale=None, softcap=None)) == tile


@pytest.mark.parametrize(("head_dim", "tile"), [(32, Tile(64, 64, 4, 1)), (64, Tile(32, 64, 4, 1)), (96, Tile(64, 64, 4, 1, 32))])
def test_float32_that_is_stored_has_tiles_of_fewer_queries(monkeypatch, asked, head_dim, tile):
    asked("bf16x6")
    monkeypatch.setattr(tiles, "device_family", lambda device: "sm_90")
    options = dict(mask=None, bias=None, causal=False, window=None, scale=None, softcap=None)
    x = torch.empty(1, 1, 320, head_dim)
    assert tiles.pick_storing(Problem.canonical(x, x, x, **options)) == tile
    biased = options | dict(bias=torch.empty(1, 1, 320, 320))
    assert tiles.pick_storing(Problem.canonical(x, x, x, **biased)).block_m == (64 if head_dim == 32 else 32)
    half = Problem.canonical(*[x.half()] * 3, **options)
    assert tiles.pick_storing(half) == tiles.pick("keys", half)


def test_programs_that_need_registers_are_not_limited(monkeypatch):
    monkeypatch.setattr(tiles, "device_family", lambda device: "sm_90")
    x, mask = torch.empty(1, 1, 300, 64, dtype=torch.bfloat16), torch.ones(1, 1, 300, 300, dtype=torch.bool)

    def picked(mask=None, softcap=None):
        options = dict(bias=None, causal=True, window=None, scale=None)
        return tiles.pick("forward", Problem.canonical(x, x, x, mask=mask, softcap=softcap, **options))

    assert picked() == Tile(64, 64, 4, 3, registers=128)
    assert picked(softcap=20.0).registers == picked(mask=mask).registers == 0
