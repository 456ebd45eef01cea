"""Measures gloo on this machine, writes a cluster file from the measurements, and checks predictions against them.

`python -m distsim.calibration.live SIZES OPS SECONDS` runs as one rank of a measurement.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distsim.cluster import load_cluster
from distsim.collectives import Compiler, Transfer, canonical_op
from distsim.collectives.libraries.gloo import progress_bytes
from distsim.errors import DistsimError
from distsim.text.units import plural

# -- Measuring gloo on this machine, the cluster file with which the simulator predicts it, and what that is worth.
#
# A rank's own work bounds gloo here (copies, system calls, threads on shared cores), so each operation gets
# a start-up time and a time per byte that grows where messages leave the cache: `gloo.py` reads them from
# [calibration].

OPS = ("all_reduce", "all_gather", "alltoall", "broadcast", "reduce", "sendrecv")


@dataclass(frozen=True, slots=True)
class LiveRow:
    """One measurement: lower quartile over many calls."""

    op: str
    size_bytes: int
    time_us: float


def measure_gloo(
    num_ranks: int,
    sizes: Sequence[int],
    *,
    ops: Sequence[str] = OPS,
    seconds: float = 20.0,
    prefixes: Sequence[Sequence[str]] | None = None,
    address: str = "127.0.0.1",
    interface: str | None = None,
) -> list[LiveRow]:
    """Run gloo between *num_ranks* processes and time *ops*. *prefixes* is put before each rank's command
    (a network namespace, say), with the master's *address* and the *interface* that gloo binds to there."""
    port = _free_port()
    command = [
        sys.executable,
        "-m",
        "distsim.calibration.live",
        ",".join(map(str, sizes)),
        ",".join(ops),
        str(seconds),
    ]
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(num_ranks):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
                **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
            }
            prefix = list(prefixes[rank]) if prefixes else []
            ranks.append(
                subprocess.Popen(
                    [*prefix, *command],
                    env=environment,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    text=True,
                )
            )
        out, error = ranks[0].communicate(timeout=120.0 + 4.0 * seconds)
        if ranks[0].returncode:
            last = error.strip().splitlines()[-1:] or ["no message"]
            raise DistsimError(f"measuring gloo failed: rank 0 left with {ranks[0].returncode}: {last[0]}")
        for process in ranks[1:]:
            process.wait(timeout=30.0)
    except subprocess.TimeoutExpired:
        raise DistsimError(f"measuring gloo took more than {120.0 + 4.0 * seconds:.0f} s: stopped") from None
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
    output = json.loads(out.strip().splitlines()[-1])
    return [LiveRow(row["op"], row["size_bytes"], row["time_us"]) for row in output["rows"]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fit_gloo(rows: Sequence[LiveRow], num_ranks: int) -> dict[str, float]:
    """Return the constants for a [calibration] table: for each operation a start-up time, a time per byte, and an
    additional time per byte above a threshold size (the knee).
    """
    constants: dict[str, float] = {}
    for op in dict.fromkeys(row.op for row in rows):
        some = [row for row in rows if row.op == op]
        name = canonical_op(op)
        moved = np.array([progress_bytes(name, num_ranks, row.size_bytes) for row in some])
        best = _fit_one(moved, np.array([row.time_us * 1e-6 for row in some]))
        for key, value in best.items():
            constants[f"gloo_{name}_{key}"] = value
    return constants


def _fit_one(moved: NDArray[np.float64], seconds: NDArray[np.float64]) -> dict[str, float]:
    """Fit one operation by least squares of the relative error, for each knee in a grid; no term is negative."""
    best: tuple[float, dict[str, float]] | None = None
    for knee in sorted({*moved.tolist(), float(moved.max())}):
        columns = np.stack([np.ones_like(moved), moved, np.maximum(moved - knee, 0.0)], axis=1)
        answer = _non_negative(columns / seconds[:, None], np.ones_like(seconds))
        error = float(np.abs(columns @ answer / seconds - 1.0).sum())
        if best is None or error < best[0] * 0.999:
            launch, slope, more = answer.tolist()
            best = (
                error,
                {"launch_s": launch, "s_per_byte": slope, "knee_bytes": knee, "more_s_per_byte": more},
            )
    assert best is not None
    return best[1]


def _non_negative(columns: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve least squares with non-negative unknowns, by trying all subsets of the columns (three columns: eight
    subsets).
    """
    width = columns.shape[1]
    best, least = np.zeros(width), float("inf")
    for subset in range(1, 1 << width):
        chosen = [i for i in range(width) if subset >> i & 1]
        answer = np.linalg.lstsq(columns[:, chosen], target, rcond=None)[0]
        if (answer < 0).any():
            continue
        error = float(((columns[:, chosen] @ answer - target) ** 2).sum())
        if error < least:
            best, least = np.zeros(width), error
            best[chosen] = answer
    return best


def cluster_toml(
    constants: Mapping[str, float],
    *,
    name: str,
    nodes: int,
    ranks_per_node: int,
    note: str,
    nic_bytes_per_s: float | None = None,
) -> str:
    """Return a cluster file with these constants; *nic_bytes_per_s* is the bandwidth of a link between nodes."""
    fastest = max(
        (1.0 / value for key, value in constants.items() if key.endswith("s_per_byte") and value > 0),
        default=1e9,
    )
    room = 4.0 * fastest * max(2, nodes * ranks_per_node)
    lines = [
        f"# Measured by distsim calibrate --on gloo: {note}.",
        'base = "ethernet-cpu"',
        f'name = "{name}"',
        f'description = "gloo between {nodes * ranks_per_node} processes, measured here"',
        f'source = "distsim calibrate --on gloo: {note}"',
        f"nodes = {nodes}",
        "",
        "[node.cpu]",
        "sockets = 1",
        f"cores = {max(ranks_per_node, os.cpu_count() or 1)}",
        f'loopback = "{room:.0f}Bps"  # enough for every rank; the measured limits are in [calibration]',
        "loopback_latency = 0",
    ]
    bandwidth = nic_bytes_per_s or room
    lines += ["", "[node.nic]", f'bandwidth = "{bandwidth:.0f}Bps"', "efficiency = 1.0", "latency = 0"]
    lines += ["", "[node.pcie]", f'bandwidth = "{room:.0f}Bps"', "efficiency = 1.0", "latency = 0"]
    lines += ["", "[fabric]", 'kind = "star"', "", "[calibration]"]
    lines += [f"{key} = {value:.6g}" for key, value in constants.items()]
    return "\n".join(lines) + "\n"


def check_gloo(toml: str, rows: Sequence[LiveRow], nodes: int, ranks_per_node: int) -> str:
    """Return a table of measured and predicted times, and the median error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(toml, encoding="utf-8")
        cluster = load_cluster(str(path))
    compiler = Compiler(cluster)
    devices = tuple(slot.device for slot in cluster.place(nodes, ranks_per_node))
    lines = [f"{'operation':12s}{'size (B)':>12s}{'measured (us)':>15s}{'predicted (us)':>16s}{'error':>9s}"]
    errors: list[float] = []
    for row in rows:
        plan = compiler.compile(Transfer(canonical_op(row.op), "gloo", devices, row.size_bytes))
        predicted = plan.alone_s(compiler.links.capacity) * 1e6
        error = predicted / row.time_us - 1.0
        errors.append(abs(error))
        lines.append(f"{row.op:12s}{row.size_bytes:>12d}{row.time_us:>15.1f}{predicted:>16.1f}{error:>+9.1%}")
    lines.append(f"{plural(len(errors), 'size')} not fitted: median error {np.median(errors):.1%}")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Measure and print."""
    import torch
    import torch.distributed as dist

    sizes = [int(text) for text in argv[0].split(",")]
    ops = argv[1].split(",")
    budget_s = float(argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    calls: dict[tuple[str, int], Callable[[], Any]] = {}
    for op in ops:
        for nbytes in sizes:
            calls[(op, nbytes)] = _call(op, nbytes, size, torch, dist)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    _round(calls, times, dist)
    for samples in times.values():
        samples.clear()
    began = time.perf_counter()
    rounds = 0
    while True:
        # Rank 0 decides when to stop, and all stop together.
        more = torch.tensor([time.perf_counter() - began < budget_s or rounds < 5])
        dist.broadcast(more, 0)
        if not bool(more):
            break
        _round(calls, times, dist)
        rounds += 1
    if dist.get_rank() == 0:
        rows = [
            {"op": op, "size_bytes": nbytes, "time_us": sorted(samples)[len(samples) // 4] * 1e6}
            for (op, nbytes), samples in times.items()
        ]
        print(
            json.dumps({"ranks": size, "torch": torch.__version__, "rounds": rounds, "rows": rows}),
            flush=True,
        )
    dist.destroy_process_group()


def _round(
    calls: dict[tuple[str, int], Callable[[], Any]], times: dict[tuple[str, int], list[float]], dist: Any
) -> None:
    for key, call in calls.items():
        dist.barrier()
        began = time.perf_counter()
        call()
        times[key].append(time.perf_counter() - began)


def _call(op: str, nbytes: int, size: int, torch: Any, dist: Any) -> Callable[[], Any]:
    count = max(size, nbytes // 4 // size * size)
    whole, other = torch.ones(count), torch.ones(count)
    part = torch.ones(count // size)
    rank = dist.get_rank()
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if op == "all_gather":
        return lambda: dist.all_gather_into_tensor(other, part)
    if op == "alltoall":
        return lambda: dist.all_to_all_single(other, whole)
    if op == "broadcast":
        return lambda: dist.broadcast(whole, 0)
    if op == "reduce":
        return lambda: dist.reduce(whole, 0)
    if op != "sendrecv":
        raise SystemExit(f"expected an operation gloo is measured with, got {op}")

    def exchange() -> None:
        work = dist.isend(whole, (rank + 1) % size)
        dist.recv(other, (rank - 1) % size)
        work.wait()

    return exchange


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("started by distsim calibrate --on gloo, one process for each rank")
    main(sys.argv[1:])
