"""Compare what kernels compile to, and how they are launched, with an earlier commit.

    python tests/tools/same_ptx.py BASE [--targets sm_80 sm_90 gfx942] [--python OTHER ...] [--kernels hopper_forward]
                                    [--renamed _old_kernel=_new_kernel ...]

For a change that should move or rename code alone. The launches are those of the compile report of each tree, on tensors without storage, so
no GPU is needed. A launch is its case, kernel, grid and the numbers that the kernel gets; a compilation is its assembly (PTX, or AMD's), the
warps and the bytes of shared memory. Assembly is made without line numbers; names of modules do not appear in it, those of kernels do.

A kernel that has another name than in BASE is a difference, unless `--renamed` names it: then BASE's assembly and launches are read with the new
name.

`--python` is an interpreter with another Triton, and may be repeated; without it the running one is taken. Records of commits are kept in
build/same_ptx/. Prints each difference, with files to diff, and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "same_ptx"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


class Wanted(NamedTuple):
    """Which compilations a record is to have."""

    target: str
    kernels: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a commit")
    parser.add_argument("--targets", nargs="*", default=TARGETS)
    parser.add_argument("--python", nargs="*", default=[sys.executable])
    parser.add_argument(
        "--kernels",
        default="",
        help="compile only those whose module and name, as in hopper_forward._forward_kernel, have this regular expression",
    )
    parser.add_argument("--renamed", nargs="*", default=[], metavar="OLD=NEW", help="a kernel of BASE and its name here")
    options = parser.parse_args()
    renamed = dict(pair.split("=") for pair in options.renamed)
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", options.base], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    differences = 0
    for python in options.python:
        triton = subprocess.run(
            [python, "-c", "import triton; print(triton.__version__)"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for target in options.targets:
            wanted = Wanted(target, options.kernels)
            name = "-".join([target, triton, *re.findall(r"\w+", options.kernels)])
            base = with_names(renamed, _base(commit, python, wanted, name), KEPT / commit / name)
            here = _record(ROOT, python, wanted, KEPT / "here" / name)
            differences += compare(base, here, f"{target}, Triton {triton}")
    return int(differences > 0)


def with_names(renamed: dict[str, str], record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A record whose assembly is in `folder`, as it would be with other names of kernels."""
    compilations = []
    for kernel, digest, *measured in record["compilations"]:
        if kernel in renamed and measured:
            code = (folder / f"{digest}.txt").read_text()
            code = re.sub(rf"(?<![a-z0-9_]){kernel}(?=_param_|\b)", renamed[kernel], code)
            digest = hashlib.sha256(code.encode()).hexdigest()[:12]
            (folder / f"{digest}.txt").write_text(code)
        compilations.append([renamed.get(kernel, kernel), digest, *measured])
    launches = [[case, renamed.get(kernel, kernel), *others] for case, kernel, *others in record["launches"]]
    return {"launches": launches, "compilations": compilations}


def compare(base: dict[str, Any], here: dict[str, Any], title: str) -> int:
    """Print how two records differ; returns the number of differences."""
    found = []
    for what in ("launches", "compilations"):
        before, now = (Counter(json.dumps(each) for each in record[what]) for record in (base, here))
        found += [f"only before: {what} {each}" for each in sorted((before - now).elements())]
        found += [f"only now:    {what} {each}" for each in sorted((now - before).elements())]
    counts = f"{len(here['launches'])} launches, {len(here['compilations'])} compilations"
    print(f"{title}: {counts}, {f'{len(found)} differences' if found else 'the same'}", *found, sep="\n  ", flush=True)
    return len(found)


def _base(commit: str, python: str, wanted: Wanted, name: str) -> dict[str, Any]:
    kept = KEPT / commit / name / "record.json"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "archive", commit, "dmattn", "tests"], cwd=ROOT, capture_output=True, check=True).stdout
            subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
            _record(Path(folder), python, wanted, kept.parent)
    return json.loads(kept.read_text())


def _record(tree: Path, python: str, wanted: Wanted, folder: Path) -> dict[str, Any]:
    """The record of a tree, made by another process with this file and the compile report of that tree."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= dict(TRITON_DISABLE_LINE_INFO="1", PYTHONPATH=str(tree), OMP_NUM_THREADS="1")
    subprocess.run([python, __file__, "--record", str(tree), str(folder), json.dumps(wanted)], env=environment, check=True)
    return json.loads((folder / "record.json").read_text())


def record(tree: Path, folder: Path, wanted: Wanted) -> None:
    """Write record.json and the assembly of each compilation into `folder`; in a process of its own, whose `dmattn` is the tree's."""
    sys.path[:0] = [str(tree), str(tree / "tests"), str(tree / "tests" / "tools")]
    import compile_report
    from triton.backends.amd.compiler import HIPBackend
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction

    import dmattn

    assert Path(dmattn.__file__).is_relative_to(tree), dmattn.__file__
    # the assembly is all that is looked at: no assembler
    CUDABackend.make_cubin = HIPBackend.make_hsaco = lambda *stage, **options: b""
    launches: list[list[Any]] = []
    compiler: list[Any] = []
    launch, enter, compile_one = JITFunction.run, compile_report.Compiler.__enter__, compile_report.Compiler.launched

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if compiler and not warmup:
            bound = function.signature.bind(*args, **{name: x for name, x in kwargs.items() if name in function.signature.parameters})
            bound.apply_defaults()
            passed = [x for parameter, x in zip(function.params, bound.arguments.values(), strict=True) if not parameter.is_constexpr]
            grid = tuple(grid(bound.arguments)) if callable(grid) else tuple(grid)
            numbers = hashlib.sha256(repr(list(_leaves(passed))).encode()).hexdigest()[:12]
            launches.append([compiler[-1].case, function.fn.__name__, grid, numbers])
        return launch(function, *args, grid=grid, warmup=warmup, **kwargs)

    def launched(self: Any, function: Any, *others: Any) -> None:
        if re.search(wanted.kernels, f"{function.fn.__module__}.{function.fn.__name__}"):
            compile_one(self, function, *others)

    def entered(self: Any) -> Any:
        enter(self)
        launches.clear()  # of a compiler that only noted them
        compiler.append(self)
        return self

    def measures(compiled: Any, log: str, target: Any) -> dict[str, Any]:
        code = normal(compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"])
        digest = hashlib.sha256(code.encode()).hexdigest()[:12]
        (folder / f"{digest}.txt").write_text(code)
        return {"compiled": [digest, compiled.metadata.num_warps, compiled.metadata.shared]}

    JITFunction.run, compile_report.measures = run, measures
    compile_report.Compiler.__enter__, compile_report.Compiler.launched = entered, launched
    for old in folder.glob("*.txt"):
        old.unlink()
    rows = compile_report.report(wanted.target)
    # One case compiles what others use too, and which one comes first is no difference.
    compilations = sorted({(row["kernel"], *row.get("compiled", ["does not compile"])) for row in rows})
    (folder / "record.json").write_text(json.dumps({"launches": launches, "compilations": compilations}))


def normal(code: str) -> str:
    """Assembly without comments and sections that only debuggers read."""
    code = re.sub(r"^\s*\.section\s+\.debug.*?^\s*\}", "", code, flags=re.MULTILINE | re.DOTALL)
    code = re.sub(r"^\s*\.(loc|file)\b.*$", "", code, flags=re.MULTILINE)
    code = re.sub(r"^\$L__tmp\d+:$", "", code, flags=re.MULTILINE)
    code = re.sub(r"[ \t]*(//|;).*$" if ".amdgcn_target" in code else r"[ \t]*//.*$", "", code, flags=re.MULTILINE)
    return "\n".join(line for line in code.splitlines() if line.strip()) + "\n"


def _leaves(x: Any) -> Any:
    """What a kernel gets at run time: numbers, and of tensors the dtype and the number of elements."""
    if isinstance(x, (list, tuple)):
        for each in x:
            yield from _leaves(each)
    elif hasattr(x, "block_shape"):  # a descriptor of the copy engine
        yield from ("descriptor", *map(int, x.shape), *map(int, x.strides), *x.block_shape, str(getattr(x, "layout", "")))
    elif hasattr(x, "numel"):
        yield from (str(x.dtype), x.numel())
    elif isinstance(x, (bool, int, float)):
        yield x


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(Path(sys.argv[2]), Path(sys.argv[3]), Wanted(*json.loads(sys.argv[4])))
    else:
        sys.exit(main())
