"""docs/pictures/ is what its script draws, and well-formed."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from tools import pictures

from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="about pictures, which are the same in both halves")


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_what_the_script_draws(name):
    drawn = pictures.PICTURES[name]().svg()
    assert (pictures.FOLDER / f"{name}.svg").read_text() == drawn, "run: python tests/tools/pictures.py"
    sheet = ElementTree.fromstring(drawn)
    width, height = (float(sheet.get(side)) for side in ("width", "height"))
    shapes = [shape for shape in sheet if shape.get("x") is not None]
    assert len(shapes) > 10
    assert all(0 <= float(shape.get("x")) <= width and 0 <= float(shape.get("y")) <= height for shape in shapes)


def test_every_picture_is_shown():
    text = (pictures.ROOT / "docs" / "kernels.md").read_text()
    assert not [name for name in pictures.PICTURES if f"(pictures/{name}.svg)" not in text]
    assert {path.stem for path in pictures.FOLDER.glob("*.svg")} == set(pictures.PICTURES)
