"""The hooks of the documentation site, without building it: `make docs` does that, with warnings as errors."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from dmattn.execution.backend import interpreting

pytest.importorskip("mkdocs", reason="the site is built with the extra docs")
griffe = pytest.importorskip("griffe", reason="the site is built with the extra docs")

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
hooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hooks)

pytestmark = pytest.mark.skipif(interpreting(), reason="about texts, which are the same in both halves")


def on_page(source: str, markdown: str) -> str:
    return hooks.on_page_markdown(markdown, SimpleNamespace(file=SimpleNamespace(src_uri=source)))


@pytest.mark.parametrize(
    ("source", "link", "led"),
    [
        ("start.md", "limits.md#dropout", "limits.md#dropout"),
        ("start.md", "../README.md", "index.md"),
        ("start.md", "../dmattn/functional.py", "dmattn/functional.py.md"),
        ("start.md", "../dmattn/kernels/hopper", "dmattn/kernels/hopper/index.md"),
        ("start.md", "../benchmarks/results/speed_nvidia_h200.json", "benchmarks/results/speed_nvidia_h200.json"),
        ("index.md", "docs/limits.md#dropout", "limits.md#dropout"),
        ("benchmarks/README.md", "../docs/history.md", "../history.md"),
        ("start.md", "https://pytorch.org/x.md", "https://pytorch.org/x.md"),
        ("start.md", "nowhere.md", "nowhere.md"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(source, link, led):
    assert on_page(source, f"see [it]({link}).\n") == f"see [it]({led}).\n"


def test_code_is_left_as_it_is():
    text = "```python\nx[0](limits.md)\n```\n"
    assert on_page("start.md", text) == text


def test_all_that_a_page_leads_to_is_found():
    found = set(hooks.led_to("docs/numerics.md"))
    assert {"docs/limits.md", "dmattn/reference.py", "dmattn/equivalence.py"} <= found
    assert "dmattn/kernels/hopper/forward.py" in set(hooks.led_to("dmattn/kernels/hopper"))
    assert "import" in hooks.shown("dmattn/equivalence.py")


def test_a_name_of_the_api_page_brings_its_docstring():
    text = hooks.with_docstrings("# Names\n\n## dmattn\n\n| name | |\n|---|---|\n| [`attention`](../dmattn/functional.py) | Exact. |\n")
    assert "| [`attention`][dmattn.functional.attention] | Exact. |\n\n::: dmattn.functional.attention\n" in text


def test_roles_of_docstrings_become_links_or_code():
    pieces = griffe.Docstring("As :func:`dmattn.attention` of :class:`~dmattn.IntervalMask` and :func:`_own`, here::\n\n    code\n")
    hooks.Docstrings().on_object(obj=SimpleNamespace(docstring=pieces, path="dmattn.varlen.attention_varlen"))
    assert pieces.value.startswith(
        "As [`dmattn.attention`][dmattn.functional.attention] of [`IntervalMask`][dmattn.masks.IntervalMask] and `_own`, here:\n"
    )
