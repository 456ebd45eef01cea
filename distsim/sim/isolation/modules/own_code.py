"""The user's files as code of a simulated process, and modules that this machine lacks."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import linecache
import multiprocessing
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from hashlib import blake2b
from types import CodeType, ModuleType
from typing import Any, NoReturn

from distsim.debug.evidence.watched_source import compiled, report_to, watch_imports
from distsim.errors import NotSimulated
from distsim.sim.kernel.task import current_process, current_task
from distsim.sim.stand_ins import LIBRARIES, contents, is_module

__all__ = [
    "caught_by_ranks",
    "launch",
    "needs_gpu",
    "no_launch",
    "own_code",
    "refuse_cuda_builds",
    "stand_in",
    "standard_twin",
    "title_of",
]

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


class _Iterations(ast.NodeTransformer):
    """Syntax transformer that passes each iterated value of the program through `ordered`."""

    module, function, name = __name__, "ordered", ORDERED

    def __init__(self) -> None:
        self._changed = False

    def apply(self, tree: ast.Module) -> bool:
        self._changed = False
        self.visit(tree)
        return self._changed

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


class _Hashes(ast.NodeTransformer):
    """Leads `hash(...)` by `hashed`."""

    module, function, name = __name__, "hashed", HASHED

    def __init__(self) -> None:
        self._changed = False

    def apply(self, tree: ast.Module) -> bool:
        self._changed = False
        self.visit(tree)
        return self._changed

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


# -- Packages that a CUDA installation brings and the machine of a simulation lacks.
#
# `triton` comes with torch for CUDA, so programs import it without asking, and define kernels. Launching one is
# refused. Libraries of `distsim/sim/stand_ins` stand in where a program does not catch the ImportError.

_VERSION = "3.7.0"
"""Version of Triton that torch 2.13 requires."""


def needs_gpu(name: str, spec: importlib.machinery.ModuleSpec) -> bool:
    """Return whether *spec* is an installed library with a stand-in, whose compiled kernels simulated GPUs cannot
    run.

    Liger's kernels are Triton's, which are priced at their launch.
    """
    has_stand_in = LIBRARIES.get(name) is not None and name != "liger_kernel"
    return has_stand_in and "site-packages" in (spec.origin or "")


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


def stand_in(name: str, installed: bool = False) -> importlib.machinery.ModuleSpec | None:
    """Return a module that replaces *name*, which is not installed; None if a GPU machine would not have it either."""
    library = name.partition(".")[0]
    if library != "triton" and library not in LIBRARIES:
        return None
    process = current_process()
    if process is None or process.accelerators is None or _importer().partition(".")[0] == "torch":
        return None  # torch does without
    libraries = process.port.facts.data.libraries
    if name == "triton":
        _torch_does_without()
    elif libraries is not None and library not in libraries:
        if installed:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None
    elif name == library:
        if not installed and libraries is None and _is_optional():
            process.port.shared.libraries_left_out.add(library)
            return None
        reason = f"the kernels of {library} need a GPU" if installed else f"{library} is not installed"
        process.port.note(
            f"{reason}: a replacement made of torch operators is used; a function that it lacks "
            f"is refused when it is called"
        )
    spec = importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
    return spec


def _torch_does_without() -> None:
    """Hide a stand-in of Triton from torch's compiler, which would otherwise import its internals."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._inductor.runtime.triton_compat")


def _is_optional() -> bool:
    """Return whether the program continues without the module that is being imported, because it catches the
    exception.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_lineno in _guarded_lines(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(256)
def _guarded_lines(file: str) -> frozenset[int]:
    """Return lines of *file* where an ImportError is caught."""
    if file.startswith(("<", _HERE)):
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
        if any(kind is None or _CATCHES.search(ast.unparse(kind)) for kind in caught):
            lines.update(range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1))
    return frozenset(lines)


_CATCHES = re.compile(r"\b(ImportError|ModuleNotFoundError|Exception|BaseException)\b")
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def _importer() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(("importlib", "_frozen_importlib", "distsim.sim.isolation.modules")):
            return name
        frame = frame.f_back
    return ""


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


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "triton":
            vars(module).update(
                __version__=_VERSION, jit=_jit, cdiv=_cdiv, next_power_of_2=_next_power_of_2, Config=_Config,
                autotune=_decorator, heuristics=_decorator,
            )  # fmt: skip
        elif module.__name__.partition(".")[0] in LIBRARIES:
            vars(module).update(contents(module.__name__))


class _Package(ModuleType):
    """A module that has every attribute that is accessed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full.partition(".")[0] in LIBRARIES and is_module(full):
            return importlib.import_module(full)  # a real package has imported its own
        if full.partition(".")[0] in LIBRARIES and _CLASS_NAME.match(name):
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
    raise NotSimulated(name, "it needs a GPU; set its cost with distsim.kernel_cost(fn, flops=, bytes=)")


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


class _Kernel:
    """A function under triton.jit, which is not compiled, and is priced at its launch."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", "kernel")
        self._qualname = f"triton::{self.__name__}"  # what distsim.kernel_cost asks for
        self.__doc__ = fn.__doc__

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run

    def run(self, *args: Any, **kwargs: Any) -> None:
        launch(self._qualname, args, kwargs)

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: compilation takes no time in a simulation."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")  # as Triton says it


LAUNCH_OPTIONS = ("grid", "warmup", "num_warps", "num_stages", "num_ctas", "maxnreg", "stream")
"""Arguments of a launch that configure it and are not passed to the kernel."""


def launch(kernel: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Launch the kernel `triton::name`, of an installed Triton as well, or `cuda::name` in the rank that runs."""
    mode = getattr(current_task(), "dispatch_mode", None)
    if mode is None:
        raise no_launch(kernel, "outside of a rank on GPUs")
    if not kwargs.get("warmup"):
        mode.launch_own_kernel(
            kernel, args, {name: value for name, value in kwargs.items() if name not in LAUNCH_OPTIONS}
        )


def no_launch(kernel: str, why: str) -> NotSimulated:
    """Return the error for the launch of a kernel that cannot be priced."""
    return NotSimulated(
        f"the {title_of(kernel)} {why}", f"set its cost with distsim.kernel_cost('{kernel}', flops=, bytes=)"
    )


def title_of(kernel: str) -> str:
    """Return the name of a kernel as a report shows it."""
    kind, _, name = kernel.partition("::")
    return f"{'Triton' if kind == 'triton' else 'CUDA'} kernel {name}"


def _jit(fn: Any = None, **options: Any) -> Any:
    return _Kernel if fn is None else _Kernel(fn)


def _decorator(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda kernel: kernel


class _Config:
    def __init__(self, kwargs: Any = None, **others: Any) -> None:
        self.kwargs = kwargs or {}
        vars(self).update(others)


def _cdiv(x: int, y: int) -> int:
    return -(-x // y)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 0
