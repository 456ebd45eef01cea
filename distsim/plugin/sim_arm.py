"""The simulated arm: all ranks of a test in this process, a few milliseconds a test."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from distsim.errors import UsageError
from distsim.plugin.everywhere import RankReport, Verdict, describe, rank_body
from distsim.plugin.place import Options

__all__ = ["run_simulated"]

GPUS_PER_NODE = 8


def run_simulated(
    item: pytest.Function, body: Callable[..., Any], kwargs: Mapping[str, Any], options: Options
) -> Verdict:
    """Run *body* on `options.n` simulated ranks."""
    __tracebackhide__ = True
    import distsim
    from distsim.debug.render import render_diagnoses
    from distsim.sim.task import Unwind

    errors: dict[int, BaseException] = {}
    run = rank_body(item, body, kwargs, options)

    def on_rank() -> None:
        try:
            run()
        except Unwind:
            raise
        except BaseException as error:
            errors[int(os.environ["RANK"])] = error
            raise

    try:
        conditions = _conditions(options)
        cluster, nodes, per_node = _room(options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.")  # torch's own, as real ranks would print them
            outcome = distsim.simulate(
                on_rank,
                on=cluster,
                nnodes=nodes,
                nproc_per_node=per_node,
                seed=options.seed,
                host_timeout_s=min(30.0, options.timeout_s),
                conditions=conditions,
                check=False,
            )
    except UsageError as mistake:
        raise pytest.UsageError(str(mistake)) from None
    except pytest.fail.Exception as stop:  # pytest-timeout: say where everybody is
        raise pytest.fail.Exception(f"{stop}\n\n{_where(conditions)}", pytrace=False) from None
    if outcome.interrupted:
        raise KeyboardInterrupt
    verdict = Verdict({rank: _described(item, body, error) for rank, error in sorted(errors.items())})
    loud = [d for d in outcome.diagnoses if not d.is_warning]
    raised = {"rank_raised"} if all(set(d.culprits) <= set(errors) and not d.victims for d in loud) else set()
    if loud and {d.kind.value for d in loud} != raised:
        for rank in errors:  # pytest shows these itself
            if outcome.evidence is not None and rank in outcome.evidence.ranks:
                outcome.evidence.ranks[rank].traceback = None
        verdict.report = render_diagnoses(loud, outcome.evidence).plain(100)
        verdict.headline = " ".join(verdict.report.splitlines()[0].split())
    elif conditions.limits.reached is not None:
        verdict.headline = conditions.limits.reached
        verdict.report = f"{conditions.limits.reached}\n{_where(conditions)}"
    elif outcome.exit_code and not errors:
        codes = {r.rank: r.exit_code for r in outcome.ranks if r.exit_code}
        verdict.headline = verdict.report = f"ranks left with exit codes {codes}"
    verdict.notes = [n for n in outcome.notes if n not in verdict.report] if verdict.report or errors else []
    return verdict


def _where(conditions: Any) -> str:
    """Where every rank was when a run was cut short."""
    from distsim.debug.diagnosis import diagnose
    from distsim.debug.render import render_diagnoses
    from distsim.report.whereabouts import whereabouts

    evidence = conditions.evidence
    if evidence is None:
        return ""
    diagnoses = diagnose(evidence)
    report = render_diagnoses(diagnoses, evidence).plain(100) if diagnoses else ""
    return "\n".join([*whereabouts(evidence), report]).rstrip()


def _described(item: pytest.Function, body: Any, error: BaseException) -> RankReport:
    """*error* with the traceback cut at the test's own function."""
    replaced = item.obj
    item.obj = getattr(body, "func", body)
    try:
        return describe(item, error)
    finally:
        item.obj = replaced


def _room(options: Options) -> tuple[str, int | None, int | None]:
    """A cluster with exactly so many ranks, as full nodes as the number allows."""
    from distsim.cluster import load_cluster

    if options.cluster is None:
        per_node = max(k for k in range(1, GPUS_PER_NODE + 1) if options.n % k == 0)
        return f"dgx-h100:{options.n // per_node}", None, per_node
    cluster = load_cluster(options.cluster)
    per_node = len(cluster.place()) // cluster.num_nodes
    room = per_node * cluster.num_nodes
    if options.n > room and cluster.node.num_gpus:
        raise UsageError(f"world_size({options.n}): the cluster {options.cluster!r} has room for {room} ranks")
    for nodes in range(1, cluster.num_nodes + 1):
        if options.n % nodes == 0 and options.n // nodes <= max(per_node, 1):
            return options.cluster, nodes, options.n // nodes
    if options.n % cluster.num_nodes == 0:
        return options.cluster, None, options.n // cluster.num_nodes
    raise UsageError(
        f"world_size({options.n}): ranks do not spread evenly over the {cluster.num_nodes} nodes of {options.cluster!r}"
    )


def _conditions(options: Options) -> Any:
    from distsim.sim.conditions import Conditions
    from distsim.sim.limits import Limits

    rules = []
    if options.faults:
        from distsim.scenario.load import read_faults

        rules = read_faults(options.faults)
    return Conditions(rules, options.guards, Limits(wall_time_s=options.timeout_s, virtual_time_s=86_400.0))
