"""Draw docs/pictures/*.png from the code of docs/seeing.md.

    python tests/tools/seeing_pictures.py

Each piece of code calls one function of ``dmattn.plot``, whose name is that of the picture. tests/test_docs.py runs the code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dmattn import figures

PAGE = Path(__file__).resolve().parents[2] / "docs" / "seeing.md"


def main() -> None:
    """Run each piece, and save the figure on which it drew."""
    import matplotlib

    matplotlib.use("Agg")
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.S | re.M):
        names: dict[str, Any] = {}
        with figures.styled():
            exec(compile(code, PAGE.name, "exec"), names)
            (drawn,) = set(re.findall(r"plot\.(\w+)\(", code))
            axes = names.get("axes", names.get("left"))
            axes.figure.savefig(PAGE.parent / "pictures" / f"{drawn}.png", dpi=100)
        print(f"{drawn}.png")


if __name__ == "__main__":
    main()
