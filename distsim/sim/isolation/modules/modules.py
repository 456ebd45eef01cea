"""Modules are imported once per process, as they would be in separate processes."""

from __future__ import annotations

import _frozen_importlib as bootstrap
import _frozen_importlib_external as bootstrap_external
import _imp
import ast
import contextlib
import ctypes
import dis
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator, Sequence
from types import CodeType, ModuleType
from typing import Any, cast

import torch

from distsim.debug.records.frames import installed_here
from distsim.shelves import shelf
from distsim.sim.isolation.for_ranks import patch_for_ranks
from distsim.sim.isolation.modules.own_code import own_code, refuse_cuda_builds, standard_twin
from distsim.sim.isolation.output import made_for_all
from distsim.sim.kernel.task import current_process

# -- The body of an installed module, run once in each process: one code object, read once, for all.
#
# Some statements cannot be repeated in one Python process, because they enter something into a registry of
# a library that all processes share (`pyarrow.register_extension_type` says "already defined"). What the
# first process entered stands for all; the others go on with the statement after it. The same holds for
# statements that set an attribute of a class of Python itself: a second wrapper would wrap the first one
# (configargparse and argparse).

_AGAIN = re.compile(r"already|duplicate|more than once|twice|re-?regist|exists|conflict", re.IGNORECASE)
"""Phrases with which a library's registry reports a second registration.

The operating system uses the same phrases (`File exists`) for errors that every process would get.
"""
_STORE_ATTR = dis.opmap["STORE_ATTR"]
_repeatable: dict[str, CodeType] = {}
"""Bodies of modules after their first run, by path: without statements that set an attribute of a class of Python."""
_ANNOTATIONS = 0x1000000
"""CO_FUTURE_ANNOTATIONS, the one future that changes how today's Python compiles (Lib/__future__.py)."""


class ModuleBodies:
    """Code and first instances of the installed modules of one simulation."""

    def __init__(self) -> None:
        self._codes: dict[str, CodeType] = {}
        self._first: dict[str, ModuleType] = {}

    def run(
        self, module: ModuleType, path: str, read: Callable[[], CodeType], source: Callable[[], str | None]
    ) -> None:
        """Execute the module at *path* in *module*; *read* and *source* give its code and its text."""
        code = _repeatable.get(path) or self._codes.get(path)
        if code is None:
            code = self._codes[path] = read()
        statements: list[ast.stmt] | None = None
        first = self._first.get(path)
        while True:
            try:
                exec(code, module.__dict__)
            except Exception as exc:
                if first is None or isinstance(exc, OSError) or not _AGAIN.search(str(exc)):
                    raise
                if statements is None:
                    text = source()
                    if text is None:  # compiled files alone are installed
                        raise
                    statements = ast.parse(text).body
                failed = _statement_at(statements, _line(exc, path))
                if failed is None:
                    raise
                for name in _bound_by(statements[failed]):
                    if name not in module.__dict__ and name in first.__dict__:
                        module.__dict__[name] = first.__dict__[name]
                rest = ast.Module(statements[failed + 1 :], type_ignores=[])
                code = compile(rest, path, "exec", code.co_flags & _ANNOTATIONS, dont_inherit=True)
                continue
            break
        self._first.setdefault(path, module)
        text = source() if first is None and _STORE_ATTR in code.co_code[::2] else None
        if text is not None and path not in _repeatable:
            kept = [each for each in ast.parse(text).body if not _sets_attribute_of_python(each, module)]
            _repeatable[path] = compile(ast.Module(kept, type_ignores=[]), path, "exec", dont_inherit=True)


def _sets_attribute_of_python(statement: ast.stmt, module: ModuleType) -> bool:
    """Return whether *statement* of *module*'s body sets an attribute of a class of the standard library."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if not isinstance(target, ast.Attribute):
        return False
    words = ast.unparse(target.value).split(".")
    holder = functools.reduce(lambda value, word: getattr(value, word, None), words, cast(Any, module))
    return isinstance(holder, type) and holder.__module__.partition(".")[0] in sys.stdlib_module_names


def _line(exc: BaseException, path: str) -> int:
    """Return the line of the module's body at which *exc* passed through."""
    trace = exc.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename == path:
            return trace.tb_lineno
        trace = trace.tb_next
    return 0


def _statement_at(statements: list[ast.stmt], line: int) -> int | None:
    for number, statement in enumerate(statements):
        decorators: list[Any] = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(d.lineno for d in decorators)])
        if first <= line <= (statement.end_lineno or first):
            return number
    return None


def _bound_by(statement: ast.stmt) -> list[str]:
    """Return the names that *statement* would have bound in its module."""
    names: list[str] = []
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.extend((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        todo.extend(ast.iter_child_nodes(node))
    return names


# -- `sys.modules` per process: one dict object, whose content is exchanged with the baton.
#
# A process may have some thousand modules of its own (a framework and what it needs). To put them in and
# take them out one by one would cost more than all the rest of a hand-over; so the dict stays the object
# that Python, C code and programs hold, and what it holds is exchanged as a whole, in constant time.

_HEAD_BYTES = object.__basicsize__
_BODY_BYTES = dict.__basicsize__ - _HEAD_BYTES
_KNOWN_BYTES = 4 * ctypes.sizeof(ctypes.c_void_p)
"""ma_used, a version tag, ma_keys, ma_values: CPython 3.6 to 3.14 (Include/cpython/dictobject.h)."""
if _BODY_BYTES != _KNOWN_BYTES:
    raise ImportError(f"distsim knows dicts of {_KNOWN_BYTES} bytes beside the head, this Python's have {_BODY_BYTES}")
_Body = ctypes.c_char * _BODY_BYTES


class SharedImports:
    """Names of modules that processes of a simulation share, in the order of their first import. All other modules come
    from the host's own `sys.modules`."""

    def __init__(self, apart: Sequence[str] = ()) -> None:
        self.names: list[str] = []
        self.collected = 0
        self.apart = apart
        """Packages that the host may have imported and no process has from it: their parts are each process's own, and
        would be attributes of one for all."""


class ModuleTable:
    """Content of `sys.modules` for one process."""

    def __init__(self, shared: SharedImports) -> None:
        self._shared = shared
        self._seen = shared.collected
        self._here = _body(sys.modules)
        self._held = dict(sys.modules)
        for name in shared.apart:
            self._held.pop(name, None)
        self._there = _body(self._held)

    def enter(self) -> None:
        """Make `sys.modules` the process's table, with modules that others have imported for all ranks meanwhile."""
        names, host = self._shared.names, sys.modules
        self._shared.collected = len(names)  # what the host imported itself since, it has
        if self._seen < len(names):
            for name in names[self._seen :]:
                if name in host and name not in self._held:
                    self._held[name] = host[name]
                    _add_to_package(self._held, name)
            self._seen = len(names)
        _exchange(self._here, self._there)

    def leave(self) -> None:
        """Restore the host's `sys.modules`, and add the modules that were imported for all ranks."""
        names = self._shared.names
        _exchange(self._here, self._there)
        if self._shared.collected < len(names):
            for name in names[self._shared.collected :]:
                if name in self._held:
                    sys.modules.setdefault(name, self._held[name])
            self._seen = self._shared.collected = len(names)

    def follow(self, other: ModuleTable) -> None:
        """Switch processes, like `other.leave()` and `enter()`."""
        names = len(self._shared.names)
        if self._shared.collected < names or self._seen < names:
            other.leave()
            self.enter()
            return
        # As in `_exchange`. What the host has, the other kept until now.
        here: Any = self._here
        other_there: Any = other._there
        there: Any = self._there
        other_there.raw, here.raw, there.raw = here.raw, there.raw, other_there.raw


def _add_to_package(modules: dict[str, Any], name: str) -> None:
    """Make module *name* of *modules* an attribute of its package, as its import does."""
    package, _, part = name.rpartition(".")
    if name in modules and package in modules:
        getattr(modules[package], "__dict__", {}).setdefault(part, modules[name])


def _body(table: dict[str, Any]) -> Any:
    return _Body.from_address(id(table) + _HEAD_BYTES)


def _exchange(here: Any, there: Any) -> None:
    # No call of Python, no allocation that the collector knows, no backward jump: neither another thread nor a
    # finalizer can see the dicts between the two stores.
    here.raw, there.raw = there.raw, here.raw


# -- Modules are imported once per process, as they would be in separate processes.
#
# Shared by all processes are: the standard library, torch, distsim, what these two need, packages that are compiled,
# and whatever these import. Their global state is either thread-local or swapped by `SimProcess`. Everything else, the
# user's modules and the installed packages they stand on (Lightning, transformers, megatron), each process imports for
# itself: their state lies in classes and globals that only an instance of their own can keep apart.


def _with_separator(paths: set[str]) -> tuple[str, ...]:
    folders = {os.path.realpath(p) for p in paths if p} | {p for p in paths if p}
    return tuple(sorted(p.rstrip(os.sep) + os.sep for p in folders))


def _other_roots() -> set[str]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # distsim/
    paths.add(here)
    house = os.path.dirname(here)
    paths.update(os.path.join(house, folder) for folder in ("debug", "realexec"))
    paths.add(os.path.dirname(torch.__file__))  # built where its source is, it lies among no installed packages
    return paths


_SITE = _with_separator(set(installed_here()))
_SHARED = _with_separator({*installed_here(), *_other_roots()})
_TEST_BODIES = "torch.testing._internal.distributed"
"""torch's own tests: programs for several processes that happen to lie among torch's modules."""


def is_own_file(path: str | None) -> bool:
    """Return whether *path* is a source file of the user's program."""
    if not path or path.startswith("<"):
        return False
    return not path.startswith(_SHARED)


_OWN_ALL_THE_SAME = frozenset({"filelock", "fsspec"})
"""Torch asks for them and does without: only its checkpoint writer and its compiler import them. Others register
their file systems with fsspec while they are imported; filelock (4.2) takes another pid for that of a forked child, and
closes its locks there."""

_COMPILED_SHARE = 0.01
"""A package with more extension modules than this, per Python module, is compiled (numpy has 3 in 100, pandas 4,
psutil 8): C code holds its Python classes, so that it can be there once only. Below it, the package has
a compiled helper on the side (megatron-core: 1 in 366)."""


@functools.cache
def _needed() -> frozenset[str]:
    """Return the top-level names of torch, distsim and the distributions that they require."""
    needed_names: set[str] = set()
    names: set[str] = set()
    todo = ["torch", "torch-distsim"]
    while todo:
        name = todo.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in names:
            continue
        names.add(key)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        listed = (distribution.read_text("top_level.txt") or "").split()
        if not listed:
            tops = (str(file).partition("/")[0].removesuffix(".py") for file in distribution.files or ())
            listed = [top for top in tops if top.isidentifier()]
        needed_names.update(listed)
        for requirement in distribution.requires or ():
            package, _, condition = requirement.partition(";")
            if "extra" not in condition and (match := re.match(r"[\w.-]+", package)):
                todo.append(match.group())
    return frozenset(needed_names - _OWN_ALL_THE_SAME)


@functools.cache
def _is_compiled_namespace(folders: tuple[str, ...]) -> bool:
    """Return whether a part of a namespace package is compiled: google._upb knows google.protobuf's classes."""
    parts = (os.path.join(folder, name) for folder in folders if os.path.isdir(folder) for name in os.listdir(folder))
    return any(os.path.isdir(part) and _is_compiled(part) for part in parts)


@functools.cache
def _is_compiled(folder: str) -> bool:
    extensions = sources = 0
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    for _, _, files in os.walk(folder):
        extensions += sum(name.endswith(suffixes) for name in files)
        sources += sum(name.endswith(".py") for name in files)
    return extensions > _COMPILED_SHARE * sources


class _OnceLoader(importlib.abc.Loader):
    """Loader of an extension module in a package that each process imports separately.

    The extension is loaded once, and becomes an attribute of each copy of the package.
    """

    def __init__(self, real: importlib.machinery.ExtensionFileLoader) -> None:
        self._real = real
        self._module: ModuleType | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec) if self._module is None else self._module

    def exec_module(self, module: ModuleType) -> None:
        if self._module is None:
            self._real.exec_module(module)
            self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class RankModules:
    """Decides, module by module, which of them all processes share."""

    def __init__(self) -> None:
        self.shared = SharedImports((_TEST_BODIES,))
        self._loaded: frozenset[str] | None = None
        """Names that existed at the first import; None before it."""
        self._own: dict[str, bool] = {}
        self._extensions: dict[str, _OnceLoader] = {}
        self._loading: set[int] = set()
        """Processes that run the body of a shared module."""
        self._shared_parts: dict[str, list[str]] = {}
        """Shared modules within a package of which each process has its own, by package."""
        self.bodies = ModuleBodies()

    def on_import(self, fullname: str, spec: importlib.machinery.ModuleSpec) -> None:
        """Handle the import of *fullname* by a process or by the host."""
        if self._loaded is None:
            self._loaded = frozenset(sys.modules)
        own = self._own.get(fullname)
        if own is None:
            own = self._own[fullname] = self._is_own(fullname, spec)
        if not own:
            self.shared.names.append(fullname)
        elif isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
            spec.loader = self._extensions.setdefault(fullname, _OnceLoader(spec.loader))

    def is_shared(self, fullname: str) -> bool:
        """Return whether the module *fullname* exists once for all processes."""
        return not self._own.get(fullname, True)

    @contextlib.contextmanager
    def sharing_imports(self, fullname: str, process: int) -> Iterator[None]:
        """Return a context that shares the modules that shared module *fullname* adds to `sys.modules` of *process*.

        These are the installed packages that it imports, and modules that it adds itself. The user's own modules are
        not shared.
        """
        if process in self._loading or not self.is_shared(fullname):
            yield
            for name in self._shared_parts.get(fullname, ()):
                _add_to_package(sys.modules, name)
            return
        before = set(sys.modules)
        self._loading.add(process)
        try:
            yield
        finally:
            self._loading.discard(process)
            for name in [name for name in sys.modules if name not in before]:
                if self._own.get(name, True) and self._may_be_shared(name):
                    self._own[name] = False
                    self.shared.names.append(name)
                    package = name.rpartition(".")[0]
                    if self._own.get(package):
                        self._shared_parts.setdefault(package, []).append(name)

    def _may_be_shared(self, name: str) -> bool:
        if name.partition(".")[0] in _OWN_ALL_THE_SAME or f"{name}.".startswith(f"{_TEST_BODIES}."):
            return False
        was_imported = name in self._own
        return not (was_imported and is_own_file(getattr(sys.modules[name], "__file__", None)))

    def _is_own(self, fullname: str, spec: importlib.machinery.ModuleSpec) -> bool:
        parent = fullname.rpartition(".")[0]
        if isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
            return self._own.get(parent, False)
        if fullname in sys.builtin_module_names or _imp.is_frozen(fullname):
            return False
        folders = list(spec.submodule_search_locations or ())
        origin = spec.origin or (folders[0] if folders else None)  # a namespace package has no origin
        if is_own_file(origin) or f"{fullname}.".startswith(f"{_TEST_BODIES}."):
            return True
        if origin is not None and not origin.startswith(_SITE):
            return False
        if parent and self._decides_for_parts(parent):
            return self._own.get(parent, False)
        if fullname in (self._loaded or ()) or fullname.partition(".")[0] in _needed():
            return False
        if spec.origin is None:
            return not _is_compiled_namespace(tuple(folders))
        return not folders or not _is_compiled(folders[0])

    def _decides_for_parts(self, package: str) -> bool:
        """Return whether the parts of *package* are shared if it is.

        This holds for all packages but namespace packages, whose parts decide for themselves.
        """
        module = sys.modules.get(package)
        if getattr(module, "__file__", None) is not None or self._own.get(package) is False:
            return True
        return package in (self._loaded or ()) and _is_compiled_namespace(tuple(getattr(module, "__path__", ())))


def forget_packages(before: Collection[str]) -> None:
    """Remove from `sys.modules` the packages that the host imported and that each process imports separately.

    Args:
        before: Names of the modules before those imports.
    """
    modules = RankModules()
    tops = {name.partition(".")[0] for name in sys.modules if name not in before}.difference(before)
    specs = {top: getattr(sys.modules.get(top), "__spec__", None) for top in tops}
    own = {top for top, spec in specs.items() if spec is not None and modules._is_own(top, spec)}
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        del sys.modules[name]


_deciding: list[RankModules] = []


_ON_CPUS = "torchft."
"""Modules of a library that has replacements without GPUs, too."""


def decide(modules: RankModules | None) -> None:
    """Let *modules* handle every import from now on; None: no rank's."""
    _deciding[:] = [] if modules is None else [modules]


def import_patches() -> list[tuple[Any, str, Any]]:
    """Return patches that let the rank's modules handle every import, whatever its finder.

    Import locks are per process: a module that makes a collective during its import must not block the same import
    in another rank. Installed code is read once for all ranks.
    """
    real_find, real_lock = bootstrap._find_spec, bootstrap._get_module_lock  # type: ignore[attr-defined]
    real_load = bootstrap._load_unlocked  # type: ignore[attr-defined]
    loader = bootstrap_external._LoaderBasics
    real_run = loader.exec_module

    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        process = current_process()
        if process is not None:
            process.port.ticks += 1
        spec = standard_twin(name) or real_find(name, path, target)
        if process is not None and (process.accelerators is not None or name.startswith(_ON_CPUS)):
            spec = shelf("libraries").module_spec(name, spec)
        if spec is not None:
            for modules in _deciding:
                modules.on_import(name, spec)
        return spec

    def load_unlocked(task: Any, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        with _deciding[0].sharing_imports(spec.name, task.process.index):
            return cast(ModuleType, real_load(spec))

    def exec_module(task: Any, self: Any, module: ModuleType) -> None:
        process, path, name = task.process, str(getattr(self, "path", "")), module.__name__
        with made_for_all(_deciding[0].is_shared(name)), process.port.core.left():  # it may make threads of its own
            if path.startswith(_SITE):
                _deciding[0].bodies.run(module, path, lambda: self.get_code(name), lambda: self.get_source(name))
            elif type(self) is importlib.machinery.SourceFileLoader and is_own_file(path):
                exec(own_code(self.get_data(path), path), module.__dict__)
            else:
                real_run(self, module)
            if process.accelerators is not None or name.startswith(_ON_CPUS):
                shelf("libraries").after_import(module)
                if name == "torch.utils.cpp_extension":
                    refuse_cuda_builds()

    return [
        (bootstrap, "_find_spec", find_spec),
        patch_for_ranks(bootstrap, "_get_module_lock", lambda task, name: real_lock(f"{name}@{task.process.index}")),
        patch_for_ranks(bootstrap, "_load_unlocked", load_unlocked),
        patch_for_ranks(loader, "exec_module", exec_module),
    ]
