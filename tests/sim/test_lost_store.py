"""A TCPStore ends with the process that serves it, and its clients get torch's errors."""

from __future__ import annotations

from sim.running import Scripts

LOST = "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"
OWN_STORE = """
    import torch.distributed as dist
    from datetime import timedelta
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        server = dist.TCPStore("node0", 7000, None, is_master=True, wait_for_workers=False)
    dist.barrier()

    def ask(name, call, *args):
        try:
            print(name, call(*args))
        except Exception as error:
            print(name, f"{type(error).__name__}: {error}")
"""
SPAWNED = """
    import sys
    from datetime import timedelta
    import torch.distributed as dist
    import torch.multiprocessing as mp

    def work(rank):
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:7000", rank=rank, world_size=3)
        if rank == 0:
            return
        store = dist.distributed_c10d._get_default_store()
        if sys.argv[1] == "wait":
            store.wait(["never"], timedelta(seconds=5))
        elif sys.argv[1] == "barrier":
            dist.distributed_c10d._store_based_barrier(rank, store, "late", 3, timedelta(seconds=5))
        else:
            dist.new_group()

    if __name__ == "__main__":
        mp.spawn(work, nprocs=3)
"""


def test_every_call_of_a_lost_store(script: Scripts) -> None:
    """The first call after the server's end loses its value or its answer, and each further one finds a broken pipe."""
    ran = script(
        OWN_STORE
        + """
    calls = {
        "set": ("a", "b"), "append": ("a", "b"), "multi_set": (["a"], ["b"]), "queue_push": ("q", "b"),
        "get": ("a",), "add": ("a", 1), "check": (["a"],), "compare_set": ("a", "b", "c"), "delete_key": ("a",),
        "multi_get": (["a"],), "num_keys": (), "list_keys": (), "wait": (["a"],), "queue_len": ("q",),
        "queue_pop": ("q",),
    }
    if rank == 0:
        ask("leaves after a second", server.wait, ["never"], timedelta(seconds=1))
    else:
        stores = {name: dist.TCPStore("node0", 7000) for name in calls}
        prefixed = dist.PrefixStore("p", dist.TCPStore("node0", 7000))
        waiting = dist.TCPStore("node0", 7000)
        ask("blocked", waiting.get, "never")
        ask("blocked again", waiting.get, "never")
        for name, args in calls.items():
            ask(name, getattr(stores[name], name), *args)
            ask(name + " again", getattr(stores[name], name), *args)
        ask("prefixed", prefixed.get, "a")
        stores["get"].set_timeout(timedelta(seconds=2))
        ask("clone", stores["get"].clone)
        ask("late", lambda: dist.TCPStore("node0", 7000, timeout=timedelta(seconds=3)))
    """
    )
    answers = dict(line.split(" DistNetworkError: ") for line in ran.of(1) if " DistNetworkError: " in line)
    unanswered = {"set None", "append None", "multi_set None", "queue_push None"}
    assert unanswered == {line for line in ran.of(1) if line.endswith(" None")}
    timed_out = "The client socket has timed out after {}000ms while trying to connect to (node0, 7000)."
    assert (answers.pop("clone"), answers.pop("late")) == (timed_out.format(2), timed_out.format(3))
    assert answers.pop("blocked again") == LOST
    assert {text for name, text in answers.items() if name.endswith(" again")} == {"Broken pipe"}
    assert {text for name, text in answers.items() if not name.endswith(" again")} == {LOST}
    assert len(answers) == 2 * 15 - 4 + 2


def test_store_of_spawned_ranks(script: Scripts) -> None:
    """Rank 0 of spawned ranks serves the store of `tcp://`: its keys, its barrier and new groups end with rank 0."""
    ran = script(SPAWNED, num_ranks=3, args=("new group",), launcher="python")
    assert ran.outcome.diagnoses[0].culprits == (0,)
    assert [failure.message for failure in ran.outcome.failures if LOST in failure.message] == [
        LOST
    ]  # equal ones are one
    for call in ("wait", "barrier"):
        ran = script(SPAWNED, num_ranks=3, args=(call,), launcher="python")
        first = ran.outcome.diagnoses[0]
        assert (ran.kinds[0], first.culprits) == ("rank_raised", (1, 2)), first.explanation
        assert LOST in first.explanation
        assert "Rank 0, which served the store at 127.0.0.1:7000, has ended" in first.explanation


def test_connecting_too_late_names_the_server(script: Scripts) -> None:
    """A rank that connects after the end of the server names it, too."""
    ran = script(
        OWN_STORE
        + """
    if rank == 1:
        first = dist.TCPStore("node0", 7000)
        ask("lost", first.get, "never")
        dist.TCPStore("node0", 7000, timeout=timedelta(seconds=3))
    """
    )
    assert "Rank 0, which served the store at node0:7000, has ended" in ran.outcome.diagnoses[0].explanation


def test_server_that_was_killed(script: Scripts) -> None:
    """The death of the server comes first, and no barrier is advised."""
    ran = script(
        OWN_STORE
        + """
    import os, signal
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.TCPStore("node0", 7000).get("never")
    """
    )
    assert ran.kinds == ["rank_killed", "rank_raised"]
    assert "barrier" not in ran.outcome.diagnoses[1].suggestion


def test_agents_store_outlives_rank_0(script: Scripts) -> None:
    """With a launcher the store of `env://` is the agent's: it has its keys after rank 0 has ended."""
    ran = script(
        OWN_STORE
        + """
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("key", "value")
    else:
        ask("server", dist.TCPStore("node0", 7000).get, "never")
        ask("agent", store.get, "key")
    """
    )
    assert ran.of(1) == [f"server DistNetworkError: {LOST}", "agent b'value'"]


def test_key_that_came_before_the_end(script: Scripts) -> None:
    """A rank that waits for the last key of a server that then ends gets its value."""
    ran = script(
        OWN_STORE
        + """
    if rank == 0:
        server.set("last", "word")
    else:
        ask("got", dist.TCPStore("node0", 7000).get, "last")
    """
    )
    assert ran.of(1) == ["got b'word'"]
