"""`distsim bench OP --on CLUSTER`: nccl-tests' table from a simulated cluster."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from distsim.errors import UsageError
from distsim.options import add_flags
from distsim.text.output_files import page_file
from distsim.text.units import plural
from distsim.text.untrusted_input import digits

_REAL = ("gloo", "nccl", "mpi")
_LIMIT_ROWS = 100_000


def add_parser(subparsers: Any) -> None:
    """Declare `distsim bench` with nccl-tests' flags."""
    parser = subparsers.add_parser(
        "bench",
        description="Time one collective on a simulated cluster and print nccl-tests' table. As there, size "
        "is the whole buffer for all_gather, reduce_scatter, alltoall, gather and scatter, one rank's for "
        "the others.",
        epilog="example: distsim bench all_reduce --on dgx-h100:2 -b 8 -e 8G -f 2",
    )
    parser.add_argument(
        "op",
        metavar="OP",
        help="all_reduce, all_gather, reduce_scatter, alltoall, broadcast, reduce, gather, scatter or sendrecv",
    )
    parser.add_argument(
        "--on",
        metavar="CLUSTER",
        default=None,
        help="a preset with a number of nodes (dgx-h100:4) or a cluster file; default dgx-h100:1",
    )
    sizes = parser.add_argument_group("sizes (8, 1K, 64M, 8G: powers of 1024)")
    sizes.add_argument("-b", "--minbytes", metavar="SIZE", default="32M", help="the first size (default 32M)")
    sizes.add_argument("-e", "--maxbytes", metavar="SIZE", default="32M", help="the last size (default 32M)")
    sizes.add_argument("-i", "--stepbytes", metavar="SIZE", default=None, help="from one size to the next, plus this")
    sizes.add_argument(
        "-f",
        "--stepfactor",
        metavar="N",
        type=int,
        default=None,
        help="from one size to the next, times this",
    )
    sizes.add_argument("--sizes", metavar="SIZE,...", default=None, help="only these sizes")
    timed = parser.add_argument_group("what is timed")
    timed.add_argument("-o", "--op", dest="redop", metavar="REDOP", default="sum", help="sum, prod, min, max or avg")
    timed.add_argument(
        "-d", "--datatype", metavar="TYPE", default="float", help="float, half, bfloat16, double, int8, ..."
    )
    timed.add_argument(
        "-r", "--root", metavar="RANK", type=int, default=0, help="root of broadcast, reduce, gather, scatter"
    )
    where = parser.add_argument_group("ranks")
    add_flags(where, "nnodes", "nproc_per_node")
    where.add_argument(
        "-g",
        "--ngpus",
        metavar="N",
        default="1",
        help="GPUs that one process drives: with more than 1, it launches on all of them in turn (default 1)",
    )
    how = parser.add_argument_group("how")
    add_flags(how, "algo", "proto", "fidelity")
    how.add_argument(
        "--nccl-version",
        metavar="X.Y.Z",
        default=None,
        help="NCCL's version (default: the cluster's); ideal: links only, no launch and no protocol",
    )
    how.add_argument(
        "--backend",
        choices=_REAL,
        default=None,
        help="library whose algorithms are used (default: nccl; gloo without GPUs)",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    out.add_argument(
        "--explain", action="store_true", help="for each size, print the cost of each algorithm and protocol"
    )
    out.add_argument(
        "--html", metavar="FILE", type=page_file, help="write an HTML page with curves over the size (extra: html)"
    )
    ignored = parser.add_argument_group("nccl-tests' flags without effect here (a comment line says so)")
    for flags in _IGNORED:
        ignored.add_argument(*flags, metavar="N", help=argparse.SUPPRESS)
    parser.set_defaults(func=run)


_IGNORED = (
    ("-t", "--nthreads"),
    ("-n", "--iters"),
    ("-w", "--warmup_iters"),
    ("-m", "--agg_iters"),
    ("-c", "--check"),
    ("-p", "--parallel_init"),
    ("-z", "--blocking"),
    ("-y", "--stream_null"),
    ("-T", "--timeout"),
    ("-G", "--cudagraph"),
    ("-C", "--report_cputime"),
    ("-a", "--average"),
    ("-R", "--local_register"),
    ("-N", "--run_cycles"),
    ("-S", "--report_timestamps"),
)

_WHY = {
    "nthreads": "ranks come from --on, --nnodes and --nproc-per-node, one device per rank",
    "check": "no values are computed, so there are no errors to count",
}


def run(args: argparse.Namespace) -> int:
    """Print the table or JSON, and return 0."""
    on = args.on or "dgx-h100:1"
    if on in _REAL:
        raise UsageError(
            f"bench --on {on} is not available: bench simulates; name a cluster (--on dgx-h100:2), or calibrate one "
            "from a live run with distsim calibrate --on gloo"
        )
    from distsim.network.bench import DTYPES, bench_op

    op = bench_op(args.op)
    if args.datatype not in DTYPES:
        raise UsageError(f"expected a type ({', '.join(DTYPES)}), got {args.datatype!r}")
    if args.redop not in ("sum", "prod", "min", "max", "avg", "mulsum", "all"):
        raise UsageError(f"expected a reduction (sum, prod, min, max, avg), got {args.redop!r}")
    sizes = _sizes(args)
    if args.html is not None:
        if args.explain:
            raise UsageError("--html draws the timed table, --explain prints what each algorithm would cost; give one")
    from distsim.cluster import load_cluster

    cluster = load_cluster(on)
    for line in cluster.warnings:
        print(f"distsim: {line}", file=sys.stderr)
    if args.explain:
        return _explain(args, op, cluster, sizes)
    from distsim.network.bench import bench, render_table

    timed = partial(
        bench,
        op,
        cluster,
        sizes,
        nproc_per_node=args.nproc_per_node,
        dtype=args.datatype,
        root=args.root,
        flavour=args.backend,
        fidelity=args.fidelity,
        algo=args.algo,
        proto=args.proto,
        nccl_version=args.nccl_version,
        launcher=_launcher(args),
    )
    rows = timed(nnodes=args.nnodes)
    slots = cluster.place(args.nnodes, args.nproc_per_node)
    document = _document(args, op, cluster, rows, slots)
    num_nodes, version = document["nodes"], document["nccl_version"]
    if args.html is not None:
        from distsim.report.html.page import bench_page, write_page

        write_page(bench_page(document), args.html)
    if args.json:
        print(json.dumps(document))
        return 0
    stepping = f"step: {args.stepfactor}(factor)" if args.stepfactor else f"step: {args.stepbytes or '1048576'}(bytes)"
    lines = render_table(
        op,
        rows,
        dtype=args.datatype,
        redop=args.redop,
        root=args.root,
        ranks=slots,
        notes=_notes(args)
        + cluster.nccl.ignored(os.environ)
        + _fluid(args, rows)
        + _assumed(args, cluster, rows)
        + (_faster_than_on(num_nodes // 2, rows, timed) if num_nodes > 2 and args.fidelity == "fluid" else []),
        sizes=f"minBytes {sizes[0]} maxBytes {sizes[-1]} {stepping}",
        cluster=f"{cluster.name} ({plural(num_nodes, 'node')}, {plural(len(slots), 'rank')}, "
        f"{cluster.nccl.library.upper()} {version})",
    )
    print("\n".join(lines))
    return 0


def _faster_than_on(fewer: int, rows: list[Any], timed: Callable[..., list[Any]]) -> list[str]:
    """Return a line about sizes that take less time than on *fewer* nodes, because the library chooses otherwise."""
    others = {row.size_bytes: row for row in timed(nnodes=fewer)}
    sizes = []
    for row in rows:
        other = others.get(row.size_bytes)
        if other is not None and row.time_us < 0.97 * other.time_us and row.way != other.way:
            sizes.append(f"{row.size_bytes} B ({row.way} here, {other.way} there)")
    if not sizes:
        return []
    more = f" and {len(sizes) - 3} more" if len(sizes) > 3 else ""
    return [
        f"faster than on {fewer} nodes, because the library chooses another algorithm or protocol: "
        f"{', '.join(sizes[:3])}{more}"
    ]


def _document(args: argparse.Namespace, op: str, cluster: Any, rows: list[Any], slots: Sequence[Any]) -> dict[str, Any]:
    figures = ("size_bytes", "count", "time_us", "algbw_GBps", "busbw_GBps")
    keys = (*figures, "algo", "proto", "channels", "fidelity")
    return {
        "op": op,
        "cluster": cluster.name,
        "nodes": len({slot.host for slot in slots}),
        "ranks": len(slots),
        "nccl_version": args.nccl_version or cluster.nccl.version,
        "dtype": args.datatype,
        "fidelity": args.fidelity,
        "simulated": True,
        "software": cluster.nccl.software,
        "rows": [{key: getattr(row, key) for key in keys} | _interval(row) for row in rows],
    }


def _interval(row: Any) -> dict[str, Any]:
    """Return the interval that holds eight of ten measured times and its source, or null without measurements."""
    interval = row.interval
    if interval is None:
        return {"low_us": None, "high_us": None, "interval_from": None}
    return {"low_us": interval.low_s * 1e6, "high_us": interval.high_s * 1e6, "interval_from": interval.basis}


def _assumed(args: argparse.Namespace, cluster: Any, rows: list[Any]) -> list[str]:
    """Return lines about the software that was assumed, and about the data behind the intervals."""
    from distsim.collectives.libraries.nccl_tuning import strange_release
    from distsim.collectives.uncertainty import MOST_NODES, MOST_RACKS, beyond_measured_racks

    facts = cluster.nccl
    strange = strange_release(args.nccl_version or facts.version) if facts.library == "nccl" else None
    notes = [strange] if strange and cluster.node.num_gpus else []
    if facts.named(cluster.variant):
        variant = f" (variant {cluster.variant})" if cluster.variant else ""
        notes.append(f"software assumed: {facts.software}{variant}")
    if any(row.interval is None for row in rows) and beyond_measured_racks(cluster, cluster.num_nodes):
        notes.append(
            f"no measured table has more than {MOST_RACKS} racks of one NVLink domain each: so the error of these "
            f"times is unknown, and more racks may be faster than fewer if NCCL chooses another algorithm"
        )
    bases = list(dict.fromkeys(row.interval.basis for row in rows if row.interval is not None))
    if bases:
        known = "8 of 10 measured times lie within the interval"
        if cluster.num_nodes > MOST_NODES:
            known = f"no measurement at this size ({MOST_NODES} nodes at most): the interval is widened"
        notes.append(f"{known}, from errors of {'; '.join(bases)}")
    return notes


def _sizes(args: argparse.Namespace) -> list[int]:
    from distsim.network.bench import Sizes
    from distsim.text.units import parse_size

    if args.sizes is not None:
        listed = [parse_size(text) for text in args.sizes.split(",") if text.strip()]
        if not listed:
            raise UsageError(f"expected sizes such as --sizes 1K,3M, got {args.sizes!r}")
        return listed
    first, last = parse_size(args.minbytes), parse_size(args.maxbytes)
    if first > last:
        raise UsageError(f"expected -b no larger than -e, got -b {args.minbytes} -e {args.maxbytes}")
    if args.stepfactor is not None and args.stepfactor < 2:
        raise UsageError(f"expected a step factor of 2 or more, got -f {args.stepfactor}")
    if args.stepfactor is not None and first == 0:
        raise UsageError("expected -b above 0 with a step factor, got 0")
    step = parse_size(args.stepbytes) if args.stepbytes is not None else 1 << 20
    if step < 1 and args.stepfactor is None:
        raise UsageError(f"expected a step of at least one byte, got -i {args.stepbytes}")
    if args.stepfactor is None and (last - first) // step >= _LIMIT_ROWS:
        raise UsageError(
            f"-b {args.minbytes} -e {args.maxbytes} in steps of {step} bytes is {(last - first) // step + 1} "
            "rows: use -f 2, or a larger -i"
        )
    return list(Sizes(first, last, args.stepfactor or 0, step))


def _launcher(args: argparse.Namespace) -> str:
    count = digits(args.ngpus)
    if not count:
        raise UsageError(f"expected a number of GPUs a process drives, got -g {args.ngpus}")
    return "shared" if count > 1 else "process"


def _notes(args: argparse.Namespace) -> list[str]:
    notes: list[str] = []
    for flags in _IGNORED:
        name = flags[1].lstrip("-")
        value = getattr(args, name)
        if value is not None:
            why = _WHY.get(name, "every simulated iteration takes the same time")
            notes.append(f"{flags[0]} {value} has no effect: {why}")
    return notes


def _fluid(args: argparse.Namespace, rows: list[Any]) -> list[str]:
    """Return lines about the rows that cannot be simulated message by message."""
    if args.fidelity != "message":
        return []
    algos = list(dict.fromkeys(row.algo for row in rows if row.fidelity != "message"))
    return [f"{algo} cannot be simulated by messages: its rows use flows" for algo in algos]


def _explain(args: argparse.Namespace, op: str, cluster: Any, sizes: list[int]) -> int:
    from distsim.collectives import Compiler, Transfer
    from distsim.network.bench import DTYPES, counted

    devices = tuple(slot.device for slot in cluster.place(args.nnodes, args.nproc_per_node))
    compiler = Compiler(
        cluster,
        algo=args.algo,
        proto=args.proto,
        nccl_version=args.nccl_version,
        launcher=_launcher(args),
    )
    flavour = args.backend or ("nccl" if cluster.node.num_gpus else "gloo")
    rows_by_size = []
    for given_size in sizes:
        size, _ = counted(op, given_size, len(devices), DTYPES[args.datatype])
        nbytes = size // len(devices) if op in ("gather", "scatter") else size
        rows = compiler.explain(Transfer(op, flavour, devices, nbytes, args.root))
        rows_by_size.append((size, rows))
    if args.json:
        keys = ("algo", "proto", "channels", "predicted_s", "why", "chosen")
        document = {
            "op": op,
            "cluster": cluster.name,
            "ranks": len(devices),
            "nccl_version": compiler.version,
            "sizes": [
                {"size_bytes": size, "candidates": [{key: getattr(row, key) for key in keys} for row in rows]}
                for size, rows in rows_by_size
            ],
        }
        print(json.dumps(document))
        return 0
    for size, rows in rows_by_size:
        print(f"{op} of {size} bytes on {cluster.name}, {plural(len(devices), 'rank')}, NCCL {compiler.version}")
        for row in sorted(rows, key=lambda row: (not row.chosen, row.predicted_s is None, row.predicted_s or 0.0)):
            cost = f"{row.predicted_s * 1e6:12.2f} us" if row.predicted_s is not None else f"{'-':>15s}"
            mark = "->" if row.chosen else "  "
            print(f" {mark} {row.algo:14s}{row.proto:8s}{row.channels:4d} channels {cost}  {row.why}")
    return 0
