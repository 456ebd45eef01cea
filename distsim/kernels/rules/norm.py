"""Norms, softmax and the losses on it."""

from __future__ import annotations

from typing import Any

from distsim.kernels.call import Call, nbytes
from distsim.kernels.cost import Cost
from distsim.kernels.pricing import Pricing
from distsim.kernels.rules.registry import rule

__all__: list[str] = []

_SHARED = 65_536
"""Bytes of a row from which softmax goes through memory again for each of its passes."""


_WARP = 1024
"""Values of a row that one warp keeps in registers (PersistentSoftmax.cuh)."""


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def _norm(pricing: Pricing, call: Call) -> Cost:
    """A row is read once and kept."""
    return pricing.bytes(call.read + call.write, pricing.spec.memory.norm, "norm")


@rule(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_batch_norm_with_update",
    "cudnn_batch_norm",
    "native_group_norm",
    "batch_norm_stats",
    "batch_norm_elemt",
)
def _two_passes(pricing: Pricing, call: Call) -> Cost:
    """Statistics of a channel first, then the values."""
    given = call["input"] if call["input"] is not None else call["self"]
    training = call["training"] if call["training"] is not None else call["train"]
    passes = 0 if training is False or call.name in ("aten::batch_norm_stats", "aten::batch_norm_elemt") else 1
    moved = call.read + call.write + passes * nbytes(given)
    return pricing.bytes(moved, pricing.spec.memory.norm, "norm", kernels=1 + passes)


@rule(
    "native_layer_norm_backward",
    "_fused_rms_norm_backward",
    "native_batch_norm_backward",
    "batch_norm_backward",
    "cudnn_batch_norm_backward",
    "native_group_norm_backward",
)
def _backward(pricing: Pricing, call: Call) -> Cost:
    """The input's gradient by rows, and the weight's by columns, each through both operands."""
    given = call["input"] if call["input"] is not None else call["self"]
    operands = nbytes(given)
    moved = 5 * operands
    cost = pricing.bytes(moved, pricing.spec.memory.elementwise, "norm", kernels=2)
    by_element = given.numel() / pricing.spec.memory.norm_backward + 2 * pricing.spec.memory.floor
    return Cost(max(cost.seconds, by_element), 2, 0, moved, "norm", cost.seconds >= by_element)


@rule("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax")
def _softmax(pricing: Pricing, call: Call) -> Cost:
    memory = pricing.spec.memory
    return pricing.bytes(
        call.read + call.write, _rows(pricing, call["self"], call["dim"], memory.softmax_long), "softmax"
    )


def _rows(pricing: Pricing, given: Any, dim: int, long: float) -> float:
    """What rows along *dim* get of the bandwidth; *long*, if they do not fit into shared memory."""
    memory = pricing.spec.memory
    values = given.shape[dim] if given.dim() else 1
    if values <= _WARP:
        return memory.softmax_short
    return long if values * given.element_size() > _SHARED else memory.softmax


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(pricing: Pricing, call: Call) -> Cost:
    """As forward's kernels (SoftMax.cu: a warp's, one that keeps the row in shared memory, and one that does not)."""
    efficiency = _rows(pricing, call["output"], call["dim"], pricing.spec.memory.softmax_backward)
    return pricing.bytes(call.read + call.write, efficiency, "softmax")


@rule("nll_loss_forward", "nll_loss2d_forward", "nll_loss")
def _loss(pricing: Pricing, call: Call) -> Cost:
    """One value a row, each in a sector of 32 bytes of its own."""
    moved = nbytes(call["target"]) * 5 + call.write
    return pricing.bytes(moved, pricing.spec.memory.gather, "reduction")


@rule("nll_loss_backward", "nll_loss2d_backward")
def _loss_backward(pricing: Pricing, call: Call) -> Cost:
    """Zeros everywhere, then one value a row."""
    zeros = pricing.bytes(call.write, pricing.spec.memory.elementwise, "elementwise")
    return zeros.plus(pricing.bytes(nbytes(call["target"]) * 5, pricing.spec.memory.gather, "index"))
