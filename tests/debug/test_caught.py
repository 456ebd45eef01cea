"""Exceptions that one rank caught: which of them explain a hang, and which do not."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

from distsim.debug.records import Caught, Site
from distsim.debug.records.diagnosis import Diagnosis
from tests.debug.builders import FILE, Step, all_reduce, barrier, coll, host, play, recv, send
from tests.debug.test_causes import Program, only, program

TRY = """
for step in range(9):
    try:
        dist.all_reduce(step_of(batch))  #@ call
    except Exception as error:  #@ handler
        continue
dist.barrier()  #@ end
"""


def caught(p: Program, error: str, *ranks: int, **kw: Any) -> Diagnosis:
    """`uneven`, where *ranks* have caught *error* at the line of the handler."""

    def steps(rank: int) -> list[Step]:
        return [all_reduce(p.call) for _ in range(2 if rank == 1 else 4)] + [barrier(p.end)]

    evidence = play(3, steps, sources={FILE: p.text})
    for rank in ranks:
        evidence.ranks[rank].caught = (Caught(error, Site(FILE, p.handler, "<module>"), **kw),)
    return only(evidence)


def test_a_swallowed_exception_is_the_cause() -> None:
    """The rank that caught it, the line, the call before it and the cure are told."""
    d = caught(program(TRY), "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", 1, calls=2)
    assert d.suggestion.startswith("Skip the step on all ranks or on none (after the try, all_reduce (MAX)")
    assert "smaller micro-batch" in d.suggestion
    assert f"Rank 1 caught torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB at {FILE}:4, after " in (
        d.explanation
    )
    assert "all_reduce #2" in d.explanation
    assert [site.line for site in d.causes] == [4]


def test_a_thread_that_ended_on_several_ranks_is_told_of_all_of_them() -> None:
    """The producers of both ranks that wait for a queue died of one exception."""
    evidence = play(3, {0: [], 1: [host("queue", 9)], 2: [host("queue", 9)]})
    for rank in (1, 2):
        error = f"ValueError: bad shard {rank}"
        evidence.ranks[rank].caught = (Caught(error, Site(FILE, 7, "produce"), thread="producer"),)
    d = only(evidence)
    assert "An exception has ended thread producer of ranks 1,2: ValueError: bad shard 2 at " in d.explanation
    assert "ranks 1,2 may wait for what their thread producer would have brought" in d.suggestion


def test_what_every_rank_catches_is_no_cause() -> None:
    """An exception that the others caught at the same line, as often, explains nothing."""
    assert "caught" not in caught(program(TRY), "KeyError: 'x'", 0, 1, 2).explanation


def test_what_is_caught_away_from_the_calls_is_no_cause() -> None:
    """A handler around an import does not make a rank leave out calls."""
    p = program("""
try:
    import apex
except ImportError:  #@ handler
    apex = None
for step in range(rounds):
    dist.all_reduce(x)  #@ call
dist.barrier()  #@ end
""")
    assert "caught" not in caught(p, "ModuleNotFoundError: No module named 'apex'", 1).explanation


def test_what_is_caught_around_calls_that_were_all_made_is_no_cause() -> None:
    """Rank 1 caught an exception while logging, made every call there, and left the loop early for another reason."""
    p = program("""
for batch in loader:
    dist.all_reduce(x)  #@ call
    try:
        dist.all_reduce(metric)  #@ metric
        writer.write(metric)
    except OSError:  #@ handler
        pass
dist.barrier()  #@ end
""")
    pair = [all_reduce(p.call, shape=(8,)), all_reduce(p.metric, shape=(1,))]
    evidence = play(3, lambda r: pair * (2 if r == 1 else 4) + [barrier(p.end)], sources={FILE: p.text})
    evidence.ranks[1].caught = (Caught("OSError: disk full", Site(FILE, p.handler, "<module>"), calls=2),)
    d = only(evidence)
    assert "OSError" not in d.explanation + d.suggestion
    assert "drop_last" in d.suggestion


def test_what_is_caught_before_an_innocent_round_is_left_is_no_cause() -> None:
    """A handler that goes on in another loop than the one that diverges explains nothing."""
    p = program("""
for file in files:
    try:
        dist.all_reduce(size_of(file))  #@ first
    except OSError:  #@ handler
        continue
for batch in loader:
    dist.all_reduce(x)  #@ call
dist.barrier()  #@ end
""")

    def steps(rank: int) -> list[Step]:
        return [all_reduce(p.first)] * 3 + [all_reduce(p.call)] * (2 if rank == 1 else 4) + [barrier(p.end)]

    evidence = play(3, steps, sources={FILE: p.text})
    evidence.ranks[1].caught = (Caught("OSError: gone", Site(FILE, p.handler, "<module>"), calls=2),)
    d = only(evidence)
    assert "OSError" not in d.explanation + d.suggestion


RETRY = """
for step in range(9):
    for attempt in range(3):
        try:
            dist.all_reduce(x)  #@ call
            break
        except OSError:  #@ handler
            HANDLES
dist.barrier()  #@ end
"""


@pytest.mark.parametrize("handles", ["continue", "raise"])
def test_a_retry_that_makes_a_call_again(handles: str) -> None:
    """Rank 1 has been through the try once more than the others; a handler that raises does not go round again."""
    p = program(RETRY.replace("HANDLES", handles))
    evidence = play(3, lambda r: [all_reduce(p.call)] * (5 if r == 1 else 4) + [barrier(p.end)], sources={FILE: p.text})
    evidence.ranks[1].caught = (Caught("OSError: stale", Site(FILE, p.handler, "<module>"), calls=3),)
    d = only(evidence)
    assert d.suggestion.startswith("Keep collectives out of the block that is tried again") == (handles == "continue")
    assert ([site.line for site in d.causes] == [p.handler]) == (handles == "continue")


def test_a_rank_that_ended_after_what_it_caught() -> None:
    """Who caught an exception around its last calls and ended is told to make the last call in a finally block."""
    p = program("""
def driver():
    for i in range(5):
        dist.broadcast(x, src=0)  #@ own
try:
    driver()  #@ main
except KeyError as error:  #@ handler
    print(error)
while True:
    dist.broadcast(x, src=0)  #@ call
""")
    own = coll("broadcast", p.own, root=0, function="driver", callers=(Site(FILE, p.main, "<module>"),))
    theirs = coll("broadcast", p.call, root=0)
    evidence = play(3, lambda r: [own] * 2 if r == 0 else [theirs] * 3, sources={FILE: p.text})
    evidence.ranks[0].caught = (Caught("KeyError: 'prompt_7'", Site(FILE, p.handler, "<module>"), calls=2),)
    d = only(evidence)
    assert d.culprits == (0,)
    assert d.suggestion.startswith("Make the last call (a stop command, say) in a finally block, or raise the KeyError")
    assert "destroy_process_group" not in d.explanation + d.suggestion


MESSAGES = """
if rank == 0:
    while True:
        try:
            where = table[key]  #@ own
        except ERROR:  #@ handler
            table[key] = load()
            continue
        dist.recv(t, 1)  #@ call
for batch in batches:
    try:
        dist.send(t, 0)  #@ theirs
    except OSError:  #@ lost
        break
"""


def messages(error: str, rank: int, calls: int) -> Diagnosis:
    """Rank 0 waits for a third message; rank 1 has sent two, and ended. One of them has caught *error*."""
    p = program(MESSAGES.replace("ERROR", error))
    steps = {0: [recv(1, p.call)] * 3, 1: [send(0, p.theirs)] * 2}
    evidence = play(2, steps, sources={FILE: p.text})
    at, raised = (Site(FILE, line, "<module>") for line in ((p.lost, p.theirs) if rank else (p.handler, p.own)))
    evidence.ranks[rank].caught = (Caught(f"{error}: x", at, calls=calls, crossed=(raised,)),)
    return only(evidence)


@pytest.mark.parametrize(("error", "calls"), [("KeyError", 0), ("ValueError", 0), ("ValueError", 2), ("ValueError", 3)])
def test_who_waits_for_a_message_has_not_left_it_out(error: str, calls: int) -> None:
    """Rank 0 stands in the recv that it would have left out: rank 1, which never sent, stays the culprit."""
    d = messages(error, 0, calls)
    assert d.culprits == (1,)
    assert "caught" not in d.explanation + d.suggestion


def test_a_message_that_an_exception_left_out() -> None:
    """Rank 1 has sent nothing since; what it caught and sent after explains nothing."""
    assert "caught OSError: x" in messages("OSError", 1, 2).explanation
    assert "caught" not in messages("OSError", 1, 1).explanation
    assert "caught" not in messages("KeyError", 1, 2).explanation


def test_many_exceptions_do_not_go_through_all_calls_again() -> None:
    """Whatever the number of calls, few stacks are distinct: a further exception costs few steps beside the
    calls.
    """
    p, num_calls = program(TRY), 400

    def steps(num_caught: int) -> int:
        made = {r: [all_reduce(p.call)] * (num_calls if r == 1 else num_calls + 2) + [barrier(p.end)] for r in range(2)}
        evidence = play(2, made, sources={FILE: p.text})
        site, rest = Site(FILE, p.handler, "<module>"), num_calls // 2
        evidence.ranks[1].caught = tuple(Caught(f"E{n}: x", site, calls=rest) for n in range(num_caught))
        taken = []
        gc.collect()
        gc.disable()  # what it would end is of earlier tests
        sys.setprofile(lambda *_: taken.append(1))
        try:
            only(evidence)
        finally:
            sys.setprofile(None)
            gc.enable()
        return len(taken)

    assert (steps(9) - steps(1)) / 8 < 4 * num_calls
