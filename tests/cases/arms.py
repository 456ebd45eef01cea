"""The ways in which the programs of the corpus run, and what is compared of what they end with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import Result, Zygote, ring_directory

from distsim.debug.records import Evidence
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.report.render import render_diagnoses
from distsim.errors import UsageError
from distsim.scenario import load_scenario
from distsim.scenario.run import observe, simulate_scenario
from distsim.sim.faults.fault import CallPoint, When
from distsim.sim.faults.rank_faults import Crash, Freeze
from distsim.sim.outcome import Outcome
from distsim.sim.patches import all_patches
from distsim.sim.run import RunRequest, run_program
from distsim.sim.world.conditions import Conditions
from tests.cases.corpus import HERE, Case

__all__ = [
    "Verdict",
    "aspects",
    "lines",
    "on_gloo",
    "simulate",
    "simulate_on_gpus",
    "simulate_scenario_of",
    "verdict_of",
    "whole",
]

TIES = ("as many here as there", "as many as there", "says who", "says whose", "is split evenly")
FROM_ZYGOTE = "zygote.py"
REFUSAL = re.compile(r"CollectiveMismatch: (\w+): ")
FIXED = ("fixed",)
ON_GPUS = re.compile(r'^(dist\.init_process_group\()"gloo"(.*)$', re.MULTILINE)
MADE = re.compile(r"torch\.ones\(([^()]*)\)")


@dataclass(frozen=True)
class Verdict:
    """How a run ended: the diagnoses, the first being the one that counts, and what was said of them."""

    diagnoses: list[Diagnosis]
    exit_code: int
    text: str
    evidence: Evidence | None = None
    refusals: frozenset[str] = frozenset()
    """The kinds that strict's exceptions name."""
    codes: tuple[int, ...] = ()
    """Exit codes of real ranks."""
    outputs: tuple[str, ...] = ()
    """What each real rank has printed."""
    rings: int = 0
    """How many real ranks have left a ring."""
    silent: list[Any] = field(default_factory=list)
    """Silent findings."""
    notes: list[str] = field(default_factory=list)

    @property
    def first_line(self) -> str:
        """Of the report, without what became of the job and the time that it took."""
        report = render_diagnoses(self.diagnoses[:1]).plain(110)
        return re.sub(r"^\w+  |\s+(at once|after [\d.]+ \w+)$", "", report.splitlines()[0])


def lines(diagnosis: Diagnosis) -> set[int]:
    """Where the culprits are in their program; who is on its way out is elsewhere."""
    sites = [diagnosis.sites[rank] for rank in diagnosis.culprits if rank in diagnosis.sites]
    return {site.line for site in sites if not site.file.endswith(FROM_ZYGOTE)}


def verdict_of(verdict: Verdict, case: Case, words: bool = True) -> str:
    """Return what differs from what the *case* declares, with or without its words; nothing if all is as declared."""
    if not verdict.diagnoses:
        return "" if case.is_healthy and verdict.exit_code == 0 else f"no diagnosis, exit code {verdict.exit_code}"
    first = verdict.diagnoses[0]
    marked = case.lines() if case.runs("lines") else set()
    at_mark = not marked or (bool(lines(first) & marked) if case.scenario else lines(first) <= marked)
    is_tie = any(word in first.explanation for word in TIES)
    wrong = {
        "kind": None if first.kind.value in case.kinds else first.kind.value,
        "culprits": None if case.culprits in (None, first.culprits) else first.culprits,
        "exit code": None if verdict.exit_code in case.exit_codes else verdict.exit_code,
        "words": None if not words or case.fields.get("says", "") in " ".join(verdict.text.split()) else verdict.text,
        "lines": None if at_mark else lines(first),
        "tie": None if "tie" not in case.fields or is_tie == case.is_tie else is_tie,
    }
    return "\n".join(f"{name}: {value}" for name, value in wrong.items() if value is not None)


def aspects(verdict: Verdict, case: Case) -> Mapping[str, Any]:
    """What all arms have alike."""
    first = verdict.diagnoses[0]
    return {
        "kind": first.kind,
        "culprits": first.culprits,
        "group": (first.group.label, first.group.ranks) if first.group and case.runs("group") else None,
        "call": first.call,
        "pair": first.pair,
        "exit code": first.exit_code,
        "lines": lines(first) if case.runs("lines") else None,
    }


def whole(diagnosis: Diagnosis) -> Iterator[str]:
    """Its fields, those that are empty left out."""
    yield f"  {diagnosis.kind}: {diagnosis.culprits} of {diagnosis.victims}, {diagnosis.call}, {diagnosis.proof}"
    yield f"    after {round(diagnosis.detected_after_s, 12)} s, exit code {diagnosis.exit_code}"
    yield "    at " + ", ".join(f"{rank}: {site}" for rank, site in sorted(diagnosis.sites.items()))
    stuck = sorted(diagnosis.stuck.items())
    yield "    in " + ", ".join(f"{rank}: {call.op} #{call.seq} {call.line} {call.group}" for rank, call in stuck)
    for name in ("cycle", "pair", "causes", "explanation", "suggestion"):
        if value := getattr(diagnosis, name):
            yield f"    {value}"


_simulated: dict[tuple[str, tuple[str, ...], str], Verdict] = {}


def simulate(case: Case, *more: str, silent: str = "off") -> Verdict:
    """The case simulated on CPUs; two tests may look at one run."""
    key = (case.name, more, silent)
    if key not in _simulated:
        _simulated[key] = _run(case, case.path, "ethernet-cpu:1", more, silent)
    return _simulated[key]


def simulate_scenario_of(case: Case) -> tuple[Verdict, str]:
    """The scenario simulated, and what of it is not as its file expects."""
    assert case.scenario is not None
    scenario = load_scenario(case.scenario)
    outcome, output, conditions = simulate_scenario(scenario)
    result = observe(scenario, outcome, output, conditions)
    _simulated[case.name, (), "off"] = verdict = _verdict(outcome)
    return verdict, "" if result.passed else result.text


def simulate_on_gpus(case: Case, folder: Path, *more: str, silent: str = "off") -> Verdict:
    """The case with CUDA tensors and NCCL; every line keeps its number."""
    program = folder / case.path.name
    program.write_text(_moved(case.text).replace("from tests.cases.begin import", "from begin import"))
    (folder / "begin.py").write_text(_moved((HERE / "begin.py").read_text()))
    for other in case.path.parent.glob("*.py") if case.scenario else ():
        if other.name != program.name:
            (folder / other.name).write_text(other.read_text())
    return _run(case, program, "dgx-h100:1", more, silent)


def _moved(text: str) -> str:
    begin = r'import torch; \1"nccl"\2; torch.cuda.set_device(dist.get_rank()); torch.set_default_device("cuda")'
    text = MADE.sub(r'torch.ones(\1, device="cuda")', ON_GPUS.sub(begin, text))
    return text.replace('init_device_mesh("cpu"', 'init_device_mesh("cuda"').replace("Generator()", 'Generator("cuda")')


def _skip_on_older(case: Case) -> None:
    if "sort_ranks" in case.text and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        pytest.skip(f"torch {torch.__version__} has no new_group(sort_ranks=)")


def _run(case: Case, program: Path, on: str, more: tuple[str, ...], silent: str) -> Verdict:
    _skip_on_older(case)
    try:
        all_patches()
    except UsageError as refusal:
        pytest.skip(str(refusal))  # on a torch where only the guard works
    rules = []
    if "rule" in case.fields:
        what, rank, *signal = case.fields["rule"].split()
        fault: Any = {"Crash": Crash, "Freeze": Freeze}[what]
        when = When(call=CallPoint(4, "all_reduce"))
        rules = [fault(when=when, ranks=(int(rank),), **({"signal": signal[0]} if signal else {}))]
        more = ("simulated", *more)
    request = RunRequest(
        str(program),
        args=(*case.args, *more),
        on=on,
        nproc_per_node=case.ranks,
        silent=silent,
        # Who never gives a sign of life is waited for; on a loaded machine two seconds may pass in an import.
        host_timeout_s=2.0 if "host_stuck" in case.kinds else 20.0,
        conditions=Conditions(
            rules=rules,
            guards=[guard for guard, word in (("nan", "nan"), ("buffers", "checksum")) if word in case.fields],
        ),
    )
    return _verdict(run_program(request))


def _verdict(outcome: Outcome) -> Verdict:
    text = "\n".join(f"{d.explanation}\n  next: {d.suggestion}" for d in outcome.diagnoses)
    text += "\n".join(map(str, outcome.failures))
    return Verdict(
        outcome.diagnoses, outcome.exit_code, text, outcome.evidence, silent=outcome.silent, notes=outcome.notes
    )


def on_gloo(case: Case, level: str, zygote: Zygote, *more: str, **settings: Any) -> Verdict:
    """The case's real ranks under guard."""
    _skip_on_older(case)
    ends_well = case.is_healthy or "guard" in case.fields
    with ring_directory() as folder:
        result: Result = zygote.run(
            case.path,
            case.ranks,
            directory=folder,
            level=level,
            args=(*case.args, *more),
            **{
                "hang_after_s": float(
                    case.fields.get("hang_after", "6" if level == "strict" and not ends_well else "60")
                ),
                "straggler_after_s": float(case.fields.get("straggler_after", "10")),
                "nan": "nan" in case.fields or None,
                "checksum": "checksum" in case.fields or None,
                **settings,
            },
        )
        rings = len([*folder.glob("*.ring")])
    outputs = "\n".join(result.outputs.values())
    code = result.exit_code or next((1 for code in result.codes.values() if code), 0)
    text = f"{result.report}\n{outputs}"  # type: ignore[attr-defined]
    refusals = frozenset(REFUSAL.findall(outputs))
    codes = tuple(result.codes.values())
    printed = tuple(result.outputs.values())
    return Verdict(result.diagnoses, code, text, None, refusals, codes, printed, rings, result.silent or [])
