"""Finds what in the program caused a diagnosis, and the advice that removes it: one rule for each family of causes.

`rows.py` is the table of causes that facts prove, `find_cause.py` the order of the rules that read the text, and
`program_text.py` reads the user's source as a syntax tree.
"""

from __future__ import annotations

__all__ = [
    "blocks",
    "caught",
    "circumstances",
    "ends",
    "exceptions",
    "find_cause",
    "loops",
    "program_text",
    "recovery",
    "rows",
    "threads",
    "unlike_models",
]
