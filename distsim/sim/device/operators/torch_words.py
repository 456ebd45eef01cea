"""What PyTorch says on a GPU of arguments that do not fit, where its kernels without data say it in other words or not.

Most of these checks are the same code for CPU and CUDA and come before any work: the CPU's kernel is given zeros of
these shapes and says it. (Zeros of the operating system's: nothing is written, so large ones cost nothing.) What CUDA's
kernels say otherwise is put right in the text, with its file.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

__all__ = ["MISTAKES", "in_torchs_words", "refuse_mixed_dtypes"]

MISTAKES = (RuntimeError, IndexError, ValueError, TypeError, AssertionError, ArithmeticError)
"""What meta kernels raise for a program's mistake."""
_MOST_BYTES = 1 << 34
"""Of address space."""

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
    """torch's error for tensors whose data types *func* does not take together."""
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
    said = _said_by_cpu(func, args, kwargs) if mixed else None
    if said is not None:
        raise said


def in_torchs_words(error: Exception, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception:
    """*error*, which the meta kernel of *func* raised for these arguments; or as its CUDA kernel would have put it."""
    if getattr(func, "namespace", "") != "aten":  # a kernel of somebody else's does something
        return error
    said = _said_by_cpu(func, args, kwargs)
    if said is not None:
        return said
    text = _SIZE.sub(r"\1", str(error))
    product = _PRODUCT.search(text)
    if product is not None:
        one, other = (shape.replace(", ", "x") for shape in product.groups())
        text = f"mat1 and mat2 shapes cannot be multiplied ({one} and {other})"
    return error if text == str(error) else type(error)(text)


def _said_by_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """What the CPU's kernel raises for such arguments, with CUDA's names; None: nothing, or it cannot be asked."""
    left = _MOST_BYTES
    twins: dict[int, Tensor] = {}

    def twin(value: Any) -> Any:
        nonlocal left
        if isinstance(value, Tensor):
            found = twins.get(id(value))
            if found is None:
                reach = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True)) + 1
                left -= reach * value.element_size()
                if left < 0:
                    raise MemoryError
                zeros = torch.zeros(reach if value.numel() else 0, dtype=value.dtype, device="cpu")
                found = twins[id(value)] = zeros.as_strided(value.shape, value.stride())
            return found
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
        what = f"nll_loss_forward_reduce_cuda_kernel_{args[0].dim()}d_index"
        return NotImplementedError(f"\"{what}\" not implemented for '{target[1]}'")
    for pattern, instead in _ON_CUDA:
        text = pattern.sub(instead, text)
    return type(error)(text)
