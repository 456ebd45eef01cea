"""A scenario for real: torch elastic on gloo under guard, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from distsim.debug.diagnosis import Diagnosis
from distsim.debug.render import render_diagnoses
from distsim.errors import UsageError
from distsim.scenario.baseline import baseline_path
from distsim.scenario.expect import Observed, mistakes
from distsim.scenario.load import Scenario
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
        code, said = _launch(scenario, folder)
        wall_s = _monotonic() - started
        diagnoses = _diagnoses(folder / "report.json")
        output = _output(folder, scenario.world_size)
    if code == 2:
        raise UsageError(f"the real run did not start:\n{said.strip()}")
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
    if code < 0:
        result.wrong.insert(
            0, f"limits: the program still ran after {scenario.spec.limits.wall_time_s:g} s of wall time"
        )
    return result


def _launch(scenario: Scenario, folder: Path) -> tuple[int, str]:
    """Exit code (negative: ended by the wall limit) and what the launcher printed."""
    spec = scenario.spec
    plan = {
        "program": str(scenario.file) if scenario.file is not None else scenario.program,
        "function": scenario.function,
        "args": spec.args,
        "faults": [fault.model_dump() for fault in spec.faults],
    }
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    flags = [
        "--on",
        "gloo",
        "--nnodes",
        "1",
        "--nproc-per-node",
        str(scenario.world_size),
        "--on-hang",
        "abort",
    ]
    flags += ["--hang-after", str(spec.limits.host_timeout_s), "--report", str(folder / "report.json")]
    flags += ["--log-dir", str(folder / "logs"), "--redirects", "3", "--rings", str(folder / "rings")]
    flags += [flag for guard, flag in (("nan", "--nan"), ("buffers", "--checksum")) if guard in spec.guards]
    words = [
        sys.executable,
        "-m",
        "distsim",
        "run",
        *flags,
        "-m",
        "distsim.scenario.inject",
        str(folder / "plan.json"),
    ]
    environ = {**os.environ, **spec.env, "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        environ.pop(name, None)
    process = subprocess.Popen(
        words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=os.getcwd()
    )
    try:
        said, _ = process.communicate(timeout=spec.limits.wall_time_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            said, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        return -1, said
    return process.returncode, said


def _diagnoses(path: Path) -> list[Diagnosis]:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [Diagnosis.from_json(d) for d in data.get("diagnoses", ())]


def _output(folder: Path, num: int) -> str:
    """What each rank printed, behind its rank as in a simulation."""
    width = len(str(num - 1))
    lines = []
    for path in sorted(folder.glob("logs/**/std*.log")):
        rank = path.parent.name
        if rank.isdigit():
            text = path.read_text(encoding="utf-8", errors="replace")
            lines += [f"[{rank:>{width}}] {line}" for line in text.splitlines()]
    return "\n".join(lines) + ("\n" if lines else "")
