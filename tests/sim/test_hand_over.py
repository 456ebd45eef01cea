"""A call that waits at once takes one hand-over, and nobody can tell."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sim.running import ranks
from torch.utils import _pytree

from distsim.sim.isolation.torch_state.torch_state import TorchState
from distsim.sim.kernel.task import Task


def calls(num: int) -> float:
    dist.init_process_group("gloo")
    t = torch.ones(4)
    for _ in range(num):
        dist.all_reduce(t)
    return float(t[0])


def test_one_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls more are three turns of each rank more: the call, its arrival and its wait are one turn."""
    turns = [0]
    resume = Task.resume

    def counted(self: Task, throw: BaseException | None) -> bool:
        turns[0] += 1
        return resume(self, throw)

    monkeypatch.setattr(Task, "resume", counted)
    taken = []
    for num in (1, 4):
        turns[0] = 0
        assert ranks(calls, 2, num).results == [2.0**num] * 2
        taken.append(turns[0])
    assert taken[1] - taken[0] == 3 * 2


def compute() -> None:
    for _ in range(4):
        torch.ones(1 << 20).exp_()


def late() -> Any:
    dist.init_process_group("gloo")
    t = torch.ones(2)
    if dist.get_rank() == 0:
        compute()
        try:
            dist.all_reduce(t)
        except RuntimeError as error:
            return str(error)
    group_timeout = timedelta(seconds=1e-4)
    dist.distributed_c10d._get_default_group().set_timeout(group_timeout)
    try:
        dist.all_reduce(t)
    except RuntimeError as error:
        return str(error)
    return None


def test_not_before_its_time() -> None:
    """While a rank computes before its call, the call is not there: another's times out, and blames that rank."""
    outcome = ranks(late)
    first, second = outcome.results
    assert "Connection closed by peer" in first
    assert "all_reduce #1 on group" in second
    assert [r.op for r in outcome.records[0]] == ["init_process_group"]
    assert outcome.records[1][-1].error is not None


def signalled(send: bool) -> tuple[float, list[int]]:
    dist.init_process_group("gloo")
    rank, came = dist.get_rank(), []
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    t = torch.ones(2)
    if rank == 0:
        compute()
    else:
        time.sleep(1e-5)
        if send:
            os.kill(pids[0], signal.SIGUSR1)
    dist.all_reduce(t)
    return float(t[0]), came


def test_signal_before_it_arrives() -> None:
    """A signal that reaches a rank between its call and the moment the world sees it calls the handler once, and
    moves nothing: the call comes when it would have come."""
    without, with_signal = ranks(signalled, 2, False), ranks(signalled, 2, True)
    assert with_signal.results == [(2.0, [int(signal.SIGUSR1)]), (2.0, [])]
    assert without.results == [(2.0, []), (2.0, [])]
    for rank in (0, 1):
        a, b = without.records[rank][-1], with_signal.records[rank][-1]
        assert (a.issued_s, a.completed_s) == pytest.approx((b.issued_s, b.completed_s), abs=1e-6)
        assert a.seq == b.seq
    assert with_signal.records[0][-1].issued_s > with_signal.records[1][-1].issued_s


def in_between() -> list[str]:
    dist.init_process_group("gloo")
    found = []
    work = dist.distributed_c10d._get_default_group().allreduce([torch.ones(1)])
    found.append(str(dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()))
    work.wait()
    return found


def test_a_handle_is_on_record() -> None:
    """A group's own method gives a handle and need not be followed by a wait: its call is there at once."""
    assert ranks(in_between).results == [["1"], ["1"]]


def asynchronous() -> list[list[float]]:
    dist.init_process_group("gloo")
    t = torch.arange(6.0).reshape(2, 3).T
    work = dist.all_reduce(t, async_op=True)
    work.wait()
    return t.tolist()


def test_no_warning_of_strides() -> None:
    """An asynchronous call on a tensor that is not contiguous is compared with the memory it was given: nobody
    wrote to it."""
    outcome = ranks(asynchronous)
    assert outcome.results == [[[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]] * 2
    assert outcome.diagnoses == []


def test_torchs_state_is_looked_through_only_where_somebody_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six calls take no closer look than three; a rank that writes before each call takes one each time."""
    closely = [0]
    leave = TorchState.leave

    def counted(self: TorchState, own: Any) -> None:
        closely[0] += 1
        leave(self, own)

    def writing(num: int) -> str:
        dist.init_process_group("gloo")
        t = torch.ones(4)
        for number in range(num):
            if dist.get_rank() == 0:
                torch.hub.set_dir(f"/there/{number}")
            dist.all_reduce(t)
        return str(torch.hub.get_dir())

    monkeypatch.setattr(TorchState, "leave", counted)
    taken: dict[Any, list[int]] = {}
    for body in (calls, writing):
        for num in (3, 6):
            closely[0] = 0
            results = ranks(body, 2, num).results
            taken.setdefault(body, []).append(closely[0])
            if body is writing:
                assert results[0] == f"/there/{num - 1}"
                assert "there" not in results[1]
    assert taken[calls][1] == taken[calls][0]
    assert taken[writing][1] - taken[writing][0] == 3


def test_what_a_rank_writes_is_its_own_whatever_it_is() -> None:
    """A name, a dictionary, a list, an attribute of a class."""

    def body() -> list[tuple[Any, ...]]:
        dist.init_process_group("gloo")
        rank, seen = dist.get_rank(), []
        for number in range(4):
            if number == 1 + rank:
                torch.hub.set_dir(f"/there/{rank}")
                dist.Backend.backend_type_map[f"own{rank}"] = dist.ProcessGroup.BackendType.CUSTOM
                dist.Backend.backend_list.append(f"own{rank}")
                setattr(torch.nn.Linear, "mine", rank)  # noqa: B010
            dist.barrier()
            names = [f"own{one}" for one in (0, 1)]
            kept = [name in dist.Backend.backend_type_map for name in names]
            listed = [name in dist.Backend.backend_list for name in names]
            seen.append((torch.hub.get_dir()[-1], kept, listed, getattr(torch.nn.Linear, "mine", None)))
        return seen

    for rank, seen in enumerate(ranks(body).results):
        own = [one == rank for one in (0, 1)]
        for number, (_, kept, listed, mine) in enumerate(seen):
            assert (kept, listed) == ((own, own) if number > rank else ([False] * 2, [False] * 2))
            assert mine == (rank if number > rank else None)
        assert seen[-1][0] == str(rank)


def test_a_node_of_a_tree_that_a_rank_registers_is_its_own() -> None:
    """Its registry is a dictionary that only grows: its length shows the change."""
    kinds = [type(f"Node{rank}", (), {}) for rank in range(2)]

    def body() -> list[bool]:
        rank = int(os.environ["RANK"])
        time.sleep(1)
        _pytree.register_pytree_node(kinds[rank], lambda node: ([], None), lambda _, node: node)
        time.sleep(1)
        return [kind in _pytree.SUPPORTED_NODES for kind in kinds]

    assert ranks(body).results == [[True, False], [False, True]]
