"""Text input and output: quantities with units, bounded reading of untrusted input, tables, annotations, ranks.

`units.py`, `distributions.py`, `ranks.py`, `codec.py`, `untrusted_input.py`, `file_tables.py`, `github.py`,
`exceptions.py`, `tracebacks.py`, `output_files.py`. They use no other part of distsim but its errors.
"""

from __future__ import annotations

__all__ = [
    "codec",
    "distributions",
    "exceptions",
    "file_tables",
    "github",
    "output_files",
    "ranks",
    "tracebacks",
    "units",
    "untrusted_input",
]

original_print = print
"""Python's `print`, for lines of distsim that a rank's thread or process prints: programs replace `builtins.print`."""
