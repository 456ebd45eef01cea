"""torch.distributed.rpc simulated, beyond torch's own tests of it: references, deadlines, sizes, refusals."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc

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


def test_the_backend_of_a_worker_is_registered() -> None:
    """As in a real job: TensorPipe is known, and a name that nobody registered is not."""

    def program(rank: int) -> list[bool]:
        return [rpc.backend_registry.backend_registered(name) for name in ("TENSORPIPE", "NONE")]

    assert workers(program).results == [[True, False]] * 2
