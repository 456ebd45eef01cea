"""nccl-tests on a simulated cluster: the same operations, the same meaning of size, the same table.

Source of sizes and bandwidth factors: NVIDIA/nccl-tests, src/*.cu (GetCollByteCount, GetBw) and
doc/PERFORMANCE.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distsim.errors import UsageError

if TYPE_CHECKING:
    from distsim.collectives.uncertainty import Interval

OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "alltoall",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "sendrecv",
)

DTYPES = {
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "half": 2,
    "float": 4,
    "double": 8,
    "bfloat16": 2,
    "f8e4m3": 1,
    "f8e5m2": 1,
}

_NUMBER_OF_SPREAD = ("all_gather", "reduce_scatter", "alltoall", "gather", "scatter")
"""Operations whose size is the whole buffer, rounded down to a multiple of ranks."""

_TORCH_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "alltoall",
}

_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One line of the table."""

    size_bytes: int
    count: int
    time_us: float
    algbw_GBps: float
    busbw_GBps: float
    algo: str
    proto: str
    channels: int
    fidelity: str = "fluid"
    """message where every message was simulated: not every algorithm has that form."""
    interval: Interval | None = None
    """Interval in which a measured time is expected; None if nothing comparable was measured."""

    @property
    def way(self) -> str:
        """Return the algorithm with its protocol."""
        return f"{self.algo}/{self.proto}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes from *first* to *last*, each multiplied by *factor* or increased by *step*."""

    first: int
    last: int
    factor: int = 0
    step: int = 0

    def __iter__(self) -> Iterator[int]:
        size = self.first
        while size <= self.last:
            yield size
            if self.factor:
                size *= self.factor
            elif self.step:
                size += self.step
            else:
                return


def bench_op(name: str) -> str:
    """Return the name that nccl-tests uses for an operation; any usual spelling is accepted."""
    plain = name.lower().replace("-", "_").removesuffix("_perf")
    for op in OPS:
        if plain.replace("_", "") == op.replace("_", ""):
            return op
    if plain in _TORCH_NAMES:
        return _TORCH_NAMES[plain]
    import difflib

    near = difflib.get_close_matches(plain, OPS, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(f"expected an operation ({', '.join(OPS)}), got {name!r}{hint}")


def busbw_factor(op: str, ranks: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth, as PERFORMANCE.md of nccl-tests defines it."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in _NUMBER_OF_SPREAD else 1.0


def counted(op: str, size: int, ranks: int, width: int) -> tuple[int, int]:
    """Return the size and count that nccl-tests prints for a requested size.

    Sizes are whole elements. Operations that divide their buffer use a multiple of the number of ranks, with each
    share a multiple of 16 bytes (of one element for alltoall, gather and scatter).
    """
    count = size // width
    if op in ("all_gather", "reduce_scatter"):
        share = (count // ranks) & -max(1, 16 // width)
        return share * ranks * width, share
    if op in _NUMBER_OF_SPREAD:
        share = count // ranks
        return share * ranks * width, share
    return count * width, count


def bench(
    op: str,
    cluster: Any,
    sizes: Iterable[int],
    *,
    nnodes: int | None = None,
    nproc_per_node: int | None = None,
    dtype: str = "float",
    root: int = 0,
    flavour: str | None = None,
    network: Any = None,
    **forced: Any,
) -> list[BenchRow]:
    """Time *op* on *cluster* for each size, one after the other on an idle network. *forced* goes to
    `make_network`."""
    import simpy

    from distsim.collectives import Transfer
    from distsim.collectives.uncertainty import interval
    from distsim.network import make_network

    devices = tuple(slot.device for slot in cluster.place(nnodes, nproc_per_node))
    ranks, width = len(devices), DTYPES[dtype]
    if not 0 <= root < ranks:
        raise UsageError(f"expected a root from 0 to {ranks - 1}, got {root}: lower -r, or use more ranks")
    net = make_network(simpy.Environment(), cluster, **forced) if network is None else network
    kind = flavour or ("nccl" if cluster.node.num_gpus else "gloo")
    num_nodes = len({slot.host for slot in cluster.place(nnodes, nproc_per_node)})
    known = forced.get("nccl_version") != "ideal"
    rows: list[BenchRow] = []
    for given_size in sizes:
        size, count = counted(op, given_size, ranks, width)
        per_rank = op in ("gather", "scatter")
        transfer = Transfer(op, kind, devices, size // ranks if per_rank else size, root)
        timing: Any = net.env.run(net.collective(transfer))
        seconds = timing.end_s - timing.start_s
        algbw = size / seconds / 1e9 if seconds > 0 else 0.0
        rows.append(
            BenchRow(
                size,
                count,
                seconds * 1e6,
                algbw,
                algbw * busbw_factor(op, ranks),
                timing.algo,
                timing.proto,
                timing.channels,
                net.fidelity_of(transfer),
                interval(cluster, transfer.nbytes, num_nodes, seconds, kind, op) if known else None,
            )
        )
    return rows


def expected_interval(op: str, cluster: Any, nbytes: int, ranks: Sequence[int]) -> Interval | None:
    """Return the interval of the time of *op* among some ranks of a cluster that runs nothing else.

    Args:
        op: Operation, as nccl-tests names it.
        cluster: The cluster, whose ranks fill one node after the other.
        nbytes: Size as nccl-tests counts it.
        ranks: The members.
    """
    import simpy

    from distsim.collectives import Transfer
    from distsim.collectives.uncertainty import interval
    from distsim.network import make_network

    slots = [slot for slot in cluster.place(None, None) if slot.rank in set(ranks)]
    net = make_network(simpy.Environment(), cluster)
    timing: Any = net.env.run(net.collective(Transfer(op, "nccl", tuple(slot.device for slot in slots), nbytes)))
    hosts = len({slot.host for slot in slots})
    return interval(cluster, nbytes, hosts, timing.end_s - timing.start_s, "nccl", op)


def _time(us: float) -> str:
    """Format a time as nccl-tests' getFloatStr with 7 characters: two decimals, fewer from 10 and 100 ms on."""
    if us < 1e4:
        return f"{us:.2f}"
    return f"{us:.1f}" if us < 1e5 else f"{us:.0f}"


_SURE = "8 of 10 times within"


def _within(row: BenchRow) -> str:
    """Return the interval of *row* as text, such as (650-1,010), under the column's head."""
    if row.interval is None:
        return ""
    low, high = (seconds * 1e6 for seconds in (row.interval.low_s, row.interval.high_s))
    return f"{f'({_brief(low)}-{_brief(high)})':>{len(_SURE) + 2}s}"


def _brief(us: float) -> str:
    """Return a time of an interval with three digits, as the interval is not known more precisely."""
    return f"{float(f'{us:.3g}'):,.0f}" if us >= 100 else f"{us:.3g}"


def render_table(
    op: str,
    rows: Sequence[BenchRow],
    *,
    dtype: str,
    redop: str,
    root: int,
    ranks: Sequence[Any],
    notes: Sequence[str],
    sizes: str,
    cluster: str,
) -> Iterator[str]:
    """Yield the lines of nccl-tests' own output."""
    yield f"# nThread 1 nGpus 1 {sizes} warmup iters: 0 iters: 1 agg iters: 1 validation: 0 graph: 0"
    yield "#"
    yield f"# simulated by distsim on {cluster}: every iteration would take the same time, so one is run"
    for note in notes:
        yield f"# {note}"
    yield "#"
    yield "# Using devices"
    shown = list(ranks) if len(ranks) <= 16 else [*ranks[:8], None, *ranks[-2:]]
    for slot in shown:
        if slot is None:
            yield f"#  ... {len(ranks) - 10} more ranks"
            continue
        where = f"Pid {slot.rank:6d} on {f'n{slot.host}':>10s} device {slot.local_rank:2d} [{slot.device}]"
        yield f"#  Rank {slot.rank:2d} Group  0 {where}"
    yield "#"
    yield f"#{'':53s}out-of-place{'':24s}in-place"
    heads = ("time", "algbw", "busbw", "#wrong")
    sure = any(row.interval for row in rows)
    yield (
        "#"
        + f"{'size':>12s}{'count':>14s}{'type':>10s}{'redop':>8s}{'root':>8s}"
        + 2 * "".join(f"{head:>8s}" for head in heads)
        + (f"  {_SURE}" if sure else "")
    )
    units = ("(us)", "(GB/s)", "(GB/s)", "")
    yield (
        "#"
        + f"{'(B)':>12s}{'(elements)':>14s}{'':26s}"
        + 2 * "".join(f"{unit:>8s}" for unit in units)
        + (f"{'(us)':>{len(_SURE) + 2}s}" if sure else "")
    )
    kind = redop if op in _REDUCING else "none"
    rooted = root if op in _ROOTED else -1
    for row in rows:
        figures = f"{_time(row.time_us):>8s}{row.algbw_GBps:8.2f}{row.busbw_GBps:8.2f}{'N/A':>8s}"
        yield f"{row.size_bytes:13d}{row.count:14d}{dtype:>10s}{kind:>8s}{rooted:8d}{figures}{figures}{_within(row)}"
    yield "# Out of bounds values : 0 OK"
    average = sum(row.busbw_GBps for row in rows) / len(rows) if rows else 0.0
    yield f"# Avg bus bandwidth    : {average:g}"
    yield "#"
