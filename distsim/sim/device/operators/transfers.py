"""Copies between host and device, pinned memory, and operators that run on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distsim.debug.records import HostWait
from distsim.errors import NotSimulated
from distsim.sim.device.operators import values
from distsim.sim.device.operators.plan import learn
from distsim.sim.device.operators.reading import EMPTY
from distsim.sim.device.operators.special import ALWAYS, Handler, Mode, truth
from distsim.sim.device.operators.uneven import chosen_mask, counted
from distsim.text.distributions import RouterChoice
from distsim.torch_compat.device import DECOMPOSITION_TABLE, DISABLE_TORCH_DISPATCH, aten

# -- Pinned memory of the host: a mark on its storage. What it is good for is the time of copies.


def is_pinned(tensor: Tensor) -> bool:
    return tensor.is_cpu and "_distsim_pinned" in tensor.untyped_storage().__dict__


def make_pinned(tensor: Tensor) -> Tensor:
    tensor.untyped_storage()._distsim_pinned = True
    return tensor


def _ask(run: Any, args: tuple[Any, ...]) -> bool:
    return is_pinned(args[0])


def _pin(run: Any, args: tuple[Any, ...]) -> Tensor:
    """Implement aten._pin_memory: return a copy."""
    if not args[0].is_cpu:
        raise RuntimeError(f"cannot pin '{args[0].type()}' only dense CPU tensors can be pinned")
    return make_pinned(run(aten.clone.default, (args[0],), {}))


PINNING: dict[Any, Any] = {aten.is_pinned.default: _ask, aten._pin_memory.default: _pin, aten.pin_memory.default: _pin}

_memory_askers: dict[int, tuple[Any, bool]] = {}
"""(operator, answer of `asks_for_memory`) by the identity of the operator, which is kept alive here."""


def asks_for_memory(func: Any) -> bool:
    """Return whether *func* can involve a GPU although none of its tensors is on one: it names a device or pins
    memory.
    """
    known = _memory_askers.get(id(func))
    if known is None:
        schema = getattr(func, "_schema", None)
        asks = schema is None or func in PINNING or any(map(_is_of_memory, schema.arguments))
        known = _memory_askers[id(func)] = (func, asks)
    return known[1]


def _is_of_memory(argument: Any) -> bool:
    return argument.name == "pin_memory" or "Device" in str(argument.type)


# -- Operators that only a GPU has, computed on the host for who wants real values: by what the CPU has in their place.
#
# Each is called with the parts that the operator makes on a GPU (`plan.outs`) and its arguments on the host, and
# answers with those parts' values; None where they say nothing (a dropout's state).

_forward = aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def not_on_host(operation: Any, why: str) -> NotSimulated:
    return NotSimulated(f"{operation} under --data real ({why})", "run that part on CPU tensors, or leave --data out")


def decomposed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of torch's own decomposition of *func*, which has no CPU kernel. Raises NotSimulated."""

    parts = DECOMPOSITION_TABLE.get().get(func)
    if parts is None:
        raise not_on_host(func, "the CPU has no such operator")
    return parts(*args, **kwargs)


def _even(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[list[Tensor], float]:
    """Return query, key and value with heads of one width, as the CPU's operator requires. Added zeros do not change
    products.
    """
    width = max(query.shape[-1], value.shape[-1])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return [F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in (query, key, value)], scale


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an attention operator by name: flash, memory-efficient and cuDNN's share most names.

    Raises:
        NotSimulated: It drops out, which a GPU draws within the kernel.
    """
    named = {argument.name.rstrip("_"): argument.default_value for argument in func._schema.arguments}
    named.update(zip(named, args, strict=False))
    named.update(kwargs)
    if named["dropout_p"] and "grad_out" not in named:
        raise not_on_host(f"attention with dropout {named['dropout_p']:g}", "a GPU draws within the kernel")
    return named


def _attention(func: Any) -> Callable[..., list[Tensor | None]]:
    def attend(outs: Sequence[Any], *args: Any, **kwargs: Any) -> list[Tensor | None]:
        named = _named(func, args, kwargs)
        query, key, value = (named[name] for name in ("query", "key", "value"))
        qkv, scale = _even(query, key, value, named["scale"])
        out, sums = _forward(*qkv, 0.0, named["is_causal"], attn_mask=named.get("attn_bias"), scale=scale)
        kept = torch.zeros(outs[1].size, dtype=outs[1].dtype, device="cpu")  # (batch, heads, queries), some add to that
        if kept.numel():
            kept.view(*sums.shape[:2], -1)[..., : sums.shape[2]].copy_(sums)
        return [out[..., : value.shape[-1]], kept]

    return attend


def _attention_backward(func: Any) -> Callable[..., list[Tensor | None]]:
    def attend_backward(outs: Sequence[Any], *args: Any, **kwargs: Any) -> list[Tensor | None]:
        named = _named(func, args, kwargs)
        query, key, value = (named[name] for name in ("query", "key", "value"))
        qkv, scale = _even(query, key, value, named["scale"])
        width = qkv[0].shape[-1]
        gradient, out = (F.pad(t, (0, width - t.shape[-1])) for t in (named["grad_out"], named["out"]))
        sums = named["logsumexp"].reshape(*query.shape[:2], -1)[..., : query.shape[2]]
        by_head = sums.transpose(1, 2).contiguous().transpose(1, 2)
        bias, causal = named.get("attn_bias"), named["is_causal"]
        gradients = _backward(gradient, *qkv, out, by_head, 0.0, causal, attn_mask=bias, scale=scale)
        parts = [g[..., : t.shape[-1]] for g, t in zip(gradients, (query, key, value), strict=True)]
        return [*parts, *[None] * (len(outs) - 3)]

    return attend_backward


def _widened(softmax: Any) -> Callable[..., Any]:
    """Return a softmax that reads half precision and writes float32."""

    def call(outs: Any, x: Tensor, dim: int, to_float: bool) -> list[Tensor | None]:
        return [softmax(x.float() if to_float else x, dim, False)]

    return call


def _narrowed(backward: Any) -> Callable[..., Any]:
    """Return its backward, whose gradient has the precision of the input."""

    def call(outs: Any, gradient: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> list[Tensor | None]:
        return [backward(gradient, out, dim, gradient.dtype).to(dtype)]

    return call


def _parts(formula: Callable[..., Sequence[Tensor | None]]) -> Callable[..., Sequence[Tensor | None]]:
    """Return *formula* with results in the precision of those of a GPU."""

    def call(outs: Sequence[Any], *args: Any) -> list[Tensor | None]:
        return [None if part is None else part.to(out.dtype) for part, out in zip(formula(*args), outs, strict=True)]

    return call


def _bags(embedding_bag: Any) -> Callable[..., Any]:
    """Return the operator with results of the shapes that a GPU makes: the bag of each index is always there."""

    def call(outs: Sequence[Any], weight: Tensor, indices: Tensor, offsets: Tensor, *rest: Any, **kwargs: Any) -> Any:
        result, bags, sizes, largest = embedding_bag(weight, indices, offsets, *rest, **kwargs)
        if bags.numel() != indices.numel():
            numbers = torch.arange(indices.numel(), dtype=offsets.dtype)
            bags = torch.bucketize(numbers, offsets, right=True) - 1
        sizes = F.pad(sizes, (0, outs[2].numel - sizes.numel()))
        return [result, bags.to(indices.dtype), sizes, largest.expand(outs[3].size) if outs[3].numel else largest[:0]]

    return call


def _histogram(outs: Sequence[Any], x: Tensor, *args: Any, **kwargs: Any) -> list[Tensor | None]:
    """Return aten.histc of integers, too, which the CPU refuses."""
    return [aten.histc.default(x.double(), *args, **kwargs).to(x.dtype)]


ON_HOST: dict[Any, Callable[..., Sequence[Tensor | None]]] = {
    aten.histc.default: _histogram,
    aten._embedding_bag.default: _bags(aten._embedding_bag.default),
    aten._embedding_bag_forward_only.default: _bags(aten._embedding_bag_forward_only.default),
    **{
        operator.default: make(operator.default)
        for kind in ("flash", "efficient", "cudnn")
        for end, make in (("", _attention), ("_backward", _attention_backward))
        for operator in (getattr(aten, f"_scaled_dot_product_{kind}_attention{end}"),)
    },
    aten._thnn_fused_lstm_cell.default: _parts(values.lstm_cell),
    aten._thnn_fused_lstm_cell_backward_impl.default: _parts(values.lstm_cell_backward),
    aten._softmax.default: _widened(aten._softmax.default),
    aten._log_softmax.default: _widened(aten._log_softmax.default),
    aten._softmax_backward_data.default: _narrowed(aten._softmax_backward_data.default),
    aten._log_softmax_backward_data.default: _narrowed(aten._log_softmax_backward_data.default),
}


# -- What crosses between the host and a simulated GPU, and what makes the host wait for it.

_DisableTorchDispatch = DISABLE_TORCH_DISPATCH.get()

STAGED = 64 << 10
"""Bytes up to which a copy from pageable memory returns once they are staged (CUDA Runtime API, "API synchronization
behavior": transfers of up to 64 KB)."""


def _read(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement aten._local_scalar_dense: return a number to the host."""
    mode.synchronize(args[0])
    value = mode.values.read(args[0], "a value", mode.where).item()
    task = mode.task
    loop = mode.values.awaits(value, task.process.calls.count, mode.where)
    if loop is not None:
        why = HostWait(f"{loop.expression or 'a value on its GPU'} to change")
        if any(not other.finished for other in task.process.tasks if other is not task):
            task.poll(why, waits=True)  # another thread of this process may write to it, nobody else
        else:
            task.wait(task.port.event(), why)
    return value


def _equal(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mode.synchronize(args[0])
    if any(mode.values.host(t) is None for t in args[:2]):
        mode.values.count("equal", mode.where)
        return args[0].shape == args[1].shape
    one, other = (mode.values.read(t, "equal", mode.where) for t in args[:2])
    return func(one, other)


def _is_all_true(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return True for checks of torch.distributions on unknown parameters."""
    if mode.values.host(args[0]) is not None and not mode.values.guessed(args[0]):
        return NotImplemented
    result = mode.carry((), (), torch.bool, args[0].device)
    mode.launch_plain(args[0].device, args[0].numel())
    mode.values.know(result, torch.tensor(True, device="cpu"), guess=True)
    return result


def _allclose(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with mode:
        return bool(torch.isclose(*args, **kwargs).all().item())


def _to_copy(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement aten._to_copy if the tensor changes its device; otherwise it is an ordinary operator."""
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
            result.untyped_storage()._distsim_placeholders = result._version  # cuda_api/memory.py leaves holes for them
        return result
    plan = learn(func, args, {**kwargs, "device": target}, target, mode.cost_of(target))
    copy: Tensor = mode.make(plan.outs[0], target)
    mode.copy_time(copy, to_host=False, blocking=blocking and not is_pinned(source))
    if mode.values.keeps(copy.numel(), copy.dtype) and not source.is_meta:
        mode.values.know(copy, source.detach().to(dtype, copy=True))
    return copy


def _as_it_is(host: Tensor, how: dict[str, Any]) -> bool:
    """Return whether another copy of *host*, the only one, would be equal to it."""
    return (
        how.get("dtype") in (None, host.dtype)
        and how.get("layout") in (None, host.layout)
        and how.get("memory_format") in (None, torch.preserve_format)
    )


def _copy(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement aten.copy_(target, source) between devices."""
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
    """Implement operators whose result size depends on values: the host waits for the size."""
    mode.synchronize(args[0])
    mask = args[0]
    if func is aten.nonzero.default and truth(mask) == ALWAYS and mode.values.host(mask) is None:
        size = mask.numel(), mask.dim()
        mode.launch_plain(mask.device, 8 * math.prod(size) + mask.nbytes)
        return mode.carry(size, (1, mask.numel()), torch.int64, mask.device)
    return _sized(mode, func, args, kwargs, [_read_for_size(mode, func, a) for a in args])


def _read_for_size(mode: Mode, func: Any, arg: Any) -> Any:
    if isinstance(arg, Tensor) and not arg.is_cpu:
        if arg.dtype is torch.bool and mode.values.host(arg) is None:
            if (drawn := chosen_mask(mode.values, arg)) is not None:
                mode.values.count(mode.values.routed, mode.where)
                return drawn
            line = mode.where()
            mode.values.count(EMPTY, lambda: line)
            mode.values.empty_mask = line
            return torch.zeros(arg.shape, dtype=torch.bool, device="cpu")
        return mode.values.read(arg, f"{func._overloadpacket.__name__}'s size", mode.where)
    return arg


def _sized(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hosts: list[Any]) -> Any:
    """Return the result of *func* on *hosts*, on the device of *args*."""
    result = func(*hosts, **kwargs)
    parts = result if isinstance(result, tuple | list) else [result]
    device = args[0].device
    results = []
    for part in parts:
        fresh = mode.carry(tuple(part.shape), part.stride(), part.dtype, device)
        if mode.values.keeps(part.numel(), part.dtype):
            mode.values.know(fresh, part)
        results.append(fresh)
    mode.launch_plain(device, sum(t.nbytes for t in results) + args[0].nbytes)
    return type(result)(results) if isinstance(result, tuple | list) else results[0]


def _bincount(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute aten.bincount. Unknown numbers are spread over the requested bins by `--routing`.

    A mixture of experts counts its tokens in this way, and placeholders, all 0, would send every token to the first
    expert.
    """
    mode.synchronize(args[0])
    chosen, *others = args
    bins = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    if bins and not chosen.is_cpu and mode.values.host(chosen) is None:
        mode.values.count(mode.values.routed, mode.where)
        counts = counted(mode.values.routing, RouterChoice(chosen.numel(), bins, 1))
        chosen = torch.repeat_interleave(torch.arange(bins, dtype=chosen.dtype, device="cpu"), counts)
    return _sized(mode, func, args, kwargs, [_read_for_size(mode, func, a) for a in (chosen, *others)])


def _suppressed(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement torchvision's nms: boxes that nobody knows do not overlap, so it keeps them all.

    Its kernel writes one bit for each pair of boxes (torchvision/csrc/ops/cuda/nms_kernel.cu); the host waits for
    the number that is left.
    """
    boxes = args[0]
    mode.synchronize(boxes)
    count = boxes.shape[0]
    mode.launch_plain(boxes.device, boxes.nbytes + count * count // 8 + 8 * count)
    hosts = [mode.values.host(tensor) for tensor in args[:2]]
    if any(host is None for host in hosts) or any(map(mode.values.guessed, args[:2])):
        result = torch.arange(count, device="cpu")
    else:
        result = func(*hosts, *args[2:], **kwargs)
    kept = mode.carry(tuple(result.shape), (1,), torch.int64, boxes.device)
    if mode.values.keeps(result.numel(), torch.int64):
        mode.values.know(kept, result)
    return kept


def _masked(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement aten.index with masks: return as many rows as they select."""
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
    """Raise torch's error for a mask of a wrong shape (invalid_mask in aten/src/ATen/native/IndexingUtils.h)."""
    for dim_in_mask, length in enumerate(mask.shape):
        dim = first + dim_in_mask
        if dim < source.dim() and source.shape[dim] != length:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {dim_in_mask} does not match the shape of the "
                f"indexed tensor {list(source.shape)} at index {dim}"
            )


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _put_masked(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute x[mask] = value without waiting where torch fills.

    torch fills if the value is one number on the host and there is one mask (canDispatchToMaskedFill in
    aten/src/ATen/native/TensorAdvancedIndexing.cpp).
    """
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
        one, mask = torch.broadcast_tensors(args[0], args[1])
        return one[mask] if mask.dim() else one.reshape(-1)[mask.reshape(-1)]


def _repeat_interleave(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("output_size") is not None:
        return NotImplemented
    return _nonzero(mode, func, args, kwargs)


def _resize(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement aten.resize_, which may enlarge the storage."""
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
    """Implement aten.set_ of a single tensor, which releases its storage."""
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
BY_NAME: dict[str, Handler] = {"torchvision::nms": _suppressed}
"""Handlers of operators that other packages register."""
