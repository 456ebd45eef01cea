"""Entry points of the simulator: `simulate` runs a function, `run_program` a script."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from distsim.cluster import Cluster, Slot, load_cluster
from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import Evidence
from distsim.debug.records.frames import forget_stacks, shown_from
from distsim.debug.records.kinds import Kind
from distsim.debug.report.rank_states import first_places, whereabouts
from distsim.errors import RankFailure, UsageError
from distsim.network import make_network
from distsim.shelves import shelf
from distsim.sim.device.gpu import Accelerators
from distsim.sim.device.operators.reading import forget_readings
from distsim.sim.device.operators.values import ValuePolicy
from distsim.sim.faults.planted import Faults
from distsim.sim.faults.tensors import Guards
from distsim.sim.isolation.clock import undrawn
from distsim.sim.isolation.environ import torchruns_environ, without_launchers
from distsim.sim.isolation.output import HeldOutput, RankStream, open_streams
from distsim.sim.isolation.process import SimProcess
from distsim.sim.kernel.interrupts import CtrlC, collector_spares_host
from distsim.sim.kernel.scheduler import Clock
from distsim.sim.observe.evidence import Lookahead
from distsim.sim.observe.evidence import evidence as evidence_of
from distsim.sim.observe.silent import MOST_RANKS, collector_of, collectors_of_origins
from distsim.sim.observe.totals import summing_up
from distsim.sim.observe.training import finish
from distsim.sim.outcome import Outcome, Progress
from distsim.sim.patches import simulation
from distsim.sim.processes.hosts import environ_of_mpirun, master_address, sruns_environ
from distsim.sim.processes.lifetime import Program, live, module_spec
from distsim.sim.world import Setting, Surroundings, World
from distsim.sim.world.conditions import Conditions, RunRequest
from distsim.sim.world.equal_ranks import StartAgain
from distsim.sim.world.undo import UndoLog
from distsim.text.distributions import UNIFORM, lengths_of, routing_of
from distsim.torch_compat.names import SIM
from distsim.torch_compat.releases import remarks
from distsim.watchdog import shared_state
from distsim.watchdog.process import watch_from_outside

with undrawn():  # rich.style draws a number when it is imported
    from distsim.debug.report.console import stream_width
    from distsim.debug.report.render import render_diagnoses

REST = "the Outcome"
"""Where a Python caller finds the parts that a shortened report leaves out."""
DEFAULT_HOST_TIMEOUT_S = 30.0
DEFAULT_PATIENCE = 20.0
_real_perf_counter = time.perf_counter
_STACK_BYTES = 16 << 20


def run_program(request: RunRequest) -> Outcome:
    """Simulate a script or module on every rank.

    Args:
        request: The program, its arguments and the options of the run.

    Returns:
        The outcome, which also holds an exception, a hang or a mismatch of the program.

    Raises:
        UsageError: The program does not exist, or an option does not fit the cluster.
    """
    program = _find(request)
    folder = os.getcwd() if request.module else os.path.dirname(os.path.abspath(request.program))

    def enter(process: SimProcess) -> Callable[[], Any]:
        process.program = program
        flag = [] if request.local_rank_flag is None else [f"{request.local_rank_flag}={process.slot.local_rank}"]
        process.interpreter.argv = [program.path, *flag, *request.args]
        process.interpreter.sys_path = [folder, *(p for p in sys.path if p not in ("", folder))]
        return lambda: program.run_in(process, "__main__") and None

    return _run(request, enter, f"{request.program}")


def simulate(
    fn: Callable[..., Any],
    on: str | Cluster = "dgx-h100:1",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nnodes: int | None = None,
    nproc_per_node: int | None = None,
    seed: int = 0,
    fidelity: Literal["fluid", "message"] = "fluid",
    algo: str | None = None,
    proto: str | None = None,
    nccl_version: str | None = None,
    host_timeout_s: float | None = None,
    log_dir: str | None = None,
    data: Literal["shapes", "real"] = "shapes",
    silent: Literal["off", "watch", "strict"] | None = None,
    placeholder: float = 1.0,
    routing: str = UNIFORM,
    lengths: str | None = None,
    fuse: bool = True,
    strict_kernels: bool = False,
    gpu_libraries: str | None = None,
    trace: bool = False,
    silent_allow: Sequence[str] = (),
    conditions: Conditions | None = None,
    check: bool = True,
) -> Outcome:
    """Call `fn(*args, **kwargs)` on every rank of a simulated cluster.

    *fn* finds its rank as under torchrun: in the environment, or after `init_process_group`. The simulation runs in
    this process and takes virtual time, which `time.perf_counter()` returns to the ranks.

    Args:
        fn: Function that every rank calls.
        on: Preset with its number of nodes (`dgx-h100:4`), path of a cluster file, or a `Cluster`.
        args: Positional arguments of *fn*.
        kwargs: Keyword arguments of *fn*.
        nnodes: Number of nodes to use (default: all nodes of the cluster).
        nproc_per_node: Ranks on each node (default: one on each GPU, or on each CPU socket).
        seed: Random seed. The same seed gives the same run.
        fidelity: Network model. `fluid` shares links between flows, `message` simulates every message.
        algo: Algorithm for all collectives, as NCCL_ALGO (`ring`, `tree`, ...).
        proto: Protocol for all collectives, as NCCL_PROTO (`LL`, `LL128`, `Simple`).
        nccl_version: Release of NCCL whose choices to follow, such as `2.21`.
        host_timeout_s: Seconds of wall time after which a rank that makes no call counts as stuck (default 30).
        log_dir: Folder for the output of the ranks, one file for each.
        data: Whether simulated CUDA tensors have values. `shapes` knows only values that come from the host, `real`
            computes all of them on the CPU.
        silent: Whether to look for silent wrong results (docs/silent.md). The default is `watch` for up to 64 ranks.
        placeholder: Value returned for an unknown scalar on a simulated GPU, such as `loss.item()`.
        routing: How tokens choose among experts without values: `uniform`, `zipf:1.2`, `measured:FILE` or `worst`.
        lengths: Lengths of sequences without values: `lognormal:MEAN:SIGMA`, or a file.
        fuse: Whether to price functions under `torch.compile` as fused kernels.
        strict_kernels: Whether to refuse kernels of Triton or of CUDA source without a `distsim.kernel_cost`.
        gpu_libraries: GPU libraries that the simulated machine has, separated by commas, or `none`.
        trace: Whether to keep every call and operator for `distsim.report.write_trace`.
        silent_allow: Patterns `KIND:TENSOR` of silent findings to leave out.
        conditions: Faults, limits and interleavings of a scenario.
        check: Whether to raise `RankFailure` if a rank raised.

    Returns:
        The outcome of the run. `Outcome.results` holds what each rank returned, and `Outcome.diagnoses` reports a hang
        or a mismatch.

    Raises:
        RankFailure: A rank raised an exception, and *check* is true. It merges the tracebacks of all ranks.
        UsageError: An option does not fit the cluster.
        KeyboardInterrupt: Ctrl-C ended the simulation. The attribute `outcome` holds the run so far, unless Ctrl-C was
            pressed again during the diagnosis.
    """
    request = RunRequest(
        program=getattr(fn, "__qualname__", repr(fn)),
        on=on,
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        seed=seed,
        fidelity=fidelity,
        algo=algo,
        proto=proto,
        nccl_version=nccl_version,
        host_timeout_s=host_timeout_s,
        log_dir=log_dir,
        data=data,
        silent=silent,
        silent_allow=silent_allow,
        placeholder=placeholder,
        routing=routing,
        lengths=lengths,
        fuse=fuse,
        strict_kernels=strict_kernels,
        gpu_libraries=gpu_libraries,
        trace=trace,
        conditions=conditions,
    )
    call, args = dict(kwargs or {}), tuple(args)
    outcome = _run(request, lambda process: lambda: fn(*args, **call), request.program)
    return _answer(outcome, check)


def _answer(outcome: Outcome, check: bool) -> Outcome:
    """Return *outcome*, or raise RankFailure if *check* is set and ranks raised."""
    if outcome.interrupted:  # it is the caller's: a loop over simulations ends, too
        raise _interrupt(outcome)
    if check and outcome.failures:
        raise RankFailure(outcome.failures, _beside(outcome), outcome)
    if check and outcome.diagnoses and hasattr(sys, "ps1"):  # at a prompt nobody looks into an outcome unasked
        print(_report(outcome, stream_width(sys.stdout)), end="")
    return outcome


def _report(outcome: Outcome, width: int) -> str:
    return render_diagnoses(outcome.diagnoses, outcome.evidence, rest=REST).plain(width)


def _interrupt(outcome: Outcome) -> KeyboardInterrupt:
    """Return a plain KeyboardInterrupt, so that the exit status of the interpreter shows the interruption."""
    stop = KeyboardInterrupt()
    stop.outcome = outcome  # type: ignore[attr-defined]
    if outcome.diagnoses:
        stop.add_note(_report(outcome, stream_width(sys.stderr)).rstrip())
    elif outcome.evidence is not None:
        stop.add_note("\n".join(first_places(whereabouts(outcome.evidence), REST)))
    return stop


def _beside(outcome: Outcome) -> str:
    """Format the diagnoses that add to the tracebacks: which ranks wait, and which rank a timeout waited for."""
    raised = {rank for failure in outcome.failures for rank in failure.ranks}
    added = []
    waiting: set[int] = set()
    for diagnosis in outcome.diagnoses:
        if not diagnosis.adds_to(raised):
            continue
        if diagnosis.kind is Kind.RANK_RAISED and raised.issuperset(diagnosis.culprits):
            if waiting.issuperset(diagnosis.victims):  # its traceback is there, and so is who waits
                continue
            waiting.update(diagnosis.victims)
        added.append(diagnosis)
    if not added:
        return ""
    evidence = outcome.evidence
    if evidence is not None:  # their tracebacks are there already
        states = {r: dataclasses.replace(s, traceback=None) for r, s in evidence.ranks.items()}
        evidence = dataclasses.replace(evidence, ranks=states)
    return render_diagnoses(added, evidence, rest=REST).plain(stream_width(sys.stderr))


def _find(request: RunRequest) -> Program:
    if request.module:
        spec = module_spec(request.program)
        if spec is None or spec.loader is None:
            raise UsageError(
                f"no module named {request.program!r}: -m expects a module that Python can import from here"
            )
        return Program(spec.origin or request.program, request.program, spec)
    if not os.path.isfile(request.program):
        raise UsageError(f"no script {request.program}: no such file (looked in {os.getcwd()})")
    return Program(os.path.abspath(request.program))


def _run(request: RunRequest, enter: Callable[[SimProcess], Callable[[], Any]], name: str) -> Outcome:
    with shown_from(os.getcwd()):
        return _simulate(request, enter, name)


def _simulate(request: RunRequest, enter: Callable[[SimProcess], Callable[[], Any]], name: str) -> Outcome:
    watch_from_outside()
    again: StartAgain | None = None
    while True:
        try:
            return _attempt(request, enter, name, again)
        except StartAgain as found:
            again = found


MANY_RANKS = 4
"""Worlds of at most this many ranks are traced completely, regardless of the budget."""


def _attempt(
    request: RunRequest, enter: Callable[[SimProcess], Callable[[], Any]], name: str, again: StartAgain | None
) -> Outcome:
    """Run once. Raises StartAgain if other ranks have to be traced than *again* says."""
    started = _real_perf_counter()
    cluster = request.on if isinstance(request.on, Cluster) else load_cluster(request.on)
    slots = cluster.place(request.nnodes, request.nproc_per_node)
    network = make_network(
        Clock(),
        cluster,
        fidelity=request.fidelity,
        algo=request.algo,
        proto=request.proto,
        nccl_version=request.nccl_version,
    )
    limit_s = request.host_timeout_s or DEFAULT_HOST_TIMEOUT_S
    page = shared_state.here()
    if page is not None:
        page.describe(
            limit_s,
            program=name,
            cluster=request.on if isinstance(request.on, str) else cluster.name,
            world_size=len(slots),
            seed=request.seed,
        )
        page.listen()
    width = len(str(len(slots) - 1))
    silent = request.silent != "off" and len(slots) <= MOST_RANKS
    sample = None if again is None else again.sample
    data = ValuePolicy(
        request.data == "real",
        request.placeholder,
        request.fuse,
        request.strict_kernels,
        None if request.gpu_libraries is None else shelf("libraries").check_names(request.gpu_libraries),
        routing_of(request.routing, request.seed),
        None if request.lengths is None else lengths_of(request.lengths),
        request.seed,
    )
    follows_origins = request.silent is not None and cluster.node.num_gpus > 0 and not data.real
    collector = collectors_of_origins() if follows_origins else collector_of
    is_alone = request.launcher == "python"
    unbounded = data.real or len(slots) <= MANY_RANKS or is_alone
    budget_s = None if unbounded else request.budget_s
    undo = None if budget_s is None else UndoLog()
    held = [] if undo is None else [HeldOutput(sys.stdout), HeldOutput(sys.stderr)]
    out, err = (held[0], held[1]) if held else (sys.stdout, sys.stderr)

    def streams_of(process: SimProcess) -> tuple[RankStream, RankStream]:
        others = () if request.log_dir is None else process.port.processes
        fresh = not any(other.label == process.label for other in others if other is not process)
        plain = is_alone and request.log_dir is None and not process.port.processes[1:]
        return open_streams(lambda: "" if plain else process.label, fresh, width, request.log_dir, out, err)

    def on_progress(world: World) -> None:
        assert request.progress is not None
        request.progress(_progress(world, _real_perf_counter() - started))

    stack_bytes = threading.stack_size(_STACK_BYTES)
    try:
        traced = len(slots) if sample is None else len(sample.traced)
        with CtrlC() as ctrl_c, simulation(cluster.node.num_gpus > 0, silent) as host, collector_spares_host(traced):
            setting = Setting(
                cluster,
                slots,
                network,
                request.seed,
                limit_s,
                patience=DEFAULT_PATIENCE if request.host_timeout_s is None else 1.0,
                host=host,
                torch_rng=_fresh_rng(),
                open_streams=streams_of,
                guards=Guards(),
                silent=collector if silent else None,
                faults=Faults,
                data=data,
                keeps_all_calls=request.trace,
                keeps_slices=request.trace,
                last_step=request.last_step,
                measures_memory=request.measures_memory,
                keeps_sites=request.keeps_sites,
                is_alone=is_alone,
                on_progress=None if request.progress is None else on_progress,
            )
            if request.conditions is not None:
                setting = request.conditions.applied_to(setting)
            setting = dataclasses.replace(setting, budget_s=budget_s, sample=sample, held=held, undo=undo)
            world = World(setting, Surroundings(live, evidence_of, Lookahead))
            for line in (*remarks(SIM), *cluster.warnings):
                world.note(line)
            if again is not None:
                world.note(f"the simulation restarted before it printed anything: {again.why}")
            _begin_ranks(world, request, slots, enter)
            ctrl_c.asks(world)
            if undo is not None:
                undo.open()
            evidence = _run_to_the_end(world, request, ctrl_c)
    except StartAgain:
        for stream in held:
            stream.drop()
        if undo is not None:
            undo.undo()
        raise
    finally:
        if undo is not None:
            undo.close()
        for stream in held:
            stream.release()
        forget_stacks()
        forget_readings()
        threading.stack_size(stack_bytes)
        if page is not None:
            page.rest()

    return summing_up(world, evidence, request, name, ctrl_c.pressed, _real_perf_counter() - started)


def _begin_ranks(
    world: World, request: RunRequest, slots: Sequence[Slot], enter: Callable[[SimProcess], Callable[[], Any]]
) -> None:
    """Start the traced ranks and the faults of the scenario."""
    per_node = world.facts.cpu.ranks_per_node
    nodes = len({slot.host for slot in slots})
    if request.launcher == "srun":
        environ_of = sruns_environ(slots, per_node, nodes)
    elif request.launcher == "mpirun":
        environ_of = environ_of_mpirun(slots, per_node)
    elif request.launcher == "python":
        common = without_launchers(os.environb)
        environ_of = lambda slot: dict(common)  # noqa: E731
    else:
        environ_of = torchruns_environ(slots, per_node, nodes, master_address([slot.host for slot in slots]))
    environ = {os.fsencode(name): os.fsencode(value) for name, value in request.environ.items()}
    if world.facts.cluster.node.num_gpus:
        path = os.pathsep.join((Accelerators.TOOLS, os.environ.get("PATH", os.defpath)))
        environ[b"PATH"] = os.fsencode(path)

    def start(process: SimProcess) -> None:
        process.interpreter.changed_environ.update(dict.fromkeys(map(os.fsencode, request.environ)))
        process.interpreter.begin()
        world.start_process(process, enter(process))

    world.begin_ranks(lambda slot: environ_of(slot) | environ, start)
    if request.conditions is not None:
        request.conditions.begin(world)


def _files_in_turn() -> contextlib.AbstractContextManager[None]:
    from distsim.sim.orders.files import in_turn

    return in_turn()


def _run_to_the_end(world: World, request: RunRequest, ctrl_c: CtrlC) -> Evidence:
    """Run until the job ends, hangs or is interrupted, and return the evidence."""
    with world.core:
        try:
            with (
                world.faults.accesses(),
                _files_in_turn() if world.facts.turns is not None else contextlib.nullcontext(),
                world.memory.watching() if world.memory is not None else contextlib.nullcontext(),
                world.interrupts.deferred(),
            ):
                world.run()
                if world.facts.turns is not None:
                    world.facts.turns.close()
                if not world.is_enough:
                    finish(world)
        except KeyboardInterrupt:
            ctrl_c.pressed = ctrl_c.pressed or signal.SIGINT  # a handler of the program's may have raised it
            ctrl_c.heeded = True
            world.diagnoses = diagnose(world.evidence())
        finally:
            try:
                evidence = world.final = world.final_evidence()
            finally:
                world.end()
                if request.conditions is not None:
                    request.conditions.end(world)
    return evidence


@functools.cache
def _fresh_rng() -> torch.Tensor:
    """Return the state that torch's random generator has in a new process, before anyone seeds it."""
    return torch.Generator().get_state()


def _progress(world: World, wall_s: float) -> Progress:
    alive = sum(p.alive for p in list(world.rank_processes.values()))
    waiting = ""
    task = world.running
    if task is not None:
        waiting = f"rank {task.process.rank} computes"
    return Progress(
        world.now_s,
        alive,
        world.world_size,
        world.events,
        world.events / wall_s if wall_s > 0 else 0.0,
        waiting,
        wall_s,
        world.traced.progress,
    )
