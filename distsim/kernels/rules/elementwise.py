"""What every operator costs that has no rule of its own: each tensor through memory once; and reductions."""

from __future__ import annotations

from torch.utils.flop_counter import flop_registry

from distsim.kernels.call import Call
from distsim.kernels.cost import NOTHING, Cost
from distsim.kernels.pricing import Pricing
from distsim.kernels.rules.move import is_transposed
from distsim.kernels.rules.optimizer import foreach
from distsim.kernels.rules.registry import rule

__all__ = ["default"]


def default(pricing: Pricing, call: Call) -> Cost:
    """An elementwise kernel over all tensors of the call; a view is nothing, a list of tensors is a foreach."""
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


def _flops(call: Call) -> int:
    """By torch's formula, where it has one."""
    formula = flop_registry.get(call.func.overloadpacket)
    if formula is None:
        return 0
    return int(formula(*call.args, **call.kwargs, out_val=call.result))


@rule(
    "sum", "mean", "amax", "amin", "aminmax", "prod", "norm", "linalg_vector_norm", "std", "var", "var_mean", "std_mean"
)
@rule("argmax", "argmin", "any", "all", "count_nonzero", "nansum", "logsumexp", "nanmean", "dist", "trace", "mse_loss")
@rule("binary_cross_entropy_with_logits", "binary_cross_entropy", "smooth_l1_loss", "huber_loss", "l1_loss", "kl_div")
def _reduction(pricing: Pricing, call: Call) -> Cost:
    """A whole tensor to one value takes a second, small kernel."""
    small = call.write * 64 < call.read and any(each.numel() == 1 for each in call.outputs)
    kernels = 2 if small and call.read > 1 << 22 else 1
    cost = pricing.bytes(call.read + call.write, pricing.spec.memory.reduction, "reduction")
    if kernels == 1:
        return cost
    return cost.plus(pricing.bytes(0, 1.0, "reduction"))


@rule("max", "min")
def _extreme(pricing: Pricing, call: Call) -> Cost:
    """Of one tensor a reduction, of two elementwise."""
    return default(pricing, call) if call["other"] is not None else _reduction(pricing, call)
