"""Computes the results of an operator once on meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distsim.errors import NotSimulated
from distsim.kernels import Cost
from distsim.sim.device.generator import PlainGenerator, is_for_gpu
from distsim.sim.device.timeline.steps import Counted, counted

MISTAKES = (RuntimeError, IndexError, ValueError, TypeError, AssertionError, ArithmeticError)
"""Exceptions that meta kernels raise for a mistake of the program."""

aten = torch.ops.aten
_OF_ONE_DTYPE = frozenset(
    {aten.mm.default, aten.addmm.default, aten.mv.default, aten.addmv.default, aten.bmm.default, aten.baddbmm.default,
     aten.dot.default, aten.convolution.default, aten.complex.default, aten.index_add.default, aten.index_add_.default,
     aten.index_copy.default, aten.index_copy_.default, aten.index_put.default, aten.index_put_.default,
     aten.masked_scatter.default, aten.binary_cross_entropy.default}
)  # fmt: skip
"""Their tensors of floating point have one data type, on every device; the meta kernels of some let others pass."""
_LOSSES = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})


def refuse_mixed_dtypes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise an error of torch's type if *func* does not accept these dtypes together; meta kernels let some pass."""
    if func in _LOSSES:
        if args[1].dtype not in (torch.int64, torch.uint8):
            raise NotImplementedError(f"{func}: expected targets of int64 or uint8, got {args[1].dtype}")
    elif func in _OF_ONE_DTYPE:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        dtypes = dict.fromkeys(t.dtype for t in tensors if t.dtype.is_floating_point or t.dtype.is_complex)
        if len(dtypes) > 1:
            raise RuntimeError(f"{func}: expected tensors of one dtype, got {' and '.join(map(str, dtypes))}")


# -- What an operator makes of arguments that look like these, found once by its meta kernel.

META = torch.device("meta")
_numbers: dict[Any, int] = {}
_SCALARS = (bool, int, float, complex)


class NewTensor:
    """A new tensor."""

    __slots__ = ("dtype", "nbytes", "numel", "size", "stride")

    def __init__(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            raise NotSimulated(
                f"a tensor of layout {tensor.layout} on CUDA", "use dense ones (nn.Embedding: sparse=False)"
            )
        self.size = tuple(tensor.shape)
        self.stride = tensor.stride()
        self.dtype = tensor.dtype
        self.numel: int = tensor.numel()
        self.nbytes = tensor.untyped_storage().nbytes()


class Given:
    """An argument handed back (operators in place)."""

    __slots__ = ("path",)

    def __init__(self, path: tuple[Any, ...]) -> None:
        self.path = path

    def of(self, args: Any, kwargs: Any) -> Any:
        result: Any = kwargs if isinstance(self.path[0], str) else args
        for step in self.path:
            result = result[step]
        return result


class OperatorPlan:
    """Results of a call: *outs* holds `NewTensor`, `Given` or values that are not tensors."""

    __slots__ = (
        "checks",
        "cost",
        "counted",
        "device",
        "grown",
        "kind",
        "number",
        "offset",
        "outs",
        "precision",
        "random",
        "typical",
        "valued",
        "written",
    )

    def __init__(
        self, kind: Callable[[list[Any]], Any] | None, outs: list[Any], device: torch.device | None, cost: Cost
    ) -> None:
        self.checks = False
        """Whether the operator computes booleans from its arguments (special.py)."""
        self.number = 0
        """Number of the plan; equal for operators that differ in numbers only, not in shapes."""
        self.kind = kind
        """Makes the result of its parts; None: there is one."""
        self.outs = outs
        self.device = device
        self.precision: tuple[str, str] | None = None
        """Precision settings under which the cost was computed, if the cost depends on them."""
        self.offset = 0
        """Difference between the device index of the result and that of the call."""
        self.cost = cost
        self.written: tuple[tuple[Any, ...], ...] = ()
        """Paths of the arguments, tensors or lists of them, that it writes to."""
        self.grown: tuple[tuple[tuple[Any, ...], tuple[int, ...]], ...] = ()
        """(path, size) of those (out=) that it makes larger or smaller first."""
        self.valued = True
        """Whether values of the results can be known at all."""
        self.random = False
        self.typical: float | None = None
        """The number in the middle of those that it draws."""
        self.counted: Counted | None = None
        """Flops or tokens that the operator adds to a step."""


def takes_any_float(func: Any) -> bool:
    """Return whether floats among the arguments of *func* never change the shape of its result.

    Optimizers pass other floats in each step (bias corrections, learning rates), each of which would otherwise need
    a plan of its own.
    """
    known = _any_float.get(func)
    if known is None:
        is_one_by_one = torch.Tag.pointwise in func.tags or func._schema.name.startswith(
            ("aten::_foreach_", "aten::_fused_")
        )
        known = _any_float[func] = is_one_by_one and torch.Tag.nondeterministic_seeded not in func.tags
    return known


_any_float: dict[Any, bool] = {}


def key_of(value: Any, base: int, any_float: bool = False) -> Any:
    """Return the part of an argument that decides the result; devices are relative to number *base*. With *any_float*,
    floats count by type only."""
    kind = type(value)
    if isinstance(value, Tensor):
        number = value.get_device()
        return (value.shape, value.stride(), value.dtype, number - base if number >= 0 else None)
    if kind is list or kind is tuple:
        return tuple([key_of(item, base, any_float) for item in value])
    if kind is float and any_float:
        return float
    if kind in _SCALARS:
        return (kind, value)
    if kind is torch.device:
        return (value.type, 0 if value.index is None else value.index - base)
    if kind is PlainGenerator:
        return is_for_gpu(value)
    return value


class _Twins:
    """Arguments as meta tensors: a twin of each tensor with its position, and the devices among the arguments."""

    def __init__(self, current: torch.device) -> None:
        self.by_id: dict[int, Tensor] = {}
        self.paths: dict[int, tuple[Any, ...]] = {}
        self.devices: list[torch.device] = []
        self._current = current

    def of(self, value: Any, path: tuple[Any, ...]) -> Any:
        """Return the twin of *value*, whose position among the arguments is *path*, for the meta kernel."""
        if isinstance(value, Tensor):
            return self._of_tensor(value, path)
        if isinstance(value, torch.device):
            if value.type != "meta":
                is_named = value.index is not None or value.type != "cuda"
                self.devices.append(value if is_named else self._current)
            return META
        if isinstance(value, list | tuple):
            return type(value)(self.of(item, (*path, i)) for i, item in enumerate(value))
        if isinstance(value, PlainGenerator):
            if not is_for_gpu(value):
                raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
            return None
        return value

    def _of_tensor(self, tensor: Tensor, path: tuple[Any, ...]) -> Tensor:
        known = self.by_id.get(id(tensor))
        if known is not None:
            return known
        if tensor.device.type == "cuda":
            self.devices.append(tensor.device)
        twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
        self.by_id[id(tensor)], self.paths[id(twin)] = twin, path
        return twin


def learn(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], current: torch.device, cost_of: Any
) -> OperatorPlan:
    """Run the meta kernel of *func* on arguments like these, and return the plan.

    `cost_of(func, args, kwargs, result)` prices the kernels. Raises NotSimulated if torch has no meta kernel, and
    the operator's own error if the arguments do not fit.
    """
    refuse_mixed_devices(func, args, kwargs)
    refuse_mixed_dtypes(func, args, kwargs)
    twins = _Twins(current)
    meta_args = tuple(twins.of(value, (i,)) for i, value in enumerate(args))
    meta_kwargs = {name: twins.of(value, (name,)) for name, value in kwargs.items() if name != "pin_memory"}
    shapes_before = [(t, t.shape) for t in twins.by_id.values()]
    try:
        result = func(*meta_args, **meta_kwargs)
    except NotImplementedError:
        if func._schema.returns:
            raise NotSimulated(
                f"what {func} makes of CUDA tensors (it has no meta kernel)",
                f"say it with @torch.library.register_fake({func._schema.name!r}), or run that part on CPU tensors",
            ) from None
        result = None  # it only writes to its arguments, as _fused_sgd_ does
    except (AssertionError, ArithmeticError) as error:  # a kernel of C++ raises what it does not take
        raise RuntimeError(str(error) or f"{func}: its arguments do not fit together") from None
    device_arg = kwargs.get("device")
    device = _indexed(device_arg, current) if device_arg is not None else twins.devices[0] if twins.devices else current
    whole = result if isinstance(result, list | tuple) else [result]
    outs = [_part(value, twins.paths) for value in whole]
    cost = cost_of(func, args, kwargs, result)
    plan = OperatorPlan(type(result) if isinstance(result, list | tuple) else None, outs, device, cost)
    plan.written = _written(func, args, kwargs)
    looks = (func, _looks((meta_args, list(meta_kwargs.items()))), _looks(result))
    plan.number = _numbers.setdefault(looks, len(_numbers))
    plan.counted = counted(func, args, plan.cost)
    plan.valued = all(_may_be_known(out) for out in outs) and all(
        _small(tensor) for tensor in tensors_in((args[1:] if func in LOOKS_LIKE else args, kwargs))
    )
    plan.random = torch.Tag.nondeterministic_seeded in func.tags
    plan.grown = tuple(
        (twins.paths[id(tensor)], tuple(tensor.shape)) for tensor, shape in shapes_before if tensor.shape != shape
    )
    if any(path not in plan.written for path, _ in plan.grown):
        raise NotSimulated(f"{func}, which changes the size of an argument", "give it one of the right size")
    return plan


def _looks(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_looks(item) for item in value)
    return type(value)


def _indexed(device: torch.device, current: torch.device) -> torch.device:
    return current if device.type == "cuda" and device.index is None else device


def _part(value: Any, paths: dict[int, tuple[Any, ...]]) -> Any:
    if not isinstance(value, Tensor):
        if isinstance(value, list | tuple):
            return type(value)(_part(item, paths) for item in value)
        return value
    path = paths.get(id(value))
    return NewTensor(value) if path is None else Given(path)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], ...]:
    paths: list[tuple[Any, ...]] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if argument.name in kwargs:
                paths.append((argument.name,))
            elif i < len(args):
                paths.append((i,))
    return tuple(paths)


LOOKS_LIKE = frozenset(
    getattr(packet, overload)
    for packet in (aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like, aten.randint_like,
                   aten.new_zeros, aten.new_ones, aten.new_full)
    for overload in packet.overloads() if "out" not in overload
)  # fmt: skip
"""Operators that use only the shape and dtype of their first argument."""

FEW_FLOATS = 4_096
MANY_INTEGER_BYTES = 8 << 20
"""A million numbers of 8 bytes, or an int32 map of 8,192 tokens to 256 experts."""
MANY_BYTES = 1 << 28


def limit(dtype: torch.dtype) -> int:
    """Return the number of elements up to which values are kept. It is large for bytes, which carry pickled objects."""
    if dtype is torch.uint8:
        return MANY_BYTES
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    return MANY_INTEGER_BYTES // dtype.itemsize if is_whole else FEW_FLOATS


def _small(tensor: Tensor) -> bool:
    """Return whether the tensor's storage is small enough for its values to be kept."""
    return bool(tensor.numel() <= limit(tensor.dtype) or 0 in tensor.stride())


def _may_be_known(out: Any) -> bool:
    if isinstance(out, NewTensor):
        return out.numel <= limit(out.dtype)
    return True


_MIXED = frozenset(
    str(name)
    for name in ("aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_", "aten::index_put",
                 "aten::_index_put_impl_", "aten::_foreach_copy_", "aten::set_", "aten::_unsafe_index")
)  # fmt: skip


def refuse_mixed_devices(func: Any, args: Any, kwargs: Any) -> None:
    """Raise torch's error for tensors of two devices; zero-dimensional tensors may be on the host."""
    if func._schema.name in _MIXED or func._schema.name.startswith(("aten::_fused_", "aten::_amp", "aten::_foreach")):
        return
    seen: torch.device | None = None
    for tensor in tensors_in((args, kwargs)):
        device = tensor.device
        if tensor.dim() == 0 and device.type == "cpu":
            continue
        if seen is None:
            seen = device
        elif device != seen:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {seen} and {device}!"
            )
