"""torch wraps `step` of an optimizer's class when the first of its kind is made: once for all ranks."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer

from distsim.sim.isolation.torch_state.torch_state import STATE
from distsim.sim.kernel.task import current_process

__all__ = ["optimizer_patches"]

_real: Any = Optimizer._patch_step_function


@functools.wraps(_real)
def _patch_step_function(self: Any) -> None:
    """Each rank's own wrapper would be exchanged at every hand-over, and the class would lose its mark each time."""
    cls = type(self)
    if current_process() is None or getattr(cls.step, "hooked", None):
        _real(self)
        return
    step = vars(cls).get("step")
    with STATE.everyones():
        is_everyones = vars(cls).get("step") is step
        if is_everyones:
            _real(self)
    if not is_everyones:  # the rank has set a `step` of its own
        _real(self)


def optimizer_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement)."""
    return [(Optimizer, "_patch_step_function", _patch_step_function)]
