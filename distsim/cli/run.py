"""`distsim run`: one torch.distributed program, simulated on a cluster or for real under torch elastic.

torchrun's own parser is the parent, so every torchrun flag is taken; those that have no meaning in
a simulation are accepted and named in a note.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distsim.cli.dispatch import REAL_BACKENDS, many_imports, parse
from distsim.cli.inputs.launchers import SHELL_VARIABLE, Launched, program_of
from distsim.cluster import load_cluster
from distsim.errors import UsageError
from distsim.options import add_flags, default_of, options_of
from distsim.report.training.goodput import add_failure_flags, add_goodput, asks_for_goodput, failures_of
from distsim.shelves import shelf
from distsim.text.output_files import file_or_folder, output_file, page_file, write_text, written
from distsim.text.units import count_of, seconds
from distsim.text.untrusted_input import digits

if TYPE_CHECKING:
    from distsim.sim import RunRequest
    from distsim.sim.outcome import Outcome
    from distsim.sim.world.conditions import Conditions
    from distsim.watchdog.shared_state import ProcessOutcome

if sys.platform == "win32":
    raise UsageError("expected Linux or macOS, got Windows: run distsim in WSL (wsl --install), which is Linux")

DEFAULT_CLUSTER = default_of("on")
BUDGET_S = 60.0

NO_MEANING_IN_SIMULATION = (
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "max_restarts",
    "monitor_interval",
    "start_method",
    "event_log_handler",
    "role",
    "local_ranks_filter",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
    "node_rank",
    "master_addr",
    "master_port",
    "local_addr",
    "logs_specs",
    "numa_binding",
    "signals_to_handle",
    "shutdown_timeout",
    "virtual_local_rank",
)
"""torchrun's settings for real processes and a real rendezvous; one process simulates all nodes.
`--standalone` and `--run-path` are simply true of every simulation."""

DESCRIPTION = """\
Run a torch.distributed program, unmodified.

  distsim run --on dgx-h100:4 train.py --lr 3e-4     simulated: 4 nodes of a preset, 32 ranks
  distsim run --on cluster.toml train.py             simulated: your own cluster
  distsim run --on dgx-h100:4 -- torchrun train.py   another launcher's command, also accelerate launch, deepspeed, srun
  distsim run --on gloo --nproc-per-node 4 train.py  for real, under guard

Without --on it is simulated on one node (dgx-h100:1). In a simulation the world is every
accelerator of the cluster unless --nnodes / --nproc-per-node ask for fewer.
"""


def add_parser(subparsers: Any) -> None:
    """Add the command `run`. This imports torch, whose torchrun defines further flags."""
    from torch.distributed.run import get_args_parser

    torchrun = get_args_parser()
    parser = subparsers.add_parser(
        "run",
        description=DESCRIPTION,
        usage="distsim run [--on CLUSTER] [flags] [-m] training_script [script's own arguments]",
        parents=[torchrun],
        add_help=False,
        conflict_handler="resolve",
    )
    defaults = {action.dest: action.default for action in torchrun._actions}
    add_own_flags(parser)
    torchrun.prog = "torchrun"
    parser._action_groups.remove(parser._optionals)
    more = parser.add_argument_group("all flags of torchrun are taken as well")
    more.add_argument(
        "--help-torchrun", action="version", version=torchrun.format_help(), help="show the flags of torchrun, and exit"
    )
    importlib.import_module("distsim.debug.settings").add_real_flags(parser)
    parser.set_defaults(func=run, torchrun_defaults=defaults)
    # The size of the world: torchrun's default is one rank, a simulation's the whole cluster.
    for dest in ("nnodes", "nproc_per_node"):
        if f"PET_{dest.upper()}" not in os.environ:
            parser.set_defaults(**{dest: None})


def add_own_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a simulated run that torchrun does not have."""
    where = parser.add_argument_group("where it runs")
    where.add_argument(
        "--on",
        metavar="CLUSTER",
        help="a preset with its number of nodes (dgx-h100:4; distsim topo list shows all), a cluster "
        f"file (.toml), or gloo | nccl | mpi for a real run (default: {DEFAULT_CLUSTER})",
    )
    where.add_argument(
        "--use-env",
        "--use_env",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the ranks learn LOCAL_RANK from the environment; with --no-use-env the script is also given "
        "--local_rank=N, as by torch.distributed.launch (python -m distsim.deprecated.launch says so)",
    )
    where.add_argument(
        "--one-process",
        action="store_true",
        help="start the script once and without torchrun's variables, as python does; processes that it spawns are the "
        "ranks. Its output has no rank in front, and the report goes to stderr",
    )
    add_fault_flag(where)
    add_flags(where, "seed")
    where.add_argument(
        "--ranks",
        type=_trace,
        choices=["auto", "all", "sample"],
        default="auto",
        help="on simulated GPUs: auto traces every rank within --budget, and otherwise a sample of the ranks, which "
        "proves nothing about the others (exit code 5); all traces every rank; sample traces the first, the last and "
        "one rank in between (exit code 0) (default: auto)",
    )
    where.add_argument(
        "--budget",
        type=seconds,
        default=BUDGET_S,
        metavar="SECONDS",
        help="CPU time up to which --ranks auto traces every rank, estimated from the ranks' work instead of "
        f"measured, so that a run is the same on every machine; 60 or 60s (default: {BUDGET_S:g})",
    )
    values = parser.add_argument_group("the values of tensors on simulated GPUs")
    add_flags(values, "data", "placeholder", "routing", "lengths", "fuse", "strict_kernels", "gpu_libraries", "silent")
    values.add_argument(
        "--silent-allow",
        action="append",
        default=[],
        metavar="KIND:TENSOR",
        help="leave out this silent finding, such as replicas_diverge:*.experts.*; may be given several times",
    )
    network = parser.add_argument_group("the simulated network")
    add_flags(network, "fidelity", "algo", "proto", "nccl_version")
    output = parser.add_argument_group("what it leaves")
    output.add_argument(
        "--report",
        metavar="FILE|-",
        type=output_file("--report"),
        help="the report as JSON (schema distsim.report/1); -: stdout",
    )
    output.add_argument(
        "--trace",
        metavar="FILE|DIR/",
        type=file_or_folder,
        help="a trace for Perfetto, all ranks in one file; into a folder, one file per rank, as HTA expects",
    )
    output.add_argument(
        "--html",
        metavar="FILE",
        type=page_file,
        help="the report as one HTML file, which needs no network (extra: html)",
    )
    output.add_argument(
        "--events",
        metavar="FILE|-|otlp",
        type=_events,
        help="append a line of JSON for each warning, withdrawn warning, straggler, verdict and the end; otlp: send "
        "them to an OpenTelemetry collector (docs/events.md)",
    )
    output.add_argument(
        "--on-verdict",
        metavar="COMMAND",
        help="run this shell command at the first verdict, the JSON report on its standard input; ended after 10 s, "
        "and its failure changes no exit code",
    )
    add_flags(output, "tokens_per_step")
    output.add_argument(
        "--tokens", metavar="N", help="of a whole training, 1T or 300B: the report has its time, cost and energy"
    )
    output.add_argument("--price", metavar="AMOUNT", help="of a GPU's hour (default: price in the cluster file)")
    output.add_argument(
        "--quiet", action="store_true", help="print no progress, and a report only if something is wrong"
    )
    add_flags(output, "host_timeout_s")
    add_failure_flags(parser)


def add_fault_flag(parser: Any) -> None:
    """Add `--fault`."""
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="WORDS",
        help="inject a fault as in a scenario file, such as 'link_slow n3/nic0 0.25', 'gpu_slow n2/gpu5 0.8' or "
        "'crash 3 at_s=2'; may be given several times (docs/reference/scenario.md)",
    )


def _trace(text: str) -> str:
    return "auto" if text == "equal" else text  # as it was called


def price_of(text: str | None) -> float | None:
    """Return the price of a GPU hour that *text* gives; None means the price in the cluster file.

    Raises:
        UsageError: it is not a number.
    """
    if text is None:
        return None
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0.0 <= price < float("inf"):
        raise UsageError(f"--price: expected an amount of money for a GPU's hour, such as 2.5, got {text}")
    return price


def run(args: argparse.Namespace) -> int:
    """Run the program on a simulated or real cluster, and return the exit code."""
    if args.on in REAL_BACKENDS:
        if args.fault:
            raise UsageError(f"--fault: faults are injected into simulations only, and --on {args.on} runs for real")
        if asks_for_goodput(args):
            raise UsageError(f"--mtbf, --failures: goodput is simulated, and --on {args.on} runs for real")
        return _launch(args)
    with many_imports(args.own_process):
        importlib.import_module("distsim.sim")
        importlib.import_module("distsim.report.progress")
    if asks_for_goodput(args):
        plan = failures_of(args)
    request, notes = build_request(args)
    outcome = _simulate(request, quiet=args.quiet)
    if asks_for_goodput(args):
        add_goodput(outcome, plan, request.nnodes or load_cluster(str(request.on)).num_nodes, args.seed)
    if request.conditions is not None:
        from distsim.scenario.expect.result import never_struck

        notes += [never_struck(rule, outcome.virtual_time_s) for rule in request.conditions.never_struck]
    outcome.notes[:0] = notes
    return _leave(outcome, args)


def explain(fate: ProcessOutcome, argv: Sequence[str]) -> int:
    """Print the report of a run that ended before it could report, and return its exit code."""
    from distsim.report.fate import fatal_outcome

    args = parse(argv)
    args.trace, args.argv = None, list(argv)
    outcome = fatal_outcome(fate)
    if sys.stderr.isatty():
        print("\r\x1b[K\x1b[?25h", end="", file=sys.stderr, flush=True)  # the line of progress, the cursor
    return _leave(outcome, args)


def _local_rank_flag(args: argparse.Namespace) -> str | None:
    """Return the flag that passes the script its local rank; None if it reads the environment."""
    if args.use_env:
        return None
    flag: str | None = shelf("old launcher").local_rank_flag(args.training_script, args.module)
    return flag


def _launch(args: argparse.Namespace) -> int:
    notes: list[str] = []
    if not args.no_python:
        os.environ.update(_unpacked(args, notes).environ)
    for dest in ("nnodes", "nproc_per_node"):
        if getattr(args, dest) is None:
            setattr(args, dest, args.torchrun_defaults[dest])
    if not args.no_python and not args.module:
        check_script(args.training_script)
    for note in (*notes, *misplaced(args.training_script, args.training_script_args)):
        print(f"distsim: {note}", file=sys.stderr)
    args.local_rank_flag = _local_rank_flag(args)
    launch = importlib.import_module("distsim.realexec.launch").launch
    if args.html is None:
        return int(launch(args))
    if args.on == "mpi" and importlib.import_module("distsim.realexec.process.worlds").started_by_mpirun(os.environ):
        raise UsageError("--html under mpirun: each rank is its own run; --rings DIR, then distsim diagnose DIR --html")
    from distsim.report.html.reports import launch_with_page

    return launch_with_page(lambda: int(launch(args)), args)


def build_request(args: argparse.Namespace) -> tuple[RunRequest, list[str]]:
    """Return the request to the simulator that the command line describes, and notes on flags without effect."""
    from distsim.sim import RunRequest

    notes = []
    on = args.on
    if on is None:
        on = DEFAULT_CLUSTER
        notes.append(f"no --on given: simulated on {DEFAULT_CLUSTER} (distsim topo list shows other clusters)")
    if args.no_python:
        raise UsageError(
            f"--no-python {args.training_script}: only Python can be simulated; give the Python script "
            "itself, or run it for real with --on gloo"
        )
    launched = _unpacked(args, notes)
    if not args.module:
        check_script(args.training_script)
    if args.tokens_per_step is not None and args.tokens_per_step <= 0:
        raise UsageError(f"--tokens-per-step: expected 1 or a larger number, got {args.tokens_per_step}")
    if args.seed < 0:
        raise UsageError(f"--seed: expected 0 or a larger number, got {args.seed}")
    if not hasattr(os, "memfd_create"):
        notes.append(
            "no watchdog process runs, because it needs Linux: a rank that holds the interpreter in C code, or "
            "crashes it, gets no report"
        )
    notes.extend(_ignored(args))
    notes.extend(misplaced(args.training_script, args.training_script_args))
    log_dir = _log_dir(args, notes)
    is_alone = set(launched.launchers) == {"python"} and args.nnodes is None and args.nproc_per_node is None
    if is_alone:
        notes.append("python: the script starts once, as by python; --nproc-per-node N before it starts N ranks")
    elif launched.launchers:
        notes.append(f"{' '.join(launched.launchers)}: its ranks are simulated; the launcher itself does not run")
    if launched.ntasks and args.nnodes is None and args.nproc_per_node is None:
        args.nnodes, args.nproc_per_node = _spread(launched.ntasks, on)
    options = options_of(args) | {
        "on": on,
        "nnodes": nnodes_of(args.nnodes, notes),
        "nproc_per_node": nproc_per_node_of(args.nproc_per_node),
        "log_dir": log_dir,
        "trace": args.trace is not None or args.html is not None,
    }
    request = RunRequest(
        args.training_script,
        module=args.module,
        args=list(args.training_script_args),
        local_rank_flag=_local_rank_flag(args),
        environ=launched.environ | _of_the_shell(),
        launcher="python" if args.one_process or is_alone else _environment_of(launched.launchers),
        budget_s={"auto": args.budget, "sample": 0.0, "all": None}[args.ranks],
        silent_allow=args.silent_allow,
        price=price_of(args.price),
        planned_tokens=None if args.tokens is None else count_of(args.tokens, "--tokens", "1T, 300B or 1e12"),
        sample_is_enough=args.ranks == "sample",
        conditions=conditions_of(args.fault),
        **options,
    )
    return request, notes


def conditions_of(faults: Sequence[str]) -> Conditions | None:
    """Return the conditions of a run with *faults*, given in words."""
    if not faults:
        return None
    from distsim.scenario.file.fault_words import fault_of
    from distsim.scenario.file.load import read_faults
    from distsim.sim.world.conditions import Conditions

    rules = read_faults([fault_of(text) for text in faults], "--fault")
    return Conditions(rules, keeps_all_calls=any(rule.when.call is not None for rule in rules))


def _environment_of(launchers: Sequence[str]) -> Literal["torchrun", "srun", "mpirun"]:
    """Return the innermost of *launchers* whose variables differ from torchrun's."""
    for name in reversed(launchers):
        if name in ("srun", "mpirun"):
            return "srun" if name == "srun" else "mpirun"
        if name != "python":
            break
    return "torchrun"


def _spread(ranks: int, on: str) -> tuple[str, str]:
    """Return the numbers of nodes and of ranks on each for *ranks* ranks that fill one node after the other."""
    cluster = load_cluster(on)
    nodes = -(-ranks * cluster.num_nodes // len(cluster.devices)) if cluster.node.num_gpus else 1
    if ranks % nodes:
        raise UsageError(f"{ranks} ranks do not fill {nodes} nodes of {on} evenly: expected a multiple of {nodes}")
    return str(nodes), str(ranks // nodes)


def _of_the_shell() -> dict[str, str]:
    """Return variables that describe simulated GPUs, and not this machine: a command of `distsim shell` has set
    them.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES") if SHELL_VARIABLE in os.environ else None
    return {} if value is None else {"CUDA_VISIBLE_DEVICES": value}


def _unpacked(args: argparse.Namespace, notes: list[str]) -> Launched:
    """Replace another launcher's command in *args* by its Python program, and take over its number of ranks."""
    launched = program_of(args.training_script, args.training_script_args, args.module)
    if not launched.launchers:
        return launched
    args.training_script, args.training_script_args = launched.program, launched.arguments
    args.module, args.use_env = launched.module, args.use_env and launched.use_env
    for dest in ("nnodes", "nproc_per_node"):
        ours, given = getattr(args, dest), getattr(launched, dest)
        if ours is not None and given is not None and ours != given:
            flag = f"--{dest.replace('_', '-')}"
            raise UsageError(
                f"{flag} {ours} for distsim run and {given} for {launched.launchers[-1]}: distsim run stands for the "
                "launcher; give the number once"
            )
        setattr(args, dest, given if ours is None else ours)
    return launched


AFTER_SCRIPT = ("--on",)
OWN = ("--nnodes", "--nproc-per-node", "--nproc_per_node", "--host-timeout", "--standalone")
"""Flags of ours that few scripts have."""


def misplaced(script: str, arguments: Sequence[str]) -> list[str]:
    """Return a note for each of our flags that is after the script, which gets it instead of distsim."""
    given = [word for word in arguments if word.partition("=")[0] in OWN]
    if not given:
        return []
    flag = given[0].partition("=")[0]
    return [
        f"{flag} comes after {script}, so it went to the script; if it is for distsim, put it before the script "
        f"(distsim run {flag} ... {script})"
    ]


def check_script(path: str) -> None:
    """Refuse a file that is not a Python script."""
    script = Path(path)
    if script.is_dir():
        raise UsageError(f"expected a Python script, got the folder {path}; for a package use -m {script.name}")
    if script.suffix in (".sh", ".bash", ".slurm", ".sbatch"):
        raise UsageError(
            f"expected a Python script, got the shell script {path}: give the command in it that starts the training "
            "(distsim run [--on CLUSTER] -- torchrun ... train.py)"
        )
    if not script.exists():
        raise UsageError(f"no script {path}: no such file (looked in {Path.cwd()})")


def _ignored(args: argparse.Namespace) -> list[str]:
    given = [
        "--" + dest.replace("_", "-")
        for dest in NO_MEANING_IN_SIMULATION
        if dest in args.torchrun_defaults and getattr(args, dest) != args.torchrun_defaults[dest]
    ]
    return [f"ignored, because they have no meaning in a simulation: {', '.join(given)}"] if given else []


def _log_dir(args: argparse.Namespace, notes: list[str]) -> str | None:
    redirects = args.redirects != args.torchrun_defaults["redirects"]
    tee = args.tee != args.torchrun_defaults["tee"]
    if tee:
        notes.append("--tee: a simulated rank writes to its files only, not to the terminal as well")
    if args.log_dir is None and (redirects or tee):
        folder = tempfile.mkdtemp(prefix="distsim_logs_")
        notes.append(f"the ranks' output is in {folder} (--log-dir DIR chooses the place)")
        return folder
    return None if args.log_dir is None else str(args.log_dir)


def nnodes_of(text: str | None, notes: list[str]) -> int | None:
    """Return the number of nodes that `--nnodes` gives, with a note on a range; None means all of the cluster."""
    if text is None:
        return None
    parts = [digits(part) for part in text.split(":")]
    if len(parts) > 2 or not all(parts):
        raise UsageError(f"--nnodes: expected a number of nodes, or MIN:MAX, got {text!r}")
    if len(parts) == 2 and parts[0] != parts[1]:
        nodes = "1 node" if parts[1] == 1 else f"{parts[1]} nodes"
        notes.append(f"--nnodes {text}: simulated with {nodes}, the number of nodes of a simulation is fixed")
    return parts[-1]


def nproc_per_node_of(text: str | None) -> int | None:
    """Return the ranks per node; None means one on every accelerator, or on every socket of a node without
    accelerators."""
    if text is None or text in ("auto", "gpu", "xpu", "cpu"):
        return None
    count = digits(text)
    if not count:
        raise UsageError(f"--nproc-per-node: expected a number, auto, gpu or cpu, got {text!r}")
    return count


def _simulate(request: RunRequest, quiet: bool) -> Outcome:
    from distsim.report.progress import live_progress
    from distsim.sim import run_program

    with live_progress(sys.stderr, quiet=quiet) as progress:
        request.progress = progress
        return run_program(request)


def _leave(outcome: Outcome, args: argparse.Namespace) -> int:
    """Print the summary, write the files, and return the run's exit code, or 2 if a file could not be written."""
    from distsim.report import print_summary, write_report, write_trace

    if not args.quiet or outcome.exit_code != 0 or outcome.diagnoses or outcome.silent:
        print_summary(outcome, sys.stderr if args.one_process or args.report == "-" else sys.stdout)
    if args.events or args.on_verdict:
        _send_events(outcome, args)
    failed = False
    for flag, path, write in (
        ("--report", args.report, write_report),
        ("--trace", args.trace, write_trace),
        ("--html", args.html, partial(_write_page, replay=shlex.join(["distsim", *args.argv]))),
    ):
        if path is None:
            continue
        try:
            with written(flag, path, say=not args.quiet):
                write(outcome, path)
        except UsageError as error:  # a full disk: the run itself is not lost
            print(f"distsim: error: {error}", file=sys.stderr)
            failed = True
    return outcome.exit_code or (2 if failed else 0)


def _write_page(outcome: Outcome, path: str, replay: str) -> None:
    from distsim.report.html.page import html, run_page
    from distsim.report.html.reports import outcome_document

    write_text(path, html(run_page(outcome_document(outcome, replay))))


def _events(path: str) -> str:
    from distsim.debug.settings import OTLP

    return path if path == OTLP or Path(path).is_fifo() else output_file("--events", "events.jsonl")(path)


def _send_events(outcome: Outcome, args: argparse.Namespace) -> None:
    from distsim.debug.report.news import Events
    from distsim.report import report_document

    report = report_document(outcome)
    events = Events(args.events or "", args.on_verdict or "")
    events.diagnosed(outcome.diagnoses, report)
    events.finished(report)
