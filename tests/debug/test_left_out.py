"""Calls that a rank leaves out or makes in another order, and the lines of the program that show why."""

from __future__ import annotations

from typing import Any

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import Site
from distsim.debug.records.kinds import Kind
from tests.debug.builders import FILE, Step, all_reduce, barrier, coll, group, play, recv, send, wait_all
from tests.debug.test_causes import only, program


def test_messages_in_another_order_are_not_of_a_wrong_size() -> None:
    """Two isends and two irecvs of one pair, crossed: the cure is one order, not one size."""

    def steps(rank: int) -> list[Step]:
        if rank == 0:
            return [send(1, 3, shape=(4,), is_async=True), send(1, 3, shape=(16,), is_async=True), wait_all(5)]
        return [recv(0, 4, shape=(16,), is_async=True), recv(0, 4, shape=(4,), is_async=True), wait_all(5)]

    d = diagnose(play(2, steps))[0]
    assert d.kind is Kind.P2P_SIZE_MISMATCH
    assert "in another order" in d.explanation
    assert d.suggestion.startswith("Post the messages between ranks 0 and 1 in one order on both ends")


def below(function: str, line: int) -> dict[str, Any]:
    """A call in *function*, which the program calls at *line*."""
    return {"function": function, "callers": (Site(FILE, line, "main"),)}


RETURN_ABOVE = """
def clip(grads):
    if not grads:  #@ cause
        return
    dist.all_reduce(total)  #@ call
for step in range(4):
    clip(grads_of(step))  #@ outer
    dist.all_reduce(count)  #@ next
"""


def test_a_function_that_returns_before_the_call_is_shown() -> None:
    """Rank 2 leaves the function above the call, in one round of a loop that all are in."""
    p = program(RETURN_ABOVE)
    after = all_reduce(p.next, shape=(1,))

    def steps(rank: int) -> list[Step]:
        whole = [all_reduce(p.call, **below("clip", p.outer)), after]
        return [*whole, *whole, *(whole if rank != 2 else [after]), *whole]

    d = only(play(4, steps, sources={FILE: p.text}))
    assert (d.kind, d.culprits) == (Kind.MISSING_RANK, (2,))
    assert d.suggestion.startswith(f"Agree on `not grads` at {FILE}:{p.cause} first")
    assert [site.line for site in d.causes] == [p.cause]


def test_a_loop_with_other_bounds_on_some_ranks_is_shown() -> None:
    """Rank 3 validates on fewer batches, and is in the training loop again."""
    p = program("""
def validate(batches):
    for _ in range(batches):  #@ loop
        dist.all_reduce(loss)  #@ call
for epoch in range(2):
    for batch in range(3):
        dist.all_reduce(grad)  #@ next
    validate(size)  #@ outer
""")

    def steps(rank: int) -> list[Step]:
        train = [all_reduce(p.next, shape=(64,))] * 3
        return (train + [all_reduce(p.call, **below("validate", p.outer))] * (3 if rank == 3 else 5)) * 2

    d = only(play(4, steps, sources={FILE: p.text}))
    assert (d.kind, d.culprits) == (Kind.MISSING_RANK, (3,))
    assert "`range(batches)`" in d.suggestion


def test_the_loop_that_an_ended_rank_has_left_is_shown() -> None:
    """A worker that has ended left its command loop by a condition of its own."""
    p = program("""
def serve():
    while True:
        dist.broadcast(cmd, src=0)  #@ get
        if cmd == "sleep" and rank == 1:  #@ cause
            return
        dist.all_reduce(x)  #@ call
if rank == 0:
    for c in commands:
        dist.broadcast(c, src=0)  #@ send
        dist.all_reduce(x)  #@ drive
else:
    serve()  #@ outer
""")

    def steps(rank: int) -> list[Step]:
        if rank == 0:
            return [coll("broadcast", p.send, root=0), all_reduce(p.drive)] * 2
        get = coll("broadcast", p.get, root=0, **below("serve", p.outer))
        call = all_reduce(p.call, **below("serve", p.outer))
        return [get, call, get]

    d = only(play(2, steps, sources={FILE: p.text}))
    assert (d.kind, d.culprits) == (Kind.MISSING_RANK, (1,))
    assert d.suggestion.startswith("Agree on `cmd == 'sleep' and rank == 1` before any rank leaves the loop")


def test_a_call_for_some_ranks_that_the_others_ended_without() -> None:
    """The last evaluation, on rank 0 alone: the condition is shown though nobody else is in a call."""
    p = program("""
for epoch in range(3):
    dist.all_reduce(x)  #@ call
if rank == 0:  #@ cause
    dist.all_gather(parts, x)  #@ extra
""")

    def steps(rank: int) -> list[Step]:
        return [all_reduce(p.call)] * 3 + ([coll("all_gather", p.extra)] if rank == 0 else [])

    d = only(play(4, steps, sources={FILE: p.text}))
    assert (d.kind, d.culprits) == (Kind.EXTRA_COLLECTIVE, (0,))
    assert f"it stands under `if rank == 0` at {FILE}:{p.cause}" in d.suggestion


def test_shapes_of_two_rounds_show_what_skips_one() -> None:
    """Rank 1 sends one parameter less: its next one meets what the others expect of this."""
    p = program("""
for name, p in params.items():
    if tied(name):  #@ cause
        continue
    dist.broadcast(p, src=0)  #@ call
""")

    def steps(rank: int) -> list[Step]:
        return [coll("broadcast", p.call, root=0, shape=(n,)) for n in range(4, 9) if not (rank == 1 and n == 7)]

    d = only(play(4, steps, sources={FILE: p.text}))
    assert d.kind is Kind.SHAPE_MISMATCH
    assert f"`tied(name)` at {FILE}:{p.cause}" in d.suggestion
    assert "If it is not: give the tensor" in d.suggestion


def test_a_call_left_out_in_a_round_that_goes_on_is_no_shorter_loop() -> None:
    """Trainer 0 makes the trainers' call of both rounds, and the engines' broadcast in the first alone."""
    p = program("""
for step in range(2):
    if rank != 0 or step == 0:  #@ cause
        dist.broadcast(w, src=0, group=update)  #@ call
    if rank < 2:
        dist.all_reduce(x, group=trainers)  #@ other
dist.barrier()  #@ end
""")
    update, trainers = group(0, 2, 3, name="weights"), group(0, 1, name="2")

    def steps(rank: int) -> list[Step]:
        made: list[Step] = []
        for step in range(2):
            if rank != 1 and (rank, step) != (0, 1):
                made.append(coll("broadcast", p.call, update, root=0))
            if rank < 2:
                made.append(all_reduce(p.other, trainers))
        return [*made, barrier(p.end)]

    d = only(play(4, steps, sources={FILE: p.text}))
    assert (d.kind, d.culprits) == (Kind.MISSING_RANK, (0,))
    assert "In another round of that loop" in d.explanation
    assert f"it stands under `if rank != 0 or step == 0` at {FILE}:{p.cause}" in d.suggestion
