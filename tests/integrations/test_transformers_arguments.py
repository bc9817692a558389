"""Every keyword that a model of Transformers hands to its attention function is one that dmattn computes, refuses, or may leave out."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from transformers.utils import TransformersKwargs  # noqa: E402

from dmattn.execution.backend import interpreting  # noqa: E402
from dmattn.integrations.transformers import attention  # noqa: E402

pytestmark = pytest.mark.skipif(interpreting(), reason="about Transformers' sources, which are the same in both halves")

HARMLESS = {
    "position_ids": "the model has rotated queries and keys by them; packed sequences that they tell are in the mask",
    "max_length_q": "the longest document, which FlashAttention needs to choose a grid; the cumulative lengths say it too",
    "max_length_k": "the same of the keys",
    "deterministic": "FlashAttention's backward pass without atomics; dmattn has none",
    "output_hidden_states": "what the model collects beside attention",
    "output_router_logits": "the same",
    "num_items_in_batch": "the divisor of the loss",
    "seq_idx": "documents as state-space layers are told them; attention is told by the mask or the cumulative lengths",
}
COMPUTED = set(inspect.signature(attention.attend).parameters) - {"others"}
KNOWN = COMPUTED | set(attention._UNSUPPORTED) | set(HARMLESS)
OTHER_NAMES = {"query_states", "key_states", "value_states"}  # of an eager function's first parameters, which models pass by position

MODELS = Path(transformers.__file__).parent / "models"


@cache
def scanned() -> list[tuple[str, list[tuple[str, int]], set[str]]]:
    """Of each module with models: what it passes to the interface, and what its eager functions take."""
    found = []
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        text = file.read_text()
        if "ALL_ATTENTION_FUNCTIONS" in text:
            trees = [ast.parse(definition) for definition in definitions(text)]
            passed = [each for tree in trees for each in passed_to_the_interface(tree)]
            found.append((file.parent.name, passed, {each for tree in trees for each in taken_by_eager_functions(tree)}))
    return found


def definitions(text: str) -> list[str]:
    """The classes and functions of a module that name the interface or an eager function, a sixth of its text."""
    return [
        each for each in re.split(r"^(?=@|class |def )", text, flags=re.M) if re.search("ALL_ATTENTION_FUNCTIONS|eager_attention_forward", each)
    ]


def is_registry(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "ALL_ATTENTION_FUNCTIONS"


def is_look_up(node: ast.AST) -> bool:
    return any(map(is_registry, ast.walk(node)))


def passed_to_the_interface(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Keywords of the calls of a function that was looked up, each with the number of arguments by position."""
    nodes = list(ast.walk(tree))
    lines = [node.lineno for node in nodes if is_registry(node)]
    for function in nodes:
        if not isinstance(function, ast.FunctionDef) or not any(function.lineno <= line <= function.end_lineno for line in lines):
            continue
        names = set()
        for node in ast.walk(function):
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and is_look_up(node.value):
                names |= {ast.unparse(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])}
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
                yield from ((keyword.arg, len(node.args)) for keyword in node.keywords if keyword.arg is not None)


def taken_by_eager_functions(tree: ast.Module) -> Iterator[str]:
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and "eager_attention_forward" in function.name:
            yield from (parameter.arg for parameter in (*function.args.args, *function.args.kwonlyargs))


def test_no_keyword_of_a_model_is_ignored_unknowingly() -> None:
    """Nor what is given by position: no more than the mask."""
    unknown, seen = defaultdict(set), set()
    for model, passed, taken in scanned():
        keywords = {keyword for keyword, _ in passed} | (taken - OTHER_NAMES)
        seen |= keywords
        assert all(count <= 5 for _, count in passed), model
        for keyword in keywords - KNOWN:
            unknown[keyword].add(model)
    assert not unknown, f"arguments that attend must compute, refuse, or that are harmless for a reason: {dict(unknown)}"
    assert {"scaling", "s_aux", "position_bias", "indices", "block_indices", "cu_seq_lens_q", "softcap"} <= seen, "the scan finds them"


def test_no_keyword_of_a_caller_is_ignored_unknowingly() -> None:
    """What callers may pass through a model to its attention function."""
    assert set(TransformersKwargs.__annotations__) <= KNOWN


def test_the_scan_sees_a_new_keyword() -> None:
    code = """
def forward(self):
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    return interface(self, query, key, value, mask, temperature=2.0, **kwargs), other(novelty=1)

def eager_attention_forward(module, query, *, slope=None, **kwargs):
    pass
"""
    trees = [ast.parse(definition) for definition in definitions(code)]
    assert [each for tree in trees for each in passed_to_the_interface(tree)] == [("temperature", 5)]
    assert [each for tree in trees for each in taken_by_eager_functions(tree)] == ["module", "query", "slope"]
