"""Loads clusters from presets and files: our TOML, ASTRA-sim's, NCCL's and networkx's formats.

`load.py` is the entry point; `spec.py` has the schema of our own files, `node_kinds.py`
reads those with several kinds of node; `graph_files.py`
and `nccl_xml.py` read the files of other tools.
"""

from __future__ import annotations

__all__ = [
    "graph_files",
    "load",
    "nccl_xml",
    "node_kinds",
    "spec",
]
