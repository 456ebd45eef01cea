"""Recipes and products of transformer_engine.pytorch: fp8 and tensor parallelism.

Source of names, arguments and their order: NVIDIA/TransformerEngine, transformer_engine/pytorch at 2.20.

An fp8 product reads operands of one byte. One kernel casts each operand once, for forward and (transposed) for
backward. A preceding norm or activation does the cast itself if the scales are known before (delayed scaling) or
belong to each block (MXFP8).
"""

from __future__ import annotations

import contextlib
import enum
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distsim.errors import NotSimulated
from distsim.libraries.fused import launch, needs_values, note
from distsim.sim.kernel.task import current_process

_NAME = "transformer_engine"

# -- Recipes, and the region in which products are computed in fp8.


class Format(enum.Enum):
    """transformer_engine.common.recipe.Format: the largest numbers of forward and backward."""

    E4M3 = (448, 448)
    E5M2 = (57344, 57344)
    HYBRID = (448, 57344)


class Recipe:
    """transformer_engine.common.recipe.Recipe: keyword arguments are its attributes."""

    fp8_format = Format.HYBRID
    fp8_dpa = fp8_mha = False
    margin = 0

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)


class DelayedScaling(Recipe):
    """Scales from the maxima of earlier steps, reduced over the group."""

    reduce_amax = True
    amax_history_len = 1024
    amax_compute_algo = "max"


class Float8CurrentScaling(Recipe):
    """Scales from the maximum of the tensor itself, which takes two passes over it."""


class MXFP8BlockScaling(Recipe):
    """One scale for every 32 elements (Blackwell)."""

    fp8_format = Format.E4M3


class Float8BlockScaling(Recipe):
    """One scale for every 128 elements, or 128 x 128 elements."""

    fp8_format = Format.E4M3


def _asks(*kinds: type[Recipe]) -> Any:
    return lambda self: isinstance(self, kinds)


for _name, _kinds in {
    "delayed": (DelayedScaling,), "mxfp8": (MXFP8BlockScaling,), "float8_current_scaling": (Float8CurrentScaling,),
    "float8_per_tensor_scaling": (DelayedScaling, Float8CurrentScaling), "custom": (), "nvfp4": (),
    "float8_block_scaling": (Float8BlockScaling,),
}.items():  # fmt: skip
    setattr(Recipe, _name, _asks(*_kinds))


class _Fp8Region:
    """Settings of `autocast` in one process."""

    def __init__(self) -> None:
        self.enabled = False
        self.recipe: Any = None
        self.group: Any = None
        self.products = 0
        """Number of fp8 products since the region began."""
        self.makes_parameters = False
        """Whether the weights of new modules are in fp8."""


_regions: weakref.WeakKeyDictionary[Any, _Fp8Region] = weakref.WeakKeyDictionary()


def region() -> _Fp8Region:
    """Return the settings of `autocast` in the running process."""
    return _regions.setdefault(current_process(), _Fp8Region())


def fp8_recipe() -> Any:
    """Return the recipe of the region, by which a product is computed in fp8; None: in the parameters' data type."""
    state = region()
    if state.enabled and needs_values():
        note("transformer_engine: with --data real, fp8 products are computed in the parameters' data type")
    return state.recipe if state.enabled and not needs_values() else None


@contextlib.contextmanager
def autocast(enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None,
             _graph: bool = False) -> Iterator[None]:  # fmt: skip
    """transformer_engine.pytorch.autocast: products within are computed in fp8."""
    recipe = recipe or default_recipe()
    if enabled:
        available, reason = (is_mxfp8_available if recipe.mxfp8() else is_fp8_available)(return_reason=True)
        assert available, reason
    state = region()
    before = dict(vars(state))
    vars(state).update(enabled=enabled, recipe=recipe, group=amax_reduction_group)
    state.products = state.products if before["enabled"] else 0
    try:
        yield
        if not before["enabled"] and state.products and torch.is_grad_enabled():
            _agree_on_scales(recipe, amax_reduction_group, state.products)
    finally:
        products = state.products if before["enabled"] else 0
        vars(state).update({**before, "products": products})


def fp8_autocast(enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None,
                 _graph: bool = False) -> Any:  # fmt: skip
    """transformer_engine.pytorch.fp8_autocast: the older name of autocast."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def _agree_on_scales(recipe: Any, group: Any, products: int) -> None:
    """Reduce the maxima of *products* over *group* and compute new scales, as delayed scaling does."""
    if not recipe.delayed():
        return
    maxima = torch.empty(3 * products, dtype=torch.float32, device="cuda")
    if recipe.reduce_amax and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    history = torch.empty(3 * products * recipe.amax_history_len, dtype=torch.float32, device="cuda")
    launch(f"{_NAME}::amax_and_scale_update", [maxima, history], [history, maxima])


@contextlib.contextmanager
def fp8_model_init(enabled: bool = True, **options: Any) -> Iterator[None]:
    """Stand-in for transformer_engine.pytorch.fp8_model_init."""
    state = region()
    before, state.makes_parameters = state.makes_parameters, enabled
    if enabled:
        note("transformer_engine: weights made under fp8_model_init are gathered in their params_dtype")
    try:
        yield
    finally:
        state.makes_parameters = before


def default_recipe() -> Recipe:
    """Return the recipe of a region without one."""
    return MXFP8BlockScaling() if is_mxfp8_available() else DelayedScaling()


def _available(least: tuple[int, int], kind: str, return_reason: bool = False) -> Any:
    available = torch.cuda.get_device_capability() >= least
    reason = f"Device compute capability {least[0]}.{least[1]} or higher required for {kind} execution."
    return (available, "" if available else reason) if return_reason else available


is_fp8_available = functools.partial(_available, (8, 9), "FP8")
is_mxfp8_available = functools.partial(_available, (10, 0), "MXFP8")


class FP8GlobalStateManager:
    """Stand-in for transformer_engine.pytorch.fp8.FP8GlobalStateManager, with the methods that programs use."""

    is_fp8_enabled = staticmethod(lambda: region().enabled)
    is_fp8_calibration = staticmethod(lambda: False)
    get_fp8_recipe = staticmethod(lambda: region().recipe)
    get_fp8_group = staticmethod(lambda: region().group)
    is_fp8_available = staticmethod(functools.partial(is_fp8_available, return_reason=True))
    is_mxfp8_available = staticmethod(functools.partial(is_mxfp8_available, return_reason=True))
    reset = staticmethod(lambda: vars(region()).update(vars(_Fp8Region())))


RECIPES = {kind.__name__: kind for kind in (Format, Recipe, *Recipe.__subclasses__())}
QUANTIZATION = {
    "autocast": autocast, "fp8_autocast": fp8_autocast, "fp8_model_init": fp8_model_init,
    "quantized_model_init": fp8_model_init, "is_fp8_available": is_fp8_available,
    "is_mxfp8_available": is_mxfp8_available, "get_default_recipe": default_recipe,
    "is_fp8_block_scaling_available": functools.partial(_available, (9, 0), "FP8 block scaled GEMM"),
    "FP8GlobalStateManager": FP8GlobalStateManager,
}  # fmt: skip

# -- One matrix product with its weight, its gradients and its communication.

FP8, _FP8_GRAD = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass
class Product:
    """Settings of one module's product: the tensor-parallel group, and the precision."""

    group: Any = None
    size: int = 1
    mode: str | None = None
    """`column` or `row`: how the group shares the weight; None: not at all."""
    sequence: bool = False
    """Whether each rank of the group has a part of the rows."""
    into_main_grad: bool = False
    recipe: Any = None
    """Recipe for fp8; None: the data type of the operands."""
    cast_before: bool = False
    """Whether the kernel that produced the input has already cast it."""
    keeps_input: bool = False
    """Whether backward gets the input itself and casts it again, since something else keeps it, too."""
    ends_backward: bool = False
    """Whether the maxima of backward are reduced after it, because it is the first product of its region."""
    amax_group: Any = None


def cast(
    x: Tensor, dtype: torch.dtype, recipe: Any, alone: bool = True, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return *x* in fp8 and its transpose, in the memory of *into* if given. With *alone*, a kernel does the cast."""
    rows, columns = into or (torch.empty(shape, dtype=dtype, device=x.device) for shape in (x.shape, x.shape[::-1]))
    if recipe.float8_current_scaling():
        launch(f"{_NAME}::amax", [x], [])
    if alone:
        launch(f"{_NAME}::cast_transpose", [x], [rows, columns])
    return rows, columns


def _fp8_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of *left* (rows, inner) and *right* (columns, inner)."""
    shape = left.shape[0], right.shape[0], left.shape[1]
    out = torch.empty(shape[:2], dtype=dtype, device=left.device)
    launch(f"{_NAME}::fp8_gemm", [left, right], [out], kind="gemm", shape=(*shape, 1))
    return out


def _gather(x: Tensor, group: Any, asynchronous: bool = False) -> tuple[Tensor, Any]:
    """Gather *x* from all ranks of *group* along the first dimension; return it and the work that completes it."""
    whole = torch.empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]), dtype=x.dtype, device=x.device)
    as_bytes = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (whole, x.contiguous()))
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 has renamed it
    return whole, gather(*as_bytes, group=group, async_op=asynchronous)


def _scatter(x: Tensor, group: Any, asynchronous: bool = False) -> tuple[Tensor, Any]:
    """Return this rank's part of the sum of *x* along the first dimension, and the work that completes it."""
    part = torch.empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]), dtype=x.dtype, device=x.device)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # torch 2.13 has renamed it
    return part, scatter(part, x.contiguous(), group=group, async_op=asynchronous)


def _transposed(x: Tensor) -> Tensor:
    """Return the transpose of gathered fp8 elements, computed by a separate kernel."""
    out = torch.empty(x.shape[::-1], dtype=x.dtype, device=x.device)
    launch(f"{_NAME}::transpose", [x], [out])
    return out


class _Linear(torch.autograd.Function):
    """Product of x (rows, inner) and the weight (columns, inner), plus a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, copies: Any) -> Tensor:
        recipe, shared = product.recipe, product.size > 1
        gathers = shared and product.mode == "column" and product.sequence
        if recipe is None:
            kept, kept_weight = x, weight
            whole = _gather(x, product.group)[0] if gathers else x
            added = product.mode != "row" and bias is not None
            out = torch.addmm(bias, whole, weight.t()) if added else whole @ weight.t()
        else:
            rows, kept = cast(x, FP8, recipe, alone=not product.cast_before)
            weight_rows, kept_weight = copies
            out = _fp8_product(_gather(rows, product.group)[0] if gathers else rows, weight_rows, x.dtype)
            kept = x if product.keeps_input and not gathers else kept
        if product.mode == "row" and shared:
            if product.sequence:
                out = _scatter(out, product.group)[0]
            else:
                dist.all_reduce(out, group=product.group)
        if bias is not None and product.mode == "row":  # else the product has added it
            out = out + bias
        ctx.product, ctx.gathers, ctx.weight = product, gathers, weight
        ctx.save_for_backward(kept, kept_weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        product: Product = ctx.product
        whole, kept_weight = ctx.saved_tensors
        recipe, weight, group, gathering = product.recipe, ctx.weight, product.group, None
        if recipe is not None and product.keeps_input and not ctx.gathers:
            whole = cast(whole, FP8, recipe)[1]
        if ctx.gathers:
            local = whole if recipe is None else whole.view(whole.shape[::-1])  # the bytes of its rows
            whole, gathering = _gather(local, group, asynchronous=True)
        rows, columns = _gradient(grad, product)
        given = rows @ kept_weight.to(rows.dtype) if recipe is None else _fp8_product(rows, kept_weight, grad.dtype)
        summing = None
        if product.mode == "column" and product.size > 1:
            if product.sequence:
                given, summing = _scatter(given, group, asynchronous=True)
            else:
                summing = dist.all_reduce(given, group=group, async_op=True)
        if gathering is not None:
            gathering.wait()
            whole = whole if recipe is None else _transposed(whole)
        of_weight = _weight_gradient(columns, whole, weight, product) if ctx.needs_input_grad[1] else None
        of_bias = None
        if ctx.needs_input_grad[2]:  # the cast, or the product, sums it on the way
            of_bias = rows.sum(0) if recipe is None and needs_values() else grad.new_empty(weight.shape[0])
        if summing is not None:
            summing.wait()
        if product.ends_backward:
            _agree_on_scales(recipe, product.amax_group, 1)
        return given, of_weight, of_bias, None, None


def _gradient(grad: Tensor, product: Product) -> tuple[Tensor, Tensor]:
    """Return the output's gradient for the two products of backward: as rows and as columns."""
    gathers = product.mode == "row" and product.sequence and product.size > 1
    grad = grad.contiguous()
    if product.recipe is None:
        whole = _gather(grad, product.group)[0] if gathers else grad
        return whole, whole
    rows, columns = cast(grad, _FP8_GRAD, product.recipe)
    if gathers:
        rows = _gather(rows, product.group)[0]
        columns = _transposed(rows)
    return rows, columns


_unused_gradients: weakref.WeakKeyDictionary[Any, dict[Any, Tensor]] = weakref.WeakKeyDictionary()


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """transformer_engine.pytorch.module.base.get_dummy_wgrad: memory that nobody reads, given to autograd in place of a
    weight's gradient that is in main_grad already: one buffer for all weights of a shape.
    """
    kept = _unused_gradients.setdefault(current_process(), {})
    key = (*shape, dtype)
    if key not in kept:
        kept[key] = torch.empty(shape, dtype=dtype, device="cuda")
    if zero:
        kept[key].zero_()
    return kept[key].detach()


def get_workspace() -> Tensor:
    """transformer_engine.pytorch.module.base.get_workspace: the memory of cuBLAS, 32 MiB from Hopper on."""
    size = 1 << (25 if torch.cuda.get_device_capability() >= (9, 0) else 22)
    return get_dummy_wgrad([size], torch.uint8)


def general_gemm(A: Tensor, B: Tensor, workspace: Tensor | None = None, out_dtype: torch.dtype | None = None,
                 quantization_params: Any = None, gelu: Any = None, gelu_in: Any = None, accumulate: bool = False,
                 layout: str = "TN", out: Tensor | None = None, **options: Any) -> list[Tensor | None]:  # fmt: skip
    """transformer_engine.pytorch.cpp_extensions.general_gemm, column-major as cuBLAS: with TN the product B A^T.

    Raises:
        NotSimulated: It is to add a bias, apply gelu or accumulate.
    """
    if gelu or accumulate or options.get("bias") is not None:
        raise NotSimulated("general_gemm with a bias, gelu or accumulation", "multiply with torch.mm")
    right, left = (t.t() if letter == "T" else t for t, letter in zip((A, B), layout, strict=True))
    dtype = out_dtype or B.dtype
    if needs_values():
        return [(left.to(dtype) @ right.to(dtype)), None, None, None]
    out = torch.empty((left.shape[0], right.shape[1]), dtype=dtype, device=B.device) if out is None else out
    launch(f"{_NAME}::gemm", [left, right], [out], kind="gemm", shape=(*out.shape, left.shape[1], 1))
    return [out, None, None, None]


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, product: Product) -> Tensor | None:
    """Return the weight's gradient. If it is added to the weight's main_grad, return None or unused memory."""
    main = getattr(weight, "main_grad", None) if product.into_main_grad else None
    left = grad.t() if product.recipe is None else grad
    if main is None:
        return left @ x if product.recipe is None else _fp8_product(left, x, weight.dtype)
    if needs_values():
        main.add_((left @ x).to(main.dtype))
    else:
        shape = (*main.shape, left.shape[1], 1)
        launch(f"{_NAME}::wgrad_accumulate", [left, x, main], [main], kind="gemm", shape=shape)
    return unused_gradient(weight)


def unused_gradient(weight: Tensor) -> Tensor | None:
    """Return what autograd gets for a weight whose gradient is in its main_grad already."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return get_dummy_wgrad(list(weight.shape), weight.dtype, getattr(weight, "zero_out_wgrad", False))


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, copies: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Return the product of x (..., inner) and *weight* (columns, inner) with the settings in *product*.

    In fp8 *copies* are the weight and its transpose, as `cast` returns them.
    """
    with torch.autocast("cuda", enabled=False):
        out: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, product, copies)
    return out.view(-1, *x.shape[1:-1], out.shape[-1]) if x.dim() > 2 else out
