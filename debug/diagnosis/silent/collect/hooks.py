"""Puts the hooks in place that feed the collectors; which collector hears them is for the caller to say."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch.compiler import is_compiling
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distsim.debug.diagnosis.silent.collect.functions import Current

__all__ = ["global_hooks"]


@contextlib.contextmanager
def global_hooks(current: Current) -> Iterator[None]:
    """Within this, torch tells of forward passes, of optimizers' steps, and of DistributedDataParallel's models: its
    constructor is not wrapped, so that its warnings name the program's line."""

    def enter(module: Any, args: Any) -> None:
        if is_compiling():  # traced: the compiled code calls no hook of a module inside of it
            return
        collector = current()
        if collector is not None:
            collector.hear(collector.enter_module, module, args, sys._getframe(1))

    def leave(module: Any, args: Any, output: Any) -> None:
        if is_compiling():
            return
        collector = current()
        if collector is not None:
            collector.hear(collector.leave_module, module, args)

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        collector = current()
        if collector is not None:
            has_closure = any(callable(one) for one in (*args[1:], *kwargs.values()))
            collector.hear(collector.before_step, optimizer, has_closure, sys._getframe(1))

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        collector = current()
        if collector is not None:
            collector.hear(collector.after_step, optimizer)

    def registered(module: Any, name: str, part: Any) -> None:
        if name == "module" and isinstance(module, DistributedDataParallel):
            collector = current()
            if collector is not None:
                collector.hear(collector.new_ddp, module)

    handles = [
        register_module_module_registration_hook(registered),
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
