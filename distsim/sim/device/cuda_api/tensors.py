"""Functions and classes of torch that make or describe CUDA tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, UntypedStorage

from distsim.errors import NotSimulated
from distsim.sim.device.allocator.allocator import COMMUNICATION
from distsim.sim.device.allocator.host_memory import still_unknown
from distsim.sim.device.dispatch import ComputeMode
from distsim.sim.device.generator import CudaGenerator, be_known_to_dtensor
from distsim.sim.device.gpu import Accelerators, Device, Held
from distsim.sim.device.hooks import under_meta
from distsim.sim.device.memory import accelerators_of, current_device, current_stream
from distsim.sim.device.operators.reading import COPIED
from distsim.sim.device.operators.transfers import make_pinned
from distsim.sim.device.operators.values import Shadow
from distsim.sim.isolation.for_ranks import for_ranks, name_for_ranks, patch_for_ranks
from distsim.sim.isolation.modules.patch_table import Patch
from distsim.sim.isolation.process import RankTask, current_task, require_task
from distsim.sim.isolation.wraps import refusing_class
from distsim.torch_compat import device as device_names
from distsim.torch_compat.cuda_api import ACCELERATOR, CUDA, GENERATOR, PARSE_VISIBLE_DEVICES
from distsim.torch_compat.names import TorchName

# -- Functions that answer a rank one way and everybody else another.


def only_ranks(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls *ours* in a rank; elsewhere it raises what a torch without CUDA raises."""

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        if task is None:
            raise AssertionError(f"Torch not compiled with CUDA enabled ({name})")
        return ours(task, *args, **kwargs)

    return call


def with_gpus(real: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls *ours* in a rank on a cluster with GPUs, and *real* elsewhere."""

    def call(task: RankTask, *args: Any, **kwargs: Any) -> Any:
        return ours(task, *args, **kwargs) if visible_devices(task) else real(*args, **kwargs)

    return for_ranks(real, call)


def refused(call: str, remedy: str, real: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a replacement for *real* (a function or class) that raises NotSimulated on a rank."""
    if isinstance(real, type):
        return refusing_class(real, lambda: NotSimulated(call, remedy))

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotSimulated(call, remedy)

    return refuse if real is None else for_ranks(real, refuse)


def cuda_function(name: str, answer: Callable[..., Any]) -> Patch:
    """Return the patch of `torch._C._cuda_*name*`, which a torch without CUDA lacks."""
    function = CUDA[name]
    real = function.get(None)
    holder = function.holder()
    return holder, function.attribute, only_ranks(name, answer) if real is None else for_ranks(real, answer)


def accelerator_function(name: str, answer: Callable[..., Any]) -> list[Patch]:
    """Return the patch of `torch._C._accelerator_*name*`, where this torch has it."""
    function = ACCELERATOR[name]
    return function.replaced_by(with_gpus(function.get(None), answer))


def refused_function(function: TorchName, call: str, remedy: str) -> Patch:
    """Return the patch of a function of C++ that refuses *call* for a rank."""
    return function.holder(), function.attribute, refused(call, remedy, function.get(None))


def visible_devices(task: RankTask) -> int:
    """Return the number of GPUs that the process sees: those of its node, or those it left in CUDA_VISIBLE_DEVICES."""
    accelerators = task.process.accelerators
    if accelerators is None:
        return 0
    if not accelerators.used and b"CUDA_VISIBLE_DEVICES" in task.process.interpreter.changed_environ:
        chosen = PARSE_VISIBLE_DEVICES.get()()
        accelerators.count = len([one for one in chosen if isinstance(one, str) or one < accelerators.physical])
    return int(accelerators.count)


def accelerators(task: RankTask) -> Accelerators:
    """Return the GPUs of the rank, which it uses from now on."""
    result = accelerators_of(task.process)
    result.begin()
    return result


def indexed(task: RankTask, index: int | None) -> int:
    return current_device(task) if index is None or index < 0 else index


def gpu(task: RankTask, index: int | None = None) -> Device:
    """Return GPU *index* of the rank; for None or a negative number, the current one."""
    return accelerators(task)[indexed(task, index)]


# -- What asks a tensor or a storage for its bytes, on simulated GPUs: printing, addresses, resizing, copies, files.

_disabled_torch_dispatch_impl = device_names.DISABLED_TORCH_DISPATCH_IMPL.get()
_disable_current_modes = device_names.DISABLE_CURRENT_MODES.get()
_get_current_dispatch_mode_stack = device_names.GET_CURRENT_DISPATCH_MODE_STACK.get()
_is_functorch_wrapped_tensor = device_names.IS_FUNCTORCH_WRAPPED_TENSOR.get()
_PyTorchFileWriter = device_names.PY_TORCH_FILE_WRITER.get()

_BASE = 0x7F00_0000_0000
"""First memory address of GPU 0."""
_BETWEEN = 1 << 38
_LOADED = 1 << 15
"""Maximum bytes of a host storage whose values are kept on a GPU: 4,096 double precision numbers."""

_SPARSE = 1 << 16
"""Number of unknown bytes from which a file has a hole instead of data."""
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
    """Return a tensor over all of *storage*."""
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
    """Free or reallocate the memory of a storage; C++ continues to see its largest size."""
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


def _to_host(storage: UntypedStorage, purpose: str) -> UntypedStorage:
    """Return a copy on the host, with zeros for unknown values."""
    mode, there = _mode(), _bytes_of(storage)
    if mode.values.host(there) is not None:
        return there.cpu().untyped_storage()
    mode.copy_time(there, to_host=True, blocking=True)
    mode.values.count(purpose, mode.where)
    require_task().port.note(
        f"{purpose}: unknown values are written as zeros; in a file of torch.save they are holes that take no disk "
        "space"
    )
    result = torch.zeros(_nbytes(storage), dtype=torch.uint8, device="cpu").untyped_storage()
    result._distsim_unknown = True
    return result


def _write(writer: Any, name: str, data: Any, size: int) -> None:
    """Write one part of a file of torch.save."""
    if size >= _SPARSE and isinstance(data, UntypedStorage) and still_unknown(data):
        writer.write_record_metadata(name, size)
    else:
        task = current_task()
        holes = isinstance(data, UntypedStorage) and "_distsim_holes" in data.__dict__  # DCP's file leaves them
        if size >= _SPARSE and not holes and task is not None and task.process.accelerators is not None:
            values = task.process.accelerators.values
            if task.process.accelerators.used and not values.everything:
                task.port.note(
                    "torch.save: tensors that were copied to the host first are written whole, with placeholders "
                    "for unknown values; only GPU tensors, and those that DCP copies, leave holes"
                )
        _write_record(writer, name, data, size)


def _to_device(storage: UntypedStorage, device: torch.device, non_blocking: bool) -> UntypedStorage:
    mode = _mode()
    nbytes = storage.nbytes()
    tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    if nbytes:
        if _simulated(storage):
            tensor.copy_(_bytes_of(storage))
        else:
            mode.copy_time(tensor, to_host=False, blocking=not non_blocking)
            if nbytes <= _LOADED or mode.values.everything:
                here = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
                mode.values.know(tensor, here.clone())
    return tensor.untyped_storage()


def _copy(storage: UntypedStorage, source: UntypedStorage, non_blocking: bool) -> UntypedStorage:
    to = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    there = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)
    to.copy_(there, non_blocking=bool(non_blocking))
    if storage.device.type == "cpu" and _mode().values.host(there) is None:
        storage._distsim_unknown = True
    return storage


# -- printing


def _text(tensor: Tensor) -> str | None:
    """Return the text inside the brackets; None if torch formats it."""
    values = _mode().values
    if not tensor.numel() or tensor.layout is not torch.strided:
        return None
    if values.host(tensor) is None and tensor.numel() > 1:
        return f"<{tensor.numel()} unknown values>, size={tuple(tensor.shape)}"
    host = tensor.detach().cpu()
    prefix = "tensor(" if type(tensor) in (Tensor, torch.nn.Parameter) else f"{type(tensor).__name__}("
    with _disable_current_modes():
        return str(device_names.TENSOR_STR.get()(host, len(prefix)))


def tensor_patches() -> list[Patch]:
    """Return patches (holder, attribute, replacement) for tensors and storages, as Python sees them."""
    real_str = device_names.STR.get()

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

    def pinnable(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(real)
        def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            if not pin_memory or (task := current_task()) is None or not visible_devices(task):
                return real(*args, pin_memory=pin_memory, **kwargs) if pin_memory else real(*args, **kwargs)
            return make_pinned(real(*args, **kwargs))

        return make

    with torch.device("cpu"):  # torch keeps the functions that a default device applies to: before they are replaced
        torch.tensor(0)
    return [
        # these two ask CUDA for the memory before any mode sees an operator
        (torch, "tensor", pinnable(torch.tensor)),
        (Tensor, "new_tensor", pinnable(Tensor.new_tensor)),
        *device_names.STR.replaced_by(show),
        (Tensor, "data_ptr", data_ptr),
        (_PyTorchFileWriter, "write_record", _write),
        *((UntypedStorage, name, ours) for name, ours in _storage_methods().items()),
    ]


def _storage_methods() -> dict[str, Callable[..., Any]]:
    """Return the storage methods, by name, that also work for a storage on a simulated GPU."""
    base = {
        name: getattr(UntypedStorage, name)
        for name in (
            "nbytes",
            "size",
            "__len__",
            "resize_",
            "cpu",
            "copy_",
            "to",
            "data_ptr",
            "clone",
            "_write_file",
            "_set_from_file",
        )
    }

    def simulated(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that calls *ours* for storages on a simulated GPU, and torch's method *name* for others."""
        real = base[name]

        def method(self: UntypedStorage, *args: Any) -> Any:
            return ours(self, *args) if _simulated(self) else real(self, *args)

        return method

    def copy(self: UntypedStorage, source: Any, non_blocking: Any = None) -> Any:
        if _simulated(self) or _simulated(source):
            return _copy(self, source, non_blocking)
        return base["copy_"](self, source, non_blocking)

    def to(self: UntypedStorage, *, device: Any, non_blocking: bool = False) -> Any:
        target = torch.device(device)
        if current_task() is not None:
            if target.type == "cuda" and (target.index is None or target != self.device):
                return _to_device(self, target, non_blocking)
            if target.type == "cpu" and _simulated(self):
                return _to_host(self, COPIED)
        return base["to"](self, device=device, non_blocking=non_blocking)

    def write_file(self: UntypedStorage, *args: Any) -> Any:
        return base["_write_file"](_to_host(self, "a pickled tensor") if _simulated(self) else self, *args)

    def set_from_file(self: UntypedStorage, *args: Any) -> Any:
        read = UntypedStorage(_nbytes(self), device="cpu")
        base["_set_from_file"](read, *args)
        return _copy(self, read, False)

    return {
        **{name: simulated(name, _nbytes) for name in ("nbytes", "size", "__len__")},
        "resize_": simulated("resize_", _resize),
        "cpu": simulated("cpu", lambda self: _to_host(self, COPIED)),
        "copy_": copy,
        "clone": simulated("clone", lambda self: _to_device(self, self.device, False)),
        "to": to,
        "data_ptr": simulated("data_ptr", _address),
        "_write_file": write_file,
        "_set_from_file": simulated("_set_from_file", set_from_file),
    }


def _plain_on_gpu(tensor: Tensor) -> bool:
    return (
        tensor.is_cuda
        and tensor.layout is torch.strided
        and not _is_functorch_wrapped_tensor(tensor)
        and type(tensor).__torch_dispatch__ is _disabled_torch_dispatch_impl
    )


# -- Classes of torch that are asked for something on a GPU: `torch.Generator(device="cuda")`, `torch.UntypedStorage(n,
# device="cuda")`, and `torch.cuda.FloatTensor` with its kin, as one asked before there was `device=`.
#
# They are made in C++, and those of a build without CUDA raise that it is one; what stands for them makes the same of
# torch.empty and torch.tensor, and knows it by isinstance.

_get_user_fn = device_names.GET_USER_FN.get(None)

_TYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "LongTensor": torch.int64, "IntTensor": torch.int32, "ShortTensor": torch.int16,
    "CharTensor": torch.int8, "ByteTensor": torch.uint8, "BoolTensor": torch.bool,
}  # fmt: skip


_Plain = torch.Generator


class _KindOfGenerator(type):
    """Metaclass by which every generator of torch is an instance of the replacement of its class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Plain)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Plain)

    def __call__(cls, device: Any = "cpu") -> Any:
        task = current_task()
        device_ = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if task is None or device_.type != "cuda":
            return _Plain(device)
        on = gpu(task, device_.index)
        be_known_to_dtensor()
        return CudaGenerator(on.index, task.process.entropy)


class Generator(metaclass=_KindOfGenerator):
    """Replacement for torch.Generator."""


class _TypeOfTensors(type):
    """Metaclass of `torch.cuda.FloatTensor` and its like."""

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


def _kind(kind: Any) -> _TypeOfTensors | None:
    """Return the CUDA tensor type of a type or its name."""
    if isinstance(kind, str) and kind.startswith("torch.cuda."):
        kind = getattr(torch.cuda, kind.removeprefix("torch.cuda."), None)
    return kind if isinstance(kind, _TypeOfTensors) else None


def class_patches() -> list[Patch]:
    """Return patches (holder, attribute, replacement)."""
    patches: list[Patch] = []
    for name, dtype in _TYPES.items():
        real = getattr(torch.cuda, name)
        ours = _TypeOfTensors(
            f"torch.cuda.{name}", (), {"dtype": dtype, "real": real, "is_cuda": True, "__module__": "torch.cuda"}
        )
        patches.append((torch.cuda, name, ours))
    real_new, real_default, real_type = UntypedStorage.__new__, device_names.SET_DEFAULT_TENSOR_TYPE.get(), Tensor.type

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda" or current_task() is None:
            more = {} if device is None else {"device": device}
            return real_new(cls, *args, **more, **kwargs)
        values = args[0] if args and not isinstance(args[0], int) else None
        if values is not None:
            return torch.tensor(list(values), dtype=torch.uint8, device=device).untyped_storage()
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()

    def default(_: RankTask, kind: Any, /) -> None:
        if _kind(kind) is not None:
            raise NotSimulated(
                "torch.set_default_tensor_type of a CUDA type",
                "say torch.set_default_device('cuda'), and torch.set_default_dtype for another type than float32",
            )
        real_default(kind)

    def as_type(_: RankTask, self: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        ours = None if dtype is None else _kind(dtype)
        if ours is None:
            return real_type(self, dtype, non_blocking, **kwargs)
        return self.to(self.device if self.is_cuda else "cuda", ours.dtype, non_blocking=non_blocking)

    def user_fn(task: RankTask, node: Any) -> Any:
        gpus = task.process.accelerators
        if gpus is not None and gpus.works:
            gpus.works_on_host(task, gpus.host.function_s)
        return _get_user_fn(node)

    return [
        *patches,
        *name_for_ranks(device_names.GET_USER_FN, user_fn),
        (torch, "Generator", Generator),
        *GENERATOR.replaced_by(Generator),
        patch_for_ranks(Tensor, "type", as_type),
        (UntypedStorage, "__new__", staticmethod(new)),
        *name_for_ranks(device_names.SET_DEFAULT_TENSOR_TYPE, default),
    ]
