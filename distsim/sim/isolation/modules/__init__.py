"""Imports modules once per simulated process, as separate processes would.

`modules.py` runs a module's body per process and exchanges sys.modules; `patch_table.py` installs replacements;
`own_code.py` knows the user's files, and provides modules that this machine lacks.
"""

from __future__ import annotations

__all__ = [
    "aliases",
    "modules",
    "own_code",
    "patch_table",
]
