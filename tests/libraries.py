"""Libraries that a few tests look at for real, from a folder of their own (recipes.txt) where `make test` has made one."""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

# By way of site-packages: Hypothesis reads all the modules that it takes for local ones for their constants, half a minute of these.
_INSTALLED = Path(sysconfig.get_path("purelib"))
FOLDER = _INSTALLED / os.path.relpath(Path(sys.prefix) / "recipes", _INSTALLED)
_schemas: list[torch.library.Library] = []


def library(name: str) -> ModuleType:
    """A module of one of the libraries, for the length of a test (conftest.py); the test is skipped where it is not installed."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
        if find_spec("torchvision") is not None:  # others import it where it is there
            _torchvision()
    package = name.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed (tests/recipes.txt)")
    return _torchvision() if name == "torchvision" else import_module(name)


def _torchvision() -> ModuleType:
    """torchvision, beside a torch for which it was not built as well.

    Its compiled operators do not load then, which its models do not need. But it describes two of them to torch when it is imported, and torch
    refuses the description of an operator that is not there.
    """
    try:
        return import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    operators = torch.library.Library("torchvision", "DEF")
    for each in ("nms", "qnms"):
        operators.define(f"{each}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.append(operators)  # which vanish with it
    return import_module("torchvision")
