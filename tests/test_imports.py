"""Imports: those that dmattn and a first call bring into a process of their own, and which way those within dmattn point."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from forks import in_processes

from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="about imports, which are the same in both halves")

ROOT = Path(__file__).resolve().parents[1]

CALL = """
import torch, dmattn
query, key, value = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
bias = torch.randn(1, 2, 8, 8, requires_grad=True)
dmattn.attention(query, key, value, bias=bias, causal=True).sum().backward()
"""
ON_A_GPU = f"""{CALL}
from dmattn.execution import backend, replay
from dmattn.problem import Problem
replay.switch("1", "cpu")  # the recorder of a GPU's calls
dmattn.attention(query, key, value, bias=bias, causal=True).sum().backward()
query = torch.empty(1, 2, 8, 16, device="meta")  # a rehearsal of the kernels
problem = Problem.canonical(query, query.mT.contiguous().mT, query, mask=None, bias=None, causal=True, window=None, scale=None, softcap=None)
backend.allocate_forward(problem)
backend.allocate_backward(problem, (True,) * 5)
"""
PACKED = """
import torch, dmattn
rows = torch.randn(8, 2, 16, requires_grad=True)
ends = torch.tensor([0, 3, 8])
dmattn.attention_varlen(rows, rows, rows, ends, ends, max_seqlen_q=5, max_seqlen_k=5).sum().backward()
"""
MASKS = """
import torch, dmattn
query = torch.zeros(1, 2, 8, 16)
mask = dmattn.IntervalMask.documents(torch.zeros(1, 8, dtype=torch.long)) | dmattn.IntervalMask.window(8, 8, left=1, right=1)
dmattn.attention(query, query, query, mask=mask)
dmattn.scaled_dot_product_attention(query, query, query)
"""
HELP = """
from dmattn.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
"""

TRANSFORMERS = (
    ("dense_bias", "described", "interface", "packed", "saved_config", "selected_keys"),
    ("described_bias", "described_mask"),
    ("attention", "bucket_tables"),
    ("families",),
    ("class_tables", "masks"),
    ("converted_layer", "patching", "shared_attention"),
    ("shared_batch",),
    ("conversion", "switch"),
    ("loading",),
    ("__init__",),
)
# A module imports from the lines above its own alone; inside a package that has a name here, from that package too. `__init__` is dmattn itself.
LAYERS = (
    (
        "absent",
        "arguments",
        "bits",
        "broadcast",
        "distances",
        "dropout",
        "figures",
        "first_call",
        "graphs",
        "notices",
        "own_rows",
        "precision",
        "progress",
        "recording",
        "rehearsal",
        "selection",
        "states",
        "unions",
        "versions",
    ),
    ("advice", "growing", "mask_checks"),
    ("biases", "mask_mods", "masks"),
    ("block_mask", "fields"),
    ("checks",),
    ("problem",),
    ("kernels",),
    ("reference",),
    (
        "execution.__init__",
        "execution.mapped",
        "execution.private",
        "execution.record",
        "execution.sequences",
        "execution.torch_kernel",
        "execution.watching",
    ),
    ("execution.guards", "execution.recorder", "execution.torch_path"),
    ("execution.backend", "execution.replay"),
    ("costs", "execution.passes", "factors", "targets"),
    ("execution.derivatives",),
    ("execution.flops", "execution.operators"),
    ("execution.eager",),
    ("functional",),
    ("dynamic", "explain", "varlen"),
    ("compat", "module", "plot", "sdpa"),
    ("__init__",),
    ("distributed.first_derivative", "distributed.ranks", "distributed.shares"),
    ("distributed.messages", "distributed.plan", "distributed.sums"),
    ("distributed.fetch", "distributed.heads", "distributed.pairs", "distributed.sharding"),
    ("distributed.ring", "distributed.wanted"),
    ("distributed.context_parallel",),
    ("distributed.dynamic",),
    ("distributed.__init__",),
    ("equivalence", "integrations.__init__", "integrations.diffusers", "integrations.doge"),
    *(tuple(f"integrations.transformers.{name}" for name in names) for names in TRANSFORMERS),
    ("compilation", "report"),
    ("verify",),
    ("bench.__init__", "bench.distributions", "bench.measuring"),
    ("bench.workload",),
    ("bench.candidates", "bench.peers", "bench.problems", "bench.side_by_side", "bench.trials"),
    ("bench.tuning",),
    ("bench.contenders",),
    ("bench.compare",),
    ("bench.drawing",),
    ("commands.parser",),
    ("commands.call", "commands.completion", "commands.info"),
    ("commands.bench", "commands.compile", "commands.explain", "commands.tune", "commands.verify"),
    ("commands.__init__",),
    ("cli",),
    ("__main__",),
)
BELOW_KERNELS = {"bits", "broadcast", "dropout", "growing", "notices", "own_rows", "precision", "problem"}
BELOW_KERNELS |= {"recording", "rehearsal", "selection", "states"}


CODES = {
    "import": "import dmattn",
    "call": CALL,
    "on-a-gpu": ON_A_GPU,
    "packed": PACKED,
    "help": HELP,
    "masks": MASKS,
    "seen": "import dmattn, torch._dynamo",
}


@cache
def imported() -> dict[str, set[str]]:
    """By code, the modules that a process has after it ran that on the PyTorch path."""
    codes = [f"import os, sys\nos.environ['TRITON_INTERPRET'] = '0'\n{code}\nprint('\\n' + ' '.join(sys.modules))" for code in CODES.values()]
    runs = in_processes(codes)
    assert all(run.returncode == 0 for run in runs), [run.stderr for run in runs]
    return {name: set(run.stdout.splitlines()[-1].split()) for name, run in zip(CODES, runs, strict=True)}


def test_the_compiler_is_not_imported() -> None:
    """torch._dynamo takes 2.5 seconds and 130 MB, sympy 3 seconds and more on a slow machine."""
    found = {name: {"torch._dynamo", "sympy"} & modules for name, modules in imported().items()}
    assert found.pop("seen") >= {"torch._dynamo"}, "a package that is imported anyway is seen"
    assert not any(found.values()), found


def test_help_imports_no_more_than_the_package() -> None:
    """But the two commands themselves."""
    of_commands = {name for name in imported()["help"] - imported()["import"] if not name.startswith("dmattn.")}
    assert not of_commands & {"transformers", "triton", "rich", "torch._inductor"}, of_commands


def imports_of(package: Path) -> dict[str, set[str]]:
    """By module of a package, the others that it imports: at its top, inside functions, and for type checkers alone.

    That Python also runs the ``__init__`` of each folder on the way to a module does not count.
    """
    files = {".".join(path.relative_to(package).with_suffix("").parts): path for path in package.rglob("*.py")}

    def module(place: list[str]) -> str:
        name = ".".join(place)
        return name if name in files else ".".join([*place, "__init__"])

    def named(node: ast.AST, folder: list[str]) -> list[str]:
        if isinstance(node, ast.Import):
            places = [alias.name.split(".") for alias in node.names]
            return [module(place[1:]) for place in places if place[0] == package.name]
        if not isinstance(node, ast.ImportFrom):
            return []
        place = (node.module or "").split(".") if node.module else []
        if node.level:
            place = [*folder[: len(folder) - node.level + 1], *place]
        elif place[0] == package.name:
            place = place[1:]
        else:
            return []
        inside = [module([*place, alias.name]) for alias in node.names]
        return [name if name in files else module(place) for name in inside]

    return {
        name: {found for node in ast.walk(ast.parse(path.read_text())) for found in named(node, name.split(".")[:-1])} - {name}
        for name, path in files.items()
    }


def in_circles(imports: dict[str, set[str]]) -> set[str]:
    """The modules of circles, and those on a way from one circle to another."""
    left = set(imports)
    while True:
        importing = {name for name in left if imports[name] & left}
        kept = importing & {name for each in importing for name in imports[each]}
        if kept == left:
            return left
        left = kept


def line_of(module: str) -> tuple[int, str]:
    """Where LAYERS has a module or its package, and under which name."""
    found = [(line, name) for line, names in enumerate(LAYERS) for name in names if f"{module}.".startswith(f"{name}.")]
    assert len(found) == 1, f"{module} stands in LAYERS {len(found)} times"
    return found[0]


def arrows_up(imports: dict[str, set[str]]) -> list[str]:
    """The imports that LAYERS does not allow."""
    places = {module: line_of(module) for module in imports}
    arrows = [(module, other) for module, others in imports.items() for other in others]
    return [f"{module} -> {other}" for module, other in arrows if places[module] != places[other] and places[other][0] >= places[module][0]]


def test_no_import_circle() -> None:
    assert not in_circles(imports_of(ROOT / "dmattn"))


def test_no_import_points_up() -> None:
    assert not arrows_up(imports_of(ROOT / "dmattn"))


def test_kernels_import_no_more_of_ours_than_they_say() -> None:
    """In the first sentence of the package's docstring."""
    modules = imports_of(ROOT / "dmattn").items()
    outside = {other for module, others in modules if module.startswith("kernels.") for other in others if not other.startswith("kernels.")}
    assert outside == BELOW_KERNELS
    said = ast.get_docstring(ast.parse((ROOT / "dmattn" / "kernels" / "__init__.py").read_text()))
    assert said is not None
    assert set(re.findall(r"`(\w+)`", said.partition("\n\n")[0])) == BELOW_KERNELS


def test_every_layer_is_there() -> None:
    modules = imports_of(ROOT / "dmattn")
    empty = {name for names in LAYERS for name in names} - {line_of(module)[1] for module in modules}
    assert not empty


def test_circles_and_arrows_are_found_inside_functions(tmp_path: Path) -> None:
    """Such as a launcher that kernels call, and that imports kernels when it is called."""
    package = tmp_path / "dmattn"
    files = {
        "__init__": "from .functional import attention",
        "functional": "import dmattn.reference\nfrom . import precision",
        "reference": "",
        "precision": "def late():\n    from .kernels import forward",
        "kernels.__init__": "from .forward import forward",
        "kernels.forward": "from ..precision import late\nfrom dmattn import reference",
    }
    for name, code in files.items():
        path = package.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(code)
    imports = imports_of(package)
    assert imports == {
        "__init__": {"functional"},
        "functional": {"reference", "precision"},
        "reference": set(),
        "precision": {"kernels.forward"},
        "kernels.__init__": {"kernels.forward"},
        "kernels.forward": {"precision", "reference"},
    }
    assert in_circles(imports) == {"precision", "kernels.forward"}
    assert sorted(arrows_up(imports)) == ["kernels.forward -> reference", "precision -> kernels.forward"]
