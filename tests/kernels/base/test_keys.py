"""A process finds in Triton's cache what another has compiled, whatever either of them compiled before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dmattn.execution.backend import interpreting

pytest.importorskip("triton", reason="the kernels need Triton")
pytestmark = pytest.mark.skipif(interpreting(), reason="the interpreter has no cache")

KEYS = """
import importlib, json, pkgutil, sys
import dmattn.kernels
from dmattn.kernels.base.keys import settle

kernels = {}
for found in pkgutil.walk_packages(dmattn.kernels.__path__, "dmattn.kernels."):
    module = importlib.import_module(found.name)
    kernels |= {f"{found.name}.{name}": x for name, x in vars(module).items() if name.endswith("_kernel") and x.__module__ == found.name}
for name in sorted(kernels, reverse=sys.argv[1] == "backwards"):
    settle(kernels[name])
    kernels[name] = kernels[name].cache_key
print(json.dumps(kernels))
"""
CONSTANTS = """
import importlib, json, pkgutil
import dmattn.kernels
from dmattn.kernels.base.keys import settle

torn = {}
for found in pkgutil.walk_packages(dmattn.kernels.__path__, "dmattn.kernels."):
    module = importlib.import_module(found.name)
    for name, kernel in vars(module).items():
        if name.endswith("_kernel") and kernel.__module__ == found.name:
            settle(kernel)
            assert kernel.cache_key
            values = {}
            for (constant, _), (value, _) in kernel.used_global_vals.items():
                values.setdefault(constant, set()).add(str(value))
            torn |= {f"{found.name}.{name}: {constant}": sorted(each) for constant, each in values.items() if len(each) > 1}
print(json.dumps(torn))
"""


def test_launches_settle_the_key_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from dmattn.kernels.base import launch

    told: list[str] = []

    class Kernel:
        def warmup(self, **arguments: object) -> None:
            told.append("compiled")

    monkeypatch.setattr(launch, "settle", lambda kernel: told.append("settled"))
    monkeypatch.setattr(launch, "rehearsing", lambda: True)
    monkeypatch.setattr(launch, "overlap_options", dict)
    launch.launch(Kernel(), 1)
    assert told == ["settled", "compiled"]


def test_keys_do_not_depend_on_the_order_of_compilations() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    processes = [
        subprocess.Popen([sys.executable, "-c", KEYS, order], stdout=subprocess.PIPE, env=environment, text=True)
        for order in ("forwards", "backwards")
    ]
    forwards, backwards = (json.loads(process.communicate()[0]) for process in processes)
    assert len(forwards) > 40
    assert forwards == backwards


def test_constants_of_one_name_have_one_value_in_a_kernel() -> None:
    """Triton sorts those of one name by where their modules lie in memory, so that keys would differ from process to process."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", CONSTANTS], stdout=subprocess.PIPE, env=environment, text=True, check=True)
    assert json.loads(done.stdout) == {}
