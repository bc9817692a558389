"""What is released: metadata, the files beside it, and GitHub's workflows say the same, and name what is there."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from dmattn import __version__
from dmattn.execution.backend import interpreting

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))

pytestmark = pytest.mark.skipif(interpreting(), reason="about texts, which are the same in both halves")
tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def name(requirement: str) -> str:
    return re.split(r"[\[<>=;\s]", requirement, maxsplit=1)[0]


def workflow(path: Path) -> dict[str, Any]:
    read = yaml.safe_load(path.read_text())
    read["on"] = read.pop(True)  # as YAML 1.1 reads this key
    return read


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in workflow(path)["jobs"].values() for step in job.get("steps", ())]


def test_every_requirement_is_pinned():
    pins = (ROOT / "constraints.txt").read_text() + (ROOT / "tests" / "recipes.txt").read_text()
    pinned = set(re.findall(r"^([\w-]+)==", pins, flags=re.M))
    extras = PROJECT["optional-dependencies"].values()
    required = {name(each) for each in [*PROJECT["dependencies"], *(each for extra in extras for each in extra)]}
    assert required - {"dmattn"} <= pinned


def test_extras_name_extras():
    named = {each for extra in PROJECT["optional-dependencies"].values() for found in extra for each in re.findall(r"^dmattn\[(.+)\]", found)}
    assert named
    assert {extra for each in named for extra in each.split(",")} <= set(PROJECT["optional-dependencies"])


def test_the_newest_entry_of_the_changelog_is_this_version():
    (newest, *_) = re.findall(r"^## (\S+),? ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert newest.strip("[],") == __version__


def test_an_entry_of_the_changelog_is_one_short_line():
    items = re.findall(r"^- .*(?:\n(?![-#\n]).*)*", (ROOT / "CHANGELOG.md").read_text().rstrip(), flags=re.M)
    assert len(items) > 50
    assert not [item for item in items if "\n" in item or len(item.split()) > 1 + 20]


def test_the_citation_says_what_the_metadata_says():
    assert (CITATION["version"], CITATION["license"]) == (__version__, PROJECT["license"])
    assert [author["name"] for author in CITATION["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_an_editable_install_is_a_path_that_type_checkers_follow():
    """mypy and pyright read a path in a .pth file, and run no hook that finds modules at run time."""
    try:
        found = metadata.distribution("dmattn")
    except metadata.PackageNotFoundError:
        pytest.skip("dmattn is not installed")
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable") or origin["url"] != ROOT.as_uri():
        pytest.skip("no editable install of this repository")
    lines = [line for file in found.files or () if file.suffix == ".pth" for line in file.read_text().splitlines()]
    assert str(ROOT) in lines


@pytest.mark.skipif(not GITHUB.exists(), reason="needs .github")
class TestGitHub:
    """Workflows and templates."""

    @pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
    def test_actions_are_pinned_by_commit_and_name_their_version(self, path):
        used = re.findall(r"^ *(?:- )?uses: ([^.].*)$", path.read_text(), flags=re.M)
        assert len(used) == len([step for step in steps(path) if "uses" in step])
        assert used
        assert not [action for action in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action)]

    def test_one_action_has_one_version(self):
        used = {action for path in WORKFLOWS for action in re.findall(r"uses: ([^.].*)$", path.read_text(), flags=re.M)}
        assert len({action.partition("@")[0] for action in used}) == len(used)

    @pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
    def test_jobs_may_do_no_more_than_read_and_end_by_themselves(self, path):
        """But the one that publishes, which may ask for a token."""
        read = workflow(path)
        assert read["permissions"] == {"contents": "read"}
        assert [job.get("permissions") for job in read["jobs"].values()].count(None) >= len(read["jobs"]) - 1
        assert all(0 < job["timeout-minutes"] <= 120 for job in read["jobs"].values() if "steps" in job)
        checkouts = [step for step in steps(path) if step.get("uses", "").startswith("actions/checkout@")]
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)

    @pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
    def test_targets_of_make_are_there(self, path):
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
        commands = [line for step in steps(path) for line in step.get("run", "").splitlines() if line.lstrip().startswith("make ")]
        named = {word for line in commands for word in line.split()[1:] if re.fullmatch(r"[a-z-]+", word) and not word.startswith("-")}
        assert named <= targets

    def test_every_python_of_the_metadata_is_tested(self):
        said = [each.rsplit(" ")[-1] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
        assert workflow(GITHUB / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"] == said

    def test_the_oldest_versions_are_those_that_are_required(self):
        (oldest,) = (
            each for each in workflow(GITHUB / "workflows" / "ci.yml")["jobs"]["versions"]["strategy"]["matrix"]["include"] if each["packages"]
        )
        required = [each.partition(";")[0].replace(">=", "==") + ".*" for each in PROJECT["dependencies"] if name(each) in ("torch", "triton")]
        assert re.findall(r"[^\s']+", oldest["packages"]) == required

    def test_a_release_is_published_without_a_password_and_after_its_tests(self):
        jobs = workflow(GITHUB / "workflows" / "release.yml")["jobs"]
        assert jobs["publish"]["permissions"] == {"id-token": "write"}
        assert jobs["publish"]["needs"] == ["tests", "build"]
        assert (ROOT / jobs["tests"]["uses"]).is_file()
        assert not [step for step in steps(GITHUB / "workflows" / "release.yml") if "password" in step.get("with", {})]

    @pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
    def test_forms_ask_for_something(self, path):
        form = yaml.safe_load(path.read_text())
        if path.name == "config.yml":
            assert form["blank_issues_enabled"] is False
            return
        assert {"name", "description", "body"} <= set(form)
        assert [part for part in form["body"] if part["type"] != "markdown" and part["validations"]["required"]]
        identifiers = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(set(identifiers)) == len(identifiers)
