"""The file of a rank's facts: what is written is read, and nothing else is believed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from distsim.debug.diagnosis.silent import facts_file
from distsim.debug.diagnosis.silent.facts import (
    BufferFact,
    CallCount,
    ClipFact,
    DropoutFact,
    EpochFact,
    InputFact,
    LossFact,
    ParameterFact,
    PlacementFact,
    Severity,
    StepFact,
    TrainingPhase,
    Window,
)
from distsim.debug.diagnosis.silent.facts_file import HEAD, FactsFull, FactsWriter, read_facts
from distsim.debug.diagnosis.silent.judge import search
from distsim.debug.records import Site
from tests.silent.facts import run_of, vector

SITE = Site("train.py", 3, "main", Site("lib.py", 4, "call"))


def full_window() -> Window:
    """Every kind of fact once."""
    return Window(
        [CallCount("all_reduce", (0, 1), "SUM", TrainingPhase.REDUCTION, False, SITE, 2, 16, {0}, {1})],
        [InputFact("Net", True, ((2, 3), ()), (vector(1.0), vector(2.0)), False, SITE)],
        [LossFact("mean", 8, math.nan, True, SITE), LossFact("none", 0)],
        [PlacementFact("Linear", (0, 1), vector(3.0), (4,), None)],
        [DropoutFact(2**31, vector(4.0), (5,), SITE)],
        [BufferFact("mean", (0, 1), vector(5.0))],
        [("all_gather", (0, 1), SITE)],
        [ClipFact(math.inf, 0.5, True, SITE)],
        [EpochFact(0, 1, SITE)],
    )


def full_step() -> StepFact:
    """A step with something in each field."""
    step = StepFact(0, 1, (0, 1), SITE, without_gradient=1, owns_state=False, has_closure=True, window=full_window())
    step.before, step.gradients, step.after = {0: vector(1.5)}, {0: vector(2.5)}, {0: vector(3.5), 1: vector(4.5)}
    step.local, step.state = {0: [vector(1.0), vector(2.0)]}, {0: {"exp_avg": vector(7.0)}, 1: {}}
    settings = (("lr", 0.1), ("nesterov", 0.0))
    step.hyperparameters = {0: settings, 1: settings}
    return step


def alike(one: object, other: object) -> bool:
    """Equal but for the arrays, which are compared by their text."""
    with np.printoptions(floatmode="unique"):
        return repr(one) == repr(other)


def test_every_fact_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Nested values, vectors, enumerations, numbers that JSON does not have."""
    parameters = [ParameterFact("w", (4, 4), "net", True, (0, 1), (0,), (), True, False), ParameterFact("b", (4,))]
    writer = FactsWriter(tmp_path / "rank.silent")
    writer.add(parameters, full_step())
    parameters[1].varies = True
    parameters.append(ParameterFact("late", (1,)))
    writer.add(parameters, full_step())
    writer.add_rest(full_window())
    writer.add_note("is searched up to step 2", saw_gpu=True)
    writer.close()
    saved = read_facts(tmp_path / "rank.silent")
    assert alike(saved.facts.parameters, parameters)
    assert alike(saved.facts.steps, [full_step(), full_step()])
    assert alike(saved.facts.rest, full_window())
    assert (saved.notes, saved.saw_gpu) == (["is searched up to step 2"], True)


def written(path: Path, num_steps: int = 2) -> bytes:
    """The bytes of a file with some steps."""
    writer = FactsWriter(path)
    for _ in range(num_steps):
        writer.add([ParameterFact("w", (4,)), ParameterFact("b", (4,))], full_step())
    writer.close()
    return path.read_bytes()


def test_a_record_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    """A rank may be killed while it writes: what it wrote before stands."""
    path = tmp_path / "rank.silent"
    data = written(path)
    _, num_bytes = HEAD.unpack_from(data)
    for length in range(HEAD.size + num_bytes, len(data), 97):
        path.write_bytes(data[:length])
        assert len(read_facts(path).facts.steps) == 1


def forged(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The first record of a file with a change, sealed as it should be."""
    mark, length = HEAD.unpack_from(data)
    record = msgspec.msgpack.decode(data[HEAD.size : HEAD.size + length])
    change(record)
    content = msgspec.msgpack.encode(record)
    return HEAD.pack(mark, len(content)) + content


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"\x80\x04N." + data,
        lambda data: data.replace(b"\xaaall_reduce", b"\xcaall_reduce"),
        lambda data: forged(data, lambda record: record["step"][-1][0][0].__setitem__(0, 1234)),
        lambda data: forged(data, lambda record: record["step"][-1][0][0].__setitem__(3, "elsewhere")),
        lambda data: forged(data, lambda record: record["step"][4].__setitem__(0, b"five!")),
        lambda data: forged(data, lambda record: record["step"].__setitem__(2, [0, 7])),
        lambda data: forged(data, lambda record: record["parameters"][0].__setitem__(0, 5)),
        lambda data: forged(data, lambda record: record.__setitem__("parameters", record["step"])),
    ],
    ids=["pickle", "torn", "no-text", "no-pass", "no-vector", "no-parameter", "gap", "no-list"],
)
def test_what_is_no_fact_is_one_complaint(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """Nothing in a file is executed, and a search without one rank says so."""
    path = tmp_path / "rank.silent"
    data = written(path)
    changed = change(data)
    assert changed != data
    path.write_bytes(changed)
    with pytest.raises(ValueError, match=r"^rank\.silent: (expected|not) a record of facts at byte \d+"):
        read_facts(path)
    result = search({0: tmp_path / "rank.ring", 1: tmp_path / "none.ring"}, 2)
    assert (result.findings, len(result.notes)) == ([], 1)
    assert result.notes[0].startswith("silent faults: not searched on rank 0: ")


def test_a_file_has_a_largest_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It lies in memory: the search ends there."""
    monkeypatch.setattr(facts_file, "MOST_BYTES", 4000)
    with pytest.raises(FactsFull):
        written(tmp_path / "rank.silent", 100)
    assert (tmp_path / "rank.silent").stat().st_size < 8000


def test_no_more_is_judged_than_a_user_waits_for(tmp_path: Path) -> None:
    """The first steps, and a line on the rest."""
    written(tmp_path / "rank.silent", 9)
    saved = read_facts(tmp_path / "rank.silent", most=6)
    assert len(saved.facts.steps) == 4  # of two parameters each
    assert saved.notes == ["is searched up to step 1: the rest is too large"]


def test_a_search_needs_the_records_of_all_ranks(tmp_path: Path) -> None:
    """Ranks of another host have theirs there: one line, and nobody is accused."""
    facts = run_of({0: [1.0, 1.0, 1.0, 1.0], 1: [1.0, 1.0, 2.0, 2.0]}, {0: [1.0, 1.0], 1: [1.0, 1.0]})
    rings = {}
    for rank, of_rank in facts.items():
        of_rank.parameters[0].ddp = (0, 1)
        rings[rank] = tmp_path / f"rank{rank}.ring"
        writer = FactsWriter(tmp_path / f"rank{rank}.silent")
        for step in of_rank.steps:
            writer.add(of_rank.parameters, step)
        writer.close()
    found = search(rings, 2)
    assert [(one.kind.value, one.level) for one in found.findings] == [("changed_outside_step", Severity.ERROR)]
    assert found.notes == []
    assert search(rings, 2, ["changed_outside_step:*"]).findings == []
    elsewhere = search(rings, 4)
    assert (elsewhere.findings, elsewhere.notes) == (
        [],
        ["silent faults: not searched, only ranks 0,1 of 4 ran on this host"],
    )
