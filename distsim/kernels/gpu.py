"""One GPU: what operators and fused kernels cost on it, and what launching them costs the host."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

from distsim.errors import NotSimulated, UsageError
from distsim.kernels.cost import Call, Cost, tensors_in
from distsim.kernels.gpu_file import ChipSpec, GpuFile, gpu_names, read_gpu
from distsim.kernels.pricing import Attention, Pricing, math_dtype
from distsim.kernels.rules import price

__all__ = [
    "BACKWARD_S",
    "FUSABLE",
    "GRAPH_S",
    "GUARD_S",
    "KERNEL_S",
    "MOST_FUSED",
    "Gpu",
    "Host",
    "core_speed",
    "custom_cost",
    "fused_cost",
    "host_of",
    "kernel_cost",
    "triton_cost",
]

# -- What operators of the user's own cost: flops and bytes, said once, by the operator's name.

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


_OTHER_NAMES = {
    "a100-40gb": "a100",
    "a100-sxm4-40gb": "a100",
    "a100-sxm4-80gb": "a100-80gb",
    "h100-sxm": "h100",
    "h100-sxm5": "h100",
    "h200-sxm": "h200",
    "4090": "rtx4090",
    "rtx-4090": "rtx4090",
}
_VARIANTS = {"a100": ("a100", "a100-80gb")}
"""Of one name in cluster files: the memory says which."""


NAMED = 0.1
"""As far from a data file's memory a cluster file's may be and still mean the same card."""


class Gpu:
    """One GPU. Make it with `named`; `spec` is all of its data file."""

    def __init__(self, spec: GpuFile) -> None:
        self.spec = spec
        self._pricing = Pricing(spec)
        self.name = spec.name
        self.title = spec.title
        """As torch.cuda.get_device_name."""
        self.compute_capability = spec.chip.compute_capability
        """90 for (9, 0)."""
        self.multiprocessors = spec.chip.multiprocessors
        self.memory_bytes = spec.chip.memory
        self.memory_bandwidth = spec.chip.memory_bandwidth
        """Bytes a second, as specified."""
        self.l2_bytes = spec.chip.l2
        self.peak_flops: dict[str, float] = {str(name): rate for name, rate in spec.chip.flops.items()}
        """By data type (fp64, fp32, tf32, fp16, bf16, fp8, fp4), dense, a second."""
        self.context_bytes = spec.setup.context
        """Outside the caching allocator, from the first CUDA call on."""
        self.cublas_workspace_bytes = spec.setup.cublas_workspace
        """From the caching allocator, for each handle and stream, at the first product."""
        self.host_op_s = spec.host.op
        """What the host spends on one eager operator that launches one kernel."""
        self.launch_s = spec.host.launch
        """From the host's launch to the kernel's begin, on an idle stream."""
        self.gap_s = spec.host.gap
        """Between two kernels of a stream that is never empty. Cost.seconds has it between the kernels of one
        operator, not before its first."""
        self.h2d_bytes_per_s = spec.host.h2d
        self.d2h_bytes_per_s = spec.host.d2h
        self.pageable_bytes_per_s = spec.host.pageable
        self.sdpa_kernel: str = spec.attention.preferred
        """flash or cudnn: what scaled_dot_product_attention takes for 16-bit operands without a mask tensor."""

    @classmethod
    def named(cls, model: str, *, memory: float | None = None, memory_bandwidth: float | None = None) -> Gpu:
        """The GPU that a cluster file calls *model* (or the path of a data file, .toml); where the cluster file gives
        bytes of memory and bytes a second of bandwidth, they replace the data file's: memory within a tenth of it is
        the card's name (80GB), and stays as torch says it. A UsageError names the known ones."""
        if model.endswith(".toml"):
            return cls._with(read_gpu(model), memory, memory_bandwidth)
        known = model.strip().lower().replace("_", "-").removeprefix("nvidia-").replace(" ", "-")
        known = _OTHER_NAMES.get(known, known)
        variants = _VARIANTS.get(known, ())
        if memory is not None and variants:
            given = memory
            known = min(variants, key=lambda name: abs(read_gpu(name).chip.memory - given))
        if known not in gpu_names():
            raise UsageError(f"expected a GPU that has a data file ({', '.join(gpu_names())}), got {model!r}")
        return cls._with(read_gpu(known), memory, memory_bandwidth)

    @classmethod
    def _with(cls, spec: GpuFile, memory: float | None, memory_bandwidth: float | None) -> Gpu:
        if memory is not None and abs(memory - spec.chip.memory) < NAMED * spec.chip.memory:
            memory = None  # the card's name: 80GB is 79.11 GiB
        if memory is None and memory_bandwidth is None:
            return cls(spec)
        chip = vars(spec.chip) | {
            "memory": int(memory) if memory is not None else spec.chip.memory,
            "memory_bandwidth": memory_bandwidth if memory_bandwidth is not None else spec.chip.memory_bandwidth,
        }
        return cls(GpuFile(**(vars(spec) | {"chip": ChipSpec(**chip)})))

    def cost(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Cost:
        """What one call of an operator (an OpOverload) costs on an idle device.

        Of *args*, *kwargs* and *result* only shapes, strides, dtypes and devices of tensors are looked at. Operators of
        aten without a rule of their own are priced by their bytes; NotSimulated names an operator of elsewhere that
        `kernel_cost` has not been told of.
        """
        call = Call(func, args, kwargs, result)
        found = custom_cost(self._pricing, call) or price(self._pricing, call)
        if found is None:
            raise NotSimulated(
                f"what the operator {call.name} costs on a GPU",
                f"say it with distsim.kernel_cost({call.name!r}, flops=..., bytes=...)",
            )
        return found

    def triton_cost(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], moved: int) -> tuple[Cost, bool]:
        """What a launch of the Triton kernel *name* costs, and whether `kernel_cost` has been told of it."""
        return triton_cost(self._pricing, name, args, kwargs, moved)

    def attention(self, call: Attention, nbytes: int) -> Cost:
        """What fused attention of that shape, which moves *nbytes*, costs in FlashAttention's kernel."""
        return self._pricing.attention(call, "flash", nbytes)

    def slowest_of(self, count: int) -> float:
        """How many times as long what the clock limits takes on the slowest of *count* GPUs as on the middle one.

        They differ in their silicon and in how warm they get (the chip's `spread`), and a job that waits for all has
        the pace of the last. 1 for one GPU.
        """
        return 1.0 + self.spec.chip.spread * _largest_of(max(1, count))

    def comm_load(self, channels: int, bytes_per_s: float | None = None) -> tuple[float, float]:
        """What a communication kernel of so many channels takes from what runs beside it: a share of the
        multiprocessors (one a channel) and a share of the memory's bandwidth. *bytes_per_s* is what it moves, if known;
        it is no more than its channels can."""
        most = channels * self.spec.comm.channel_bandwidth
        moved = most if bytes_per_s is None else min(most, bytes_per_s)
        share = moved * self.spec.comm.touches / self.memory_bandwidth
        return min(1.0, channels / self.multiprocessors), min(1.0, share)


@cache
def _largest_of(count: int) -> float:
    """The expected largest of *count* normal deviates, by Blom's formula."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


# -- What torch's compiler makes of consecutive operators that only pass numbers through: one kernel.
#
# Its inputs are read once and its outputs written once, at the bandwidth that the GPU's data file gives a plain kernel
# of that sort; a kernel that goes over its rows twice (a norm's backward) reads its inputs twice. It is never dearer
# than its operators one by one. What a host does for a compiled graph was measured: meta-pytorch/tritonbench pull
# request 1016 has 33 us for a compiled function of one empty kernel, of it 6.5 us the kernel's launcher and 12 us all
# that lies below the compiled graph; pytorch/pytorch issue 191753 has 0.89 ms for the guards of qwen3-8b, which has
# 399 parameters.

FUSABLE = frozenset({"elementwise", "norm", "softmax", "reduction", "copy", "random"})
"""Kinds that merge; matrix products, attention, look-ups, sorts and optimizers stay kernels of their own."""
_REDUCING = frozenset({"norm", "softmax", "reduction"})
MOST_FUSED = 64
"""Operators of one kernel (`max_fusion_size` in torch/_inductor/config.py)."""
KERNEL_S = 6.5e-6
"""The host's, for each kernel of a compiled graph."""
GRAPH_S = 26.5e-6
"""The host's, for each call of a compiled function beside its kernels: 33 us less one kernel."""
GUARD_S = 2.2e-6
"""The host's, for each parameter of a compiled module and call: 0.89 ms for 399."""
BACKWARD_S = 5.5e-6
"""The host's, for each backward of a compiled function: the graph's own wrapper."""


def fused_cost(gpu: Gpu, parts: Sequence[Cost], read: int, written: int) -> Cost:
    """Of *parts* as one kernel that reads and writes so many bytes. One part alone stays what it is."""
    if len(parts) == 1:
        return parts[0]
    memory = gpu.spec.memory
    kinds = {part.kind for part in parts}
    share = memory.reduction if kinds & _REDUCING else memory.elementwise
    passes = max(part.kernels for part in parts)
    nbytes = passes * read + written
    seconds = passes * memory.floor + (passes - 1) * gpu.gap_s + nbytes / (gpu.memory_bandwidth * share)
    apart_s = sum(part.seconds for part in parts) + (len(parts) - 1) * gpu.gap_s
    longest = max(parts, key=lambda part: part.seconds)
    return Cost(min(seconds, apart_s), passes, sum(part.flops for part in parts), nbytes, longest.kind, True)


# -- What launching work on a GPU costs the host: by class of work, on the CPU that a cluster file names.
#
# The classes are those whose costs differ by more than a factor of two. What is in none of them (module calls, data
# loading, logging, a user's own Python between operators) is not charged.

VIEW_SHARE = 0.4
"""Of an operator: a view launches no kernel (torch/benchmarks: about 2 of 5 us; on a core of an EPYC 7003, torch 2.13,
1.9 of 4.5)."""
AUTOGRAD_FUNCTION_S = 10e-6
"""A torch.autograd.Function in Python, forward and backward together, beyond the operators that both call.

Source: measured with torch 2.13 on a core of an EPYC 7003, CPU tensors: 16.6 us with one `clone` each way, of which
clone and its node in C++ are 6.4 us (tests/benchmarks/host_classes.py).
"""
COLLECTIVE_S = 50e-6
"""A call of torch.distributed outside a batch: Python, ProcessGroupNCCL with its events and its work, NCCL's enqueue.

Source: pytorch/pytorch issue 138773, torch 2.4: 89 us for all_reduce, under the profiler, which is the upper end. The
lower end is 5 us of Python (tests/benchmarks/host_classes.py), four events of 1 us, and 13 to 17 us for NCCL's enqueue
and launch, which is what nccl-tests shows of small all_reduces inside a node. Estimate: between the two.
"""
MESSAGE_S = 20e-6
"""A send or receive inside a batch (`batch_isend_irecv`), whose events and launch are the batch's.

Estimate: 7 us of Python (tests/benchmarks/host_classes.py), and NCCL's enqueue without the launch.
"""

_PER_CLOCK = {
    "zen2": 1 / 1.19,  # AMD: 19 % more instructions a clock in Zen 3
    "zen3": 1.0,  # the reference
    "zen4": 1.14,  # AMD at the launch of EPYC 9004: 14 % over Zen 3
    "zen5": 1.14 * 1.17,  # AMD at the launch of EPYC 9005: 17 % over Zen 4
    "skylake": 1 / 1.19,  # estimate: as Zen 2
    "ice lake": 1.0,  # Intel: 20 % over Cascade Lake
    "golden cove": 1.15,  # Intel at the launch of Sapphire Rapids: 15 % over Ice Lake
    "neoverse v2": 1.0,  # estimate: as Zen 3
}
"""Instructions a clock beside Zen 3, as the makers state them; nobody measured Python on all of them."""
_CORES: tuple[tuple[str, str, float], ...] = (
    # pattern in the model's name, core, GHz of one busy core as specified
    (r"EPYC 7\w\w2", "zen2", 3.4),  # AMD: EPYC 7742
    (r"EPYC 7\w\w3", "zen3", 3.6),  # AWS: p5's EPYC 7R13
    (r"EPYC 9\w\w4", "zen4", 3.75),  # AMD: EPYC 9554
    (r"EPYC 9\w\w5F", "zen5", 5.0),  # AMD: EPYC 9575F
    (r"EPYC 9\w\w5", "zen5", 4.1),  # AMD: EPYC 9655, its clock on one core less what many cores cost
    (r"Xeon.* 82\d\d", "skylake", 3.6),  # AWS: p4d's 8275CL, all cores
    (r"Xeon.* [86]3\d\d", "ice lake", 3.4),  # Intel: 8358
    (r"Xeon.* 8[45]\d\d", "golden cove", 3.8),  # Intel: 8480
    (r"Xeon.* 67\d\dP", "golden cove", 4.0),  # estimate: Intel's 6776P between its base and 4.6 GHz
    (r"Grace", "neoverse v2", 3.4),  # NVIDIA: Grace
)
_OPERATOR_S = 14.1e-6
"""An eager operator within a model, on `_OPERATOR_SPEED`. In a loop of one operator it is a third of that: its code is
in the caches then.

Source: pytorch.org/blog/accelerating-generative-ai-2 (2023-11): Llama-7B, eager, 25.5 tokens a second on an A100 and
bound by the CPU, so 1.22 ms for each of 32 layers, which launch 61 kernels and make 65 views
(tests/benchmarks/host_classes.py), a view at `VIEW_SHARE`.
"""
_OPERATOR_SPEED = 3.6 / 1.19
"""Estimate: the blog names no CPU; a Xeon Platinum 8275CL, which comes with A100 at AWS."""
_MEASURED_SPEED = 3.6
"""Of the core on which the other classes were measured."""


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds of each class of work on one host."""

    operator_s: float
    """An eager operator that launches one kernel: Python, dispatch, autograd, launch."""
    view_s: float
    function_s: float
    collective_s: float
    message_s: float
    cpu: str = ""
    """The core that the times are scaled to; empty where the cluster file's CPU is not known."""


def core_speed(model: str) -> tuple[str, float] | None:
    """The kind of core that a CPU of this name has and its speed, in GHz of Zen 3; None for an unknown name."""
    for pattern, core, clock in _CORES:
        if re.search(pattern, model):
            return core, clock * _PER_CLOCK[core]
    return None


def host_of(cpu_model: str, operator_s: float) -> Host:
    """The host with CPUs of this name.

    Args:
        cpu_model: as the cluster file names them.
        operator_s: seconds of an operator on hosts that come with the GPU, for a CPU whose core is not known.
    """
    known = core_speed(cpu_model)
    if known is not None:
        core, speed = known
        operator_s = _OPERATOR_S * _OPERATOR_SPEED / speed
        slower = _MEASURED_SPEED / speed
    else:
        core, slower = "", operator_s / _OPERATOR_S * _MEASURED_SPEED / _OPERATOR_SPEED
    return Host(
        operator_s=operator_s,
        view_s=VIEW_SHARE * operator_s,
        function_s=AUTOGRAD_FUNCTION_S * slower,
        collective_s=COLLECTIVE_S * slower,
        message_s=MESSAGE_S * slower,
        cpu=core,
    )
