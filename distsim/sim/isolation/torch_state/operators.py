"""Operators that a program defines, and optimizers' step hooks: each rank has its own."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.library import Library

from distsim.debug.records.frames import is_ours
from distsim.errors import NotSimulated
from distsim.sim.isolation.output import is_made_for_all
from distsim.sim.isolation.process import SimProcess
from distsim.sim.isolation.torch_state.torch_state import STATE
from distsim.sim.kernel.task import current_process
from distsim.torch_compat.state import (
    CUSTOM_OP_DEF,
    CUSTOM_OPS,
    DESTROY_LIBRARY,
    PATCH_STEP_FUNCTION,
    REGISTER_DISPATCH_RULE,
    REGISTER_FAKE,
    REGISTER_TO_DISPATCHER,
)

__all__ = ["forget_operators", "operator_patches", "optimizer_patches"]

# -- Operators that a program defines: torch has one dispatcher for all ranks, and each rank has its own functions.

custom_ops = CUSTOM_OPS.get()
CustomOpDef = CUSTOM_OP_DEF.get()

BODIES = ("_init_fn", "_backend_fns", "_abstract_fn", "_setup_context_fn", "_backward_fn", "_vmap_fn")
"""What a `torch.library.custom_op` holds of the program's functions. The kernels that torch registers ask the
definition for them at each call; of several ranks' definitions of one name it has registered the first."""


def operator_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) while a simulation runs."""
    patches: list[tuple[Any, str, Any]] = [(CustomOpDef, name, _body(name)) for name in BODIES]
    patches += [
        (Library, "__init__", _begin),
        (Library, "define", _define),
        (Library, "impl", _implement),
        (Library, "fallback", _fall_back),
        (custom_ops, "get_library_allowing_overwrite", _library),
    ]
    patches += REGISTER_TO_DISPATCHER.replaced_by(_register) + DESTROY_LIBRARY.replaced_by(_destroy)
    return patches + REGISTER_FAKE.replaced_by(_register_fake) + REGISTER_DISPATCH_RULE.replaced_by(_register_rule)


_real_library = custom_ops.get_library_allowing_overwrite
_real_register = REGISTER_TO_DISPATCHER.get()
_real_begin, _real_define, _real_implement = Library.__init__, Library.define, Library.impl
_real_fall_back, _real_destroy = Library.fallback, DESTROY_LIBRARY.get()
_real_register_fake, _real_register_rule = REGISTER_FAKE.get(), REGISTER_DISPATCH_RULE.get()
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LIBRARY_FILES = (torch.library.__file__, os.path.join(_TORCH, "_library"), functools.__file__, __file__)


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


# -- `torch.library.Library`: the first rank registers for all, and each kernel asks for the running rank's function.


@dataclass(slots=True, eq=False)
class _Registration:
    """What one library has registered with torch's dispatcher under one name."""

    library: Any
    text: str
    """Of the schema that defines an operator; empty for a function."""
    answer: Any = None
    functions: dict[SimProcess, Any] = field(default_factory=dict)
    """What the program of each rank has registered; a definition has no function."""


class _Registrations:
    """All that the ranks of one run have registered with torch's dispatcher."""

    def __init__(self) -> None:
        self.libraries: dict[int, tuple[Any, set[tuple[str, ...]]]] = {}
        """By identity: the libraries of the ranks, and what each has registered."""
        self.known: dict[tuple[str, ...], _Registration] = {}

    def take(
        self, library: Any, key: tuple[str, ...], register: Callable[[Any], Any], function: Any = None, text: str = ""
    ) -> Any:
        """Note that the running rank registers *function* under *key*; *register* does so for all ranks.

        Args:
            library: The rank's library.
            key: The operator, and what of it is registered.
            register: Takes the function that torch is to call.
            function: The rank's own function.
            text: The schema, if it is a definition.

        Returns:
            What *register* has returned for the first rank.
        """
        process = current_process()
        if process is None or id(library) not in self.libraries:
            return register(function)
        known = self.known.get(key)
        if known is None or (text and process in known.functions):
            known = _Registration(library, text)
            is_own = function is None or function is torch.library.fallthrough_kernel
            known.answer = register(function if is_own else _of_the_rank(known.functions))
            self.known[key] = known
        elif known.text != text:
            raise NotSimulated(
                f'torch.library.define("{key[0]}") with another schema on another rank',
                "run it for real with --on gloo",
            )
        known.functions[process] = function
        self.libraries[id(library)][1].add(key)
        return known.answer

    def leave(self, library: Any, process: SimProcess) -> None:
        """Forget what *library*, which the program of *process* destroys, has registered for this rank."""
        for key in self.libraries[id(library)][1]:
            if key in self.known:
                self.known[key].functions.pop(process, None)
        used = {id(one.library) for one in self.known.values() if one.functions}
        for unused in [one for number, (one, _) in self.libraries.items() if number not in used and one.m is not None]:
            if unused is library or any(one.library is unused for one in self.known.values()):
                _real_destroy(unused)
        self.known = {key: one for key, one in self.known.items() if one.functions}


_run = _Registrations()


def forget_operators() -> None:
    """Take back at the end of a run what its ranks have registered, so that the next one can register it."""
    global _run
    ended, _run = _run, _Registrations()
    for library, _ in reversed(ended.libraries.values()):
        _real_destroy(library)


def _of_the_rank(functions: dict[SimProcess, Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        process = current_process()
        while process is not None and process not in functions:
            process = process.parent
        return (next(iter(functions.values())) if process is None else functions[process])(*args, **kwargs)

    return call


def _is_programs() -> bool:
    """Whether the program makes the library that begins, and not torch, distsim or a module that all ranks share."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_LIBRARY_FILES) and frame.f_back is not None:
        frame = frame.f_back
    file = frame.f_code.co_filename
    return not (is_made_for_all() or is_ours(file) or file.startswith(_TORCH))


@functools.wraps(_real_begin)
def _begin(self: Any, ns: Any, kind: Any, dispatch_key: Any = "") -> None:
    process = current_process()
    if process is None or not _is_programs():
        _real_begin(self, ns, kind, dispatch_key)
        return
    key, known = (str(ns), "DEF"), _run.known.get((str(ns), "DEF"))
    is_again = kind == "DEF" and known is not None and process not in known.functions
    _real_begin(self, ns, "FRAGMENT" if is_again else kind, dispatch_key)
    self.kind = kind
    _run.libraries[id(self)] = self, set()
    if kind == "DEF":
        _run.take(self, key, lambda function: None)


@functools.wraps(_real_define)
def _define(self: Any, schema: str, *args: Any, **how: Any) -> Any:
    key = (f"{self.ns}::{schema.partition('(')[0]}", "schema")
    return _run.take(self, key, lambda function: _real_define(self, schema, *args, **how), text=schema)


@functools.wraps(_real_implement)
def _implement(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **how: Any) -> None:
    name = op_name if isinstance(op_name, str) else op_name.name()
    key = (f"{self.ns}::{name.rpartition('::')[2]}", dispatch_key or self.dispatch_key)
    _run.take(self, key, lambda function: _real_implement(self, op_name, function, dispatch_key, **how), fn)


@functools.wraps(_real_fall_back)
def _fall_back(self: Any, fn: Any, dispatch_key: str = "", **how: Any) -> None:
    key = (self.ns, "fallback", dispatch_key or self.dispatch_key)
    _run.take(self, key, lambda function: _real_fall_back(self, function, dispatch_key, **how), fn)


@functools.wraps(_real_register_fake)
def _register_fake(self: Any, op_name: str, fn: Any, _stacklevel: int = 1, **how: Any) -> None:
    key = (f"{self.ns}::{op_name}", "fake")
    _run.take(self, key, lambda function: _real_register_fake(self, op_name, function, _stacklevel + 3, **how), fn)


@functools.wraps(_real_register_rule)
def _register_rule(self: Any, op_name: str, torch_dispatch_class: Any, fn: Any) -> None:
    key = (f"{self.ns}::{op_name}", "rule", f"{torch_dispatch_class.__qualname__}@{id(torch_dispatch_class)}")
    _run.take(self, key, lambda function: _real_register_rule(self, op_name, torch_dispatch_class, function), fn)


@functools.wraps(_real_destroy)
def _destroy(self: Any) -> None:
    process = current_process()
    if process is None or id(self) not in _run.libraries:
        _real_destroy(self)
    else:
        _run.leave(self, process)


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
