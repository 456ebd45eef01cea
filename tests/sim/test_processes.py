"""Programs that start their own ranks: mp.spawn, Process, what processes share."""

from __future__ import annotations

from pathlib import Path

import pytest
from sim.running import Ran, Scripts

import distsim
from distsim.debug.records.kinds import Kind

HEAD = """
import os, sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp
def init(rank, size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29511"
    dist.init_process_group("gloo", rank=rank, world_size=size)
"""


def main(body: str, call: str) -> str:
    """A script with a worker function `run` and a guarded main part."""
    return (
        HEAD + body + "\nif __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in call.strip().splitlines())
    )


def test_spawn_runs_the_ranks(script: Scripts) -> None:
    """The tutorials' way: the script runs once, the processes it spawns are the ranks."""
    ran = script(
        main(
            """
def run(rank, size, queue):
    init(rank, size)
    t = torch.ones(1) * rank
    dist.all_reduce(t)
    print(t.item(), __name__, mp.current_process().name, mp.parent_process() is not None)
    queue.put(t.item())
""",
            """
queue = mp.get_context("spawn").SimpleQueue()
mp.spawn(run, args=(3, queue), nprocs=3)
print(sorted(queue.get() for _ in range(3)), queue.empty(), dist.is_initialized())
""",
        ),
        num_ranks=3,
    )
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    for rank in range(3):
        assert ran.of(rank) == [f"3.0 __mp_main__ SpawnProcess-{rank + 1} True"]
    assert ran.of("main") == ["[3.0, 3.0, 3.0] True False"]
    assert ran.outcome.world_size == 3
    assert "starts its own ranks" in ran.outcome.notes[0]


def test_spawned_ranks_copy_what_they_get(script: Scripts) -> None:
    """Arguments cross by pickle: a list is a copy, a tensor shared memory, a lambda is refused as by torch."""
    ran = script(
        main(
            """
def run(rank, size, items, tensor):
    init(rank, size)
    items.append(rank)
    tensor[rank] = rank + 1
    dist.barrier()
    print(items, tensor.tolist())
""",
            """
items, tensor = [], torch.zeros(2)
mp.spawn(run, args=(2, items, tensor), nprocs=2)
print(items, tensor.tolist())
try:
    mp.spawn(lambda rank: None, nprocs=1)
except Exception as error:
    print(type(error).__name__)
""",
        )
    )
    assert ran.of(0) == ["[0] [1.0, 2.0]"]
    assert ran.of(1) == ["[1] [1.0, 2.0]"]
    assert ran.of("main") == ["[] [1.0, 2.0]", "PicklingError"]


def test_a_spawned_rank_that_raises(script: Scripts) -> None:
    """The parent gets ProcessRaisedException with the child's traceback; the others are terminated, and are
    no fault of their own in the report."""
    body = """
def run(rank, size):
    init(rank, size)
    if rank == 1:
        raise ValueError("bad rank")
    time.sleep(100)
"""
    ran = script(main(body, "mp.spawn(run, args=(3,), nprocs=3)"), num_ranks=3)
    assert ran.outcome.exit_code == 1
    assert [(f.ranks, f.type) for f in ran.outcome.failures] == [((1,), "ValueError")]
    assert ran.outcome.diagnoses[0].culprits == (1,)
    assert ran.kinds == ["rank_raised"]
    assert ran.outcome.diagnoses[0].sites[1].line == ran.outcome.diagnoses[0].sites[1].line
    assert "distsim/sim" not in ran.outcome.failures[0].traceback
    caught = script(
        main(
            body,
            """
try:
    mp.spawn(run, args=(2,), nprocs=2)
except mp.ProcessRaisedException as error:
    print(error.error_index, "ValueError: bad rank" in str(error), "distsim/sim" in str(error))
""",
        )
    )
    assert caught.of("main") == ["1 True False"]


def test_joining_by_hand(script: Scripts) -> None:
    """join=False gives torch's own context: pids, join with a timeout in virtual time."""
    ran = script(
        main(
            """
def run(rank, size):
    init(rank, size)
    time.sleep(10)
""",
            """
context = mp.spawn(run, args=(2,), nprocs=2, join=False)
print(context.join(timeout=4), [p.is_alive() for p in context.processes], len(set(context.pids())))
while not context.join():
    pass
print(round(time.perf_counter(), 2), [p.exitcode for p in context.processes])
""",
        )
    )
    assert ran.of("main") == ["False [True, True] 2", "10.0 [0, 0]"]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_process_objects(script: Scripts, method: str) -> None:
    """Process with every start method: names, exit codes, globals, a second round of ranks."""
    ran = script(
        main(
            """
COUNT = 0
def run(rank, size):
    init(rank, size)
    dist.barrier()
    print("count", COUNT, mp.current_process().name)
    if rank == 1:
        sys.exit(3)
""",
            f"""
COUNT = 5
context = mp.get_context({method!r})
for _ in range(2):
    children = [context.Process(target=run, args=(r, 2), name=f"w{{r}}") for r in range(2)]
    for child in children: child.start()
    print([c.is_alive() for c in children], [c.exitcode for c in children])
    for child in children: child.join()
    print([c.exitcode for c in children], mp.active_children())
""",
        )
    )
    count = 5 if method == "fork" else 0
    for rank in range(2):
        assert ran.of(rank) == [f"count {count} w{rank}"] * 2
    assert ran.of("main") == ["[True, True] [None, None]", "[0, 3] []"] * 2


def test_what_processes_share(script: Scripts) -> None:
    """Queue, Event, Lock, Value, Array, Barrier, Pipe between simulated processes."""
    ran = script(
        main(
            """
def run(rank, size, queue, event, lock, value, array, barrier, pipe):
    init(rank, size)
    with lock:
        value.value += 1
        array[rank] = rank + 10
    if rank == 0:
        time.sleep(1)
        event.set()
    else:
        event.wait()
    barrier.wait()
    queue.put((rank, torch.ones(2) * rank))
    pipe.send({"rank": rank})
    dist.barrier()
""",
            """
c = mp.get_context("spawn")
queue, event, lock, barrier = c.Queue(), c.Event(), c.Lock(), c.Barrier(2)
value, array = c.Value("i", 0), c.Array("d", 2)
pipes = [c.Pipe() for _ in range(2)]
shared = (queue, event, lock, value, array, barrier)
children = [c.Process(target=run, args=(r, 2, *shared, pipes[r][1])) for r in range(2)]
for child in children: child.start()
got = sorted((queue.get() for _ in range(2)), key=lambda pair: pair[0])
print([(r, t.tolist()) for r, t in got], [p.recv() for p, _ in pipes])
for child in children: child.join()
print(value.value, list(array), queue.empty(), pipes[0][0].poll())
""",
        )
    )
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert ran.of("main") == [
        "[(0, [0.0, 0.0]), (1, [1.0, 1.0])] [{'rank': 0}, {'rank': 1}]",
        "2 [10.0, 11.0] True False",
    ]


def test_a_child_that_ends_before_it_begins(script: Scripts) -> None:
    """Terminated at once, or a daemon of a parent that ends at once: no call of it ever runs."""
    body = "\ndef run(): print('never')\n"
    call = """
context = mp.get_context("fork")
child = context.Process(target=run)
child.start(); child.terminate(); child.join(); print(child.exitcode)
context.Process(target=run, daemon=True).start()
"""
    ran = script(main(body, call), num_ranks=1)
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert ran.out.splitlines() == ["[main] -15"]


def test_terminate_and_daemons(script: Scripts) -> None:
    """terminate, kill and the parent's end: the program's own doing is no fault."""
    ran = script(
        main(
            """
def run(rank, size):
    init(rank, size)
    time.sleep(1000)
""",
            """
children = [mp.Process(target=run, args=(r, 3), daemon=r == 2) for r in range(3)]
for child in children: child.start()
time.sleep(1)
children[0].terminate()
children[1].kill()
for child in children[:2]: child.join()
print([c.exitcode for c in children])
""",
        ),
        num_ranks=3,
    )
    assert ran.of("main") == ["[-15, -9, None]"]
    assert ran.outcome.exit_code == 0
    assert ran.kinds == []
    assert ran.outcome.virtual_time_s < 2


def test_helpers_of_a_rank(script: Scripts, tmp_path: Path) -> None:
    """A process that a running rank starts prints behind that rank, and adds to its files."""
    text = """
def help(rank):
    print("helper", rank, os.environ["RANK"])
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
dist.barrier()
if __name__ == "__main__":
    print("before")
    child = mp.Process(target=help, args=(rank,))
    child.start()
    child.join()
    print("after", child.exitcode)
"""
    text = HEAD + text.replace("dist.init_process_group", "__name__ == '__main__' and dist.init_process_group")
    text = text.replace("dist.barrier()\n", "__name__ == '__main__' and dist.barrier()\n")
    ran = script(text)
    for rank in range(2):
        assert ran.of(rank) == ["before", f"helper {rank} {rank}", "after 0"]
    script(text, log_dir=str(tmp_path / "logs"))
    assert (tmp_path / "logs/1/stdout.log").read_text() == "before\nhelper 1 1\nafter 0\n"


def launched(script: Scripts, body: str) -> Ran:
    text = "def run(rank, size):\n    init(rank, size)\n" + "".join(f"    {line}\n" for line in body.splitlines())
    return script(main(text, "mp.spawn(run, args=(3,), nprocs=3)"), num_ranks=3)


def test_faults_of_spawned_ranks_name_the_right_ranks(script: Scripts) -> None:
    """A mismatch and a deadlock under a launcher are diagnosed as under torchrun."""
    ran = launched(script, "dist.all_reduce(torch.ones(2 if rank == 1 else 1))")
    assert (ran.kinds[0], ran.outcome.diagnoses[0].culprits, ran.outcome.exit_code) == ("shape_mismatch", (1,), 4)
    ran = launched(script, "if rank != 2:\n    dist.barrier()")
    assert (ran.kinds[0], ran.outcome.diagnoses[0].culprits, ran.outcome.exit_code) == ("missing_rank", (2,), 3)


def test_more_ranks_than_the_cluster_has(script: Scripts) -> None:
    """A usage error, one line with both numbers, whatever the program does with exceptions."""
    for call in (
        "mp.spawn(run, args=(5,), nprocs=5)",
        "for r in range(5): mp.Process(target=run, args=(r, 5)).start()",
    ):
        with pytest.raises(distsim.UsageError, match=r"group of 5 ranks, .* room for 2") as caught:
            script(main("def run(rank, size):\n    init(rank, size)\n", call))
        assert "\n" not in str(caught.value)


def test_pools_work_inside_their_rank(script: Scripts) -> None:
    """Tasks of a pool and of ProcessPoolExecutor run one after the other in the rank's process, and a note says so."""
    ran = script(
        main(
            "def twice(x):\n    return 2 * x\n",
            """
from concurrent.futures import ProcessPoolExecutor
with mp.Pool(4, print, ("begun",)) as pool:
    pids = {worker.pid for worker in pool._pool}
    print(pool.map(twice, range(3)), pool.apply_async(twice, (4,)).get(), pids == {os.getpid()})
with ProcessPoolExecutor(2) as pool:
    print(list(pool.map(twice, range(3))))
""",
        )
    )
    assert ran.of(0) == ["begun", "[0, 2, 4] 8 True", "[0, 2, 4]"]
    assert any("multiprocessing.Pool" in note for note in ran.outcome.notes)


def test_a_manager_holds_what_processes_share(script: Scripts) -> None:
    """A dict, a queue and a lock of a manager are the same in a child; what is taken out of a dict is a copy."""
    ran = script(
        main(
            """
def child(table, queue, lock):
    with lock:
        table["new"] = 1
        queue.put(2)
""",
            """
with mp.Manager() as manager:
    table, queue = manager.dict({"old": []}), manager.Queue()
    table["old"].append(3)
    process = mp.Process(target=child, args=(table, queue, manager.Lock()))
    process.start()
    print(queue.get(timeout=5), dict(table))
    process.join()
""",
        )
    )
    assert ran.out == "[main] 2 {'old': [], 'new': 1}\n"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("mp.Manager().Array('i', 2)", "Array"),
        ("os.fork()", "fork"),
    ],
)
def test_refused_by_name(script: Scripts, code: str, name: str) -> None:
    """What is not simulated says so, and what to use instead."""
    ran = script(main("", code))
    assert ran.outcome.exit_code == 1
    assert ran.outcome.failures[0].type == "NotSimulated"
    assert f"{name} is not simulated: use " in ran.outcome.failures[0].message


def test_ranks_of_a_launcher_that_was_told_of_torchrun(script: Scripts) -> None:
    """Lightning's ddp_spawn: who asked torch whether torchrun started it has built on the yes, so the ranks that
    it starts, and itself, have torchrun's variables, each its own."""
    ran = script(
        main(
            """
def run(rank):
    dist.init_process_group("gloo")
    print(os.environ["RANK"], os.environ["WORLD_SIZE"], dist.get_rank(), dist.is_torchelastic_launched())
""",
            """
asked = dist.is_torchelastic_launched()
mp.spawn(run, nprocs=2)
print(asked, os.environ["RANK"], os.environ["WORLD_SIZE"])
""",
        )
    )
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert [ran.of(rank) for rank in range(2)] == [[f"{rank} 2 {rank} True"] for rank in range(2)]
    assert ran.of("main") == ["True 0 2"]
    assert any("as many ranks as it starts" in note for note in ran.outcome.notes)


def test_elastic_launch_is_a_launcher(script: Scripts) -> None:
    """torchrun's launcher called as a function (accelerate's notebook_launcher): the script runs once."""
    ran = script(
        main(
            """
def run(word):
    dist.init_process_group("gloo")
    print(word, dist.get_rank(), dist.get_world_size())
""",
            """
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
config = LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_endpoint="127.0.0.1:29500", rdzv_backend="static",
    rdzv_configs={"rank": 0}, run_id="none", max_restarts=0, start_method="fork",
)
print("starts", flush=True)
elastic_launch(config, run)("hello")
print("done")
""",
        )
    )
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert [ran.of(1), ran.of("main")] == [["hello 1 2"], ["done"]]
    assert ran.of(0) == ["starts", "hello 0 2"]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_forked_child_leaves_its_file_store(script: Scripts, tmp_path: Path, method: str) -> None:
    """A forked process ends with os._exit: the file of its FileStore stays (accelerate's debug_launcher removes it)."""
    ran = script(
        main(
            f"""
def run(rank):
    store = dist.FileStore({str(tmp_path / "met")!r}, 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
""",
            f"""
mp.start_processes(run, nprocs=2, start_method={method!r})
print(os.path.exists({str(tmp_path / "met")!r}))
""",
        )
    )
    assert ran.of("main") == [str(method == "fork")], ran.err


FORKS = """
    if dist.get_rank() == 0:
        child = mp.get_context("fork").Process(target=call)
        child.start()
        child.join()
    dist.barrier()
"""


@pytest.mark.parametrize("guarded", [True, False], ids=["in main()", "at the top"])
def test_a_collective_in_a_forked_child_is_reported(script: Scripts, guarded: bool) -> None:
    """The group does not survive a fork: the call never ends, and rank 0 waits for the child."""
    call = HEAD + "def call():\n    dist.all_reduce(torch.ones(1))\n"
    init = 'dist.init_process_group("gloo")\n'
    if guarded:
        source = f"{call}if __name__ == '__main__':\n    {init}{FORKS}"
    else:
        source = call + init + FORKS.replace("\n    ", "\n")
    ran = script(source)
    (found,) = ran.outcome.diagnoses
    assert (found.kind, found.culprits, ran.outcome.exit_code) == (Kind.HOST_STUCK, (0,), 3)
    assert "forked child" in found.explanation
    assert "all_reduce" in found.explanation


def test_a_forked_child_has_its_parents_groups(script: Scripts) -> None:
    """It knows its rank without a call of its own; a spawned one has no group."""
    ran = script(
        HEAD
        + """
def tell(queue):
    queue.put((dist.is_initialized(), dist.get_rank() if dist.is_initialized() else None))
if __name__ == "__main__":
    dist.init_process_group("gloo")
    for method in ("fork", "spawn"):
        queue = mp.get_context(method).Queue()
        child = mp.get_context(method).Process(target=tell, args=(queue,))
        child.start()
        print(queue.get())
        child.join()
    dist.destroy_process_group()
"""
    )
    assert ran.of(1) == ["(True, 1)", "(False, None)"], ran.err
