"""Schema of a GPU's data file, and a check that reports every fault with its path in the file.

`base = "h100"` inherits from that file every value that this one does not give.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from distsim.cluster.files.table import Bounds, Quantity, Table, near
from distsim.cluster.files.table import key as _key
from distsim.errors import UsageError
from distsim.text.units import parse_bandwidth, parse_flops, parse_memory, parse_time

__all__ = ["AttentionKernel", "GemmSpec", "GpuFile", "MemorySpec", "gpu_folder", "gpu_names", "read_gpu"]

Dtype = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
Flops = Annotated[float, Quantity(parse_flops, "TFLOPS")]
Bandwidth = Annotated[float, Quantity(parse_bandwidth, "GBps")]
Memory = Annotated[int, Quantity(parse_memory, "GB")]
Time = Annotated[float, Quantity(parse_time, "us")]
Fraction = Annotated[float, Bounds(gt=0, le=1)]
Factor = Annotated[float, Bounds(gt=0, le=1.25)]
Positive = Annotated[int, Bounds(ge=1, le=65_536)]


class ChipSpec(Table):
    """Specified properties of the chip."""

    compute_capability: Annotated[int, Bounds(ge=0, le=200)] = _key("90 for sm_90; 0 where CUDA's numbers say nothing")
    multiprocessors: Positive = _key("SMs, or compute units")
    memory: Memory = _key("of one GPU")
    memory_bandwidth: Bandwidth = _key("of one GPU")
    l2: Memory = _key("last level cache")
    flops: dict[Dtype, Flops] = _key("by data type, dense")
    power: Annotated[float, Bounds(ge=0)] = _key("watts at most, as its maker specifies them; 0: not known", 0.0)
    spread: Annotated[float, Bounds(ge=0, le=0.1)] = _key(
        "standard deviation of speed among GPUs of this kind: of many that wait for each other, the last sets the pace",
        0.0,
    )

    def peak(self, dtype: str) -> float:
        """Return the peak rate for *dtype*, or that of fp32 if the file has none."""
        rates: dict[str, float] = {str(name): rate for name, rate in self.flops.items()}
        return rates.get(dtype, rates["fp32"])


class MemorySpec(Table):
    """Shares of the memory bandwidth that kernels reach, by class of operator."""

    floor: Time = _key("what a kernel takes beyond its bytes: its begin, its last wave, its end")
    elementwise: Fraction = _key("one thread an element, contiguous")
    strided: Fraction = _key("where the fastest dimension of an input is not the output's: a transpose")
    reduction: Fraction = _key("sums, means, norms of one tensor")
    norm: Fraction = _key("layer, rms, group and batch norm forward")
    norm_backward: Annotated[float, Bounds(gt=0)] = _key(
        "elements a second of norm backward: it is not bandwidth-bound"
    )
    softmax_short: Fraction = _key("softmax forward of rows that a warp holds: up to 1,024 values")
    softmax: Fraction = _key("softmax and log_softmax forward of rows that shared memory holds")
    softmax_long: Fraction = _key("the same of rows that do not fit into shared memory")
    softmax_backward: Fraction = _key("gradient and output read, gradient written, of rows that do not fit")
    gather: Fraction = _key("embedding and index reads")
    scatter: Fraction = _key("embedding's gradient and index writes")
    optimizer: Fraction = _key("fused and foreach optimizers")
    random: Fraction = _key("dropout and random numbers")


class GemmSpec(Table):
    """Matrix products: tiles on multiprocessors, limited by a plateau that the power limit sets."""

    plateau: dict[Dtype, Factor] = _key("what of the peak a large product gets for long: clocks under the power limit")
    mma: Factor = _key("what of its share of the peak a multiprocessor gets in the main loop, at boost clock")
    tiles: dict[str, Factor] = _key("rows x columns of a tile, and its rate beside the largest one's")
    tile_overhead: Time = _key("prologue and epilogue of a tile of 32,768 elements")
    split_k: bool = _key("a grid that does not fill the device is split along k", True)
    memory: Fraction = _key("what of the bandwidth operands and result get")
    sharpness: Annotated[float, Bounds(ge=1, le=50)] = _key(
        "p of the p-norm that joins tiles, plateau and memory: where two limits meet, the product is under both"
    )
    floor: Time = _key("of one kernel")
    conv: Factor = _key("a convolution's rate beside the product of the same size")
    grouped: Factor = _key("a grouped product's rate beside the same tiles in one product")
    unaligned: Factor = _key("the rate of operands whose rows are no multiple of 16 bytes beside others", 0.37)

    def sustained(self, dtype: str) -> float:
        """Return the plateau of *dtype*; that of bf16 if the file has none."""
        plateaus: dict[str, float] = {str(name): share for name, share in self.plateau.items()}
        return plateaus.get(dtype, plateaus["bf16"])


class AttentionKernel(Table):
    """One implementation of attention: its rates for long sequences, and the losses of short ones."""

    forward: Flops = _key("at head dimension 128, 16-bit")
    forward_64: Flops = _key("at head dimension 64")
    backward: Flops = _key("at head dimension 128, 16-bit; flops are 2.5 times forward's")
    backward_64: Flops = _key("at head dimension 64")
    fp32: Factor = _key("rate of 32-bit operands beside these", 0.3)
    wide: Factor = _key("rate of head dimensions over 128 beside these, forward")
    wide_backward: Factor = _key("the same, backward")
    causal: Factor = _key("what a causal mask leaves of the rate, beyond what its diagonal blocks waste")
    query_block: Positive = _key("queries of one block", 128)
    overhead: Annotated[float, Bounds(ge=0, le=16)] = _key("of a query block forward, in blocks of 128 keys")
    overhead_backward: Annotated[float, Bounds(ge=0, le=16)] = _key("the same, backward")
    tail: Annotated[float, Bounds(ge=0, le=1)] = _key("of the longest block, at the end, when others have nothing left")
    tail_backward: Annotated[float, Bounds(ge=0, le=1)] = _key("the same, backward")


class AttentionSpec(Table):
    """Fused attention, by implementation."""

    preferred: Literal["flash", "cudnn", "efficient"] = _key(
        "what scaled_dot_product_attention takes of 16-bit operands"
    )
    flash: AttentionKernel
    cudnn: AttentionKernel
    efficient: AttentionKernel


class HostSpec(Table):
    """Costs of the host, and its link to the GPU."""

    op: Time = _key("Python, dispatch, autograd and launch of one eager operator, on hosts that come with this GPU")
    launch: Time = _key("from the launch call to the kernel's begin, on an idle stream")
    gap: Time = _key("between two kernels of a stream that is never empty")
    h2d: Bandwidth = _key("from pinned host memory")
    d2h: Bandwidth = _key("to pinned host memory")
    pageable: Bandwidth = _key("either way, through the driver's own pinned buffer")
    transfer_floor: Time = _key("of one copy over PCIe")


class SetupSpec(Table):
    """Device memory that belongs to no tensor of the user."""

    context: Memory = _key("CUDA context with PyTorch's kernels, outside the caching allocator")
    cublas_workspace: Memory = _key("of each handle and stream, from the caching allocator")


class CommSpec(Table):
    """Resources that a communication kernel takes from the kernels beside it."""

    channel_bandwidth: Bandwidth = _key("what one channel moves")
    touches: Annotated[float, Bounds(ge=1, le=8)] = _key("times each byte goes to or from this GPU's memory")


class GpuFile(Table):
    """Schema of a GPU data file."""

    name: str = _key("what a cluster file calls it")
    title: str = _key("what torch.cuda.get_device_name says")
    source: str = _key("where its figures are from")
    chip: ChipSpec
    memory: MemorySpec
    gemm: GemmSpec
    attention: AttentionSpec
    host: HostSpec
    setup: SetupSpec
    comm: CommSpec


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
    faults: list[str] = []
    spec = GpuFile.read(_merged(name), (), faults)
    if faults:
        raise UsageError(f"GPU file {name.removesuffix('.toml')}.toml: {'; '.join(faults)}")
    return spec  # type: ignore[no-any-return]


def _merged(name: str) -> dict[str, Any]:
    known = gpu_names()
    if name in known:
        path = gpu_folder() / f"{name}.toml"
    elif name.endswith(".toml"):
        path = Path(name)
    else:
        raise UsageError(f"expected a GPU that has a data file ({', '.join(known)}), got {name!r}{near(name, known)}")
    try:
        own = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read the GPU file {name}: {error}") from None
    base = own.pop("base", None)
    return _over(_merged(base), own) if base else own


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
