"""Which of many launches to compile: few that together have each form and constant of each argument, though not their combinations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dmattn.kernels.base.layout import Stepped, SteppedThrice, Strided

Launches = dict[tuple, tuple[Any, dict]]
"""By kernel and key of Triton's: the signature, with the type of each argument, and the constants by their place among them."""
BLOCKS = {"HEAD_DIM": "BLOCK_D", "VALUE_DIM": "BLOCK_DV"}
"""In which block a head dim is padded, or cut to pieces."""
PANELS = {"DIM": 64, "DIM_V": 64}
"""Kernels for Hopper have no such block: they copy a head dim in panels of so many columns."""
COLUMNS = (*PANELS, *BLOCKS.values())
"""Which constants say how many columns a tile of queries, keys or values has."""
SEVERAL_AXES = {len(Stepped._fields), len(SteppedThrice._fields)}
"""How many parts a tensor has with several axes before its heads. No other tuple in an argument has as many."""

WHOLE = Strided._fields.index("whole")
"""The part of a tensor that is a tuple as long as says what its strides are multiples of."""

ALONE = "dmattn.kernels.hopper"
"""The family of which nothing but a GPU runs a kernel."""


def fewer(launches: Launches) -> list[tuple]:
    """Each kernel is compiled, and every flag, argument and type of each family of kernels, left out and given.

    Of those that a GPU alone runs so is every flag, argument and rule of each, and every size of a tile. Integers that are told at the call, such as
    strides, have any one of their types, and of head dims one is enough of those in as many panels.
    """
    return cover({launch: code_of(launch[0], *given) for launch, given in launches.items()}, work_in(launches))


def beside(launches: Launches, others: Launches) -> list[tuple]:
    """What `fewer` has of these launches and not of those of another target is compiled, so kernels of this one alone as there, others once."""
    known = {each for launch, given in others.items() for each in code_of(launch[0], *given)}
    found = {launch: code_of(launch[0], *given) - known | {(name_of(launch[0]), "at all")} for launch, given in launches.items()}
    return cover(found, work_in(launches))


def first_of_each_kernel(launches: Iterable[tuple]) -> list[tuple]:
    return list({function: (function, key) for function, key in reversed(list(launches))}.values())


def work_in(launches: Launches) -> Callable[[tuple], int]:
    """About how long each launch compiles: each consumer has code of its own, which grows with the columns of queries, keys and values."""

    def work(launch: tuple) -> int:
        constants = {launch[0].arg_names[place]: constant for (place, *within), constant in launches[launch][1].items() if not within}
        return constants.get("CONSUMERS", 1) * (64 + sum(constants.get(name, 0) for name in COLUMNS))

    return work


def cover(launches: dict[tuple, set[tuple]], work: Callable[[tuple], int] = lambda launch: 1) -> list[tuple]:
    """Few launches that together have all that these have, and little work.

    What the fewest have comes first, as they leave little choice: of those the launch of least work, that brings most of what is missing, the
    first of these. At the end each gives way to one of least work, that has least, of those with what no other has, or to none.
    """
    having: dict[tuple, list[tuple]] = {}
    for launch, found in launches.items():
        for each in found:
            having.setdefault(each, []).append(launch)
    missing, chosen = set(having), []
    for each in sorted(having, key=lambda each: (len(having[each]), repr(each))):
        if each in missing:
            chosen.append(max(having[each], key=lambda launch: (-work(launch), len(launches[launch] & missing))))
            missing -= launches[chosen[-1]]
    times = Counter(each for launch in chosen for each in launches[launch])
    simplest: list[tuple] = []
    for launch in chosen:
        times.subtract(launches[launch])
        alone = {each for each in launches[launch] if not times[each]}
        if alone:
            with_all = (other for other in having[min(alone, key=repr)] if alone <= launches[other])
            simplest.append(min(with_all, key=lambda other: (work(other), len(launches[other]))))
            times.update(launches[simplest[-1]])
    return simplest


def code_of(function: Any, signature: dict, constants: dict) -> set[tuple]:
    """What decides which code a launch has, but not integers: Triton takes one of 1 for a constant, and those of large tensors for 64 bits.

    Kernels tell tuples by their lengths, and descriptors from pointers. Of a head dim they ask how many blocks or panels it has, and whether
    these are whole. Several axes before the heads are other addresses, whichever tensor has them: one launch of a kernel. The tile of a
    descriptor follows from the constants.

    That the kernel is there at all has its name, so that each kernel is compiled. All else has the name of its family, the folder that it is in:
    types that pointers and descriptors are of; what strides are multiples of, and by how many quotients axes before the heads are found; rules,
    such as masks, window and softcap. But a flag, argument or rule has the name of a kernel that a GPU alone runs: the others run in Triton's
    interpreter with each. Tiles, and head dims in blocks, are code of Hopper's family alone.
    """
    name = name_of(function)
    family = ".".join(name.split(".")[:3])  # dmattn.kernels.hopper, also of what lies deeper
    own = name if family == ALONE else family
    found = {(name, "at all")}
    for *path, kind in types(signature):
        owner = own
        if path and kind in SEVERAL_AXES:
            found |= {(own, "several axes"), (family, "several axes", kind)}
        elif type(kind) is int and len(path) > 1 and path[-1] == WHOLE and path[:-1] != ["rules"]:
            found.add((family, "multiples", kind))
        elif path and kind not in ("constexpr", "i32", "i64"):
            kind = str(kind).partition("[")[0]
            if kind.startswith(("*", "tensordesc")):
                found |= {(owner, *path, kind[0]), (family, "type", kind)}
            else:
                found.add((owner, *path, kind))
    named = {function.arg_names[place]: constant for (place, *within), constant in constants.items() if not within}
    for (place, *within), constant in constants.items():
        argument = function.arg_names[place]
        block = named.get(BLOCKS.get(argument), PANELS.get(argument))
        if type(constant) is not int:
            found.add((own, argument, *within, repr(constant)))
        elif family == ALONE and block is not None:
            found.add((family, "head dim", constant % block == 0, -(-constant // block)))
        elif family == ALONE and argument.isupper() and not within and argument not in BLOCKS:
            found.add((family, argument, constant))
    return found


def name_of(function: Any) -> str:
    return f"{function.fn.__module__}.{function.fn.__name__}"


def types(signature: Any, *path: Any) -> Iterator[tuple]:
    """The type of each part of each argument, with the path to it; of a tuple its length, too."""
    if isinstance(signature, dict | tuple | list):
        yield *path, len(signature)
        for name, each in signature.items() if isinstance(signature, dict) else enumerate(signature):
            yield from types(each, *path, name)
    else:
        yield *path, str(signature)
