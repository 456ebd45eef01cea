"""Private names of torch that distsim uses; no other package may contain one.

`names.py` defines an entry and looks it up; each other module has the entries of one subject.
"""

from __future__ import annotations

__all__ = [
    "compiler",
    "cuda_api",
    "device",
    "groups",
    "names",
    "releases",
    "rpc",
    "state",
]
