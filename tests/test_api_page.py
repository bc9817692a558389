"""docs/api.md has every public name, which leads to the file that defines it. The site's build (`make docs`) checks the rest."""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from dmattn.execution.backend import interpreting

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = (ROOT / "docs" / "api.md").read_text().split("\n## ")[1:]
ROWS = {section.split()[0]: dict(re.findall(r"^\| \[`(\w+)`\]\(\.\./([\w/]+\.py)\) \| \S", section, flags=re.M)) for section in SECTIONS}

pytestmark = pytest.mark.skipif(interpreting(), reason="about texts, which are the same in both halves")


def public(path: str) -> dict[str, str]:
    """Callables that a module offers, with the files that define them."""
    import_module(path)
    module = sys.modules[path]  # of dmattn.explain, whose function has its name
    own = [name for name, value in vars(module).items() if not name.startswith("_") and getattr(value, "__module__", None) == path]
    found = {name: getattr(module, name) for name in getattr(module, "__all__", own)}
    files = {name: inspect.getsourcefile(inspect.unwrap(value)) for name, value in found.items() if callable(value)}
    return {name: Path(file or "").resolve().relative_to(ROOT).as_posix() for name, file in files.items()}


def test_the_page_has_the_modules_that_are_public():
    assert set(ROWS) == {
        "dmattn",
        "dmattn.explain",
        "dmattn.plot",
        "dmattn.compat",
        "dmattn.distributed",
        "dmattn.integrations.transformers",
        "dmattn.integrations.diffusers",
        "dmattn.integrations.doge",
        "dmattn.reference",
    }


@pytest.mark.parametrize("path", ROWS)
def test_every_public_name_leads_to_its_file(path):
    if "transformers" in path or "doge" in path:
        pytest.importorskip("transformers", reason="the page has its integration")
    known = public("dmattn") if path == "dmattn.explain" else {}
    wanted = {name: file for name, file in public(path).items() if name not in known}
    assert ROWS[path] == wanted
    assert len(wanted) >= 2


def test_every_public_name_has_a_docstring():
    pytest.importorskip("transformers", reason="the page has its integration")
    for path, names in ROWS.items():
        import_module(path)
        assert not [name for name in names if not inspect.getdoc(getattr(sys.modules[path], name))]
