"""Measuring one GPU's kernels with torch, and writing its data file: `distsim calibrate --ops`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from distsim.errors import UsageError
from distsim.kernels import Gpu
from distsim.kernels.gpu_file import GpuFile, gpu_names, read_gpu
from distsim.torch_compat.device import aten

# -- Measuring one GPU's kernels with torch, and writing its data file: `distsim calibrate --ops`.
#
# Each probe is an operator of one shape, and the constant of the data file that its time stands for. The constant is
# set so that the model's price is what was measured; constants no probe stands for are borrowed from the file of a GPU
# of the same kind.

Call = tuple[Any, tuple[Any, ...], dict[str, Any], Any]
"""An operator, its positional and keyword arguments, and its result."""


@dataclass(frozen=True, slots=True)
class Probe:
    """An operator whose time determines one constant."""

    constant: str
    """Its path in the data file, as memory.floor."""
    what: str
    make: Callable[[Any, str], Call]
    """Function from torch and a device to the call; on device meta its tensors have no data."""


def _elements(count: int, dtype: str = "bfloat16") -> Callable[[Any, str], Call]:
    def make(torch: Any, device: str) -> Call:
        x = torch.empty(count, dtype=getattr(torch, dtype), device=device)
        return torch.ops.aten.add.Tensor, (x, x), {}, x

    return make


def _turned(size: int) -> Callable[[Any, str], Call]:
    def make(torch: Any, device: str) -> Call:
        x, out = (torch.empty(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
        return torch.ops.aten.copy_.default, (out, x.t()), {}, out

    return make


def _columns(torch: Any, device: str) -> Call:
    x = torch.empty(16_384, 16_384, dtype=torch.bfloat16, device=device)
    return torch.ops.aten.sum.dim_IntList, (x, [1]), {}, x[:, 0]


def _norm(backward: bool) -> Callable[[Any, str], Call]:
    def make(torch: Any, device: str) -> Call:
        rows, columns = 16_384, 8192
        x = torch.ones(rows, columns, dtype=torch.bfloat16, device=device)
        weight, stats = torch.ones_like(x[0]), torch.ones(rows, 1, dtype=torch.float32, device=device)
        if not backward:
            return torch.ops.aten.native_layer_norm.default, (x, [columns], weight, weight, 1e-5), {}, (x, stats, stats)
        args = (x, x, [columns], stats, stats, weight, weight, [True] * 3)
        return torch.ops.aten.native_layer_norm_backward.default, args, {}, (x, weight, weight)

    return make


def _softmax(rows: int, columns: int, backward: bool = False) -> Callable[[Any, str], Call]:
    def make(torch: Any, device: str) -> Call:
        x = torch.zeros(rows, columns, dtype=torch.float32, device=device)
        if backward:
            return aten._log_softmax_backward_data.default, (x, x, 1, torch.float32), {}, x
        return aten._log_softmax.default, (x, 1, False), {}, x

    return make


def _embedding(backward: bool) -> Callable[[Any, str], Call]:
    def make(torch: Any, device: str) -> Call:
        words = torch.arange(16_384, device=device) * 7
        table = torch.empty(131_072, 4096, dtype=torch.bfloat16, device=device)
        rows = torch.empty(16_384, 4096, dtype=torch.bfloat16, device=device)
        if backward:
            return torch.ops.aten.embedding_dense_backward.default, (rows, words, 131_072, -1, False), {}, table
        return torch.ops.aten.embedding.default, (table, words), {}, rows

    return make


def _optimizer(torch: Any, device: str) -> Call:
    lists = [[torch.zeros(8192, 8192, device=device) for _ in range(4)] for _ in range(4)]
    steps = [torch.ones((), device=device) for _ in range(4)]
    numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    flags = {"amsgrad": False, "maximize": False}
    return aten._fused_adamw_.default, (*lists, [], steps), numbers | flags, None


def _random(torch: Any, device: str) -> Call:
    x = torch.empty(2**28, dtype=torch.bfloat16, device=device)
    return torch.ops.aten.bernoulli_.float, (x, 0.5), {}, x


def _product(m: int, n: int, k: int, dtype: str) -> Callable[[Any, str], Call]:
    def make(torch: Any, device: str) -> Call:
        kind = getattr(torch, "float32" if dtype == "tf32" else dtype)
        a, b = torch.empty(m, k, dtype=kind, device=device), torch.empty(k, n, dtype=kind, device=device)
        if device != "meta":  # zeros would toggle no bits and draw no power
            a.normal_(), b.normal_()
        return torch.ops.aten.mm.default, (a, b), {}, torch.empty(m, n, dtype=kind, device=device)

    return make


def _attention(dim: int, backward: bool, kernel: str = "flash") -> Callable[[Any, str], Call]:
    def make(torch: Any, device: str) -> Call:
        length, heads = 8192, 4096 // dim
        query = torch.empty(1, heads, length, dim, dtype=torch.bfloat16, device=device)
        stats = torch.zeros(1, heads, length, dtype=torch.float32, device=device)
        args: tuple[Any, ...] = (query, query, query)
        if device != "meta":
            query.normal_()
        if kernel == "flash":
            forward = aten._scaled_dot_product_flash_attention.default
        else:
            forward = aten._scaled_dot_product_efficient_attention.default
            args = (*args, None, True)
        if not backward:
            return forward, args, {}, (query, stats)
        outputs = forward(*args) if device != "meta" else None
        seed = torch.zeros(2, dtype=torch.int64, device=device)
        out, stats = (outputs[0], outputs[1]) if outputs else (query, stats)
        if kernel == "flash":
            seeds = (outputs[6], outputs[7]) if outputs else (seed, seed)
            func = aten._scaled_dot_product_flash_attention_backward.default
            rest = (stats, None, None, length, length, 0.0, False, *seeds)
            return func, (query, query, query, query, out, *rest), {}, (query,) * 3
        seeds = (outputs[2], outputs[3]) if outputs else (seed[0], seed[1])
        last = (query, query, query, query, None, out, stats, *seeds, 0.0, [True, True, True, False])
        func = aten._scaled_dot_product_efficient_attention_backward.default
        return func, last, {}, (query,) * 3

    return make


def _transfer(to_device: bool, pinned: bool) -> Callable[[Any, str], Call]:
    def make(torch: Any, device: str) -> Call:
        host = torch.empty(2**28, dtype=torch.uint8)
        host = host.pin_memory() if pinned and device != "meta" else host
        there = torch.empty(2**28, dtype=torch.uint8, device=device)
        target, source = (there, host) if to_device else (host, there)
        return torch.ops.aten.copy_.default, (target, source, pinned), {}, target

    return make


PROBES: Sequence[Probe] = (
    Probe("memory.floor", "add of 1,024 values", _elements(1024)),
    Probe("memory.elementwise", "add of 2^28 values, bf16", _elements(2**28)),
    Probe("memory.strided", "copy of a transposed 16,384 x 16,384, bf16", _turned(16_384)),
    Probe("memory.reduction", "sum of rows, 16,384 x 16,384, bf16", _columns),
    Probe("memory.norm", "layer norm, 16,384 x 8,192, bf16", _norm(False)),
    Probe("memory.norm_backward", "layer norm backward, 16,384 x 8,192, bf16", _norm(True)),
    Probe("memory.softmax_short", "log_softmax, 262,144 x 1,024, fp32", _softmax(262_144, 1024)),
    Probe("memory.softmax", "log_softmax, 32,768 x 8,192, fp32", _softmax(32_768, 8192)),
    Probe("memory.softmax_long", "log_softmax, 2,048 x 131,072, fp32", _softmax(2048, 131_072)),
    Probe("memory.softmax_backward", "log_softmax backward, 2,048 x 131,072, fp32", _softmax(2048, 131_072, True)),
    Probe("memory.gather", "embedding, 16,384 of 131,072 x 4,096, bf16", _embedding(False)),
    Probe("memory.scatter", "embedding's gradient, the same", _embedding(True)),
    Probe("memory.optimizer", "fused AdamW of 268 M parameters, fp32", _optimizer),
    Probe("memory.random", "bernoulli_ of 2^28 values, bf16", _random),
    Probe("gemm.floor", "64 x 64 x 64, bf16", _product(64, 64, 64, "bfloat16")),
    Probe("gemm.memory", "16,384 x 16,384 x 64, bf16", _product(16_384, 16_384, 64, "bfloat16")),
    Probe("gemm.mma", "2,048 x 2,048 x 2,048, bf16", _product(2048, 2048, 2048, "bfloat16")),
    Probe("gemm.plateau.bf16", "16,384 x 8,192 x 8,192, bf16", _product(16_384, 8192, 8192, "bfloat16")),
    Probe("gemm.plateau.fp16", "16,384 x 8,192 x 8,192, fp16", _product(16_384, 8192, 8192, "float16")),
    Probe("gemm.plateau.fp32", "8,192 x 8,192 x 8,192, fp32", _product(8192, 8192, 8192, "float32")),
    Probe("attention.flash.forward", "flash attention, 32 heads of 128, 8,192 long", _attention(128, False)),
    Probe("attention.flash.forward_64", "flash attention, 64 heads of 64, 8,192 long", _attention(64, False)),
    Probe("attention.flash.backward", "the same of 128, backward", _attention(128, True)),
    Probe("attention.flash.backward_64", "the same of 64, backward", _attention(64, True)),
    Probe("attention.efficient.forward", "efficient attention, 32 heads of 128", _attention(128, False, "efficient")),
    Probe("attention.efficient.backward", "the same, backward", _attention(128, True, "efficient")),
    Probe("host.h2d", "256 MiB from pinned memory", _transfer(True, True)),
    Probe("host.d2h", "256 MiB to pinned memory", _transfer(False, True)),
    Probe("host.pageable", "256 MiB from pageable memory", _transfer(True, False)),
)


def calibrate_ops(
    spec: GpuFile, clock: Callable[[Probe], float | None], report: Callable[[str], None] = print
) -> tuple[GpuFile, dict[str, tuple[float, str]]]:
    """Return *spec* with every constant for which there is a probe, and these constants by path with what was
    measured.

    *clock* returns the seconds of one of many consecutive calls; None if the GPU or this torch does not have the
    operator. There are two rounds, because the constants of a product (minimum, tiles, plateau) affect each other's
    probes.
    """
    import torch

    seconds = {probe: clock(probe) for probe in PROBES}
    calls = {probe: probe.make(torch, "meta") for probe in PROBES}
    for _ in range(2):
        for probe, measured in seconds.items():
            if measured is not None:
                spec = _solved(spec, probe.constant, calls[probe], measured)
    measured_constants: dict[str, tuple[float, str]] = {}
    for probe, measured in seconds.items():
        value = constant(spec, probe.constant)
        if measured is None:
            report(f"{probe.constant:30s}{value:12.4g}  borrowed: no {probe.what} here")
            continue
        measured_constants[probe.constant] = (value, f"{probe.what}: {measured * 1e6:,.1f} us")
        off = _price(spec, calls[probe]) / measured - 1
        report(f"{probe.constant:30s}{value:12.4g}  {probe.what}: {measured * 1e6:,.1f} us ({off:+.1%})")
    return spec, measured_constants


def _price(spec: GpuFile, call: Call) -> float:
    """Return one of many in a row."""
    gpu = Gpu(spec)
    return gpu.cost(*call).seconds + gpu.gap_s


def _solved(spec: GpuFile, path: str, call: Call, measured: float) -> GpuFile:
    """Return *spec* with the constant at *path* set so that the price of *call* equals *measured*.

    The constant stays between a twentieth and twenty times its old value, and efficiencies stay within their schema.
    """
    start = constant(spec, path)
    low, high = math.log(start / 20), math.log(min(start * 20, _MOST.get(path.split(".")[0], math.inf)))
    if path in _UNBOUNDED:
        high = math.log(start * 20)
    rising = _price(with_constant(spec, path, math.exp(high)), call) > _price(
        with_constant(spec, path, math.exp(low)), call
    )
    for _ in range(36):
        middle = (low + high) / 2
        over = _price(with_constant(spec, path, math.exp(middle)), call) > measured
        if over == rising:
            high = middle
        else:
            low = middle
    return with_constant(spec, path, math.exp((low + high) / 2))


ONE_SOURCE = (0.9, 1.1)
"""The range around the rates of a card that one source has measured."""
_MOST = {"memory": 1.0, "gemm": 1.25}
_UNBOUNDED = ("memory.norm_backward",)


def constant(spec: GpuFile, path: str) -> float:
    """Return a number of the data file by its path."""
    value: Any = spec
    for name in path.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return float(value)


def with_constant(spec: GpuFile, path: str, value: float) -> GpuFile:
    """Return the data file with another number at *path*."""
    changed: GpuFile = _with(spec, path.split("."), value)
    return changed


def _with(owner: Any, names: Sequence[str], value: float) -> Any:
    if not names:
        return value
    if isinstance(owner, dict):
        return {**owner, names[0]: _with(owner[names[0]], names[1:], value)}
    return owner.replaced(**{names[0]: _with(getattr(owner, names[0]), names[1:], value)})


def gpu_toml(base: str, spec: GpuFile, facts: dict[str, str], constants: dict[str, tuple[float, str]]) -> str:
    """Return the data file of *spec*: the measured *constants* over *base*; *facts* are keys of [chip]."""
    text = (
        f'# {spec.title}, measured by distsim calibrate --ops. A cluster file names it: node.gpu.model = "FILE.toml".\n'
    )
    text += f'base = "{base}"  # all that is not here is borrowed from this file\n'
    text += (
        f'name = "{spec.name}"\ntitle = "{spec.title}"\nsource = "distsim calibrate --ops on {spec.title}"\n\n[chip]\n'
    )
    text += "".join(f"{key} = {value}  # torch.cuda.get_device_properties\n" for key, value in facts.items())
    tables: dict[str, list[tuple[str, str, str]]] = {}
    for path, (value, meaning) in constants.items():
        table, _, key = path.rpartition(".")
        tables.setdefault(table, []).append((key, f"{value:.6g}", meaning))
    for key, share in spec.gemm.plateau.items():  # a table that is read whole
        if f"gemm.plateau.{key}" not in constants:
            tables.setdefault("gemm.plateau", []).append((key, f"{share:.6g}", f"borrowed from {base}"))
    for part, table, key, rate in _ranges(constants):
        ends = ", ".join(f"{rate * factor:.6g}" for factor in ONE_SOURCE)
        tables.setdefault(table, []).append((key, f"[{ends}]", "a tenth to each side of the only source"))
        tables.setdefault(part, []).append(("sources", "1", "this measurement"))
    for table, entries in tables.items():
        text += f"\n[{table}]\n"
        text += "".join(f"{key} = {value}  # {meaning}\n" for key, value, meaning in entries)
    return text


def _ranges(constants: dict[str, tuple[float, str]]) -> Iterator[tuple[str, str, str, float]]:
    """Yield each part of the file of which something was measured, its range by table and key, and the middle of it."""
    if "gemm.plateau.bf16" in constants:
        yield "gemm", "gemm.range", "bf16", constants["gemm.plateau.bf16"][0]
    for part in ("attention", "memory"):
        if any(path.startswith(f"{part}.") for path in constants):
            yield part, part, "range", 1.0


# -- What a GPU's clock says of one call: with CUDA events, in a graph where it can be captured.

_LEAST_S = 0.3
"""Duration of a measurement in seconds, long enough for the clocks to drop under the power limit as they do in
training."""


def same_chip(torch: Any) -> str:
    """Return the data file of the chip that torch sees."""
    title, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    for name in gpu_names():
        if read_gpu(name).title == title:
            return name
    for name in ("h100", "b200", "a100-80gb", "rtx4090"):
        if read_gpu(name).chip.compute_capability == capability[0] * 10 + capability[1]:
            return name
    raise UsageError(
        f"calibrate --ops: no data file is of a chip like {title}: expected --like {'|'.join(gpu_names())}"
    )


def chip_facts(torch: Any, base: GpuFile) -> tuple[GpuFile, dict[str, str]]:
    """Return *base* with what torch reports about this GPU, and the same facts as keys of the TOML file."""
    there = torch.cuda.get_device_properties(0)
    facts = {"multiprocessors": there.multi_processor_count, "memory": there.total_memory, "l2": there.L2_cache_size}
    facts = {key: value for key, value in facts.items() if value}
    title = torch.cuda.get_device_name()
    # Published steps are of cards by the names of their data files.
    name = base.name if title == base.title else "-".join(title.lower().removeprefix("nvidia ").split())
    spec = base.replaced(chip=base.chip.replaced(**facts), name=name, title=title)
    return spec, {key: str(value) for key, value in facts.items()}


def cuda_clock(torch: Any) -> Callable[[Probe], float | None]:
    """Return a function that measures the seconds of one call, averaged over many calls in a row."""

    def clock(probe: Probe) -> float | None:
        try:
            func, args, kwargs, _ = probe.make(torch, "cuda")
            once = _timed(torch, lambda: func(*args, **kwargs), 3)
            return _timed(torch, lambda: func(*args, **kwargs), max(5, min(2000, int(_LEAST_S / once))))
        except (RuntimeError, NotImplementedError):  # no such kernel, or not the memory for it
            return None
        finally:
            torch.cuda.empty_cache()

    return clock


def _timed(torch: Any, call: Callable[[], Any], times: int) -> float:
    def many() -> None:
        for _ in range(times):
            call()

    call()
    torch.cuda.synchronize()
    run: Callable[[], Any] = many
    if times > 3:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                many()
            run = graph.replay
        except RuntimeError:  # a copy from pageable memory, or what waits for the device
            torch.cuda.synchronize()
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3 / times
