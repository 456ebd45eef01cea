"""What crosses between the host and a simulated GPU, and what makes the host wait for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distsim.debug.records import HostWait
from distsim.sim.device.operators.handler import Handler, Mode
from distsim.sim.device.operators.pinned import is_pinned
from distsim.sim.device.operators.plan import learn
from distsim.sim.device.operators.torch_words import MISTAKES, in_torchs_words
from distsim.torch_compat.device import DISABLE_TORCH_DISPATCH, aten

__all__ = ["TRANSFERS"]

_DisableTorchDispatch = DISABLE_TORCH_DISPATCH.get()

STAGED = 64 << 10
"""Bytes up to which a copy from pageable memory returns once they are staged (CUDA Runtime API, "API synchronization
behavior": transfers of up to 64 KB)."""


def _read(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """aten._local_scalar_dense: a number for the host."""
    mode.synchronize(args[0])
    value = mode.values.read(args[0], "a value", mode.where).item()
    task = mode.task
    loop = mode.values.awaits(value, task.process.calls.made, mode.where)
    if loop is not None:
        why = HostWait(f"{loop.expression or 'a value on its GPU'} to change")
        if any(not other.finished for other in task.process.tasks if other is not task):
            task.poll(why, waits=True)  # another thread of this process may write to it, nobody else
        else:
            task.wait(task.world.env.event(), why)
    return value


def _equal(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mode.synchronize(args[0])
    if any(mode.values.host(t) is None for t in args[:2]):
        mode.values.count("equal", mode.where)
        return args[0].shape == args[1].shape
    one, other = (mode.values.read(t, "equal", mode.where) for t in args[:2])
    return func(one, other)


def _is_all_true(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch.distributions asks of its parameters: what nobody knows is as it should be."""
    if mode.values.host(args[0]) is not None and not mode.values.guessed(args[0]):
        return NotImplemented
    made = mode.carry((), (), torch.bool, args[0].device)
    mode.launch_plain(args[0].device, args[0].numel())
    mode.values.know(made, torch.tensor(True, device="cpu"), guess=True)
    return made


def _allclose(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with mode:
        return bool(torch.isclose(*args, **kwargs).all().item())


def _to_copy(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """aten._to_copy, where the tensor changes its device; elsewhere it is an operator like others."""
    source: Tensor = args[0]
    device = kwargs.get("device")
    target = source.device if device is None else mode.indexed(device)
    if target.type == source.device.type or target.type == "meta":
        return NotImplemented
    dtype = kwargs.get("dtype") or source.dtype
    blocking = not kwargs.get("non_blocking", False)
    if target.type == "cpu":
        plain = {k: v for k, v in kwargs.items() if k in ("dtype", "layout", "memory_format")}
        host = mode.values.read(source, "a copy to the host", mode.where)
        mode.copy_time(source, to_host=True, blocking=blocking)
        result = host if _as_it_is(host, plain) else func(host, **plain)
        if mode.values.host(source) is None and result.is_contiguous() and not result.is_inference():
            result.untyped_storage()._distsim_placeholders = result._version  # checkpoints.py leaves holes for them
        return result
    plan = learn(func, args, {**kwargs, "device": target}, target, mode.cost_of(target))
    made: Tensor = mode.make(plan.outs[0], target)
    mode.copy_time(made, to_host=False, blocking=blocking and not is_pinned(source))
    if mode.values.keeps(made.numel(), made.dtype) and not source.is_meta:
        mode.values.know(made, source.detach().to(dtype, copy=True))
    return made


def _as_it_is(host: Tensor, how: dict[str, Any]) -> bool:
    """Whether a copy of *host*, of which there is no other, would be the same once more."""
    return (
        how.get("dtype") in (None, host.dtype)
        and how.get("layout") in (None, host.layout)
        and how.get("memory_format") in (None, torch.preserve_format)
    )


def _copy(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """aten.copy_(target, source), between devices."""
    target, source = args[0], args[1]
    if target.device.type == source.device.type:
        return NotImplemented
    blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if target.is_cpu:
        known = mode.values.read_into(target, source, "a copy to the host", mode.where)
        mode.copy_time(source, to_host=True, blocking=blocking)
        storage = target.untyped_storage()
        if not known and target.is_contiguous() and target.nbytes == storage.nbytes() and not target.is_inference():
            storage._distsim_placeholders = target._version + 1  # as in `_to_copy`; torch counts this copy on return
        return target
    mode.copy_time(target, to_host=False, blocking=blocking and not is_pinned(source))
    mode.values.write(target, source.detach() if mode.values.keeps(target.numel(), target.dtype) else None)
    return target


def _nonzero(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operators whose result is as large as the values say: the host waits for their number."""
    mode.synchronize(args[0])
    return _sized(mode, func, args, kwargs, [_read_for_size(mode, func, a) for a in args])


def _read_for_size(mode: Mode, func: Any, arg: Any) -> Any:
    if isinstance(arg, Tensor) and not arg.is_cpu:
        if arg.dtype is torch.bool and mode.values.host(arg) is None:  # a mask that nobody knows selects nothing
            mode.values.count(f"{func._overloadpacket.__name__}'s size", mode.where)
            return torch.zeros(arg.shape, dtype=torch.bool, device="cpu")
        return mode.values.read(arg, f"{func._overloadpacket.__name__}'s size", mode.where)
    return arg


def _sized(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hosts: list[Any]) -> Any:
    """What *func* makes of *hosts*, on the device of *args*."""
    result = func(*hosts, **kwargs)
    parts = result if isinstance(result, tuple | list) else [result]
    device = args[0].device
    made = []
    for part in parts:
        fresh = mode.carry(tuple(part.shape), part.stride(), part.dtype, device)
        if mode.values.keeps(part.numel(), part.dtype):
            mode.values.know(fresh, part)
        made.append(fresh)
    mode.launch_plain(device, sum(t.nbytes for t in made) + args[0].nbytes)
    return type(result)(made) if isinstance(result, tuple | list) else made[0]


def _bincount(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """aten.bincount. Numbers that nobody knows are spread over the bins that there shall be at least: so a mixture of
    experts counts its tokens, and placeholders, all 0, would send every token to the first."""
    mode.synchronize(args[0])
    hosts = [_read_for_size(mode, func, a) for a in args]
    bins = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    if bins and not args[0].is_cpu and mode.values.host(args[0]) is None:
        hosts[0] = torch.arange(hosts[0].numel(), dtype=hosts[0].dtype).remainder_(bins).view_as(hosts[0])
    return _sized(mode, func, args, kwargs, hosts)


def _masked(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """aten.index with masks: as many rows as they select."""
    indices = list(args[1])
    if not any(_is_mask(i) for i in indices):
        return NotImplemented
    flat: list[Tensor | None] = []
    for index in indices:
        if _is_mask(index):
            _refuse_mask(args[0], len(flat), index)
            with mode:
                flat.extend(index.nonzero().unbind(1))
        else:
            flat.append(index)
    with mode:
        return func(args[0], flat, *args[2:], **kwargs)


def _refuse_mask(source: Tensor, first: int, mask: Tensor) -> None:
    """torch's error for a mask of another shape (invalid_mask in aten/src/ATen/native/IndexingUtils.h)."""
    for place, length in enumerate(mask.shape):
        dim = first + place
        if dim < source.dim() and source.shape[dim] != length:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {place} does not match the shape of the indexed "
                f"tensor {list(source.shape)} at index {dim}"
            )


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _put_masked(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x[mask] = value. torch fills where the value is one number of the host and there is one mask
    (canDispatchToMaskedFill in aten/src/ATen/native/TensorAdvancedIndexing.cpp), and nobody waits."""
    target, indices, value = args[:3]
    masks = [index for index in indices if _is_mask(index)]
    if (
        len(masks) != 1
        or any(index is not None and not _is_mask(index) for index in indices)
        or not (value.is_cpu and value.numel() == 1)
        or (args[3] if len(args) > 3 else kwargs.get("accumulate", False))
    ):
        return _masked(mode, func, args, kwargs)
    mask = masks[0]
    after = target.dim() - mask.dim() - (len(indices) - 1)
    with mode:
        for _ in range(after):
            mask = mask.unsqueeze(-1)
        return (target.masked_fill_ if func is aten.index_put_.default else target.masked_fill)(mask, value.item())


def _masked_select(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with mode:
        try:
            one, mask = torch.broadcast_tensors(args[0], args[1])
        except MISTAKES as error:
            raise in_torchs_words(error, func, args, kwargs) from None
        return one.reshape(-1)[mask.reshape(-1)]


def _repeat_interleave(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("output_size") is not None:
        return NotImplemented
    return _nonzero(mode, func, args, kwargs)


def _resize(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """aten.resize_: the storage may grow."""
    tensor, size = args[0], tuple(args[1])
    numel = 1
    for length in size:
        numel *= length
    stride, step = [], 1
    for length in reversed(size):
        stride.append(step)
        step *= max(1, length)
    needed = (tensor.storage_offset() + numel) * tensor.element_size()
    if needed > tensor.untyped_storage().nbytes():
        with mode:
            tensor.untyped_storage().resize_(needed)
    with _DisableTorchDispatch():
        mode.under_meta(aten.set_.source_Storage_storage_offset, (tensor, tensor.untyped_storage(),
                        tensor.storage_offset(), size, tuple(reversed(stride))), {})  # fmt: skip
    return tensor


def _resize_as(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _resize(mode, func, (args[0], args[1].shape), kwargs)


def _set_to_nothing(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """aten.set_ of a tensor alone: it lets go of its storage."""
    nothing = mode.carry((0,), (1,), args[0].dtype, args[0].device)
    mode.under_meta(aten.set_.source_Tensor, (args[0], nothing), {})
    return args[0]


TRANSFERS: dict[Any, Handler] = {
    aten._local_scalar_dense.default: _read,
    aten.equal.default: _equal,
    aten.allclose.default: _allclose,
    aten._is_all_true.default: _is_all_true,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
    aten.nonzero.default: _nonzero,
    aten._unique2.default: _nonzero,
    aten.unique_dim.default: _nonzero,
    aten.unique_consecutive.default: _nonzero,
    aten.bincount.default: _bincount,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.index.Tensor: _masked,
    aten.index_put.default: _put_masked,
    aten.index_put_.default: _put_masked,
    aten.masked_select.default: _masked_select,
    aten.resize_.default: _resize,
    aten.resize_as_.default: _resize_as,
    aten.set_.default: _set_to_nothing,
}
