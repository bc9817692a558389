"""``dmattn bench``: how long attention takes on this machine, beside PyTorch's own."""

from __future__ import annotations

import argparse
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import progress, report
from .parser import Parser, Result, suggestion

__all__ = ["add"]
DTYPES = ("bf16", "fp16", "fp32")
REMARK = "small problems on a CPU: these times say nothing of a GPU"


def add(commands: Any) -> None:
    """The options: where, in which dtype, beside whom, and into which files."""
    parser = commands.add_parser("bench", help="time six problems of known models beside SDPA and FlexAttention on this machine, and draw them")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    parser.add_argument("--dtype", choices=DTYPES, help="by default bf16 on a GPU and fp32 on a CPU")
    parser.add_argument("--peers", nargs="*", metavar="NAME", help="of flex, sdpa, sdpa_cudnn, sdpa_flash, sdpa_efficient, sdpa_math")
    parser.add_argument("--json", nargs="?", const=True, metavar="FILE", help="one JSON object on standard output, or in this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the picture, by default dmattn_bench_<device>.png in this folder")
    parser.add_argument("--no-plot", action="store_true", help="draw nothing")
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, options: argparse.Namespace) -> Result:
    """Time each problem, print the tables, then write the file and the picture that were asked for; all is well where our bits repeat."""
    from ..bench import compare, contenders, measuring, problems  # which import torch's compiler

    with parser.refusing():
        device = report.pick_device(options.device)
        peers = _peers(options.peers, device.type == "cuda", contenders.PEERS)
    draws = not options.no_plot and (options.plot is not None or find_spec("matplotlib") is not None)
    target = options.plot or Path(f"dmattn_bench_{measuring.slug(device)}.png")
    if draws:
        with parser.refusing():
            _check_matplotlib()
    dtype = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    where = {**measuring.environment(device), "dtype": dtype, "small": device.type != "cuda"}
    report.show_stage(measuring.describe(where) + (f"\n{REMARK}" if where["small"] else ""))
    chosen = [problems.on_a_cpu(problem) if where["small"] else problem for problem in problems.PROBLEMS]
    for problem in chosen:
        report.show_stage(f"  {problem.title}; {problem.extent}")
    records = []
    with progress.bar(len(chosen) * (1 + len(peers)), "timing") as advance:
        for problem in chosen:
            records.append(compare.measure(problem, dtype, device, peers, done=advance))
    compare.show(records, dtype, "title")
    result = {"environment": where, "workloads": records, "plot": str(target) if draws else None}
    if isinstance(options.json, str):
        measuring.write_json(Path(options.json), result)
        print(options.json)
    if draws:
        from .. import figures
        from ..bench import drawing

        figures.save(drawing.draw(result, REMARK if where["small"] else ""), target)
    elif not options.no_plot:
        print("No picture was drawn: pip install 'dmattn[plot]' brings matplotlib, which draws it")
    return Result(result, well=all(compare.sound(record) for record in records))


def _peers(given: list[str] | None, on_gpu: bool, known: tuple[str, ...]) -> list[str]:
    """The peers asked for; by default FlexAttention, and SDPA with each of its fast kernels on a GPU, with the one of its choice on a CPU."""
    if given is None:
        return ["flex", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient"] if on_gpu else ["flex", "sdpa"]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"--peers: expected names of {', '.join(known)}, received {', '.join(unknown)}{suggestion(unknown[0], known)}")
    return given


def _check_matplotlib() -> None:
    """Raise ValueError without matplotlib, before minutes of timing whose picture could not be drawn."""
    from .. import figures

    try:
        figures.needs_matplotlib("--plot")
    except ImportError as error:
        raise ValueError(str(error)) from error
