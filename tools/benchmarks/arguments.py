"""The command line of a benchmark: `Arguments(__doc__)`, and the types of its words.

A wrong word is one line on stderr that says what was expected and what came, and exit code 2; Ctrl-C is one line, too,
and a closed pipe none. Nothing of torch or distsim is imported here: some benchmarks measure that.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import NoReturn, TypeVar

__all__ = ["Arguments", "amount", "at_least", "count", "known", "several", "whole_nodes"]

T = TypeVar("T")


class Help(argparse.HelpFormatter):
    """Fills paragraphs, and leaves lines to copy as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip().split("\n\n")
        return "\n\n".join(part if part.startswith(" ") else textwrap.fill(part, width) for part in parts)


class Arguments(argparse.ArgumentParser):
    """A parser whose --help shows the benchmark's own text."""

    def __init__(self, text: str | None) -> None:
        super().__init__(description=text, formatter_class=Help)
        sys.excepthook = _end

    def error(self, message: str) -> NoReturn:
        """Without the usage that argparse puts before it."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A measurement that its user ended is no fault of the benchmark's."""
    if issubclass(kind, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter, which flushes it, has the same to say
    elif issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def at_least(least: int) -> Callable[[str], int]:
    """A whole number from *least* on."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return number

    return read


count = at_least(1)


def whole_nodes(text: str) -> int:
    """Ranks that fill nodes of 8."""
    number = count(text)
    if number % 8:
        raise argparse.ArgumentTypeError(f"expected a multiple of the 8 ranks of a node, got {text!r}")
    return number


def amount(text: str) -> float:
    """Of time: more than none."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def known(names: Iterable[str]) -> Callable[[str], str]:
    """One of some names; `choices` of argparse's knows neither lists by commas nor empty ones."""
    names = list(names)

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(names)}; got {text!r}")
        return text

    return read


def several(each: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Words by commas, each once."""
    return lambda text: list(dict.fromkeys(each(word) for word in text.split(",")))
