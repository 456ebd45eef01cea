"""Computes the results of an operator once on meta tensors, and torch's errors for bad arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distsim.errors import NotSimulated
from distsim.kernels import Cost
from distsim.sim.device.generator import PlainGenerator, is_for_gpu
from distsim.sim.device.timeline.steps import Counted, counted

__all__ = [
    "LOOKS_LIKE",
    "MISTAKES",
    "NewTensor",
    "OperatorPlan",
    "in_torchs_words",
    "key_of",
    "learn",
    "refuse_mixed_dtypes",
    "takes_any_float",
]

# -- What PyTorch says on a GPU of arguments that do not fit, where its kernels without data say it in other words or
# not.
#
# Most of these checks are the same code for CPU and CUDA and come before any work: the CPU's kernel is given zeros of
# these shapes and says it. (Zeros of the operating system's: nothing is written, so large ones cost nothing.) What
# CUDA's kernels say otherwise is put right in the text, with its file.

MISTAKES = (RuntimeError, IndexError, ValueError, TypeError, AssertionError, ArithmeticError)
"""Exceptions that meta kernels raise for a mistake of the program."""
_MOST_BYTES = 1 << 34
"""Maximum bytes of address space."""

_ON_CUDA = (
    (re.compile(r"\btorch\.(\w+Tensor)\b"), r"torch.cuda.\1"),
    (re.compile(r"\bCPU(\w+Type)\b"), r"CUDA\1"),
    # native/Convolution.cpp, check_input_same_type_as_parameters
    (re.compile(r" or input should be a MKLDNN tensor and weight is a dense tensor$"), ""),
    # native/cuda/Blas.cpp, addmm_out_cuda_impl
    (re.compile(r"^expected m1 and m2 to have"), "expected mat1 and mat2 to have"),
    # native/cuda/EmbeddingBag.cu
    (
        re.compile(r"\(while checking arguments for embedding_bag\)"),
        "(while checking arguments for embedding_bag_cuda)",
    ),
)
_TARGET = re.compile(r"^expected target dtype to be Long or Byte, but got (\w+)$")
_PRODUCT = re.compile(r"a and b must have same reduction dim, but got \[(.*?)\] X \[(.*?)\]")
_SIZE = re.compile(r"torch\.Size\((\[.*?\])\)")

aten = torch.ops.aten
_OF_ONE_DTYPE = frozenset(
    {aten.mm.default, aten.addmm.default, aten.mv.default, aten.addmv.default, aten.bmm.default, aten.baddbmm.default,
     aten.dot.default, aten.convolution.default, aten.complex.default, aten.index_add.default, aten.index_add_.default,
     aten.index_copy.default, aten.index_copy_.default, aten.index_put.default, aten.index_put_.default,
     aten.masked_scatter.default, aten.binary_cross_entropy.default}
)  # fmt: skip
"""Their tensors of floating point have one data type, on every device; the meta kernels of some let others pass."""
_TENSOR_TYPES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float64: "torch.cuda.DoubleTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "CUDABFloat16Type",
}
"""C++ names of CUDA tensors (DeprecatedTypeProperties::toString)."""
_LOSSES = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})


def refuse_mixed_dtypes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise torch's error if *func* does not accept these dtypes together."""
    if func in _LOSSES:
        mixed = args[1].dtype not in (torch.int64, torch.uint8)
    elif func is aten.convolution.default and args[0].dtype != args[1].dtype:
        # native/Convolution.cpp, check_input_same_type_as_parameters. The text of a CPU depends on its instructions.
        one, other = (_TENSOR_TYPES.get(value.dtype, str(value.dtype)) for value in args[:2])
        raise RuntimeError(f"Input type ({one}) and weight type ({other}) should be the same")
    elif func in _OF_ONE_DTYPE:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        mixed = len({t.dtype for t in tensors if t.dtype.is_floating_point or t.dtype.is_complex}) > 1
    else:
        return
    error = _said_by_cpu(func, args, kwargs) if mixed else None
    if error is not None:
        raise error


def in_torchs_words(error: Exception, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception:
    """Return *error* of the meta kernel of *func* with the text that the CUDA kernel would have used."""
    if getattr(func, "namespace", "") != "aten":  # a kernel of somebody else's does something
        return error
    result = _said_by_cpu(func, args, kwargs)
    if result is not None:
        return result
    text = _SIZE.sub(r"\1", str(error))
    product = _PRODUCT.search(text)
    if product is not None:
        one, other = (shape.replace(", ", "x") for shape in product.groups())
        text = f"mat1 and mat2 shapes cannot be multiplied ({one} and {other})"
    return error if text == str(error) else type(error)(text)


def _said_by_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """Return the error of the CPU kernel for such arguments with CUDA's names; None if there is none or it cannot be
    run."""
    left = _MOST_BYTES
    twins: dict[int, Tensor] = {}

    def twin(value: Any) -> Any:
        nonlocal left
        if isinstance(value, Tensor):
            zero = twins.get(id(value))
            if zero is None:
                reach = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True)) + 1
                left -= reach * value.element_size()
                if left < 0:
                    raise MemoryError
                zeros = torch.zeros(reach if value.numel() else 0, dtype=value.dtype, device="cpu")
                zero = twins[id(value)] = zeros.as_strided(value.shape, value.stride())
            return zero
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, list | tuple):
            return type(value)(twin(item) for item in value)
        return None if isinstance(value, torch.Generator) else value

    try:
        given, named = twin(args), {name: twin(value) for name, value in kwargs.items()}
    except (RuntimeError, MemoryError):
        return None
    try:
        func(*given, **named)
    except NotImplementedError:
        return None
    except MISTAKES as error:
        return _of_cuda(error, args)
    return None


def _of_cuda(error: Exception, args: tuple[Any, ...]) -> Exception:
    text = str(error)
    target = _TARGET.match(text)
    if target is not None:  # native/cuda/Loss.cu
        kernel = f"nll_loss_forward_reduce_cuda_kernel_{args[0].dim()}d_index"
        return NotImplementedError(f"\"{kernel}\" not implemented for '{target[1]}'")
    for pattern, instead in _ON_CUDA:
        text = pattern.sub(instead, text)
    return type(error)(text)


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
                f"say it with @torch.library.register_fake({_qualified(func)!r}), or run that part on CPU tensors",
            ) from None
        result = None  # it only writes to its arguments, as _fused_sgd_ does
    except MISTAKES as error:
        translated = in_torchs_words(error, func, args, kwargs)
        if translated is error:
            raise
        raise translated from None
    device_arg = kwargs.get("device")
    device = _indexed(device_arg, current) if device_arg is not None else twins.devices[0] if twins.devices else current
    whole = result if isinstance(result, list | tuple) else [result]
    outs = [_part(value, twins.paths) for value in whole]
    try:
        cost = cost_of(func, args, kwargs, result)
    except IndexError as error:  # the meta kernels of softmax take any dimension
        raise in_torchs_words(error, func, args, kwargs) from None
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


def _qualified(func: Any) -> str:
    return str(func._schema.name)


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
MANY_INTEGERS = 1 << 20
MANY_BYTES = 1 << 28


def limit(dtype: torch.dtype) -> int:
    """Return the number of elements up to which values are kept. It is large for bytes, which carry pickled objects."""
    if dtype is torch.uint8:
        return MANY_BYTES
    return FEW_FLOATS if dtype.is_floating_point or dtype.is_complex else MANY_INTEGERS


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
