"""Fused kernels of libraries as single operators, each with a price and a gradient."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distsim.errors import NotSimulated
from distsim.kernels import library_kernel
from distsim.sim.isolation.process import current_task
from distsim.sim.kernel.task import current_process

_SCHEMA = "(Tensor[] read, Tensor(a!)[] written, int flops, str kind, int kernels, str dtype, int[] shape) -> ()"


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
    shape: Sequence[int] = (),
    triton: bool = False,
) -> None:
    """Launch the kernel *name* (`library::kernel`), whose price is that of `distsim.kernels.library_kernel`.

    A launch by Triton (*triton*) takes the host longer than an operator.
    """
    arguments = ([t for t in read if t is not None], [t for t in written if t is not None])
    task = current_task()
    if triton and task is not None and task.process.accelerators is not None:
        accelerators = task.process.accelerators
        accelerators.works_on_host(task, kernels * accelerators.host.triton_wrapper_s - accelerators.host.operator_s)
    _operator(name)(*arguments, flops, kind, kernels, dtype, list(shape))


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
    backward_kernels: int = 1
    saves: tuple[int, ...] | None = None
    """Indices of the inputs that backward reads; None: all."""
    saves_outputs: tuple[int, ...] = ()
    """Indices of the outputs that backward reads."""
    triton: bool = False
    """Whether Triton launches it."""
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    """Shape and data type of each output; empty: one output like the first input."""


def fused(kernel: FusedKernel, *inputs: Tensor | None) -> Tensor:
    """Run *kernel*, which has one output, on *inputs*."""
    (out,) = fused_outputs(kernel, *inputs)
    return out


def fused_outputs(kernel: FusedKernel, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Run *kernel* on *inputs* and return its outputs."""
    plain = all(t is None or (t.is_cuda and type(t) in (Tensor, torch.nn.Parameter)) for t in inputs)
    if not plain or needs_values():
        done = kernel.reference(*inputs)
        return done if isinstance(done, tuple) else (done,)
    outputs: tuple[Tensor, ...] = _Fused.apply(kernel, *inputs)
    return outputs


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: FusedKernel, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        first = next(t for t in inputs if t is not None)
        looks = kernel.outputs or ((tuple(first.shape), first.dtype),)
        outputs = tuple(torch.empty(shape, dtype=dtype, device=first.device) for shape, dtype in looks)
        launch(kernel.name, inputs, outputs, kind=kernel.kind, triton=kernel.triton)
        saves, ctx.kernel = range(len(inputs)) if kernel.saves is None else kernel.saves, kernel
        ctx.save_for_backward(*(inputs[i] for i in saves), *(outputs[i] for i in kernel.saves_outputs))
        ctx.looks = [None if t is None else (t.shape, t.dtype, t.device) for t in inputs]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        kernel = ctx.kernel
        results = [
            torch.empty(looks[0], dtype=looks[1], device=looks[2]) if looks is not None and needed else None
            for looks, needed in zip(ctx.looks, ctx.needs_input_grad[1:], strict=True)
        ]
        kind = "norm backward" if kernel.kind == "norm" and kernel.triton else kernel.kind
        launch(f"{kernel.name}_backward", [*ctx.saved_tensors, *grads], results, kind=kind,
               kernels=kernel.backward_kernels, triton=kernel.triton)  # fmt: skip
        return (None, *results)
