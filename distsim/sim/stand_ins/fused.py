"""Fused kernels of libraries as single operators, each with a price and a gradient."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from distsim.errors import NotSimulated
from distsim.kernels import is_triton_kernel, library_kernel
from distsim.sim.isolation.process import current_task
from distsim.sim.kernel.task import current_process

__all__ = ["FusedKernel", "cross_entropy", "fused", "launch", "needs_values", "note", "per_process", "refuse_values"]

_SCHEMA = "(Tensor[] read, Tensor(a!)[] written, int flops, str kind, int kernels, str dtype, int[] gemm) -> ()"


@functools.cache
def _operator(name: str) -> Any:
    """Return the operator `library::kernel`, which is defined at its first use."""
    namespace, _, kernel = name.partition("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(kernel + _SCHEMA)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(kernel, _writes_nothing, "Meta")
    _libraries.append(library)
    library_kernel(name)
    return getattr(getattr(torch.ops, namespace), kernel).default


_libraries: list[torch.library.Library] = []
"""torch.library objects, kept alive because their operators exist only as long as they do."""


def _writes_nothing(*args: Any) -> None:
    """Implement an operator on tensors without values: do nothing."""


def launch(
    name: str,
    read: Sequence[Tensor | None],
    written: Sequence[Tensor | None],
    *,
    flops: int = 0,
    kind: str = "custom",
    kernels: int = 1,
    dtype: str = "",
    gemm: Sequence[int] = (),
) -> None:
    """Launch the kernel *name* (`library::kernel`), whose price is that of `distsim.kernels.library_kernel`."""
    arguments = ([t for t in read if t is not None], [t for t in written if t is not None])
    task = current_task()
    if is_triton_kernel(name) and task is not None and task.process.accelerators is not None:
        accelerators = task.process.accelerators
        accelerators.works_on_host(task, kernels * accelerators.host.triton_wrapper_s - accelerators.host.operator_s)
    _operator(name)(*arguments, flops, kind, kernels, dtype, list(gemm))


def needs_values() -> bool:
    """Return whether the run computes all values (`--data real`), which kernels without an implementation cannot."""
    process = current_process()
    return process is not None and process.port.facts.data.real


def refuse_values(call: str, why: str) -> None:
    """Raise NotSimulated for *call* if the run computes values (`--data real`), which the stand-in cannot."""
    if needs_values():
        raise NotSimulated(f"{call} with --data real", f"{why}; simulate without --data real")


def note(text: str) -> None:
    """Report an assumption of a stand-in once."""
    process = current_process()
    if process is not None:
        process.port.note(text)


def per_process(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function whose result is made once for each process of the simulation."""
    held: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def of_process() -> Any:
        process = current_process()
        if process not in held:
            held[process] = make()
        return held[process]

    return of_process


@dataclass(frozen=True)
class FusedKernel:
    """Forward and backward kernel of a library, for the tensors passed to `fused`."""

    name: str
    """`library::kernel`; its backward is `library::kernel_backward`."""
    reference: Callable[..., Any]
    """The same function by torch's operators. It computes values for `--data real`, and is used for tensors that are
    not plain GPU tensors.
    """
    kind: str = "custom"
    kernels: int = 1
    backward_kernels: int = 1
    passes: int = 1
    """Number of times that the tensors are read and written, in forward and in backward."""
    flops: int = 0
    backward_flops: int = 0
    dtype: str = ""
    """Data type in which flops are computed; empty: that of the first input."""
    saves: tuple[int, ...] | None = None
    """Indices of the inputs that backward reads; None: all."""
    saves_outputs: tuple[int, ...] = ()
    """Indices of the outputs that backward reads."""
    in_place: bool = False
    """Whether backward writes gradients into the saved tensors and needs no additional memory."""
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    """Shape and data type of each output; empty: one output like the first input."""


def fused(kernel: FusedKernel, *inputs: Tensor | None) -> Any:
    """Run *kernel* on *inputs* and return its output: a tensor, or a tuple of them."""
    plain = all(t is None or (t.is_cuda and type(t) in (Tensor, torch.nn.Parameter)) for t in inputs)
    if not plain or needs_values():
        return kernel.reference(*inputs)
    outputs = _Fused.apply(kernel, *inputs)
    return outputs[0] if len(outputs) == 1 else outputs


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: FusedKernel, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        first = next(t for t in inputs if t is not None)
        looks = kernel.outputs or ((tuple(first.shape), first.dtype),)
        outputs = tuple(torch.empty(shape, dtype=dtype, device=first.device) for shape, dtype in looks)
        read, written = inputs * kernel.passes, outputs * kernel.passes
        launch(kernel.name, read, written, flops=kernel.flops, kind=kernel.kind, kernels=kernel.kernels,
               dtype=kernel.dtype)  # fmt: skip
        saves = range(len(inputs)) if kernel.saves is None else kernel.saves
        ctx.kernel, ctx.numbers = kernel, [i for i in saves if inputs[i] is not None]
        ctx.save_for_backward(*(inputs[i] for i in ctx.numbers), *(outputs[i] for i in kernel.saves_outputs))
        ctx.looks = [None if t is None else (t.shape, t.dtype, t.device) for t in inputs]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        kernel, tensors = ctx.kernel, ctx.saved_tensors
        saved = dict(zip(ctx.numbers, tensors, strict=False))
        results: list[Tensor | None] = []
        for i, looks in enumerate(ctx.looks):
            if looks is None or not ctx.needs_input_grad[i + 1]:
                results.append(None)
            elif kernel.in_place and i in saved:
                results.append(saved[i].detach())
            else:
                results.append(torch.empty(looks[0], dtype=looks[1], device=looks[2]))
        read, written = [*tensors, *grads] * kernel.passes, results * kernel.passes
        launch(f"{kernel.name}_backward", read, written, flops=kernel.backward_flops,
               kind=kernel.kind, kernels=kernel.backward_kernels, dtype=kernel.dtype)  # fmt: skip
        return (None, *results)


# -- Cross entropy that computes its gradient in forward, into the memory of the logits (Liger, Transformer Engine).


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, logits: Tensor, labels: Tensor, reduced: bool) -> Tensor:
        losses = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        launch(name, [logits, logits, labels], [logits, losses], kind="softmax")
        ctx.name = name
        ctx.save_for_backward(logits.detach())
        return losses.mean() if reduced else losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (logits,) = ctx.saved_tensors
        if grad.dim() or not torch.equal(grad, torch.ones((), device=grad.device)):
            launch(f"{ctx.name}_backward", [logits, grad], [logits], kind="softmax")
        return None, logits, None, None


def cross_entropy(name: str, logits: Tensor, labels: Tensor, reduction: str, **options: Any) -> Tensor:
    """Return the loss of *logits* (..., classes), whose memory then holds their gradient.

    Args:
        name: Kernel, `library::kernel`.
        logits: Scores of the classes.
        labels: Numbers of classes, of the shape of *logits* without its last dimension.
        reduction: `none`, `mean` or `sum`.
        options: `ignore_index` and `label_smoothing`, as in torch.nn.functional.cross_entropy.
    """
    if needs_values() or not logits.is_cuda:
        losses = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1), reduction=reduction, **options
        )
        return losses.view(labels.shape) if reduction == "none" else losses
    out: Tensor = _CrossEntropy.apply(name, logits, labels, reduction != "none")
    return out
