"""Modules are imported once per simulated process, as they would be in separate ones.

`module_table.py` exchanges sys.modules; `module_body.py` runs a body per process; `patch_table.py` puts what
stands for others into them.
"""

from __future__ import annotations

__all__ = ["absent", "aliases", "module_body", "module_table", "modules", "own_code", "patch_table"]
