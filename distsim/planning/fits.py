"""`distsim fits SCRIPT`: checks whether a training script fits into GPU memory, and finds changes that do."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from distsim.cli.dispatch import many_imports
from distsim.cli.inputs.launchers import program_of
from distsim.cli.inputs.pool import add_pool_flags
from distsim.cli.run import add_fault_flag, check_script, conditions_of, nnodes_of, nproc_per_node_of
from distsim.cluster.files.load import kind_of
from distsim.collectives.uncertainty import memory_error
from distsim.debug.messages import ranks_text
from distsim.errors import UsageError
from distsim.options import add_flags, default_of, options_of
from distsim.planning.command import node_range, script_parser
from distsim.report.tables import plain_table
from distsim.text.output_files import output_file, write_json
from distsim.text.ranks import format_ranks
from distsim.text.units import format_bytes
from distsim.text.untrusted_input import brief

if TYPE_CHECKING:
    from rich.console import RenderableType

    from distsim.planning.advice import Advice, LayoutChange
    from distsim.planning.memory import Fit
    from distsim.scenario.pool import PointPool
    from distsim.sim import RunRequest

AFTER_SCRIPT = ("--on", "--nodes")
OPTIONS = ("on", "nnodes", "nproc_per_node", "seed", "routing", "lengths", "fuse", "gpu_libraries")
DOES_NOT_FIT = 5
MOST_LINES = 12
LEAST_WIDE, MOST_WIDE = 24, 44
"""Smallest and largest width of the column that describes the memory."""
LINE_WIDE = 48
"""Width of the other columns: memory, its share, the line."""
LEAST_SHARE = 0.005
"""Smallest share of the peak that gets a line of its own."""
DESCRIPTION = """\
Simulate the first two steps of a training script and say what its GPUs' memory is needed for: by rank and pipeline
stage, by kind, by line and operator. If it does not fit, changes for which the script has a flag (micro-batch,
recomputation, sharding, expert, tensor, pipeline and context parallelism) are tried, the smallest first, then
combinations. The fewest nodes, the largest micro-batch and the largest sequence that fit are searched, too.

  distsim fits --on dgx-h100:1 train.py --mbs 2
  distsim fits --on dgx-h100 --nodes 1..64 train.py
  distsim fits --on dgx-h100:1 --json -- torchrun --nproc-per-node 8 train.py

exit codes: 0 it fits, 5 it does not, 1 the program raised, 2 usage, 3 the program hangs
"""


def add_parser(subparsers: Any) -> None:
    """Add `fits`."""
    parser = script_parser(subparsers, "fits", DESCRIPTION)
    add_flags(parser, *OPTIONS)
    add_fault_flag(parser)
    add_pool_flags(parser, os.cpu_count() or 1, script=False, machines=False)
    parser.add_argument(
        "--report", metavar="FILE|-", type=output_file("--report"), help="all figures as JSON (schema distsim.fits/1)"
    )
    parser.add_argument(
        "--nodes", metavar="A..B", help="search the fewest nodes that fit, such as 1..64, and report on these"
    )
    parser.add_argument("--json", action="store_true", help="print that JSON instead of the tables")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print whether the script fits.

    Return 0 if it fits, 5 if not, else the exit code of a run that ended with an error.
    """
    with many_imports(args.own_process):
        from distsim.debug.report.console import Console, piped_width
        from distsim.planning.advice import advise
        from distsim.planning.memory import NothingOnGpu
        from distsim.report import print_summary
        from distsim.scenario.pool import opened, pool_of

    if args.pool is not None and args.pool.partition(":")[0] != "processes":
        raise UsageError(f"--pool {brief(args.pool)}: expected processes:N, since trials of fits run on this machine")
    pool = pool_of(args)
    bounds = None if args.nodes is None else node_range(args.nodes)
    request = _request(args)
    try:
        request, fit, known = _measured(request, bounds, pool)
    except NothingOnGpu as error:
        if not error.outcome.diagnoses:
            raise
        print_summary(error.outcome)
        return error.outcome.exit_code
    if fit.outcome.failures or fit.outcome.diagnoses or (fit.outcome.exit_code and not fit.training.steps):
        print_summary(fit.outcome)
        return fit.outcome.exit_code
    stream = sys.stderr if args.report == "-" else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else piped_width(100), quiet=args.json)
    console.print(_verdict(request, fit))
    console.print(_trust(fit))
    stream.flush()
    with opened(pool):
        advice = advise(request, fit, known, bounds, lambda text: _say(f"with {text}"), pool)
    document = _document(request, fit, advice)
    if args.json:
        print(json.dumps(document, indent=1, sort_keys=True))
    for part in [Text(""), *_advice(request, fit, advice), *_details(fit, console.width)]:
        console.print(part)
    write_json("--report", args.report, document, sort_keys=True)
    return 0 if fit.fits else DOES_NOT_FIT


def _measured(
    request: RunRequest, bounds: tuple[int, int] | None, pool: PointPool | None
) -> tuple[RunRequest, Fit, dict[int, LayoutChange]]:
    """Return the request that the report is about, its memory, and what ran by number of nodes.

    Within *bounds*, that is the program on the fewest nodes on which it fits, or on the most.
    """
    from distsim.cluster import load_cluster
    from distsim.planning import memory
    from distsim.planning.advice import LayoutChange, Trials, fewest_nodes, on_cluster

    measure = memory.measure if pool is None else memory.measure_apart
    if bounds is None:
        _say("the first two steps")
        fit = measure(request)
        return request, fit, {_nodes(request): LayoutChange("", fit.need)}
    kind, given = kind_of(str(request.on)), request
    if given.conditions is not None:
        most = load_cluster(f"{kind}:{bounds[1]}")
        for rule in given.conditions.rules:
            rule.check(most, len(most.place(None, given.nproc_per_node)))
    request = on_cluster(given, f"{kind}:{bounds[0]}")
    _say(f"the first two steps on {request.on}")
    fit = measure(request)
    known = {bounds[0]: LayoutChange("", fit.need)}
    if fit.fits or fit.outcome.failures or fit.outcome.diagnoses:
        return request, fit, known
    trials = Trials(replace(given, on=request.on), fit, lambda text: _say(f"with {text}"), pool)
    chosen = fewest_nodes(trials, known, bounds) or bounds[1]
    if chosen == bounds[0]:
        return request, fit, known
    request = on_cluster(given, f"{kind}:{chosen}")
    _say(f"the first two steps on {request.on}, by line")
    return request, measure(request), known


def _nodes(request: RunRequest) -> int:
    from distsim.cluster import load_cluster

    return request.nnodes or load_cluster(str(request.on)).num_nodes


def _say(text: str) -> None:
    print(f"distsim: {text} ...", file=sys.stderr, flush=True)


def _request(args: argparse.Namespace) -> RunRequest:
    from distsim.sim import RunRequest

    launched = program_of(args.training_script, args.training_script_args, args.module)
    if not launched.module:
        check_script(launched.program)
    nnodes = launched.nnodes if args.nnodes is None else args.nnodes
    nproc = launched.nproc_per_node if args.nproc_per_node is None else args.nproc_per_node
    options = options_of(args) | {
        "on": default_of("on") if args.on is None else args.on,
        "nnodes": nnodes_of(None if nnodes is None else str(nnodes), []),
        "nproc_per_node": nproc_per_node_of(None if nproc is None else str(nproc)),
    }
    return RunRequest(
        launched.program,
        module=launched.module,
        args=launched.arguments,
        environ=launched.environ,
        conditions=conditions_of(args.fault),
        **options,
    )


def _document(request: RunRequest, fit: Fit, advice: Advice) -> dict[str, Any]:
    """Return the JSON document (distsim.planning.schema.FitsReport)."""
    from distsim.report.training.entry import training_section

    training = training_section(fit.training)
    return {
        "schema": "distsim.fits/1",
        "program": request.program,
        "arguments": request.args,
        "cluster": str(request.on),
        "gpu": fit.training.gpu,
        "num_gpus": fit.training.num_gpus,
        "fits": fit.fits,
        "is_close": fit.is_close,
        "capacity": fit.capacity,
        "needed": fit.needed,
        "median_error": memory_error().median,
        "worst_error": memory_error().worst,
        "steps": fit.training.steps,
        "not_traced": list(fit.outcome.not_traced),
        "ranks": [asdict(peak) for peak in fit.peaks],
        "kinds": fit.fullest.memory,
        "held": [{"name": one.name} | asdict(one.site) for one in fit.held],
        "out_of_memory": training["out_of_memory"],
        "changes": [{"change": change.text, "problem": change.problem} | _fit_json(change) for change in advice.tried],
        "advised": None if advice.change is None else advice.change.text,
        "fits_from_nodes": advice.fewest,
        "nodes": [{"nodes": number} | _fit_json(change) for number, change in sorted(advice.nodes.items())],
        "largest": advice.largest,
    }


def _fit_json(change: LayoutChange) -> dict[str, Any]:
    fit = change.fit
    return {"fits": None, "needed": None} if fit is None else {"fits": fit.fits, "needed": fit.needed}


def _details(fit: Fit, width: int) -> list[RenderableType]:
    """Return the figures on which the answer is based."""
    from distsim.report.training.section import memory_kinds

    fullest = fit.fullest
    return [
        Text("\npeak by rank" + " and stage" * any(peak.stage for peak in fit.peaks), style="bold"),
        _ranks(fit),
        Text(f"\nin use at the peak of rank {fullest.rank}", style="bold"),
        memory_kinds(fullest.memory, fullest.peak_allocated_bytes),
        Text("\nby line and operator", style="bold"),
        _lines(fit, width - LINE_WIDE),
    ]


def _verdict(request: RunRequest, fit: Fit) -> RenderableType:
    training = fit.training
    subtitle = f"{request.program} on {request.on}, {training.num_gpus} GPUs ({training.gpu})"
    if fit.fits:
        free = fit.capacity - fit.needed
        headline = (
            f"{format_bytes(fit.needed)} of {format_bytes(fit.capacity)} reserved at the peak "
            f"({fit.needed / fit.capacity:.0%}), {format_bytes(free)} are left"
        )
        return Group(Text.assemble(("FITS  ", "bold green"), (headline, "bold")), _indented(subtitle))
    short = training.out_of_memory[0]
    more = fit.needed - fit.capacity
    headline = f"it needs {format_bytes(fit.needed)} of {format_bytes(fit.capacity)}"
    headline += (
        f": {format_bytes(more)} too much" if more > 0 else ", and the free memory is in pieces that are too small"
    )
    line = f"memory runs out at a request for {format_bytes(short.asked)}"
    if short.site is not None:
        line += f": {short.site.operator} {short.site.tensor} at {short.site.where or 'no line of the program'}"
        line += f"  {short.site.code}" if short.site.code else ""
    return Group(
        Text.assemble(("DOES NOT FIT  ", "bold red"), (headline, "bold")), _indented(subtitle), _indented(line)
    )


def _indented(text: str, style: str = "") -> RenderableType:
    return Padding(Text(text, style=style), (0, 0, 0, 2), expand=False)


def _trust(fit: Fit) -> RenderableType:
    from distsim.planning.memory import STEPS

    stands = (
        "an error of that size could turn this answer around"
        if fit.is_close
        else "an error of that size does not change this answer"
    )
    error = memory_error()
    lines = [
        f"predicted peaks of {error.rows} published runs err by {error.median:.1%} in the median, {error.worst:.1%} at "
        f"most: {stands}"
    ]
    steps = fit.training.steps
    if steps < STEPS:
        lines.append(f"only {steps} step was simulated: the next step also needs memory for the optimizer state")
    if fit.outcome.not_traced:
        others = sorted(set(range(fit.outcome.world_size)) - set(fit.outcome.not_traced))
        lines.append(f"{ranks_text(others)} ran on behalf of all {fit.outcome.world_size}")
    return Group(*(_indented(line, "dim") for line in lines))


def _advice(request: RunRequest, fit: Fit, advice: Advice) -> list[RenderableType]:
    """Return what helps: the change that fits, those that were tried, the fewest nodes, the largest batch."""
    from distsim.report.training.section import remedies

    parts: list[RenderableType] = []
    if not fit.fits:
        if advice.change is not None:
            parts.append(_change("smallest change that fits  ", advice.change, "bold"))
        else:
            why = "no change that was tried fits" if advice.tried else "the script has no flag for a change"
            parts.append(Text(f"{why} on {request.on}", style="bold"))
        others = [change for change in reversed(advice.tried) if change is not advice.change]
        parts += [_change("tried  ", change, "dim") for change in others if change.fit is not None]
        refused = [change for change in others if change.fit is None]
        if refused:
            parts.append(_change("tried  ", refused[0], "dim"))
        if len(refused) > 1:
            parts.append(Text(f"and {len(refused) - 1} more that did not run: --json has all", style="dim"))
    parts.append(Text.assemble(("fits from  ", "bold"), _nodes_text(request, advice)))
    if advice.largest:
        texts = [f"{name} {'none' if value is None else value}" for name, value in advice.largest.items()]
        parts.append(Text.assemble(("largest  ", "bold"), f"{', '.join(texts)} (each alone, all else as given)"))
    if not fit.fits and advice.change is None and advice.fewest is None:
        parts.append(Text("not tried, for lack of a flag:", style="bold"))
        parts += [Text(f"- {remedy}") for remedy in remedies(fit.training.out_of_memory[0], fit.training)]
    return parts


def _change(head: str, change: LayoutChange, style: str) -> RenderableType:
    other = change.fit
    if other is None:
        outcome = f"did not run: {change.problem}"
    elif other.fits:
        outcome = f"fits: {format_bytes(other.needed)} reserved ({other.needed / other.capacity:.0%}), by a second run"
        outcome += ", but close" * other.is_close
    else:
        outcome = f"does not fit: {format_bytes(other.needed)}"
    return Text.assemble((head, style), (change.text, "bold"), f"  {outcome}")


def _nodes_text(request: RunRequest, advice: Advice) -> str:
    """Return the fewest nodes on which the unchanged program fits, and what it needs on one node fewer."""
    kind, fewest = kind_of(str(request.on)), advice.fewest
    short = [number for number, change in advice.nodes.items() if change.fit is not None and not change.fit.fits]
    parts = []
    if fewest is not None and (fit := advice.nodes[fewest].fit) is not None:
        nodes = "1 node" if fewest == 1 else f"{fewest} nodes"
        share = f"{fit.needed / fit.capacity:.0%}"
        parts.append(f"{nodes} of {kind} ({fit.num_gpus} GPUs): {format_bytes(fit.needed)} ({share})")
    else:
        parts.append(f"no number of nodes of {kind} that was tried (up to {max(advice.nodes)})")
    if short and (needed := advice.nodes[max(short)].fit) is not None:
        parts.append(f"on {max(short)} it needs {format_bytes(needed.needed)}")
    if fewest is None and len(short) > 1:
        parts.append("what fills the memory is not divided among nodes")
    return "; ".join(parts)


def _ranks(fit: Fit) -> RenderableType:
    stages = any(peak.stage for peak in fit.peaks)
    table = plain_table(">ranks", *([">stage"] if stages else []), ">reserved", ">allocated", ">of capacity")
    for peak in fit.peaks:
        needed = peak.allocated if peak.runs_out else peak.reserved
        reserved = "too much" if peak.runs_out else format_bytes(peak.reserved)
        cells = [reserved, format_bytes(peak.allocated), f"{needed / fit.capacity:.0%}"]
        style = "red" if peak.runs_out else ""
        table.add_row(format_ranks(peak.ranks), *([peak.stage] if stages else []), *cells, style=style)
    return table


def _lines(fit: Fit, room: int) -> RenderableType:
    total = fit.fullest.peak_allocated_bytes
    shown = [one for one in fit.held if one.site.nbytes > LEAST_SHARE * total][:MOST_LINES]
    whats = [
        f"{one.name or one.site.operator} {one.site.tensor}" + f" x{one.site.count}" * (one.site.count > 1)
        for one in shown
    ]
    width = min(max(room, LEAST_WIDE), MOST_WIDE, max(map(len, whats), default=0))
    lines = [Text(f"{'memory':>9} share  {'what':{width}}  line", style="dim")]
    for one, whole in zip(shown, whats, strict=True):
        site = one.site
        whole = whole if len(whole) <= width else f"{whole[: width - 1]}…"
        head = f"{format_bytes(site.nbytes):>9} {site.nbytes / total:5.0%}  {whole:{width}}  "
        where = (os.path.basename(site.where) or one.kind, "dim")
        lines.append(Text.assemble(head, where, f"  {site.code}", no_wrap=True, overflow="ellipsis"))
    rest = sum(one.site.nbytes for one in fit.held) - sum(one.site.nbytes for one in shown)
    if rest > LEAST_SHARE * total:
        lines.append(Text(f"and {format_bytes(rest)} in smaller parts: --report FILE has all", style="dim"))
    return Group(*lines)
