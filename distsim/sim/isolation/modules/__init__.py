"""Modules are imported once per simulated process, as they would be in separate ones.

`modules.py` runs a body per process and exchanges sys.modules; `patch_table.py` puts what stands for others into them;
`own_code.py` has the user's files and modules that this machine lacks.
"""

from __future__ import annotations

__all__ = [
    "aliases",
    "modules",
    "own_code",
    "patch_table",
]
