"""Copies, fills, concatenations, and what moves nothing at all."""

from __future__ import annotations

from typing import Any

from distsim.kernels.call import Call, nbytes
from distsim.kernels.cost import NOTHING, Cost
from distsim.kernels.pricing import Pricing
from distsim.kernels.rules.registry import rule

__all__ = ["is_transposed"]

_LEAST_STRIDED = 1 << 20
"""Bytes: below this a cache holds what a transpose touches twice."""


def is_transposed(call: Call) -> bool:
    """Whether an input that counts is fastest in another dimension than the output is."""
    outputs = call.outputs
    if not outputs or outputs[0].dim() < 2:
        return False
    output = outputs[0]
    fastest = _fastest(output)
    for given in call.inputs:
        if given.dim() == output.dim() and nbytes(given) >= _LEAST_STRIDED and given.shape == output.shape:
            if _fastest(given) != fastest and given.shape[fastest] > 1 and given.stride()[fastest] != 0:
                return True
    return False


def _fastest(tensor: Any) -> int:
    strides = [(stride, -place) for place, stride in enumerate(tensor.stride()) if tensor.shape[place] > 1 and stride]
    return -min(strides)[1] if strides else tensor.dim() - 1


def _on_host(tensor: Any) -> bool:
    return bool(tensor.device.type == "cpu")


def _pinned(tensor: Any) -> bool:
    return _on_host(tensor) and bool(tensor.is_pinned())


@rule("copy_", "_to_copy", "copy", "clone", "_foreach_copy_", "contiguous", "_pin_memory", "_copy_from")
def _copy(pricing: Pricing, call: Call) -> Cost:
    """Over PCIe where one side is the host; asynchronous copies are taken to be of pinned memory."""
    sources, targets = [], list(call.outputs)
    for name in ("src", "self"):
        found = call[name]
        if found is not None:
            sources = [found] if not isinstance(found, list | tuple) else list(found)
            break
    if not sources or not targets:
        return NOTHING
    source, target = sources[0], targets[0]
    if _on_host(source) and _on_host(target):
        return NOTHING
    if _on_host(source) != _on_host(target):
        pinned = bool(call["non_blocking"]) or _pinned(source) or _pinned(target)
        moved = nbytes(sources) if _on_host(source) else nbytes(targets)
        return pricing.transfer(moved, to_device=_on_host(source), pinned=pinned)
    memory = pricing.spec.memory
    efficiency = memory.strided if is_transposed(call) else memory.elementwise
    moved = nbytes(sources) + nbytes(targets)
    return pricing.bytes(moved, efficiency, "copy", kernels=-(-len(targets) // 252) if len(targets) > 1 else 1)


@rule("_local_scalar_dense", "item", "is_nonzero", "equal")
def _to_host(pricing: Pricing, call: Call) -> Cost:
    """A value read by the host."""
    given = call["self"]
    if _on_host(given):
        return NOTHING
    return pricing.transfer(given.element_size(), to_device=False, pinned=True)


@rule(
    "fill_", "zero_", "fill", "full", "ones", "zeros", "full_like", "zeros_like", "ones_like", "new_zeros", "new_full"
)
@rule(
    "new_ones",
    "arange",
    "linspace",
    "eye",
    "tril_indices",
    "triu_indices",
    "scalar_tensor",
    "_foreach_zero_",
    "logspace",
)
def _fill(pricing: Pricing, call: Call) -> Cost:
    """Written only."""
    written = call.outputs
    kernels = max(1, -(-len(written) // 770))
    return pricing.bytes(call.write, pricing.spec.memory.elementwise, "elementwise", kernels=kernels)


@rule("cat", "stack", "concat", "hstack", "vstack", "constant_pad_nd", "roll", "flip", "repeat", "_chunk_cat")
@rule("split_with_sizes_copy", "split_copy", "unbind_copy", "slice_scatter", "select_scatter", "tile")
@rule("repeat_interleave", "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat")
@rule("fsdp::copy_", "c10d::allocate", "pixel_shuffle", "channel_shuffle", "im2col", "col2im")
def _rearrange(pricing: Pricing, call: Call) -> Cost:
    """As much read as written."""
    written = call.write
    return pricing.bytes(2 * written, pricing.spec.memory.elementwise, "copy", kernels=1 if written else 0)


@rule("select_backward", "slice_backward", "diagonal_backward", "unfold_backward")
def _into_zeros(pricing: Pricing, call: Call) -> Cost:
    """Zeros of the whole, then the piece."""
    zeros = pricing.bytes(call.write, pricing.spec.memory.elementwise, "elementwise")
    piece = next(iter(call.inputs), None)
    return zeros.plus(pricing.bytes(2 * nbytes(piece), pricing.spec.memory.elementwise, "copy"))


@rule(
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "_reshape_alias",
    "reshape",
    "lift",
    "lift_fresh",
    "alias",
    "detach",
    "detach_",
    "set_",
    "resize_",
    "resize_as_",
    "resize",
    "record_stream",
    "is_same_size",
    "_has_compatible_shallow_copy_type",
    "is_pinned",
    "sym_size",
    "sym_stride",
    "sym_numel",
    "sym_storage_offset",
    "size",
    "stride",
    "dim",
    "requires_grad_",
    "squeeze_",
    "unsqueeze_",
    "t_",
    "transpose_",
    "swapaxes_",
    "as_strided_",
    "_version",
    "is_contiguous",
    "unsafe_split",
    "unsafe_chunk",
    "unsafe_split_with_sizes",
    "_nested_tensor_size",
    "_efficientzerotensor",
    "_assert_tensor_metadata",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_functional_sym_constrain_range",
)
def _nothing(pricing: Pricing, call: Call) -> Cost:
    return NOTHING
