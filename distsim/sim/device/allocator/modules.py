"""Which module of the program memory was taken in, told by hooks of torch.nn that are there for one step only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from distsim.sim.device.allocator.claims import tag_of
from distsim.sim.device.allocator.ledger import Ledger

__all__ = ["Modules", "family"]

_WRAPPERS = re.compile(r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|module)(?=\.|$)")
DEPTH = 4


class Modules:
    """Between `begin` and `end` the *ledgers* of one process know in which module each allocation is made. A hook
    costs microseconds a module: so it is one step, not all."""

    def __init__(self, ledgers: Sequence[Ledger]) -> None:
        self._ledgers = ledgers
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._hooks: list[Any] = []

    def begin(self) -> None:
        for ledger in self._ledgers:
            ledger.named = True
        self._hooks = [
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        ]

    def end(self) -> None:
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        self._stack.clear()
        self._names.clear()
        self._tell()
        for ledger in self._ledgers:
            ledger.named = False

    def _entered(self, module: torch.nn.Module, args: Any) -> None:
        if id(module) not in self._names:
            self._learn(module)
        self._stack.append(self._names[id(module)])
        self._tell()

    def _left(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._tell()

    def _tell(self) -> None:
        name = self._stack[-1] if self._stack else ""
        for ledger in self._ledgers:
            ledger.module = name

    def _learn(self, root: torch.nn.Module) -> None:
        """The names of *root*'s modules, and whose its parameters are."""
        for name, module in root.named_modules():
            known = self._names.setdefault(id(module), name or type(root).__name__)
            for parameter in module._parameters.values():
                tag = None if parameter is None else tag_of(parameter)
                if tag is not None:
                    tag.module = known


def family(name: str) -> str:
    """`module.layers.3.mlp.up` is one of `layers.*.mlp.up`; deeper ones are their parent's."""
    plain = _WRAPPERS.sub("", name).strip(".") or name
    parts = ["*" if part.isdigit() else part for part in plain.split(".")]
    return ".".join(parts[:DEPTH])
