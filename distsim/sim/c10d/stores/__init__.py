"""TCPStore, FileStore, HashStore and PrefixStore inside a simulation.

`store.py` is what all have in common: one `KeyValues` stands for what a store's server (or file) holds, ranks reach it
through stores whose waits are virtual time. Each kind of store that has more to it is a file.
"""

from __future__ import annotations

from distsim.sim.c10d.stores.file_store import FileStore, close_files
from distsim.sim.c10d.stores.meeting import meeting_patches
from distsim.sim.c10d.stores.prefix_store import PrefixStore
from distsim.sim.c10d.stores.store import HashStore, KeyValues, SimStore
from distsim.sim.c10d.stores.tcp_store import TCPStore

__all__ = [
    "FileStore",
    "HashStore",
    "KeyValues",
    "PrefixStore",
    "SimStore",
    "TCPStore",
    "close_files",
    "meeting_patches",
]
