"""From what a user names after --on to a cluster: our TOML, ASTRA-sim's, NCCL's, networkx's files.

`load.py` is the door; `spec.py` the schema of our own files, `table.py` what checks it; `graph_files.py` and
`nccl_xml.py` read those of other tools.
"""

from __future__ import annotations

__all__ = [
    "graph_files",
    "load",
    "nccl_xml",
    "spec",
    "table",
]
