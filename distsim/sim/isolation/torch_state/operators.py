"""Operators that a program defines, and optimizers' step hooks: each rank has its own."""

from __future__ import annotations

import functools
from typing import Any

import torch.library

from distsim.errors import NotSimulated
from distsim.sim.isolation.process import SimProcess
from distsim.sim.isolation.torch_state.torch_state import STATE
from distsim.sim.kernel.task import current_process
from distsim.torch_compat.state import CUSTOM_OP_DEF, CUSTOM_OPS, PATCH_STEP_FUNCTION, REGISTER_TO_DISPATCHER

__all__ = ["operator_patches", "optimizer_patches"]

# -- Operators that a program defines: torch has one dispatcher for all ranks, and each rank has its own functions.

custom_ops = CUSTOM_OPS.get()
CustomOpDef = CUSTOM_OP_DEF.get()

BODIES = ("_init_fn", "_backend_fns", "_abstract_fn", "_setup_context_fn", "_backward_fn", "_vmap_fn")
"""What a `torch.library.custom_op` holds of the program's functions. The kernels that torch registers ask the
definition for them at each call; of several ranks' definitions of one name it has registered the first."""


def operator_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) while a simulation runs."""
    patches: list[tuple[Any, str, Any]] = [(CustomOpDef, name, _body(name)) for name in BODIES]
    real = torch.library.Library.__init__

    @functools.wraps(real)
    def init(self: Any, ns: Any, kind: Any, dispatch_key: Any = "") -> None:
        process = current_process()
        if process is not None and kind == "DEF":
            if any(ns in other.notes.libraries for other in _others(process)):
                raise NotSimulated(
                    f'torch.library.Library("{ns}", "DEF") on more than one rank',
                    "define the operator with torch.library.custom_op, or run it for real with --on gloo",
                )
            real(self, ns, kind, dispatch_key)
            process.notes.libraries.add(ns)
            return
        real(self, ns, kind, dispatch_key)

    patches.append((torch.library.Library, "__init__", init))
    patches.append((torch.library.Library, "define", _define))
    patches.append((torch.library.Library, "impl", _implement))
    patches.append((custom_ops, "get_library_allowing_overwrite", _library))
    patches += REGISTER_TO_DISPATCHER.replaced_by(_register)
    return patches


_real_library = custom_ops.get_library_allowing_overwrite
_real_register = REGISTER_TO_DISPATCHER.get()
_real_implement = torch.library.Library.impl
_real_define = torch.library.Library.define


def _first(qualname: str) -> Any:
    """Another rank's definition of the operator, which torch has registered."""
    process = current_process()
    candidates = (other.notes.operators.get(qualname) for other in _others(process)) if process else ()
    return next((own for own in candidates if own is not None and hasattr(own, "_opoverload")), None)


@functools.wraps(_real_library)
def _library(namespace: str, name: str) -> Any:
    first = _first(f"{namespace}::{name}")
    return _real_library(namespace, name) if first is None else first._lib


@functools.wraps(_real_register)
def _register(self: Any, tags: Any) -> None:
    first = _first(self._qualname)
    if first is None:
        _real_register(self, tags)
        return
    if first._schema != self._schema:
        raise NotSimulated(
            f"custom_op {self._qualname} with another signature on another rank", "run it for real with --on gloo"
        )
    self._opoverload = first._opoverload


@functools.wraps(_real_define)
def _define(self: Any, schema: str, *args: Any, **how: Any) -> Any:
    process = current_process()
    name = f"{self.ns}::{schema.partition('(')[0]}"
    try:
        answer = _real_define(self, schema, *args, **how)
    except RuntimeError as error:
        if process is None or not any(name in other.notes.libraries for other in _others(process)):
            raise
        raise NotSimulated(
            f'torch.library.define("{name}") on more than one rank',
            "define the operator with torch.library.custom_op, or run it for real with --on gloo",
        ) from error
    if process is not None:
        process.notes.libraries.add(name)
    return answer


@functools.wraps(_real_implement)
def _implement(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **how: Any) -> None:
    key = f"{self.ns}/{str(op_name).rpartition('::')[2]}/{dispatch_key}"
    own = current_process() is not None and key in self._op_impls
    first = _first(f"{self.ns}::{op_name}") if own else None
    if first is None or first._lib is not self:
        _real_implement(self, op_name, fn, dispatch_key, **how)


def _others(process: SimProcess) -> list[SimProcess]:
    return [other for other in process.world.rank_processes.values() if other is not process]


def _body(name: str) -> property:
    """An attribute of a definition: that of the running rank's own definition of the same operator."""

    def get(self: Any) -> Any:
        process = current_process()
        own = self if process is None else process.notes.operators.get(self._qualname, self)
        try:
            return vars(own)[name]
        except KeyError:
            raise AttributeError(name) from None

    def put(self: Any, value: Any) -> None:
        process = current_process()
        if process is not None and name == BODIES[0]:  # it is being made
            process.notes.operators[self._qualname] = self
        vars(self)[name] = value

    return property(get, put)


_real: Any = PATCH_STEP_FUNCTION.get()


@functools.wraps(_real)
def _patch_step_function(self: Any) -> None:
    """Patch the step function for all ranks once; a wrapper per rank would be exchanged at every hand-over."""
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
