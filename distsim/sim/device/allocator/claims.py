"""Attributes GPU memory to lines, modules and other uses, and writes the message when memory runs out.

A site is the line, the operator and the tensor for which memory of a simulated GPU was taken.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from distsim.debug.records.frames import Owner, owner
from distsim.sim.device.allocator.allocator import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    Allocator,
    Ledger,
    Tag,
)
from distsim.torch_compat.groups import CURRENT_GRAPH_TASK_ID

if TYPE_CHECKING:
    from distsim.sim.device.allocator.allocator import Ledger

# -- Which allocations are parameters, gradients, an optimizer's state, buffers of collectives.


def tag_of(tensor: Tensor) -> Tag | None:
    """Return the tag of the memory of *tensor* (the local part of a DTensor); None if it is not on a simulated GPU."""
    local = getattr(tensor, "_local_tensor", tensor)
    held = local.untyped_storage().__dict__.get("_distsim_held") if local.is_cuda else None
    return None if held is None or held.block is None else held.block.tag


def _claim(tensor: Any, kind: str, owner: Tag | None = None) -> Tag | None:
    tag = tag_of(tensor) if isinstance(tensor, Tensor) else None
    if tag is not None:
        tag.kind = kind
        if owner is not None:
            tag.module = owner.module
    return tag


def claim_of_optimizer(optimizer: Any) -> None:
    """Claim the tensors of *optimizer*: the parameters that it updates, and its state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tag = _claim(parameter, PARAMETERS)
            if parameter.grad is not None:
                _claim(parameter.grad, GRADIENTS, tag)
    for parameter, state in list(optimizer.state.items()):
        tag = tag_of(parameter) if isinstance(parameter, Tensor) else None
        for value in state.values() if isinstance(state, dict) else ():
            _claim(value, OPTIMIZER, tag)


def claim_buffers(tensors: Iterable[Tensor]) -> None:
    """Mark *tensors*, which a collective reads or writes, as communication buffers."""
    for tensor in tensors:
        tag = tag_of(tensor)
        if tag is not None and tag.kind in (ACTIVATIONS, OTHER):  # what it is besides, an optimizer says
            tag.kind = COMMUNICATION


@dataclass(slots=True)
class Claims:
    """Claims of tensors and optimizers on the memory of one GPU."""

    sharded: bool = False
    """Some parameter is a part of a larger one (FSDP)."""
    gradients: int = 0
    """Bytes of gradients that will still be allocated, if the program trains."""
    optimizer: int | None = None
    """Bytes that optimizers will still allocate, including scratch memory; None if unknown or without an optimizer."""


def claim_all(memory: Allocator) -> Claims:
    """Claim parameters, gradients and optimizer state, on any GPU, before any optimizer has made a step.

    The result's future allocations are those in *memory*.
    """
    claims = Claims()
    optimizers = []
    for tensor in gc.get_objects():
        kind = type(tensor)
        if issubclass(kind, Tensor):
            if not isinstance(tensor, torch.nn.Parameter):  # a DTensor may be one, which its class does not say
                continue
            mine = _of(memory, tensor)
            if mine:
                claims.sharded |= hasattr(tensor, "_local_tensor") or hasattr(tensor, "_is_flat_param")
            _claim(tensor, PARAMETERS)
            if tensor.grad is not None:
                _claim(tensor.grad, GRADIENTS)
            elif tensor.requires_grad:
                claims.gradients += mine
        elif issubclass(kind, torch.optim.Optimizer):
            optimizers.append(tensor)
    for optimizer in optimizers:  # after the parameters, whose state is not one
        claim_of_optimizer(optimizer)
        coming = _to_come(memory, optimizer)
        if coming is not None:
            claims.optimizer = coming + (claims.optimizer or 0)
    return claims


def _of(memory: Allocator, tensor: Any) -> int:
    """Return bytes of *tensor* in *memory*."""
    if not isinstance(tensor, Tensor):
        return 0
    local = getattr(tensor, "_local_tensor", tensor)
    held = local.untyped_storage().__dict__.get("_distsim_held") if local.is_cuda else None
    if held is None or held.block is None or held.device.memory is not memory:
        return 0
    return int(local.numel() * local.element_size())


def _to_come(memory: Allocator, optimizer: Any) -> int | None:
    """Return the state that *optimizer* will still allocate in *memory*; None if it updates nothing there or its state
    is unknown."""
    total, seen = 0, False
    for group in optimizer.param_groups:
        kept = kept_per_number(optimizer, group)
        for parameter in group["params"]:
            nbytes = _of(memory, parameter)
            if not nbytes:
                continue
            if kept is None:
                return None
            state = optimizer.state.get(parameter) or {}
            held = sum(_of(memory, value) for value in state.values())
            total += max(0, kept * nbytes - held)
            seen = True
    return total if seen else None


def kept_per_number(optimizer: Any, group: dict[str, Any]) -> int | None:
    """Return the elements that an optimizer keeps for each element of a parameter, plus temporary ones of a foreach
    update.

    Source: `_multi_tensor_adam` in torch/optim/adam.py, which makes a list of roots.
    """
    at_once = group.get("foreach") is not False and not group.get("fused")
    decays = bool(group.get("weight_decay")) and not group.get("decoupled_weight_decay")
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return 2 + bool(group.get("amsgrad")) + at_once + (at_once and decays)
    if isinstance(optimizer, torch.optim.SGD):
        return bool(group.get("momentum")) + (at_once and decays)
    return None


_current_graph_task_id = CURRENT_GRAPH_TASK_ID.get()


@dataclass(frozen=True, slots=True)
class Shortage:
    """Bytes, when torch.OutOfMemoryError was raised."""

    asked: int
    capacity: int
    """Bytes of the GPU, without the context."""
    reserved: int
    allocated: int
    held: dict[str, int]
    """Allocated bytes by kind (allocator.Ledger)."""
    asked_as: str
    """Kind of the requested memory (allocator.Ledger)."""
    claims: Claims
    in_backward: bool
    site: Any = None
    """Site of the request, if sites are kept."""

    @property
    def missing(self) -> int:
        """Return how many more bytes would have sufficed without fragmentation."""
        return max(0, self.allocated + self.asked - self.capacity)


def shortage(memory: Allocator, nbytes: int) -> Shortage:
    """Return the description of *memory* when it has no room for *nbytes*."""
    claims = claim_all(memory)
    return Shortage(
        nbytes,
        min(memory.capacity, memory.allowed),
        memory.reserved,
        memory.allocated,
        memory.ledger.now(),
        memory.ledger.kind,
        claims,
        _current_graph_task_id() != -1,
    )


_WRAPPERS = re.compile(r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|module)(?=\.|$)")
DEPTH = 4


class Modules:
    """Records the module of each allocation of one process in its *ledgers*, between `begin` and `end`.

    A hook costs microseconds per module, so only one step is recorded.
    """

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
        """Record the names of *root*'s modules, and the module of each parameter."""
        for name, module in root.named_modules():
            known = self._names.setdefault(id(module), name or type(root).__name__)
            for parameter in module._parameters.values():
                tag = None if parameter is None else tag_of(parameter)
                if tag is not None:
                    tag.module = known


def family(name: str) -> str:
    """Return the group of a module's name: `module.layers.3.mlp.up` is one of `layers.*.mlp.up`.

    Deeper modules belong to their parent's group.
    """
    plain = _WRAPPERS.sub("", name).strip(".") or name
    parts = ["*" if part.isdigit() else part for part in plain.split(".")]
    return ".".join(parts[:DEPTH])


class AllocationSite(NamedTuple):
    """Line, operator and tensor of an allocation."""

    file: str
    """Innermost file of the user's code; empty where none is on the stack."""
    line: int
    function: Any
    """Operator of aten; None if the allocation is not an operator's result: storage.resize_ (FSDP's gathered
    parameters), NCCL's buffers.
    """
    shape: tuple[Any, Any] | None
    """Size and dtype of the operator's result."""

    @property
    def operator(self) -> str:
        """Return the operator's name."""
        return "buffer" if self.function is None else self.function._schema.name.removeprefix("aten::")

    @property
    def tensor(self) -> str:
        """Return dtype and shape, such as `float32[8192,128256]`; empty if the allocation is not an operator's
        result.
        """
        if self.shape is None:
            return ""
        size, dtype = self.shape
        return f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, size))}]"


def site_reader(ledger: Ledger, accelerators: Any) -> Callable[[], AllocationSite]:
    """Return a function that describes the allocation which is being made for *ledger*."""
    are_users: dict[CodeType, bool] = {}

    def read() -> AllocationSite:
        shape, ledger.shape = ledger.shape, None
        function = None if shape is None else accelerators.operator
        frame = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            is_users = are_users.get(code)
            if is_users is None:
                is_users = are_users[code] = owner(code.co_filename) is Owner.USER
            if is_users:
                return AllocationSite(code.co_filename, frame.f_lineno, function, shape)
            frame = frame.f_back  # type: ignore[assignment]
        return AllocationSite("", 0, function, shape)

    return read
