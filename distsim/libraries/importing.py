"""Imports of GPU libraries and of Triton by a rank: which module it gets for a name, and what it may do with it."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import linecache
import os
import re
import sys
from types import ModuleType
from typing import Any, NoReturn

from distsim.errors import NotSimulated
from distsim.libraries.catalog import Library, contents, is_module, library_of
from distsim.libraries.fused import note
from distsim.libraries.triton import TRITON
from distsim.sim.kernel.task import current_process


def module_spec(name: str, spec: importlib.machinery.ModuleSpec | None) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of the module *name* as the machine of a simulation has it.

    Args:
        name: Full name of the module.
        spec: What this machine has under that name; None: nothing.
    """
    top, _, part = name.partition(".")
    library = library_of(name)
    if library is None and (top != "triton" or spec is not None):
        return spec
    is_whole = not part or (library is not None and library.compiled)
    if spec is not None and (not is_whole or "site-packages" not in (spec.origin or "")):
        return spec  # a part of an installed library, or the program's own folder of such a name
    if not is_whole and not isinstance(sys.modules.get(name.rpartition(".")[0]), _Package):
        return spec  # an installed library lacks it
    if _importer().partition(".")[0] == "torch":
        return spec  # torch does without
    if library is not None and is_whole:
        if not library.compiled:
            if not _is_there(name, spec is not None):
                return None
            if spec is not None and library.install:
                return spec
        note(_reason(name, library, spec is not None))
    elif not part:
        _torch_does_without()
    return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)


def _is_there(name: str, installed: bool) -> bool:
    """Return whether the simulated machine has the library *name*.

    Raises:
        ModuleNotFoundError: It does not, but this machine has it.
    """
    port: Any = current_process().port
    chosen = port.facts.data.libraries
    if chosen is not None:
        if installed and name not in chosen:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return name in chosen
    if not installed and _is_optional():
        port.shared.libraries_left_out.add(name)
        return False
    return True


def _reason(name: str, library: Library, installed: bool) -> str:
    """Return what a report says of a library whose functions are replaced."""
    if library.instead:
        return library.instead
    reason = f"the kernels of {name} need a GPU" if installed or library.compiled else f"{name} is not installed"
    own = f"; {library.install} installs its own Python, which runs as it is" if library.install else ""
    if not library.functions:
        return f"{reason}: its functions are refused when they are called{own}"
    used = "a replacement made of torch operators is used; a function that it lacks is refused when it is called"
    return f"{reason}: {used}{own}"


def after_import(module: ModuleType) -> None:
    """Replace what is compiled in a module of a library: extensions that DeepSpeed's builders would compile with nvcc,
    and the memory of bitsandbytes that host and GPU share, which is the GPU's here."""
    if module.__name__.endswith("op_builder.builder") and hasattr(module, "OpBuilder"):
        module.OpBuilder._loaded_ops |= importlib.import_module("distsim.libraries.apex").DEEPSPEED
    elif module.__name__.startswith("torchft."):
        importlib.import_module("distsim.libraries.torchft").after_import(module)
    elif module.__name__ == "bitsandbytes.functional":
        vars(module).update(importlib.import_module("distsim.libraries.compiled").PAGED)


def _torch_does_without() -> None:
    """Hide a stand-in of Triton from torch's compiler, which would otherwise import its internals."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._inductor.runtime.triton_compat")


# -- Who imports, and whether it goes on without the module.

_CATCHES_IMPORTS = re.compile(r"\b(ImportError|ModuleNotFoundError)\b")
_CATCHES = re.compile(r"\b(ImportError|ModuleNotFoundError|Exception|BaseException)\b")
_IMPORTING = ("importlib", "_frozen_importlib", "distsim.libraries", "distsim.sim.isolation")
_DISTSIM = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _importer() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(_IMPORTING):
            return name
        frame = frame.f_back
    return ""


def _is_optional() -> bool:
    """Return whether the program continues without the module that is being imported, because it catches the
    exception. A handler of any exception around a call, as of `main()`, reports the error and does not go on.
    """
    frame, catches = sys._getframe(1), _CATCHES
    while frame is not None:
        code, name = frame.f_code, str(frame.f_globals.get("__name__", ""))
        if frame.f_lineno in _guarded_lines(code.co_filename, catches):
            return True
        if code.co_name != "<module>" and not name.startswith(_IMPORTING):
            catches = _CATCHES_IMPORTS
        frame = frame.f_back  # type: ignore[assignment]
    return False


@functools.lru_cache(256)
def _guarded_lines(file: str, catches: re.Pattern[str]) -> frozenset[int]:
    """Return lines of *file* where an exception that *catches* matches is caught."""
    if file.startswith(("<", _DISTSIM)):
        return frozenset()
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return frozenset()
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            caught = [handler.type for handler in node.handlers if not isinstance(handler.body[-1], ast.Raise)]
        elif isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            caught = [arg for call in calls if "suppress" in ast.unparse(call.func) for arg in call.args]
        else:
            continue
        if any(catches.search("Exception" if kind is None else ast.unparse(kind)) for kind in caught):
            lines.update(range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1))
    return frozenset(lines)


# -- Modules that have every name: one without a replacement is refused when it is called.


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(contents(module.__name__) or TRITON.get(module.__name__, {}))


class _Package(ModuleType):
    """A module that has every attribute that is accessed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if is_module(full):
            return importlib.import_module(full)  # a real package has imported its own
        if library_of(full) is not None and _CLASS_NAME.match(name):
            return _RefusedClass(
                name, (), {"_distsim_name": full, "__class_getitem__": classmethod(lambda cls, _: cls)}
            )
        return _Part(full)


_CLASS_NAME = re.compile("[A-Z].*[a-z]")


class _RefusedClass(type):
    """A class that a stand-in lacks: it can be a base class and a type to compare with, and is refused when called."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(cls._distsim_name)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Part(f"{cls._distsim_name}.{name}")


def _refuse(name: str) -> NoReturn:
    library = library_of(name)
    remedy = "it needs a GPU; set its cost with distsim.kernel_cost(fn, flops=, bytes=)"
    if library is not None and library.install:
        remedy = f"install the library's own Python, which runs without CUDA: {library.install}"
    raise NotSimulated(name, remedy)


_TYPES = {f"triton.language.{name}" for name in ("pointer_type", "block_type", "constexpr", "dtype", "tensor")}


class _Part:
    """A name in it: it can be passed round, indexed as a type is, and used as a decorator's argument."""

    def __init__(self, name: str) -> None:
        self._distsim_name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Part(f"{self._distsim_name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> _Part:
        if self._distsim_name in _TYPES:
            return self  # in the annotation of a kernel's argument
        _refuse(self._distsim_name)

    def __getitem__(self, key: Any) -> _Part:
        return self

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__
