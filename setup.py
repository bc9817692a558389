"""Metadata of the package; the tools are set up in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
COMPLETION = ["shtab>=1.13"]
BENCH = ["matplotlib>=3.8", "rich>=13"]
TEST = ["pytest>=8", "pytest-xdist>=3.5", "pytest-timeout>=2.3", "hypothesis>=6.100", "numpy>=1.26"]
TRANSFORMERS = ["transformers>=5.17"]
RECIPES = ["diffusers>=0.35", "sentence-transformers>=5", "timm>=1.0", "torchvision>=0.24", "x-transformers>=2.0"]
TRAINING = ["accelerate>=1.10", "peft>=0.18"]  # which the tests train with

setup(
    name="dmattn",
    version=re.search(r'__version__ = "(.+?)"', (ROOT / "dmattn" / "__init__.py").read_text()).group(1),
    description="Exact attention with a dynamic mask and a differentiable additive bias, in Triton",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    packages=find_packages(include=["dmattn", "dmattn.*"]),
    package_data={"dmattn": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.9", "triton>=3.5; platform_system == 'Linux'", "einops>=0.8"],
    extras_require={
        "transformers": TRANSFORMERS,
        "bench": BENCH,
        "completion": COMPLETION,
        "recipes": RECIPES,
        "test": TEST + TRANSFORMERS + TRAINING + COMPLETION + ["rich>=13"],
        "dev": TEST + TRANSFORMERS + TRAINING + COMPLETION + BENCH + ["ruff>=0.15", "mypy>=1.18"],
    },
    entry_points={"console_scripts": ["dmattn = dmattn.cli:main"]},
)
