"""The sweep of ``dmattn tune``: which tiles of the portable kernels are the fastest on a GPU, and the file that keeps them.

A round is one dtype and head dim. All its kernels compile first, side by side. Then each candidate is launched on each problem of its kind,
compared with the frozen tile's results, and timed. Those that look clearly faster than the frozen tile are timed once more, by turns with it.
The first that stays so is judged against float64 on problems that have everything a kernel may have. Whatever goes wrong with a candidate is
the reason why it is refused. What is not clearly faster leaves the frozen tile in its place, so repeated sweeps agree.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import report
from ..equivalence import Case, Standard, judge
from ..execution import replay
from ..kernels.base import tiles, timed_tiles
from ..kernels.base.device import device_family, processors
from ..kernels.base.launch import launching
from ..kernels.base.timed_tiles import FLOATS, NARROW, Place, Tile, Timed, on_trial
from ..precision import dot_precision
from . import measuring, trials
from .candidates import candidates
from .side_by_side import Compilations
from .trials import Call, Launches, Trial

__all__ = ["Found", "Swept", "keep", "sweep"]
CLEARLY = 0.03  # of the frozen tile's time, which a tile has to save
TIED = 0.01  # of the best tile's time, within which the first candidate is taken
FINALISTS, TURNS = 3, 3
BUDGET_MS, MOST_RUNS = 60.0, 12
COMPILING, TIMING = 0.6, 0.85  # of the time that is left, until which kernels are compiled and timed; the rest is for judging
# Norm of the difference from the frozen tile's results, relative to theirs, from which on something else is computed; float64 judges the rest.
FAR = {torch.bfloat16: 0.03, torch.float32: 1e-4}
OUT_OF_TIME = "not reached in time"


class Refused(NamedTuple):
    """A candidate that cannot be taken, and why."""

    tile: Tile
    reason: str


class Found(NamedTuple):
    """What a sweep found for a place: the tile to take, which may be the frozen one, with times over all problems of its kind.

    `missing` says why there is none, and the frozen tile stays.
    """

    kind: str
    dtype: str
    head_dim: int
    frozen: Tile
    frozen_ms: float | None
    best: Tile | None
    best_ms: float | None
    refused: list[Refused]
    missing: str | None

    @property
    def place(self) -> Place:
        return Place(self.kind, numbers_of(self.dtype), self.head_dim)


class Swept(NamedTuple):
    """A sweep: the GPU, what was found, how long it took, and why it ended early, if it did."""

    gpu: str
    family: str
    found: list[Found]
    seconds: float
    stopped: str | None


class Choice(NamedTuple):
    """A tile that a place may have; its time and the frozen tile's, over all problems."""

    tile: Tile
    frozen_ms: float
    ms: float


class Broken(RuntimeError):
    """The device no longer does what it is asked."""


def sweep(
    device: torch.device,
    kernels: Sequence[str],
    head_dims: Sequence[int],
    dtypes: Sequence[str],
    seconds: float,
    show: Callable[[str], None],
    advance: Callable[[str | None], None] = lambda step: None,
    file: Path | None = None,
) -> Swept:
    """Time the tiles of `kernels` for so many seconds, and :func:`keep` those of each round in a file, if one is given.

    A line is shown for each round, and each candidate `advance`s twice.
    """
    swept = Swept(torch.cuda.get_device_name(device), device_family(device), [], 0.0, None)
    start = time.monotonic()
    for dtype in dtypes:
        for head_dim in head_dims:
            one = Round(device, dtype, head_dim, kernels, start + seconds, advance)
            if swept.stopped is None:
                try:
                    one.run()
                except Broken as error:
                    swept = swept._replace(stopped=str(error))
            swept.found.extend(one.results(swept.stopped))
            show(one.line())
            if file is not None:
                keep(swept, file)
    return swept._replace(seconds=time.monotonic() - start)


def steps(kernels: Sequence[str], head_dims: Sequence[int], dtypes: Sequence[str]) -> int:
    """How often a sweep advances, about."""
    rounds = [(dim, numbers_of(dtype)) for dtype in dtypes for dim in head_dims]
    return sum(
        2 * (1 + len(candidates(kernel, numbers, dim)))
        for dim, numbers in rounds
        for trial in trials.timed(dim, kernels)
        for kernel in trial.kinds
    )


def numbers_of(dtype: str) -> str:
    """What the table of tiles calls a dtype."""
    return FLOATS if measuring.DTYPES[dtype] == torch.float32 else NARROW


def keep(swept: Swept, file: Path) -> Timed | None:
    """Write what was found beside what the file has for other places, and have this process use it; None where nothing was found."""
    taken = {each.place: each.best for each in swept.found if each.best is not None}
    if not taken:
        return None
    try:
        before = timed_tiles.read(file)
        if (before.gpu, before.family) == (swept.gpu, swept.family):
            taken = {**before.tiles, **taken}
    except (OSError, ValueError):
        pass  # none, or none that is used
    timed = Timed(swept.gpu, swept.family, datetime.now(timezone.utc).strftime("%Y-%m-%d"), taken)
    measuring.write_json(file, timed_tiles.written(timed, report.versions()))
    timed_tiles.forget()
    replay.forget()
    return timed


class Round:
    """One dtype and head dim: see the module's docstring."""

    def __init__(
        self,
        device: torch.device,
        dtype: str,
        head_dim: int,
        kernels: Sequence[str],
        deadline: float,
        advance: Callable[[str | None], None] = lambda step: None,
    ) -> None:
        self.device, self.name, self.head_dim, self.deadline, self.advance = device, dtype, head_dim, deadline, advance
        self.dtype, self.numbers = measuring.DTYPES[dtype], numbers_of(dtype)
        self.target = device_family(device), processors(device)
        self.trials: dict[Place, list[Trial]] = defaultdict(list)
        self.kernels: dict[Place, str] = {}
        for trial in trials.timed(head_dim, kernels):
            for kernel, kind in trial.kinds.items():
                place = Place(kind, self.numbers, head_dim)
                self.kernels[place] = kernel
                self.trials[place].append(trial)
        self.tiles = {place: self._tiles(kernel, place) for place, kernel in self.kernels.items()}  # the frozen one first
        self.refused: dict[Place, dict[Tile, str]] = defaultdict(dict)
        self.missing: dict[Place, str] = {}
        self.best: dict[Place, Choice] = {}
        self.compiled, self.compiling, self.timing = 0, 0.0, 0.0

    def run(self) -> None:
        """Compile, time, judge.

        Raises:
            Broken: the device is of no use any more. What was found before stays.
        """
        if self.dtype == torch.float32 and dot_precision(self.dtype) != "bf16x6":
            self.missing = dict.fromkeys(self.kernels, "products of float32 are not made of parts here")
            return
        start = time.monotonic()
        left = self.deadline - start
        compiled = self._compile(start + COMPILING * left)  # and on until what is under way is done
        self.compiling = time.monotonic() - start
        choices = {place: self._time(place) for place in compiled if time.monotonic() < start + TIMING * left}
        self._judge({place: choice for place, choice in choices.items() if choice})
        self.timing = time.monotonic() - start - self.compiling

    def results(self, stopped: str | None) -> list[Found]:
        """What was found for each place."""
        found = []
        for place in self.kernels:
            best = self.best.get(place)
            missing = None if best is not None else self.missing.get(place, stopped or OUT_OF_TIME)
            refused = [Refused(*each) for each in self.refused[place].items()]
            tile, frozen_ms, ms = (None, None, None) if best is None else best
            found.append(Found(place.kind, self.name, self.head_dim, self.tiles[place][0], frozen_ms, tile, ms, refused, missing))
        return found

    def line(self) -> str:
        """The round in a line."""
        faster = sum(choice.tile != self.tiles[place][0] for place, choice in self.best.items())
        took = f"{self.compiled} kernels compiled in {self.compiling:.0f} s, timed and judged in {self.timing:.0f} s"
        reached = f"{len(self.best)} of {len(self.kernels)} kinds reached, {faster} get a faster tile"
        return f"{self.name}, head dim {self.head_dim}: {took}; {reached}"

    def _tiles(self, kernel: str, place: Place) -> list[Tile]:
        frozen = tiles.find((place.kind, kernel), self.target[0], self.dtype, self.head_dim, self.head_dim, is_frozen=True)
        tried = [frozen, *candidates(kernel, self.numbers, self.head_dim)]
        if kernel == "split keys":  # see `tiles.find`
            tried = [tile._replace(block_m=frozen.block_m) for tile in tried]
        return list(dict.fromkeys(tried))

    def _launches(self, place: Place, trial: Trial) -> Launches:
        problem, d_out = trials.of_workload(trial.workload, self.dtype, self.device)
        return trials.launches_of(problem, d_out, None, [self.kernels[place]])

    def _compile(self, until: float) -> list[Place]:
        """The places of which all is compiled that can be."""
        compilations: Compilations[tuple[Place, Tile]] = Compilations(self.device, self.target)
        asked = []
        for place in self.kernels:
            if time.monotonic() > until:
                break
            try:
                if all(
                    self._ask(compilations, place, self._launches(place, trial), {(place, tile): tile for tile in self.tiles[place]}, until)
                    for trial in self.trials[place]
                ):
                    asked.append(place)
            except Exception as error:
                self._miss(place, "compiling", error)
        compilations.finish()
        self.compiled += compilations.kernels
        for (place, tile), why in compilations.failed.items():
            self.refused[place][tile] = why
        return asked

    def _ask(self, compilations: Compilations[Any], place: Place, launches: Launches, by_key: dict[Any, Tile], until: float) -> bool:
        """Compile what a problem takes, and the kernel of a place with each tile; whether there was time for all."""
        for before in launches.before:
            compilations.ask(None, before.function, before.arguments, {})
        call = launches.kernels[self.kernels[place]]
        for key, tile in by_key.items():
            if time.monotonic() > until:
                return False
            compilations.ask(key, call.function, call.arguments, {place: tile})
            self.advance(f"compiling {place.kind}")
        return True

    def _time(self, place: Place) -> list[Choice]:
        """The tiles that a place may have, the best first, the frozen one last; none where that cannot be said."""
        frozen, *others = self.tiles[place]
        times: dict[Tile, list[float]] = defaultdict(list)
        try:
            for trial in self.trials[place]:
                with self._ready(place, trial) as call:
                    expected = None
                    for tile in self.tiles[place]:
                        self.advance(f"timing {place.kind}")
                        if tile not in self.refused[place]:
                            expected = self._try(place, tile, call, expected, times)
                if frozen in self.refused[place]:
                    self.missing[place] = f"the frozen tile: {self.refused[place][frozen]}"
                    return []
            ratios = {tile: _ratio(times[tile], times[frozen]) for tile in others if tile not in self.refused[place]}
            finalists = sorted((tile for tile in ratios if ratios[tile] <= 1 - CLEARLY), key=ratios.__getitem__)[:FINALISTS]
            again = self._time_again(place, finalists)
        except Exception as error:
            self._miss(place, trial.workload.name, error)
            return []
        choices = [Choice(tile, sum(theirs), sum(own)) for tile, (own, theirs) in again.items() if _ratio(own, theirs) <= 1 - CLEARLY]
        least = min((choice.ms / choice.frozen_ms for choice in choices), default=0.0)
        order = self.tiles[place].index
        choices.sort(key=lambda choice: (choice.ms / choice.frozen_ms > least * (1 + TIED), order(choice.tile)))
        total = sum(times[frozen])
        return [*choices, Choice(frozen, total, total)]

    def _try(self, place: Place, tile: Tile, call: Call, expected: Any, times: dict[Tile, list[float]]) -> Any:
        """Launch with a tile, compare its results with the `expected` ones, if any, and time it; the results to expect of others."""
        try:
            with on_trial({place: tile}):
                found = call.made()
                if expected is not None:
                    _compare(found, expected, FAR[self.dtype])
                times[tile].append(self._milliseconds(call))
        except Exception as error:
            self.refused[place].setdefault(tile, measuring.reason(error))
            self._check_device()
            return expected
        return {name: x.clone() for name, x in found.items()} if expected is None else expected

    def _time_again(self, place: Place, finalists: Sequence[Tile]) -> dict[Tile, tuple[list[float], list[float]]]:
        """Times of each finalist and of the frozen tile by turns, by problem."""
        found: dict[Tile, tuple[list[float], list[float]]] = {tile: ([], []) for tile in finalists}
        for trial in self.trials[place] if finalists else ():
            with self._ready(place, trial) as call:
                for tile, (own, theirs) in found.items():
                    turns = []
                    for _ in range(TURNS):
                        pair = []
                        for each in (tile, self.tiles[place][0]):
                            with on_trial({place: each}):
                                pair.append(self._milliseconds(call))
                        turns.append(pair)
                    own.append(statistics.median(turn[0] for turn in turns))
                    theirs.append(statistics.median(turn[1] for turn in turns))
        return found

    @contextmanager
    def _ready(self, place: Place, trial: Trial) -> Iterator[Call]:
        """The kernel's call on a problem, with all that it reads in memory."""
        launches = self._launches(place, trial)
        with launching(launches.problem.query), torch.no_grad():
            launches.prepare()
            yield launches.kernels[self.kernels[place]]

    def _milliseconds(self, call: Call) -> float:
        return measuring.measure(call.launch, self.device, BUDGET_MS, MOST_RUNS, warm_ups=1).median

    def _judge(self, choices: dict[Place, list[Choice]]) -> None:
        """Take for each place the first choice whose results are as exact as they have to be; the frozen tile is known to be."""
        compilations: Compilations[Place] = Compilations(self.device, self.target)
        for place, (first, *others) in choices.items():
            try:
                for case in self._cases(place) if others else ():
                    problem, inputs = trials.of_case(case, self.dtype, self.device)
                    launches = trials.launches_of(problem, inputs.d_out, inputs.d_lse, [self.kernels[place]])
                    self._ask(compilations, place, launches, {place: first.tile}, self.deadline)
            except Exception:
                self._check_device()  # the same is met again below, and is then a reason
        compilations.finish()
        self.compiled += compilations.kernels
        standards: dict[Case, Standard] = {}
        for place, tried in choices.items():
            for choice in tried[:-1]:
                if time.monotonic() > self.deadline:
                    self.refused[place][choice.tile] = "not judged in time"
                    continue
                try:
                    for case in self._cases(place):
                        self._judge_case(place, choice.tile, case, standards)
                    self.best[place] = choice
                    break
                except Exception as error:
                    self.refused[place][choice.tile] = measuring.reason(error)
                    self._check_device()
            self.best.setdefault(place, tried[-1])

    def _judge_case(self, place: Place, tile: Tile, case: Case, standards: dict[Case, Standard]) -> None:
        problem, inputs = trials.of_case(case, self.dtype, self.device)
        launches = trials.launches_of(problem, inputs.d_out, inputs.d_lse, [self.kernels[place]])
        with launching(problem.query), torch.no_grad():
            launches.prepare()
            with on_trial({place: tile}):
                found = launches.kernels[self.kernels[place]].made()
        if case not in standards:
            standards[case] = Standard.of(inputs, case.options)
        wrong = [verdict for verdict in judge(found, standards[case]) if not verdict.passed]
        if wrong:
            raise ValueError(f"{case.name}: {wrong[0]}")

    def _cases(self, place: Place) -> list[Case]:
        return list(trials.cases(self.kernels[place], place.kind, self.head_dim))

    def _miss(self, place: Place, problem: str, error: Exception) -> None:
        """Leave a place, because of an error that is no candidate's."""
        if isinstance(error, Broken):
            raise error
        self.missing[place] = f"{problem}: {measuring.reason(error)}"
        self._check_device()
        measuring.release(self.device)

    def _check_device(self) -> None:
        """Raise Broken if an error has left the device of no use."""
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise Broken(f"the device is broken: {measuring.reason(error)}") from error


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor], far: float) -> None:
    """Raise ValueError where results are far from those that are expected: what is no number has to be none in both."""
    for name, x in found.items():
        y = expected[name]
        apart = torch.where((x == y) | (x.isnan() & y.isnan()), 0, x.float() - y.float())
        size = torch.linalg.vector_norm(torch.where(y.isfinite(), y, 0), dtype=torch.float32).item()
        distance = torch.linalg.vector_norm(apart).item()
        if not distance <= far * size:
            raise ValueError(f"{name} differs from the frozen tile's by {distance:.3g}, of {size:.3g}")


def _ratio(own: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over problems of a time relative to another."""
    return statistics.median(mine / other for mine, other in zip(own, theirs, strict=True))
