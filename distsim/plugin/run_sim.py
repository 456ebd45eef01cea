"""The simulated arm: all ranks of a test in this process, some ten milliseconds a test.

Imported at the end of a collection that has found tests for it, with all that they need: torch takes seconds.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from distsim.cluster import Cluster, load_cluster
from distsim.errors import UsageError
from distsim.plugin import terminal
from distsim.plugin.explore import is_explored, run_explored
from distsim.plugin.fixtures import NoCopy, holds_tensors
from distsim.plugin.hypothesis import in_the_example
from distsim.plugin.on_rank import describe, rank_body
from distsim.plugin.options import PerRank, PluginOptions
from distsim.plugin.timeouts import TimedConditions
from distsim.plugin.verdict import REST, Verdict, columns, from_here, report_silent, traces_of, wants_frames, whole
from distsim.scenario.explore.faults import wrong_under_fault
from distsim.sim.kernel.chooser import Orders
from distsim.sim.kernel.scheduler import Unwind
from distsim.sim.outcome import SILENT_FAULT, Outcome
from distsim.sim.run import simulate
from distsim.watchdog import process

if TYPE_CHECKING:
    from distsim.debug.records.diagnosis import Diagnosis

GPUS_PER_NODE = 8


def run_simulated(
    item: pytest.Function, body: functools.partial[Any], kwargs: Mapping[str, Any], options: PluginOptions
) -> Verdict:
    """Run *body* on `options.n` simulated ranks, once or in each order."""
    __tracebackhide__ = True
    once = functools.partial(_run_once, item, body, kwargs, options)
    if not is_explored(options, item.config):
        return once(None)
    return run_explored(item, body, kwargs, options, once)


def _run_once(
    item: pytest.Function,
    body: functools.partial[Any],
    kwargs: Mapping[str, Any],
    options: PluginOptions,
    orders: Orders | None,
) -> Verdict:
    """Run *body* in the order of virtual time, or in that of *orders*."""
    __tracebackhide__ = True
    process.REPORT_FD = terminal.stderr_fd

    errors: dict[int, BaseException] = {}
    ended: dict[int, BaseException] = {}
    run, example = rank_body(body, kwargs, options, item.instance), in_the_example()

    def on_rank() -> Any:
        try:
            with example():
                return run()
        except Unwind as end:
            if wants_frames(item):
                ended[int(os.environ["RANK"])] = end
            raise
        except BaseException as error:
            errors[int(os.environ["RANK"])] = error
            raise

    away_s = min(options.host_timeout_s, options.timeout_s)
    try:
        conditions = vars(item)["distsim_conditions"] = _conditions(options)
        conditions.orders = orders
        cluster, nodes, per_node = _room(options)
        with warnings.catch_warnings(), _torch_logs_nothing():
            warnings.filterwarnings("ignore", module=r"torch\.")  # torch's own, as real ranks would print them
            warnings.filterwarnings("ignore", r"Seems like `optimizer\.step")  # so a copy of a fixture's one looks
            outcome = simulate(
                on_rank,
                on=cluster,
                nnodes=nodes,
                nproc_per_node=per_node,
                seed=options.seed,
                host_timeout_s=away_s,
                conditions=conditions,
                check=False,
                silent=options.silent or "off",
                trace=item.config.getoption("--distsim-html") is not None,
            )
    except UsageError as mistake:
        raise pytest.UsageError(str(mistake)) from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None  # pytest has one line for it
    except pytest.fail.Exception as stop:  # pytest-timeout: say where everybody is
        raise pytest.fail.Exception(f"{stop}\n\n{_where(conditions, whole(item))}", pytrace=False) from None
    finally:
        vars(item).pop("distsim_conditions", None)  # pytest keeps its items to the end, and this keeps the world
    for error in errors.values():
        if isinstance(error, NoCopy):
            raise pytest.UsageError(str(error))
    verdict = Verdict({rank: describe(item, body, error) for rank, error in sorted(errors.items())})
    verdict.results = outcome.results
    if orders is not None:
        verdict.wrong_under_fault = wrong_under_fault(orders, outcome, options.expect_fault)
    if wants_frames(item):
        verdict.traces = traces_of(ended | errors)
    new_diagnoses = [d for d in outcome.diagnoses if d.adds_to(errors)]
    _explain(verdict, item, options, outcome, new_diagnoses, conditions)
    verdict.notes = [n for n in outcome.notes if n not in verdict.report] if verdict.report or errors else []
    if errors and (shared := shared_note(body, kwargs)):
        verdict.notes.append(shared)
    if any(d.kind.value == "host_stuck" for d in new_diagnoses):
        verdict.notes.append(options.patience_note(away_s))
    if (folder := item.config.getoption("--distsim-html")) and (errors or verdict.report):
        from distsim.report.html.reports import page_of_outcome

        verdict.notes.append(page_of_outcome(folder, from_here(item), outcome))
    return verdict


def _explain(
    verdict: Verdict,
    item: pytest.Function,
    options: PluginOptions,
    outcome: Outcome,
    diagnoses: list[Diagnosis],
    conditions: TimedConditions,
) -> None:
    """Add to the verdict what the ranks' errors do not show: diagnoses, a limit, exit codes and silent faults."""
    if diagnoses:
        for rank in verdict.ranks:  # pytest shows their errors itself
            if outcome.evidence is not None and rank in outcome.evidence.ranks:
                outcome.evidence.ranks[rank].traceback = None
        verdict.explain(diagnoses, outcome.evidence, every=whole(item))
    elif conditions.limits.reached is not None:
        verdict.report = f"{conditions.limits.reached}\n{_where(conditions, whole(item))}"
    elif outcome.exit_code == SILENT_FAULT:
        report_silent(item.name, verdict, outcome.silent, strict=True)
    elif outcome.exit_code and not verdict.ranks:
        codes = {r.rank: r.exit_code for r in outcome.ranks if r.exit_code}
        verdict.report = f"ranks left with exit codes {codes}"
    elif options.silent == "watch" and outcome.silent:
        report_silent(item.name, verdict, outcome.silent, strict=False)


@contextlib.contextmanager
def _torch_logs_nothing() -> Iterator[None]:
    """Turn off torch's logging of failing calls, which pytest would show below the test."""
    from distsim.torch_compat.groups import LOGGER

    logger = LOGGER.get()
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _where(conditions: TimedConditions, every: bool) -> str:
    """Return where every rank was when a run was cut short, unless a diagnosis says so."""
    from distsim.debug.diagnosis.diagnose import diagnose
    from distsim.debug.report.rank_states import whereabouts
    from distsim.debug.report.render import render_diagnoses

    evidence = conditions.seen
    if evidence is None:
        return ""
    diagnoses = diagnose(evidence)
    text = "\n".join(whereabouts(evidence))
    if diagnoses:
        text = render_diagnoses(diagnoses, evidence, whole=every, rest=REST).plain(columns())
    return text.rstrip()


@functools.lru_cache(8)
def _usual(nodes: int) -> Cluster:
    """Return the cluster of tests that name none: one for all of them, with the ways through it that it has found."""
    return load_cluster(f"dgx-h100:{nodes}")


def _room(options: PluginOptions) -> tuple[str | Cluster, int | None, int | None]:
    """Return a cluster with exactly the requested number of ranks, on nodes as full as that number allows."""
    if options.cluster is None:
        per_node = max(k for k in range(1, GPUS_PER_NODE + 1) if options.n % k == 0)
        return _usual(options.n // per_node), None, per_node
    cluster = load_cluster(options.cluster)
    per_node = len(cluster.place()) // cluster.num_nodes
    room = per_node * cluster.num_nodes
    if options.n > room and cluster.node.num_gpus:
        raise UsageError(
            f"ranks({options.n}): the cluster {options.cluster!r} has room for {room} ranks: "
            f"take more nodes (cluster='NAME:N'), or fewer ranks"
        )
    for nodes in range(1, cluster.num_nodes + 1):
        if options.n % nodes == 0 and options.n // nodes <= max(per_node, 1):
            return options.cluster, nodes, options.n // nodes
    if options.n % cluster.num_nodes == 0:
        return options.cluster, None, options.n // cluster.num_nodes
    raise UsageError(
        f"ranks({options.n}): ranks do not spread evenly over the {cluster.num_nodes} nodes of {options.cluster!r}"
    )


def _conditions(options: PluginOptions) -> TimedConditions:
    from distsim.sim.faults.tensors import GUARDS
    from distsim.sim.kernel.limits import Limits

    rules = []
    if options.faults:
        from distsim.scenario.file.load import read_faults

        rules = read_faults(options.faults)
    unknown = sorted(set(options.guards) - set(GUARDS))
    if unknown:
        raise UsageError(f"ranks: guards: expected {', '.join(GUARDS)}, got {unknown[0]!r}")
    # A rank that computes is alive: only the limit of the whole test is for it.
    patience = max(1.0, options.timeout_s / options.host_timeout_s)
    limits = Limits(wall_time_s=options.timeout_s, virtual_time_s=86_400.0)
    return TimedConditions(rules, options.guards, limits, patience=patience)


_HARMLESS = (
    *(int, float, complex, str, bytes, bool, type(None), range, slice, frozenset, enum.Enum, os.PathLike, type),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType, PerRank),
)
"""Types of objects that a rank cannot change."""
_CONTAINERS = (list, dict, set, deque)


def shared_note(body: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Return one line, or nothing: which *arguments* and which globals of *body* all ranks have in common."""
    names = [f"{name!r} (a fixture)" for name, value in arguments.items() if _is_shared(value)]
    function = getattr(getattr(body, "func", body), "__func__", getattr(body, "func", body))
    code, space = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is not None:
        used = dict.fromkeys(name for part in _parts(code) for name in part.co_names)
        names += [f"{name!r} (a global)" for name in used if isinstance(space.get(name), _CONTAINERS)]
    if not names:
        return ""
    return f"passes on gloo? There each rank has its own {' and '.join(names)}; simulated ranks share one"


def _is_shared(value: object) -> bool:
    if isinstance(value, tuple):
        return any(map(_is_shared, value))
    of_pytest = type(value).__module__.partition(".")[0] in ("_pytest", "pytest", "distsim")
    return not of_pytest and not isinstance(value, _HARMLESS) and not holds_tensors(value)


def _parts(code: CodeType) -> Iterator[CodeType]:
    """Yield *code* and all functions that are nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)
