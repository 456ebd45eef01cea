"""What a command says of a file that it has written."""

from __future__ import annotations

import sys

__all__ = ["say_written"]


def say_written(path: object) -> None:
    """One line to stderr: what a command prints to stdout may be read by a program."""
    print(f"wrote {path}", file=sys.stderr)
