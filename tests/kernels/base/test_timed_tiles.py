"""Tiles that were timed: which file they come from, which problems get them, and what becomes of files that cannot be used."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

from dmattn import notices, report
from dmattn.kernels.base import tiles, timed_tiles
from dmattn.kernels.base.device import device_family, rehearsed_for
from dmattn.kernels.base.tiles import Tile, find, pick
from dmattn.kernels.base.timed_tiles import FLOATS, NARROW, Place, Source, Timed, file_for, on_trial, read, source_of, written
from dmattn.problem import Problem
from dmattn.rehearsal import without_storage

GPU = "NVIDIA Imaginary 5"
FASTER = Tile(128, 32, 8, 1)
TIMED = Timed(GPU, "sm_86", "2026-11-25", {Place("forward", NARROW, 64): FASTER})


@pytest.fixture(autouse=True)
def read_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache folder of the test's own, and no file that was read before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DMATTN_TILES", raising=False)
    timed_tiles.forget()
    notices.forget()
    yield
    timed_tiles.forget()
    notices.forget()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Take these for the devices of the machine: (name, compute capability) each."""

    def take(*found: tuple[str, tuple[int, int]]) -> None:
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: found[index][0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: found[index][1])

    return take


def keep(file: Path, timed: Timed = TIMED, **changed: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(written(timed, {"dmattn": "0.1.0"}) | changed))
    return file


def forward_tile(family: str, head_dim: int = 64, kinds: tuple[str, ...] = ("forward",)) -> Tile:
    return find(kinds, family, torch.bfloat16, head_dim, head_dim)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    place = Place("bias with pairs", FLOATS, 256)
    timed = TIMED._replace(tiles={**TIMED.tiles, place: Tile(64, 32, 8, 2, 32)})
    assert read(keep(tmp_path / "file", timed)) == timed


def test_tiles_come_from_the_file_of_the_first_gpu_of_the_family(gpus: Callable[..., None]) -> None:
    gpus(("NVIDIA H100", (9, 0)), (GPU, (8, 6)), ("another", (8, 6)))
    file = keep(file_for(GPU))
    assert file.name == "tiles_nvidia_imaginary_5.json"
    assert source_of("sm_86") == Source(file, TIMED)
    assert forward_tile("sm_86") == FASTER
    assert forward_tile("sm_90") == find(("forward",), "sm_90", torch.bfloat16, 64, 64, is_frozen=True)


def test_what_was_not_timed_has_the_frozen_tile(gpus: Callable[..., None]) -> None:
    """Another head dim, dtype or kind, which may need more shared memory."""
    gpus((GPU, (8, 6)))
    keep(file_for(GPU))
    frozen = find(("forward",), "sm_86", torch.bfloat16, 64, 64, is_frozen=True)
    assert frozen != FASTER
    assert forward_tile("sm_86", 48) == FASTER, "it is padded to 64"
    assert forward_tile("sm_86", 32) == frozen
    assert forward_tile("sm_86", 64, ("forward with pairs", "forward")) == frozen
    assert forward_tile("sm_86", 320) == find(("forward",), "sm_86", torch.bfloat16, 320, 320, is_frozen=True)
    assert find(("forward",), "sm_86", torch.float32, 64, 64) == find(("forward",), "sm_86", torch.float32, 64, 64, is_frozen=True)


def test_float32_tiles_are_for_products_of_parts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for precision, timed in (("bf16x6", True), ("tf32", False), ("ieee", False)):
        monkeypatch.setattr(tiles, "dot_precision", lambda dtype, precision=precision: precision)
        with on_trial({Place("keys", FLOATS, 128): FASTER}):
            assert (find(("keys",), "sm_86", torch.float32, 128, 128) == FASTER) == timed


def test_split_keys_keep_the_rows_by_which_their_kernel_is_chosen() -> None:
    with on_trial({Place("split keys", NARROW, 128): Tile(16, 128, 8, 3)}):
        assert forward_tile("sm_90", 128, ("split keys",)) == Tile(64, 128, 8, 3)


def test_the_variable_names_a_file_for_its_family_without_a_gpu(gpus: Callable[..., None], tmp_path: Path, monkeypatch: Any) -> None:
    gpus()
    monkeypatch.setenv("DMATTN_TILES", str(keep(tmp_path / "file")))
    assert forward_tile("sm_86") == FASTER
    assert source_of("sm_90").timed is None
    assert source_of("sm_90").ignored == "its tiles are for sm_86, this is sm_90"


@pytest.mark.parametrize("has_gpu", [False, True])
def test_frozen_ignores_all_files(has_gpu: bool, gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(*[(GPU, (8, 6))] * has_gpu)
    keep(file_for(GPU))
    monkeypatch.setenv("DMATTN_TILES", "frozen")
    assert source_of("sm_86") == Source()


def test_tiles_are_read_once(gpus: Callable[..., None]) -> None:
    gpus((GPU, (8, 6)))
    keep(file_for(GPU))
    assert forward_tile("sm_86") == FASTER
    file_for(GPU).unlink()
    assert forward_tile("sm_86") == FASTER
    timed_tiles.forget()
    assert forward_tile("sm_86") != FASTER


ONE = {"forward": {"16 bits": {"64": [64, 64, 4, 2, 512, 128]}}}
BROKEN: dict[str, tuple[dict[str, Any] | str, str]] = {
    "no-json": ("{", "expected JSON: Expecting property name"),
    "a-list": ("[]", "expected format 1, received list"),
    "another-format": ({"format": 2}, "expected format 1, received 2"),
    "other-kernels": ({"kernels": "0"}, "it was made with kernels 0, this is "),
    "another-triton": ({"triton": "3.5.0"}, "it was made with triton 3.5.0, this is "),
    "another-gpu": ({"gpu": "another"}, f"its tiles were timed on another, this is {GPU}"),
    "no-date": ({"date": None}, "expected the names of gpu and family, and a date"),
    "an-unknown-kind": ({"tiles": ONE | {"values": {}}}, "tiles: expected some of bias, bias by intervals, "),
    "an-unknown-head-dim": ({"tiles": {"keys": {"16 bits": {"48": []}}}}, "keys, 16 bits: expected some of 128, 256, 32, 64, received 48"),
    "no-power-of-two": (
        {"tiles": {"keys": {"16 bits": {"64": [48, 64, 4, 2, 512, 0]}}}},
        "no tile of keys, 16 bits, head dim 64: [48, 64, 4, 2, 512, 0]",
    ),
    "too-short": ({"tiles": {"keys": {"16 bits": {"64": [64, 64, 4, 2, 512]}}}}, "no tile of keys"),
    "a-word": ({"tiles": {"keys": {"16 bits": {"64": [64, 64, 4, "2", 512, 0]}}}}, "no tile of keys"),
    "pieces-of-16-bits": ({"tiles": {"keys": {"16 bits": {"64": [64, 64, 4, 2, 32, 0]}}}}, "no tile of keys"),
    "registers-of-no-use": ({"tiles": {"keys": {"16 bits": {"64": [64, 64, 4, 2, 512, 100]}}}}, "no tile of keys"),
    "no-object": ({"tiles": {"keys": [1]}}, "keys: expected an object, received list"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(name: str, gpus: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    content, reason = BROKEN[name]
    gpus((GPU, (8, 6)))
    file = keep(file_for(GPU))
    file.write_text(content if isinstance(content, str) else json.dumps(written(TIMED, {}) | content))
    with caplog.at_level(logging.WARNING, "dmattn"):
        assert forward_tile("sm_86") == find(("forward",), "sm_86", torch.bfloat16, 64, 64, is_frozen=True)
        timed_tiles.forget()
        forward_tile("sm_86")
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"dmattn: timed tiles: {file} is ignored: {reason}")
    assert str(report.Tiles(False, file=str(file), ignored=source_of("sm_86").ignored)).startswith(
        f"not timed on this GPU (dmattn tune times them); {file} is ignored: {reason}"
    )


def test_a_file_that_is_not_there_is_ignored_if_the_variable_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMATTN_TILES", str(tmp_path / "nothing"))
    assert source_of("sm_86") == Source(tmp_path / "nothing", None, "No such file or directory")


def test_a_cache_that_cannot_be_looked_into_is_no_error(gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/" + 300 * "x")  # no system has such a name
    gpus((GPU, (8, 6)))
    source = source_of("sm_86")
    assert source.timed is None
    assert source.ignored == "File name too long"


def test_a_rehearsal_finds_the_tile_of_the_launch(gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus((GPU, (8, 6)))
    keep(file_for(GPU))
    query = torch.empty(1, 2, 100, 64, dtype=torch.bfloat16)
    options = dict(mask=None, bias=None, causal=False, window=None, scale=None, softcap=None)
    problem = Problem.canonical(query, query, query, **options)
    with rehearsed_for("sm_86", 82):
        rehearsed = pick("forward", without_storage(problem))
    with monkeypatch.context() as patch:
        patch.setattr(tiles, "device_family", lambda device: "sm_86")
        assert rehearsed == pick("forward", problem) == FASTER
    assert device_family(query.device) == "interpreter"
    assert pick("forward", problem) == find(("forward",), "interpreter", torch.bfloat16, 64, 64, is_frozen=True)


def test_info_says_where_the_tiles_of_each_gpu_come_from(gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    from dmattn.commands import info

    monkeypatch.setattr(report, "versions", lambda: {"triton": "3.7.0"})
    gpus((GPU, (8, 6)), ("NVIDIA H200", (9, 0)), ("NVIDIA H100", (9, 0)), ("NVIDIA T4", (7, 5)))
    file = keep(file_for(GPU))
    found = report.devices()
    assert found["cuda:0"].tiles == report.Tiles(True, GPU, "2026-11-25", str(file))
    words = [line.strip() for line in info.text().splitlines() if "tiles: " in line]
    untimed = "tiles: not timed on this GPU (dmattn tune times them)"
    assert words == [f"tiles: timed 2026-11-25 on {GPU} ({file})", "tiles: timed (built in)", untimed]
    assert found["cuda:3"].tiles is None
    assert found["cpu"].tiles is None
