"""What the documentation says: its code runs, its links lead somewhere, its tables of speed are those of their result file."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from libraries import library

from dmattn import IntervalMask, attention, dynamic_mask_attention
from dmattn.execution.backend import interpreting
from dmattn.explain import CPU_KERNEL, PYTORCH

ROOT = Path(__file__).resolve().parents[1]
TEXTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("benchmarks/*.md")),
    *sorted(ROOT.glob("examples/*.md")),
]
RESULTS = ROOT / "benchmarks" / "results"
HISTORY = ROOT / "docs" / "history.md"
SPEED = json.loads((RESULTS / "speed_nvidia_h200.json").read_text())
MATRIX = json.loads((RESULTS / "matrix_nvidia_h200.json").read_text())
PEERS = {"flex": "FlexAttention", "cudnn": "cuDNN", "sdpa": "SDPA", "sdpa_cudnn": "SDPA's cuDNN"}

pytestmark = pytest.mark.skipif(interpreting(), reason="about texts, which are the same in both halves")


def prose(text: str) -> str:
    """Without blocks of code, in which a bracket is no link and # no heading."""
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub and PyPI make them; a heading that comes again is numbered."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", prose(text), flags=re.M):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        same = sum(anchor == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", anchor) is not None for anchor in found)
        found.add(f"{slug}-{same}" if same else slug)
    return found


def broken(source: Path, text: str) -> Iterator[str]:
    """Links of a text to files and headings that are not there, or outside of the repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (source.parent / path).resolve() if path else source
        inside = file.is_relative_to(ROOT)
        if not inside or not file.exists() or (anchor and (file.suffix != ".md" or anchor not in anchors(file.read_text()))):
            yield target


@pytest.mark.parametrize("source", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(source):
    assert not list(broken(source, source.read_text()))


def test_links_that_lead_nowhere_are_found():
    text = "[a](nowhere.md) [b](LICENSE#a) [c](#no-such-heading) [d](docs/limits.md#dropout) [e](../outside) [f](#one) [g](https://pytorch.org)\n# One\n"
    assert list(broken(ROOT / "README.md", text)) == ["nowhere.md", "LICENSE#a", "#no-such-heading", "../outside", "#one"]
    assert anchors("# One\n## What `x` is, and *why*\n## One\n```\n# none\n```\n") == {"one", "what-x-is-and-why", "one-1"}


@pytest.mark.parametrize(
    ("source", "result"),
    [("README.md", MATRIX), ("docs/performance.md", MATRIX), ("docs/performance.md", SPEED)],
    ids=("readme", "matrix", "speed"),
)
def test_speeds_are_said_to_be_of_the_commit_that_was_measured(source, result):
    command = re.split(" --json| --rows", result["environment"]["command"])[0]
    assert re.search(rf"commit {result['environment']['commit'][:7]}[^#]*?`{re.escape(command)}`", (ROOT / source).read_text(), flags=re.I)


@pytest.mark.parametrize("source", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_result_file_that_is_named_exists(source):
    names = set(re.findall(r"(?<!:benchmarks/results/)\b\w+_h[12]00\w*\.(?:json|png)", source.read_text()))
    assert not [name for name in names if not (RESULTS / name).exists()]


def commands_of(found: Any) -> Iterator[str]:
    """Values under the name `command`, at any depth."""
    if isinstance(found, dict):
        for name, each in found.items():
            yield from [each] if name == "command" else commands_of(each)
    elif isinstance(found, list):
        for each in found:
            yield from commands_of(each)


def is_typed(command: str) -> bool:
    """Whether a shell takes it as it is, without words about it."""
    programs = r"(\w+=\S+ )*(python|torchrun|compute-sanitizer) "
    return re.match(programs, command) is not None and ", " not in command and "(" not in re.sub("'[^']*'", "", command)


def test_the_command_of_a_result_file_is_one():
    """What else is to be said of a measurement is in its `note`."""
    assert not [
        (file.name, command)
        for file in RESULTS.glob("*.json")
        for command in commands_of(json.loads(file.read_text()))
        if not is_typed(command)
    ]
    for words in ("scripts that were not kept", "python benchmarks/memory.py, ended", "python benchmarks/matrix.py --rows (some)"):
        assert not is_typed(words)


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def recorded(commit: str) -> set[str]:
    """Names of the result files in a commit."""
    return set(git("ls-tree", "--name-only", f"{commit}:benchmarks/results").stdout.split())


def result_files(text: str) -> set[str]:
    """Files that a text names as sources: `ideas` is ideas_nvidia_h200.json, and a name with its machine lacks .json alone."""
    return {f"{name}.json" if "_nvidia_" in name else f"{name}_nvidia_h200.json" for name in re.findall(r"`(\w+)`", text)}


def test_every_source_of_the_history_is_a_file_of_its_commit():
    if not (ROOT / ".git").exists() or shutil.which("git") is None or git("rev-parse", "--is-shallow-repository").stdout != "false\n":
        pytest.skip("needs the repository with its history")
    text = HISTORY.read_text()
    commit, example = re.findall(r"git show (\w+):benchmarks/results/(\S+)", text)[0]
    assert {example, *result_files(text)} <= recorded(commit) | {path.name for path in RESULTS.iterdir()}
    for name, commits in re.findall(r"`(\w+)` at (\w{7}(?:(?:,| and) +\w{7})*)", text.replace("\n", " ")):
        for each in re.findall(r"\b[0-9a-f]{7}\b", commits):
            assert result_files(f"`{name}`") <= recorded(each)


def test_every_row_of_the_history_has_a_source():
    table = rows(HISTORY.read_text(), 5)
    assert len(table) > 50
    assert not [idea for idea, *_, source in table if not result_files(source)]


def blocks(kind: str, source: Path = ROOT / "README.md") -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", source.read_text(), flags=re.S | re.M)


def headings(source: Path) -> list[str]:
    """Of the pieces of code of a page: the last one before each."""
    found: list[str] = []
    heading = "at the top"
    for title, code in re.findall(r"^##? (.+)$|^```(python)$", source.read_text(), flags=re.M):
        heading = title or heading
        found += [heading] if code else []
    return found


def of_ranks(page: Path) -> list[str]:
    """The pieces of a page that are one program of several processes: from the one that makes a group to the one that ends it."""
    found: list[str] = []
    for code in blocks("python", page):
        if "init_process_group" in code or (found and "destroy_process_group" not in found[-1]):
            found.append(code)
    return found


PAGES = [page for page in sorted(ROOT.glob("docs/*.md")) if blocks("python", page)]
SHARED = {page.stem: "\n".join(of_ranks(page)) for page in PAGES if of_ranks(page)}
PIECES = [
    (page, number, heading)
    for page in PAGES
    for number, heading in enumerate(headings(page))
    if blocks("python", page)[number] not in of_ranks(page)
]


@pytest.mark.parametrize(("page", "number"), [piece[:2] for piece in PIECES], ids=[f"{page.stem}-{heading}" for page, _, heading in PIECES])
def test_code_of_a_page_runs_as_it_stands(page, number, monkeypatch):
    torch.manual_seed(0)
    code = blocks("python", page)[number]
    assert "assert" in code
    if "from transformers" in code:
        pytest.importorskip("transformers", reason="the code uses it")
    if re.search("import .*plot$", code, flags=re.M):
        pytest.importorskip("matplotlib", reason="the code draws")
        monkeypatch.setenv("MPLBACKEND", "Agg")
    for name in re.findall(r"^(?:import|from) (timm|x_transformers|diffusers|sentence_transformers)\b", code, flags=re.M):
        library(name)
    exec(compile(code, page.name, "exec"), {})


def test_pages_with_code_are_found():
    assert {"biases.md", "doors.md", "start.md", "transformers.md", "migration.md", "seeing.md", "t5.md"} <= {page.name for page, *_ in PIECES}
    assert set(SHARED) == {"context-parallel", "transformers"}


@cache
def templates() -> set[str]:
    """Strings of the package, in which ... stands for what is filled in."""
    found = set()
    for file in (ROOT / "dmattn").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
                found.add(re.sub(r"\.{4,}", "...", text))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def examples_of_errors(text: str) -> list[tuple[str, str]]:
    """(call, error) of the calls of a page."""
    code = "".join(re.findall(r"^```pycon\n(.*?)^```", text, flags=re.S | re.M))
    return [(call, " ".join(error.split())) for call, error in re.findall(r"^>>> (.+)\n((?:(?!>>>).+\n)+)", code, flags=re.M)]


ERRORS = ROOT / "docs" / "errors.md"


@pytest.mark.parametrize(("call", "error"), examples_of_errors(ERRORS.read_text()), ids=lambda text: text[:70])
def test_a_call_of_the_page_of_errors_raises_what_it_says(call, error):
    names: dict[str, Any] = {}
    exec(blocks("python", ERRORS)[0], names)
    with pytest.raises((AttributeError, TypeError, ValueError)) as raised:
        eval(call, names)
    assert f"{type(raised.value).__name__}: {raised.value}" == error


def test_other_messages_of_the_page_of_errors_are_those_of_the_code():
    messages = "".join(blocks("text", ERRORS)).splitlines()
    assert len(messages) > 8
    assert len(examples_of_errors(ERRORS.read_text())) > 15
    assert not [message for message in messages if not message.startswith("dmattn: ") or message not in templates()]


def test_the_map_of_the_pages_leads_to_every_page():
    (pages,) = re.findall(r"^## A map of the pages\n(.*?)^## ", (ROOT / "docs" / "start.md").read_text(), flags=re.S | re.M)
    linked = set(re.findall(r"\]\(([\w./-]+)", pages))
    assert {page.name for page in ROOT.glob("docs/*.md")} - {"start.md"} <= linked


def run_of_rank(rank: int, code: str) -> list[str]:
    """In a process of a group that is there already, and stays. What the code did with the group."""
    called: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("init_process_group", "destroy_process_group"):
            patch.setattr(torch.distributed, name, lambda name=name: called.append(name))
        exec(code, {})
    return called


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("page", SHARED)
def test_code_of_several_processes_runs_on_two_ranks(page, processes):
    """All of a page in one program, in processes that other tests use, too: starting them takes seconds. The examples are started by torchrun."""
    if "from transformers" in SHARED[page]:
        pytest.importorskip("transformers", reason="the code uses it")
    assert "assert" in SHARED[page]
    assert processes(2).results(run_of_rank, SHARED[page]) == [["init_process_group", "destroy_process_group"]] * 2


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_code_of_the_readme_runs_as_it_stands(number, capsys):
    code = blocks("python")[number]
    if "transformers" in code:
        pytest.importorskip("transformers", reason="the code uses it")
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    for comment in re.findall(r"print\(.*#.* (\(.*\))$", code, flags=re.M):
        assert comment in printed
    if "model" in names:
        (table,) = (x for name, x in names["model"].encoder.named_parameters() if "relative_attention_bias" in name)
        assert table.grad.norm() > 0


def rows(text: str, columns: int) -> list[list[str]]:
    """Of the tables of so many columns, without headers."""
    cells = [[cell.strip() for cell in line[1:].rstrip().removesuffix("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row for row, under in zip(cells, [*cells[1:], [""]], strict=True) if len(row) == columns and not {*row, *under} & {"---"}]


def names_of_rows(text: str) -> set[str]:
    """Those that the table of rows explains."""
    return {cell.strip("`") for cell, _ in rows(text.partition("\n### Rows\n")[2].partition("\n## ")[0], 2)} - {"row"}


def test_each_row_that_explain_may_name_has_a_line():
    pytest.importorskip("triton", reason="the kernels need Triton")
    from dmattn.kernels.dispatch import BACKWARD, FORWARD

    suffix = ", pairs loaded"
    wanted = {PYTORCH, CPU_KERNEL, f"NAME{suffix}"} | {row.name.removesuffix(suffix) for row in FORWARD + BACKWARD}
    assert names_of_rows((ROOT / "docs" / "commands.md").read_text()) == wanted


MODELS = rows((ROOT / "docs" / "biases.md").read_text(), 3)


@pytest.mark.parametrize(("model", "bias", "options"), MODELS, ids=[row[0].split(":")[0].split(",")[0] for row in MODELS])
def test_shapes_and_arguments_that_are_named_for_a_model_are_taken(model, bias, options):
    sizes = dict(B=4, H=4, Hk=2, Sq=12, Sk=12, N=12, windows=1, rows=4, w=4, query_pre_attn_scalar=256)
    inputs = dict(key_padding_mask=torch.arange(12) < torch.tensor([[12], [7], [1], [9]]), ids=torch.arange(12).expand(4, -1) // 5)
    known = dict(sizes, IntervalMask=IntervalMask, prefix_lengths=torch.tensor([0, 3, 12, 5]), sinks=torch.zeros(4), **inputs)
    random = torch.Generator().manual_seed(0)

    def shaped(text: str) -> torch.Tensor | None:
        found = re.search(r"\((\w[^()]*,[^()]*,[^()]*)\)", text)
        return None if found is None else torch.randn(eval(found[1], dict(sizes)), generator=random)

    given: dict[str, Any] = {}
    for arguments in re.findall(r"`(\w+=[^`]*)`", options):
        given |= eval(f"dict({arguments})", dict(known))
    for name, taken in (("mask", options), ("bias", bias)):
        tensor = shaped(taken) if name == "bias" or "bool `mask`" in taken else None
        if tensor is not None:
            given[name] = tensor > 0 if name == "mask" else tensor.requires_grad_()
    if re.search(r"\(\[code\]", bias + options):  # which is run above
        return
    assert given or "any other" in model or "as above" in bias
    leading = re.search(r"leading axes (\(\w+, \w+\))", bias)
    axes = (sizes["B"],) if leading is None else eval(leading[1], dict(sizes))
    query, key, value = (torch.randn(*axes, heads, 12, 8, generator=random) for heads in (4, 2, 2))
    if "dynamic_mask_attention" in bias:
        scores = given.pop("bias")
        dynamic_mask_attention(query, key, value, scores, **given).sum().backward()
        assert scores.grad.shape == scores.shape
        return
    out = attention(query, key, value, **given)
    assert out.shape == query.shape
    if "bias" in given:
        out.square().sum().backward()
        assert given["bias"].grad.norm() > 0


def test_the_readme_has_rows_of_that_table():
    table = rows((ROOT / "README.md").read_text().replace("docs/", ""), 3)
    assert len(table) > 5
    assert not [row for row in table if row not in MODELS]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def times() -> dict[tuple[str, str], tuple[str, ...]]:
    """(workload, pass) as a table has it: dmattn's milliseconds, the fastest peer's after its name, ratio, extra MiB of both."""
    found = {}
    for record in SPEED["workloads"]:
        for step in record["passes"]:
            measured = {name: each[step]["median_ms"] for name, each in record["contenders"].items() if "median_ms" in each.get(step, {})}
            ours = measured.pop("dmattn")
            best = min(measured, key=measured.__getitem__)
            extra = [f"{record['contenders'][name][step]['extra_bytes'] / 2**20:.1f}" for name in ("dmattn", best)]
            found[record["workload"], step] = f"{ours:.3f}", f"{PEERS[best]} {measured[best]:.3f}", f"{measured[best] / ours:.2f}", *extra
    return found


def test_speeds_of_the_readme_are_those_of_the_result_file():
    measured = {(x["work"], x["pass"]): (f"{x['ours_ms']:.3f}", f"{PEERS[x['best_peer']]} {x['peer_ms']:.3f}", f"{x['peer_ms'] / x['ours_ms']:.2f}")
                for x in MATRIX["rows"] if x["best_peer"] in PEERS}  # fmt: skip
    both = {
        (*measured[name, "forward"], *measured[name, "backward"]): name
        for name, step in measured
        if step == "backward" and (name, "forward") in measured
    }
    table = rows((ROOT / "README.md").read_text(), 5)
    named = [both.get((ours, *peer(best), theirs, *peer(other))) for _, ours, best, theirs, other in table]
    assert len(table) == len(set(named)) == 6
    assert None not in named


def peer(cell: str) -> list[str]:
    """``cuDNN 1.053 (1.70x)`` as its name and time, and its ratio."""
    return cell.removesuffix("x)").split(" (")


def test_speeds_of_the_performance_page_are_those_of_the_result_file():
    text, measured = (ROOT / "docs" / "performance.md").read_text(), times()
    named = {(name, step): tuple(cells) for name, step, *cells in rows(text, 7)}
    forms = [key for key in measured if key not in named]
    found = set()
    for _, ours, best, theirs, other, extra in rows(text, 6):
        of_forward, of_backward = extra.split(", ")
        found |= {(ours, *peer(best), of_forward), (theirs, *peer(other), of_backward)}
    assert named == {key: measured[key] for key in named}
    assert found == {measured[key][:4] for key in forms}
