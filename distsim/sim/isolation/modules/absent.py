"""Packages that a CUDA installation brings and the machine of a simulation lacks.

`triton` comes with torch for CUDA, so programs import it without asking, and define kernels. Launching one is refused.
Libraries of `distsim/sim/stand_ins` stand in where a program does not catch the ImportError.
"""

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
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from distsim.errors import NotSimulated
from distsim.sim.kernel.task import current_process, current_task
from distsim.sim.stand_ins import LIBRARIES, contents

__all__ = ["launch", "no_launch", "stand_in"]

_VERSION = "3.7.0"
"""Of triton beside torch 2.13."""


def stand_in(name: str) -> importlib.machinery.ModuleSpec | None:
    """A module that stands for *name*, which is not installed; None: it is missing there, too."""
    library = name.partition(".")[0]
    if library != "triton" and library not in LIBRARIES:
        return None
    process = current_process()
    if process is None or process.accelerators is None or _importer().partition(".")[0] == "torch":
        return None  # torch does without
    if name == "triton":
        _torch_does_without()
    elif name == library:
        if _is_optional():
            return None
        process.world.note(
            f"{library} is not installed: a stand-in of torch's own operators takes its place; what it has not got is "
            "refused where it is called"
        )
    spec = importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
    return spec


def _torch_does_without() -> None:
    """The module in which torch's compiler asks for Triton: it would find what the program has imported, and go on to
    its inside."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._inductor.runtime.triton_compat")


def _is_optional() -> bool:
    """Whether the program goes on without the module that is being imported: it catches the exception."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_lineno in _guarded_lines(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(256)
def _guarded_lines(file: str) -> frozenset[int]:
    """Lines of *file* where an ImportError is caught."""
    if file.startswith(("<", _HERE)):
        return frozenset()
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return frozenset()
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            caught = [handler.type for handler in node.handlers]
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
    """Has whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Part(f"{self.__name__}.{name}")


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
        raise NotSimulated(
            self._distsim_name, "it needs a GPU; price what it does with distsim.kernel_cost(fn, flops=, bytes=)"
        )

    def __getitem__(self, key: Any) -> _Part:
        return self

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__


class _Kernel:
    """A function under triton.jit: it is defined, and priced where it is launched."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", "kernel")
        self._qualname = f"triton::{self.__name__}"  # what distsim.kernel_cost asks for
        self.__doc__ = fn.__doc__

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run

    def run(self, *args: Any, **kwargs: Any) -> None:
        launch(self.__name__, args, kwargs)

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Compile it, which takes no time of a simulation."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")  # as Triton says it


LAUNCH_OPTIONS = ("grid", "warmup", "num_warps", "num_stages", "num_ctas", "maxnreg", "stream")
"""Arguments of a launch that are not the kernel's own."""


def launch(kernel: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Launch the Triton kernel of that name in the rank that runs, of an installed Triton as well."""
    mode = getattr(current_task(), "dispatch_mode", None)
    if mode is None:
        raise no_launch(kernel, "outside of a rank on GPUs")
    if not kwargs.get("warmup"):
        mode.launch_triton(kernel, args, {name: value for name, value in kwargs.items() if name not in LAUNCH_OPTIONS})


def no_launch(kernel: str, why: str) -> NotSimulated:
    """What the launch of a kernel raises where it cannot be priced."""
    return NotSimulated(
        f"the Triton kernel {kernel} {why}",
        f"say what it costs with distsim.kernel_cost('triton::{kernel}', flops=, bytes=)",
    )


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
