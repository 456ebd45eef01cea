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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from distsim.sim.stand_ins.fused import launch, needs_values, note, per_process

__all__ = [
    "DelayedScaling", "FP8GlobalStateManager", "Float8BlockScaling", "Float8CurrentScaling", "Format",
    "MXFP8BlockScaling",
    "Product", "Recipe", "accumulate_weight_gradient", "autocast", "default_recipe", "fp8_autocast", "fp8_model_init",
    "gather_first", "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available", "multiply", "region",
]  # fmt: skip

_NAME = "transformer_engine"

# -- Recipes, and the region in which products are computed in fp8.


class Format(enum.Enum):
    """transformer_engine.common.recipe.Format: the largest numbers of forward and backward."""

    E2M1 = (6, 6)
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

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)

    def mxfp8(self) -> bool:
        return isinstance(self, MXFP8BlockScaling)

    def float8_current_scaling(self) -> bool:
        return isinstance(self, Float8CurrentScaling)

    def float8_per_tensor_scaling(self) -> bool:
        return isinstance(self, DelayedScaling | Float8CurrentScaling)

    def float8_block_scaling(self) -> bool:
        return isinstance(self, Float8BlockScaling)

    def nvfp4(self) -> bool:
        return False

    def custom(self) -> bool:
        return False


class DelayedScaling(Recipe):
    """Scales from the maxima of earlier steps, reduced over the group."""

    reduce_amax = True
    amax_history_len = 1024
    amax_compute_algo = "max"

    def __init__(
        self,
        margin: int = 0,
        fp8_format: Format = Format.HYBRID,
        amax_history_len: int = 1024,
        amax_compute_algo: Any = "max",
        scaling_factor_compute_algo: Any = None,
        reduce_amax: bool = True,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            margin=margin, fp8_format=fp8_format, amax_history_len=amax_history_len, reduce_amax=reduce_amax,
            amax_compute_algo=amax_compute_algo, fp8_dpa=fp8_dpa, fp8_mha=fp8_mha, **options,
        )  # fmt: skip


class Float8CurrentScaling(Recipe):
    """Scales from the maximum of the tensor itself, which takes two passes over it."""


class MXFP8BlockScaling(Recipe):
    """One scale for every 32 elements (Blackwell)."""

    fp8_format = Format.E4M3


class Float8BlockScaling(Recipe):
    """One scale for every 128 elements, or 128 x 128 elements."""

    fp8_format = Format.E4M3


class _Fp8Region:
    """Settings of `autocast` in one process."""

    def __init__(self) -> None:
        self.enabled = self.calibrating = self.parameters = False
        self.recipe: Recipe | None = None
        self.group: Any = None
        self.modules = 0
        """Number of fp8 products since the region began."""


region = per_process(_Fp8Region)
"""Returns the settings of `autocast` in the running process."""


class autocast:
    """transformer_engine.pytorch.autocast: products within are computed in fp8."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        self.enabled, self.calibrating = enabled, calibrating
        self.recipe, self.group = recipe or default_recipe(), amax_reduction_group

    def __enter__(self) -> autocast:
        if self.enabled:
            available, reason = is_fp8_available(return_reason=True)
            if available and self.recipe.mxfp8():
                available, reason = is_mxfp8_available(return_reason=True)
            assert available, reason
        self.state = region()
        self.before = dict(vars(self.state))
        vars(self.state).update(
            enabled=self.enabled, calibrating=self.calibrating, recipe=self.recipe, group=self.group
        )
        if not self.before["enabled"]:
            self.state.modules = 0
        return self

    def __exit__(self, *error: Any) -> None:
        modules = self.state.modules
        vars(self.state).update(self.before)
        if not self.before["enabled"] and modules and torch.is_grad_enabled() and error[0] is None:
            agree_on_scales(self.recipe, self.group, modules)
        self.state.modules = modules if self.before["enabled"] else 0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:
            with autocast(self.enabled, self.calibrating, self.recipe, self.group):
                return function(*args, **kwargs)

        return within


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """transformer_engine.pytorch.fp8_autocast: the older name of autocast."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def agree_on_scales(recipe: Recipe | None, group: Any, modules: int) -> None:
    """Reduce the maxima of *modules* products over *group* and compute new scales, as delayed scaling does."""
    if not isinstance(recipe, DelayedScaling):
        return
    maxima = torch.empty(3 * modules, dtype=torch.float32, device="cuda")
    if recipe.reduce_amax and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    history = torch.empty(3 * modules * recipe.amax_history_len, dtype=torch.float32, device="cuda")
    launch(f"{_NAME}::amax_and_scale_update", [maxima, history], [history, maxima])


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Stand-in for transformer_engine.pytorch.fp8_model_init."""
    if enabled:
        note("transformer_engine: parameters made under fp8_model_init stay in their params_dtype")
    yield


def default_recipe() -> Recipe:
    """Return the recipe of a region without one."""
    return MXFP8BlockScaling() if is_mxfp8_available() else DelayedScaling()


def _capability() -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def _available(least: tuple[int, int], kind: str, return_reason: bool) -> Any:
    available = _capability() >= least
    reason = (
        "" if available else f"Device compute capability {least[0]}.{least[1]} or higher required for {kind} execution."
    )
    return (available, reason) if return_reason else available


def is_fp8_available(return_reason: bool = False) -> Any:
    """Stand-in for transformer_engine.pytorch.is_fp8_available."""
    return _available((8, 9), "FP8", return_reason)


def is_mxfp8_available(return_reason: bool = False) -> Any:
    """Stand-in for transformer_engine.pytorch.is_mxfp8_available."""
    return _available((10, 0), "MXFP8", return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> Any:
    """Stand-in for transformer_engine.pytorch.is_fp8_block_scaling_available."""
    return _available((9, 0), "FP8 block scaled GEMM", return_reason)


class FP8GlobalStateManager:
    """Stand-in for transformer_engine.pytorch.fp8.FP8GlobalStateManager, with the methods that programs use."""

    is_fp8_enabled = staticmethod(lambda: region().enabled)
    is_fp8_calibration = staticmethod(lambda: region().calibrating)
    with_fp8_parameters = staticmethod(lambda: region().parameters)
    get_fp8_recipe = staticmethod(lambda: region().recipe)
    get_fp8_group = staticmethod(lambda: region().group)
    is_fp8_available = staticmethod(functools.partial(is_fp8_available, return_reason=True))
    is_mxfp8_available = staticmethod(functools.partial(is_mxfp8_available, return_reason=True))
    is_first_fp8_module = staticmethod(lambda: region().modules == 0)

    @staticmethod
    def reset() -> None:
        vars(region()).update(vars(_Fp8Region()))

    @staticmethod
    def set_skip_fp8_weight_update_tensor(skip: Any) -> None:
        """Do nothing: weights are cast in the first micro-batch only."""


# -- One matrix product with its weight, its gradients and its communication.

_FP8, _FP8_GRAD = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass
class Product:
    """Settings of one module's product: the tensor-parallel group, the precision, and which kernel casts the
    operands.
    """

    group: Any = None
    size: int = 1
    mode: str | None = None
    sequence: bool = False
    fp8: Recipe | None = None
    cast_before: bool = False
    """Whether the kernel that produced the input has already cast it."""
    cached: tuple[Tensor, Tensor] | None = None
    """Weight in fp8 and its transpose from an earlier micro-batch, or None."""
    caches: bool = False
    """Whether the cast weight is stored in `cached` for later micro-batches."""
    into_main_grad: bool = False
    ends_backward: bool = False
    """Whether the maxima of backward are reduced after it, because it is the first product of its region."""
    amax_group: Any = None
    modules: int = 0


def _cast(x: Tensor, dtype: torch.dtype, recipe: Recipe, alone: bool = True) -> tuple[Tensor, Tensor]:
    """Return *x* in fp8 and its transpose. With *alone*, a separate kernel does the cast."""
    rows = torch.empty(x.shape, dtype=dtype, device=x.device)
    columns = torch.empty(x.shape[::-1], dtype=dtype, device=x.device)
    if recipe.float8_current_scaling():
        launch(f"{_NAME}::amax", [x], [])
    if alone:
        launch(f"{_NAME}::cast_transpose", [x], [rows, columns])
    return rows, columns


def _multiply(left: Tensor, right: Tensor, out_dtype: torch.dtype, recipe: Recipe | None) -> Tensor:
    """Return the product of *left* (rows, inner) and *right* (columns, inner)."""
    if recipe is None:
        return left.to(out_dtype) @ right.to(out_dtype).t()
    shape = left.shape[0], right.shape[0], left.shape[1]
    out = torch.empty(shape[:2], dtype=out_dtype, device=left.device)
    launch(f"{_NAME}::fp8_gemm", [left, right], [out], kind="gemm", gemm=(*shape, 1))
    return out


def gather_first(x: Tensor, group: Any, asynchronous: bool = False) -> tuple[Tensor, Any]:
    """Gather *x* from all ranks of *group* along the first dimension; return it and the work that completes it."""
    whole = torch.empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]), dtype=x.dtype, device=x.device)
    as_bytes = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (whole, x.contiguous()))
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 has renamed it
    work = gather(*as_bytes, group=group, async_op=asynchronous)
    return whole, work


def _scatter_first(x: Tensor, group: Any, asynchronous: bool = False) -> tuple[Tensor, Any]:
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
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
        recipe, gathers = product.fp8, product.mode == "column" and product.sequence and product.size > 1
        if recipe is None:
            kept, weights = x, (weight, weight)
            whole = gather_first(x, product.group)[0] if gathers else x
        else:
            rows, kept = _cast(x, _FP8, recipe, alone=not product.cast_before)
            weights = product.cached or _cast(weight, _FP8, recipe)
            product.cached = weights if product.caches else None
            whole = gather_first(rows, product.group)[0] if gathers else rows
        if bias is not None and recipe is None and product.mode != "row":
            out = torch.addmm(bias, whole, weight.t())
        else:
            out = _multiply(whole, weights[0], x.dtype, recipe)
        if product.mode == "row" and product.size > 1:
            if product.sequence:
                out = _scatter_first(out, product.group)[0]
            else:
                dist.all_reduce(out, group=product.group)
        if bias is not None and product.mode == "row":  # else the product has added it
            out = out + bias
        ctx.product, ctx.gathers, ctx.has_weight = product, gathers, weight
        ctx.save_for_backward(kept, weights[1])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        product: Product = ctx.product
        kept, transposed_weight = ctx.saved_tensors
        recipe, weight, group = product.fp8, ctx.has_weight, product.group
        whole, gathering = kept, None
        if ctx.gathers:
            local = kept if recipe is None else kept.view(kept.shape[::-1])  # the bytes of its rows
            whole, gathering = gather_first(local, group, asynchronous=True)
        grads = _gradient(grad, product)
        given = _multiply_gradient(grads[0], transposed_weight, grad.dtype, recipe)
        summing = None
        if product.mode == "column" and product.size > 1:
            if product.sequence:
                given, summing = _scatter_first(given, group, asynchronous=True)
            else:
                summing = dist.all_reduce(given, group=group, async_op=True)
        if gathering is not None:
            gathering.wait()
            whole = whole if recipe is None else _transposed(whole)
        of_weight = _weight_gradient(grads[1], whole, weight, product) if ctx.needs_input_grad[1] else None
        of_bias = None
        if ctx.needs_input_grad[2]:  # the cast, or the product, sums it on the way
            of_bias = grads[0].sum(0) if recipe is None and needs_values() else grad.new_empty(weight.shape[0])
        if summing is not None:
            summing.wait()
        if product.ends_backward:
            agree_on_scales(recipe, product.amax_group, product.modules)
        return given, of_weight, of_bias, None


def _gradient(grad: Tensor, product: Product) -> tuple[Tensor, Tensor]:
    """Return the output's gradient for the two products of backward: as rows and as columns."""
    gathers = product.mode == "row" and product.sequence and product.size > 1
    grad = grad.contiguous()
    if product.fp8 is None:
        whole = gather_first(grad, product.group)[0] if gathers else grad
        return whole, whole
    rows, columns = _cast(grad, _FP8_GRAD, product.fp8)
    if gathers:
        rows = gather_first(rows, product.group)[0]
        columns = _transposed(rows)
    return rows, columns


def _multiply_gradient(grad: Tensor, weight: Tensor, dtype: torch.dtype, recipe: Recipe | None) -> Tensor:
    return grad @ weight.to(grad.dtype) if recipe is None else _multiply(grad, weight, dtype, recipe)


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, product: Product) -> Tensor | None:
    """Return the weight's gradient. If it is added to the weight's main_grad, return None or unused memory."""
    main = getattr(weight, "main_grad", None) if product.into_main_grad else None
    if main is None:
        return grad.t() @ x if product.fp8 is None else _multiply(grad, x, weight.dtype, product.fp8)
    accumulate_weight_gradient(grad if product.fp8 is not None else grad.t(), x, main)
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
        return torch.empty_like(weight)
    return None


def accumulate_weight_gradient(grad: Tensor, x: Tensor, main: Tensor) -> None:
    """Add grad (columns, rows) times x to *main* in one product."""
    if needs_values():
        main.add_((grad @ x).to(main.dtype))
        return
    inner = grad.shape[1]
    gemm = (main.shape[0], main.shape[1], inner, 1)
    launch(f"{_NAME}::wgrad_accumulate", [grad, x, main], [main], kind="gemm", gemm=gemm)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """Return the product of x (..., inner) and *weight* (columns, inner) with the settings in *product*."""
    with torch.autocast("cuda", enabled=False):
        out: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, product)
    return out.view(-1, *x.shape[1:-1], out.shape[-1]) if x.dim() > 2 else out


# -- Recomputation and random states


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand-in for transformer_engine.pytorch.checkpoint: torch's checkpoint, without the additional arguments."""
    for name in ("distribute_saved_activations", "get_rng_state_tracker", "tp_group"):
        kwargs.pop(name, None)
    reentrant = kwargs.pop("use_reentrant", True)
    if reentrant and kwargs:
        function, kwargs = functools.partial(function, **kwargs), {}
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=reentrant, **kwargs)


class CudaRNGStatesTracker:
    """Stand-in for transformer_engine.pytorch.CudaRNGStatesTracker: it keeps names of random states, and the default
    generator draws.
    """

    def __init__(self) -> None:
        self.states_: dict[str, int] = {}

    def reset(self) -> None:
        self.states_ = {}

    def get_states(self) -> dict[str, int]:
        return dict(self.states_)

    def set_states(self, states: dict[str, int]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        if name in self.states_:
            raise RuntimeError(f"cuda rng state {name} already exists")
        self.states_[name] = seed

    def fork(self, name: str = "model-parallel-rng") -> Any:
        if name not in self.states_:
            raise RuntimeError(f"cuda rng state {name} is not added")
        return contextlib.nullcontext()
