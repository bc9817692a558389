"""Write docs/api.md: each public name with its signature and the first sentence of its docstring.

    python tests/tools/api_page.py

Public are the names of ``__all__`` in MODULES, and of a class the members that it defines without an underscore. Needs Transformers.
tests/test_api_page.py compares the page with the package.
"""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"
MODULES = (
    "dmattn",
    "dmattn.explain",
    "dmattn.compat",
    "dmattn.distributed",
    "dmattn.integrations.transformers",
    "dmattn.integrations.diffusers",
    "dmattn.integrations.doge",
    "dmattn.reference",
)
ALIASES = (
    ("dmattn.checks", "Window"),
    ("dmattn.mask_mods", "MaskMod"),
    ("dmattn.compat.flash_attention", "Results"),
    ("dmattn.integrations.transformers.patching", "State"),
)
LINE = 120  # a longer signature has a line for each parameter

HEAD = """# Public names

Each name has its signature and the first sentence of its docstring. The docstring itself is the specification: formula, shapes, dtypes, gradients and
errors. `help(dmattn.attention)` prints it, and links lead to the source. [biases.md](biases.md) and [doors.md](doors.md) show most names in code.

This page is written by `python tests/tools/api_page.py`.
"""


def names(module: ModuleType) -> list[str]:
    """Of what a module offers, without modules."""
    own = [name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
    offered = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    return sorted((name for name in offered if not inspect.ismodule(getattr(module, name))), key=str.lower)


def summary(value: Any) -> str:
    """The first sentence of a docstring, as Markdown."""
    text = inspect.getdoc(value)
    if not text:
        raise ValueError(f"{value!r} has no docstring")
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.) (?=[A-Z`:])", paragraph)[0]
    return re.sub(r"``(.+?)``", r"`\1`", re.sub(r":\w+:`~?(.+?)`", r"`\1`", sentence)).rstrip(":")


def of_type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__forward_arg__", None) or inspect.formatannotation(annotation)


def written(default: Any) -> str:
    return default.__name__ if inspect.isfunction(default) else repr(default)


def alias(path: str, name: str) -> str:
    """The line that defines a type of signatures."""
    (line,) = re.findall(rf"^{name} = .+$", inspect.getsource(import_module(path)), flags=re.M)
    return line


def signature(name: str, value: Any, bound: bool = False) -> str:
    """As in the source, without the parameter that catches unknown names; ``bound`` leaves out the first one, which is self."""
    found = inspect.signature(value)
    parts, positional = [], True
    for parameter in list(found.parameters.values())[bound:]:
        if parameter.annotation == "NoReturn":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and positional:
            parts.append("*")
        positional = positional and parameter.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        part = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
        typed = parameter.annotation is not parameter.empty
        part += f": {of_type(parameter.annotation)}" if typed else ""
        if parameter.default is not parameter.empty:
            part += f"{' = ' if typed else '='}{written(parameter.default)}"
        parts.append(part)
    returned = found.return_annotation
    end = ")" if returned is found.empty or inspect.isclass(value) else f") -> {of_type(returned)}"
    line = f"{name}({', '.join(parts)}{end}"
    return line if len(line) <= LINE else "".join((f"{name}(\n", *(f"    {part},\n" for part in parts), end))


def members(kind: type) -> list[str]:
    """A line for each method and property that a class defines."""
    lines = []
    for name, value in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(value, FunctionType) and not value.__doc__:  # which a base class describes
            continue
        if isinstance(value, property):
            lines.append(f"- `.{name}`: {summary(value)}")
        elif isinstance(value, (classmethod, staticmethod, FunctionType)):
            own = isinstance(value, FunctionType)
            call = signature(name, value if own else getattr(kind, name), bound=own)
            call = " ".join(call.split()).replace("( ", "(").replace(", )", ")")
            lines.append(f"- `{'.' if own else kind.__name__ + '.'}{call}`: {summary(value if own else value.__func__)}")
    return lines


def entry(module: ModuleType, name: str) -> str:
    value = getattr(module, name)
    title = f"### {module.__name__}.{name}\n\n"
    if not callable(value):
        return f"{title}`{name} = {value!r}`\n"
    source = Path(inspect.getsourcefile(inspect.unwrap(value)) or "").resolve().relative_to(ROOT)
    text = f"{title}```text\n{signature(name, value)}\n```\n\n{summary(value)} ([{source.name}](../{source.as_posix()}))\n"
    lines = members(value) if inspect.isclass(value) else []
    return text + ("\n" + "\n".join(lines) + "\n" if lines else "")


def page() -> str:
    parts, known = [HEAD], set()
    for path in MODULES:
        import_module(path)
        module = sys.modules[path]  # of dmattn.explain, whose function has its name
        entries = []
        for name in names(module):
            value = getattr(module, name)
            if id(value) not in known:
                entries.append(entry(module, name))
                known.add(id(value))
        parts.append("\n".join((f"## {path}\n\n{summary(module)}\n", *entries)))
    aliases = "\n".join(alias(*each) for each in ALIASES)
    parts.append(f"## Types in signatures\n\n```text\n{aliases}\n```\n\n{entry(import_module('dmattn.sdpa'), 'Replacement')}")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
