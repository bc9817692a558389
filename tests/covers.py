"""Which of many launches to compile: few that together have each form and constant of each argument, though not their combinations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from dmattn.kernels.base.layout import Stepped, SteppedThrice

Launches = dict[tuple, tuple[Any, dict]]
"""By kernel and key of Triton's: the signature, with the type of each argument, and the constants by their place among them."""
BLOCKS = {"HEAD_DIM": "BLOCK_D", "VALUE_DIM": "BLOCK_DV"}
"""In which block a head dim is padded, or cut to pieces."""
PANELS = {"DIM": 64, "DIM_V": 64}
"""Kernels for Hopper have no such block: they copy a head dim in panels of so many columns."""
SEVERAL_AXES = {len(Stepped._fields), len(SteppedThrice._fields)}
"""How many parts a tensor has with several axes before its heads. No other tuple in an argument has as many."""


def fewer(launches: Launches) -> list[tuple]:
    """Every type of each tensor is compiled, every constant, and every argument left out and given, but not all numbers.

    Integers that are told at the call, such as strides, have any one of their types, and of head dims one is enough of those in as many blocks.
    """
    return cover({launch: code_of(launch[0], *given) for launch, given in launches.items()})


def beside(launches: Launches, others: Launches) -> list[tuple]:
    """What `fewer` has of these launches and not of those of another target is compiled, so kernels of this one alone as there, others once."""
    known = {each for launch, given in others.items() for each in code_of(launch[0], *given)}
    return cover({launch: code_of(launch[0], *given) - known | {(launch[0], "at all")} for launch, given in launches.items()})


def first_of_each_kernel(launches: Iterable[tuple]) -> list[tuple]:
    return list({function: (function, key) for function, key in reversed(list(launches))}.values())


def cover(launches: dict[tuple, set[tuple]]) -> list[tuple]:
    """Few launches that together have all that these have.

    What the fewest have comes first, as they leave little choice: of those the launch that brings most of what is missing, the first of these.
    """
    having: dict[tuple, list[tuple]] = {}
    for launch, found in launches.items():
        for each in found:
            having.setdefault(each, []).append(launch)
    missing, chosen = set(having), []
    for each in sorted(having, key=lambda each: (len(having[each]), each[0].fn.__module__, each[0].fn.__name__, repr(each[1:]))):
        if each in missing:
            chosen.append(max(having[each], key=lambda launch: len(launches[launch] & missing)))
            missing -= launches[chosen[-1]]
    return chosen


def code_of(function: Any, signature: dict, constants: dict) -> set[tuple]:
    """What decides which code a launch has, but not integers: Triton takes one of 1 for a constant, and those of large tensors for 64 bits.

    Kernels tell tuples by their lengths. Of a head dim they ask how many blocks or panels it has, and whether these are whole. Float16 is
    another type of as many bits as bfloat16, and several axes before the heads are other addresses: a kernel has one launch of the former and
    of either form of the latter, not one for each tensor. The tile of a descriptor follows from the constants.
    """
    found = set()
    for *path, kind in types(signature):
        if path and kind in SEVERAL_AXES:
            found.add(("several axes", kind))
        elif path and kind not in ("constexpr", "i32", "i64"):
            kind = str(kind).partition("[")[0]
            found |= {(*path, kind.replace("fp16", "bf16"))} | ({("float16",)} if "fp16" in kind else set())
    named = {function.arg_names[place]: constant for (place, *within), constant in constants.items() if not within}
    for (place, *within), constant in constants.items():
        name = function.arg_names[place]
        block = named.get(BLOCKS.get(name), PANELS.get(name))
        if block is not None:
            found.add((name, constant % block == 0, -(-constant // block)))
        elif type(constant) is not int or (name.isupper() and not within and name not in BLOCKS):
            found.add((name, *within, repr(constant)))
    return {(function, *each) for each in found}


def types(signature: Any, *path: Any) -> Iterator[tuple]:
    """The type of each part of each argument, with the path to it; of a tuple its length, too."""
    if isinstance(signature, dict | tuple | list):
        yield *path, len(signature)
        for name, each in signature.items() if isinstance(signature, dict) else enumerate(signature):
            yield from types(each, *path, name)
    else:
        yield *path, str(signature)
