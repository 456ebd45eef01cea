"""`distsim.guard()`: a line that watches a trainer's job, and a callback for trainers.

Lightning's and transformers' callbacks have different hooks; one object answers those of both.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from distsim.debug import install
from distsim.debug.settings import say_once_a_job
from distsim.errors import UsageError

_LIGHTNING = frozenset({"setup", "teardown", "load_state_dict"})
"""Methods of Lightning's callbacks that do not begin with `on_`."""


class TrainerCallback:
    """Callback of `lightning.Trainer(callbacks=[...])` and of transformers' `Trainer(callbacks=[...])`.

    It has every hook of both and changes nothing: the guard is installed when it is made. When training begins, it
    prints a line if the job has no process group.
    """

    state_key = "distsim.guard"

    def on_train_start(self, *args: Any, **kwargs: Any) -> None:
        """Check at the first batch that there is something to watch."""
        if importlib.import_module("distsim.realexec.install").installed() and not dist.is_initialized():
            say_once_a_job(
                "distsim.guard: this job has no process group, so there is nothing to watch; start it on several ranks "
                "(torchrun --nproc-per-node 2 train.py)"
            )

    on_train_begin = on_train_start

    def state_dict(self) -> dict[str, Any]:
        """Return no state for a checkpoint."""
        return {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_") or name in _LIGHTNING:
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Answer a hook of a trainer."""


def guard(**options: Any) -> TrainerCallback:
    """Watch every process group of this process, and return a callback for a trainer.

    In each rank, before the trainer is made: `Trainer(callbacks=[distsim.guard(on_hang="abort")])` for Lightning and
    transformers; a line `distsim.guard()` at the beginning of a script of accelerate, and of Ray Train's
    `train_loop_per_worker`.

    Args:
        **options: Those of `distsim.debug.install`.

    Raises:
        UsageError: An option or its environment variable has a value that is not allowed.
    """
    known = list(inspect.signature(install).parameters)
    for name in options:
        if name not in known:
            raise UsageError(f"distsim.guard: expected some of {', '.join(known)}, got {name}")
    install(**options)
    return TrainerCallback()
