"""Rows 17 and 18: RPC, references, distributed autograd and its optimizer; each on TensorPipe as on sim."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from conformance.arms import Conform, Place, own_init
from conformance.plain import mine, says
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # both script something
    from torch.distributed.nn.api.remote_module import RemoteModule
    from torch.distributed.optim import DistributedOptimizer


def begin(rank: int, world_size: int, place: Place, **options: Any) -> str:
    """Join; the next worker's name."""
    url = f"file://{place.directory}/rpc"
    given = rpc.TensorPipeRpcBackendOptions(init_method=url, num_worker_threads=8, **options)
    rpc.init_rpc(
        f"w{rank}",
        backend=rpc.BackendType.TENSORPIPE,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=given,
    )
    return f"w{(rank + 1) % world_size}"


def scaled(t: Tensor, by: float = 1.0) -> Tensor:
    return t * by


def fails(text: str, kind: str = "ValueError") -> None:
    raise {"ValueError": ValueError, "KeyError": KeyError, "OSError": OSError}[kind](text)


def who(there: str) -> str:
    """A call from within a call."""
    return f"{rpc.get_worker_info().name} asks {rpc.rpc_sync(there, rpc_name)}"


def rpc_name() -> str:
    return str(rpc.get_worker_info().name)


@rpc.functions.async_execution
def later(there: str, t: Tensor) -> Any:
    return rpc.rpc_async(there, scaled, args=(t, 3.0)).then(lambda done: done.wait() + 1)


class Counter:
    """What a reference refers to."""

    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, n: int) -> int:
        self.value += n
        return self.value


def value_of(rref: Any) -> Any:
    return rref.to_here().value


@own_init
def calls(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """rpc_sync, rpc_async, operators, calls within calls, errors; questions about workers."""
    found: dict[str, Any] = {"available": [rpc.is_available(), rpc.backend_registry.backend_registered("TENSORPIPE")]}
    there = begin(rank, world_size, place, rpc_timeout=30)
    info = rpc.get_worker_info(there)
    found["info"] = [type(info).__name__, info.name, info.id, rpc.get_worker_info().name, rpc.get_rpc_timeout()]
    found["sync"] = rpc.rpc_sync(there, scaled, args=(mine(rank, 3),), kwargs={"by": 2.0})
    futures = [rpc.rpc_async(there, torch.add, args=(mine(rank, 2), i)) for i in range(3)]
    found["async"] = torch.futures.wait_all(futures)
    found["all"] = [f.value() for f in torch.futures.collect_all(futures).wait()]
    found["nested"] = rpc.rpc_sync(there, who, args=(f"w{rank}",))
    found["later"] = rpc.rpc_sync(there, later, args=(f"w{rank}", mine(rank, 2)))
    found["by number"] = rpc.rpc_sync((rank + 1) % world_size, rpc_name)
    found["raises"] = says(rpc.rpc_sync, there, fails, args=("no",)).partition("\n")[0]
    for kind in ("ValueError", "KeyError", "OSError"):
        found[kind] = says(rpc.rpc_sync, there, fails, args=("no", kind)).partition("(id=")[0]
        found[f"{kind} here"] = says(rpc.remote(there, fails, args=("no", kind)).to_here).partition("(id=")[0]
    found["unknown"] = says(rpc.rpc_sync, "nobody", rpc_name).partition("\n")[0]
    found["lambda"] = "pickle" in says(rpc.rpc_sync, there, lambda: 1)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4)
    found["map"] = says(options.set_device_map, "w1", {"cpu": "cpu"})
    found["devices"] = says(options.set_devices, ["cpu"])
    found["options"] = [isinstance(options, rpc.RpcBackendOptions), len(options.device_maps), len(options.devices)]
    found["type"] = [rpc.WorkerInfo.__name__, rpc.PyRRef.__name__, callable(rpc.backend_registry.register_backend)]
    told: list[int] = []
    future: torch.futures.Future[int] = torch.futures.Future()
    future.add_done_callback(lambda done: told.append(done.value()))
    future.set_result(3)
    broken: torch.futures.Future[int] = torch.futures.Future()
    broken.set_exception(OSError("no"))
    found["futures"] = [told, future.done(), says(broken.wait), future.then(lambda done: done.value() + 1).wait()]
    rpc.shutdown(graceful=True)
    return found


@own_init
def references(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """RRef: who owns it, its value, calls on it, passed on."""
    there = begin(rank, world_size, place)
    rref = rpc.remote(there, Counter, args=(10 * rank,))
    found: dict[str, Any] = {
        "owner": [rref.owner().name, rref.owner_name(), rref.is_owner()],
        "sync": rref.rpc_sync().add(1),
        "async": rref.rpc_async().add(2).wait(),
        "remote": rref.remote().add(3).to_here(),
        "here": rref.to_here(timeout=20).value,
        "confirmed": rref.confirmed_by_owner(),
    }
    last = f"w{(rank + 2) % world_size}"
    found["passed on"] = rpc.rpc_sync(last, value_of, args=(rref,))
    own = rpc.RRef(mine(rank, 2))
    found["own"] = [own.is_owner(), own.local_value(), own.to_here(), isinstance(own, rpc.RRef)]
    found["elsewhere"] = "local" in says(rref.local_value).lower()
    made = rpc.remote(there, fails, args=("made",))
    found["failed"] = says(made.to_here).partition("\n")[0]
    weight = torch.ones(2, requires_grad=True)
    rpc.RRef((weight * 3).sum()).backward()
    found["backward"] = weight.grad
    module = RemoteModule(f"{there}/cpu", torch.nn.Linear, args=(2, 1, False))
    found["module"] = [list(module.forward(torch.ones(3, 2)).shape), len(module.remote_parameters())]
    found["module's"] = module.get_module_rref().owner_name()
    rpc.shutdown()
    return found


@own_init
def gradients(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """Distributed autograd over two hops, and the optimizer."""
    there = begin(rank, world_size, place)
    found: dict[str, Any] = {"available": dist_autograd.is_available()}
    weight = rpc.RRef(mine(rank, 2).requires_grad_())
    with dist_autograd.context() as context:
        first = rpc.rpc_sync(there, scaled, args=(weight.local_value(), 2.0))
        loss = rpc.rpc_sync(there, torch.mul, args=(first, first)).sum()
        dist_autograd.backward(context, [loss])
        grads = dist_autograd.get_gradients(context)
        found["grads"] = grads[weight.local_value()]
        DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1).step(context)
    found["after"] = weight.local_value()
    found["no context"] = says(dist_autograd.backward, -5, [loss]).partition("\n")[0]
    rpc.shutdown()
    return found


@own_init
def beside_a_group(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """Process groups beside RPC, and shutdown without waiting."""
    dist.init_process_group("gloo")
    there = begin(rank, world_size, place)
    t = rpc.rpc_sync(there, scaled, args=(mine(rank, 2), 2.0))
    dist.all_reduce(t)
    dist.barrier()
    rpc.shutdown(graceful=False)
    dist.destroy_process_group()
    return {"sum": t, "rank": os.environ["RANK"]}


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("body", [calls, references, gradients, beside_a_group])
def test_rpc(conform: Conform, body: Any) -> None:
    """The same values and errors on TensorPipe and on sim."""
    conform(body)
