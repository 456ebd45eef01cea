"""distsim: one torch.distributed program, run for real or simulated.

    import distsim as dist          # every name of torch.distributed, as the same object
    distsim.simulate(fn, on=...)    # fn on every rank of a simulated cluster

The map of the house:

- `distsim.sim`          the simulator: ranks as threads with a baton, over simpy
- `distsim.cluster`      clusters as graphs: presets, files, routes
- `distsim.network`      fluid flows over those links, in simpy's time
- `distsim.collectives`  algorithms and protocols, and who chooses them (NCCL, gloo, MPI)
- `distsim.debug`        records, checks, diagnosis, reports: the same for simulated and real runs
- `distsim.realexec`     everything that touches live process groups
- `distsim.report`       what a run prints and writes
- `distsim.cli`          the command line

Importing this package imports nothing else: torch comes with the first name that needs it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import *  # noqa: F403

    from distsim.errors import DistsimError, NotSimulated, RankFailure, UsageError
    from distsim.sim import Outcome, simulate

__version__ = "0.1.0"

_OWN = {
    "simulate": "distsim.sim",
    "Outcome": "distsim.sim",
    "DistsimError": "distsim.errors",
    "NotSimulated": "distsim.errors",
    "RankFailure": "distsim.errors",
    "UsageError": "distsim.errors",
}
_PACKAGES = ("cli", "cluster", "collectives", "debug", "network", "realexec", "report", "sim")

__all__ = ["DistsimError", "NotSimulated", "Outcome", "RankFailure", "UsageError", "simulate"]


def __getattr__(name: str) -> Any:
    if name in _OWN:
        return getattr(importlib.import_module(_OWN[name]), name)
    if name.startswith("__"):
        raise AttributeError(f"module 'distsim' has no attribute {name!r}")
    if importlib.util.find_spec(
        f"distsim.{name}"
    ):  # `from distsim.watcher import beacon` must not import torch to look there
        return importlib.import_module(f"distsim.{name}")
    try:
        return getattr(importlib.import_module("torch.distributed"), name)
    except AttributeError:
        raise AttributeError(f"neither distsim nor torch.distributed has {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_OWN, *_PACKAGES, *dir(importlib.import_module("torch.distributed"))})
