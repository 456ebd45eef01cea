"""What argparse tells of a wrong flag, or of `--help`, once: all ranks have the same command line."""

from __future__ import annotations

import argparse
import functools
import weakref
from typing import TYPE_CHECKING, Any

from distsim.sim.isolation.process import current_task

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess

__all__ = ["usage_patches"]

_told: weakref.WeakKeyDictionary[Any, dict[str, SimProcess]] = weakref.WeakKeyDictionary()
"""By world: the texts, and who told each."""


def usage_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) of what prints it."""
    real: Any = argparse.ArgumentParser._print_message

    @functools.wraps(real)
    def print_message(self: Any, message: str, file: Any = None) -> None:
        task = current_task()
        if task is not None and message and not task.process.calls.made:
            if _told.setdefault(task.world, {}).setdefault(message, task.process) is not task.process:
                return
        real(self, message, file)

    return [(argparse.ArgumentParser, "_print_message", print_message)]
