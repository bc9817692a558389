"""Names that a module of dmattn does not have: which one is meant, or what stands in its place."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib.util import find_spec
from typing import NoReturn

__all__ = ["refusing"]
_IMPORT_FROM = dis.opmap["IMPORT_FROM"]
_PLACES = ("dmattn", "dmattn.compat")  # whose names are looked for in each other
_RECIPES = {
    "create_block_mask": "dmattn.BlockMask.from_mask_mod(mask_mod, B, H, Sq, Sk), or torch's own, which dmattn.compat.flex_attention takes",
    "hf": "dmattn.integrations.transformers",
    "huggingface": "dmattn.integrations.transformers",
    "index_first_axis": "plain indexing: x[indices]",
    "pad_input": "padded[is_real] = packed, of zeros and a bool mask (B, S): docs/packed.md",
    "unpad_input": "padded[is_real], of a bool mask (B, S), beside cumulative lengths: docs/packed.md has the code",
    "flash_attn_with_kvcache": "dmattn.attention of the cache's filled part, with a mask: docs/migration.md has the code under FlashAttention",
}


def refusing(module: str) -> Callable[[str], NoReturn]:
    """The ``__getattr__`` of a module, which Python asks for a name that is not there.

    ``from module import name`` shows nothing of an AttributeError, so that statement alone gets an ImportError. It is told by the caller's
    instruction, as ``hasattr`` takes no other error than AttributeError, and no class can be both.
    """

    def __getattr__(name: str) -> NoReturn:
        if name.startswith("_"):  # which Python and its tools ask for
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"dmattn: {name}: expected {_expected(module, name)}, received a name that {module} does not have"
        caller = getattr(inspect.currentframe(), "f_back", None)
        if caller is not None and caller.f_code.co_code[caller.f_lasti] == _IMPORT_FROM:
            raise ImportError(message, name=module)
        raise AttributeError(message)

    return __getattr__


def _expected(module: str, name: str) -> str:
    if name in _RECIPES:
        return _RECIPES[name]
    if name.isidentifier() and find_spec(f"{module}.{name}") is not None:
        return f"`import {module}.{name}` before it"
    names: dict[str, list[str]] = {place: sys.modules[place].__all__ for place in (module, *_PLACES) if place in sys.modules}
    for place, those in names.items():
        if name in those:
            return f"{place}.{name}"
    for place, those in names.items():
        if alike := get_close_matches(name, those, 1):
            return f"{place}.{alike[0]}"
    return f"one of the names {', '.join(names[module])}"
