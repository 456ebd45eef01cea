"""torch.distributed.rpc simulated: calls, references, errors, deadlines, the end."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from sim.running import ranks

import distsim
from distsim.errors import NotSimulated
from distsim.sim import Outcome

PROGRAM = Callable[[int], Any]


def workers(program: PROGRAM, num: int = 2, options: Callable[[], Any] | None = None, **how: Any) -> Outcome:
    """Every rank a worker that shuts down when *program* is done."""

    def body() -> Any:
        rank = int(os.environ["RANK"])
        rpc.init_rpc(
            f"worker{rank}", rank=rank, world_size=num, rpc_backend_options=None if options is None else options()
        )
        result = program(rank)
        rpc.shutdown()
        return result

    return distsim.simulate(body, on=how.pop("on", f"ethernet-cpu:{num}"), nproc_per_node=how.pop("a_node", 1), **how)


def double_and_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 2 * x + y


def back_to(worker: str, depth: int) -> int:
    """Calls the caller back, and so on."""
    me = rpc.get_worker_info().name
    return depth if not depth else rpc.rpc_sync(worker, back_to, args=(me, depth - 1)) + 1


def refuse() -> None:
    raise ValueError("expected")


def nap(seconds: float) -> None:
    import time

    time.sleep(seconds)


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value


def read(counter: Any) -> int:
    return counter.to_here().value  # type: ignore[no-any-return]


def num_owned() -> int:
    return int(rpc._rref_context_get_debug_info()["num_owner_rrefs"])


def test_functions_operators_and_futures() -> None:
    """A Python function, a builtin operator, and a future with a callback give what they give in one process."""

    def program(rank: int) -> list[float]:
        if rank:
            return []
        x = torch.ones(2)
        later = rpc.rpc_async("worker1", double_and_add, args=(x,), kwargs={"y": x}).then(lambda f: f.wait() * 10)
        return [
            float(rpc.rpc_sync("worker1", double_and_add, args=(x, x)).sum()),
            float(rpc.rpc_sync("worker1", torch.add, args=(x, 1)).sum()),
            float(later.wait().sum()),
            float(rpc.rpc_sync(rpc.get_worker_info(), torch.mul, args=(x, 3)).sum()),
        ]

    assert workers(program).results == [[6.0, 4.0, 60.0, 6.0], []]


def test_a_call_back_into_the_caller() -> None:
    """A worker serves requests in threads of its own: a chain that goes back and forth ends."""
    outcome = workers(lambda rank: rpc.rpc_sync("worker1", back_to, args=("worker0", 6)) if not rank else None)
    assert outcome.results[0] == 6


def test_references() -> None:
    """A reference is known to its owner, gives its value, takes calls, is passed on, and is gone with its last user."""

    def program(rank: int) -> list[Any]:
        if rank:
            return []
        counter = rpc.remote("worker1", Counter, args=(5,))
        seen: list[Any] = [counter.is_owner(), counter.owner_name(), counter.rpc_sync().add(2)]
        seen += [counter.rpc_async().add(1).wait(), counter.remote().add(1).to_here(), counter.to_here().value]
        seen += [rpc.rpc_sync("worker2", read, args=(counter,)), counter.confirmed_by_owner()]
        del counter
        rpc.rpc_sync("worker1", nap, args=(1,))
        return [*seen, rpc.rpc_sync("worker1", num_owned)]

    assert workers(program, 3).results[0] == [False, "worker1", 7, 8, 9, 9, 9, True, 0]


def test_a_local_reference() -> None:
    """`RRef(value)` is its own owner; elsewhere its value cannot be had by `local_value`."""

    def program(rank: int) -> list[Any]:
        if rank:
            return []
        mine = rpc.RRef(torch.ones(3))
        other = rpc.remote("worker1", torch.ones, args=((2,),))
        with pytest.raises(RuntimeError, match="can't call localValue"):
            other.local_value()
        return [mine.is_owner(), float(mine.to_here().sum()), float(mine.rpc_sync().sum()), isinstance(mine, rpc.RRef)]

    assert workers(program).results[0] == [True, 3.0, 3.0, True]


def test_an_exception_of_the_callee() -> None:
    """It is raised in the caller, of its own type, with the callee's traceback."""

    def program(rank: int) -> bool:
        if rank == 0:
            with pytest.raises(ValueError, match=r"On WorkerInfo\(id=1, name=worker1\)[\s\S]*in refuse"):
                rpc.rpc_sync("worker1", refuse)
        return True

    assert workers(program).results == [True, True]


def test_what_cannot_be_sent() -> None:
    """A lambda, an unknown worker, a reply that cannot be pickled: torch's errors, and the worker goes on."""

    def program(rank: int) -> int:
        if rank == 0:
            with pytest.raises(Exception, match="pickle"):
                rpc.rpc_sync("worker1", lambda: 1)
            with pytest.raises(RuntimeError, match="could not find destination name nobody"):
                rpc.rpc_sync("nobody", num_owned)
            with pytest.raises(RuntimeError, match="cannot pickle"):
                rpc.rpc_sync("worker1", iter_of, args=(3,))
            with pytest.raises(RuntimeError, match=r"Overloaded torch operator .* failed to match any"):
                rpc.rpc_sync("worker1", torch.add, args=("no", "tensors", 3, 4))
            return int(rpc.rpc_sync("worker1", num_owned))
        return 0

    assert workers(program).results == [0, 0]


def iter_of(number: int) -> Any:
    return (i for i in range(number))


def test_a_timeout_in_virtual_time() -> None:
    """A call that takes longer than it may raises what torch raises, after that much virtual time."""

    def program(rank: int) -> bool:
        if rank == 0:
            import time

            begun = time.time()
            with pytest.raises(RuntimeError, match=r"RPC ran for more than set timeout \(2000 ms\)"):
                rpc.rpc_sync("worker1", nap, args=(30.0,), timeout=2.0)
            assert 2.0 <= time.time() - begun < 2.1
        return True

    assert workers(program).results == [True, True]


def test_a_chain_with_more_links_than_threads() -> None:
    """With one thread a worker cannot take the reply to a call that it makes while it serves: a deadlock, named."""

    def options() -> Any:
        return rpc.TensorPipeRpcBackendOptions(num_worker_threads=1)

    def program(rank: int) -> None:
        if rank == 0:
            rpc.rpc_sync("worker1", back_to, args=("worker0", 3))

    outcome = workers(program, 2, options, check=False)
    assert outcome.exit_code == 3
    assert "worker1" in outcome.diagnoses[0].explanation


def test_a_name_taken_twice() -> None:
    """torch's error on every worker."""

    def body() -> None:
        with pytest.raises(RuntimeError, match="RPC worker name same is not unique"):
            rpc.init_rpc("same", rank=int(os.environ["RANK"]), world_size=2)

    assert ranks(body, 2).exit_code == 0


def test_before_and_after() -> None:
    """Without init_rpc, and after shutdown, calls say so."""

    def program(rank: int) -> None:
        pass

    def body() -> None:
        with pytest.raises(RuntimeError, match="RPC has not been initialized"):
            rpc.rpc_sync("worker0", num_owned)
        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        rpc.shutdown()
        with pytest.raises(RuntimeError, match="RPC has not been initialized"):
            rpc.get_worker_info()
        rpc.init_rpc(f"again{rank}", rank=rank, world_size=2)
        assert rpc.rpc_sync(f"again{1 - rank}", double_and_add, args=(1, 2)) == 4
        rpc.shutdown(graceful=True)

    assert ranks(body, 2).exit_code == 0


def test_a_larger_message_takes_longer() -> None:
    """Requests and replies cross the network with their size."""

    def program(rank: int) -> list[float]:
        import time

        took = []
        for numel in (1_000, 10_000_000) if rank == 0 else ():
            x, begun = torch.zeros(numel), time.time()
            rpc.rpc_sync("worker1", torch.numel, args=(x,))
            took.append(time.time() - begun)
        return took

    small, large = workers(program).results[0]
    assert large > small + 40e6 / 3e9


@pytest.mark.parametrize(
    ("maps", "error"), [({"worker1": {0: 1}}, "a GPU's tensor over RPC"), ({}, "only supports CPU tensors by default")]
)
def test_a_gpus_tensor_is_refused(maps: dict[str, dict[int, int]], error: str) -> None:
    """With a device map by name and remedy, without one in torch's words: on a GPU it would go there."""

    def program(rank: int) -> str:
        torch.cuda.set_device(rank)
        if rank == 0:
            try:
                rpc.rpc_sync("worker1", double_and_add, args=(torch.ones(2, device="cuda"), torch.ones(2)))
            except (NotSimulated, RuntimeError) as raised:
                return f"{type(raised).__name__}: {raised}"
        return ""

    def options() -> Any:
        return rpc.TensorPipeRpcBackendOptions(device_maps=maps if os.environ["RANK"] == "0" else {})

    said = workers(program, options=options, on="dgx-h100:1", a_node=2).results[0]
    assert error in said
    assert said.startswith("NotSimulated") == bool(maps)


def test_torch_s_faulty_agent_is_imported_by_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes its classes in C++ at that import, once a process; the ranks share one."""
    registry = rpc.backend_registry  # torch's: a longer enum takes the place of the one that rpc has
    monkeypatch.setattr(registry, "BackendType", registry.BackendType)

    def program(rank: int) -> str:
        testing = importlib.import_module("torch.distributed.rpc._testing")
        assert testing.is_available()
        backend = rpc.backend_registry.BackendType["FAULTY_TENSORPIPE"]
        return str(rpc.backend_registry.backend_registered(backend.name))

    assert workers(program).results == ["True", "True"]
