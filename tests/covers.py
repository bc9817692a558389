"""Which of many launches to compile: few that together have each type, form and constant of each argument, though not their combinations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

Launches = dict[tuple, tuple[Any, dict]]
"""By kernel and key of Triton's: the signature, with the type of each argument, and the constants by their place among them."""
BLOCKS = {"HEAD_DIM": "BLOCK_D", "VALUE_DIM": "BLOCK_DV"}
"""In which block a head dim is padded, or cut to pieces."""


def few(launches: Launches) -> list[tuple]:
    """Every type and every constant of each argument of a kernel is compiled."""
    return cover({launch: all_of(launch[0], *given) for launch, given in launches.items()})


def fewer(launches: Launches) -> list[tuple]:
    """Every type of each tensor is compiled, every constant, and every argument left out and given, but not all numbers.

    Integers that are told at the call, such as strides, have any one of their types, and of head dims one is enough of those in as many blocks.
    """
    return cover({launch: code_of(launch[0], *given) for launch, given in launches.items()})


def first_of_each_kernel(launches: Iterable[tuple]) -> list[tuple]:
    return list({function: (function, key) for function, key in reversed(list(launches))}.values())


def cover(launches: dict[tuple, set[tuple]]) -> list[tuple]:
    """Few launches that together have all that these have: each the one that brings most of what is missing, the first of these."""
    missing, chosen = set().union(*launches.values()), []
    while missing:
        chosen.append(max(launches, key=lambda launch: len(launches[launch] & missing)))
        missing -= launches[chosen[-1]]
    return chosen


def all_of(function: Any, signature: dict, constants: dict) -> set[tuple]:
    """Types of a launch, where an absent tensor is a type, and its constants."""
    found = {(str(place), repr(constant)) for place, constant in constants.items()}
    return {(function, *each) for each in found.union(types(signature))}


def code_of(function: Any, signature: dict, constants: dict) -> set[tuple]:
    """What decides which code a launch has: Triton takes an integer of 1 for a constant, too, and those of large tensors for 64 bits.

    Kernels tell tuples by their lengths. Of a head dim they ask how many blocks it has, and whether these are whole.
    """
    found = {(*path, brief(kind)) for *path, kind in types(signature) if path and kind != "constexpr"}
    named = {function.arg_names[place]: constant for (place, *within), constant in constants.items() if not within}
    for (place, *within), constant in constants.items():
        name = function.arg_names[place]
        block = named.get(BLOCKS.get(name))
        if block is not None:
            found.add((name, constant % block == 0, -(-constant // block)))
        else:
            found.add((name, *within, "integer" if type(constant) is int and (within or name in BLOCKS) else repr(constant)))
    return {(function, *each) for each in found}


def brief(kind: str | int) -> str:
    """The type of an argument, or how many a tuple has."""
    return f"of {kind}" if isinstance(kind, int) else "integer" if kind in ("i32", "i64") else kind


def types(signature: Any, *path: Any) -> Iterator[tuple]:
    """The type of each part of each argument, with the path to it; of a tuple its length, too."""
    if isinstance(signature, dict | tuple | list):
        yield *path, len(signature)
        for name, each in signature.items() if isinstance(signature, dict) else enumerate(signature):
            yield from types(each, *path, name)
    else:
        yield *path, str(signature)
