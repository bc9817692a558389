"""Build the sdist, from that the wheel, install the wheel in an environment of its own, and run tests against it.

    python tests/tools/installed_wheel.py                    the new environment gets what the wheel asks for, in the versions of constraints.txt
    python tests/tools/installed_wheel.py --share-packages   it takes the packages of this Python instead, which spares a download of PyTorch

The tests are the sdist's, unpacked elsewhere and without its dmattn/, so that Python can import dmattn from nowhere but the wheel. Needs `build`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("test_functional", "test_types", "test_versions", "test_packaging")
NEEDED = (
    "LICENSE",
    "CHANGELOG.md",
    "Makefile",
    "constraints.txt",
    "tests/conftest.py",
    "tests/cases.py",
    "benchmarks/speed.py",
    "docs/start.md",
    "examples",
)
WHERE = "import pathlib, sys, dmattn; assert pathlib.Path(dmattn.__file__).is_relative_to(sys.prefix), dmattn.__file__; print(dmattn.__file__)"


def run(*command: str | Path, cwd: Path, **environment: str) -> None:
    """Run a command, which must succeed, where nothing points Python at the repository."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=inherited | environment, check=False)
    if done.returncode:
        raise SystemExit(f"{Path(command[0]).name} {' '.join(map(str, command[1:4]))} ...: exit code {done.returncode}")


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist and the wheel, which is built from the sdist."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def check_wheel(wheel: Path) -> None:
    """The wheel has every file of the package, its licence, and nothing else."""
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dmattn").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if ".dist-info/" in name}
    if names - metadata != package or "dmattn/py.typed" not in names or not any(name.endswith("/licenses/LICENSE") for name in metadata):
        raise SystemExit(f"{wheel.name}: expected the files of dmattn/ and a licence, differs in {sorted((names - metadata) ^ package)}")


def unpack(sdist: Path, folder: Path) -> Path:
    """The folder of the sdist's files, without the package."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = folder.iterdir()
    missing = [name for name in NEEDED if not (unpacked / name).exists()]
    if missing:
        raise SystemExit(f"{sdist.name}: expected {', '.join(NEEDED)}, lacks {', '.join(missing)}")
    shutil.rmtree(unpacked / "dmattn")
    return unpacked


def install(wheel: Path, folder: Path, share_packages: bool) -> Path:
    """The Python of a new environment that has the wheel."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if share_packages:
        run(*pip, "--no-deps", wheel, cwd=folder)
        site = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True, check=True
        )
        # Python reads no .pth files there, so that an editable install beside the packages does not count.
        shared = [path for path in sys.path if path.endswith("-packages")]
        (Path(site.stdout.strip()) / "shared.pth").write_text("".join(f"{path}\n" for path in shared))
    else:
        run(*pip, "--constraint", ROOT / "constraints.txt", f"dmattn[test] @ {wheel.as_uri()}", cwd=folder)
        run(python, "-m", "pip", "check", "--disable-pip-version-check", cwd=folder)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share-packages", action="store_true", help="take the packages of this Python")
    parser.add_argument("--dist", type=Path, help="folder for the sdist and the wheel, if all is well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("dist", "unpacked", "environment"):
            (folder / part).mkdir()
        sdist, wheel = build(folder / "dist")
        check_wheel(wheel)
        unpacked = unpack(sdist, folder / "unpacked")
        python = install(wheel, folder / "environment", options.share_packages)
        run(python, "-c", WHERE, cwd=unpacked)
        files = [f"tests/{test}.py" for test in TESTS]
        run(python, "-m", "pytest", "-m", "not gpu", *files, cwd=unpacked, OMP_NUM_THREADS="1", TRITON_INTERPRET="0")
        if options.dist is not None:
            shutil.copytree(folder / "dist", options.dist, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
