"""Schema of a GPU's data file, and a check that reports every fault with its path in the file.

`base = "h100"` inherits from that file every value that this one does not give.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError

from distsim.errors import UsageError
from distsim.text.file_tables import (
    Bandwidth,
    Dtype,
    FileTable,
    Flops,
    Fraction,
    Memory,
    Text,
    Time,
    complaints,
    near,
)
from distsim.text.file_tables import key as _key
from distsim.text.untrusted_input import LARGEST_SOURCE, brief, faulty, load_toml, read_bytes

Factor = Annotated[float, Field(gt=0, le=1.25)]
Positive = Annotated[int, Field(ge=1, le=65_536, strict=True)]
Ratio = Annotated[float, Field(gt=0, le=4)]
Sources = Annotated[int, Field(ge=0, le=99, strict=True)]
_RANGE = "lowest and highest rate in this file's sources, relative to these: part of the interval around a step"
_SOURCES = "independent sources of these rates; 0: they are estimates, or borrowed from another card"


class ChipSpec(FileTable):
    """Specified properties of the chip."""

    compute_capability: Annotated[int, Field(ge=0, le=200, strict=True)] = _key("90 for sm_90; 0 for GPUs without CUDA")
    multiprocessors: Positive = _key("SMs, or compute units")
    memory: Memory = _key("memory of one GPU")
    memory_bandwidth: Bandwidth = _key("memory bandwidth of one GPU")
    l2: Memory = _key("last level cache")
    flops: dict[Dtype, Flops] = _key("peak rate by data type, dense")
    power: Annotated[float, Field(ge=0)] = _key("specified power limit in watts; 0: unknown", 0.0)
    spread: Annotated[float, Field(ge=0, le=0.1)] = _key(
        "standard deviation of speed among GPUs of this model; the slowest of many GPUs sets their pace",
        0.0,
    )

    def peak(self, dtype: str) -> float:
        """Return the peak rate for *dtype*, or that of fp32 if the file has none."""
        rates: dict[str, float] = {str(name): rate for name, rate in self.flops.items()}
        return rates.get(dtype, rates["fp32"])


class MemorySpec(FileTable):
    """Shares of the memory bandwidth that kernels reach, by class of operator."""

    floor: Time = _key("time of a kernel beyond the transfer of its bytes: its start, its last wave, its end")
    elementwise: Fraction = _key("one thread for each element, contiguous")
    strided: Fraction = _key("operators whose input and output differ in their fastest dimension, such as a transpose")
    reduction: Fraction = _key("sums, means, norms of one tensor")
    norm: Fraction = _key("layer, rms, group and batch norm forward")
    norm_backward: Annotated[float, Field(gt=0)] = _key(
        "elements per second of norm backward, which is not bandwidth-bound"
    )
    softmax_short: Fraction = _key("softmax forward of rows that a warp holds: up to 1,024 values")
    softmax: Fraction = _key("softmax and log_softmax forward of rows that shared memory holds")
    softmax_long: Fraction = _key("softmax forward of rows that do not fit into shared memory")
    softmax_backward: Fraction = _key("gradient and output read, gradient written, of rows that do not fit")
    gather: Fraction = _key("embedding and index reads")
    scatter: Fraction = _key("embedding's gradient and index writes")
    optimizer: Fraction = _key("fused and foreach optimizers")
    random: Fraction = _key("dropout and random numbers")
    range: tuple[Ratio, Ratio] = _key(_RANGE)
    sources: Sources = _key(_SOURCES)


class GemmSpec(FileTable):
    """Matrix products: tiles on multiprocessors, limited by a plateau that the power limit sets."""

    plateau: dict[Dtype, Factor] = _key("fraction of the peak that large products sustain under the power limit")
    range: dict[Dtype, tuple[Factor, Factor]] = _key(
        "lowest and highest plateau that this file's sources have: part of the interval around a step", {}
    )
    sources: Sources = _key("independent sources of the plateau of bf16; 0: none, it is borrowed from another card", 1)
    mma: Factor = _key("fraction of its peak that a multiprocessor reaches in the main loop, at boost clock")
    tiles: dict[str, Factor] = _key("rate of a tile of rows x columns, relative to the largest tile")
    tile_overhead: Time = _key("prologue and epilogue of a tile of 32,768 elements")
    split_k: bool = _key("whether a grid that does not fill the device is split along k", True)
    persistent: bool = _key(
        "whether a product has as many blocks as there are SMs, so that it takes two rounds beside a collective", False
    )
    memory: Fraction = _key("fraction of the memory bandwidth that operands and result reach")
    sharpness: Annotated[float, Field(ge=1, le=50)] = _key(
        "p of the p-norm that combines the limits of tiles, plateau and memory"
    )
    floor: Time = _key("time of one kernel beyond its work")
    conv: Factor = _key("rate of a convolution relative to the matrix product of the same size")
    grouped: Factor = _key("rate of a grouped product relative to the same tiles in one product")
    unaligned: Factor = _key("rate of operands whose rows are not a multiple of 16 bytes, relative to others", 0.37)

    def sustained(self, dtype: str) -> float:
        """Return the plateau of *dtype*; that of bf16 if the file has none."""
        plateaus: dict[str, float] = {str(name): share for name, share in self.plateau.items()}
        return plateaus.get(dtype, plateaus["bf16"])

    def time_factors(self, dtype: str) -> tuple[float, float]:
        """Return the shortest and the longest time of large products in the sources, relative to that at the plateau;
        a data type without a range of its own has that of bf16."""
        ranges: dict[str, tuple[float, float]] = {str(name): ends for name, ends in self.range.items()}
        if not ranges:
            return 1.0, 1.0
        dtype = dtype if dtype in ranges else "bf16"
        low, high = ranges[dtype]
        return self.sustained(dtype) / high, self.sustained(dtype) / low

    def at(self, given: ChipSpec, known: ChipSpec) -> Self:
        """Return the products of a GPU of *given* peak rates: power that carries *known*'s plateau carries all of a
        peak below it. Source: Dao-AILab/flash-attention issue 1310, an H20 of 148 TFLOPS reaches 129 in cuDNN."""
        shares = {
            str(name): share * max(1.0, known.peak(name) / given.peak(name)) for name, share in self.plateau.items()
        }
        ranges = {
            name: tuple(end / self.sustained(str(name)) * min(shares[str(name)], 1.0) for end in ends)
            for name, ends in self.range.items()
        }
        return self.replaced(plateau={name: min(share, 1.0) for name, share in shares.items()}, range=ranges)


class AttentionKernel(FileTable):
    """An implementation of attention: its rates for long sequences, and its overheads for short ones."""

    forward: Flops = _key("rate at head dimension 128, 16-bit")
    forward_64: Flops = _key("rate at head dimension 64")
    backward: Flops = _key("rate at head dimension 128, 16-bit; the flops are 2.5 times forward's")
    backward_64: Flops = _key("rate at head dimension 64")
    wide: Factor = _key("rate of head dimensions over 128 relative to these, forward")
    wide_backward: Factor = _key("the same, backward")
    causal: Factor = _key("fraction of the rate with a causal mask, beyond the waste of its diagonal blocks")
    query_block: Positive = _key("queries of one block", 128)
    overhead: Annotated[float, Field(ge=0, le=16)] = _key("overhead of a query block in forward, in blocks of 128 keys")
    overhead_backward: Annotated[float, Field(ge=0, le=16)] = _key("the same, backward")
    tail: Annotated[float, Field(ge=0, le=1)] = _key(
        "fraction of the longest block that runs at the end, when the other multiprocessors are idle"
    )
    tail_backward: Annotated[float, Field(ge=0, le=1)] = _key("the same, backward")


class EfficientKernel(AttentionKernel):
    """The implementation of attention that also takes 32-bit operands."""

    fp32: Factor = _key("rate of 32-bit operands relative to these", 0.3)


class AttentionSpec(FileTable):
    """Fused attention, by implementation."""

    preferred: Literal["flash", "cudnn", "efficient"] = _key(
        "implementation that scaled_dot_product_attention uses for 16-bit operands"
    )
    range: tuple[Ratio, Ratio] = _key(_RANGE)
    sources: Sources = _key(_SOURCES)
    flash: AttentionKernel
    cudnn: AttentionKernel
    efficient: EfficientKernel

    def scaled(self, share: float) -> Self:
        """Return the kernels of a GPU whose peak rate is *share* of this one's."""
        rates = ("forward", "forward_64", "backward", "backward_64")
        return self.replaced(
            **{
                name: kernel.replaced(**{rate: getattr(kernel, rate) * share for rate in rates})
                for name, kernel in self
                if isinstance(kernel, AttentionKernel)
            }
        )


class HostSpec(FileTable):
    """Costs of the host, and its link to the GPU."""

    op: Time = _key(
        "host time of one eager operator (Python, dispatch, autograd, launch), on hosts that are sold with this GPU"
    )
    launch: Time = _key("time from the launch call to the start of the kernel, on an idle stream")
    gap: Time = _key("time between two kernels of a stream that is never empty")
    h2d: Bandwidth = _key("bandwidth from pinned host memory")
    d2h: Bandwidth = _key("bandwidth to pinned host memory")
    pageable: Bandwidth = _key("bandwidth of pageable memory in both directions, through the driver's pinned buffer")
    transfer_floor: Time = _key("time of one copy over PCIe in addition to that of its bytes")


class SetupSpec(FileTable):
    """Device memory that belongs to no tensor of the user."""

    context: Memory = _key("CUDA context with PyTorch's kernels, outside the caching allocator")


class CommSpec(FileTable):
    """Resources that a communication kernel takes from the kernels beside it."""

    channel_bandwidth: Bandwidth = _key("bandwidth of one channel")
    touches: Annotated[float, Field(ge=1, le=8)] = _key(
        "number of times that each byte is read from or written to this GPU's memory"
    )


class GpuFile(FileTable):
    """Schema of a GPU data file."""

    name: Text = _key("name in cluster files")
    title: Text = _key("result of torch.cuda.get_device_name")
    source: Text = _key("sources of the figures")
    chip: ChipSpec
    memory: MemorySpec
    gemm: GemmSpec
    attention: AttentionSpec
    host: HostSpec
    setup: SetupSpec
    comm: CommSpec

    def times(self, dtype: str) -> dict[str, tuple[float, float, int]]:
        """Return (shortest, longest, sources) of products in *dtype*, attention and what memory bounds: their times in
        the sources, relative to those that the file gives."""
        result = {"products": (*self.gemm.time_factors(dtype), self.gemm.sources)}
        for name, part in (("attention", self.attention), ("memory", self.memory)):
            result[name] = (1.0 / part.range[1], 1.0 / part.range[0], part.sources)
        return result


def gpu_folder() -> Path:
    """Return the folder of the GPU data files."""
    return Path(str(resources.files("distsim.kernels"))) / "gpus"


def gpu_names() -> list[str]:
    """Return the names of all GPUs that have a data file."""
    return sorted(path.stem for path in gpu_folder().glob("*.toml"))


@cache
def read_gpu(name: str) -> GpuFile:
    """Read the data file of GPU *name*, or the .toml file at that path.

    Raises:
        UsageError: The file has faults; the message lists all of them.
    """
    try:
        return GpuFile.model_validate(_merged(name))
    except ValidationError as error:
        raise faulty(f"GPU file {name.removesuffix('.toml')}.toml", complaints(error, GpuFile)) from None


def _merged(name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the content of a GPU file, merged into that of its base. *above* are the files that it is the base of."""
    known = gpu_names()
    if name in known:
        path = gpu_folder() / f"{name}.toml"
    elif name.endswith(".toml"):
        path = Path(name)
    else:
        raise UsageError(f"expected a GPU that has a data file ({', '.join(known)}), got {name!r}{near(name, known)}")
    try:
        own = load_toml(read_bytes(path, LARGEST_SOURCE).decode())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read the GPU file {brief(name)}: {getattr(error, 'strerror', None) or error}"
        ) from None
    base = own.pop("base", None)
    if not base:
        return own
    if not isinstance(base, str) or base in (*above, name):
        raise UsageError(f"GPU file {brief(name)}: base: expected the name of another GPU, got {brief(base)}")
    return _over(_merged(base, (*above, name)), own)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge *above* into *below*; a table of data types or tiles is replaced as a whole."""
    whole = {"flops", "tiles", "plateau"}
    result: dict[str, Any] = dict(below)
    for key, value in above.items():
        inside = result.get(key)
        if isinstance(value, dict) and isinstance(inside, dict) and key not in whole:
            value = _over(inside, value)
        result[key] = value
    return result
