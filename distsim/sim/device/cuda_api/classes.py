"""Classes of torch that are asked for something on a GPU: `torch.Generator(device="cuda")`, `torch.UntypedStorage(n,
device="cuda")`, and `torch.cuda.FloatTensor` with its kin, as one asked before there was `device=`.

They are made in C++, and those of a build without CUDA raise that it is one; what stands for them makes the same of
torch.empty and torch.tensor, and knows it by isinstance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, UntypedStorage

from distsim.errors import NotSimulated
from distsim.sim.device.cuda_api.ranks import Patch, gpu
from distsim.sim.device.generator import CudaGenerator
from distsim.sim.isolation.process import current_task
from distsim.torch_compat.cuda_api import GENERATOR
from distsim.torch_compat.device import GET_USER_FN, SET_DEFAULT_TENSOR_TYPE

__all__ = ["class_patches"]

_get_user_fn = GET_USER_FN.get(None)
_set_default_tensor_type = SET_DEFAULT_TENSOR_TYPE.get()

_TYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "LongTensor": torch.int64, "IntTensor": torch.int32, "ShortTensor": torch.int16,
    "CharTensor": torch.int8, "ByteTensor": torch.uint8, "BoolTensor": torch.bool,
}  # fmt: skip


_Plain = torch.Generator


class _KindOfGenerator(type):
    """Whatever is a generator of torch's is an instance of what stands in for its class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Plain)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Plain)

    def __call__(cls, device: Any = "cpu") -> Any:
        task = current_task()
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if task is None or found.type != "cuda":
            return _Plain(device)
        on = gpu(task, found.index)
        return CudaGenerator(on.index, task.process.entropy)


class Generator(metaclass=_KindOfGenerator):
    """What stands for torch.Generator."""


class _TypeOfTensors(type):
    """What `torch.cuda.FloatTensor` is an instance of."""

    dtype: torch.dtype
    real: Any

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Tensor) and value.is_cuda and value.dtype is cls.dtype

    def __call__(cls, *args: Any, device: Any = None) -> Any:
        if current_task() is None:
            return cls.real(*args)
        where = torch.device("cuda") if device is None else device
        if not args:
            return torch.empty(0, dtype=cls.dtype, device=where)
        if all(isinstance(arg, int) for arg in args):
            return torch.empty(args, dtype=cls.dtype, device=where)
        if isinstance(args[0], torch.Size):
            return torch.empty(args[0], dtype=cls.dtype, device=where)
        if isinstance(args[0], Tensor):
            return args[0].detach().to(where, cls.dtype)
        return torch.tensor(*args, dtype=cls.dtype, device=where)


def _kind(said: Any) -> _TypeOfTensors | None:
    """Of a type or its name, that of CUDA tensors."""
    if isinstance(said, str) and said.startswith("torch.cuda."):
        said = getattr(torch.cuda, said.removeprefix("torch.cuda."), None)
    return said if isinstance(said, _TypeOfTensors) else None


def class_patches() -> list[Patch]:
    """(holder, attribute, replacement)."""
    patches: list[Patch] = []
    for name, dtype in _TYPES.items():
        real = getattr(torch.cuda, name)
        ours = _TypeOfTensors(
            f"torch.cuda.{name}", (), {"dtype": dtype, "real": real, "is_cuda": True, "__module__": "torch.cuda"}
        )
        patches.append((torch.cuda, name, ours))
    real_new, real_default, real_type = UntypedStorage.__new__, _set_default_tensor_type, Tensor.type

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda" or current_task() is None:
            more = {} if device is None else {"device": device}
            return real_new(cls, *args, **more, **kwargs)
        values = args[0] if args and not isinstance(args[0], int) else None
        if values is not None:
            return torch.tensor(list(values), dtype=torch.uint8, device=device).untyped_storage()
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()

    def default(kind: Any, /) -> None:
        if current_task() is not None and _kind(kind) is not None:
            raise NotSimulated(
                "torch.set_default_tensor_type of a CUDA type",
                "say torch.set_default_device('cuda'), and torch.set_default_dtype for another type than float32",
            )
        real_default(kind)

    def as_type(self: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        ours = None if dtype is None else _kind(dtype)
        if ours is None or current_task() is None:
            return real_type(self, dtype, non_blocking, **kwargs)
        return self.to(self.device if self.is_cuda else "cuda", ours.dtype, non_blocking=non_blocking)

    def user_fn(node: Any) -> Any:
        task = current_task()
        if task is not None and task.process.accelerators is not None and task.process.accelerators.works:
            task.process.accelerators.works_on_host(task, task.process.accelerators.host.function_s)
        return _get_user_fn(node)

    return [
        *patches,
        *([] if _get_user_fn is None else GET_USER_FN.replaced_by(user_fn)),
        (torch, "Generator", Generator),
        *GENERATOR.replaced_by(Generator),
        (Tensor, "type", as_type),
        (UntypedStorage, "__new__", staticmethod(new)),
        *SET_DEFAULT_TENSOR_TYPE.replaced_by(default),
    ]
