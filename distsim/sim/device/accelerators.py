"""Whether there is an accelerator: not yet, also on a cluster that has them; who asks is told to the user."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from distsim.debug.records.frames import Owner, owner
from distsim.sim.isolation.process import current_task

__all__ = ["accelerator_patches"]

_QUESTIONS = (
    ("torch.cuda", "is_available"),
    ("torch.cuda", "device_count"),
    ("torch.accelerator", "is_available"),
    ("torch.accelerator", "device_count"),
    ("torch.accelerator", "current_accelerator"),
)


def accelerator_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) of the questions that a program asks before it uses a GPU. Their answer
    stands; but a program that then skips all it has to do on GPUs has not been simulated, so that is said."""
    patches: list[tuple[Any, str, Any]] = []
    for module, name in _QUESTIONS:
        holder = sys.modules[module]
        patches.append((holder, name, _noted(f"{module}.{name}", getattr(holder, name))))
    return patches


def _noted(question: str, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def ask(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        if task is not None and task.world.cluster.node.num_gpus:
            frame = sys._getframe(1)
            file = frame.f_code.co_filename
            if owner(file) is Owner.USER:  # frameworks ask whatever the program wants
                where = f"{_short(file)}:{frame.f_lineno}"
                task.world.note(
                    f"{where} asked {question}() and was told of none: accelerators are not simulated yet, so what "
                    "the program does only on a GPU did not run (CPU tensors with backend 'gloo' do)"
                )
        return real(*args, **kwargs)

    return ask


def _short(file: str) -> str:
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative
