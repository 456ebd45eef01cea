"""Prices operators that memory limits: elementwise, copies, indexing, optimizers."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry

from distsim.kernels.cost import NOTHING, Cost, OperatorCall, nbytes, tensors_in
from distsim.kernels.pricing import Pricing, rule

# -- Copies, fills, concatenations, and what moves nothing at all.

_LEAST_STRIDED = 1 << 20
"""Size in bytes up to which a transpose fits into a cache."""


def is_transposed(call: OperatorCall) -> bool:
    """Return whether the fastest dimension of a large input differs from that of the output."""
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
    strides = [(stride, -dim) for dim, stride in enumerate(tensor.stride()) if tensor.shape[dim] > 1 and stride]
    return -min(strides)[1] if strides else tensor.dim() - 1


def _on_host(tensor: Any) -> bool:
    return bool(tensor.device.type == "cpu")


def _pinned(tensor: Any) -> bool:
    return _on_host(tensor) and bool(tensor.is_pinned())


@rule("copy_", "_to_copy", "copy", "clone", "_foreach_copy_", "contiguous", "_pin_memory", "_copy_from")
def _copy(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price a copy, over PCIe if one side is the host. Asynchronous copies are assumed to use pinned memory."""
    sources, targets = [], list(call.outputs)
    for name in ("src", "self"):
        given = call[name]
        if given is not None:
            sources = [given] if not isinstance(given, list | tuple) else list(given)
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
    return pricing.bytes(moved, efficiency, "copy", kernels=-(-len(targets) // 252))


@rule("_local_scalar_dense", "item", "is_nonzero", "equal")
def _to_host(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price a value that the host reads."""
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
def _fill(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price an operator that only writes."""
    written = call.outputs
    kernels = max(1, -(-len(written) // 770))
    return pricing.bytes(call.write, pricing.spec.memory.elementwise, "elementwise", kernels=kernels)


@rule("cat", "stack", "concat", "hstack", "vstack", "constant_pad_nd", "roll", "flip", "repeat", "_chunk_cat")
@rule("split_with_sizes_copy", "split_copy", "unbind_copy", "slice_scatter", "select_scatter", "tile")
@rule("repeat_interleave", "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat")
@rule("fsdp::copy_", "c10d::allocate", "pixel_shuffle", "channel_shuffle", "im2col", "col2im")
def _rearrange(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price an operator that writes as many bytes as it reads."""
    written = call.write
    return pricing.bytes(2 * written, pricing.spec.memory.elementwise, "copy", kernels=1 if written else 0)


@rule("select_backward", "slice_backward", "diagonal_backward", "unfold_backward")
def _into_zeros(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price an operator that fills its output with zeros and then writes a part of it."""
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
def _nothing(pricing: Pricing, call: OperatorCall) -> Cost:
    return NOTHING


# -- Embeddings, indexing, sorting, random numbers.


@rule("embedding", "index_select", "gather", "index", "take", "take_along_dim", "_unsafe_index", "_embedding_bag")
def _gather(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price a gather: it reads as many bytes as it writes, whatever the size of the source."""
    table = call["weight"] if call["weight"] is not None else call["self"]
    indices = call.read - nbytes(table)
    kind = "embedding" if "embedding" in call.name else "index"
    return pricing.bytes(2 * call.write + indices, pricing.spec.memory.gather, kind)


@rule("embedding_dense_backward", "embedding_backward")
def _embedding_backward(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price an embedding's backward: zeros for the table, a sort of the indices, and a sum of the gradient's rows."""
    gradient, indices = call["grad_output"], call["indices"]
    zeros = pricing.bytes(call.write, pricing.spec.memory.elementwise, "elementwise")
    order = pricing.bytes(8 * nbytes(indices), pricing.spec.memory.scatter, "sort", kernels=4)
    rows = pricing.bytes(2 * nbytes(gradient), pricing.spec.memory.scatter, "embedding")
    total = zeros.plus(order).plus(rows)
    return Cost(total.seconds, total.kernels, 0, total.nbytes, "embedding", True)


@rule(
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index_put",
    "scatter",
    "scatter_",
    "scatter_add",
    "scatter_add_",
    "scatter_reduce",
    "scatter_reduce_",
    "index_add",
    "index_add_",
    "index_copy",
    "index_copy_",
    "index_fill",
    "index_fill_",
    "masked_scatter",
    "masked_scatter_",
    "put_",
)
def _scatter(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price a scatter: the values are read, their targets read and written; an operator that is not in place copies
    first."""
    given = nbytes(call["self"])
    put = call.read - given
    memory = pricing.spec.memory
    cost = pricing.bytes(3 * put, memory.scatter, "index")
    if call.name.endswith("_"):
        return cost
    return pricing.bytes(2 * given, memory.elementwise, "copy").plus(cost)


@rule("sort", "argsort", "msort", "unique_consecutive", "_unique", "_unique2", "unique_dim")
def _sort(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price a radix sort: values and positions pass through memory once for each byte of a value."""
    given = call["self"]
    if isinstance(given, list) or given is None:  # of a list, in TorchScript
        return NOTHING
    passes = given.element_size()
    moved = passes * 2 * given.numel() * (given.element_size() + 8)
    return pricing.bytes(moved, pricing.spec.memory.reduction, "sort", kernels=2 + passes)


@rule("topk", "kthvalue", "median", "nanmedian", "mode")
def _topk(pricing: Pricing, call: OperatorCall) -> Cost:
    """Radix select: the input is read once for each byte of a value."""
    given = call["self"]
    moved = given.element_size() * nbytes(given) + call.write
    return pricing.bytes(moved, pricing.spec.memory.reduction, "sort", kernels=2)


@rule(
    "cumsum", "cumsum_", "cumprod", "cummax", "cummin", "logcumsumexp", "nonzero", "masked_select", "bincount", "histc"
)
def _scan(pricing: Pricing, call: OperatorCall) -> Cost:
    """Read twice: for the sums of blocks, and for the values."""
    moved = 2 * call.read + call.write
    return pricing.bytes(moved, pricing.spec.memory.reduction, "reduction", kernels=2)


@rule("native_dropout", "bernoulli", "bernoulli_", "dropout", "multinomial", "rand_like", "randn_like", "randint_like")
def _dropout(pricing: Pricing, call: OperatorCall) -> Cost:
    return pricing.bytes(call.read + call.write, pricing.spec.memory.random, "random")


@rule(
    "normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_", "rand", "randn", "randint"
)
@rule("normal", "randperm", "normal_functional")
def _random(pricing: Pricing, call: OperatorCall) -> Cost:
    """Written only."""
    return pricing.bytes(call.write, pricing.spec.memory.random, "random") if call.write else NOTHING


# -- Fused and foreach optimizers: lists of tensors in few kernels.

_CHUNK = 65_536
"""Elements that one block processes (kChunkSize in MultiTensorApply.cuh)."""
_MOST_BLOCKS = 2_240
"""Maximum number of blocks of one launch, for compute capability 7.0 and CUDA 12.1 or later (MultiTensorApply.cuh)."""
_MOST_TENSORS = {1: 770, 2: 448, 3: 336, 4: 252, 5: 210}
"""Maximum number of tensors of one launch, by its number of lists (MultiTensorApply.cuh)."""


@rule("_fused_adam", "_fused_adam_", "_fused_adamw", "_fused_adamw_", "_fused_sgd", "_fused_sgd_", "_fused_adagrad_")
def foreach(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price an operator on lists of tensors: every list is read, and the modified ones are written.

    A block processes 65,536 elements, so a few small tensors do not fill the device.
    """
    written = call.written or call.outputs
    if call["grads"] is not None and call["grad_scale"] is None:  # the schema has them written: only to unscale them
        unscaled = {id(each) for each in tensors_in(call["grads"])}
        written = tuple(each for each in written if id(each) not in unscaled)
    tensors = [each for each in tensors_in(call["self"]) if each.numel()]
    read = call.read
    if not tensors:
        return pricing.bytes(read + nbytes(written), pricing.spec.memory.optimizer, "optimizer", kernels=int(read > 0))
    lists = len({argument.name for argument in call.schema.arguments if _is_list(call[argument.name], len(tensors))})
    chunks = sum(-(-each.numel() // _CHUNK) for each in tensors)
    most = _MOST_TENSORS[min(max(lists, 1), 5)]
    kernels = max(-(-chunks // _MOST_BLOCKS), -(-len(tensors) // most))
    moved = read + nbytes(written)
    filled = min(1.0, chunks / pricing.spec.chip.multiprocessors)
    # A multiprocessor alone gets about twice its share of the memory's bandwidth.
    efficiency = pricing.spec.memory.optimizer * min(1.0, 2 * filled)
    return pricing.bytes(moved, efficiency, "optimizer", kernels=kernels)


def _is_list(value: object, length: int) -> bool:
    """Return whether an argument is a list that the kernel processes, and not the list of step counters."""
    return (
        isinstance(value, list | tuple) and len(value) == length and any(each.numel() > 1 for each in tensors_in(value))
    )


@rule("_foreach_norm")
def _norms(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price norms: each block writes a partial sum, which a second kernel adds up."""
    first = foreach(pricing, call)
    return first.plus(pricing.bytes(call.write, pricing.spec.memory.elementwise, "optimizer"))


@rule("_amp_foreach_non_finite_check_and_unscale_")
def _unscale(pricing: Pricing, call: OperatorCall) -> Cost:
    return foreach(pricing, call)


# -- What every operator costs that has no rule of its own: each tensor through memory once; and reductions.


def default(pricing: Pricing, call: OperatorCall) -> Cost:
    """Return an elementwise kernel over all tensors of the call; a view is nothing, a list of tensors is a foreach."""
    if call.is_view:
        return NOTHING
    if call.name.startswith("aten::_foreach_"):
        return foreach(pricing, call)
    moved = call.read + call.write
    if not moved:
        return NOTHING
    memory = pricing.spec.memory
    efficiency = memory.strided if is_transposed(call) else memory.elementwise
    return pricing.bytes(moved, efficiency, "elementwise", flops=_flops(call))


def _flops(call: OperatorCall) -> int:
    """Return torch's flop count, if it has a formula."""
    formula = flop_registry.get(call.func.overloadpacket)
    if formula is None:
        return 0
    return int(formula(*call.args, **call.kwargs, out_val=call.result))


@rule(
    "sum", "mean", "amax", "amin", "aminmax", "prod", "norm", "linalg_vector_norm", "std", "var", "var_mean", "std_mean"
)
@rule("argmax", "argmin", "any", "all", "count_nonzero", "nansum", "logsumexp", "nanmean", "dist", "trace", "mse_loss")
@rule("binary_cross_entropy_with_logits", "binary_cross_entropy", "smooth_l1_loss", "huber_loss", "l1_loss", "kl_div")
def _reduction(pricing: Pricing, call: OperatorCall) -> Cost:
    """A whole tensor to one value takes a second, small kernel."""
    cost = pricing.bytes(call.read + call.write, pricing.spec.memory.reduction, "reduction")
    if call.read > 1 << 22 and any(each.numel() == 1 for each in call.outputs):
        return cost.plus(pricing.bytes(0, 1.0, "reduction"))
    return cost


@rule("max", "min")
def _extreme(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price a minimum or maximum: a reduction of one tensor, elementwise for two."""
    return default(pricing, call) if call["other"] is not None else _reduction(pricing, call)
