"""docs/api.md is what the package says."""

from __future__ import annotations

import pytest
from tools import api_page

import dmattn
from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="about texts, which are the same in both halves")


def test_the_page_of_public_names_is_up_to_date():
    pytest.importorskip("transformers", reason="the page has its integration")
    assert api_page.PAGE.read_text() == api_page.page(), "run: python tests/tools/api_page.py"


def test_every_public_name_is_on_the_page():
    text = api_page.PAGE.read_text()
    named = [name for module in (dmattn, dmattn.compat, dmattn.reference) for name in (f"{module.__name__}.{each}" for each in module.__all__)]
    assert len(named) > 25
    assert not [name for name in named if f"# {name}\n" not in text]


def test_a_signature_is_written_as_in_the_source():
    def short(a, *more: int, b: int = 2, c="x", **rest: str) -> None: ...

    def wide(
        first_argument_of_many: dmattn.BlockMask | None = None, *, second_argument: float = 0.5, third_argument: int | None = None
    ) -> int: ...

    assert api_page.signature("short", short) == "short(a, *more: int, b: int = 2, c='x', **rest: str) -> None"
    lines = api_page.signature("wide", wide).splitlines()
    assert lines[0] == "wide("
    assert lines[2:] == ["    *,", "    second_argument: float = 0.5,", "    third_argument: int | None = None,", ") -> int"]


def test_a_name_without_a_docstring_is_refused():
    with pytest.raises(ValueError, match="no docstring"):
        api_page.summary(lambda: None)
