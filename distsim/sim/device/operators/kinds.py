"""Kinds of operators, and flex attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distsim.errors import NotSimulated
from distsim.kernels.gpu import has_custom_cost
from distsim.kernels.pricing import RULES, Attention
from distsim.sim.device.operators.special import Handler, Mode
from distsim.sim.device.timeline.steps import Counted
from distsim.sim.isolation.torch_state.operators import is_registered
from distsim.torch_compat import device as device_names
from distsim.torch_compat.device import OpOverload, aten

# -- torch.nn.attention.flex_attention on a simulated GPU: one fused kernel forward, one backward.
#
# Against FlashAttention-2 the compiler's kernel has 0.90 of the speed forward and 0.85 backward (PyTorch's blog,
# "FlexAttention: The Flexibility of PyTorch with the Performance of FlashAttention", August 2024, on H100s). It skips
# the blocks that its mask leaves out: as many as the mask's counts say, where those are known; else it is taken as
# causal.

flex_attention = device_names.FLEX_ATTENTION.get()
flex_attention_backward = device_names.FLEX_ATTENTION_BACKWARD.get()

_FORWARD, _BACKWARD = 0.90, 0.85
_KV_BLOCKS, _FULL_KV_BLOCKS = 2, 4
"""Places in the tuple of a BlockMask: how many blocks of keys each block of queries has."""
_BLOCK_SIZES = slice(-3, -1)
UNKNOWN = (
    "flex_attention: its mask is unknown (it depends on more numbers than are kept), so it is priced as a causal one"
)


def _like(mode: Mode, source: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of *shape* on the GPU of *source*, with the last dimension innermost."""
    order = sorted(range(len(shape)), key=lambda dim: (dim != len(shape) - 1, source.stride(dim)))
    strides = device_names.CONSTRUCT_STRIDES.get()(shape, order)
    return mode.carry(shape, tuple(strides), dtype or source.dtype, source.device)


def _share(mode: Mode, mask: tuple[Any, ...], queries: int, keys: int) -> float | None:
    """Return the share of query-key pairs in computed blocks; None if unknown."""
    counts = [mask[key] for key in (_KV_BLOCKS, _FULL_KV_BLOCKS) if isinstance(mask[key], Tensor)]
    known = [mode.values.host(count) for count in counts]
    if not known or any(count is None for count in known):
        return None
    block_q, block_kv = (int(size) for size in mask[_BLOCK_SIZES])
    blocks = sum(int(count.sum()) for count in known if count is not None)
    batches = counts[0].numel() // counts[0].shape[-1]  # and heads
    return float(min(1.0, blocks * block_q * block_kv / (batches * queries * keys)))


def _launch(mode: Mode, func: Any, given: tuple[Any, ...], mask: tuple[Any, ...], backward: bool, nbytes: int) -> None:
    query, key, value = given[:3]
    batch, heads, queries, dim = query.shape
    keys = key.shape[-2]
    causal = Attention(batch, heads, queries, keys, dim, value.shape[-1], True, backward, query.dtype == torch.float32)
    share = _share(mode, mask, queries, keys)
    if share is None:
        mode.task.port.note(UNKNOWN)
        call, share = causal, 1.0
    else:
        call = replace(causal, causal=False)
    device = mode.indexed(query.device)
    cost = mode.task.process.accelerators.model.attention(call, nbytes)
    speed = _BACKWARD if backward else _FORWARD
    cost = replace(cost, seconds=cost.seconds * share / speed, flops=int(cost.flops * share))
    mode.launch(device, cost, func)
    dtype = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(query.dtype, "fp32")
    mode.task.process.accelerators.steps.count(Counted(dtype, cost.flops))


def _nbytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _forward(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    query, key, value, _, mask = args[:5]
    rows = tuple(query.shape[:3])
    out = _like(mode, query, (*rows, value.shape[-1]))
    strides = (rows[1] * rows[2], rows[2], 1)
    sums, most = (mode.carry(rows, strides, torch.float32, query.device) for _ in range(2))
    _launch(mode, func, args, mask, False, _nbytes(query, key, value, out))
    return out, sums, most


def _backward(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    query, key, value, out, _, grad_out = args[:6]
    buffers = args[12] if len(args) > 12 else kwargs.get("score_mod_other_buffers", ())
    grads = [_like(mode, given, tuple(given.shape)) for given in (query, key, value)]
    captured = []
    with mode:
        for buffer in buffers:
            captured.append(torch.zeros_like(buffer) if isinstance(buffer, Tensor) else None)
    _launch(mode, func, args, args[9], True, _nbytes(query, key, value, out, grad_out, *grads))
    return (*grads, tuple(captured))


FLEX: dict[Any, Handler] = {flex_attention: _forward, flex_attention_backward: _backward}


# -- Whether an operator is a GPU's, and how it is answered: by itself, by what it is made of, or by a plan.

DispatchKey = device_names.DISPATCH_KEY.get()
run_dtensor_rng_op = device_names.RUN_DTENSOR_RNG_OP.get()

VIEW, COMPOSITE, PASSED, PLANNED, HIGHER, PYTHON = range(6)

kinds: dict[Any, int] = {}
"""Kind of every operator that was called so far."""

_ALIASES = frozenset({aten.detach.default, aten._unsafe_view.default, aten.lift_fresh.default, aten.lift.default,
                      aten.alias.default})  # fmt: skip
_ANEW = frozenset({aten.resize_.default, aten.resize_as_.default, aten.set_.default})
"""Operators that change a tensor's shape and may need other memory."""
_REGISTERED = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")


def classify(func: Any) -> int:
    if not isinstance(func, OpOverload):
        if func is run_dtensor_rng_op:
            return HIGHER
        if func in FLEX:
            return PLANNED
        raise NotSimulated(f"{func} on CUDA tensors", "write it with plain torch operators")
    if func in _ALIASES:
        return VIEW
    if func.namespace in _REGISTERED or func is aten._pack_padded_sequence.default:  # lengths are the host's
        return PASSED
    if func.namespace == "fsdp" and func.has_kernel_for_dispatch_key(DispatchKey.CompositeExplicitAutograd):
        return PASSED  # chunk_cat_mixed_dtype of torch 2.15, whose kernel for CUDA is C++
    if func.namespace in ("fsdp", "c10d", "symm_mem") and func.has_kernel_for_dispatch_key(DispatchKey.CUDA):
        return PYTHON  # what they copy, and into what, they say themselves; c10d's lead to torch's `fake` group
    if func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd) and not func.has_kernel_for_dispatch_key(
        DispatchKey.CUDA
    ):
        return COMPOSITE  # before views: `to` may make one
    if (kind := _written_in_python(func)) is not None:
        return kind
    changes_looks = torch.Tag.inplace_view in func.tags and func not in _ANEW  # squeeze_, set_, as_strided_
    return VIEW if func.is_view or changes_looks else PLANNED


def _written_in_python(func: Any) -> int | None:
    """Return how to run a program's custom operator that is made of other operators; None if it is not one.

    Its Python function determines its results and its cost, unless `kernel_cost` or a rule of `kernels` sets the cost.
    """
    name, overload = func._schema.name, func._schema.overload_name
    if name in RULES or has_custom_cost(name, overload):
        return None
    full_name = f"{name}.{overload}" if overload else name
    if is_registered(full_name, "CUDA"):
        return PYTHON
    return PASSED if is_registered(full_name, "CompositeExplicitAutograd") else None


def gpu_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the GPU that an operator is about; None: it is the host's."""
    for value in args:
        if isinstance(value, Tensor):
            if value.is_cuda:
                return value.device
        elif type(value) is list or type(value) is tuple:
            for item in value:
                if isinstance(item, Tensor):
                    if item.is_cuda:
                        return item.device
                elif item is not None:
                    break
        elif type(value) is torch.device and value.type == "cuda":
            return value
    if kwargs:
        for value in kwargs.values():
            if isinstance(value, Tensor):
                if value.is_cuda:
                    return value.device
            elif type(value) is torch.device and value.type == "cuda":
                return value
    return None


def look(value: Any) -> Any:
    """Return a carrier with the properties of *value*, if that is a tensor on a GPU."""
    if isinstance(value, Tensor) and value.is_cuda:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def hidden_methods(tensor: Tensor) -> list[str]:
    """Return the methods of *tensor* that attributes of its own hide, such as `stride` after `weight.stride = 1`."""
    own = tensor.__dict__
    return [name for name in own if callable(getattr(torch.Tensor, name, None))] if own else []


@contextlib.contextmanager
def without_hiding_attributes(tensors: Iterable[Tensor]) -> Iterator[bool]:
    """Remove attributes that hide methods of tensors, and put them back afterwards.

    Megatron and its descendants note `weight.stride = 1`. torch's C++ code does not see that, but code here calls
    `stride()`.

    Yields:
        Whether there was such an attribute.
    """
    hidden = []
    for tensor in tensors:
        own = tensor.__dict__
        if names := hidden_methods(tensor):
            hidden.append((own, {name: own.pop(name) for name in names}))
    try:
        yield bool(hidden)
    finally:
        for own, attributes in hidden:
            own.update(attributes)
