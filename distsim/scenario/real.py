"""A scenario for real: torch elastic on gloo under guard, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distsim.debug.diagnosis import Diagnosis
from distsim.debug.render import render_diagnoses
from distsim.errors import UsageError
from distsim.scenario.baseline import baseline_path
from distsim.scenario.cuts import Cuts, spans_hosts
from distsim.scenario.expect import Observed, mistakes
from distsim.scenario.load import Scenario
from distsim.scenario.namespaces import hosts, missing
from distsim.scenario.result import Result
from distsim.sim.outcome import Outcome

__all__ = ["run_for_real"]

_monotonic = time.monotonic


def run_for_real(scenario: Scenario) -> Result:
    """`distsim run --on gloo` with the scenario's program, and its expectations held against the report."""
    from distsim.scenario.run import replay_command

    with tempfile.TemporaryDirectory(prefix="distsim-scenario-") as name:
        folder = Path(name)
        started = _monotonic()
        ended = _run(scenario, folder)
        wall_s = _monotonic() - started
        diagnoses, code = _verdict(folder, ended.codes)
        output = _output(folder, scenario.world_size, len(ended.codes))
        said = _said(folder)
    if 2 in ended.codes:
        raise UsageError(f"the real run did not start:\n{said}")
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
    )
    result = Result(
        scenario.name,
        str(scenario.path),
        report=render_diagnoses(diagnoses).plain(100) if diagnoses else said,
        output=output,
        replay=replay_command(scenario) + " --backend gloo",
        exit_code=outcome.exit_code,
        figures={"wall_time_s": wall_s},
    )
    if diagnoses:
        first = diagnoses[0]
        result.kind, result.culprits = first.kind.value, first.culprits
        site = next((first.sites[r] for r in first.culprits if r in first.sites), None)
        result.place = None if site is None else (site.file, site.line)
    result.wrong = mistakes(scenario, Observed(outcome, output, {}), baseline_path(scenario), False)
    for number in ended.never_struck:
        rule = scenario.rules[number]
        result.wrong.append(f"{rule.path}: never struck ({rule}, {rule.when})")
    if ended.over:
        result.wrong.insert(
            0, f"limits: the program still ran after {scenario.spec.limits.wall_time_s:g} s of wall time"
        )
    return result


@dataclass(slots=True)
class _Ended:
    """How the launchers ended, one for each host."""

    codes: list[int]
    over: bool
    """By the limit of wall time."""
    never_struck: Sequence[int] = ()


def _run(scenario: Scenario, folder: Path) -> _Ended:
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
        return _wait([_launcher(scenario, folder, 0, [], words, {"MASTER_PORT": "0"})], spec.limits.wall_time_s, None)
    lacking = missing()
    if lacking is not None:
        raise UsageError(f"{scenario.path}: faults that cut hosts off for real need network namespaces: {lacking}")
    number = scenario.num_hosts
    with hosts(number) as job:
        started = []
        for node, name in enumerate(job.names):
            words = ["--nnodes", str(number), "--node-rank", str(node), "--nproc-per-node"]
            words += [str(scenario.world_size // number), "--master-addr", job.addresses[0], "--master-port", "29500"]
            environ = {"GLOO_SOCKET_IFNAME": job.interface(node)}
            started.append(_launcher(scenario, folder, node, ["ip", "netns", "exec", name], words, environ))
        return _wait(started, spec.limits.wall_time_s, Cuts.of(scenario, folder, job))


def _launcher(
    scenario: Scenario, folder: Path, node: int, before: list[str], where: list[str], more: dict[str, str]
) -> subprocess.Popen[bytes]:
    """`distsim run --on gloo` on one host."""
    spec = scenario.spec
    flags = ["--on", "gloo", *where, "--on-hang", "abort", "--hang-after", str(spec.limits.host_timeout_s)]
    flags += ["--report", str(folder / f"report{node}.json"), "--rings", str(folder / f"rings{node}")]
    flags += ["--log-dir", str(folder / f"logs{node}"), "--redirects", "3"]
    flags += [flag for guard, flag in (("nan", "--nan"), ("buffers", "--checksum")) if guard in spec.guards]
    program = ["-m", "distsim.scenario.inject", str(folder / "plan.json")]
    environ = {**os.environ, **spec.env, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        environ.pop(name, None)
    words = [*before, sys.executable, "-m", "distsim", "run", *flags, *program]
    with (folder / f"said{node}").open("wb") as said:
        return subprocess.Popen(words, env=environ | more, stdout=said, stderr=subprocess.STDOUT)


def _wait(started: list[subprocess.Popen[bytes]], wall_time_s: float, cuts: Cuts | None) -> _Ended:
    """Until all have ended, or the time is over."""
    deadline = _monotonic() + wall_time_s
    over = False
    try:
        while any(process.poll() is None for process in started) and not over:
            if cuts is not None:
                cuts.tick()
            over = _monotonic() > deadline
            time.sleep(0.01)
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
        for process in started:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    codes = [process.returncode for process in started]
    return _Ended(codes, over, () if cuts is None else cuts.never_struck)


def _verdict(folder: Path, codes: list[int]) -> tuple[list[Diagnosis], int]:
    """What the hosts say, and the exit code. A host that was cut off judges by what it sees, so most hosts are
    right; of two equal halves, rank 0's."""
    said = [_diagnoses(folder / f"report{node}.json") for node in range(len(codes))]
    views = [None if not d else (d[0].kind, d[0].culprits) for d in said]
    node = max(range(len(codes)), key=lambda n: (views[n] is not None, views.count(views[n]), -n))
    code = codes[node] if said[node] else next((c for c in codes if c), 0)
    return said[node], code


def _said(folder: Path) -> str:
    """What the launchers printed."""
    texts = [path.read_text(encoding="utf-8", errors="replace").strip() for path in sorted(folder.glob("said*"))]
    return "\n".join(text for text in texts if text)


def _diagnoses(path: Path) -> list[Diagnosis]:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [Diagnosis.from_json(d) for d in data.get("diagnoses", ())]


def _output(folder: Path, num: int, num_hosts: int) -> str:
    """What each rank printed, behind its rank as in a simulation."""
    width = len(str(num - 1))
    lines = []
    for node in range(num_hosts):
        for path in sorted(folder.glob(f"logs{node}/**/std*.log")):
            if path.parent.name.isdigit():
                rank = node * (num // num_hosts) + int(path.parent.name)  # torch elastic's folders are local ranks
                text = path.read_text(encoding="utf-8", errors="replace")
                lines += [f"[{rank:>{width}}] {line}" for line in text.splitlines()]
    return "\n".join(lines) + ("\n" if lines else "")
