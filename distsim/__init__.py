"""distsim: one torch.distributed program, run for real or simulated.

    import distsim as dist          # every name of torch.distributed, as the same object
    distsim.simulate(fn, on=...)    # fn on every rank of a simulated cluster

The map of the house (each package says more at its own door; docs/architecture.md draws it):

- `distsim.options`      the options of a simulated run: flags, scenario keys and arguments of `simulate` come from it
- `distsim.sim`          the simulator: `kernel` (time and tasks), `isolation`, `processes`, `world`, `c10d`, `faults`,
                         `observe`, `rpc`, `device`: CPU, simulated GPUs and their torch.cuda
- `distsim.kernels`      what an operator costs on a GPU: a data file for each GPU, a rule for each kind of operator
- `distsim.cluster`      clusters as graphs: `graph`, `files` that describe them, `show`
- `distsim.collectives`  `algorithms` and protocols, and `libraries` that choose them (NCCL, gloo, MPI)
- `distsim.network`      fluid flows over those links, in simpy's time
- `distsim.calibration`  measured tables, and the constants fitted to them
- `distsim.debug`        `records`, `rings`, `matching`, `evidence`, `diagnosis`, `report`, `monitor`: the same for
                         simulated and real runs
- `distsim.realexec`     everything that touches live process groups: `guard`, `strict`, `process`
- `distsim.deprecated`   what torch.distributed has dropped: names, backend, ways to meet, ways to start
- `distsim.scenario`     programs with faults and what is expected of them; `equal`: one program in two layouts
- `distsim.report`       what a run prints and writes
- `distsim.watchdog`      a process that looks on while another simulates
- `distsim.plugin`       tests whose bodies run on every rank
- `distsim.text`         quantities with units, and what strangers wrote
- `distsim.cli`          the command line

Importing this package imports nothing else: torch comes with the first name that needs it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import *  # noqa: F403

    from distsim.debug.diagnosis.silent.finding import varies
    from distsim.errors import DistsimError, NotSimulated, RankFailure, UsageError
    from distsim.kernels import kernel_cost
    from distsim.sim import Outcome, simulate

__version__ = "0.1.0"

_OWN = {
    "simulate": "distsim.sim",
    "Outcome": "distsim.sim",
    "DistsimError": "distsim.errors",
    "NotSimulated": "distsim.errors",
    "RankFailure": "distsim.errors",
    "UsageError": "distsim.errors",
    "kernel_cost": "distsim.kernels",
    "varies": "distsim.debug.diagnosis.silent.finding",
}
_PACKAGES = ("cli", "cluster", "collectives", "debug", "kernels", "network", "realexec", "report", "sim")

__all__ = ["DistsimError", "NotSimulated", "Outcome", "RankFailure", "UsageError", "kernel_cost", "simulate", "varies"]


def __getattr__(name: str) -> Any:
    if name in _OWN:
        return getattr(_loaded(_OWN[name]), name)
    if name.startswith("__"):
        raise AttributeError(f"module 'distsim' has no attribute {name!r}")
    if importlib.util.find_spec(
        f"distsim.{name}"
    ):  # `from distsim.watchdog import shared_state` must not import torch to look there
        return importlib.import_module(f"distsim.{name}")
    try:
        return getattr(importlib.import_module("torch.distributed"), name)
    except AttributeError:
        raise AttributeError(f"neither distsim nor torch.distributed has {name!r}") from None


def _loaded(name: str) -> ModuleType:
    """The module *name*, with torch where it asks for that. What so many modules make stays: Python's collector would
    look for garbage in it three times over, a sixth of what the import takes."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *_OWN, *_PACKAGES, *dir(importlib.import_module("torch.distributed"))})
