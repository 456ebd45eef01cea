"""Functions that do one thing in a rank, and what Python or torch does elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distsim.sim.kernel.task import current_task
from distsim.torch_compat.names import TorchName


def for_ranks(real: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls *ours* with the task of the running rank, and *real* outside ranks.

    The table of patches gives it the name and signature of *real* (`wraps.resembling`).
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        return real(*args, **kwargs) if task is None else ours(task, *args, **kwargs)

    return call


def patch_around(holder: Any, name: str, ours: Callable[..., Any]) -> tuple[Any, str, Any]:
    """Return the patch (holder, attribute, replacement) that calls *ours* with the original first, in ranks or not."""
    real = getattr(holder, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(real, *args, **kwargs)

    return holder, name, call


def patch_for_ranks(holder: Any, name: str, ours: Callable[..., Any]) -> tuple[Any, str, Any]:
    """Return the patch (holder, attribute, replacement) by which *ours* answers ranks."""
    return holder, name, for_ranks(getattr(holder, name), ours)


def name_for_ranks(name: TorchName, ours: Callable[..., Any]) -> list[tuple[Any, str, Any]]:
    """Return the patch by which *ours* answers ranks in place of a private function of torch, if this torch has it."""
    return name.replaced_by(for_ranks(name.get(), ours))
