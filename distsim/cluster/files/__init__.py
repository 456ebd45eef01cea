"""From what a user names after --on to a cluster: our TOML, ASTRA-sim's, NCCL's, networkx's files.

`load.py` is the door; `spec.py` the schema of our own files, `table.py` what checks it.
"""

from __future__ import annotations

__all__ = ["assemble", "astra", "load", "nccl_xml", "node_link", "spec", "table", "to_toml"]
