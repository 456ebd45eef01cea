"""Finds what in the program caused a diagnosis, and the advice that removes it: one rule for each family of causes.

`find_cause.py` has the order of the rules; `program_text.py` reads the user's source as a syntax tree.
"""

from __future__ import annotations

__all__ = ["blocks", "find_cause", "loops", "program_text", "unlike_models"]
