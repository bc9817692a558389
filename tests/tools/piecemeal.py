"""A plugin of pytest for a suite that one sitting is too short for: what passed is not run again.

``PYTHONPATH=tests/tools python -m pytest -p piecemeal --outcomes FILE -m gpu -n 32`` writes a line of JSON to FILE as each test ends, so that a
run that is ended has its outcomes, those of failures with their tracebacks. Tests that FILE says passed or were skipped are left out, unless
the sources changed since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmattn.bench.measuring import sources


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="written as tests end, and read for those that passed already")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = {each["test"] for each in recorded(config.getoption("--outcomes")) if each["outcome"] != "failed"}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of xdist, whose reports come to the process that writes
        config.pluginmanager.register(Writer(config.getoption("--outcomes")))


def recorded(file: Path) -> Iterator[dict]:
    """The outcomes that a file has of these sources; the last line may be broken off."""
    for line in file.read_text().splitlines() if file.exists() else ():
        if line.endswith("}"):
            outcome = json.loads(line)
            if outcome["sources"] == sources():
                yield outcome


class Writer:
    """Appends each outcome to the file."""

    def __init__(self, file: Path) -> None:
        broken_off = file.exists() and file.read_text()[-1:] not in ("", "\n")
        self.stream = file.open("a", buffering=1)
        self.stream.write("\n" if broken_off else "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that was set up ends with its call, whose outcome a failing teardown follows."""
        if report.when == "call" or not report.passed:
            why = None if report.passed else str(report.longrepr)
            found = dict(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), why=why, sources=sources())
            self.stream.write(json.dumps(found) + "\n")

    def pytest_unconfigure(self) -> None:
        self.stream.close()
