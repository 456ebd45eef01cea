"""What operators of the user's own cost: flops and bytes, said once, by the operator's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distsim.errors import UsageError
from distsim.kernels.call import Call, tensors_in
from distsim.kernels.cost import Cost
from distsim.kernels.pricing import Pricing, math_dtype

__all__ = ["custom_cost", "kernel_cost", "triton_cost"]

Amount = int | float | Callable[..., int | float]

_COSTS: dict[str, tuple[Amount, Amount | None]] = {}
"""By the operator's name, `namespace::name`, or with an overload, `namespace::name.overload`."""


def kernel_cost(fn: Any = None, *, flops: Amount = 0, bytes: Amount | None = None) -> Any:
    """Say what a custom operator costs on a simulated GPU: its *flops* and the *bytes* it moves.

    *fn* is the operator: what `torch.library.custom_op` returned, `torch.ops.my.op`, one of its overloads, or its name
    `"my::op"`. Each amount is a number, or a function of the operator's own arguments. Without *bytes*, every tensor of
    the call goes through memory once. The time is the longer of the two at the rates that the GPU's own products and
    elementwise kernels have. Answers *fn*; without *fn* a decorator:

        @distsim.kernel_cost(flops=lambda x, w: 2 * x.numel() * w.shape[-1])
        @torch.library.custom_op("my::product", mutates_args=())
        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor: ...

    Of a Triton kernel the name is `"triton::name"`, and the arguments are those of the launch.

    A UsageError says so if *fn* is no operator or an amount is negative.
    """
    for name, amount in (("flops", flops), ("bytes", bytes)):
        if isinstance(amount, int | float) and amount < 0:
            raise UsageError(f"kernel_cost: expected {name} of 0 or more, got {amount}")
    if fn is None:
        return lambda found: kernel_cost(found, flops=flops, bytes=bytes)
    _COSTS[_name(fn)] = (flops, bytes)
    return fn


def _name(fn: Any) -> str:
    if isinstance(fn, str) and fn.count("::") == 1:
        return fn
    for attribute in ("_qualname", "_qualified_op_name"):  # of a custom_op, of an OpOverloadPacket
        name = getattr(fn, attribute, None)
        if isinstance(name, str) and "::" in name:
            return name
    schema = getattr(fn, "_schema", None)
    if schema is not None:
        return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)
    raise UsageError(
        f"kernel_cost: expected an operator (torch.ops.my.op, or what torch.library.custom_op returned) or its name "
        f"'my::op', got {getattr(fn, '__name__', fn)!r} ({type(fn).__name__})"
    )


def custom_cost(pricing: Pricing, call: Call) -> Cost | None:
    """What the user said of this operator; None without a word of it."""
    overload = call.schema.overload_name
    said = _COSTS.get(f"{call.name}.{overload}") if overload else None
    said = said or _COSTS.get(call.name)
    if said is None:
        return None
    return _cost(pricing, said, call.args, call.kwargs, call.inputs, call.read + call.write)


def triton_cost(
    pricing: Pricing, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], moved: int
) -> tuple[Cost, bool]:
    """What a launch of the Triton kernel *name* costs that moves *moved* bytes unless the user said more of it by
    `kernel_cost("triton::name", ...)`, and whether the user did."""
    said = _COSTS.get(f"triton::{name}")
    inputs = tuple(tensors_in((args, kwargs)))
    return _cost(pricing, said or (0, None), args, kwargs, inputs, moved), said is not None


def _cost(
    pricing: Pricing,
    said: tuple[Amount, Amount | None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: tuple[Any, ...],
    all_bytes: int,
) -> Cost:
    flops = int(_amount(said[0], args, kwargs))
    moved = int(_amount(said[1], args, kwargs)) if said[1] is not None else all_bytes
    cost = pricing.bytes(moved, pricing.spec.memory.elementwise, "custom", flops=flops)
    dtype = next((math_dtype(each.dtype) for each in inputs if each.dtype.is_floating_point), "fp32")
    chip, gemm = pricing.spec.chip, pricing.spec.gemm
    rate = chip.peak(dtype) * gemm.sustained(dtype)
    math = flops / rate + pricing.spec.memory.floor
    return Cost(max(cost.seconds, math), 1, flops, moved, "custom", cost.seconds >= math)


def _amount(amount: Amount, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | float:
    return amount(*args, **kwargs) if callable(amount) else amount
