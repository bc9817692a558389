"""Which of many launches to compile: few that together have everything that tells the compilations apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

Launches = dict[tuple, tuple[Any, dict]]
"""By kernel and key of Triton's: the signature, with the type of each argument, and the constants by their place among them."""
ANY = ("HEAD_DIM", "VALUE_DIM")


def few(launches: Launches) -> list[tuple]:
    """Every type and every constant of each argument of a kernel is compiled."""
    return cover({launch: all_of(launch[0], *given) for launch, given in launches.items()})


def fewer(launches: Launches) -> list[tuple]:
    """Every type of each tensor is compiled, every constant, and every argument left out and given, but not all numbers.

    Integers that are told at the call, such as strides, have any one of their types, and of head dims the sizes of their blocks are enough.
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
    """What decides which code a launch has: Triton takes an integer of 1 for a constant, too, and those of large tensors for 64 bits."""
    found = {(*path, "integer" if kind in ("i32", "i64") else kind) for *path, kind in types(signature) if kind != "constexpr"}
    for (place, *within), constant in constants.items():
        name = function.arg_names[place]
        is_any = type(constant) is int and (within or name in ANY)
        found.add((name, *within, "integer" if is_any else repr(constant)))
    return {(function, *each) for each in found if isinstance(each[-1], str)}


def types(signature: Any, *path: Any) -> Iterator[tuple]:
    """The type of each part of each argument, with the path to it; of a tuple its length, too."""
    if isinstance(signature, dict | tuple | list):
        yield *path, len(signature)
        for name, each in signature.items() if isinstance(signature, dict) else enumerate(signature):
            yield from types(each, *path, name)
    else:
        yield *path, str(signature)
