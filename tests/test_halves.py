"""Each half leaves out the tests that it cannot run; no test is left out of both."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="about both halves, once is enough")

TESTS = Path(__file__).parent


class Seen:
    """A plugin that knows the functions of a collection, and files of which none is made."""

    def __init__(self) -> None:
        self.functions, self.left_out, self.not_here = set(), set(), []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.functions.add(item)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.left_out.update(item for item in items if not item.get_closest_marker("gpu"))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.not_here.append(report.nodeid)


def collected() -> dict:
    """By this process, in its half."""
    seen = Seen()
    alone = [part for name in ("cacheprovider", "faulthandler", "xdist") for part in ("-p", f"no:{name}")]
    status = pytest.main(["--collect-only", "-qq", *alone, f"--rootdir={TESTS.parent}", str(TESTS)], plugins=[seen])
    names = {item.nodeid.split("[")[0] for item in seen.functions - seen.left_out}
    return dict(status=int(status), runs=sorted(names), not_here=seen.not_here)


def collected_elsewhere() -> dict:
    """By another process, in the interpreter's half."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.test_halves"], capture_output=True, text=True, env=environment, cwd=TESTS.parent, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_every_test_runs_in_one_half_or_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "conftest", sys.modules["conftest"])  # which collecting imports anew
    pytorch, kernels = collected(), collected_elsewhere()
    assert pytorch["status"] == kernels["status"] == 0
    written = set()
    for file in TESTS.rglob("test_*.py"):
        name = file.relative_to(TESTS.parent).as_posix()
        if name in pytorch["not_here"]:  # a package that it needs is not installed
            continue
        functions = [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
        written |= {f"{name}::{function}" for function in functions if function.startswith("test_")}
    runs = {*pytorch["runs"], *kernels["runs"]}
    assert runs
    assert written - runs == set()


if __name__ == "__main__":
    print(json.dumps(collected()))
