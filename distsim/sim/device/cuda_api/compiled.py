"""torch.compile, attention kernels and other choices of torch on a simulated GPU."""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend

from distsim.errors import NotSimulated
from distsim.sim.device.cuda_api.tensors import with_gpus
from distsim.sim.device.memory import accelerators_of
from distsim.sim.isolation.for_ranks import for_ranks, name_for_ranks, patch_for_ranks
from distsim.sim.isolation.modules.own_code import launch
from distsim.sim.isolation.modules.patch_table import Patch
from distsim.sim.isolation.process import RankTask, current_task
from distsim.sim.isolation.torch_state.torch_state import STATE
from distsim.torch_compat import compiler as compiler_names
from distsim.torch_compat import cuda_api as cuda_names
from distsim.torch_compat import device as device_names
from distsim.torch_compat.compiler import has_hooks_of_the_program
from distsim.torch_compat.device import aten
from distsim.torch_compat.names import TorchName
from distsim.torch_compat.state import FLAGS_IN_C

# -- torch.compile on simulated GPUs, which runs what it is given as it is, and launches of Triton kernels.


EAGER = "torch.compile: compiled code runs eagerly and is priced operator by operator (--no-fuse); nothing is fused"
FUSED = (
    "torch.compile: compiled code runs eagerly and is priced as one graph of fused kernels a call (--no-fuse: operator "
    "by operator); graph breaks and the time to compile are not in it"
)
NOT_PIPELINED = (
    "async TP of the compiler (_micro_pipeline_tp) is not simulated: products and their collectives run one after the "
    "other; torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter, if called, overlap them"
)


def _compile(task: RankTask, model: Any = None, **options: Any) -> Any:
    if model is None:
        return lambda given: _compile(task, given, **options)
    if options.get("disable"):
        return model
    replays = options.get("mode") in ("reduce-overhead", "max-autotune")  # these use CUDA graphs
    replays = bool((options.get("options") or {}).get("triton.cudagraphs", replays))
    _replace_warning()
    task.port.note(FUSED if task.port.facts.data.fuse else EAGER)
    config = sys.modules.get(compiler_names.MICRO_PIPELINE_TP.path.rpartition(".")[0])
    if config is not None and getattr(config, compiler_names.MICRO_PIPELINE_TP.attribute, False):
        task.port.note(NOT_PIPELINED)
    if not isinstance(model, torch.nn.Module):
        module = getattr(model, "__self__", None)
        if isinstance(module, torch.nn.Module):  # Module.compile() gives its own call
            return _graph(model, type(module), module, replays)
        return _graph(model, model, None, replays)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of global hooks: those are ours
        return compiler_names.OPTIMIZED_MODULE.get()(model, _AsItIs(model, replays))


_compiled: dict[RankTask, int] = {}
"""Threads that are in compiled code, and in how many functions of it."""


_replaced: list[tuple[Any, str, Any]] = []
"""(holder, attribute, torch's own) of flex_attention's warning, while it is replaced."""


def _replace_warning() -> None:
    """Suppress flex_attention's warning in compiled code that it is slow because it was not compiled.

    This is done at the first use of torch.compile: from torch 2.14 on, flex_attention's module imports sympy, which
    takes 0.4 s.
    """
    if _replaced:
        return
    with STATE.everyones():
        real = compiler_names.WARN_ONCE.get()

        def warn_once(task: RankTask, *args: Any, **kwargs: Any) -> None:
            if task not in _compiled:
                real(*args, **kwargs)

        for holder, name, ours in compiler_names.WARN_ONCE.replaced_by(for_ranks(real, warn_once)):
            _replaced.append((holder, name, real))
            setattr(holder, name, ours)


def give_back_warning() -> None:
    """Undo `_replace_warning`."""
    while _replaced:
        setattr(*_replaced.pop())


class _AsItIs:
    """Replacement for the compiler's context of a module (torch._dynamo.eval_frame._TorchDynamoContext)."""

    def __init__(self, module: torch.nn.Module, replays: bool) -> None:
        self._module, self._replays = weakref.ref(module), replays
        self._kind = type(module)

    def __call__(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return _graph(call, self._kind, self._module(), self._replays)

    def __deepcopy__(self, memo: Any) -> _AsItIs:
        return self


def _graph(call: Callable[..., Any], named: Any, module: torch.nn.Module | None, replays: bool) -> Callable[..., Any]:
    """Return *call* with kernels that are priced as one compiled graph, or as a CUDA graph (timeline/fusion.py)."""
    name = getattr(named, "__qualname__", type(named).__name__)
    parameters = 0 if module is None else sum(1 for _ in module.parameters())
    own = None if module is None else weakref.ref(module)

    @functools.wraps(call)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        if task is None or task.process.accelerators is None:
            return call(*args, **kwargs)
        fusion, around = task.process.accelerators.fusion, _compiled.get(task, 0)
        _compiled[task] = around + 1
        try:
            if fusion is None:
                return call(*args, **kwargs)
            return fusion.run(functools.partial(call, *args, **kwargs), task, name, parameters, replays, own)
        finally:
            if around:
                _compiled[task] = around
            else:
                del _compiled[task]

    return compiled


def compiled_patches() -> list[Patch]:
    """Return patches (holder, attribute, replacement) for the compiler and Triton."""
    # torch remembers what it is told first; ranks can import a stand-in for Triton
    compiler_names.HAS_TRITON_PACKAGE.get()()
    patches: list[Patch] = [
        (torch, "compile", with_gpus(torch.compile, _compile)),
        *name_for_ranks(compiler_names.HAS_ANY_GLOBAL_HOOK, lambda task: has_hooks_of_the_program()),
    ]
    return [*patches, *_names_of_graphs(), *_triton_patches(), *_cuda_source_patches()]


def _names_of_graphs() -> list[Patch]:
    """Define the names that torch._dynamo.reset imports in a CUDA build, in a torch without them."""
    ours = (
        (cuda_names.ALLOCATOR_STATE, type(cuda_names.ALLOCATOR_STATE.attribute, (), {})),
        (cuda_names.SET_CACHED_TENSORS_ENABLED, lambda enabled: None),
    )
    return [(name.holder(), name.attribute, value) for name, value in ours if not name.exists()]


def _triton_patches() -> list[Patch]:
    """Return patches of the launches of an installed Triton, which CUDA builds of torch bring; distsim.libraries
    replaces a missing one.
    """
    patches: list[Patch] = [
        (torch.library, "wrap_triton", for_ranks(torch.library.wrap_triton, lambda task, kernel: kernel))
    ]
    for module, name in (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner")):
        kernel = getattr(sys.modules.get(module), name, None)
        if kernel is not None:
            patches.append(patch_for_ranks(kernel, "run", _run))
    return patches


def _run(_: RankTask, self: Any, *args: Any, **kwargs: Any) -> None:
    if hasattr(self, "configs"):  # an Autotuner, whose callers ask what it has chosen
        self.best_config = self.configs[0]
    function = getattr(self, "base_fn", None) or self.fn
    launch(f"triton::{function.__name__}", args, kwargs, function)


# -- Kernels that a program compiles from CUDA source: priced where they are launched, as Triton's are.


class _CudaKernel:
    """A kernel of `torch.cuda._compile_kernel`."""

    def __init__(self, name: str) -> None:
        self._qualname = f"cuda::{name}"  # what distsim.kernel_cost asks for

    def __call__(
        self, grid: Any = (1, 1, 1), block: Any = (1, 1, 1), args: Any = None, shared_mem: int = 0, stream: Any = None
    ) -> None:
        tensors = [arg for arg in args or () if isinstance(arg, torch.Tensor)]
        if any(not tensor.is_cuda and not tensor.is_pinned() for tensor in tensors):
            raise ValueError("All tensor arguments must be CUDA tensors or pinned CPU tensors")  # as torch says it
        with torch.cuda.stream(stream):
            launch(self._qualname, tuple(args or ()), {})

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """Set how much shared memory a launch may take, which has no effect on its simulated time."""


class _ElementwiseKernel:
    """A kernel of `torch.cuda.jiterator`: its results have the shape and the type of its arguments together."""

    def __init__(self, code: str, outputs: int, defaults: dict[str, Any]) -> None:
        name = re.search(r"(\w+)\s*\(", code)
        self._qualname = f"cuda::{name[1] if name else 'jiterator'}"
        self._outputs, self._defaults = outputs, defaults

    def __call__(self, *tensors: torch.Tensor, **kwargs: Any) -> Any:
        for name in kwargs.keys() - self._defaults.keys():
            raise KeyError(f"{name} is not declared in function definition")  # as torch says it
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
        results = tuple(torch.empty(shape, dtype=dtype, device=tensors[0].device) for _ in range(self._outputs))
        launch(self._qualname, (*tensors, *results), {})
        return results if self._outputs > 1 else results[0]


def _cuda_source_patches() -> list[Patch]:
    answers: tuple[tuple[TorchName, Callable[..., Any]], ...] = (
        (
            cuda_names.MODULE["_compile_kernel"],
            lambda task, kernel_source, kernel_name, *_, **__: _CudaKernel(kernel_name),
        ),
        (cuda_names.CREATE_JIT_FN, lambda task, code_string, **defaults: _ElementwiseKernel(code_string, 1, defaults)),
        (
            cuda_names.CREATE_MULTI_OUTPUT_JIT_FN,
            lambda task, code_string, num_outputs, **defaults: _ElementwiseKernel(code_string, num_outputs, defaults),
        ),
    )
    patches: list[Patch] = []
    for function, ours in answers:
        patches += name_for_ranks(function, ours)
    return patches


# -- scaled_dot_product_attention on simulated GPUs takes the operator that it takes on CUDA.
#
# torch chooses in C++, by a table that a build without CUDA leaves empty; autograd then sees the operators of the
# mathematical form, whose memory and time are others. The rules are those of aten/src/ATen/native/transformers/cuda/
# sdp_utils.cpp (torch 2.13) for dense tensors: which backends the program allows, in its order or else in torch's:
# flash attention, the memory-efficient one, the formula; cuDNN's first where the GPU's data file says so.

_priority = FLAGS_IN_C["_get_sdp_priority_order"].get()
_BACKENDS = {int(backend): backend for backend in SDPBackend.__members__.values()}
_TORCHS_ORDER = [_BACKENDS[number] for number in _priority()]
"""Before a program has set another (`sdpa_kernel(..., set_priority=True)`)."""
_HALVES = (torch.float16, torch.bfloat16)
_MOST_OF_FLASH = 256
"""Elements of a head (check_head_dim_size_flash)."""
_CUDNN_HEADS = 128
"""Maximum head dimension of queries, keys and values, except for DeepSeek's 192 and 128.

Source: check_cudnn_tensor_shapes; cuDNN 9.11 on compute capability 9.0 and 10.
"""


def choice(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, grouped: bool, cudnn_first: bool
) -> SDPBackend:
    """Return the attention backend that torch selects on CUDA; `ERROR` if the program allows none that fits."""
    order = [_BACKENDS[number] for number in _priority()]
    if order == _TORCHS_ORDER and cudnn_first and mask is None:
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    four = all(t.dim() == 4 for t in (query, key, value))
    last = four and all(t.stride(-1) == 1 for t in (query, key, value))
    heads = head, value_head = query.shape[-1], value.shape[-1]
    square = query.shape[-2] == key.shape[-2]
    same_heads = four and query.shape[1] == key.shape[1] == value.shape[1]
    some = query.numel() > 0 and key.numel() > 0
    last = last and head == key.shape[-1] and query.shape[0] == key.shape[0] == value.shape[0]
    half, plain = query.dtype in _HALVES, square or not causal
    fits = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled() and last and some and half and plain and mask is None
        and head == value_head and head <= _MOST_OF_FLASH and (same_heads or grouped),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled() and last and some and same_heads
        and (half or query.dtype is torch.float32) and not (mask is not None and mask.requires_grad),
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled() and last and some and half and plain
        and (max(heads) <= _CUDNN_HEADS or (cudnn_first and heads == (192, 128))) and not any(h % 8 for h in heads)
        and (same_heads or grouped),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
    }  # fmt: skip
    return next((backend for backend in order if fits.get(backend)), SDPBackend.ERROR)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    task = current_task()
    if task is None:
        raise NotSimulated("scaled_dot_product_attention on CUDA tensors outside a rank")
    _validate(query, key, value, attn_mask)
    if is_causal and attn_mask is not None:
        raise RuntimeError("_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    preferred = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"  # torch before 2.7 does not prefer cuDNN's
    cudnn_first = preferred and task.process.accelerators.model.sdpa_kernel == "cudnn"
    taken = choice(query, key, value, attn_mask, is_causal, enable_gqa, cudnn_first)
    if taken is SDPBackend.ERROR:
        raise RuntimeError("No available kernel. Aborting execution.")
    if taken is SDPBackend.MATH:
        out: Tensor = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return out
    head = query.shape[-1]
    keeps = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if taken is SDPBackend.FLASH_ATTENTION:
        if scale is None:
            scale = 1.0 / math.sqrt(head)
        spare = -head % 8
        if spare:  # pad_last_dim
            query, key, value = (torch.nn.functional.pad(t, (0, spare)) for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :head] if spare else out
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    if taken is SDPBackend.CUDNN_ATTENTION:
        outputs = aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, keeps, dropout_p, is_causal, False, scale=scale
        )
    else:
        outputs = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, keeps, dropout_p, is_causal, scale=scale
        )
    first: Tensor = outputs[0]
    return first


def _validate(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Raise torch's errors of validate_sdpa_input (native/transformers/attention.cpp), by empty tensors on the CPU."""
    three = query, key, value
    if (
        len({t.dtype for t in three}) > 1
        or min(t.dim() for t in three) < 2
        or (mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype))
    ):
        nothing = [torch.empty((0,) * t.dim(), dtype=t.dtype, device="cpu") for t in three]
        aten.scaled_dot_product_attention(
            *nothing, None if mask is None else torch.empty((0,) * mask.dim(), dtype=mask.dtype, device="cpu")
        )


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the bias that is added to the scores (convert_boolean_attn_mask, preprocess_mask)."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def register_attention() -> torch.library.Library:
    """Register an attention kernel, which is in force until it is destroyed."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCUDA", "CUDA"):
        library.impl("scaled_dot_product_attention", _attention, key)
    return library


# -- CUDA kernels where the rank's dispatch mode does not look: code of torch that switches dispatch to Python off.
#
# FSDP's `no_dispatch()` and the readers of checkpoints do so. What comes here then: operators whose only kernel would
# go on to a table of functions that a build without CUDA leaves empty ("missing kernel for cuda",
# ATen/native/DispatchStub.cpp), and a few that have a kernel for each device. A build with CUDA has kernels for all of
# them, which look for a GPU and for data: ours stand in their place as long as a simulation runs.


_HAS_KERNELS = torch.version.cuda is not None or torch.version.hip is not None
_PLAIN = frozenset(
    {"record_stream", "empty.memory_format", "empty_strided", "as_strided", "view", "_local_scalar_dense", "resize_",
     "set_.source_Storage_storage_offset", "fill_.Scalar", "zero_", "cat", "add.Tensor", "mul.Tensor", "_reshape_alias"}
)  # fmt: skip
"""Operators with a kernel for each device that such code calls."""
_FUSED = frozenset({"_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward", "mish_backward"})
"""Operators that torch decomposes if no device has a kernel for them. The parts launch more kernels and keep more
memory.
"""


_registered: list[torch.library.Library] = []


def register_kernels() -> None:
    """Register the simulator's kernels, before the first use of a GPU."""
    if _registered:
        return
    aten = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they stand in the place of others, which is the point
        for name in device_names.DISPATCH_GET_ALL_OP_NAMES.get()():
            if name.startswith("aten::") and _is_ours(name):
                operator = _operator(name)
                aten.impl(operator, functools.partial(_as_the_mode, operator), "CUDA")
        _registered.extend([register_attention(), aten])


def give_back_kernels() -> None:
    """Restore the kernels of a CUDA build of torch after a simulation.

    A CPU build has no tensor that reaches ours, and keeps them, because registering takes a quarter of a second.
    """
    if _HAS_KERNELS:
        while _registered:
            _registered.pop()._destroy()


def _is_ours(name: str) -> bool:
    """Return whether an operator needs an implementation here; views that torch composes of others do not."""
    has = device_names.DISPATCH_HAS_KERNEL_FOR_DISPATCH_KEY.get()
    if has(name, "CUDA"):
        return _HAS_KERNELS
    if name.removeprefix("aten::") in _PLAIN | _FUSED:
        return True
    return bool(has(name, "CompositeExplicitAutograd")) and not _operator(name).is_view


def _operator(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _as_the_mode(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the answer of the running thread's mode."""
    task = current_task()
    if task is None or task.dispatch_mode is None:
        raise NotSimulated(f"{operator} on CUDA tensors outside a simulated rank")
    accelerators_of(task.process)
    return task.dispatch_mode.__torch_dispatch__(operator, (), args, kwargs)


def fake_patches() -> list[Patch]:
    """Return patches (holder, attribute, replacement) for code that fake tensors are remembered by: torch does so
    for the whole process, and "cuda" without a number is the current GPU, which each process has its own of.
    """
    real: Any = device_names.CACHE_KEY.get()

    def key(self: Any, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        result = real(self, state, func, args, kwargs)
        task = current_task()
        if task is None or not task.cuda_device:
            return result
        return device_names.DISPATCH_CACHE_KEY.get()((*result.key, task.cuda_device))

    return device_names.CACHE_KEY.replaced_by(key)
