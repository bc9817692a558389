"""The versions that were tested: everything that names them says the same, and others are warned of once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import pytest
import torch

from dmattn import versions
from dmattn.execution.backend import interpreting
from dmattn.versions import TESTED, UntestedVersionWarning

ROOT = Path(__file__).resolve().parents[1]
IMPORT = """
import torch
torch.__version__ = "2.99.0"
import dmattn.varlen
import dmattn
from dmattn import cli
"""
IMPORTED_ON_LINE = 4  # of IMPORT, for the first time

pytestmark = pytest.mark.skipif(interpreting(), reason="about texts, which are the same in both halves")
tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")


@pytest.fixture
def found(monkeypatch):
    """Sets the versions that this process has, by package."""
    return lambda **has: monkeypatch.setattr(versions, "installed", has.get)


def test_importing_an_untested_version_warns_once_where_it_is_imported(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(IMPORT)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": ""}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("UntestedVersionWarning") == 1
    assert run.stderr.startswith(f"{script}:{IMPORTED_ON_LINE}: UntestedVersionWarning: dmattn was tested with torch 2.")
    assert "this is torch 2.99.0" in run.stderr


def test_the_warning_can_be_left_out_by_how_it_begins(found):
    """Before dmattn, and so its category, is imported."""
    found(torch="2.99.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UntestedVersionWarning):
            versions.warn_if_untested()
        warnings.filterwarnings("ignore", message="dmattn was tested with")
        versions.warn_if_untested()


@pytest.mark.parametrize(
    ("has", "named"),
    [
        (dict(torch="2.14.0", triton="3.7.1"), "torch 2.14.0"),
        (dict(torch="2.10.1+cpu", triton="3.7.1"), "torch 2.10.1+cpu"),
        (dict(torch="2.13.0", triton="3.8.0"), "Triton 3.8.0"),
        (dict(torch="2.9.0", triton="3.5.0"), "torch 2.9.0 and Triton 3.5.0"),
        (dict(torch="3.12.0"), "torch 3.12.0"),
        (dict(torch="of-a-fork"), "torch of-a-fork"),
    ],
)
def test_a_version_outside_the_range_is_named(found, has, named):
    found(**has)
    with pytest.warns(UntestedVersionWarning) as warned:
        versions.warn_if_untested()
    (warning,) = warned
    assert str(warning.message).startswith(f"dmattn was tested with {versions.tested_with()}; this is {named}. ")


@pytest.mark.parametrize(
    "has",
    [
        dict(torch="2.13.9+cu130", triton="3.7.1"),
        dict(torch="2.11.0a0+git1234567", triton="3.6.0"),
        dict(torch="2.13.0"),
        dict(torch="2.13.0", triton="3.7.1", transformers="9.0"),
    ],
    ids=["newest", "oldest", "without-triton", "a-package-that-an-integration-asks-for"],
)
def test_a_tested_version_is_not(found, has, recwarn):
    found(**has)
    versions.warn_if_untested()
    assert not recwarn.list


def test_versions_are_those_of_the_packages():
    assert versions.installed("torch") == torch.__version__
    assert versions.installed("pytest") == pytest.__version__
    assert versions.installed("no-such-package") is None


def pinned() -> dict[str, list[str]]:
    """Versions by package in constraints.txt, of the newest Python first."""
    found: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), flags=re.M):
        found.setdefault(name, []).append(version)
    return found


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def bounds(requirements: list[str]) -> dict[str, str]:
    """Whatever a requirement says of versions, by package."""
    found = (re.match(r"([\w-]+)([^;\[]*)", requirement) for requirement in requirements)
    return {match[1]: match[2] for match in found if match is not None}


@pytest.mark.parametrize("name", TESTED)
def test_the_pinned_versions_are_the_newest_tested_ones(name):
    newest, *others = map(versions.release, pinned()[name])
    assert newest == versions.release(TESTED[name].newest)
    assert all(versions.release(TESTED[name].oldest) <= other for other in others)


def test_the_metadata_has_the_tested_versions():
    def beyond(version: str) -> str:
        major, minor = versions.release(version)
        return f"{major}.{minor + 1}"

    has = {name: f">={tested.oldest},<{beyond(tested.newest)}" for name, tested in TESTED.items()}
    assert bounds(project()["optional-dependencies"]["tested-versions"]) == {name: has[name] for name in versions.WARNED_OF}


def test_the_ways_to_install_of_the_readme_lead_to_no_warning():
    ways = re.findall(r"^    pip install (\S+)", (ROOT / "README.md").read_text(), flags=re.M)
    assert len(ways) == 2
    assert not [way for way in ways if "tested-versions" not in way]


def test_the_lines_that_install_libraries_name_the_versions_of_the_tests():
    named = set(re.findall(r"([\w-]+)==([\d.]+)", (ROOT / "docs" / "doors.md").read_text()))
    pins = (ROOT / "constraints.txt").read_text() + (ROOT / "tests" / "recipes.txt").read_text()
    assert {name for name, _ in named} == {"torch", *(re.match(r"[\w-]+", each)[0] for each in project()["optional-dependencies"]["recipes"])}
    assert named <= set(re.findall(r"^([\w-]+)==([\w.]+)", pins, flags=re.M))


def test_no_tested_version_is_older_than_what_is_required():
    extras = project()["optional-dependencies"]
    required = bounds(project()["dependencies"] + extras["transformers"])
    for name, tested in TESTED.items():
        assert versions.release(required[name].removeprefix(">=")) <= versions.release(tested.oldest)


@pytest.mark.parametrize("page", ["README.md", "docs/limits.md"])
def test_a_page_names_the_tested_versions(page):
    text = " ".join((ROOT / page).read_text().split())
    assert f"ested with {versions.tested_with()}." in text


def test_the_version_of_the_metadata_is_that_of_the_package():
    """Both are one literal, which hatchling reads without an import."""
    import dmattn

    if Path(metadata.distribution("dmattn").locate_file("dmattn")).resolve() != Path(dmattn.__file__).parent:
        pytest.skip("this dmattn is not the one that is installed")
    assert metadata.version("dmattn") == dmattn.__version__
