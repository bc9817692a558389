"""A plugin of pytest for a suite that one sitting is too short for: what passed is not run again.

``PYTHONPATH=tests/tools python -m pytest -p piecemeal --outcomes FILE -m gpu -n 32`` writes a line of JSON to FILE as each test ends, so that a
run that is ended has its outcomes, those of failures with their tracebacks. Tests that passed, by FILE, are left out, unless the package, the
tests, torch, Triton or the GPUs are others than then.
"""

from __future__ import annotations

import hashlib
import json
import sys
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DONE = "piecemeal_done"  # what a process of xdist is told, all of them the same, also one that replaces another


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="written as tests end, and read for those that passed already")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of xdist, whose reports come to the process that writes
        config.pluginmanager.register(Writer(config.getoption("--outcomes")), DONE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = set(config.workerinput[DONE] if hasattr(config, "workerinput") else config.pluginmanager.get_plugin(DONE).done)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]


@cache
def code() -> str:
    """A digest of what decides how a test ends. Only the process that writes needs it, and what it imports takes seconds."""
    import torch

    from dmattn.bench.measuring import sources
    from dmattn.versions import installed

    digest = hashlib.sha256(sources().encode())
    for file in sorted(TESTS.rglob("*.py")):
        digest.update(file.read_bytes())
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    digest.update(repr((sys.version, torch.__version__, installed("triton"), gpus)).encode())
    return digest.hexdigest()[:16]


def passed(file: Path) -> list[str]:
    """The tests that passed when all was as it is now, and had no failure; the last line of the file may be broken off."""
    lines = file.read_text().splitlines() if file.exists() else []
    outcomes = [outcome for line in lines if line.endswith("}") and (outcome := json.loads(line))["code"] == code()]
    failed = {each["test"] for each in outcomes if each["outcome"] == "failed"}
    return sorted({each["test"] for each in outcomes if each["outcome"] == "passed"} - failed)


class Writer:
    """Appends each outcome to the file."""

    def __init__(self, file: Path) -> None:
        self.done = passed(file)
        broken_off = file.exists() and file.read_text()[-1:] not in ("", "\n")
        self.stream = file.open("a", buffering=1)
        self.stream.write("\n" if broken_off else "")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: object) -> None:
        """Of xdist: tell a process what is done, as it was at the start."""
        node.workerinput[DONE] = self.done  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that was set up ends with its call, whose outcome a failing teardown follows."""
        if report.when == "call" or not report.passed:
            why = None if report.passed else str(report.longrepr)
            found = dict(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), why=why, code=code())
            self.stream.write(json.dumps(found) + "\n")

    def pytest_unconfigure(self) -> None:
        self.stream.close()
