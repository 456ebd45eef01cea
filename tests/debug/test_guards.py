"""Advice on calls under an `if`: which condition is named, and which is not."""

from __future__ import annotations

import pytest

from distsim.debug.diagnosis.causes.blocks import guard_decision
from distsim.debug.diagnosis.causes.program_text import ProgramText
from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from tests.debug.builders import FILE, Step, all_reduce, barrier, coll, group, play
from tests.debug.test_causes import Program, only, program


def step(p: Program, *marks: str, op: str = "all_reduce", shape: int = 4) -> Step:
    """A call at the first mark, in the functions `inner` below `main` at the second."""
    callers = tuple(Site(FILE, p.lines[m], "main") for m in marks[1:])
    return coll(op, p.lines[marks[0]], shape=(shape,), function="inner" if callers else "main", callers=callers)


def extra(p: Program, *marks: str, op: str = "all_reduce") -> Diagnosis:
    """Three ranks make four rounds of the call `each`; rank 0 makes the marked one after the second."""

    def steps(rank: int) -> list[Step]:
        more = [step(p, *marks, op=op, shape=1)] if rank == 0 else []
        return [all_reduce(p.each)] * 2 + more + [all_reduce(p.each)] * 2 + [barrier(p.end)]

    return only(play(3, steps, sources={FILE: p.text}))


HELPER = """
def inner(loss):
    if rank == 0:  #@ cause
        dist.all_reduce(loss)  #@ call
for step in range(4):
    for grad in grads:
        dist.all_reduce(grad)  #@ each
    if step % 2:
        inner(loss)  #@ caller
dist.barrier()  #@ end
"""
"""The `if` stands in a helper, and the others are in a loop of the round."""


def test_a_helper_for_one_rank_is_no_loop_that_this_rank_has_left() -> None:
    """The records alone look like a loop that rank 0 goes through less often; the `if` asks for the rank."""
    p = program(HELPER)
    d = extra(p, "call", "caller")
    assert (d.kind, d.culprits) == (Kind.EXTRA_COLLECTIVE, (0,))
    assert f"it stands under `if rank == 0` at {FILE}:{p.cause}" in d.suggestion
    assert [site.line for site in d.causes] == [p.cause]


FOR_SOME = {
    "elif": (
        """
for step in range(4):
    dist.all_reduce(x)  #@ each
    if step == 9:
        pass
    elif rank == 0:  #@ cause
        dist.all_reduce(y)  #@ call
dist.barrier()  #@ end
""",
        "stands under `if rank == 0`",
    ),
    "a value of its own": (
        """
for step in range(4):
    dist.all_reduce(x)  #@ each
    if norm > 10:  #@ cause
        dist.all_reduce(y)  #@ call
dist.barrier()  #@ end
""",
        "Agree on `norm > 10` at train.py:3 first",
    ),
    "a value that a collective under an if would have made alike": (
        """
for step in range(4):
    dist.all_reduce(x)  #@ each
    if sync:
        dist.all_reduce(norm)
    if norm > 10:  #@ cause
        dist.all_reduce(y)  #@ call
dist.barrier()  #@ end
""",
        "Agree on `norm > 10` at train.py:5 first",
    ),
    "a file": (
        """
there = os.path.exists(path)
for step in range(4):
    dist.all_reduce(x)  #@ each
    if there:  #@ cause
        dist.all_reduce(y)  #@ call
dist.barrier()  #@ end
""",
        "Let rank 0 look for the file and broadcast the answer",
    ),
}


@pytest.mark.parametrize("name", FOR_SOME)
def test_the_condition_around_a_call_of_some_ranks_is_named(name: str) -> None:
    """The suggestion holds the cure, and the line of the condition is shown."""
    text, cure = FOR_SOME[name]
    p = program(text)
    d = extra(p, "call")
    assert d.kind is Kind.EXTRA_COLLECTIVE
    assert cure in d.suggestion, d.suggestion
    assert [site.line for site in d.causes] == [p.cause]


ALIKE = {
    "decided by a collective": """
for step in range(4):
    dist.all_reduce(x)  #@ each
    dist.all_reduce(norm)
    if norm > 10:
        dist.all_reduce(y)  #@ call
dist.barrier()  #@ end
""",
    "through a name": """
for step in range(4):
    dist.all_reduce(x)  #@ each
    dist.broadcast(flag, src=0)
    stop = bool(flag)
    if stop:
        dist.all_reduce(y)  #@ call
dist.barrier()  #@ end
""",
    "number of the step": """
for step in range(4):
    dist.all_reduce(x)  #@ each
    if step % EVERY == 1:
        dist.all_reduce(y)  #@ call
dist.barrier()  #@ end
""",
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_condition_that_is_alike_is_not_named(name: str) -> None:
    """What a collective or the number of the step decides is no cause."""
    d = extra(program(ALIKE[name]), "call")
    assert not d.causes, d.suggestion
    assert d.suggestion.startswith("Make the call at train.py:")


def test_the_condition_around_a_call_that_a_rank_left_out_is_named() -> None:
    """The others stand in the branch; one line in other rounds has its condition within the loop."""
    p = program("""
for step in range(2):
    for q in parameters:
        if q.grad is not None:  #@ cause
            dist.all_reduce(q.grad)  #@ call
dist.barrier()  #@ end
""")

    def steps(rank: int) -> list[Step]:
        shapes = [(8,), (2,)] if rank == 1 else [(8,), (4,), (2,)]
        return [all_reduce(p.call, shape=shape) for shape in [(8,), (4,), (2,), *shapes]] + [barrier(p.end)]

    d = only(play(3, steps, sources={FILE: p.text}))
    assert (d.kind, d.culprits) == (Kind.MISSING_RANK, (1,))
    assert d.suggestion.startswith("Reduce every parameter's gradient on every rank (zeros where it is None)")
    assert [site.line for site in d.causes] == [p.cause]


def test_a_circle_of_two_groups_that_one_ranks_own_call_closes() -> None:
    """Behind the others' line in the round, for one rank only, on a group of its own: an extra call, not an order."""
    p = program("""
for step in range(4):
    dist.all_reduce(x, group=a)  #@ each
    if rank == 0:  #@ cause
        dist.all_gather(y, x, group=b)  #@ call
""")
    a, b = group(0, 1, name="1", desc="a"), group(0, 1, name="2", desc="b")

    def steps(rank: int) -> list[Step]:
        more = [coll("all_gather", p.call, b)] if rank == 0 else []
        return [all_reduce(p.each, a), *more, all_reduce(p.each, a)]

    d = only(play(2, steps, sources={FILE: p.text}))
    assert (d.kind, d.culprits) == (Kind.EXTRA_COLLECTIVE, (0,))
    assert f"`if rank == 0` at {FILE}:{p.cause}" in d.suggestion


def test_a_condition_that_lets_the_rank_through_before_is_not_named() -> None:
    """Rank 1 belongs to the branch and has made the call twice: it is not the `if` that keeps it from the third."""
    p = program("""
for step in range(4):
    if rank < 2:
        dist.all_reduce(x, group=tp)  #@ call
    dist.barrier()  #@ end
""")
    tp = group(0, 1, name="1", desc="tp")

    def steps(rank: int) -> list[Step]:
        calls = [all_reduce(p.call, tp), barrier(p.end)] if rank < 2 else [barrier(p.end)]
        return [*calls, *calls, barrier(p.end)] if rank == 1 else [*calls, *calls, *calls]

    (d,) = [d for d in diagnose(play(3, steps, sources={FILE: p.text})) if 1 in d.culprits]
    assert "rank < 2" not in d.suggestion
    assert not d.causes


STARTER = """
def child(job):
    if job["guarded"]:
        run(job)  #@ start
def call(x):
    if warm:
        dist.all_reduce(x)  #@ call
call(x)  #@ here
call(x)  #@ there
"""


@pytest.mark.parametrize("outside", ["there", "here"])
def test_a_condition_that_all_ranks_passed_is_no_cause(outside: str) -> None:
    """Neither one in the frames that started the program, nor one around a line that all are at, once."""
    p = program(STARTER)
    inner = (Site(FILE, p.lines["call"], "call"),) if outside == "here" else ()
    starter = Site(FILE, p.lines["start"], "child")
    frames = (*inner, Site(FILE, p.lines["here"], "<module>"), starter)
    others = (*inner, Site(FILE, p.lines[outside], "<module>"), starter)
    assert guard_decision(ProgramText({FILE: p.text}, frozenset()), frames, others) is None


def test_a_line_that_makes_another_call_in_its_next_round() -> None:
    """DDP's second forward begins with a broadcast: the rank is at its line again, past the call under the `if`."""
    p = program("""
for step in range(3):
    model(batch).sum().backward()  #@ each
    if rank != 2:  #@ cause
        dist.all_reduce(seen)  #@ call
dist.barrier()  #@ end
""")

    def steps(rank: int) -> list[Step]:
        again = coll("broadcast", p.each, root=0, shape=(3,))
        return [all_reduce(p.each, shape=(64,)), again if rank == 2 else all_reduce(p.call, shape=(1,))]

    d = only(play(4, steps, sources={FILE: p.text}))
    assert (d.kind, d.culprits) == (Kind.MISSING_RANK, (2,))
    assert f"it stands under `if rank != 2` at {FILE}:{p.cause}" in d.suggestion
