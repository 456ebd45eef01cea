"""Logs of nccl-tests by hand: as src/util.cu prints them."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.network.bench import busbw_factor

__all__ = ["log", "table_line"]

_HEAD = "\n".join(
    [
        f"#{62 * ' '}out-of-place{23 * ' '}in-place",
        "#       size         count      type   redop    root" + 2 * "     time   algbw   busbw  #wrong",
        "#        (B)    (elements)                          " + 2 * "     (us)  (GB/s)  (GB/s)        ",
    ]
)


def table_line(op: str, ranks: int, size: int, time_us: float, *, wrong: str = "0") -> str:
    """A line of the table, both halves alike."""
    algbw = size / time_us / 1e3
    half = f"  {time_us:7.2f}  {algbw:6.2f}  {algbw * busbw_factor(op, ranks):6.2f}  {wrong:>6s}"
    redop = "sum" if op in ("all_reduce", "reduce_scatter", "reduce") else "none"
    return f"{size:12d}  {size // 4:12d}  {'float':>8s}  {redop:>6s}  {-1:6d}{half}{half}"


def log(
    op: str,
    times: Sequence[tuple[int, float]],
    *,
    nodes: int = 1,
    gpus: int = 8,
    gpu: str = "NVIDIA H100 80GB HBM3",
    named: bool = True,
    heard: Sequence[str] = ("NCCL version 2.27.3+cuda12.9",),
    options: str = "agg iters: 1 validation: 1 graph: 0",
    head: str = _HEAD,
) -> str:
    """One run: head, devices, what NCCL said, the table, its end."""
    ranks = nodes * gpus
    lines = [f"# Collective test starting: {op}_perf"] if named else []
    lines += [f"# nThread 1 nGpus 1 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 5 iters: 20 {options}", "#"]
    lines.append("# Using devices")
    for rank in range(ranks):
        where = f"Pid {1000 + rank:6d} on {f'node{rank // gpus}':>10s} device {rank % gpus:2d} [0000:1b:00] {gpu}"
        lines.append(f"#  Rank {rank:2d} Group  0 {where}")
    lines += [*heard, "#", head]
    lines += [table_line(op, ranks, size, time_us) for size, time_us in times]
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1 ", "#", ""])
