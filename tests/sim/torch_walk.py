"""A walk over torch's own source: everything that is kept for the whole process and may change."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["found"]

_ROOT = Path(os.path.dirname(torch.__file__))
_NOT_WALKED = (
    # compilers and exporters: what they keep goes by code and guards, not by rank
    *("_dynamo", "_inductor", "fx", "onnx", "_functorch", "_export", "export", "_higher_order_ops", "jit", "_lazy"),
    *("_subclasses", "_decomp", "_refs", "_prims", "_prims_common", "_native", "utils/_sympy", "_numpy", "ao"),
    *("quantization", "package", "_vendor", "compiler/_cache.py"),
    # accelerators, which a rank does not have
    *("xpu", "mps", "mtia", "cuda", "backends/cuda", "backends/mps", "sparse", "profiler/_cupti_monitor.py"),
    *("profiler/_cupti_monitor_trace.py", "distributed/_symmetric_memory/_nvshmem_triton.py"),
    *("distributed/_symmetric_memory/_rocshmem_triton.py", "distributed/_symmetric_memory/_shmem_triton_utils.py"),
    # programs and tests of their own; torchrun's side
    *("testing", "utils/benchmark", "utils/tensorboard", "utils/hipify", "utils/model_dump", "utils/bottleneck"),
    *("utils/viz", "utils/cpp_extension.py", "distributed/elastic", "distributed/launcher", "distributed/run.py"),
    *("distributed/flight_recorder", "distributed/debug", "distributed/benchmarks"),
    *("_strobelight", "contrib", "utils/_config_module.py", "utils/data/datapipes", "_logging"),
    *("_C", "include", "lib", "bin", "share", "csrc", "test"),
)
_GROW = ("append", "appendleft", "add", "extend", "insert", "setdefault", "update")
_SHRINK = ("clear", "discard", "pop", "popitem", "popleft", "remove")
_MUTATORS = frozenset({*_GROW, *_SHRINK})


def found() -> dict[str, str]:
    """`module:name` of every cache, rebound global and changed container, with how it was found."""
    places: dict[str, str] = {}
    for path in sorted(_ROOT.rglob("*.py")):
        relative = path.relative_to(_ROOT).as_posix()
        if not any(relative == s or relative.startswith(s + "/") for s in _NOT_WALKED):
            module = ("torch." + relative.removesuffix(".py").replace("/", ".")).removesuffix(".__init__")
            for name, how in _Module(ast.parse(path.read_text(encoding="utf-8"))).places():
                places.setdefault(f"{module}:{name}", how)
    return places


class _Module:
    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        plain: list[ast.stmt] = [n for n in tree.body if not isinstance(n, ast.FunctionDef | ast.ClassDef)]
        self._top = {name for node in plain for name in _stored(node)}
        self._classes = {n.name: _containers(n) for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}

    def places(self) -> Iterator[tuple[str, str]]:
        yield from self._in_body(self._tree.body, None)

    def _in_body(self, body: list[ast.stmt], owner: str | None) -> Iterator[tuple[str, str]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if any(_caches(ast.unparse(d)) for d in node.decorator_list):
                    yield (f"{owner}.{node.name}" if owner else node.name), "cache"
                yield from self._in_function(node, owner)
            elif isinstance(node, ast.ClassDef):
                yield from self._in_body(node.body, node.name)
            elif isinstance(node, ast.If | ast.Try):
                yield from self._in_body([*node.body, *node.orelse], owner)

    def _in_function(self, function: ast.AST, owner: str | None) -> Iterator[tuple[str, str]]:
        arguments = function.args  # type: ignore[attr-defined]
        local = {a.arg for a in (*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs)} | _stored(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield from ((name, "rebound") for name in node.names if name in local)
                local -= set(node.names)
        for node in ast.walk(function):
            name = None
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                name, how = self._kept(node.value, owner, local), "changed"
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
                name, how = self._kept(node.func.value, owner, local), "changed"
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                name, how = self._class_attribute(node, owner), "assigned"
            if name is not None:
                yield name, how

    def _kept(self, node: ast.expr, owner: str | None, local: set[str]) -> str | None:
        if isinstance(node, ast.Name) and node.id in self._top and node.id not in local:
            return node.id
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "self" and owner and node.attr in self._classes.get(owner, ()):
                return f"{owner}.{node.attr}"
            return self._class_attribute(node, owner)
        return None

    def _class_attribute(self, node: ast.Attribute, owner: str | None) -> str | None:
        if isinstance(node.value, ast.Name):
            if node.value.id == "cls" and owner:
                return f"{owner}.{node.attr}"
            if node.value.id in self._classes:
                return f"{node.value.id}.{node.attr}"
        return None


def _caches(decorator: str) -> bool:
    """For the whole process: `cached_property` keeps its value in the object."""
    name = decorator.split("(")[0].split(".")[-1]
    return "cache" in name and "property" not in name


def _stored(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _containers(cls: ast.ClassDef) -> set[str]:
    """Names bound in the class's own body to a value: an annotation alone makes no shared container."""
    bound = set()
    for node in cls.body:
        if isinstance(node, ast.Assign) or (isinstance(node, ast.AnnAssign) and node.value is not None):
            if isinstance(node.value, ast.Call) and "field" in ast.unparse(node.value.func):
                continue
            bound |= _stored(node)
    return bound
