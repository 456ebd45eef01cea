"""Operators that a program defines, and optimizers' step hooks: each rank has its own."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections import ChainMap, UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.library import Library

from distsim.debug.records.frames import is_ours
from distsim.errors import NotSimulated
from distsim.sim.isolation.for_ranks import name_for_ranks, patch_for_ranks
from distsim.sim.isolation.output import is_made_for_all
from distsim.sim.isolation.process import RankTask, SimProcess
from distsim.sim.isolation.torch_state.torch_state import STATE
from distsim.sim.kernel.task import current_process
from distsim.torch_compat.state import DESTROY_LIBRARY, LIBRARY, PATCH_STEP_FUNCTION

# -- Operators that a program defines: torch has one dispatcher for all ranks, and each rank has its own functions. The
# first rank registers for all, and what torch calls asks for the function of the rank that runs.

custom_ops, _registry = LIBRARY.get().custom_ops, LIBRARY.get().simple_registry.singleton


def operator_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for the time of a simulation."""
    patches: list[tuple[Any, str, Any]] = [
        patch_for_ranks(Library, "__init__", _begin),
        (Library, "define", _define),
        (Library, "impl", _implement),
        (Library, "fallback", _fall_back),
        patch_for_ranks(_registry, "find", _find),
        (custom_ops, "OPDEFS", _OfTheRank("definitions", custom_ops.OPDEFS)),
        (custom_ops, "OPDEF_TO_LIB", _OfTheRank("libraries", {})),
    ]
    return patches + name_for_ranks(DESTROY_LIBRARY, _destroy)


class _OfTheRank(UserDict[str, Any]):
    """A dictionary of `torch.library.custom_op` by the names of operators, of which each rank has its own."""

    def __init__(self, name: str, before: Any) -> None:
        self._name, self._before = name, before

    @property
    def data(self) -> Any:  # type: ignore[override]
        process = current_process()
        if process is None or is_made_for_all():
            return self._before
        return ChainMap(process.notes.operators.setdefault(self._name, {}), self._before)


_real_begin, _real_define, _real_implement = Library.__init__, Library.define, Library.impl
_real_fall_back, _real_destroy, _real_find = Library.fallback, DESTROY_LIBRARY.get(), _registry.find
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LIBRARY_FILES = (torch.library.__file__, os.path.join(_TORCH, "_library"), functools.__file__, __file__)


@dataclass(slots=True, eq=False)
class _Registration:
    """Registration of one library with torch's dispatcher under one name."""

    library: Any
    text: str
    """Schema of a defined operator; empty for a function."""
    answer: Any = None
    functions: dict[SimProcess, Any] = field(default_factory=dict)
    """Functions that the program of each rank registered; a definition has none."""


class _Registrations:
    """All registrations of one run's ranks with torch's dispatcher."""

    def __init__(self) -> None:
        self.libraries: dict[int, tuple[Any, set[tuple[str, ...]]]] = {}
        """Libraries of the ranks by identity, with the registrations of each."""
        self.known: dict[tuple[str, ...], _Registration] = {}
        self.from_before: set[str] = set()
        """Operators that existed before the run. Their original functions are restored after it."""

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


def is_registered(name: str, dispatch_key: str) -> bool:
    """Return whether a rank has registered a Python function for operator *name* under *dispatch_key*."""
    return (name, dispatch_key) in _run.known


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
            process = process.family.parent
        return (next(iter(functions.values())) if process is None else functions[process])(*args, **kwargs)

    return call


def _is_programs() -> bool:
    """Return whether the program creates the library, and not torch, distsim or a module that all ranks share."""
    frame = sys._getframe(3)
    while frame.f_code.co_filename.startswith(_LIBRARY_FILES) and frame.f_back is not None:
        frame = frame.f_back
    file = frame.f_code.co_filename
    return not (is_made_for_all() or is_ours(file) or file.startswith(_TORCH))


def _begin(task: RankTask, self: Any, ns: Any, kind: Any, dispatch_key: Any = "") -> None:
    if not _is_programs():
        _real_begin(self, ns, kind, dispatch_key)
        return
    key, known = (str(ns), "DEF"), _run.known.get((str(ns), "DEF"))
    is_again = kind == "DEF" and known is not None and task.process not in known.functions
    _real_begin(self, ns, "FRAGMENT" if is_again else kind, dispatch_key)
    self.kind = kind
    _run.libraries[id(self)] = self, set()
    if kind == "DEF":
        _run.take(self, key, lambda function: None)


def _define(self: Any, schema: str, *args: Any, **how: Any) -> Any:
    name = schema.partition("(")[0]
    key = (f"{self.ns}::{name}", "schema")

    def register(function: Any) -> Any:
        packet, _, overload = name.partition(".")
        before = getattr(getattr(torch.ops, self.ns), packet, None) if id(self) in _run.libraries else None
        if before is not None and key not in _run.known and (overload or "default") in before.overloads():
            _run.from_before.add(key[0])  # by a test that imports the program's module, too
            return None
        return _real_define(self, schema, *args, **how)

    return _run.take(self, key, register, text=schema)


def _implement(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **how: Any) -> None:
    name = op_name if isinstance(op_name, str) else op_name.name()
    key = (f"{self.ns}::{name.rpartition('::')[2]}", dispatch_key or self.dispatch_key)

    def register(function: Any) -> None:
        with warnings.catch_warnings():
            if key[0] in _run.from_before:  # torch warns once in a process that a function is overridden
                warnings.simplefilter("ignore")
            _real_implement(self, op_name, function, dispatch_key, **how)

    _run.take(self, key, register, fn)


def _fall_back(self: Any, fn: Any, dispatch_key: str = "", **how: Any) -> None:
    key = (self.ns, "fallback", dispatch_key or self.dispatch_key)
    _run.take(self, key, lambda function: _real_fall_back(self, function, dispatch_key, **how), fn)


def _find(task: RankTask, qualname: str) -> Any:
    """Return the fake implementation and the rules of an operator; the rank's own if the program defined it."""
    if (qualname, "schema") not in _run.known:
        return _real_find(qualname)
    registry = task.process.notes.operators.setdefault("registry", type(_registry)())
    return registry.find(qualname)


def _destroy(task: RankTask, self: Any) -> None:
    if id(self) not in _run.libraries:
        _real_destroy(self)
    else:
        _run.leave(self, task.process)


_real: Any = PATCH_STEP_FUNCTION.get()


def _patch_step_function(_: RankTask, self: Any) -> None:
    """Patch the step function for all ranks once; a wrapper per rank would be exchanged at every hand-over."""
    cls = type(self)
    if getattr(cls.step, "hooked", None):
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
    """Return patches (holder, attribute, replacement)."""
    return name_for_ranks(PATCH_STEP_FUNCTION, _patch_step_function)
