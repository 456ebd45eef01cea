"""One program's verdict from its simulation, from gloo at check and from gloo at strict, and the programs to ask."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jobs import Zygote, ring_directory

from distsim.debug.records.diagnosis import Diagnosis
from distsim.sim.run import RunRequest, run_program
from distsim.sim.world.conditions import Conditions

__all__ = ["WAYS", "Program", "Verdict", "faulty_programs", "verdict"]

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "parity" / "cases"
FAULTS = ROOT / "tests" / "realexec" / "faults"
HANGS = ROOT / "scenarios" / "hangs"
WAYS = ("sim", "check", "strict")
FROM_ZYGOTE = "zygote.py"
REFUSAL = re.compile(r"CollectiveMismatch: (\w+): ")


@dataclass(frozen=True)
class Program:
    """A program and how it is run."""

    path: Path
    ranks: int
    args: tuple[str, ...] = ()
    head: Mapping[str, str] = field(default_factory=dict)
    """What its first lines expect, and the settings that it needs."""

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"


@dataclass(frozen=True)
class Verdict:
    """The first diagnosis of a report; `healthy` where there is none."""

    kind: str
    culprits: tuple[int, ...]
    exit_code: int
    lines: tuple[int, ...]
    """Of the culprits, in the user's program."""
    refusals: tuple[str, ...] = field(default=(), compare=False)
    """The kinds that strict's exceptions name."""
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        who, where = (",".join(map(str, numbers)) for numbers in (self.culprits, self.lines))
        raised = f" raised {','.join(self.refusals)}" if self.refusals else ""
        return f"{self.kind:22} [{who}] {self.exit_code} :{where}{raised}"


def verdict(program: Program, way: str, zygote: Zygote) -> Verdict:
    """Run *program* one of the `WAYS`."""
    if way == "sim":
        guards = [guard for guard, word in (("nan", "nan"), ("buffers", "checksum")) if program.head.get(word)]
        outcome = run_program(
            RunRequest(
                program=str(program.path),
                args=program.args,
                on="ethernet-cpu:1",
                nproc_per_node=program.ranks,
                host_timeout_s=4.0,
                conditions=Conditions(guards=guards),
            )
        )
        text = "\n".join(f"{d.explanation}\n  next: {d.suggestion}" for d in outcome.diagnoses)
        return _verdict(outcome.diagnoses, outcome.exit_code, (), text)
    with ring_directory() as folder:
        result = zygote.run(
            program.path,
            program.ranks,
            directory=folder,
            level=way,
            args=program.args,
            hang_after_s=float(program.head.get("hang_after", "6")),
            straggler_after_s=float(program.head.get("straggler_after", "10")),
            nan=bool(program.head.get("nan")) or None,
            checksum=bool(program.head.get("checksum")) or None,
        )
    refusals = {kind for text in result.outputs.values() for kind in REFUSAL.findall(text)}
    code = result.exit_code or next((1 for code in result.codes.values() if code), 0)
    text = result.report + "\n".join(result.outputs.values())  # type: ignore[attr-defined]
    return _verdict(result.diagnoses, code, tuple(sorted(refusals)), text)


def _verdict(diagnoses: list[Diagnosis], exit_code: int, refusals: tuple[str, ...], text: str) -> Verdict:
    if not diagnoses:
        return Verdict("healthy", (), exit_code, (), refusals, text)
    first = diagnoses[0]
    sites = [first.sites[rank] for rank in first.culprits if rank in first.sites]
    lines = {site.line for site in sites if not site.file.endswith(FROM_ZYGOTE)}
    return Verdict(first.kind.value, first.culprits, exit_code, tuple(sorted(lines)), refusals, text)


def with_head(path: Path, *args: str) -> Program:
    """A program whose head says how it is run."""
    head = dict(re.findall(r"^# (\w+): (.*)$", path.read_text(), re.MULTILINE))
    return Program(path, int(head.get("ranks", "2")), args, head)


def faulty_programs() -> Iterator[Program]:
    """The cases, the fault library, and the hangs of at most four ranks among the scenarios."""
    for path in sorted(CASES.glob("*.py")):
        yield with_head(path)
    for path in sorted(FAULTS.glob("*.py")):
        yield with_head(path)
    for path in sorted(HANGS.glob("*.toml")):
        table = tomllib.loads(path.read_text())
        nodes = re.search(r":(\d+)$", table["on"])
        ranks = (int(nodes[1]) if nodes else 1) * table.get("nproc_per_node", 8)
        if ranks <= 4 and "fault" not in table and "faults" not in table:
            yield Program(path.parent / table["program"], ranks, tuple(table.get("args", ())), {"hang_after": "2.5"})
