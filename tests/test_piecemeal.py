"""A suite that is run in pieces (tools/piecemeal.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="about the host, which does the same in both halves")
TOOLS = Path(__file__).parent / "tools"
SUITE = """
import os, pytest

def test_right(): pass
def test_wrong(): assert 1 + 1 == 3
@pytest.mark.skipif(True, reason="not here")
def test_elsewhere(): pass
@pytest.mark.parametrize("side", ["left", "right"])
def test_of(side): assert side == "left"
@pytest.fixture
def spoilt():
    yield
    raise OSError
def test_spoilt(spoilt): pass
"""
DYING = "def test_dying(): os._exit(3)"
FAILING = [("test_of[right]", "failed"), ("test_spoilt", "failed"), ("test_spoilt", "passed"), ("test_wrong", "failed")]
AGAIN = [("test_elsewhere", "skipped"), *FAILING]
RUNS = """
import json, os, sys, pytest

for line in sys.stdin:
    folder, arguments = json.loads(line)
    os.chdir(folder)
    sys.modules.pop("test_suite", None)
    print("ended", int(pytest.main(arguments)), flush=True)
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Path, list[str]], None]]:
    """Runs pytest in a folder, in one process for all of them: each would import torch for seconds."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(TOOLS), os.environ.get("PYTHONPATH"))))}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # which each process of xdist would import, too
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with subprocess.Popen([sys.executable, "-c", RUNS], env=environment, text=True, **pipes) as process:

        def of(folder: Path, arguments: list[str]) -> None:
            print(json.dumps([str(folder), arguments]), file=process.stdin, flush=True)
            assert any(line.startswith("ended ") for line in process.stdout)

        yield of
        process.stdin.close()


@pytest.mark.parametrize("workers", [(), ("-p", "xdist.plugin", "-n", "2")], ids=["alone", "xdist"])
def test_what_passed_is_left_out_the_next_time(workers: tuple[str, ...], tmp_path: Path, run: Callable) -> None:
    if workers:
        pytest.importorskip("xdist")
        if not os.environ.get("DMATTN_FULL"):
            pytest.skip("many processes, each of which imports torch: in a full run")
    suite, outcomes = tmp_path / "test_suite.py", tmp_path / "outcomes.jsonl"
    arguments = ["-p", "piecemeal", "--outcomes", str(outcomes), "-p", "no:cacheprovider", *workers, "test_suite.py"]

    def found() -> list[tuple[str, str]]:
        before = outcomes.read_text() if outcomes.exists() else ""
        run(tmp_path, arguments)
        new = [json.loads(line) for line in outcomes.read_text()[len(before) :].splitlines() if line]
        assert all(("1 + 1" in each["why"]) == each["test"].endswith("wrong") for each in new if each["outcome"] == "failed")
        return sorted((each["test"].partition("::")[2], each["outcome"]) for each in new)

    suite.write_text(SUITE)
    assert found() == sorted([("test_right", "passed"), ("test_of[left]", "passed"), *AGAIN])
    with outcomes.open("a") as stream:
        stream.write('{"test": "broken off')
    assert found() == AGAIN
    if workers:  # a process that ends is replaced by one that leaves out the same
        suite.write_text(f"{SUITE}\n{DYING}\n")
        assert found() == sorted([*AGAIN, ("test_dying", "failed")])
        suite.write_text(SUITE)
    outcomes.write_text(outcomes.read_text().replace('"code": "', '"code": "other'))
    assert len(found()) == 2 + len(AGAIN)  # of other code nothing is known
