"""Runs a scenario for real: torch elastic on gloo with the guard, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distsim.debug.diagnosis.silent.facts import SilentFinding
from distsim.debug.postmortem import examine
from distsim.debug.records import CallRecord, Evidence, Phase, RankState
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.report.rank_states import whereabouts
from distsim.debug.report.render import render_diagnoses
from distsim.errors import UsageError
from distsim.scenario.expect.expect import result_of
from distsim.scenario.expect.result import REST, Result, never_struck, replay_command, report_width
from distsim.scenario.file.load import Scenario
from distsim.scenario.real.namespaces import Cuts, hosts, missing, spans_hosts
from distsim.sim.faults.fault import Rule
from distsim.sim.kernel.limits import Limits
from distsim.sim.outcome import Outcome
from distsim.text.untrusted_input import read_object, read_text


def seen(folder: Path, num_hosts: int, world_size: int) -> Evidence | None:
    """Return the evidence in the rings of *folder* (`rings0`, `rings1`, ...); None if there are no rings.

    The job may still run. Each host contributes what it knows of its own ranks.
    """
    parts = []
    for host in range(num_hosts):
        try:
            parts.append(examine(folder / f"rings{host}").evidence)
        except UsageError:
            continue  # no rank of this host has come that far
    if not parts:
        return None
    ranks = {rank: RankState(rank, Phase.ABSENT) for rank in range(world_size)}
    records: dict[int, Sequence[CallRecord]] = {}
    sources: dict[str, str] = {}
    for part in parts:
        own = [rank for rank, state in part.ranks.items() if state.host is not None]
        for rank in own:
            state = ranks[rank] = part.ranks[rank]
            if state.site is not None and not state.site.line:
                state.site = None  # inside the interpreter's own start
        records.update((rank, part.records.get(rank, ())) for rank in own)
        sources.update(part.sources)
    return Evidence(world_size, ranks, records, sources=sources)


def end(pids: Iterable[int]) -> None:
    """Kill *pids* and their descendants at once.

    They are stopped first: processes that are killed one by one could start others in between, or report the death of
    the others.
    """
    roots = list(pids)
    known: dict[int, None] = {}
    while more := [pid for pid in descendants(roots) if pid not in known]:
        for pid in more:
            known[pid] = None
            _send(pid, signal.SIGSTOP)
    for pid in known:
        _send(pid, signal.SIGKILL)


def descendants(pids: Iterable[int]) -> list[int]:
    """Return *pids* and all their descendants, as /proc shows them now."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue  # it has ended
        children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    result = list(pids)
    for pid in result:
        result += children.get(pid, ())
    return result


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


monotonic = time.monotonic


def run_for_real(scenario: Scenario, *, picture: bool = False) -> Result:
    """Run the scenario's program with `distsim run --on gloo`, and compare its report with the expectations.

    With *picture*, the document of a failed run includes the picture of its flight records.
    """

    if any(getattr(rule, "restart_after_s", None) is not None for rule in scenario.rules):
        raise UsageError(
            f"{scenario.path}: restart_after_s is simulated only; on real ranks leave it out, and start ranks again by "
            "torchrun --max-restarts"
        )
    with tempfile.TemporaryDirectory(prefix="distsim-scenario-") as name:
        folder = Path(name)
        started = monotonic()
        ended = _run(scenario, folder)
        wall_s = monotonic() - started
        diagnoses, code = verdict(folder, ended.codes, ended.cut_off)
        evidence = ended.seen or (seen(folder, len(ended.codes), scenario.world_size) if diagnoses else None)
        reports = [read_object(folder / f"report{node}.json") for node in range(len(ended.codes))]
        silent = [SilentFinding.from_json(finding) for report in reports for finding in report.get("silent", ())]
        output = _output(folder, scenario.world_size, len(ended.codes))
        last_output = _said(folder)
        unstruck = [rule for n, rule in enumerate(scenario.rules) if not (folder / f"struck.{n}").exists()]
    if evidence is not None:
        evidence.notes = [f"injected: {scenario.rules[n]}, {scenario.rules[n].when}" for n in ended.struck]
        diagnoses = [placed(diagnosis, evidence) for diagnosis in diagnoses]
        evidence.sources = with_texts(evidence.sources, diagnoses)
    if 2 in ended.codes:
        raise UsageError(f"the real run did not start:\n{last_output}")
    outcome = Outcome(
        world_size=scenario.world_size,
        cluster="gloo",
        backend="gloo",
        seed=scenario.spec.seed,
        program=scenario.spec.program,
        exit_code=max(0, code),
        virtual_time_s=wall_s,
        wall_time_s=wall_s,
        events=0,
        diagnoses=diagnoses,
        silent=silent,
    )
    limits = Limits(wall_time_s=scenario.spec.limits.wall_time_s)
    standing: Sequence[str] = ()
    if ended.over:
        limits.end("wall_time_s")
        standing = whereabouts(ended.seen) if ended.seen is not None else ["No rank had come to torch.distributed."]
    result = result_of(
        scenario,
        outcome,
        output,
        report=render_diagnoses(diagnoses, evidence, rest=REST).plain(report_width()) if diagnoses else last_output,
        replay=replay_command(scenario) + " --backend gloo",
        figures={"wall_time_s": wall_s},
        unstruck=[_never(rule, wall_s) for rule in unstruck],
        limits=limits,
        standing=standing,
    )
    if picture and evidence is not None:
        from distsim.report.html.reports import records_document

        result.document = records_document(diagnoses, evidence, result.replay) | {"program": scenario.spec.program}
    return result


def _never(rule: Rule, wall_s: float) -> str:
    return never_struck(rule, wall_s) if rule.when.call is None else f"{never_struck(rule)}; name an earlier call"


@dataclass(slots=True)
class Ended:
    """Exit codes of the launchers, one per host."""

    codes: list[int]
    over: bool = False
    """Whether the limit of wall time ended the run."""
    seen: Evidence | None = None
    """Evidence of the ranks' state at that moment."""
    struck: Sequence[int] = ()
    """Numbers of the rules that pulled a plug."""
    cut_off: Sequence[int] = ()
    """Ranks of the hosts that were cut off."""


def _run(scenario: Scenario, folder: Path) -> Ended:
    spec = scenario.spec
    plan = {
        "program": str(scenario.file.resolve()) if scenario.file is not None else scenario.program,
        "function": scenario.function,
        "args": spec.args,
        "faults": [fault.model_dump() for fault in spec.faults],
    }
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    if not spans_hosts(scenario):
        words = ["--nnodes", "1", "--nproc-per-node", str(scenario.world_size)]
        return _wait([_launcher(scenario, folder, 0, [], words, {"MASTER_PORT": "0"})], scenario, folder, None)
    lacking = missing()
    if lacking is not None:
        raise UsageError(f"{scenario.path}: faults that cut hosts off for real need network namespaces: {lacking}")
    number = scenario.num_hosts
    with hosts(number) as job:
        started = []
        for node in range(number):
            words = ["--nnodes", str(number), "--node-rank", str(node), "--nproc-per-node"]
            words += [str(scenario.world_size // number), "--master-addr", job.addresses[0], "--master-port", "29500"]
            environ = {"GLOO_SOCKET_IFNAME": job.interface(node)}
            started.append(_launcher(scenario, folder, node, job.enter(node), words, environ))
        return _wait(started, scenario, folder, Cuts.of(scenario, folder, job))


def _launcher(
    scenario: Scenario, folder: Path, node: int, before: list[str], where: list[str], more: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start `distsim run --on gloo` on one host."""
    spec = scenario.spec
    flags = ["--on", "gloo", *where, "--on-hang", "abort", "--hang-after", str(spec.limits.host_timeout_s)]
    flags += ["--report", str(folder / f"report{node}.json"), "--rings", str(folder / f"rings{node}")]
    flags += ["--log-dir", str(folder / f"logs{node}"), "--redirects", "3"]
    silent = spec.silent or ("watch" if spec.expect_silent is not None else "off")  # as a simulation would
    flags += ["--silent", silent, *(word for pattern in spec.silent_allow for word in ("--silent-allow", pattern))]
    flags += [flag for guard, flag in (("nan", "--nan"), ("buffers", "--checksum")) if guard in spec.guards]
    program = ["-m", "distsim.scenario.real.inject", str(folder / "plan.json")]
    environ = {**os.environ, **spec.env, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        environ.pop(name, None)
    words = [*before, sys.executable, "-m", "distsim", "run", *flags, *program]
    with (folder / f"said{node}").open("wb") as output:
        return subprocess.Popen(words, env=environ | more, stdout=output, stderr=subprocess.STDOUT)


def _wait(started: list[subprocess.Popen[bytes]], scenario: Scenario, folder: Path, cuts: Cuts | None) -> Ended:
    """Wait until all processes have ended or the time is over."""
    deadline = monotonic() + scenario.spec.limits.wall_time_s
    ended = Ended([])
    try:
        while any(process.poll() is None for process in started) and not ended.over:
            if cuts is not None:
                cuts.tick()
            ended.over = monotonic() > deadline
            time.sleep(0.01)
        if ended.over:
            ended.seen = seen(folder, len(started), scenario.world_size)
    finally:
        end(process.pid for process in started if process.poll() is None)
        for process in started:
            process.wait()
    ended.codes = [process.returncode for process in started]
    if cuts is not None:
        per_host = scenario.world_size // len(started)
        ended.struck = cuts.struck
        ended.cut_off = [host * per_host + local for host in cuts.hosts_cut for local in range(per_host)]
    return ended


def verdict(folder: Path, codes: list[int], cut_off: Sequence[int] = ()) -> tuple[list[Diagnosis], int]:
    """Return the diagnoses of the hosts and the exit code.

    If the hosts disagree, the one that names the *cut_off* ranks is right, else the majority, else rank 0's host.
    """
    reports = [read_object(folder / f"report{node}.json") for node in range(len(codes))]
    diagnoses_of = [[Diagnosis.from_json(d) for d in report.get("diagnoses", ())] for report in reports]
    views = [None if not d else (d[0].kind, d[0].culprits) for d in diagnoses_of]

    def trust(node: int) -> tuple[bool, bool, int, int]:
        view = views[node]
        return view is not None, view is not None and view[1] == tuple(cut_off), views.count(view), -node

    node = max(range(len(codes)), key=trust)
    code = codes[node] if diagnoses_of[node] else next((c for c in codes if c), 0)
    return diagnoses_of[node], code


def placed(diagnosis: Diagnosis, evidence: Evidence) -> Diagnosis:
    """Return *diagnosis* with the lines of the culprits whose host did not judge."""
    sites = dict(diagnosis.sites)
    for rank in diagnosis.culprits:
        state = evidence.ranks.get(rank)
        if rank not in sites and state is not None and state.site is not None:
            sites[rank] = state.site
    return replace(diagnosis, sites=sites)


def with_texts(sources: Mapping[str, str], diagnoses: Sequence[Diagnosis]) -> Mapping[str, str]:
    """Return the sources with the files in which *diagnoses* happened, because lines without calls are not recorded."""
    texts = dict(sources)
    for file in {
        site.file: None for diagnosis in diagnoses for site in diagnosis.sites.values() if site.file not in texts
    }:
        with contextlib.suppress(OSError):
            texts[file] = read_text(file)
    return texts


def _said(folder: Path) -> str:
    """Return the output of the launchers."""
    texts = [path.read_text(encoding="utf-8", errors="replace").strip() for path in sorted(folder.glob("said*"))]
    return "\n".join(text for text in texts if text)


def _output(folder: Path, num: int, num_hosts: int) -> str:
    """Return the output of each rank with its rank as prefix, as in a simulation."""
    width = len(str(num - 1))
    lines = []
    for node in range(num_hosts):
        for path in sorted(folder.glob(f"logs{node}/**/std*.log")):
            if path.parent.name.isdigit():
                rank = node * (num // num_hosts) + int(path.parent.name)  # torch elastic's folders are local ranks
                text = path.read_text(encoding="utf-8", errors="replace")
                lines += [f"[{rank:>{width}}] {line}" for line in text.splitlines()]
    return "\n".join(lines) + ("\n" if lines else "")
