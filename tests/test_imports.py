"""What an import of dmattn, and a first call, bring into the process: each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

CALL = """
import torch, dmattn
query, key, value = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
bias = torch.randn(1, 2, 8, 8, requires_grad=True)
dmattn.attention(query, key, value, bias=bias, causal=True).sum().backward()
"""
PACKED = """
import torch, dmattn
rows = torch.randn(8, 2, 16, requires_grad=True)
ends = torch.tensor([0, 3, 8])
dmattn.attention_varlen(rows, rows, rows, ends, ends, max_seqlen_q=5, max_seqlen_k=5).sum().backward()
"""
HELP = """
from dmattn.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
"""


def imported(code: str) -> set[str]:
    """The modules that a process has after it ran `code` on the PyTorch path."""
    code = f"import os, sys\nos.environ['TRITON_INTERPRET'] = '0'\n{code}\nprint('\\n' + ' '.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("code", ["import dmattn", CALL, PACKED, HELP], ids=["import", "call", "packed", "help"])
def test_the_compiler_is_not_imported(code: str) -> None:
    """torch._dynamo takes 2.5 seconds and 130 MB."""
    assert "torch._dynamo" not in imported(code)


def test_help_imports_no_more_than_the_package() -> None:
    """But the two commands themselves."""
    of_commands = {name for name in imported(HELP) - imported("import dmattn") if not name.startswith("dmattn.")}
    assert not of_commands & {"transformers", "triton", "rich", "torch._inductor"}, of_commands


def test_a_package_that_is_imported_anyway_is_seen() -> None:
    """The list of modules is that of the process: the tests above could fail."""
    assert "torch._dynamo" in imported("import dmattn, torch._dynamo")
