"""The corpus: programs with one fault or none, each declared once by the docstring that it begins with.

To add a case, put a file into the folder of its family. Its docstring says in a sentence what is wrong; below a blank
line stand fields, one a line:

    ranks: 2, 4             how many ranks it runs on: a test for each
    kind: missing_rank      the kind of the first diagnosis (`a | b`: either); `healthy`; or a kind of silent fault
    culprits: 1             the ranks that are named; `1 | 0`: in the first world 1, in the second 0
    exit: 3                 the exit code
    says: agree on          words of the explanation or of the cure
    tie: 2                  the worlds in which nothing but the order of ranks says who is wrong
    hang_after: 1.5         settings of the guard: hang_after, straggler_after, nan, checksum
    rule: Crash 2 SIGSEGV   what strikes the simulated rank where the program would end the simulator
    suite: check, gpus      arms that run in the default suite whatever else is there; `smoke` marks them
    gpus: no, REASON        an arm that it does not run in: records, simulated, gpus, check, strict
    lines: no, REASON       the arms name different lines; likewise `group`
    guard: check, strict    of `guarded`: the levels at which a program that looks at the guard itself runs
    args: at once | late    of `guarded`: what it is called with, in turn
    prints: kept 0          of `guarded`: what every rank prints
    unvalued: KIND          what the silent search finds on simulated GPUs, whose tensors have no values

A line that ends in `# <-` is one where a culprit may be. `FIXED`, and `"fixed" in sys.argv`, is the program without its
fault: if the text has it, it must be healthy. Most programs begin with `tests/cases/begin.py`; none has to.

Arms, each a test of `test_cases.py`: `simulated` (every case, in the suite), `records` (the simulation's evidence as
real ranks leave it), `gpus` (simulated on GPUs and NCCL), `check` and `strict` (real ranks on gloo). Real jobs take
seconds: the suite has the first case of each kind at check and one of three kinds of mismatch at strict, the soak all.
The scenarios of `scenarios/hangs` are cases as well; their TOML file is the declaration.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "ARMS",
    "CASES",
    "FAULTS",
    "FIELDS",
    "GUARDED",
    "HEALTHY",
    "OF_SCENARIOS",
    "SCENARIOS",
    "SEARCHED",
    "SEARCHED_HEALTHY",
    "Case",
]

HERE = Path(__file__).resolve().parent
SCENARIOS = HERE.parents[1] / "scenarios"
ARMS = ("records", "simulated", "gpus", "check", "strict")
FIELDS = (
    *("ranks", "kind", "culprits", "exit", "says", "tie", "hang_after", "straggler_after", "nan", "checksum"),
    *("rule", "suite", "lines", "group", "unvalued", "guard", "args", "prints"),
)

OF_SCENARIOS: dict[str, dict[str, str]] = {
    "aliased_outputs": {"records": "no, it is a warning, and ranks that all were killed are an error"},
    "monitored_barrier": {"gpus": "no, NCCL has none"},
    "never_waited": {"records": "no, it is a warning, and ranks that all were killed are an error"},
    "os_exit": {"gpus": "no, the host is ahead of its kernels: the rank is gone before its first call"},
    "polls_a_tensor": {"gpus": "no, a loop that reads a GPU is not seen to be stuck yet"},
    "set_order": {"gpus": "no, the host is ahead of its kernels: later calls show that the order differs"},
    "sys_exit_3": {"gpus": "no, the host is ahead of its kernels: the rank is gone before its first call"},
    "timeout": {
        "gpus": "no, the time limit of NCCL's watchdog, which kills the process, is not simulated",
        "check": "no, a rank sleeps for a real minute; missing/timeout is the same in three seconds",
        "strict": "no, a rank sleeps for a real minute",
    },
    "timeout_caught": {
        "gpus": "no, an error of NCCL's watchdog cannot be caught",
        "check": "no, a rank sleeps for a real minute; healthy/timeout_caught is the same in three seconds",
        "strict": "no, a rank sleeps for a real minute",
    },
    "two_threads_one_group": {"gpus": "no, torch.set_default_device is of one thread"},
    "wrong_order": {"suite": "gpus"},
    "shape_mismatch": {"suite": "gpus"},
    "crossed_recvs": {"suite": "gpus"},
    "skipped_in_the_middle": {"suite": "gpus"},
}
"""Fields of scenarios that their users have no need of."""


@dataclass(frozen=True)
class Case:
    """A program in a world of some size, and what is expected of it."""

    path: Path
    ranks: int
    fields: Mapping[str, str] = field(hash=False)
    world: int = 0
    """The number of this world among the case's."""
    args: tuple[str, ...] = ()
    mark: str = "# <-"
    """What the lines of culprits hold."""
    scenario: Path | None = None

    @property
    def name(self) -> str:
        """Family and name, and the number of ranks where there are several worlds."""
        several = "," in self.fields["ranks"]
        return f"{self.path.parent.name}/{self.path.stem}" + f"-{self.ranks}" * several

    @property
    def family(self) -> str:
        return self.path.parent.name

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.several("kind", "|"))

    def several(self, name: str, between: str) -> list[str]:
        """The values of a field that has several."""
        return [value.strip() for value in self.fields.get(name, "").split(between) if value]

    @property
    def culprits(self) -> tuple[int, ...] | None:
        """Who is named in this world; None where the case does not say."""
        worlds = self.fields.get("culprits", "").split("|")
        ranks = worlds[self.world if len(worlds) > 1 else 0]
        return tuple(int(rank) for rank in ranks.split(",")) if ranks else None

    @property
    def exit_codes(self) -> tuple[int, ...]:
        return tuple(int(code) for code in self.fields.get("exit", "0").split("|"))

    @property
    def is_tie(self) -> bool:
        return str(self.ranks) in self.several("tie", ",")

    @property
    def is_healthy(self) -> bool:
        return self.kinds == ("healthy",)

    @functools.cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def has_fixed_form(self) -> bool:
        return re.search(r"\bFIXED\b|\"fixed\"", self.text) is not None

    def lines(self) -> set[int]:
        """The lines where a culprit may be."""
        return {n for n, line in enumerate(self.text.splitlines(), 1) if self.mark in line}

    def runs(self, arm: str) -> bool:
        """Whether it runs in the *arm*."""
        return not self.fields.get(arm, "").startswith("no, ")

    def always(self, arm: str) -> bool:
        """Whether the suite runs it in the *arm* because the case says so."""
        return arm in self.several("suite", ",")

    @classmethod
    def read(cls, path: Path) -> list[Case]:
        """A program's case in each of its worlds."""
        fields = fields_of(path)
        return [cls(path, int(ranks), fields, number) for number, ranks in enumerate(fields["ranks"].split(","))]

    @classmethod
    def named(cls, name: str) -> Case:
        """The first case that is declared by `FAMILY/NAME`."""
        return cls.read(HERE / f"{name}.py")[0]

    @classmethod
    def of_scenario(cls, path: Path) -> Case:
        """The case that a scenario file is."""
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        nodes = re.search(r":(\d+)$", table["on"])
        ranks = (int(nodes[1]) if nodes else 1) * table.get("nproc_per_node", 8)
        expect = table["expect"]
        fields = {"ranks": str(ranks), "kind": expect["kind"], "exit": str(expect["exit_code"]), "hang_after": "2.5"}
        if "culprits" in expect:
            fields["culprits"] = ", ".join(map(str, expect["culprits"]))
        if ranks > 4:
            fields |= dict.fromkeys(("gpus", "check", "strict"), "no, it is one of GPUs, and large")
        mark = expect.get("line") if isinstance(expect.get("line"), str) else "no line is marked"
        fields |= OF_SCENARIOS.get(path.stem, {})
        return cls(path.parent / table["program"], ranks, fields, 0, tuple(table.get("args", ())), mark, path)


def fields_of(path: Path) -> dict[str, str]:
    """The fields in the docstring of a program."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return dict(re.findall(r"^(\w+): (.*)$", docstring.partition("\n\n")[2], re.MULTILINE))


CASES = [case for path in sorted(HERE.glob("*/*.py")) for case in Case.read(path)]
"""The programs of this folder."""
SEARCHED = [case for case in CASES if case.family == "silent"]
"""Those that the silent search is to find, by what their `kind` says."""
SEARCHED_HEALTHY = [case for case in CASES if case.family == "silent_healthy"]
"""Training programs that look like one of them."""
HEALTHY = [case for case in CASES if case.family == "healthy"]
GUARDED = [case for case in CASES if case.family == "guarded"]
"""Programs that look at the guard themselves, and end well; of the kind `caught` if they catch a fault of theirs."""
FAULTS = [case for case in CASES if case.family not in ("silent", "silent_healthy", "healthy", "guarded")]
FAULTS += [Case.of_scenario(path) for path in sorted((SCENARIOS / "hangs").glob("*.toml"))]
