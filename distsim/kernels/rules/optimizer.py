"""Fused and foreach optimizers: lists of tensors in few kernels."""

from __future__ import annotations

from distsim.kernels.call import Call, nbytes, tensors_in
from distsim.kernels.cost import Cost
from distsim.kernels.pricing import Pricing
from distsim.kernels.rules.registry import rule

__all__ = ["foreach"]

_CHUNK = 65_536
"""Elements of one block (MultiTensorApply.cuh, kChunkSize)."""
_MOST_BLOCKS = 2_240
"""Of one launch, with arguments of 32 KB: compute capability 7.0 and CUDA 12.1 on (MultiTensorApply.cuh)."""
_MOST_TENSORS = {1: 770, 2: 448, 3: 336, 4: 252, 5: 210}
"""Of one launch, by how many lists it has (MultiTensorApply.cuh)."""


@rule("_fused_adam", "_fused_adam_", "_fused_adamw", "_fused_adamw_", "_fused_sgd", "_fused_sgd_", "_fused_adagrad_")
def foreach(pricing: Pricing, call: Call) -> Cost:
    """Every list is read, what is changed is written. A block does 65,536 elements, so a few small tensors do not
    fill the device."""
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
    """Whether an argument is one of the lists that a kernel goes through (and not the counters of steps)."""
    return (
        isinstance(value, list | tuple) and len(value) == length and any(each.numel() > 1 for each in tensors_in(value))
    )


@rule("_foreach_norm")
def _norms(pricing: Pricing, call: Call) -> Cost:
    """Each block leaves its part, which a second kernel adds up."""
    first = foreach(pricing, call)
    return first.plus(pricing.bytes(call.write, pricing.spec.memory.elementwise, "optimizer"))


@rule("_amp_foreach_non_finite_check_and_unscale_")
def _unscale(pricing: Pricing, call: Call) -> Cost:
    return foreach(pricing, call)
