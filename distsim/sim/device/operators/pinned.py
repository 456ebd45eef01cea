"""Pinned memory of the host: a mark on its storage. What it is good for is the time of copies."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from distsim.torch_compat.device import aten

__all__ = ["PINNING", "asks_for_memory", "is_pinned", "make_pinned"]


def is_pinned(tensor: Tensor) -> bool:
    return tensor.is_cpu and "_distsim_pinned" in tensor.untyped_storage().__dict__


def make_pinned(tensor: Tensor) -> Tensor:
    tensor.untyped_storage()._distsim_pinned = True
    return tensor


def _ask(run: Any, args: tuple[Any, ...]) -> bool:
    return is_pinned(args[0])


def _pin(run: Any, args: tuple[Any, ...]) -> Tensor:
    """aten._pin_memory: a copy."""
    if not args[0].is_cpu:
        raise RuntimeError(f"cannot pin '{args[0].type()}' only dense CPU tensors can be pinned")
    return make_pinned(run(aten.clone.default, (args[0],), {}))


PINNING: dict[Any, Any] = {aten.is_pinned.default: _ask, aten._pin_memory.default: _pin, aten.pin_memory.default: _pin}

_memory_askers: dict[int, tuple[Any, bool]] = {}
"""By identity of the operator, which is kept alive here: OpOverload's own hash is Python's."""


def asks_for_memory(func: Any) -> bool:
    """Whether *func* can have to do with a GPU where none of its tensors lies on one: it names a device or pins."""
    known = _memory_askers.get(id(func))
    if known is None:
        schema = getattr(func, "_schema", None)
        asks = schema is None or func in PINNING or any(map(_is_of_memory, schema.arguments))
        known = _memory_askers[id(func)] = (func, asks)
    return known[1]


def _is_of_memory(argument: Any) -> bool:
    return argument.name == "pin_memory" or "Device" in str(argument.type)
