"""Models of Transformers that look the class of their attention layers up by the implementation's name, in a table of their file.

A name without an entry ends in a bare ``KeyError``. So :func:`refuse` gives "dmattn" an entry in each table: one whose layers cannot be made,
and say what to do instead.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, NoReturn

from .families import FAMILIES

__all__ = ["forget", "refuse", "tables_of"]

_FILES = (
    "bark.modeling_bark",
    "data2vec.modeling_data2vec_vision",
    "deepseek_ocr2.modeling_deepseek_ocr2",
    "falcon.modeling_falcon",
    "git.modeling_git",
    "gpt_neo.modeling_gpt_neo",
    "gptj.modeling_gptj",
    "sam.modeling_sam",
    "sam_hq.modeling_sam_hq",
    "superglue.modeling_superglue",
    "unlimited_ocr.modeling_unlimited_ocr",
)


class _Refused:
    """An entry of a table: making a layer of it raises."""

    def __init__(self, name: str, stock: type) -> None:
        self.name, self.stock = name, stock

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        served = f"{self.stock.__module__}.{self.stock.__name__}".removeprefix("transformers.models.") in FAMILIES
        instead = "then dmattn.integrations.transformers.patch(model)" if served else "as dmattn does not serve its layers"
        expected = f'another name for {self.stock.__name__}, which does not use Transformers\' attention interface ("eager", {instead})'
        raise ValueError(f'dmattn: attn_implementation: expected {expected}, received "{self.name}"')


def refuse(name: str) -> None:
    """Let models raise a ValueError that says what to do where `name` asks one of these tables for a class. Idempotent."""
    for file in _FILES:
        module = f"transformers.models.{file}"
        try:
            importlib.import_module(module)
        except ImportError:  # a version without this model, or a package missing that it needs
            continue
        for table in tables_of(module):
            table.setdefault(name, _Refused(name, table["eager"]))


def forget(name: str) -> None:
    """Undo :func:`refuse`."""
    for file in _FILES:
        for table in tables_of(f"transformers.models.{file}"):
            if isinstance(table.get(name), _Refused):
                del table[name]


def tables_of(modelling_file: str) -> list[dict[str, Any]]:
    """The tables of a file; none where it was not imported."""
    found = vars(sys.modules[modelling_file]).items() if modelling_file in sys.modules else ()
    return [table for name, table in found if name.endswith("_ATTENTION_CLASSES") and isinstance(table, dict) and "eager" in table]
