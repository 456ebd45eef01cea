"""Rows of the table of causes: the fact that each needs, and what looks alike and must not be taken for it."""

from __future__ import annotations

import functools
import signal
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import CallWait, Caught, Phase, RankThread, Site, State
from distsim.debug.records.circumstances import circumstances, handled_signal, note_handler
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.frames import program_frames, steps
from distsim.debug.records.kinds import Kind
from distsim.debug.records.obligations import OBLIGATIONS, Obligation
from distsim.debug.report.render import render_diagnoses
from distsim.text.codec import decode, encode
from tests.debug.builders import (
    FILE,
    Step,
    all_reduce,
    barrier,
    coll,
    fail,
    finish,
    frozen,
    killed,
    leave,
    play,
    run,
    send,
    store,
)
from tests.debug.test_causes import Program, only, program

TORCH = "/site-packages/torch"


def test_what_stands_between_two_lines_of_the_program() -> None:
    """Each of the user's lines knows in which circumstances it made the call below it, the innermost first."""
    stack = [
        (f"{sys.prefix}/lib/python3.11{TORCH}/distributed/distributed_c10d.py", 1, "all_gather"),
        ("/home/u/model.py", 15, "block"),
        (f"{sys.prefix}/lib/python3.11{TORCH}/utils/checkpoint.py", 2, "_checkpoint.<locals>.recompute_fn"),
        (f"{sys.prefix}/lib/python3.11{TORCH}/autograd/graph.py", 3, "_engine_run_backward"),
        ("/home/u/model.py", 28, "<module>"),
    ]
    block, module = program_frames(stack, abroad=True)
    assert block.inside == ()
    assert module.inside == ("recomputation", "backward")
    assert {name: site.line for name, site in circumstances((block, module)).items()} == {
        "recomputation": 28,
        "backward": 28,
    }
    assert decode(encode(module), Site).inside == module.inside


def test_a_call_right_above_the_backward_pass_is_of_ddp() -> None:
    """DDP's reducer is C++: nothing of Python stands between it and the engine."""
    engine = (f"{sys.prefix}/lib/python3.11{TORCH}/autograd/graph.py", 3, "_engine_run_backward")
    (line,) = program_frames([engine, ("/home/u/model.py", 28, "<module>")], abroad=True)
    assert line.inside == ("ddp", "backward")


class Handler:
    """A program's handlers, in the forms that `signal.signal` takes."""

    seen = ""

    def method(self, number: int, frame: FrameType | None) -> None:
        self.seen = handled_signal(sys._getframe())

    def __call__(self, *args: Any) -> None:
        self.method(*args)

    def more(self, save: bool, number: int, frame: FrameType | None) -> None:
        self.seen = handled_signal(sys._getframe())


@pytest.mark.parametrize("form", ["method", "partial"])
def test_a_handler_is_known_by_its_frame(form: str) -> None:
    """Also a method or a partial; one that is called by hand, without a frame, handles no signal."""
    handler = Handler()
    called = handler.method if form == "method" else functools.partial(handler.more, True)
    note_handler(signal.SIGUSR1, called)
    called(10, sys._getframe())
    assert handler.seen == "SIGUSR1"
    called(10, None)
    assert handler.seen == ""


def test_the_line_that_a_handler_interrupted() -> None:
    """The label is on the interrupted line."""
    found: list[tuple[str, ...]] = []

    def handle(number: int, frame: FrameType | None) -> None:
        found.extend(file for file, *_ in steps(sys._getframe()))  # type: ignore[arg-type]

    note_handler(signal.SIGUSR2, handle)
    handle(12, sys._getframe())
    assert found[1] == "<signal handler SIGUSR2>"


BACKWARD = """
for step in range(4):
    loss = model(x)  #@ forward
    BEFORE
    loss.backward()  #@ backward
    AFTER
    dist.all_reduce(norm)  #@ norm
"""


def passes(p: Program, inside: tuple[str, ...], here: int = 0, goes_on: bool = False) -> Diagnosis:
    """Three ranks go forward; ranks 0 and 2 make a call in the backward pass, rank 1 is at *here*, or came past it."""
    forward = coll("all_gather", p.forward, function="<module>")
    above = (Site(FILE, p.backward, "<module>", inside=inside),)
    again = coll("all_gather", 99, function="block", callers=above)
    behind = all_reduce(here or p.norm, function="<module>")

    def steps_of(rank: int) -> list[Step]:
        return [forward, behind] if rank == 1 else [forward, again, behind]

    evidence = play(3, steps_of, sources={FILE: p.text})
    if goes_on:
        met = evidence.records[1][-1]
        ahead = replace(met, index=met.index + 1, seq=met.seq + 1, stack=(Site(FILE, p.forward, "<module>"),))
        evidence.records[1] = [*evidence.records[1][:-1], replace(met, state=State.COMPLETED), ahead]
        evidence.ranks[1].waits = (CallWait(ahead),)
    return only(evidence)


def backward_program(before: str = "pass", after: str = "pass") -> Program:
    return program(BACKWARD.replace("BEFORE", before).replace("AFTER", after))


@pytest.mark.parametrize(
    ("inside", "cure"),
    [
        (("recomputation", "backward"), "Let the loss of every rank depend on the checkpointed block"),
        (("fsdp", "backward"), "Let the output of every sharded module enter the loss on every rank"),
        (("ddp", "backward"), "Use every parameter in the loss on every rank"),
        (("backward",), "Let what all_gather at"),
    ],
)
def test_a_backward_pass_without_the_call(inside: tuple[str, ...], cure: str) -> None:
    """The rank that stands behind the backward line has had no gradient there."""
    d = passes(backward_program(), inside)
    assert (d.kind, d.culprits, d.victims) == (Kind.MISSING_RANK, (1,), (0, 2))
    assert d.suggestion.startswith(cure)
    assert "loop" not in d.explanation
    past = passes(backward_program(), inside, goes_on=True)
    assert (past.culprits, past.suggestion) == (d.culprits, d.suggestion)


def test_a_step_that_is_left_out_before_backward_is_no_missing_gradient() -> None:
    """Rank 1 is at the next step's forward, or came round the backward line by a condition."""
    p = backward_program()
    assert "gradient" not in passes(p, ("fsdp", "backward"), p.forward).suggestion
    conditional = program(
        BACKWARD.replace("    BEFORE\n    loss", "    if good:\n        loss").replace("AFTER", "pass")
    )
    assert "gradient" not in passes(conditional, ("fsdp", "backward")).suggestion


def interrupted(inside: tuple[str, ...], function: str = "save") -> Diagnosis:
    """Ranks 0 and 2 are in a barrier that line 9 called in these circumstances, rank 1 is at line 10."""
    above = (Site(FILE, 9, "<module>", inside=inside),)
    saved = coll("barrier", 3, function=function, callers=above)
    return only(play(3, lambda rank: [all_reduce(8), all_reduce(10) if rank == 1 else saved], sources={}))


def test_a_call_in_a_signal_handler() -> None:
    """The handler is the cause, whatever condition sends the signal."""
    d = interrupted(("signal handler SIGTERM",))
    assert d.suggestion.startswith("Make no collective in a signal handler: let the handler of SIGTERM only set a flag")
    assert f"interrupted {FILE}:9" in d.explanation


def test_calls_of_a_finalizer_and_of_an_exit_handler() -> None:
    """Both run when Python likes, on one side alone."""
    assert interrupted((), "Group.__del__").suggestion.startswith("Make no collective in `__del__`")
    assert interrupted(("exit handler",)).suggestion.startswith("Make barrier at train.py:3 before the program ends")
    assert "handler" not in interrupted(()).suggestion


def test_the_rank_alone_in_a_finalizer_makes_the_call_that_is_too_many() -> None:
    """The other still holds the object; where most have freed it, the one that holds it is behind."""
    freed = coll("barrier", 3, function="Group.__del__", callers=(Site(FILE, 9, "<module>"),))
    for rank in (0, 1):
        d = only(play(2, lambda r, one=rank: [all_reduce(8), freed if r == one else all_reduce(10)], sources={}))  # type: ignore[misc]
        assert (d.kind, d.culprits, d.victims) == (Kind.EXTRA_COLLECTIVE, (rank,), (1 - rank,))
    assert interrupted((), "Group.__del__").culprits == (1,)


@pytest.mark.parametrize(
    ("inside", "function"), [(("exit handler",), "save"), (("signal handler SIGTERM",), "save"), ((), "Group.__del__")]
)
def test_a_rank_that_spins_may_come_to_the_handler_too(inside: tuple[str, ...], function: str) -> None:
    """Rank 1 is late: where the others made their call is not why. One that is over will not come."""
    saved = coll("barrier", 3, function=function, callers=(Site(FILE, 9, "<module>", inside=inside),))

    def told(end: Step) -> str:
        evidence = play(3, lambda rank: [all_reduce(8), end if rank == 1 else saved], sources={}, hang_after_s=40.0)
        evidence.now_s += 50.0
        return only(evidence).suggestion

    assert not told(run(10)).startswith("Make")
    assert told(finish()).startswith("Make")


RUN_BY_SOME = """
for step in range(4):
    dist.all_reduce(x)  #@ before
    CONDITION
        run()  #@ call
    dist.barrier()  #@ after
"""


@pytest.mark.parametrize("condition", ["if rank != 1:", "with lock:"])
@pytest.mark.parametrize("entry", [entry for entry in OBLIGATIONS if entry.label], ids=lambda entry: str(entry.label))
def test_what_every_rank_of_a_parent_must_run(entry: Obligation, condition: str) -> None:
    """Rank 1 leaves it out, by a condition of the text or nobody knows why; the advice names the parent's ranks."""
    p = program(RUN_BY_SOME.replace("CONDITION", condition))
    before, after = (all_reduce(p.before, function="<module>"), barrier(p.after, function="<module>"))
    own = coll("broadcast", p.call, root=0, function="<module>", inside=(entry.label,))
    d = only(play(3, lambda rank: [before, after] if rank == 1 else [before, own, after], sources={FILE: p.text}))
    assert d.culprits == (1,)
    assert f"every rank of {entry.parent}" in d.suggestion.lower()
    assert d.suggestion.startswith("Make the call at" if condition.startswith("if") else "Run ")


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_left_runs_no_exit_handler(code: int) -> None:
    """os._exit(0) is no fault by itself: the handler is in the wrong place. One with a code of its own has a reason."""
    saved = coll("barrier", 3, function="save", callers=(Site(FILE, 9, "<module>", inside=("exit handler",)),))
    evidence = play(3, lambda rank: [all_reduce(8), leave(code, 12) if rank == 1 else saved], sources={})
    d = only(evidence)
    assert (d.kind, d.culprits) == (Kind.RANK_EXITED, (1,))
    assert d.suggestion.startswith("Make barrier at train.py:3 before the program ends") is (code == 0)


SERVER = """
def start(name):
    check(name)  #@ raises
    dist.broadcast(w, src=0)  #@ call
for i in range(4):
    store.wait(keys)  #@ waits
    try:
        start(name)  #@ tries
    except Exception as error:  #@ handler
        answer(error)
dist.broadcast(w, src=0)  #@ other
"""


@pytest.mark.parametrize("error", ["ValueError: no such name", "KeyError: 'x'"])
def test_an_exception_that_left_calls_out_of_a_function_that_it_crossed(error: str) -> None:
    """Rank 1 has made no call since; an exception that is an answer explains nothing."""
    p = program(SERVER)
    own = coll("broadcast", p.call, root=0, function="start", callers=(Site(FILE, p.tries, "<module>"),))
    theirs = coll("broadcast", p.other, root=0, function="<module>")
    evidence = play(2, {0: [theirs, theirs], 1: [own, store("req2", p.waits)]}, sources={FILE: p.text})
    crossed = tuple(Site(FILE, line, name) for line, name in ((1, "check"), (p.raises, "start"), (p.tries, "<module>")))
    evidence.ranks[1].caught = (Caught(error, Site(FILE, p.handler, "<module>"), calls=1, crossed=crossed),)
    d = only(evidence)
    assert d.culprits == (1,)
    assert d.suggestion.startswith("Do not let the ValueError pass: rank 1 caught it at") == error.startswith("Value")


GATHERED = """CheckpointException: CheckpointException ranks:dict_keys([2, 3])
Traceback (most recent call last): (RANK 2)
    raise RuntimeError(f"Missing key in checkpoint state_dict: {fqn}.")
RuntimeError: Missing key in checkpoint state_dict: loader.2.
RuntimeError: Missing key in checkpoint state_dict: loader.3.
"""


def raised(error: str, ranks: tuple[int, ...] = (0, 1, 2, 3), **state: Any) -> Diagnosis:
    evidence = play(4, lambda rank: [fail(error, 15)] if rank in ranks else [barrier(9)], sources={})
    for name, value in state.items():
        setattr(evidence.ranks[ranks[0]], name, value)
    return only(evidence)


def test_ranks_that_a_gathered_exception_names() -> None:
    """Every rank raised; two failed, for keys that the checkpoint lacks."""
    d = raised(GATHERED)
    assert (d.kind, d.culprits) == (Kind.RANK_RAISED, (2, 3))
    assert d.suggestion.startswith("Resume with keys for ranks 2,3")
    assert "loader.2, loader.3 are missing" in d.suggestion
    short = raised(GATHERED[: GATHERED.index("loader.3")], traceback=GATHERED)  # as a ring has room for it
    assert "loader.2, loader.3 are missing" in short.suggestion
    other = raised("CheckpointException: CheckpointException ranks:dict_keys([1])\nValueError: torn file")
    assert (other.culprits, other.suggestion) == ((1,), "Fix what rank 1 raised first: ValueError: torn file")


@pytest.mark.parametrize(("named", "ranks"), [("0", (2, 3)), ("0", (0, 1)), ("7", (0, 1, 2, 3))])
def test_numbers_of_a_part_of_the_ranks_are_not_translated(named: str, ranks: tuple[int, ...]) -> None:
    """A checkpoint in a group counts from 0 there: rank 0 of the job may have had no part in it."""
    d = raised(f"CheckpointException: CheckpointException ranks:dict_keys([{named}])\nValueError: torn file", ranks)
    assert d.culprits == ranks
    assert "Fix what rank" not in d.suggestion


def test_a_block_that_does_not_repeat_itself() -> None:
    """torch says that the recomputation differs."""
    d = raised(
        "torch.utils.checkpoint.CheckpointError: Recomputed values for the following tensors have other metadata"
    )
    assert d.suggestion.startswith("Let the checkpointed block repeat itself in backward")


@pytest.mark.parametrize(
    ("memory", "grows"),
    [((1 << 30, 9 << 30, 17 << 30, 25 << 30), True), ((9 << 30, 9 << 30, 9 << 30, 9 << 30), False), ((1, 2), False)],
)
def test_memory_that_grows_in_each_step(memory: tuple[int, ...], grows: bool) -> None:
    """Three steps by like amounts; one large batch is another cause."""
    d = raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8 GiB", (0,), memory=memory)
    assert d.suggestion.startswith("Free what each step keeps") == grows


def test_a_call_that_was_under_way_in_a_crash() -> None:
    """Its tensor is named; who had none under way is told to read stderr."""
    evidence = play(2, {0: [send(1, 15, is_async=True), killed("SIGABRT")], 1: [fail("RuntimeError: lost", 9)]})
    d = next(d for d in diagnose(evidence) if d.kind is Kind.RANK_KILLED)
    assert d.suggestion.startswith("Keep the tensor of isend at train.py:15 as it is until its wait() has returned")
    alone = play(2, {0: [killed("SIGABRT")], 1: [barrier(9)]})
    assert only(alone).suggestion.startswith("Read the last lines of rank 0 on stderr")


def ended(
    signal: str = "SIGTERM",
    waited_s: float = 30.0,
    idle_s: float | None = 30.0,
    steps: Any = None,
    hang_after_s: float = 1800.0,
) -> list[Diagnosis]:
    """Ranks 0 and 2 waited in a call for rank 1, which stood at line 6, when all were ended by *signal*."""
    evidence = play(3, steps or {0: [all_reduce(9)], 1: [run(6)], 2: [all_reduce(9)]}, sources={})
    for rank, state in evidence.ranks.items():
        state.phase, state.signal, state.exit_code = Phase.KILLED, signal, -15
        state.idle_s = idle_s if rank == 1 else None
    evidence.now_s, evidence.hang_after_s = waited_s, hang_after_s
    return diagnose(evidence)


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_the_end_of_a_job_is_not_its_cause(signal: str) -> None:
    """What was open is the verdict; the end is a sentence beside it."""
    (d,) = ended(signal, hang_after_s=20.0)
    assert (d.kind, d.culprits, d.victims, d.exit_code) == (Kind.MISSING_RANK, (1,), (0, 2), 3)
    assert f"Later ranks 0-2 were ended by {signal}, as " in d.explanation


def test_a_job_that_was_ended_at_work_is_not_accused() -> None:
    """A wait of seconds, or for a rank that computes, is no hang: the end alone is told, and who was awaited."""
    (short,) = ended(waited_s=1.0)
    assert (short.kind, short.culprits, short.victims, short.exit_code) == (Kind.JOB_ENDED, (), (0, 1, 2), 1)
    for idle_s in (0.0, 30.0):  # at work, or in a download
        works, end = ended(idle_s=idle_s)
        assert (works.kind, works.culprits, works.is_warning) == (Kind.MISSING_RANK, (1,), True)
        assert "That may have been work, or a pause" in works.explanation
        assert (end.kind, end.culprits) == (Kind.JOB_ENDED, ())


@pytest.mark.parametrize(("still_s", "stuck"), [(90.0, True), (6.0, False)])
def test_a_dead_job_whose_patience_is_not_known(still_s: float, stuck: bool) -> None:
    """A rank that stood still for long is the fault, one that paused is not."""
    first, *_ = ended(waited_s=90.0, idle_s=still_s, hang_after_s=0.0)
    assert first.culprits == (1,)
    assert first.is_warning != stuck


def test_contradicting_calls_of_a_job_that_was_ended() -> None:
    """They need no patience."""
    steps = {0: [all_reduce(9)], 1: [barrier(6)], 2: [all_reduce(9)]}
    (d,) = ended(waited_s=0.5, steps=steps)
    assert (d.culprits, d.ends_job) == ((1,), True)


def test_a_rank_that_was_ended_alone_is_the_fault() -> None:
    """The others live: whoever ended it is to be found."""
    evidence = play(3, {0: [all_reduce(9)], 1: [killed("SIGTERM")], 2: [all_reduce(9)]}, sources={})
    assert [(d.kind, d.culprits) for d in diagnose(evidence)] == [(Kind.RANK_KILLED, (1,))]


def test_the_outermost_line_of_an_exit_handler() -> None:
    """Python called it: the label is on the line that has no caller."""
    (line,) = program_frames([("/home/u/model.py", 5, "flush"), ("<exit handler>", 0, "")])
    assert line.inside == ("exit handler",)


def in_one_pass(mine: tuple[int, ...]) -> Diagnosis:
    """Four ranks are in a backward pass of FSDP after a call that all made; rank 3 reduces another size."""
    p = backward_program()
    above = {"function": "<module>", "callers": (Site(FILE, p.norm, "<module>"),)}
    site = Site(FILE, p.backward, "<module>", inside=("fsdp", "backward"))
    gather = coll("all_gather", p.backward, **above)
    scatter = [coll("reduce_scatter_tensor", p.backward, shape=shape, **above) for shape in ((272,), mine)]
    evidence = play(4, lambda rank: [gather, scatter[rank == 3]], sources={FILE: p.text})
    for record in (record for calls in evidence.records.values() for record in calls):
        record.site, record.stack = site, (site,)
    return only(evidence)


def test_two_calls_of_one_backward_pass() -> None:
    """A module without a gradient on one rank: the next module's call meets the others' of that one."""
    assert in_one_pass((144,)).suggestion.startswith("Let the output of every sharded module enter the loss")


def test_what_suppress_hides() -> None:
    """The rest of its `with` is left out, not what comes behind it."""
    p = program("""
for i in range(4):
    with contextlib.suppress(OSError):  #@ with
        read(i)  #@ reads
        dist.all_reduce(x)  #@ call
dist.barrier()  #@ end
""")

    def steps(rank: int) -> list[Step]:
        return [all_reduce(p.call)] * (3 if rank == 1 else 4) + [barrier(p.end)]

    evidence = play(3, steps, sources={FILE: p.text})
    crossed = (Site(FILE, 1, "read"), Site(FILE, p.reads, "main"))
    evidence.ranks[1].caught = (
        Caught("OSError: torn", Site(FILE, getattr(p, "with"), "main"), calls=2, crossed=crossed),
    )
    assert only(evidence).suggestion.startswith("Do not let the OSError pass: rank 1 caught it at train.py:2")


def test_a_stopped_process_is_continued_by_its_number() -> None:
    """The command can be copied from the report."""
    evidence = play(2, {0: [all_reduce(9)], 1: [frozen(6)]}, sources={})
    evidence.ranks[1].pid = 4711
    assert "(kill -CONT 4711)" in only(evidence).suggestion


LEFT_OUT = """
def step():
    check()  #@ raises
    dist.broadcast(w, src=0)  #@ call
for i in range(4):
    try:
        step()  #@ tries
    except ValueError:  #@ handler
        pass
    dist.all_reduce(x)  #@ other
"""


def left_out(error: str, frames: int = 0, sources: bool = True) -> tuple[Diagnosis, str]:
    """Rank 1 caught *error* below so many frames and left out the broadcast; the report of it, too."""
    p = program(LEFT_OUT)
    deep = tuple(Site(FILE, p.raises, "step") for _ in range(frames))
    own = coll("broadcast", p.call, root=0, function="step", callers=(*deep, Site(FILE, p.tries, "<module>")))
    behind = all_reduce(p.other, function="<module>")
    evidence = play(3, lambda rank: [behind] if rank == 1 else [own, behind], sources={FILE: p.text} if sources else {})
    crossed = (Site(FILE, p.raises, "step"), *deep, Site(FILE, p.tries, "<module>"))
    evidence.ranks[1].caught = (Caught(error, Site(FILE, p.handler, "<module>"), crossed=crossed),)
    d = only(evidence)
    return d, render_diagnoses([d], evidence).plain(80)


@pytest.mark.parametrize(
    ("error", "frames", "sources"),
    [
        ("ValueError: " + "x\x1b[31m" * 500_000, 0, True),
        ("ValueError: bad", 10_000, True),
        ("ValueError: bad", 0, False),
        ("ValueError: bad", 10_000, False),
    ],
    ids=["megabytes", "10,000 frames", "source gone", "both"],
)
def test_exceptions_of_any_size_and_without_a_source(error: str, frames: int, sources: bool) -> None:
    """The culprit and the cure are the same, and the report is one that a terminal can show."""
    d, report = left_out(error, frames, sources)
    assert d.culprits == (1,)
    assert d.suggestion.startswith("Do not let the ValueError pass: rank 1 caught it at train.py:7")
    assert len(d.explanation) < 2_000
    assert len(report) < 10_000
    assert "\x1b" not in report


def test_names_of_threads_are_cut_and_shown_in_one_line() -> None:
    """Whatever the program has called its thread."""
    evidence = play(2, lambda rank: [run(3)] if rank == 1 else [all_reduce(4)], sources={}, hang_after_s=1.0)
    evidence.now_s += 50.0
    evidence.ranks[1].phase = Phase.HOST_STUCK
    name = "evil\x1b[2J\nname\x00" + "z" * 5_000
    evidence.ranks[1].caught = (Caught("ValueError: bad", Site(FILE, 9, "load"), thread=name),)
    (d,) = diagnose(evidence)
    assert d.suggestion.startswith("Fix the ValueError at train.py:9 first: rank 1 may wait for what its thread evil")
    assert len(d.suggestion) < 500
    assert "\n" not in d.suggestion + d.explanation
    assert not {"\x1b", "\x00"} & {*render_diagnoses([d], evidence).plain(80)}
    heard = Caught("ValueError: bad", Site(FILE, 3, "main"))  # result() has raised it again in the main thread
    evidence.ranks[1].caught = (*evidence.ranks[1].caught, heard)
    assert "ValueError" not in only(evidence).suggestion


@pytest.mark.parametrize(
    ("file", "applies"), [("/usr/lib/python3/torch/utils/data/dataloader.py", True), ("/x/y.py", False)]
)
def test_a_rank_that_waits_for_a_child_process(file: str, applies: bool) -> None:
    """Its worker's line is the cause; a worker beside another wait is not."""
    evidence = play(2, {0: [all_reduce(9)], 1: [run(6)]}, sources={})
    state = evidence.ranks[1]
    own, inside = Site(FILE, 6, "main"), Site("data.py", 3, "__getitem__")
    state.phase, state.site, state.stack = Phase.HOST_STUCK, own, (Site(file, 1, "_next_data"), own)
    state.children = (RankThread("4711", True, (inside,)),)
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits) == (Kind.HOST_STUCK, (1,))
    assert ("child process 4711, which is there" in d.suggestion) == applies
    assert d.causes == ((inside,) if applies else ())
