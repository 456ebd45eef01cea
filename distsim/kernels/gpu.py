"""Costs of operators and fused kernels on one GPU, and of their launches on the host."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

from distsim.cluster import GpuModel
from distsim.errors import NotSimulated, UsageError
from distsim.kernels.cost import Cost, OperatorCall, tensors_in
from distsim.kernels.gpu_file import GpuFile, gpu_names, read_gpu
from distsim.kernels.pricing import Attention, Pricing, math_dtype
from distsim.kernels.rules import price
from distsim.kernels.rules.compute_bound import KnownKernel, library_cost

# -- Costs of custom operators, by name.

Amount = int | float | Callable[..., int | float]

COSTS: dict[str, tuple[Amount, Amount | None]] = {}
"""(flops, bytes) by operator name: `namespace::name`, or `namespace::name.overload`."""


def kernel_cost(fn: Any = None, *, flops: Amount = 0, bytes: Amount | None = None) -> Any:
    """Set the cost of a custom operator on simulated GPUs.

    The operator takes the longer of two times: its flops at the rate of the GPU's matrix products, and its bytes at the
    rate of the GPU's elementwise kernels. Can be used as a decorator:

        @distsim.kernel_cost(flops=lambda x, w: 2 * x.numel() * w.shape[-1])
        @torch.library.custom_op("my::product", mutates_args=())
        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor: ...

    Args:
        fn: The operator: the result of `torch.library.custom_op`, `torch.ops.my.op`, one of its overloads, or its name
            `"my::op"`. A Triton kernel has the name `"triton::name"`, one that the program
            compiles from CUDA source `"cuda::name"`. None: return a decorator.
        flops: Floating-point operations of one call: a number, or a function of the call's arguments.
        bytes: Bytes that one call moves through GPU memory: a number, or a function of the call's arguments. None:
            each tensor of the call is read or written once.

    Returns:
        *fn*, or the decorator.

    Raises:
        UsageError: *fn* is not an operator, or an amount is negative.
    """
    for name, amount in (("flops", flops), ("bytes", bytes)):
        if isinstance(amount, int | float) and amount < 0:
            raise UsageError(f"kernel_cost: expected {name} of 0 or more, got {amount}")
    if fn is None:
        return lambda operator: kernel_cost(operator, flops=flops, bytes=bytes)
    COSTS[_name(fn)] = (flops, bytes)
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


def has_custom_cost(name: str, overload: str) -> bool:
    """Return whether `kernel_cost` set a cost for this operator."""
    return name in COSTS or f"{name}.{overload}" in COSTS


def custom_cost(pricing: Pricing, call: OperatorCall) -> Cost | None:
    """Return the cost that `kernel_cost` set for this operator, or None."""
    overload = call.schema.overload_name
    amounts = COSTS.get(f"{call.name}.{overload}") if overload else None
    amounts = amounts or COSTS.get(call.name)
    if amounts is None:
        return None
    return _cost(pricing, amounts, call.args, call.kwargs, call.inputs, call.read + call.write)


def launch_cost(
    pricing: Pricing, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], moved: int, known: KnownKernel | None
) -> tuple[Cost, bool]:
    """Return the cost of one launch of a kernel, and whether it is known: by `kernel_cost`, or as *known*.

    Args:
        pricing: Prices of the GPU.
        name: Name of the kernel, `triton::name` or `cuda::name`.
        args: Positional arguments of the launch.
        kwargs: Keyword arguments of the launch.
        moved: Bytes that the launch moves, unless `kernel_cost(name, ...)` says otherwise.
        known: Price of a library's kernel; None for one that the program has written.
    """
    amounts = COSTS.get(name)
    inputs = tuple(tensors_in((args, kwargs)))
    if amounts is None and known is not None:
        return library_cost(pricing, known.kind, inputs, int(known.passes * moved)), True
    return _cost(pricing, amounts or (0, None), args, kwargs, inputs, moved), amounts is not None


def _cost(
    pricing: Pricing,
    amounts: tuple[Amount, Amount | None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: tuple[Any, ...],
    all_bytes: int,
) -> Cost:
    flops = int(_amount(amounts[0], args, kwargs))
    moved = int(_amount(amounts[1], args, kwargs)) if amounts[1] is not None else all_bytes
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
"""GPUs that share one name in cluster files; the memory size selects one."""


NAMED = 0.1
"""Relative difference up to which the memory in a cluster file means the GPU of the data file."""


class Gpu:
    """One GPU, created with `named`; `spec` is its data file."""

    def __init__(self, spec: GpuFile) -> None:
        self.spec = spec
        self._pricing = Pricing(spec)
        self.name = spec.name
        self.title = spec.title
        """Name as in torch.cuda.get_device_name."""
        self.compute_capability = spec.chip.compute_capability
        """90 for (9, 0)."""
        self.multiprocessors = spec.chip.multiprocessors
        self.memory_bytes = spec.chip.memory
        self.power_w = spec.chip.power
        """Maximum power in watts; 0 if it is not known."""
        self.memory_bandwidth = spec.chip.memory_bandwidth
        """Specified bandwidth in bytes/s."""
        self.l2_bytes = spec.chip.l2
        self.peak_flops: dict[str, float] = {str(name): rate for name, rate in spec.chip.flops.items()}
        """Dense flop/s by data type (fp64, fp32, tf32, fp16, bf16, fp8, fp4)."""
        self.context_bytes = spec.setup.context
        """Bytes of the CUDA context, outside the caching allocator."""
        self.host_op_s = spec.host.op
        """Seconds of the host for one eager operator that launches one kernel."""
        self.launch_s = spec.host.launch
        """Seconds from the launch on the host to the start of the kernel on an idle stream."""
        self.gap_s = spec.host.gap
        """Seconds between two kernels on a busy stream.

        `Cost.seconds` includes it between the kernels of one operator, not before the first.
        """
        self.sdpa_kernel: str = spec.attention.preferred
        """`flash` or `cudnn`: kernel of scaled_dot_product_attention for 16-bit operands without a mask tensor."""

    @classmethod
    def of(cls, model: GpuModel) -> Gpu:
        """Return the GPU that a cluster describes: its data file with the cluster's own figures."""
        return cls.named(
            model.model,
            memory=model.memory_bytes,
            memory_bandwidth=model.memory_bytes_per_s,
            flops=model.flops_per_s,
        )

    @classmethod
    def named(
        cls,
        model: str,
        *,
        memory: float | None = None,
        memory_bandwidth: float | None = None,
        flops: Mapping[str, float] | None = None,
    ) -> Gpu:
        """Return a GPU by name.

        Args:
            model: Name of the GPU as in a cluster file, or the path of a data file (.toml).
            memory: Bytes that replace the memory of the data file if they differ by more than a tenth.
            memory_bandwidth: Bytes/s that replace the bandwidth of the data file.
            flops: Dense peak rates in flop/s by data type that replace those of the data file. Attention follows
                products in bf16.

        Raises:
            UsageError: There is no data file for this GPU; the message lists the known ones.
        """
        if model.endswith(".toml"):
            return cls._with(read_gpu(model), memory, memory_bandwidth, flops)
        known = model.strip().lower().replace("_", "-").removeprefix("nvidia-").replace(" ", "-")
        known = _OTHER_NAMES.get(known, known)
        variants = _VARIANTS.get(known, ())
        if memory is not None and variants:
            given = memory
            known = min(variants, key=lambda name: abs(read_gpu(name).chip.memory - given))
        if known not in gpu_names():
            raise UsageError(f"expected a GPU that has a data file ({', '.join(gpu_names())}), got {model!r}")
        return cls._with(read_gpu(known), memory, memory_bandwidth, flops)

    @classmethod
    def _with(
        cls, spec: GpuFile, memory: float | None, memory_bandwidth: float | None, flops: Mapping[str, float] | None
    ) -> Gpu:
        chip = spec.chip
        if memory is None or abs(memory - chip.memory) < NAMED * chip.memory:
            memory = chip.memory  # the card's name: 80GB is 79.11 GiB
        given = chip.replaced(
            memory=int(memory),
            memory_bandwidth=memory_bandwidth or chip.memory_bandwidth,
            flops={**chip.flops, **(flops or {})},
        )
        gemm = spec.gemm.at(given, chip)
        share = given.peak("bf16") * gemm.sustained("bf16") / (chip.peak("bf16") * spec.gemm.sustained("bf16"))
        return cls(spec.replaced(chip=given, gemm=gemm, attention=spec.attention.scaled(share)))

    def cost(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Cost:
        """Return the cost of one call of an operator on an idle GPU.

        Only shapes, strides, dtypes and devices of tensors matter. An aten operator without a rule is priced by its
        bytes.

        Args:
            func: The operator, an OpOverload.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            result: What the call returned.

        Raises:
            NotSimulated: The operator is not from aten, and `kernel_cost` does not know it.
        """
        call = OperatorCall(func, args, kwargs, result)
        cost = custom_cost(self._pricing, call) or price(self._pricing, call)
        if cost is None:
            raise NotSimulated(
                f"the cost of the operator {call.name} on a GPU",
                f"set it with distsim.kernel_cost({call.name!r}, flops=..., bytes=...)",
            )
        return cost

    def launch_cost(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], moved: int, known: KnownKernel | None = None
    ) -> tuple[Cost, bool]:
        """Return the cost of a launch of the kernel *name*, and whether it is known (`kernel_cost`, or *known*)."""
        return launch_cost(self._pricing, name, args, kwargs, moved, known)

    def transfer(self, nbytes: int, *, to_device: bool, pinned: bool) -> Cost:
        """Return the cost of a copy between host and GPU."""
        return self._pricing.transfer(nbytes, to_device=to_device, pinned=pinned)

    def attention(self, call: Attention, nbytes: int) -> Cost:
        """Return the cost of FlashAttention's kernel for this shape, which moves *nbytes*."""
        return self._pricing.attention(call, "flash", nbytes)

    def slowest_of(self, count: int) -> float:
        """Return the factor by which the slowest of *count* GPUs is slower than the median one; 1 for one GPU.

        GPUs of one model differ in silicon and temperature (`spread` in the data file), and a job runs at the pace of
        the slowest. The factor applies to work that the clock limits.
        """
        return 1.0 + self.spec.chip.spread * _largest_of(max(1, count))

    def comm_load(self, channels: int, bytes_per_s: float | None = None) -> tuple[float, float]:
        """Return the share of multiprocessors and of memory bandwidth that a communication kernel takes.

        Args:
            channels: Number of channels; each takes one multiprocessor.
            bytes_per_s: Rate of the transfer (default: the most that the channels can move).
        """
        most = channels * self.spec.comm.channel_bandwidth
        moved = most if bytes_per_s is None else min(most, bytes_per_s)
        share = moved * self.spec.comm.touches / self.memory_bandwidth
        return min(1.0, channels / self.multiprocessors), min(1.0, share)


@cache
def _largest_of(count: int) -> float:
    """Return the expected largest of *count* normal deviates (Source: Blom's formula)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


# -- Fused kernels, as torch.compile makes them of consecutive elementwise operators.
#
# A fused kernel reads its inputs once and writes its outputs once, at the bandwidth of a plain kernel of its kind; a
# kernel that passes over its rows twice (the backward of a norm) reads its inputs twice. The second kernel of a sum of
# all reads the few results of the first. A fused kernel never costs more than its operators one by one. Costs of a
# compiled graph on the host were measured: meta-pytorch/tritonbench pull request 1016 has 33 us for a compiled function
# of one empty kernel, of it 6.5 us the kernel's launcher and 12 us all that lies below the compiled graph;
# pytorch/pytorch issue 191753 has 0.89 ms for the guards of qwen3-8b, which has 399 parameters.

FUSABLE = frozenset({"elementwise", "norm", "softmax", "reduction", "copy", "random"})
"""Kinds of operators that are fused; matrix products, attention, look-ups, sorts and optimizers are not."""
_REDUCING = frozenset({"norm", "softmax", "reduction"})
MOST_FUSED = 64
"""Maximum number of operators in one kernel (`max_fusion_size` in torch/_inductor/config.py)."""
KERNEL_S = 6.5e-6
"""Host time for each kernel of a compiled graph."""
GRAPH_S = 26.5e-6
"""Host time for each call of a compiled function without its kernels: 33 us less one kernel."""
GUARD_S = 2.2e-6
"""Host time for each parameter of a compiled module in each call: 0.89 ms for 399."""
BACKWARD_S = 5.5e-6
"""Host time for each backward of a compiled function: the wrapper of the graph."""


def fused_cost(gpu: Gpu, parts: Sequence[Cost], read: int, written: int) -> Cost:
    """Return the cost of *parts* as one kernel that reads and writes this many bytes.

    A single part that moves no less is unchanged.
    """
    if len(parts) == 1 and read + written >= parts[0].nbytes:
        return parts[0]
    memory = gpu.spec.memory
    kinds = {part.kind for part in parts}
    share = memory.reduction if kinds & _REDUCING else memory.elementwise
    kernels = max(part.kernels for part in parts)
    passes = max((part.kernels for part in parts if part.kind == "norm"), default=1)
    nbytes = passes * read + written
    seconds = kernels * memory.floor + (kernels - 1) * gpu.gap_s + nbytes / (gpu.memory_bandwidth * share)
    apart_s = sum(part.seconds for part in parts) + (len(parts) - 1) * gpu.gap_s
    longest = max(parts, key=lambda part: part.seconds)
    return Cost(min(seconds, apart_s), kernels, sum(part.flops for part in parts), nbytes, longest.kind, True)


# -- Host time of launching work on a GPU, by class of work, on the CPU that the cluster file names.
#
# Classes differ in cost by more than a factor of two. Module calls, data loading, logging and other Python code between
# operators are not charged.

RECORDED_SHARE = 1.5
"""Host time of an operator that autograd records, or that a backward pass runs, relative to the operator alone: the
node and its saved tensors, and the engine that calls it.

Source: eight operators with torch 2.13 on a core of an EPYC, CPU tensors, by kernel: forward 1.2 to 1.8 times, backward
0.8 to 3.0, the median of each 1.5. Published steps that launches bound want no less: a layer of vTrain's GPT of 1,024
channels takes 3.7 ms of a micro-batch on 1, 2 and 4 GPUs alike, and 3.1 ms so.
"""
VIEW_SHARE = 0.4
"""Host time of a view as a share of an operator's, because it launches no kernel.

Source: torch/benchmarks, about 2 of 5 us; on a core of an EPYC 7003 with torch 2.13, 1.9 of 4.5 us.
"""
WITHIN_MODEL = 2.63
"""Host time of Python and dispatch within a model, relative to a loop of the same call, whose code is in the caches.

Source: `_OPERATOR_S` at the speed of an EPYC 7003's core is 11.9 us; in a loop on such a core, torch 2.13 takes 4.5 us.
"""
AUTOGRAD_FUNCTION_S = WITHIN_MODEL * 12e-6
"""A torch.autograd.Function in Python, forward and backward together, beyond the operators that both call, of which
autograd records none.

Source: measured in a loop with torch 2.13 on a core of an EPYC 7003, CPU tensors: 16.6 us with one `clone` each way, of
which both clones are 4.5 us (tools/benchmarks/host_classes.py).
"""
TRITON_S = WITHIN_MODEL * 18e-6
"""A launch of a Triton kernel from Python: binding and specializing its arguments, the key of the cache, the grid.

Source: triton-lang/triton pull request 3648 (Triton 3.0): 18 us a launch in a loop, 49 us before it. Pull request 3503
measured 40 to 62 us with the Triton of torch 2.2, so programs of that time were slower.
"""
TRITON_WRAPPER_S = WITHIN_MODEL * 98e-6
"""A launch by Triton of a library's norm or rotary positions, with its 15 to 20 arguments, its checks and its guard of
the device.

Source: linkedin/Liger-Kernel benchmark/data/all_benchmark_data.csv at ead96b6: layer_norm and rope of small tensors
take 265 to 280 us forward and backward, on A100 (2024) and H100 (2025) alike, of which torch's engine is 26 us
(relu_squared's torch rows), a Function 12 us and some eight small operators 36 us; the rest is two launches.
"""
COLLECTIVE_S = 60e-6
"""A call of torch.distributed outside a batch: Python, ProcessGroupNCCL with its events and its work, NCCL's enqueue.

Source: pytorch/pytorch issue 138773, torch 2.4: 89 us for all_reduce, under the profiler, which is the upper end. The
lower end is 5 us of Python (tools/benchmarks/host_classes.py) as `WITHIN_MODEL` has it, four events of 1 us, and 13 to
17 us for NCCL's enqueue and launch, which is what nccl-tests shows of small all_reduces inside a node. Estimate:
between the two.
"""
MESSAGE_S = 28e-6
"""A send or receive inside a batch (`batch_isend_irecv`), whose events and launch are the batch's.

Estimate: 7 us of Python (tools/benchmarks/host_classes.py) as `WITHIN_MODEL` has it, and NCCL's enqueue without the
launch.
"""

_PER_CLOCK = {
    "zen2": 1 / 1.19,  # AMD: 19 % more instructions a clock in Zen 3
    "zen3": 1.0,  # the reference
    "zen4": 1.14,  # AMD at the launch of EPYC 9004: 14 % over Zen 3
    "zen5": 1.14 * 1.17,  # AMD at the launch of EPYC 9005: 17 % over Zen 4
    "skylake": 1 / 1.19,  # estimate: as Zen 2
    "ice lake": 1.0,  # Intel: 20 % over Cascade Lake
    "golden cove": 1.15,  # Intel at the launch of Sapphire Rapids: 15 % over Ice Lake
    # TransformerEngine issue 2053: torch's linear takes 33 us on a GH200, 37 us on a GB200, 13.5 us on a Xeon 8480C
    "neoverse v2": 0.52,
}
"""Instructions per clock relative to Zen 3, as published by the makers; Python was not measured on all of them."""
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
(tools/benchmarks/host_classes.py), a view at `VIEW_SHARE`.
"""
_OPERATOR_SPEED = 3.6 / 1.19
"""Estimate: the blog names no CPU; a Xeon Platinum 8275CL, which comes with A100 at AWS."""
_MEASURED_SPEED = 3.6
"""Speed of the core on which the other classes of host work were measured."""


@dataclass(frozen=True, slots=True)
class HostCpu:
    """Seconds of each class of work on one host."""

    operator_s: float
    """An eager operator that launches one kernel: Python, dispatch, autograd, launch."""
    view_s: float
    function_s: float
    triton_s: float
    triton_wrapper_s: float
    collective_s: float
    message_s: float
    cpu: str = ""
    """The core that the times are scaled to; empty where the cluster file's CPU is not known."""


def core_speed(model: str) -> tuple[str, float] | None:
    """Return the kind of core that a CPU of this name has and its speed, in GHz of Zen 3; None for an unknown name."""
    for pattern, core, clock in _CORES:
        if re.search(pattern, model):
            return core, clock * _PER_CLOCK[core]
    return None


def host_of(cpu_model: str, operator_s: float) -> HostCpu:
    """Return the host with CPUs of this name.

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
    return HostCpu(
        operator_s=operator_s,
        view_s=VIEW_SHARE * operator_s,
        function_s=AUTOGRAD_FUNCTION_S * slower,
        triton_s=TRITON_S * slower,
        triton_wrapper_s=TRITON_WRAPPER_S * slower,
        collective_s=COLLECTIVE_S * slower,
        message_s=MESSAGE_S * slower,
        cpu=core,
    )
