"""The user's files as code of a simulated process, and the kernels and extensions that a program compiles."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from hashlib import blake2b
from types import CodeType, ModuleType
from typing import Any

from distsim.debug.evidence.watched_source import compiled, report_to, watch_imports
from distsim.errors import NotSimulated
from distsim.shelves import shelf
from distsim.sim.kernel.task import current_process, current_task

# -- The user's files as code of a simulated process: it reports what it handles, and has a hash seed of its own.
#
# Python's `str` hashes have one seed a process, so that the order of a set of strings is another one on each rank of a
# real job. All simulated ranks live in one process. So the user's own files are compiled with a call wherever they
# go through an iterable or ask for a `hash`: a set that holds strings is given in the rank's own order. What
# libraries do with such a set is the same on all ranks. PYTHONHASHSEED gives all ranks one order, as in a real job.

ORDERED, HASHED = "__distsim_ordered__", "__distsim_hashed__"
TAKES_ALL = frozenset({"list", "tuple", "enumerate", "iter", "zip", "map", "filter", "fromkeys", "join", "extend"})
"""Functions and methods that iterate over an argument in its order."""
_ORDERED_ALREADY = frozenset({"range", "enumerate", "zip", "sorted", "reversed", "items", "keys", "values"})


class _Change(ast.NodeTransformer):
    """Syntax transformer of the program's files."""

    _changed = False

    def apply(self, tree: ast.Module) -> bool:
        """Transform *tree*, and return whether it has changed."""
        self._changed = False
        self.visit(tree)
        return self._changed


class _Iterations(_Change):
    """Passes each iterated value of the program through `ordered`."""

    module, function, name = __name__, "ordered", ORDERED

    def visit_For(self, node: ast.For) -> ast.AST:
        node.iter = self._led(node.iter)
        return self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        if not node.is_async:
            node.iter = self._led(node.iter)
        return self.generic_visit(node)

    def visit_Starred(self, node: ast.Starred) -> ast.AST:
        if isinstance(node.ctx, ast.Load):
            node.value = self._led(node.value)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in TAKES_ALL:
            node.args = [a if isinstance(a, ast.Starred) else self._led(a) for a in node.args]
        return self.generic_visit(node)

    def _led(self, value: ast.expr) -> ast.expr:
        if isinstance(value, ast.Constant | ast.List | ast.Tuple | ast.Lambda | ast.GeneratorExp | ast.ListComp):
            return value
        if isinstance(value, ast.Call):
            if getattr(value.func, "attr", getattr(value.func, "id", "")) in _ORDERED_ALREADY:
                return value
        self._changed = True
        call = ast.Call(ast.copy_location(ast.Name(ORDERED, ast.Load()), value), [value], [])
        return ast.copy_location(call, value)


class _Hashes(_Change):
    """Leads `hash(...)` by `hashed`."""

    module, function, name = __name__, "hashed", HASHED

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "hash" and len(node.args) == 1 and not node.keywords:
            self._changed = True
            node.args.insert(0, node.func)
            node.func = ast.copy_location(ast.Name(HASHED, ast.Load()), node.func)
        return self.generic_visit(node)


_CHANGES = (_Iterations(), _Hashes())


def own_code(source: bytes, path: str) -> CodeType:
    """Return the code of a file of the user's program."""
    return compiled(source, path, *_CHANGES)


def ordered(values: Any) -> Any:
    """Return *values*; a set of strings is returned in this rank's own order, as hash randomization gives it."""
    if type(values) not in (set, frozenset) or len(values) < 2 or not any(map(_is_salted, values)):
        return values
    salt = _salt()
    return values if salt is None else sorted(values, key=lambda value: _digest(salt, value))


def hashed(function: Callable[[Any], int], value: Any) -> int:
    """Return `hash(value)` with the hash seed of this rank's process."""
    salt = _salt() if function is builtins.hash and _is_salted(value) else None
    if salt is None:
        return function(value)
    number = int.from_bytes(_digest(salt, value), "little", signed=True)
    return -2 if number == -1 else number


def _salt() -> bytes | None:
    """Return the hash seed of the rank that runs; None if all have one."""
    process = current_process()
    if process is None or os.environ.get("PYTHONHASHSEED", "random") not in ("", "random"):
        return None
    return f"{process.port.facts.seed}:{process.index}".encode()


def _is_salted(value: Any) -> bool:
    """Return whether Python's hash of *value* depends on the process's hash seed."""
    if isinstance(value, tuple | frozenset):
        return any(map(_is_salted, value))
    return isinstance(value, str | bytes)


def _digest(salt: bytes, value: Any) -> bytes:
    if isinstance(value, frozenset):
        value = sorted(map(repr, value))
    return blake2b(repr(value).encode("utf-8", "backslashreplace"), digest_size=8, key=salt[:64]).digest()


@contextlib.contextmanager
def caught_by_ranks() -> Iterator[None]:
    """Return a context for a simulation in which exceptions handled by a rank are recorded with its process."""
    with report_to(_note), watch_imports():
        yield


def _note(error: BaseException, code: CodeType, line: int, thread: str = "") -> None:
    process = current_process()
    if process is not None:
        process.caught.add(error, code, line, process.calls.count, thread)


# -- Kernels that a program brings along, of Triton or compiled from CUDA source, and extensions that it compiles.

LAUNCH_OPTIONS = ("grid", "warmup", "num_warps", "num_stages", "num_ctas", "maxnreg", "stream")
"""Arguments of a launch that configure it and are not passed to the kernel."""


def launch(
    kernel: str, args: tuple[Any, ...], kwargs: dict[str, Any], function: Callable[..., Any] | None = None
) -> None:
    """Launch a kernel in the rank that runs.

    Args:
        kernel: Its name, `triton::name` or `cuda::name`.
        args: Positional arguments of the launch.
        kwargs: Keyword arguments of the launch.
        function: The Python function of a Triton kernel; that of a library may have a known price.
    """
    mode = getattr(current_task(), "dispatch_mode", None)
    if mode is None:
        raise no_launch(kernel, "outside of a rank on GPUs")
    if not kwargs.get("warmup"):
        known = None if function is None else shelf("libraries").known_kernel(function)
        passed = {name: value for name, value in kwargs.items() if name not in LAUNCH_OPTIONS}
        mode.launch_own_kernel(kernel, args, passed, known)


def no_launch(kernel: str, why: str) -> NotSimulated:
    """Return the error for the launch of a kernel that cannot be priced."""
    return NotSimulated(
        f"the {title_of(kernel)} {why}", f"set its cost with distsim.kernel_cost('{kernel}', flops=, bytes=)"
    )


def title_of(kernel: str) -> str:
    """Return the name of a kernel as a report shows it."""
    kind, _, name = kernel.partition("::")
    return f"{'Triton' if kind == 'triton' else 'CUDA'} kernel {name}"


def refuse_cuda_builds() -> None:
    """Refuse extensions with CUDA sources in `torch.utils.cpp_extension`; those in C++ alone are built and run.

    The module is shared by all ranks and simulations, and imported when a program needs it.
    """
    extensions: Any = sys.modules.get("torch.utils.cpp_extension")
    if extensions is not None and not hasattr(extensions.load, "__wrapped__"):
        extensions.load = _refusing_cuda(extensions.load)
        extensions.load_inline = _refusing_cuda(extensions.load_inline)


def _refusing_cuda(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(build).bind_partial(*args, **kwargs).arguments
        files = given.get("sources", ())
        is_cuda = bool(given.get("cuda_sources") or given.get("with_cuda"))
        is_cuda |= any(str(file).endswith((".cu", ".cuh")) for file in ([files] if isinstance(files, str) else files))
        if is_cuda and current_process() is not None:
            raise NotSimulated(
                f"the CUDA extension {given.get('name')!r}, which torch.utils.cpp_extension would compile,",
                "run the program without it (many programs have a PyTorch implementation, which a flag such as "
                "impl='ref' selects)",
            )
        return build(*args, **kwargs)

    return checked


# -- A module of this machine under another name.


def standard_twin(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of `multiprocess` (multiprocessing with another pickle, which datasets uses) as multiprocessing,
    which is simulated; None for all other modules."""
    if name != "multiprocess" or current_process() is None:
        return None
    return importlib.machinery.ModuleSpec(name, _TwinLoader(), is_package=True)


class _TwinLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        self._spec = multiprocessing.__spec__
        return multiprocessing

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        for part in pkgutil.iter_modules(multiprocessing.__path__):
            if not part.name.startswith(("popen", "resource_sharer")):
                full_name = f"multiprocessing.{part.name}"
                sys.modules[f"multiprocess.{part.name}"] = importlib.import_module(full_name)
