"""Versions of other packages: those that are installed, those that dmattn was tested with, and a warning outside of them.

The tests read TESTED too: constraints.txt, pyproject.toml, README and docs/limits.md must say the same.
"""

from __future__ import annotations

import re
import warnings
from importlib import metadata
from typing import NamedTuple

import torch

__all__ = ["TESTED", "Tested", "UntestedVersionWarning", "installed", "tested_with", "warn_if_untested"]


class Tested(NamedTuple):
    """The oldest and the newest tested version of a package, as MAJOR.MINOR; both belong to the range."""

    oldest: str
    newest: str

    def includes(self, version: str) -> bool:
        return release(self.oldest) <= release(version) <= release(self.newest)


class UntestedVersionWarning(UserWarning):
    """PyTorch or Triton of this process has a version that dmattn was not tested with. It is shown once, as dmattn is imported."""


TESTED = {"torch": Tested("2.11", "2.13"), "triton": Tested("3.6", "3.7"), "transformers": Tested("5.17", "5.23")}
NAMES = {"torch": "torch", "triton": "Triton", "transformers": "Transformers"}
WARNED_OF = ("torch", "triton")  # those of every process; an integration asks for its own package


def release(version: str) -> tuple[int, int]:
    """(2, 13) of 2.13.0+cpu, of 2.13.0a0 and of 2.13; (0, 0) of a version without such numbers."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def installed(name: str) -> str | None:
    """Version of a package, which is not imported for that; None where it is not there."""
    if name == "torch":
        return str(torch.__version__)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def tested_with() -> str:
    """The ranges in one phrase."""
    return ", ".join(f"{NAMES[name]} {tested.oldest} to {tested.newest}" for name, tested in TESTED.items())


def warn_if_untested() -> None:
    """Warn whoever imports dmattn about a version outside its range.

    Not through the logger: the remedy is the application's, which chooses the versions.
    """
    found = {name: version for name in WARNED_OF if (version := installed(name)) is not None and not TESTED[name].includes(version)}
    if found:
        here = " and ".join(f"{NAMES[name]} {version}" for name, version in found.items())
        message = f"dmattn was tested with {tested_with()}; this is {here}. `python -m dmattn verify` compares its results with float64 here."
        warnings.warn(message, UntestedVersionWarning, stacklevel=3)
