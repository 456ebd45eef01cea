"""Kernel times: predicted beside measured, and beside a plain roofline, table by table.

    python -m tools.benchmarks.kernels [TABLE ...] [--rows] [--fit GPU]

Peer: a roofline. Aim: none here; tests/kernels/test_measured.py holds each table to its own.

The tables are those of tests/kernels/measured, each with its source in its head. The peer is what a back of an envelope
has: the longer of flops over a share of the peak and bytes over nine tenths of the bandwidth; its share is the best one
for the very table (the median of what was measured), which is more than anybody knows beforehand. An error is that of
the time. Products under 20 us that were launched from Python one by one are left out. --fit searches mma,
tile_overhead, memory, sharpness, floor, plateau and the smaller tiles of a GPU's file for its products and prints what
it finds; nothing is written.
"""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distsim.kernels import Gpu
from distsim.kernels.gpu_file import GemmSpec, read_gpu
from distsim.kernels.pricing import Attention, Gemm, Pricing, gemm_seconds
from tools.benchmarks.arguments import Arguments, known

MEASURED = Path(__file__).parents[2] / "tests" / "kernels" / "measured"
SIZES = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
HOST_BOUND_S = 20e-6
"""Products that took less were measured with a launch from Python each, and not with the device's own clock."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: what it was of, its seconds, its flops and its bytes, and the model's seconds."""

    gpu: str
    what: str
    dtype: str
    seconds: float
    flops: int
    nbytes: int
    predicted: Callable[[], float]


def tables() -> dict[str, list[Row]]:
    """Every table by its name."""
    return {path.stem: list(_rows(path)) for path in sorted(MEASURED.glob("*.csv"))}


def _lines(path: Path) -> Iterator[dict[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return csv.DictReader(line for line in lines if not line.startswith("#"))


def _rows(path: Path) -> Iterator[Row]:
    read = {"gemm": gemm_row, "attention": attention_row, "memory": memory_row}[path.stem.split("_")[0]]
    for line in _lines(path):
        yield read(line)


def gemm_of(line: dict[str, str]) -> Gemm:
    """The product of a table's line."""
    m, n, k = int(line["m"]), int(line["n"]), int(line["k"])
    size, out = SIZES[line["dtype"]], SIZES[line["out"]]
    nbytes = size * (m * k + k * n) + out * m * n * (1 + int(line["accumulate"]))
    return Gemm(m, n, k, 1, line["dtype"], nbytes)


def gemm_row(line: dict[str, str]) -> Row:
    gemm, pricing = gemm_of(line), Pricing(read_gpu(line["gpu"]))
    seconds = gemm.flops / (float(line["tflops"]) * 1e12)
    what = f"{gemm.m} x {gemm.n} x {gemm.k} {gemm.dtype}"
    return Row(line["gpu"], what, gemm.dtype, seconds, gemm.flops, gemm.nbytes, lambda: pricing.gemm(gemm).seconds)


def attention_row(line: dict[str, str]) -> Row:
    length, dim, value_dim = int(line["length"]), int(line["dim"]), int(line["value_dim"])
    causal, backward = line["causal"] == "1", line["backward"] == "1"
    call = Attention(int(line["batch"]), int(line["heads"]), length, length, dim, value_dim, causal, backward)
    nbytes = 2 * call.batch * call.heads * length * 2 * (dim + value_dim) * (2 if backward else 1)
    pricing = Pricing(read_gpu(line["gpu"]))
    kernel = line["kernel"]
    what = f"{kernel} {'backward' if backward else 'forward'} {call.batch} x {call.heads} x {length} x {dim}"
    what += " causal" if causal else ""
    counted = 2 * call.batch * call.heads * length * length * (dim + value_dim) * (2.5 if backward else 1)
    seconds = counted / (2 if causal else 1) / (float(line["tflops"]) * 1e12)
    predicted = lambda: pricing.attention(call, kernel, nbytes).seconds  # noqa: E731
    return Row(line["gpu"], what, "bf16", seconds, call.flops, nbytes, predicted)


def memory_row(line: dict[str, str]) -> Row:
    rows, columns, dtype = int(line["rows"]), int(line["columns"]), DTYPES[line["dtype"]]
    gpu = Gpu.named(line["gpu"])
    costs = [gpu.cost(*call) for call in _program(line["program"], rows, columns, dtype)]
    # In a benchmark's loop the kernels of one call follow each other as those of one operator do.
    seconds = sum(cost.seconds for cost in costs) + (len(costs) - 1) * gpu.gap_s
    nbytes = sum(cost.nbytes for cost in costs)
    what = f"{line['program']} {rows} x {columns} {line['dtype']}"
    return Row(line["gpu"], what, line["dtype"], float(line["us"]) * 1e-6, 0, nbytes, lambda: seconds)


def _program(name: str, rows: int, columns: int, dtype: Any) -> list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]:
    """The operators that the measured program is."""
    aten = torch.ops.aten

    def new(*shape: int, dtype: Any = dtype) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, weight, stats = new(rows, columns), new(columns), new(rows, 1, dtype=torch.float32)
    target = new(rows, dtype=torch.int64)
    if name == "relu_squared":
        return [(aten.relu.default, (x,), {}, x), (aten.pow.Tensor_Scalar, (x, 2), {}, x)]
    if name == "add":
        return [(aten.add.Tensor, (x, x), {}, new(rows, columns))]
    if name == "layer_norm":
        return [(aten.native_layer_norm.default, (x, [columns], weight, weight, 1e-6), {}, (x, stats, stats))]
    if name == "layer_norm_backward":
        args = (x, x, [columns], stats, stats, weight, weight, [True] * 3)
        return [(aten.native_layer_norm_backward.default, args, {}, (x, weight, weight))]
    if name == "rms_norm":
        return [(aten._fused_rms_norm.default, (x, [columns], weight, 1e-6), {}, (x, stats))]
    if name == "rms_norm_backward":
        return [(aten._fused_rms_norm_backward.default, (x, x, [columns], stats, weight, [True] * 2), {}, (x, weight))]
    if name == "cross_entropy":
        loss = (aten.nll_loss_forward.default, (x, target, None, 1, -100), {}, (new(), new()))
        return [(aten._log_softmax.default, (x, 1, False), {}, x), loss]
    if name == "cross_entropy_backward":
        loss = (aten.nll_loss_backward.default, (new(), x, target, None, 1, -100, new()), {}, x)
        return [loss, (aten._log_softmax_backward_data.default, (x, x, 1, dtype), {}, x)]
    raise ValueError(f"no program named {name}")


def host_bound(table: str, row: Row) -> bool:
    """Whether what was measured is the launch from Python and not the kernel."""
    return table in ("gemm_squares", "gemm_h100") and row.gpu != "b200" and row.seconds < HOST_BOUND_S


def errors(rows: list[Row]) -> list[float]:
    """Of the predicted time, as a share of the measured one."""
    return [row.predicted() / row.seconds - 1 for row in rows]


def peer(rows: list[Row]) -> list[float]:
    """Errors of a roofline whose constant is the table's own."""
    shares: dict[tuple[str, str], float] = {}
    for key in {(row.gpu, row.dtype) for row in rows}:
        some = [row for row in rows if (row.gpu, row.dtype) == key and row.flops]
        peak = read_gpu(key[0]).chip.flops.get(key[1], 1.0)
        shares[key] = statistics.median([row.flops / row.seconds / peak for row in some]) if some else 1.0
    found = []
    for row in rows:
        chip = read_gpu(row.gpu).chip
        math_s = row.flops / (chip.flops[row.dtype] * shares[row.gpu, row.dtype])
        found.append(max(math_s, row.nbytes / (0.9 * chip.memory_bandwidth)) / row.seconds - 1)
    return found


def _line(name: str, found: list[float]) -> str:
    size = sorted(abs(each) for each in found)
    tenth = size[min(len(size) - 1, int(len(size) * 0.9))]
    return (
        f"{name:<34s}{len(found):>6d}{statistics.median(size):>9.1%}{tenth:>9.1%}{size[-1]:>9.1%}"
        f"{statistics.median(found):>+9.1%}"
    )


def fit(gpu: str, tries: int = 600) -> None:
    """Search the constants of a GPU's products for the least mean error of its tables, each table of one weight."""
    spec = read_gpu(gpu)
    every = []
    for path in sorted(MEASURED.glob("gemm_*.csv")):
        some = [line for line in _lines(path) if line["gpu"] == gpu and line["dtype"] in ("bf16", "fp16")]
        pairs = [(gemm_of(line), float(line["tflops"]) * 1e12) for line in some]
        pairs = [(gemm, rate) for gemm, rate in pairs if gemm.flops / rate > HOST_BOUND_S or gpu == "b200"]
        if pairs:
            every.append(pairs)

    def loss(values: dict[str, Any]) -> float:
        changed = GemmSpec.model_construct(**values)
        totals = []
        for table in every:
            logs = [math.log(gemm_seconds(changed, spec.chip, g)[0] * rate / g.flops) for g, rate in table]
            totals.append(statistics.fmean(map(abs, logs)))
        return statistics.fmean(totals)

    values, chance = dict(vars(spec.gemm)), random.Random(0)
    least = loss(values)
    print(f"{gpu}: mean error {least:.2%} before")
    for number in range(tries):
        changed = dict(values)
        for name in chance.sample(["mma", "tile_overhead", "memory", "sharpness", "floor", "plateau", "tiles"], 2):
            by = math.exp(chance.gauss(0, 0.15 * 0.994**number + 0.01))
            if name == "plateau":
                changed[name] = changed[name] | {"bf16": changed[name]["bf16"] * by}
            elif name == "tiles":
                tile = chance.choice([each for each, rate in changed[name].items() if rate < 1])
                changed[name] = changed[name] | {tile: min(1.0, changed[name][tile] * by)}
            else:
                most = {"memory": 0.95, "sharpness": 30.0}.get(name, 10.0)
                changed[name] = min(most, changed[name] * by)
        found = loss(changed)
        if found < least:
            least, values = found, changed
    print(f"{gpu}: mean error {least:.2%} after")
    for name in ("mma", "tile_overhead", "memory", "sharpness", "floor", "tiles"):
        print(f"  {name} = {values[name]}")
    print(f"  plateau bf16 = {values['plateau']['bf16']:.3f}")


def main() -> None:
    paths = {path.stem: path for path in sorted(MEASURED.glob("*.csv"))}
    gpus = {line["gpu"] for name, path in paths.items() if name.startswith("gemm_") for line in _lines(path)}
    parser = Arguments(__doc__)
    parser.add_argument("tables", nargs="*", type=known(paths), help="by the name of their file (default: all)")
    parser.add_argument("--rows", action="store_true", help="the rows with the largest errors, too")
    parser.add_argument("--fit", metavar="GPU", type=known(sorted(gpus)))
    args = parser.parse_args()
    if args.fit:
        fit(args.fit)
        return
    print(f"{'table':<34s}{'rows':>6s}{'median':>9s}{'90 %':>9s}{'worst':>9s}{'bias':>9s}")
    for name, rows in tables().items():
        if args.tables and name not in args.tables:
            continue
        for gpu in sorted({row.gpu for row in rows}):
            some = [row for row in rows if row.gpu == gpu and not host_bound(name, row)]
            found = errors(some)
            print(_line(f"{name}, {gpu}"[:34], found))
            print(_line("  plain roofline", peer(some)))
            if args.rows:
                worst = sorted(zip(found, some, strict=True), key=lambda pair: -abs(pair[0]))[:8]
                for error, row in worst:
                    print(f"    {row.what:<44s}{row.seconds * 1e6:>10.1f} us measured{error:>+8.1%}")


if __name__ == "__main__":
    main()
