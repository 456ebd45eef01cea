"""distsim: run a torch.distributed program for real, or simulated on a cluster of any size.

    import distsim as dist          # every name of torch.distributed, as the same object
    distsim.simulate(fn, on=...)    # call fn on every rank of a simulated cluster
    distsim.guard()                 # watch a real job: a line, or a callback of Lightning and transformers
    distsim.fits("train.py", on="dgx-h100:2")  # the commands as functions: run, fits, tune, buy, diagnose, ...

Sub-packages (docs/architecture.md draws how they work together):

- `distsim.options`      options of a simulated run; flags, scenario keys and arguments of `simulate` are made from them
- `distsim.sim`          the simulator: `kernel` (time and tasks), `isolation`, `processes`, `world`, `c10d`, `faults`,
                         `observe`, `device` (CPU, simulated GPUs and their torch.cuda)
- `distsim.kernels`      cost of operators on GPUs: a data file for each GPU, a rule for each kind of operator
- `distsim.cluster`      clusters as graphs of links, and the files that describe them
- `distsim.collectives`  algorithms and protocols of collectives, and the libraries that choose them (NCCL, gloo, MPI)
- `distsim.network`      flows over the links of a cluster, in the time of simpy
- `distsim.calibration`  the commands that compare the model with measurements, and fit it to yours; logs and traces
- `distsim.debug`        records, matching, diagnosis and reports, for simulated and real runs
- `distsim.realexec`     real jobs: the guard around process groups, and the launcher
- `distsim.libraries`    GPU libraries (flash_attn, apex, ...) in a simulation: their own Python, or replacements
- `distsim.remote_calls` torch.distributed.rpc: simulated, under the guard, in a diagnosis
- `distsim.mpi`          the backend "mpi" by mpi4py, where torch was built without
- `distsim.deprecated`   names, backends and launchers that torch.distributed has dropped
- `distsim.scenario`     programs with faults and expected outcomes
- `distsim.planning`     the commands fits, sweep, tune and equal: which layout of a program, on which cluster
- `distsim.report`       output of a run: text, JSON, HTML, traces
- `distsim.watchdog`     a process that watches a running simulation
- `distsim.plugin`       pytest tests whose bodies run on every rank
- `distsim.text`         quantities with units, and input from untrusted files
- `distsim.cli`          the command line

`import distsim` imports nothing else. torch is imported with the first name that needs it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import *  # noqa: F403

    from distsim.cli.functions import CommandResult, attach, bench, buy, diagnose, equal, fits, run, sweep, tune
    from distsim.debug.diagnosis.silent.facts import varies
    from distsim.errors import DistsimError, NotSimulated, RankFailure, UsageError
    from distsim.kernels import kernel_cost
    from distsim.realexec.callback import guard
    from distsim.sim import Outcome, simulate

__version__ = "0.1.0"

_OWN = {
    **dict.fromkeys(
        ("CommandResult", "attach", "bench", "buy", "diagnose", "equal", "fits", "run", "sweep", "tune"),
        "distsim.cli.functions",
    ),
    "guard": "distsim.realexec.callback",
    "simulate": "distsim.sim",
    "Outcome": "distsim.sim",
    "DistsimError": "distsim.errors",
    "NotSimulated": "distsim.errors",
    "RankFailure": "distsim.errors",
    "UsageError": "distsim.errors",
    "kernel_cost": "distsim.kernels",
    "varies": "distsim.debug.diagnosis.silent.facts",
}
_PACKAGES = ("cli", "cluster", "collectives", "debug", "kernels", "network", "realexec", "report", "sim")

__all__ = [
    "CommandResult",
    "DistsimError",
    "NotSimulated",
    "Outcome",
    "RankFailure",
    "UsageError",
    "attach",
    "bench",
    "buy",
    "diagnose",
    "equal",
    "fits",
    "guard",
    "kernel_cost",
    "run",
    "simulate",
    "sweep",
    "tune",
    "varies",
]


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
    """Import the module *name* without garbage collection, which would take a sixth of the time of the import."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *_OWN, *_PACKAGES, *dir(importlib.import_module("torch.distributed"))})
