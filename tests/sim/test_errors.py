"""Exceptions of any kind end a simulation with the user's report, never with a traceback of ours."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch.distributed as dist

import distsim
from distsim.debug.report.render import render_diagnoses
from distsim.report import Summary, report_document


class Mute(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class Endless(Exception):
    def __str__(self) -> str:
        return str(self)


class Base(BaseException):
    pass


RAISED: dict[str, tuple[Callable[[], BaseException], str]] = {
    "a text that raises": (Mute, "Mute: <exception str() failed>"),
    "a text that calls itself": (Endless, "Endless: <exception str() recursed without an end>"),
    "a text that no file can hold": (lambda: ValueError("bad \ud800 text"), r"ValueError: bad \ud800 text"),
    "a text of ten million letters": (lambda: ValueError("x" * 10_000_000), "ValueError: "),
    "a group with a mute one": (lambda: ExceptionGroup("two", [Mute(), KeyError("b")]), "two (2 sub-exceptions)"),
    "no Exception at all": (lambda: Base("mine"), "Base: mine"),
}


def outcome_of(make: Callable[[], BaseException]) -> distsim.Outcome:
    def body() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise make()
        dist.barrier()

    return distsim.simulate(body, nproc_per_node=2, check=False)


def text_of(outcome: distsim.Outcome) -> str:
    import io

    from rich.console import Console

    console = Console(width=120, file=io.StringIO(), highlight=False)
    with console.capture() as capture:
        console.print(Summary(outcome), crop=False)
    return capture.get()


@pytest.mark.parametrize("name", RAISED)
def test_any_exception_is_told_with_its_rank(name: str) -> None:
    """In the diagnosis, on the terminal and in the JSON; nothing of it is endless."""
    make, said = RAISED[name]
    outcome = outcome_of(make)
    assert outcome.exit_code == 1
    assert outcome.diagnoses[0].kind.value == "rank_raised"
    text = text_of(outcome)
    assert said in text
    assert "test_errors.py" in text
    assert len(text) < 60_000
    assert json.loads(json.dumps(report_document(outcome)))["failures"][0]["ranks"] == [1]
    text.encode("utf-8")


def test_five_hundred_errors_fit_on_a_screen() -> None:
    """Hundreds of ranks with an error each: the first in full, the others counted, all of them in the JSON."""
    from distsim.debug.diagnosis.diagnose import diagnose
    from distsim.debug.records import Evidence, Phase, RankState, Site
    from distsim.report.failures import Failures
    from distsim.sim.outcome import Failure

    trace = "Traceback (most recent call last):\n" + "".join(f'  File "t.py", line {n}, in f\n' for n in range(40))
    shards = ["".join("abcdefghij"[int(digit)] for digit in str(rank)) for rank in range(500)]
    states = {
        rank: RankState(
            rank, Phase.RAISED, site=Site("t.py", 9, "f"), exception=f"ValueError: shard {shards[rank]}",
            traceback=f"{trace}ValueError: shard {shards[rank]}",
        )
        for rank in range(500)
    }  # fmt: skip
    evidence = Evidence(500, states)
    found = diagnose(evidence)
    assert len(found) == 500
    outcome = outcome_of(Mute)
    outcome.diagnoses, outcome.evidence = found, evidence
    outcome.failures = [Failure((r,), "ValueError", f"shard {shards[r]}", f"{states[r].traceback}") for r in range(500)]
    lines = text_of(outcome).splitlines()
    assert len(lines) <= 60, "\n".join(lines)
    assert any("more diagnoses (all of them: --report FILE)" in line for line in lines)
    alone = Failures(outcome.failures)
    outcome.diagnoses, outcome.evidence, outcome.failures = [], None, outcome.failures
    assert len(alone.failures) == 500
    lines = text_of(outcome).splitlines()
    assert len(lines) <= 60
    assert any("more different exceptions (all of them: --report FILE)" in line for line in lines)
    assert len(report_document(outcome)["failures"]) == 500


def test_errors_that_differ_in_numbers_are_told_once() -> None:
    """One rank's in full, the others in a line with the last one's words; other errors, and the JSON, keep theirs."""

    def body() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 5:
            raise KeyError("no shard")
        raise ValueError(f"loss {dist.get_rank() * 1.5} is bad")

    outcome = distsim.simulate(body, nproc_per_node=8, check=False)
    text = " ".join(text_of(outcome).split())
    assert text.count("ERROR rank raised") == 2
    assert (
        "... and 6 more that differ in numbers, ranks 1-4,6,7 (all of them: --report FILE); rank 7: ValueError" in text
    )
    assert "loss 10.5 is bad" in text
    assert "loss 1.5 is bad" not in text
    assert "KeyError: 'no shard'" in text
    assert "RAISED" not in text, "what a diagnosis has told is not told again"
    report = report_document(outcome)
    assert [len(report[name]) for name in ("diagnoses", "failures")] == [8, 8]
    assert render_diagnoses(outcome.diagnoses, outcome.evidence, whole=True).plain(120).count("ERROR  rank raised") == 8
    outcome.diagnoses, outcome.evidence = [], None
    text = " ".join(text_of(outcome).split())
    assert text.count("RAISED") == 2
    assert "... and 6 more that differ in numbers, ranks 1-4,6,7 (--report FILE); rank 7: ValueError: loss 10.5" in text
