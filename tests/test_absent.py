"""Names that dmattn does not have: the message says which is meant, in an import and in an expression, and nothing else notices."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from typing import Any

import pytest

import dmattn
import dmattn.integrations
from dmattn import compat
from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="about names, which are the same in both halves")
NAMES = [
    ("dmattn", "atention", "dmattn.attention"),
    ("dmattn", "RelativBias", "dmattn.RelativeBias"),
    ("dmattn", "flash_attn_func", "dmattn.compat.flash_attn_func"),
    ("dmattn", "flex_attention", "dmattn.compat.flex_attention"),
    ("dmattn", "flash_attn_with_kvcache", "dmattn.attention of the cache's filled part, with a mask: docs/migration.md"),
    ("dmattn.compat", "flash_attn_with_kvcache", "dmattn.attention of the cache's filled part, with a mask: docs/migration.md"),
    ("dmattn.compat", "unpad_input", "padded[is_real], of a bool mask (B, S), beside cumulative lengths: docs/packed.md"),
    ("dmattn.compat", "pad_input", "padded[is_real] = packed, of zeros and a bool mask (B, S): docs/packed.md"),
    ("dmattn.compat", "index_first_axis", "plain indexing: x[indices]"),
    ("dmattn.compat", "flash_attention_func", "dmattn.compat.flash_attn_func"),
    ("dmattn.compat", "attention", "dmattn.attention"),
    ("dmattn.compat", "create_block_mask", "dmattn.BlockMask.from_mask_mod"),
    ("dmattn.integrations", "hf", "dmattn.integrations.transformers"),
    ("dmattn.integrations", "huggingface", "dmattn.integrations.transformers"),
    ("dmattn.integrations", "transformer", "dmattn.integrations.transformers"),
    ("dmattn.integrations", "attention", "dmattn.attention"),
    ("dmattn.compat", "zzz", "one of the names DS4Sci_EvoformerAttention, "),
]


def test_a_name_of_the_integration_of_transformers() -> None:
    integration = pytest.importorskip("dmattn.integrations.transformers", reason="needs transformers", exc_type=ImportError)
    with pytest.raises(AttributeError, match=r"^dmattn: enabel: expected dmattn.integrations.transformers.enable, received a name"):
        integration.enabel  # noqa: B018
    with pytest.raises(ImportError, match=r"^dmattn: convert_to_dynamic: expected dmattn.integrations.transformers.convert_to_dynamic_mask"):
        from dmattn.integrations.transformers import convert_to_dynamic  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize(("module", "name", "expected"), NAMES)
def test_both_forms_say_what_is_meant(module: str, name: str, expected: str) -> None:
    start = f"dmattn: {name}: expected {expected}"
    with pytest.raises(ImportError) as imported:
        exec(f"from {module} import {name}")
    with pytest.raises(AttributeError) as asked:
        getattr(sys.modules[module], name)
    assert str(imported.value) == str(asked.value)
    assert str(asked.value).startswith(start)
    assert str(asked.value).endswith(f", received a name that {module} does not have")


@pytest.mark.parametrize(("module", "name"), [case[:2] for case in NAMES])
def test_a_name_may_be_asked_for(module: str, name: str) -> None:
    found: Any = sys.modules[module]
    assert not hasattr(found, name)
    assert getattr(found, name, None) is None
    assert name not in dir(found)
    assert "__wrapped__" not in dir(found)
    assert not hasattr(found, "__wrapped__")
    assert not hasattr(found, "no.name")


def test_what_lies_deeper_is_imported_as_ever() -> None:
    """In a process of its own, where nobody has imported it yet."""
    code = """
import dmattn
try:
    dmattn.plot
except AttributeError as error:
    print(error)
from dmattn import plot
import dmattn.integrations
assert dmattn.plot is plot
names = {}
exec("from dmattn import *", names)
assert set(dmattn.__all__) <= set(names)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "dmattn: plot: expected `import dmattn.plot` before it, received a name that dmattn does not have\n"


def test_functions_are_pickled_copied_and_inspected_by_their_names() -> None:
    assert pickle.loads(pickle.dumps(compat.flash_attn_func)) is compat.flash_attn_func
    assert copy.deepcopy(dmattn.attention) is dmattn.attention
    assert dict(inspect.getmembers(dmattn))["attention"] is dmattn.attention
