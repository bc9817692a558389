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
COLLECT = """
import json, sys, pytest

class Seen:
    functions, left_out, not_here = set(), set(), []

    def pytest_itemcollected(self, item):
        self.functions.add(item)

    def pytest_deselected(self, items):
        self.left_out.update(item for item in items if not item.get_closest_marker("gpu"))

    def pytest_collectreport(self, report):
        if report.skipped:
            self.not_here.append(report.nodeid)

seen = Seen()
status = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", sys.argv[1]], plugins=[seen])
names = {item.nodeid.split("[")[0] for item in seen.functions - seen.left_out}
print(json.dumps(dict(status=int(status), runs=sorted(names), not_here=seen.not_here)))
"""


def collected(interpret: str) -> dict:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {"TRITON_INTERPRET": interpret}
    call = [sys.executable, "-c", COLLECT, str(TESTS)]
    run = subprocess.run(call, capture_output=True, text=True, env=environment, cwd=TESTS.parent, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_every_test_runs_in_one_half_or_on_a_gpu() -> None:
    pytorch, kernels = collected("0"), collected("1")
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
