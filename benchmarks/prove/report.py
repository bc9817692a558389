"""docs/proof.md of a result file: nothing else is read, so that it can be written again on any machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.prove.part import Record, table
from benchmarks.prove.schedule import PARTS, Part

SHOWN_FAILURES = 20  # of a part
PAGE = ROOT / "docs" / "proof.md"


def written(result: dict[str, Any], source: Path, page: Path = PAGE) -> str:
    """The page, of a result that lies in the file `source`."""
    where, parts = result["environment"], result["parts"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    lines = [
        "# Proof",
        "",
        "This page is what one command found on one machine. It is written from its result file alone.",
        "",
        *(["This is a small run without a GPU, which tries the code alone. It proves nothing of the kernels.", ""] if result["tiny"] else []),
        *table(
            ("", ""),
            [
                ["command", f"`{where['command']}`"],
                ["result file", f"[{source.name}]({_link(source, page)})"],
                ["date", where["date"]],
                ["commit", where["commit"]],
                ["device", where["device"]],
                ["versions", versions],
                ["time", f"{result['seconds']:.0f} s"],
                ["seed of the random problems", result["seed"]],
            ],
        ),
        "",
        *table(("part", "checks", "failed", "seconds", "not run"), [_row(part, parts[part.name]) for part in PARTS if part.name in parts]),
        "",
        "A result passes by the rule of [equivalence.py](../dmattn/equivalence.py): its largest error against float64 is at most twice that of "
        "plain PyTorch in the same dtype, plus a band of two roundings. Below, this is the rule.",
    ]
    for part in PARTS:
        if part.name in parts:
            lines += ["", f"## {part.title}", "", *_section(part, parts[part.name], source, page)]
    return "\n".join(lines) + "\n"


def picture(source: Path) -> Path:
    """The plot of the errors in a result file, beside it."""
    return source.with_suffix(".png")


def _row(part: Part, found: Record) -> list[Any]:
    summary = found.get("summary") or {}
    skipped = found["not_run"]
    shown = "-" if not skipped else skipped[0] if len(skipped) == 1 else f"{len(skipped)} things, named below"
    return [f"[{part.name}](#{_anchor(part.title)})", summary.get("checks"), len(summary.get("failures", ())), f"{found['seconds']:.0f}", shown]


def _section(part: Part, found: Record, source: Path, page: Path) -> list[str]:
    lines: list[str] = []
    summary = found.get("summary")
    if summary is not None:
        lines += part.module.section(summary)
        if part.name == "errors" and summary["errors"]:
            lines += ["", f"![Errors of each contender by tensor and dtype]({_link(picture(source), page)})"]
        wrong = summary["failures"]
        if wrong:
            lines += ["", f"{len(wrong)} failed:", ""]
            for failure in wrong[:SHOWN_FAILURES]:
                sentence, _, code = failure.partition("\n")
                lines.append(f"- {_escaped(sentence)}")
                lines += ["", "  ```", *(f"  {line}" for line in code.splitlines()), "  ```", ""] if code else []
            lines += [f"- {len(wrong) - SHOWN_FAILURES} more are in the result file."] if len(wrong) > SHOWN_FAILURES else []
        else:
            lines += ["", f"None of {summary['checks']} checks failed." if summary["checks"] else "Nothing was checked."]
    if found["not_run"]:
        lines += [*([""] if lines else []), "Not run:", "", *(f"- {_escaped(sentence)}" for sentence in found["not_run"])]
    return lines


def _escaped(sentence: str) -> str:
    """Without what Markdown takes for something else."""
    return sentence.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("[", "\\[")


def _anchor(title: str) -> str:
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")


def _link(target: Path, page: Path) -> str:
    return Path(os.path.relpath(target.resolve(), page.resolve().parent)).as_posix()
