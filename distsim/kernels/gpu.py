"""One GPU: what its data file says, and what an operator costs on it."""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import Any

from distsim.errors import NotSimulated, UsageError
from distsim.kernels.attention import Attention
from distsim.kernels.call import Call
from distsim.kernels.cost import Cost
from distsim.kernels.custom import custom_cost, triton_cost
from distsim.kernels.gpu_file import ChipSpec, GpuFile, gpu_names, read_gpu
from distsim.kernels.pricing import Pricing
from distsim.kernels.rules import price

__all__ = ["Gpu"]

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
