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
        _verdict(result),
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


def failures_of(found: Record) -> list[str]:
    """Of a part, as the result file has it; also of one whose summary could not be made."""
    return found["summary"]["failures"] if found["summary"] else found.get("failures", [])


def checks_of(result: dict[str, Any]) -> int:
    """How many checks all parts made."""
    return sum((found["summary"] or {}).get("checks", 0) for found in result["parts"].values())


def _verdict(result: dict[str, Any]) -> str:
    """The whole page in two sentences."""
    parts = result["parts"]
    failed = {name: len(failures_of(found)) for name, found in parts.items() if failures_of(found)}
    unreached = [name for name, found in parts.items() if not (found["summary"] or {}).get("checks")]
    partly = [name for name, found in parts.items() if found["not_run"] and name not in unreached]
    said = f"**{checks_of(result)} checks, " + (f"{sum(failed.values())} failed** ({', '.join(failed)})." if failed else "none failed.**")
    said += f" Parts that checked nothing: {', '.join(unreached)}." if unreached else ""
    return said + (f" Parts that left something out: {', '.join(partly)}." if partly else "")


def picture(source: Path) -> Path:
    """The plot of the errors in a result file, beside it."""
    return source.with_suffix(".png")


def _row(part: Part, found: Record) -> list[Any]:
    summary = found.get("summary") or {}
    skipped = found["not_run"]
    shown = "-" if not skipped else skipped[0] if len(skipped) == 1 else f"{len(skipped)} things, named below"
    name = f"[{part.name}](#{_anchor(part.title)})"
    return [name, summary.get("checks"), len(failures_of(found)), f"{found['seconds']:.0f}", _escaped(shown)]


def _section(part: Part, found: Record, source: Path, page: Path) -> list[str]:
    lines: list[str] = []
    summary, wrong = found["summary"], failures_of(found)
    if summary is not None:
        lines += part.module.section(summary)
        if part.name == "errors" and summary["errors"]:
            lines += ["", f"![Errors of each contender by tensor and dtype]({_link(picture(source), page)})"]
    if wrong:
        lines += [*([""] if lines else []), f"{len(wrong)} failed:", ""]
        for failure in wrong[:SHOWN_FAILURES]:
            sentence, _, code = failure.partition("\n")
            lines.append(f"- {_escaped(sentence)}")
            lines += ["", "  ```", *(f"  {line}" for line in code.splitlines()), "  ```", ""] if code else []
        lines += [f"- {len(wrong) - SHOWN_FAILURES} more are in the result file."] if len(wrong) > SHOWN_FAILURES else []
    elif summary is not None:
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
