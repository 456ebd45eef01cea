"""GPU libraries (flash_attn, apex, transformer_engine, ...) in a simulation: their own Python, or replacements of it.

An installed library runs its own Python and its Triton kernels, whose prices `triton.py` has; `compiled.py` replaces
the functions of its compiled extension by torch's operators. Where that is not to be had, the library's module here
has replacements of its functions. `catalog.py` lists the libraries, and `importing.py` decides which one a rank gets.
Each module with replacements lists them in MODULES by the module that they belong to.
"""

from __future__ import annotations

from distsim.libraries.catalog import check_names
from distsim.libraries.importing import after_import, module_spec
from distsim.libraries.triton import known_kernel

__all__ = ["after_import", "check_names", "known_kernel", "module_spec"]
