"""torch.compile on simulated GPUs, which runs what it is given as it is, and launches of Triton kernels."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from distsim.sim.device.cuda_api.ranks import Patch, for_ranks, with_gpus
from distsim.sim.isolation.modules.absent import launch
from distsim.sim.isolation.process import RankTask, current_task
from distsim.torch_compat.compiler import (
    HAS_ANY_GLOBAL_HOOK,
    HAS_TRITON_PACKAGE,
    OPTIMIZED_MODULE,
    WARN_ONCE,
    has_hooks_of_the_program,
)
from distsim.torch_compat.cuda_api import ALLOCATOR_STATE, SET_CACHED_TENSORS_ENABLED

__all__ = ["compiled_patches"]

has_triton_package = HAS_TRITON_PACKAGE.get()

EAGER = (
    "torch.compile: what it was given runs eagerly, operator by operator; nothing is fused (--fuse prices it as the "
    "compiler's kernels)"
)
FUSED = (
    "torch.compile: what it was given runs eagerly, and is priced as one graph of fused kernels a call (--fuse); graph "
    "breaks, CUDA graphs (reduce-overhead) and the time to compile are not in it"
)
_real_warn_once = WARN_ONCE.get()


def _compile(task: RankTask, model: Any = None, **options: Any) -> Any:
    if model is None:
        return lambda given: _compile(task, given, **options)
    if options.get("disable"):
        return model
    task.world.note(FUSED if task.world.data.fuse else EAGER)
    if not isinstance(model, torch.nn.Module):
        module = getattr(model, "__self__", None)
        if isinstance(module, torch.nn.Module):  # Module.compile() gives its own call
            return _graph(model, type(module), sum(1 for _ in module.parameters()))
        return _graph(model, model, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of global hooks: those are ours
        return OPTIMIZED_MODULE.get()(model, _AsItIs(model))


_compiled: dict[RankTask, int] = {}
"""Threads that are in compiled code, and in how many functions of it."""


def _warn_once(task: RankTask, *args: Any, **kwargs: Any) -> None:
    """flex_attention says that it is slow where it was not compiled."""
    if task not in _compiled:
        _real_warn_once(*args, **kwargs)


class _AsItIs:
    """Stands for the compiler's context of a module (torch._dynamo.eval_frame._TorchDynamoContext)."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = type(module), sum(1 for _ in module.parameters())

    def __call__(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return _graph(call, *self._module)

    def __deepcopy__(self, memo: Any) -> _AsItIs:
        return self


def _graph(call: Callable[..., Any], named: Any, parameters: int) -> Callable[..., Any]:
    """*call*; with --fuse its kernels are taken as those of one compiled graph (timeline/fusion.py)."""
    name = getattr(named, "__qualname__", type(named).__name__)

    @functools.wraps(call)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        if task is None or task.process.accelerators is None:
            return call(*args, **kwargs)
        fusion, around = task.process.accelerators.fusion, _compiled.get(task, 0)
        _compiled[task] = around + 1
        try:
            if fusion is None:
                return call(*args, **kwargs)
            with fusion.graph(task, name, parameters):
                return call(*args, **kwargs)
        finally:
            if around:
                _compiled[task] = around
            else:
                del _compiled[task]

    return compiled


def _any_hook_of_the_program(task: RankTask) -> bool:
    return has_hooks_of_the_program()


def compiled_patches() -> list[Patch]:
    """(holder, attribute, replacement) of the compiler and of Triton."""
    has_triton_package()  # torch remembers what it is told first; ranks can import a stand-in for Triton (absent.py)
    patches: list[Patch] = [
        (torch, "compile", with_gpus(torch.compile, _compile)),
        *WARN_ONCE.replaced_by(for_ranks(_real_warn_once, _warn_once)),
        *(
            HAS_ANY_GLOBAL_HOOK.replaced_by(for_ranks(HAS_ANY_GLOBAL_HOOK.get(), _any_hook_of_the_program))
            if HAS_ANY_GLOBAL_HOOK.exists()
            else []
        ),
    ]
    return [*patches, *_names_of_graphs(), *_triton_patches()]


def _names_of_graphs() -> list[Patch]:
    """Names that torch._dynamo.reset imports where CUDA is built, in a torch that has none of them."""
    ours = (
        (ALLOCATOR_STATE, type(ALLOCATOR_STATE.attribute, (), {})),
        (SET_CACHED_TENSORS_ENABLED, lambda enabled: None),
    )
    return [(name.holder(), name.attribute, value) for name, value in ours if not name.exists()]


def _triton_patches() -> list[Patch]:
    """Launches of an installed Triton (it comes with torch for CUDA); where it is not, absent.py stands in."""
    patches: list[Patch] = []
    for module, name in (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner")):
        kernel = getattr(sys.modules.get(module), name, None)
        if kernel is not None:
            patches.append((kernel, "run", _in_rank(kernel.run)))
    return patches


def _in_rank(real: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_task() is None:
            return real(self, *args, **kwargs)
        launch(getattr(self, "base_fn", self).__name__, args, kwargs)
        return None

    return run
