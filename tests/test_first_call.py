"""The CPU path is exact on its first call too: MKL's vector functions are resolved before two threads can call one for the first time.

``python tests/first_call_storm.py`` shows it on many fresh processes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dmattn import merge_attention
from dmattn.equivalence import Case, check
from dmattn.execution.backend import interpreting
from dmattn.first_call import VECTOR_FUNCTIONS, resolve_vector_functions
from dmattn.verify import CASES

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="PyTorch is built without MKL")

ON_IMPORT = """
import json, os, torch
from torch.utils._python_dispatch import TorchDispatchMode

called = []

class Record(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        called.append([function.__name__.split(".")[0], str(args[0].dtype) if args and isinstance(args[0], torch.Tensor) else "", args[0].numel() if args and isinstance(args[0], torch.Tensor) else 0])
        return function(*args, **(kwargs or {}))

torch.set_num_threads(2)
threads = len(os.listdir("/proc/self/task"))
with Record():
    import dmattn
print(json.dumps([called, len(os.listdir("/proc/self/task")) - threads]))
"""  # fmt: skip


class Called(TorchDispatchMode):
    """Names and dtypes of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen.add((function.__name__.split(".")[0].rstrip("_"), result.dtype))
        return result


def handed_to_mkl() -> set[str]:
    """The functions that PyTorch hands to MKL, by the header that its own kernels are compiled with."""
    header = Path(torch.__file__).parent / "include/ATen/cpu/vml.h"
    return set(re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", header.read_text(), re.MULTILINE))


def test_the_functions_are_those_that_torch_hands_to_mkl() -> None:
    assert set(VECTOR_FUNCTIONS) == handed_to_mkl()


@pytest.mark.skipif(interpreting(), reason="about imports, which are the same in both halves")
def test_import_calls_each_on_one_element_and_starts_no_thread() -> None:
    run = subprocess.run([sys.executable, "-c", ON_IMPORT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    called, threads = json.loads(run.stdout)
    assert threads == 0
    for name in handed_to_mkl():
        for dtype in ("torch.float32", "torch.float64"):
            assert [name, dtype, 1] in called, (name, dtype)
            first = next(size for each, kind, size in called if (each, kind) == (name, dtype))
            assert first == 1, (name, dtype)


@pytest.mark.skipif(interpreting(), reason="the PyTorch path is meant, which Triton's interpreter replaces")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_attention_and_its_measure_call_no_other(dtype: torch.dtype) -> None:
    """Everything that the cases of `dmattn verify`, dropout and a merge call is resolved, in the dtype that they call it in."""
    with Called() as resolved:
        resolve_vector_functions()
    with Called() as used:
        for case in (*CASES, Case("dropout", 40, dropout_p=0.2)):
            check(case, dtype)
        out = torch.randn(1, 1, 2, 3, dtype=dtype)
        lse = torch.randn(1, 1, 2, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        merge_attention([out, out], [lse, lse])
    unary = {(name, kind) for name, kind in used.seen if name in handed_to_mkl() and kind in (torch.float32, torch.float64)}
    assert ("tanh", torch.float64) in unary, "softcap's, in the truth: the record would be empty otherwise"
    assert unary <= resolved.seen, unary - resolved.seen
