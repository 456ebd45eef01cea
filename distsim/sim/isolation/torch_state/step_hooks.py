"""torch wraps `step` of an optimizer's class when the first of its kind is made: once for all ranks."""

from __future__ import annotations

import functools
from typing import Any

from distsim.sim.isolation.torch_state.torch_state import STATE
from distsim.sim.kernel.task import current_process
from distsim.torch_compat.state import PATCH_STEP_FUNCTION

__all__ = ["optimizer_patches"]

_real: Any = PATCH_STEP_FUNCTION.get()


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
    return PATCH_STEP_FUNCTION.replaced_by(_patch_step_function)
