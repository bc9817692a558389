"""Options of the commands: how they are read, what a mistyped one is answered, and what a command answers."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import takewhile
from typing import Any, NamedTuple, NoReturn

__all__ = ["Parser", "Result", "add_json", "json_of", "natural", "positive", "sizes", "suggestion", "window"]
ALIKE = 0.5  # share of letters that a word and its correction have in common at least: fp16 and float16 have 0.55


class Result(NamedTuple):
    """What a command found, as fields of a JSON object and as text that is still to be printed; and whether all is well."""

    fields: dict[str, Any]
    text: str | None = None
    well: bool = True


class Parser(argparse.ArgumentParser):
    """Names the word that is nearest to an unknown command, option or choice. An error stands alone, without argparse's lines of usage."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._negative_number_matcher = re.compile(r"-[\d.]")  # so that -2,8,4,64 is the value of an option, which says what is wrong with it

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse does, but that an unknown option is told before an option that is missing: it may be the same one."""
        given = list(sys.argv[1:] if args is None else args)
        own: Iterable[str] = takewhile(lambda word: word != "--", given)
        if self._subparsers is not None:  # the words after a command are for its own parser
            own = takewhile(lambda word: word.startswith("-"), own)
        known = self._option_string_actions
        for word in own:
            option, is_valued, value = word.partition("=")
            if re.match("--?[A-Za-z]", option) and option[:2] not in known and not any(name.startswith(option) for name in known):
                self.error(f"unknown option '{option}'{self._of_a_command(option, given) or suggestion(option, known)}")
            if is_valued and self._is_switch(option):
                self.error(f"unexpected value '{value}': {option} has none")
        found, left = super().parse_known_args(given, namespace)
        words = [word for word in left if word != "--"]
        if words and self._subparsers is None:
            self.error(f"unexpected word '{words[0]}'{self._of_option(words[0], given)}")
        return found, left

    def _is_switch(self, option: str) -> bool:
        action = self._option_string_actions.get(option)
        return action is not None and action.nargs == 0

    def _of_option(self, word: str, given: Sequence[str]) -> str:
        """What the option before a word has as its value."""
        before = list(given[: len(given) - list(given)[::-1].index(word)])
        values = list(takewhile(lambda each: not each.startswith("-"), reversed(before)))[::-1]
        option = before[-len(values) - 1] if len(values) < len(before) else ""
        if option not in self._option_string_actions:
            return ""
        return f": {option} has no value" if self._is_switch(option) else f": the value of {option} is one word, as in {','.join(values)}"

    def _of_a_command(self, option: str, given: Sequence[str]) -> str:
        """Where to put an option that a command has, the one that is given first of all."""
        commands: dict[str, argparse.ArgumentParser] = {}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                commands = action.choices
        its = [name for name, command in commands.items() if option in command._option_string_actions]
        its.sort(key=lambda name: name not in given)
        return f": it comes after a command, as in '{self.prog} {its[0]} {option}'" if its else ""

    def error(self, message: str) -> NoReturn:
        """End the command with 2: the error first, then where all options are."""
        self.exit(2, f"{self.prog}: error: {message}\nFor all options: {self.prog} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        if isinstance(action, argparse._SubParsersAction):
            nearest = suggestion(value, action.choices) or f": expected one of {', '.join(action.choices)}"
            raise argparse.ArgumentError(None, f"unknown command '{value}'{nearest}")
        choices = [str(choice) for choice in action.choices]
        raise argparse.ArgumentError(action, f"expected one of {', '.join(choices)}, received {value}{suggestion(str(value), choices)}")

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Inside, an exception about what was asked for ends the command as a bad option does."""
        try:
            yield
        except (TypeError, ValueError, RuntimeError) as error:
            self.error(str(error).removeprefix("dmattn: "))  # the parser says who complains


def suggestion(word: str, known: Iterable[str]) -> str:
    """The known word that is nearest, by what follows its dashes."""
    names = {name.lstrip("-"): name for name in known}
    found = get_close_matches(word.lstrip("-").lower(), names, n=1, cutoff=ALIKE)
    return f": did you mean '{names[found[0]]}'?" if found else ""


def add_json(parser: argparse.ArgumentParser) -> None:
    """Give a command the option --json."""
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, and progress on standard error")


def json_of(found: Any) -> str:
    """JSON of named tuples, dicts, sequences and plain values. A number that is not finite, which JSON does not know, is null."""
    return json.dumps(_plain(found), indent=2, allow_nan=False)


def _plain(found: Any) -> Any:
    if hasattr(found, "_asdict"):
        found = found._asdict()
    if isinstance(found, dict):
        return {name: _plain(each) for name, each in found.items()}
    if isinstance(found, (list, tuple)):
        return [_plain(each) for each in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def sizes(text: str) -> tuple[int, ...]:
    """The sizes of an option such as 4,16,4096,128."""
    if not all(size.isdigit() for size in text.split(",")):
        raise argparse.ArgumentTypeError(f"expected sizes such as 4,16,4096,128, received {text}")
    return tuple(map(int, text.split(",")))


def window(text: str) -> int | tuple[int | None, int | None]:
    """The sides of an option such as 1023,0 or none,0, or the one number of both."""
    sides = [None if side == "none" else int(side) if side.isdigit() else -1 for side in text.split(",")]
    if -1 in sides or len(sides) > 2 or sides == [None]:
        raise argparse.ArgumentTypeError(f"expected LEFT,RIGHT such as 1023,0 or none,0, or one number for both, received {text}")
    return (sides[0], sides[1]) if len(sides) == 2 else sides[0] or 0


def positive(text: str) -> int:
    """The number of an option, 1 or more."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive integer, received {text}")
    return int(text)


def natural(text: str) -> int:
    """The number of an option, 0 or more."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a non-negative integer, received {text}")
    return int(text)
