"""What asks a tensor or a storage for its bytes, on simulated GPUs: printing, addresses, resizing, copies, files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, UntypedStorage

from distsim.sim.device.allocator.host_memory import still_unknown
from distsim.sim.device.allocator.ledger import COMMUNICATION
from distsim.sim.device.cuda_api.ranks import Patch, gpu
from distsim.sim.device.dispatch import ComputeMode
from distsim.sim.device.gpu import Held
from distsim.sim.device.meta_tensor import under_meta
from distsim.sim.device.operators.values import Shadow
from distsim.sim.device.streams import current_stream
from distsim.sim.isolation.process import current_task, require_task
from distsim.torch_compat.device import (
    DISABLE_CURRENT_MODES,
    DISABLED_TORCH_DISPATCH_IMPL,
    GET_CURRENT_DISPATCH_MODE_STACK,
    IS_FUNCTORCH_WRAPPED_TENSOR,
    PY_TORCH_FILE_WRITER,
    STR,
    TENSOR_STR,
)

__all__ = ["tensor_patches"]

_disabled_torch_dispatch_impl = DISABLED_TORCH_DISPATCH_IMPL.get()
_disable_current_modes = DISABLE_CURRENT_MODES.get()
_get_current_dispatch_mode_stack = GET_CURRENT_DISPATCH_MODE_STACK.get()
_is_functorch_wrapped_tensor = IS_FUNCTORCH_WRAPPED_TENSOR.get()
_PyTorchFileWriter = PY_TORCH_FILE_WRITER.get()
_str = STR.get()
_tensor_str = TENSOR_STR.get()

_BASE = 0x7F00_0000_0000
"""Where the memory of GPU 0 begins, as addresses go."""
_BETWEEN = 1 << 38
_LOADED = 1 << 15
"""Bytes of a storage that comes from the host whose values are kept: as many as 4,096 double precision numbers take."""

_SPARSE = 1 << 16
"""Bytes of unknown values from which on a file has a hole in their place."""
_write_record = _PyTorchFileWriter.write_record

_storage_nbytes, _storage_resize, _data_ptr = UntypedStorage.nbytes, UntypedStorage.resize_, Tensor.data_ptr


def _mode() -> ComputeMode:
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, ComputeMode):
            return mode
    raise RuntimeError("a rank's thread lost its dispatch mode")


def _simulated(storage: UntypedStorage) -> bool:
    return storage.device.type == "cuda" and current_task() is not None


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """A tensor over all of *storage*."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# -- addresses and sizes


def _address(storage: UntypedStorage) -> int:
    held = storage.__dict__.get("_distsim_held")
    if held is None or held.block is None:
        return 0
    return int(_BASE + held.device.index * _BETWEEN + held.block.address)


def _nbytes(storage: UntypedStorage) -> int:
    resized = storage.__dict__.get("_distsim_size")
    return int(_storage_nbytes(storage)) if resized is None else int(resized)


def _resize(storage: UntypedStorage, size: int) -> UntypedStorage:
    """Its memory goes back, or comes anew; C++ goes on seeing the largest size it ever had."""
    task = require_task()
    device = gpu(task, storage.device.index)
    if size == _nbytes(storage):
        return storage
    values = task.process.accelerators.values
    known = values.everything or "_distsim_shadow" in storage.__dict__
    before = values.host(_bytes_of(storage)) if known and size and _nbytes(storage) else None
    held = storage.__dict__.pop("_distsim_held", None)
    if held is not None:
        held.release()
    if size > _storage_nbytes(storage):
        there = _bytes_of(storage)
        under_meta(torch.ops.aten.set_.source_Storage_storage_offset, (there, storage, 0, (size,), (1,)), {})
    storage._distsim_size = size
    storage.__dict__.pop("_distsim_shadow", None)
    if size and (values.everything or (before is not None and values.keeps(size, torch.uint8))):
        here = torch.zeros(size, dtype=torch.uint8, device="cpu")
        if before is not None:  # it keeps what fits: resize_bytes_cuda in aten/src/ATen/native/cuda/Resize.cpp
            here[: len(before)].copy_(before[:size])
        storage._distsim_shadow = Shadow(here.untyped_storage())
    if size:
        block = device.allocate(size, current_stream(task, device))
        assert block.tag is not None
        block.tag.kind = COMMUNICATION
        storage._distsim_held = Held(device, block, size)
    return storage


# -- to the host and back


def _to_host(storage: UntypedStorage, what: str) -> UntypedStorage:
    """A copy on the host; zeros where nobody knows the values."""
    mode, there = _mode(), _bytes_of(storage)
    if mode.values.host(there) is not None:
        return there.cpu().untyped_storage()
    mode.copy_time(there, to_host=True, blocking=True)
    mode.values.count(what, mode.where)
    require_task().world.note(
        f"{what}: values that nobody knows are zeros there; a file of torch.save has holes in their place and takes no "
        "room on the disk for them"
    )
    made = torch.zeros(_nbytes(storage), dtype=torch.uint8, device="cpu").untyped_storage()
    made._distsim_unknown = True
    return made


def _write(writer: Any, name: str, data: Any, size: int) -> None:
    """One part of a file of torch.save."""
    if size >= _SPARSE and isinstance(data, UntypedStorage) and still_unknown(data):
        writer.write_record_metadata(name, size)
    else:
        task = current_task()
        holes = isinstance(data, UntypedStorage) and "_distsim_holes" in data.__dict__  # DCP's file leaves them
        if size >= _SPARSE and not holes and task is not None and task.process.accelerators is not None:
            values = task.process.accelerators.values
            if task.process.accelerators.used and not values.everything:
                task.world.note(
                    "torch.save: what was copied to the host first is written whole, with placeholders where nobody "
                    "knows the values; only a GPU's own tensors, and those that DCP copies, leave holes"
                )
        _write_record(writer, name, data, size)


def _to_device(storage: UntypedStorage, device: torch.device, non_blocking: bool) -> UntypedStorage:
    mode = _mode()
    nbytes = storage.nbytes()
    made = torch.empty(nbytes, dtype=torch.uint8, device=device)
    if nbytes:
        if _simulated(storage):
            made.copy_(_bytes_of(storage))
        else:
            mode.copy_time(made, to_host=False, blocking=not non_blocking)
            if nbytes <= _LOADED or mode.values.everything:
                here = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
                mode.values.know(made, here.clone())
    return made.untyped_storage()


def _copy(storage: UntypedStorage, source: UntypedStorage, non_blocking: bool) -> UntypedStorage:
    to = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    there = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)
    to.copy_(there, non_blocking=bool(non_blocking))
    if storage.device.type == "cpu" and _mode().values.host(there) is None:
        storage._distsim_unknown = True
    return storage


# -- printing


def _text(tensor: Tensor) -> str | None:
    """What stands in the brackets; None: torch finds it."""
    values = _mode().values
    if not tensor.numel() or tensor.layout is not torch.strided:
        return None
    if values.host(tensor) is None and tensor.numel() > 1:
        return f"<{tensor.numel()} unknown values>, size={tuple(tensor.shape)}"
    host = tensor.detach().cpu()
    prefix = "tensor(" if type(tensor) in (Tensor, torch.nn.Parameter) else f"{type(tensor).__name__}("
    with _disable_current_modes():
        return str(_tensor_str(host, len(prefix)))


def tensor_patches() -> list[Patch]:
    """(holder, attribute, replacement) of tensors and storages, as Python sees them."""
    real_str = _str
    base = {
        name: getattr(UntypedStorage, name)
        for name in ("size", "cpu", "copy_", "to", "data_ptr", "__len__", "clone", "_write_file", "_set_from_file")
    }

    def show(self: Tensor, *, tensor_contents: Any = None) -> str:
        if tensor_contents is None and current_task() is not None and _plain_on_gpu(self):
            tensor_contents = _text(self)
        return str(real_str(self, tensor_contents=tensor_contents))

    def data_ptr(self: Tensor) -> int:
        if current_task() is None or not _plain_on_gpu(self):
            return int(_data_ptr(self))
        if not self.numel():
            return 0
        start = _address(self.untyped_storage())
        return start + self.storage_offset() * self.element_size() if start else 0

    def storage_data_ptr(self: UntypedStorage) -> int:
        return _address(self) if _simulated(self) else int(base["data_ptr"](self))

    def nbytes(self: UntypedStorage) -> int:
        return _nbytes(self) if _simulated(self) else int(_storage_nbytes(self))

    def length(self: UntypedStorage) -> int:
        return _nbytes(self) if _simulated(self) else int(base["__len__"](self))

    def resize(self: UntypedStorage, size: int) -> UntypedStorage:
        return _resize(self, size) if _simulated(self) else _storage_resize(self, size)

    def cpu(self: UntypedStorage) -> Any:
        return _to_host(self, "a storage copied to the host") if _simulated(self) else base["cpu"](self)

    def copy(self: UntypedStorage, source: Any, non_blocking: Any = None) -> Any:
        if _simulated(self) or _simulated(source):
            return _copy(self, source, non_blocking)
        return base["copy_"](self, source, non_blocking)

    def clone(self: UntypedStorage) -> Any:
        return _to_device(self, self.device, False) if _simulated(self) else base["clone"](self)

    def to(self: UntypedStorage, *, device: Any, non_blocking: bool = False) -> Any:
        target = torch.device(device)
        if current_task() is not None:
            if target.type == "cuda" and (target.index is None or target != self.device):
                return _to_device(self, target, non_blocking)
            if target.type == "cpu" and _simulated(self):
                return _to_host(self, "a storage copied to the host")
        return base["to"](self, device=device, non_blocking=non_blocking)

    def write_file(self: UntypedStorage, *args: Any) -> Any:
        return base["_write_file"](_to_host(self, "a pickled tensor") if _simulated(self) else self, *args)

    def set_from_file(self: UntypedStorage, *args: Any) -> Any:
        if not _simulated(self):
            return base["_set_from_file"](self, *args)
        read = UntypedStorage(_nbytes(self), device="cpu")
        base["_set_from_file"](read, *args)
        return _copy(self, read, False)

    replaced = {
        "nbytes": nbytes, "size": nbytes, "__len__": length, "resize_": resize, "cpu": cpu, "copy_": copy,
        "clone": clone, "to": to, "data_ptr": storage_data_ptr, "_write_file": write_file,
        "_set_from_file": set_from_file,
    }  # fmt: skip
    return [
        *STR.replaced_by(show),
        (Tensor, "data_ptr", data_ptr),
        (_PyTorchFileWriter, "write_record", _write),
        *((UntypedStorage, name, ours) for name, ours in replaced.items()),
    ]


def _plain_on_gpu(tensor: Tensor) -> bool:
    return (
        tensor.is_cuda
        and tensor.layout is torch.strided
        and not _is_functorch_wrapped_tensor(tensor)
        and type(tensor).__torch_dispatch__ is _disabled_torch_dispatch_impl
    )
