"""One program, one verdict: kind, culprits, exit code and lines, simulated, on gloo, and on gloo at strict."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import Zygote
from three_ways import CASES, WAYS, Program, Verdict, faulty_programs, verdict, with_head

NOT_SIMULATED = {
    "faults/holds_gil": "simulated ranks are threads of one interpreter: who holds it stops the simulator",
    "faults/process_frozen": "a signal to a rank is one to the simulator; test_faults has its rule",
    "faults/rank_killed": "as process_frozen",
    "faults/rank_segfault": "as process_frozen",
    "faults/worker_killed": "a data loader's workers run in the rank's own process there",
    "hangs/timeout": "a rank sleeps for a real minute on gloo",
    "hangs/timeout_caught": "as timeout",
}
"""Programs with one way less, and why."""
OTHER_LINE = {
    "faults/straggler": "the monitor says where it is while the others wait, the simulator where it came late",
}
"""Programs of which the ways name different lines, and why."""
ALWAYS = {"cases/metrics_dict", "faults/raised_in_finally"}
"""Those that the suite runs on gloo; .ci/soak runs all."""
QUICK = [with_head(path) for path in sorted(CASES.glob("*.py"))]
EVERY = [program for program in faulty_programs() if not program.name.startswith("hangs/timeout")]


def expected(program: Program) -> tuple[str, tuple[int, ...], int]:
    """What the head of a case says."""
    head = program.head
    return head["kind"], tuple(int(rank) for rank in head["culprits"].split(",")), int(head["exit"])


@pytest.mark.filterwarnings("ignore")  # a program's warnings are its own
@pytest.mark.parametrize("program", QUICK, ids=lambda program: program.path.stem)
def test_a_case_is_named(program: Program, zygote: Zygote) -> None:
    """The simulation names what is planted, at the marked line, and the cure that the head asks for."""
    seen = verdict(program, "sim", zygote)
    assert (seen.kind, seen.culprits, seen.exit_code) == expected(program), seen.text
    marked = {n for n, line in enumerate(program.path.read_text().splitlines(), 1) if "# <-" in line}
    assert not marked or set(seen.lines) <= marked, seen.text
    assert program.head.get("cure", "") in seen.text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", QUICK, ids=lambda program: program.path.stem)
def test_its_fixed_form_is_healthy(program: Program, zygote: Zygote) -> None:
    """Without what is planted the same program comes to its end."""
    seen = verdict(with_head(program.path, "fixed"), "sim", zygote)
    assert seen == Verdict("healthy", (), 0, ()), seen.text


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("program", QUICK, ids=lambda program: program.path.stem)
def test_its_fixed_form_is_healthy_on_gloo(program: Program, way: str, zygote: Zygote) -> None:
    """At check and at strict, too."""
    seen = verdict(with_head(program.path, "fixed"), way, zygote)
    assert seen == Verdict("healthy", (), 0, ()), seen.text


def in_the_suite(program: Program) -> Any:
    marks = [] if program.name in ALWAYS else [pytest.mark.soak]
    return pytest.param(program, id=program.name, marks=marks)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", [in_the_suite(program) for program in EVERY])
def test_three_ways_have_one_verdict(program: Program, zygote: Zygote) -> None:
    """What the simulator reports, the monitor reports at check and strict, and strict's exception names that kind."""
    ways = [way for way in WAYS if way != "sim" or program.name not in NOT_SIMULATED]
    verdicts = {way: verdict(program, way, zygote) for way in ways}
    first = verdicts["check"]
    for way, seen in verdicts.items():
        if program.name in OTHER_LINE:
            seen = Verdict(seen.kind, seen.culprits, seen.exit_code, first.lines)
        assert seen == first, f"{way}: {seen}\n{seen.text}\n\ncheck: {first}\n{first.text}"
    refusals = verdicts["strict"].refusals
    assert set(refusals) <= {first.kind}, verdicts["strict"].text


def test_exceptions_have_programs() -> None:
    """No reason is given for a program that is not there."""
    names = {program.name for program in faulty_programs()}
    assert NOT_SIMULATED.keys() | OTHER_LINE.keys() | ALWAYS <= names
