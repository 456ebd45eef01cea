"""Causes outside the calls that met: locks, keys of a store, meshes, ranks without a group, loops of messages."""

from __future__ import annotations

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import Caught, Phase, RankState, Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from tests.debug.builders import FILE, Step, all_reduce, barrier, coll, host, play, recv, send, spin, store
from tests.debug.test_causes import Program, only, program

LOCKED = {
    "flock": (
        """
def prepare():
    fcntl.flock(file, fcntl.LOCK_EX)  #@ lock
    dist.barrier()  #@ call
""",
        True,
    ),
    "with": (
        """
def prepare():
    with FileLock(path):  #@ lock
        dist.barrier()  #@ call
""",
        True,
    ),
    "a name": (
        """
lock = FileLock(path)
def prepare():
    with lock:  #@ lock
        dist.barrier()  #@ call
""",
        True,
    ),
    "a lock of the process's own threads": (
        """
lock = threading.Lock()
def prepare():
    with lock:  #@ lock
        dist.barrier()  #@ call
""",
        False,
    ),
    "given back": (
        """
def prepare():
    fcntl.flock(file, fcntl.LOCK_EX)  #@ lock
    fcntl.flock(file, fcntl.LOCK_UN)
    dist.barrier()  #@ call
""",
        False,
    ),
    "behind the block": (
        """
def prepare():
    with FileLock(path):  #@ lock
        pass
    dist.barrier()  #@ call
""",
        False,
    ),
    "no lock": (
        """
def prepare():
    tokenize()  #@ lock
    dist.barrier()  #@ call
""",
        False,
    ),
}


@pytest.mark.parametrize("name", LOCKED)
def test_a_call_inside_a_lock_that_the_others_need(name: str) -> None:
    """Rank 0 waits in a barrier behind the line at which the others are stuck."""
    text, inside = LOCKED[name]
    p = program(text)
    d = only(play(3, {0: [barrier(p.call)], 1: [spin(p.lock)], 2: [spin(p.lock)]}, sources={FILE: p.text}))
    assert d.kind is Kind.HOST_STUCK
    assert d.suggestion.startswith(f"Leave the lock before barrier at {FILE}:{p.call}") == inside, d.suggestion
    assert ("may hold the lock" in d.suggestion) == inside


@pytest.mark.parametrize("key", ["vocab", "other"])
def test_a_key_that_is_set_behind_the_call_that_waits(key: str) -> None:
    """The line that sets the key is named; a key that no line sets is no cause."""
    p = program("""
if rank == 0:
    dist.barrier()  #@ call
    store.set("vocab", "ready")  #@ cause
else:
    store.wait(["vocab"])  #@ wait
    dist.barrier()  #@ end
""")
    programs = {0: [barrier(p.call)], 1: [store(f"default_pg/0//{key}", p.wait)]}
    (d,) = diagnose(play(2, programs, sources={FILE: p.text}))
    found = d.suggestion.startswith(f"Set the key 'vocab' ({FILE}:{p.cause} does) before barrier at {FILE}:{p.call}")
    assert found == (key == "vocab"), d.suggestion


def test_ranks_that_wait_for_one_unset_key_are_one_diagnosis() -> None:
    """The key that is set by a similar name is shown; torch's prefix of the default store is not."""
    p = program("""
if rank == 0:
    store.set(f"part_{part}", "1")
    store.set("run_id", "7")  #@ cause
else:
    store.get("run-id")  #@ wait
dist.barrier()  #@ call
""")

    def steps(rank: int) -> list[Step]:
        return [barrier(p.call)] if rank == 0 else [store("default_pg/0//run-id", p.wait)]

    (d,) = diagnose(play(3, steps, sources={FILE: p.text}))
    assert (d.kind, d.culprits, d.victims) == (Kind.MISSING_RANK, (1, 2), (0,))
    assert "store key 'run-id'" in d.explanation
    assert d.suggestion == (
        f"Use one name for the key: ranks 1,2 wait for 'run-id' at {FILE}:{p.wait}, and {FILE}:{p.cause} sets "
        "'run_id'. No rank has set 'run-id'."
    )


def test_an_unset_key_of_an_f_string_is_found() -> None:
    """The line that sets it under a computed name counts as the one that sets it; a key that no line sets is said."""
    p = program("""
if rank == 0:
    dist.barrier()  #@ call
    store.set(f"part_{part}", "1")  #@ cause
else:
    store.get("part_3")  #@ wait
""")
    for key, start in (("part_3", "Set the key 'part_3'"), ("shard", "Set the key on a rank that does not wait")):
        programs = {0: [barrier(p.call)], 1: [store(key, p.wait)]}
        (d,) = diagnose(play(2, programs, sources={FILE: p.text}))
        assert d.suggestion.startswith(start)


def test_lists_of_objects_need_one_length() -> None:
    """The tensor of another shape is torch's own, with the sizes of the objects, whatever the program calls it by; one
    that the program broadcasts itself is not."""

    def sizes(inside: tuple[str, ...]) -> Diagnosis:
        return only(play(3, lambda r: [coll("broadcast", 1, root=0, shape=(2 if r == 1 else 3,), inside=inside)]))

    d = sizes(("object list",))
    assert (d.kind, d.culprits) == (Kind.SHAPE_MISMATCH, (1,))
    assert d.suggestion.startswith(f"Give broadcast_object_list at {FILE}:1 a list of the same length")
    assert "broadcast_object_list" not in sizes(()).suggestion


def test_ranks_that_only_look_and_sleep_are_pointed_to_what_they_look_at() -> None:
    """A barrier by hand that counts one rank too many: nobody will end the sleep, and nobody should."""
    (d,) = diagnose(play(2, lambda r: [host("sleep", 8)]))
    assert (d.kind, d.culprits) == (Kind.HOST_STUCK, (0, 1))
    assert d.suggestion.startswith("Look at what the loop around that line waits for")


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("state", ["stuck", "queue"])
def test_an_exception_that_ended_a_thread_of_a_stuck_rank(everywhere: bool, state: str) -> None:
    """The rank waits for what the thread would have brought; a thread that ends so on every rank is no cause."""
    p = program("""
def produce(q):
    raise OSError("stale file handle")  #@ cause
x = q.get()  #@ wait
dist.all_reduce(x)  #@ call
""")
    end = spin(p.wait) if state == "stuck" else host("a queue", p.wait)
    evidence = play(3, lambda r: [end] if r == 1 else [all_reduce(p.call)], sources={FILE: p.text})
    ended = Caught("OSError: stale file handle", Site(FILE, p.cause, "produce"), 1, 0, "loader")
    for rank in range(3) if everywhere else (1,):
        evidence.ranks[rank].caught = (ended,)
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits) == (Kind.HOST_STUCK, (1,))
    assert d.suggestion.startswith(f"Fix the OSError at {FILE}:{p.cause} first") != everywhere
    assert ("ended thread loader of rank 1: OSError: stale file handle" in d.explanation) != everywhere


def _mesh(inside: tuple[str, ...]) -> Diagnosis:
    p = program("make()  #@ call")

    def steps(rank: int) -> list[Step]:
        return [coll("new_group", p.call, new_ranks=(0,) if rank == 2 else (0, 1), inside=inside)]

    return only(play(3, steps, sources={FILE: p.text}))


def test_groups_of_a_mesh() -> None:
    """The mesh is to be made alike, not the calls of new_group that torch makes within."""
    d = _mesh(("mesh",))
    assert d.kind is Kind.GROUP_CREATION_ORDER
    assert d.suggestion.startswith(f"Make the mesh at {FILE}:1 with one shape")
    assert _mesh(()).suggestion.startswith("Compute the members at")


@pytest.mark.parametrize("seen", ["runs", "ended", ""])
def test_a_rank_that_goes_past_init_process_group(seen: str) -> None:
    """Where it has run, the condition is the advice; else it may not have been started, which comes first."""
    p = program("""
if distributed:  #@ cause
    dist.init_process_group("gloo")  #@ call
train()  #@ run
""")
    site = Site(FILE, p.run, "main") if seen == "runs" else None
    exit_code = 0 if seen == "ended" else None
    last = Step("end", state=RankState(-1, Phase.ABSENT, (), site=site, exit_code=exit_code))
    programs = {0: [coll("init_process_group", p.call)], 1: [coll("init_process_group", p.call)], 2: [last]}
    (d,) = [d for d in diagnose(play(3, programs, sources={FILE: p.text})) if 2 in d.culprits]
    assert d.kind is Kind.NEVER_JOINED
    said = f"rank 2 may have gone past init_process_group by `distributed` at {FILE}:{p.cause}"
    assert said in d.suggestion
    assert d.suggestion.startswith("Call init_process_group at" if seen else "Check that it was started")


def _pipeline(p: Program, sent: int) -> Diagnosis:
    programs = {
        0: [send(1, p.send) for _ in range(sent)] + [all_reduce(p.end)],
        1: [recv(0, p.recv) for _ in range(sent + 1)] + [all_reduce(p.end)],
    }
    return only(play(2, programs, sources={FILE: p.text}))


def test_a_loop_of_messages_with_another_bound() -> None:
    """One end goes round once more: the loop's bound; a first message that never came is no matter of bounds."""
    p = program("""
for m in range(rounds):  #@ cause
    if rank == 1:
        dist.recv(x, 0)  #@ recv
    else:
        dist.send(x, 1)  #@ send
dist.all_reduce(y)  #@ end
""")
    d = _pipeline(p, 3)
    assert d.kind is Kind.P2P_UNMATCHED
    assert d.suggestion.startswith(f"Give `range(rounds)` at {FILE}:{p.cause} the same bound on every rank")
    assert d.suggestion.endswith(f"make rank 0 send, or drop the recv at {FILE}:{p.recv}.")
    assert _pipeline(p, 0).suggestion.startswith("Make rank 0 send")
