"""Remote calls, handles that are asked, and files: their orders on the simulator, counted by hand."""

from __future__ import annotations

import contextlib
import fcntl
import linecache
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc

from distsim.sim.kernel.chooser import Orders, Usual
from tests.explore.searches import with_reduction, without_reduction
from tests.explore.simulated import do_jobs, random_jobs, random_shared, runs, share, store
from tests.kin import one_in

SERVED: list[int] = []


def serve(number: int) -> int:
    SERVED.append(number)
    return len(SERVED)


def three_requests() -> None:
    rank = joined_rank()
    if rank:
        rpc.rpc_sync("worker0", serve, (rank,))
    rpc.shutdown()


def two_requests_of_one() -> None:
    rank = joined_rank()
    if rank:
        replies = [rpc.rpc_async("worker0", serve, (number,)) for number in range(2)]
        for reply in replies:
            reply.wait()
    rpc.shutdown()


def one_after_the_other() -> None:
    rank = joined_rank()
    if rank:
        for number in range(2):
            rpc.rpc_sync("worker0", serve, (number,))
    rpc.shutdown()


def a_value_and_its_fetch() -> None:
    rank = joined_rank()
    if rank == 1:
        assert rpc.remote("worker0", serve, (1,)).to_here()
    rpc.shutdown()


def two_values_and_their_fetches() -> None:
    rank = joined_rank()
    if rank:
        rpc.remote("worker0", serve, (rank,)).to_here()
    rpc.shutdown()


def operators_of_torch() -> None:
    rank = joined_rank()
    if rank:
        rpc.rpc_sync("worker0", torch.add, (torch.ones(1), 1))
    rpc.shutdown()


def add_to_store(key: str) -> None:
    dist.distributed_c10d._get_default_store().add(key, 1)


def requests_that_use_a_store() -> None:
    store()
    rank = joined_rank()
    if rank:
        rpc.rpc_sync("worker0", add_to_store, (f"{rank}",))
    rpc.shutdown()


def requests_that_use_one_key() -> None:
    store()
    rank = joined_rank()
    if rank:
        rpc.rpc_sync("worker0", add_to_store, ("n",))
    rpc.shutdown()


def joined_rank() -> int:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    return rank


@pytest.mark.parametrize(
    ("body", "ranks", "classes"),
    [
        (three_requests, 4, 6),
        (two_requests_of_one, 2, 2),
        (one_after_the_other, 2, 1),
        (a_value_and_its_fetch, 2, 1),
        (two_values_and_their_fetches, 3, 4),
        (operators_of_torch, 3, 1),
        (requests_that_use_a_store, 3, 2),
        (requests_that_use_one_key, 3, 4),
    ],
)
def test_remote_calls_counted_by_hand(body: Callable[[], None], ranks: int, classes: int) -> None:
    """In which order requests are served, without those that torch makes itself. A fetch follows its value's making."""
    run = runs(body, ranks)

    def begin(orders: Orders) -> None:
        SERVED.clear()
        assert run(orders).exit_code == 0

    searched = with_reduction(begin)
    assert len(set(searched.classes)) == len(searched.classes) == classes
    assert without_reduction(begin, 100) == set(searched.classes)


def waits_for_the_other(number: int) -> None:
    held = dist.distributed_c10d._get_default_store()
    held.set(str(number), "")
    held.wait([str(3 - number)])


def two_requests_and_one_thread() -> None:
    store()
    rank, options = dist.get_rank(), rpc.TensorPipeRpcBackendOptions(num_worker_threads=1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank:
        rpc.rpc_sync("worker0", waits_for_the_other, (rank,), timeout=0)
    rpc.shutdown()


def test_a_request_that_never_has_its_turn_could_have_been_the_first() -> None:
    """The only thread serves the other one, which waits for this: either may be the one that is served."""
    run = runs(two_requests_and_one_thread, 3)

    def begin(orders: Orders) -> None:
        assert run(orders).exit_code

    searched = with_reduction(begin)
    assert len(set(searched.classes)) == len(searched.classes) == 2
    assert without_reduction(begin, 100) == set(searched.classes)


def asked() -> None:
    store()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.is_completed()
    work.wait()
    assert work.is_completed()


def asked_twice() -> None:
    store()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if work.is_completed():
        assert work.is_completed()
    else:
        work.is_completed()
    work.wait()


def asked_in_a_loop() -> None:
    store()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    while not work.is_completed():
        pass


def asked_before_a_look() -> None:
    held = store()
    if dist.get_rank():
        held.set("a", "1")
        dist.all_reduce(torch.ones(1))
        return
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if not work.is_completed():
        held.check(["a"])
    work.wait()


def asked_for_ever() -> None:
    store()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        while not work.is_completed():
            pass


@pytest.mark.parametrize(
    ("body", "classes", "failing"),
    [
        (asked, 4, 0),  # each of two ranks: yes, not yet
        (asked_twice, 9, 0),  # each: yes; not yet, yes; not yet twice
        (asked_in_a_loop, 4, 0),
        (asked_before_a_look, 3, 0),  # yes; not yet, and the key is there or not
        (asked_for_ever, 1, 1),
    ],
)
def test_a_handle_is_complete_or_not_yet(body: Callable[[], None], classes: int, failing: int) -> None:
    """Both answers, whichever came first in time; a handle that was waited for is complete."""
    codes: list[int] = []
    run = runs(body, 2)
    searched = with_reduction(lambda orders: codes.append(run(orders).exit_code))
    assert len(set(searched.classes)) == len(searched.classes) == classes
    assert sum(code != 0 for code in codes) == failing
    assert without_reduction(run, 300) == set(searched.classes)


def looks_for_a_file(folder: Path) -> None:
    if own_rank():
        (folder / "checkpoint").write_text("1")
    else:
        (folder / "checkpoint").exists()


def writes_own_files(folder: Path) -> None:
    path = folder / f"{own_rank()}"
    path.write_text("1")
    assert path.read_text() == "1"


def lists_while_another_writes(folder: Path) -> None:
    if own_rank():
        torch.save(torch.ones(1), folder / "one")
    else:
        os.listdir(folder)


def makes_one_folder(folder: Path) -> None:
    os.makedirs(folder / "made", exist_ok=True)


def removes_what_another_writes(folder: Path) -> None:
    (folder / "run").mkdir(exist_ok=True)
    store()
    dist.barrier()
    if dist.get_rank():
        shutil.rmtree(folder / "run")
    else:
        (folder / "run" / "log").write_text("1")


def touches(folder: Path) -> None:
    if own_rank():
        (folder / "ready").touch()
    else:
        assert (folder / "ready").exists()


def makes_a_file_alone(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        os.close(os.open(folder / "lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        assert own_rank() == 0


def replaces_what_another_looks_for(folder: Path) -> None:
    if own_rank():
        (folder / "part").write_text("1")
        os.replace(folder / "part", folder / "whole")
    else:
        assert (folder / "whole").exists()


def own_rank() -> int:
    return int(os.environ["RANK"])


@pytest.mark.parametrize(
    ("body", "classes", "failing"),
    [
        (looks_for_a_file, 2, 0),
        (writes_own_files, 1, 0),
        (lists_while_another_writes, 2, 0),
        (touches, 3, 2),  # it sets the time, then makes the file
        (makes_a_file_alone, 2, 1),
        (replaces_what_another_looks_for, 2, 1),
    ],
)
def test_files_counted_by_hand(body: Callable[[Path], None], classes: int, failing: int, tmp_path: Path) -> None:
    """Two ranks: what one looks for is there or not, own files make no difference."""
    codes: list[int] = []
    run = runs(body, 2, tmp_path)

    def begin(orders: Orders) -> None:
        for path in tmp_path.iterdir():
            path.unlink()
        codes.append(run(orders).exit_code)

    searched = with_reduction(begin)
    assert len(set(searched.classes)) == len(searched.classes) == classes
    assert sum(code != 0 for code in codes) == failing
    assert without_reduction(begin, 300) == set(searched.classes)


def locks_a_file(folder: Path) -> None:
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def writes_later(folder: Path) -> None:
    file = open(folder / f"{own_rank()}", "w")  # noqa: SIM115
    file.write("1")
    file.close()


def test_what_files_cannot_show_is_said(tmp_path: Path) -> None:
    """A lock of a file is refused by name, and what is written through a file that stays open is noted."""
    outcome = runs(locks_a_file, 2, tmp_path)(Orders(Usual()))
    assert {failure.message.partition(":")[0] for failure in outcome.failures} == {
        "fcntl.flock in an exploration is not simulated"
    }
    orders = Orders(Usual())
    runs(writes_later, 2, tmp_path)(orders)
    assert any("a file that it keeps open" in text for text in orders.trace.unexplored)


@pytest.mark.parametrize(("body", "can_fail"), [(makes_one_folder, False), (removes_what_another_writes, True)])
def test_folders_that_two_ranks_share(body: Callable[[Path], None], can_fail: bool, tmp_path: Path) -> None:
    """`makedirs` may be called by both; a folder that one removes may be gone, or not be empty, for the other."""
    codes: set[int] = set()
    run = runs(body, 2, tmp_path)

    def begin(orders: Orders) -> None:
        for path in tmp_path.iterdir():
            shutil.rmtree(path)
        codes.add(run(orders).exit_code)

    assert with_reduction(begin).classes
    assert codes == ({0, 1} if can_fail else {0})


def reads_its_own_lines() -> None:
    linecache.clearcache()
    warnings.warn(f"{linecache.getline(__file__, 1)}", stacklevel=1)
    tempfile.gettempdir()


def test_what_the_standard_library_reads_for_itself_has_no_order() -> None:
    """It may read a file once only, so that the first run would not repeat."""
    orders = Orders(Usual())
    with pytest.warns(UserWarning, match="Remote calls"):
        assert runs(reads_its_own_lines, 2)(orders).exit_code == 0
    assert orders.trace.steps == []


@pytest.mark.slow
@pytest.mark.parametrize("first", one_in(2, range(0, 20, 10)))
def test_random_calls_and_files_have_the_same_classes_as_without_reduction(first: int, tmp_path: Path) -> None:
    """Remote calls with store operations, or accesses of two files: every class once."""
    checked = 0
    for seed in range(first, first + 10):
        programs = random_shared(seed)
        run = runs(share, len(programs), programs, tmp_path)

        def begin(orders: Orders, run: Callable[[Orders], object] = run) -> None:
            for path in tmp_path.iterdir():
                path.unlink()
            run(orders)

        checked += compared(begin, (seed, programs))
    assert checked > 4


@pytest.mark.slow
@pytest.mark.parametrize("first", one_in(2, range(0, 20, 10)))
def test_random_jobs_have_the_same_classes_as_without_reduction(first: int) -> None:
    """Jobs of a pool at queues, locks and an event: every class once."""
    checked = 0
    for seed in range(first, first + 10):
        programs = random_jobs(seed)
        checked += compared(runs(do_jobs, 1, programs), (seed, programs))
    assert checked > 4


def compared(run: Callable[[Orders], object], program: object) -> bool:
    """Compare two searches of one program; return False if it has too many orders."""
    every = without_reduction(run, 60)
    if every is None:
        return False
    searched = with_reduction(run)
    assert set(searched.classes) == every, program
    assert len(searched.classes) == len(every), program
    return True


def torch_asks() -> None:
    store()
    if dist.get_rank():
        time.sleep(1.0)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    loop: dict[str, Any] = {}
    exec(compile("def wait(work):\n    while not work.is_completed():\n        pass\n", torch.__file__, "exec"), loop)
    loop["wait"](work)


def test_a_loop_of_torch_that_asks_is_no_choice() -> None:
    """It goes on as in an ordinary run."""
    orders = Orders(Usual())
    assert runs(torch_asks, 2)(orders).exit_code == 0
    assert orders.trace.steps == []
