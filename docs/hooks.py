"""Hooks of mkdocs.yml: the site has the pages of docs/, and with them all that their links lead to.

Links in the pages are paths of the repository, so that they lead somewhere on GitHub too. Here each becomes a link within the site. README.md
is the first page, other Markdown files are pages too, source files and folders have pages that show them, and the rest is copied. So the site
needs no address of the repository, and its sources are those of its own commit. On api.md each row of a table brings the docstring of its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)(?=[)#])")
BLOCK = re.compile(r"(^```.*?^```$)", flags=re.S | re.M)
ROW = re.compile(r"^\| \[`(\w+)`\]\(\.\./([\w/]+)\.py\)", flags=re.M)
COPIED = (".png", ".svg", ".json")


def target(folder: Path, link: str) -> str | None:
    """The path in the repository to which a link leads from a folder of it, if it is that of a file or folder."""
    path = (ROOT / folder / link).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) and path.exists() else None


def place(path: str) -> str:
    """The source path in the site of a path in the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{path}/index.md"
    return path if path.endswith((".md", *COPIED)) else f"{path}.md"


def origin(source: str) -> str:
    """The path in the repository of a Markdown file in the site."""
    if source == "index.md":
        return "README.md"
    return f"docs/{source}" if (ROOT / "docs" / source).exists() else source


def led_to(path: str) -> Iterator[str]:
    """Paths in the repository to which the links of a Markdown file or a folder of it lead."""
    if (ROOT / path).is_dir():
        yield from (each.relative_to(ROOT).as_posix() for each in sorted((ROOT / path).iterdir()) if each.is_file())
    elif path.endswith(".md"):
        links = (link for _, link in LINK.findall(BLOCK.sub("", (ROOT / path).read_text())))
        yield from filter(None, (target(Path(path).parent, link) for link in links))


def shown(path: str) -> str:
    """A page that shows a source file, or lists the files of a folder."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if (ROOT / path).is_dir():
        return head + "\n".join(f"- [{Path(each).name}]({os.path.relpath(place(each), path)})" for each in led_to(path)) + "\n"
    return f"{head}````{'python' if path.endswith('.py') else 'text'}\n{(ROOT / path).read_text()}\n````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add all that the pages lead to."""
    ways = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen: set[str] = set()
    while ways:
        path = ways.pop()
        if path in seen:
            continue
        seen.add(path)
        ways += led_to(path)
        if path.startswith("docs/"):
            continue
        listed = InclusionLevel.INCLUDED if path.endswith(".md") else InclusionLevel.NOT_IN_NAV
        is_shown = not path.endswith((".md", *COPIED))
        content: dict[str, Any] = {"content": shown(path)} if is_shown else {"abs_src_path": str(ROOT / path)}
        files.append(File.generated(config, place(path), inclusion=listed, **content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links within the repository into links within the site, and add docstrings to the page of public names."""
    path, folder = origin(page.file.src_uri), Path(page.file.src_uri).parent
    if not path.endswith(".md") or not (ROOT / path).is_file():
        return markdown

    def led(match: re.Match[str]) -> str:
        found = target(Path(path).parent, match[2])
        return match[0] if found is None else match[1] + Path(os.path.relpath(place(found), folder)).as_posix()

    if path == "docs/api.md":
        markdown = with_docstrings(markdown)
    return "".join(piece if piece.startswith("```") else LINK.sub(led, piece) for piece in BLOCK.split(markdown))


def public_names(text: str) -> dict[str, str]:
    """Each name on the page api.md with the path of its definition."""
    names = {}
    for section in text.split("\n## ")[1:]:
        for name, path in ROW.findall(section):
            names[f"{section.split()[0]}.{name}"] = f"{path.replace('/', '.')}.{name}"
    return names


def with_docstrings(text: str) -> str:
    """The page api.md, with the docstring of each name of a table after the table, to which the name leads."""
    names, parts = public_names(text), text.split("\n## ")
    for number, section in enumerate(parts[1:], 1):
        module = section.split()[0]
        found = [f"{module}.{name}" for name, _ in ROW.findall(section)]
        entries = [f"::: {names[name]}\n    options:\n      heading: {name}\n      toc_label: {name.split('.')[-1]}\n" for name in found]
        for name in found:
            section = re.sub(rf"^\| \[`{name.split('.')[-1]}`\]\(.+?\)", f"| [`{name.split('.')[-1]}`][{names[name]}]", section, flags=re.M)
        parts[number] = section.rstrip() + "\n\n" + "\n".join(entries)
    return "\n## ".join(parts)


class Docstrings(griffe.Extension):
    """Docstrings, which are in Sphinx's markup, as Markdown: roles become links to public names, or code."""

    def __init__(self) -> None:
        self.names = public_names((ROOT / "docs" / "api.md").read_text())

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Leave out the parameters that catch unknown arguments."""
        for name in ("more", "unknown"):
            if name in func.parameters and str(func.parameters[name].annotation) == "NoReturn":
                del func.parameters[name]

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object as it is loaded."""
        if obj.docstring is None:
            return

        def linked(match: re.Match[str]) -> str:
            name, scope = match[1].lstrip("~"), obj.path.split(".")
            full = next((path for path in (".".join([*scope[:end], name]) for end in range(len(scope), -1, -1)) if path in self.names), None)
            text = name.split(".")[-1] if match[1].startswith("~") else name
            return f"`{text}`" if full is None else f"[`{text}`][{self.names[full]}]"

        text = re.sub(r":\w+:`([^`]+)`", linked, obj.docstring.value)
        obj.docstring.value = re.sub(r"::$", ":", text, flags=re.M)
