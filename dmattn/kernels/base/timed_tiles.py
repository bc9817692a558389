"""Tiles that ``dmattn tune`` timed on a GPU, in a file of JSON: one file for each GPU's name, which :mod:`.tiles` asks before its frozen table.

Which file: DMATTN_TILES in the environment names one, or is ``frozen``, which ignores all. Else it is the file of this machine's GPU in
``$XDG_CACHE_HOME/dmattn`` or ``~/.cache/dmattn``. A process reads it once, when the first tile is picked.

The tiles are asked for by family, as rehearsals and ``dmattn compile`` do for tensors without a device. The first visible device of the family
gives the GPU's name. A file that DMATTN_TILES names serves the family that it names, with or without a GPU.

A file that cannot be read, or was made for another GPU or other kernels, is no error of attention: it is ignored, and one warning of the logger
"dmattn" has its name and the reason. One that DMATTN_TILES names is silently left alone by GPUs of other families.
Other tiles sum in another order, so two files give results that differ in rounding; results repeat bit by bit for a given file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from ...notices import once

VARIABLE, FROZEN = "DMATTN_TILES", "frozen"
FORMAT = 1
KERNELS = ("forward", "keys", "queries", "queries of d_bias", "bias", "split keys")
KINDS = frozenset(kernel + what for kernel in KERNELS for what in ("", " with pairs", " by intervals"))
NARROW, FLOATS = "16 bits", "float32"  # dtypes of query, key and value; the latter with products of parts (`dmattn.precision`)
NUMBERS = (NARROW, FLOATS)
HEAD_DIMS = (32, 64, 128, 256)  # the largest of what a tile serves, padded to a power of two


WHOLE = 512  # dims of a piece that is a whole head
# Registers of a thread with which a processor has room for so many programs of 4 warps. Tiles are timed with the first two.
THREE_PROGRAMS, FOUR_PROGRAMS, FIVE_PROGRAMS = 168, 128, 96


class Tile(NamedTuple):
    """Queries and keys per tile, warps per program, stages of the software pipeline; dims of a piece (:mod:`.pieces`) at most.

    A thread has so many `registers` at most, for one more program to have room on a processor, or as the compiler likes where 0.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    dims: int = WHOLE
    registers: int = 0


class Place(NamedTuple):
    """What a tile is for: a kernel with what is particular in its problem, the numbers that it multiplies, the padded head dim."""

    kind: str
    numbers: str
    head_dim: int


Tiles = Mapping[Place, Tile]


class Timed(NamedTuple):
    """A file: the GPU on which its tiles were timed, its family, and when."""

    gpu: str
    family: str
    date: str
    tiles: Tiles


class Source(NamedTuple):
    """Where a family's timed tiles come from: a file, if there is one, what it has, and why that is ignored, if it is."""

    file: Path | None = None
    timed: Timed | None = None
    ignored: str | None = None

    @property
    def tiles(self) -> Tiles:
        return {} if self.timed is None else self.timed.tiles


_on_trial: Tiles | None = None  # in the place of all files


def timed_tile(family: str, place: Place) -> Tile | None:
    """The tile that was timed for a place on a GPU of a family."""
    tiles = source_of(family).tiles if _on_trial is None else _on_trial
    return tiles.get(place)


@contextmanager
def on_trial(tiles: Tiles) -> Iterator[None]:
    """Inside, the process takes these for what was timed, on every family."""
    global _on_trial
    before, _on_trial = _on_trial, tiles
    try:
        yield
    finally:
        _on_trial = before


@cache
def source_of(family: str) -> Source:
    """The source for a family, read once; what is wrong with a file is logged."""
    setting = os.environ.get(VARIABLE)
    if setting == FROZEN:
        return Source()
    gpu = None if setting else gpu_of(family)
    if not setting and gpu is None:
        return Source()
    file = Path(os.path.expanduser(setting)) if setting else file_for(str(gpu))
    try:
        timed = read(file)
        if gpu not in (None, timed.gpu):
            raise ValueError(f"its tiles were timed on {timed.gpu}, this is {gpu}")
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and not setting:
            return Source()  # nothing was timed here
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        once(logging.WARNING, f"timed tiles: {file} is ignored: {reason}", key=f"timed tiles: {file}")
        return Source(file, None, reason)
    return Source(file, timed) if timed.family == family else Source(file, None, f"its tiles are for {timed.family}, this is {family}")


def forget() -> None:
    """Read again at the next pick. Records of calls (`execution.replay`) keep their tiles."""
    source_of.cache_clear()


def gpu_of(family: str) -> str | None:
    """The name of the first visible device of a family."""
    try:
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            if family == ("hip" if torch.version.hip is not None else f"sm_{major}{minor}"):
                return torch.cuda.get_device_name(index)
    except RuntimeError:  # devices that cannot be asked, as in a process that was forked from one that uses them
        pass
    return None


def file_for(gpu: str) -> Path:
    """Where the tiles of a GPU are kept."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(folder, "dmattn", f"tiles_{re.sub('[^a-z0-9]', '_', gpu.lower())}.json")


def read(file: Path) -> Timed:
    """What a file has.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or of another format, or of other kernels, or of another Triton.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        received = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"expected format {FORMAT}, received {received}")
    for name, here in (("triton", triton.__version__), ("kernels", digest())):
        if found.get(name) != here:
            raise ValueError(f"it was made with {name} {found.get(name)}, this is {here}: `dmattn tune` times them again")
    gpu, family, date = (found.get(name) for name in ("gpu", "family", "date"))
    if not all(isinstance(text, str) and text for text in (gpu, family, date)):
        raise ValueError("expected the names of gpu and family, and a date")
    return Timed(gpu, family, date, _tiles_in(found.get("tiles")))


def written(timed: Timed, versions: Mapping[str, str]) -> dict[str, Any]:
    """The JSON object of a file, with the versions of packages for a reader."""
    tiles: dict[str, Any] = {}
    for place, tile in sorted(timed.tiles.items()):
        tiles.setdefault(place.kind, {}).setdefault(place.numbers, {})[str(place.head_dim)] = list(tile)
    made_with = dict(triton=triton.__version__, kernels=digest(), versions=dict(versions))
    return dict(format=FORMAT, gpu=timed.gpu, family=timed.family, date=timed.date, **made_with, tiles=tiles)


@cache
def digest() -> str:
    """Of the sources of all kernels but Hopper's: what fits a GPU, and how fast it is, is known of these alone."""
    folder = Path(__file__).parents[1]
    whole = hashlib.sha256()
    for file in sorted(file for part in ("base", "portable", "visits") for file in (folder / part).glob("*.py")):
        whole.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return whole.hexdigest()[:16]


def _tiles_in(found: Any) -> Tiles:
    tiles = {}
    for kind, by_numbers in _items(found, KINDS, "tiles"):
        for numbers, by_dim in _items(by_numbers, NUMBERS, kind):
            for dim, sizes in _items(by_dim, tuple(map(str, HEAD_DIMS)), f"{kind}, {numbers}"):
                place = Place(kind, numbers, int(dim))
                if not (isinstance(sizes, list) and _possible(place, sizes)):
                    raise ValueError(f"no tile of {kind}, {numbers}, head dim {dim}: {sizes}")
                tiles[place] = Tile(*sizes)
    return tiles


def _items(found: Any, known: Any, where: str) -> Any:
    if not isinstance(found, dict):
        raise ValueError(f"{where}: expected an object, received {type(found).__name__}")
    for name in found:
        if name not in known:
            raise ValueError(f"{where}: expected some of {', '.join(sorted(known))}, received {name}")
    return found.items()


def _possible(place: Place, sizes: list[Any]) -> bool:
    """Whether a kernel can be compiled with such sizes; only products of parts are in pieces, and not those of split keys."""
    if len(sizes) != len(Tile._fields) or any(type(size) is not int for size in sizes):
        return False
    block_m, block_n, warps, stages, dims, registers = sizes
    in_pieces = place.numbers == FLOATS and not place.kind.startswith("split keys")
    return (
        {block_m, block_n} <= {16, 32, 64, 128}
        and warps in (1, 2, 4, 8, 16)
        and 1 <= stages <= 8
        and dims in ((16, 32, 64, 128, 256, 512) if in_pieces else (512,))
        and registers in (0, THREE_PROGRAMS, FOUR_PROGRAMS)
    )
