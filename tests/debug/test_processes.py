"""Which rank a diagnosis means: processes are numbered as the largest default group that the program uses now."""

from __future__ import annotations

from msgspec.structs import replace

from distsim.debug.evidence.processes import number_processes
from distsim.debug.rings.files import Process, RecordedWorld, WorldKind


def world(name: str, rank: int, size: int, kind: WorldKind = WorldKind.DEFAULT) -> RecordedWorld:
    return RecordedWorld(name, rank, size, kind, f"host:{name}")


def process(
    rank: int, size: int, *worlds: RecordedWorld, pid: int = 0, opened: int = 0, launched: bool = True
) -> Process:
    """The launcher's rank *rank* of *size*."""
    return Process("host", pid or 100 + rank, rank, size, launched, opened, opened + 10, worlds)


def numbers(*processes: Process) -> list[int | None]:
    given = number_processes(processes).numbers
    return [given.get(one.key) for one in processes]


def test_the_programs_ranks_are_the_numbers() -> None:
    """Not the launcher's, where the program gives others."""
    assert numbers(*(process(rank, 3, world("w", 2 - rank, 3)) for rank in range(3))) == [2, 1, 0]


def test_a_process_that_has_not_joined_keeps_the_launchers_number() -> None:
    """Until another process has taken it."""
    assert numbers(process(0, 2, world("s", 0, 1)), process(1, 2, world("w", 1, 2))) == [0, 1]


def test_two_halves_go_by_their_launcher() -> None:
    """Neither's ranks are the job's."""
    halves = [process(rank, 4, world(f"half{rank // 2}", rank % 2, 2)) for rank in range(4)]
    assert numbers(*halves) == [0, 1, 2, 3]
    assert number_processes(halves).worlds["half1"] == (2, 3)


def test_replicas_of_torchft_are_numbered_over_all_of_them() -> None:
    """Each replica has a launcher and a default group of its own; one that was started again has its earlier number."""
    replicas = [
        process(
            rank,
            2,
            world(f"replica{replica}", rank, 2),
            RecordedWorld("torchft", 2 * replica + rank, 4, WorldKind.REPLICAS, "torchft"),
            pid=10 * replica + rank + 1,
        )
        for replica in range(2)
        for rank in range(2)
    ]
    assert numbers(*replicas) == [0, 1, 2, 3]
    again = replace(replicas[3], pid=99, opened_ns=50)
    assert numbers(*replicas, again) == [0, 1, 2, None, 3]


def test_a_further_world_is_translated() -> None:
    """Its ranks are the job's processes; one that nobody knows gets a number behind them and is trusted."""
    job = [process(rank, 4, world("w", rank, 4)) for rank in range(4)]
    update = {0: 0, 2: 1, 3: 2}
    joined = [
        process(rank, 4, world("w", rank, 4), world("u", update[rank], 4, WorldKind.FURTHER)) if rank in update else one
        for rank, one in enumerate(job)
    ]
    numbering = number_processes(joined)
    assert numbering.worlds["u"] == (0, 2, 3, 4)
    assert numbering.unseen == {4}


def further(name: str, rank: int, size: int, met: str = "") -> RecordedWorld:
    return RecordedWorld(name, rank, size, WorldKind.FURTHER, "host:5", met=met)


def test_a_rank_that_still_waits_in_a_rendezvous_by_hand_is_one_of_the_world_made_there() -> None:
    """Rank 0 serves the store and waits in it, rank 1 makes the group: ranks 2 to 4 are unseen, and have one number."""
    first = process(0, 2, world("w", 0, 2), further("store", 0, 5))
    second = process(1, 2, world("w", 1, 2), further("store", 1, 5), further("group", 1, 5, "store"))
    numbering = number_processes([first, second])
    assert numbering.unseen == {2, 3, 4}
    assert [numbering.in_job("group", rank) for rank in range(5)] == [0, 1, 2, 3, 4]


def test_a_rendezvous_by_hand_that_all_have_come_on_from_says_nothing() -> None:
    """Rank 1 reached the store in another way than `rendezvous`: nobody is missing."""
    first = process(0, 2, world("w", 0, 2), further("store", 0, 2), further("group", 0, 2, "store"))
    second = process(1, 2, world("w", 1, 2), further("group", 1, 2))
    assert number_processes([first, second]).unseen == frozenset()


def test_a_rendezvous_by_hand_keeps_the_numbers_of_a_job_without_a_default_group() -> None:
    """Engines that make their only group by hand: who still waits for its store has its own rank there."""
    first = process(0, 1, further("store", 2, 3), launched=False)
    others = [
        process(0, 1, further("store", r, 3), further("group", r, 3, "store"), pid=200 + r, launched=False)
        for r in (0, 1)
    ]
    numbering = number_processes([first, *others])
    assert [numbering.numbers[one.key] for one in (first, *others)] == [2, 0, 1]
    assert numbering.unseen == frozenset()


def test_a_process_that_only_starts_ranks_is_none() -> None:
    """torchrun's own process under mp.spawn: it has the launcher's number, and joins nothing."""
    parent = process(0, 2)
    spawned = [process(rank, 4, world("w", rank, 4), pid=200 + rank, launched=False) for rank in range(4)]
    assert numbers(parent, *spawned) == [None, 0, 1, 2, 3]


def test_a_later_process_takes_the_place_of_one_that_ended() -> None:
    """A job that is started again at the same address, in the same folder."""
    first = process(0, 1, world("w", 0, 2), pid=1, opened=0)
    again = process(0, 1, world("w", 0, 2), pid=2, opened=100)
    assert numbers(first, again) == [None, 0]


def test_two_processes_of_one_rank_are_named() -> None:
    """In one line with the remedy; the second is not taken for the rank that is missing."""
    both = [process(rank, 2, world("w", 0, 2)) for rank in range(2)]
    numbering = number_processes(both)
    assert sorted(numbering.numbers.values()) == [0, 2]
    assert len(numbering.doubles) == 1
    assert "two processes call themselves rank 0 of 2" in numbering.doubles[0]
    assert numbering.double_ranks == {0: 0, 2: 0}


def test_the_world_that_most_have_moved_on_from_is_history() -> None:
    """Two default groups one after the other, with other numbers; the last process is still in the first."""
    moved = [process(rank, 3, world("a", rank, 3), world("b", 2 - rank, 3)) for rank in range(2)]
    assert numbers(*moved, process(2, 3, world("a", 2, 3))) == [2, 1, 0]


def test_ranks_that_went_on_in_a_smaller_world_are_told_so() -> None:
    """Two of four said world_size=2: the others wait for them, and their own world is shown, whatever its numbers."""
    big = [RecordedWorld("big", rank, 4, WorldKind.DEFAULT, "here:1") for rank in (2, 3)]
    small = [RecordedWorld("small", rank, 2, WorldKind.DEFAULT, "here:1") for rank in (0, 1)]
    processes = [Process("h", 10 + world.rank, world.rank, 4, True, 1, 2, (world,)) for world in (*small, *big)]
    names = number_processes(processes).names
    assert names == {rank: f"rank {rank} of 2 at here:1 (pid {10 + rank} on h)" for rank in (0, 1)}
