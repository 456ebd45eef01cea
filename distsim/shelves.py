"""Shelves: packages with one subject each, which the core finds here by name and never imports."""

from __future__ import annotations

import importlib
from types import ModuleType

_SHELVES = {
    "libraries": "distsim.libraries",
    "dropped names, simulated": "distsim.deprecated.simulated",
    "dropped names, guarded": "distsim.deprecated.guarded",
    "old launcher": "distsim.deprecated.launch",
    "mpi library": "distsim.mpi.library",
    "mpi launcher": "distsim.mpi.launch",
    "mpi groups": "distsim.mpi.group",
    "simulated rpc": "distsim.remote_calls.simulated.patches",
    "guarded rpc": "distsim.remote_calls.guarded.hooks",
    "diagnosis of rpc": "distsim.remote_calls.diagnosis",
}


def shelf(name: str) -> ModuleType:
    """Return the module of a subject that most of distsim does without.

    Its `__all__` lists what the core calls.
    """
    return importlib.import_module(_SHELVES[name])
