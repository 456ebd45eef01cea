"""What torch 2.14 brought for process groups, in a simulation; skipped where torch is older."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import distsim
from distsim.sim.observe.profiler import ProfilerEvent

pytestmark = pytest.mark.skipif(not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="torch has no such hooks")


def run(body: Any, backend: str = "gloo") -> list[Any]:
    """What *body* returned on each of two ranks with GPUs, called with the group and a tensor."""

    def main() -> Any:
        dist.init_process_group(backend)
        on_gpu = "nccl" in backend
        if on_gpu:
            torch.cuda.set_device(dist.get_rank())
        return body(dist.group.WORLD, torch.ones(4, device="cuda" if on_gpu else "cpu"))

    return list(distsim.simulate(main, on="dgx-h100:1", nproc_per_node=2).results)


@pytest.mark.parametrize("backend", ["nccl2", "nccl-lazy", "nccl-legacy", "cpu:gloo,cuda:nccl2"])
def test_backends_of_the_registry_are_nccl(backend: str) -> None:
    """torch's other NCCL backends run the simulated NCCL, and a batch of messages is one kernel there."""

    def body(pg: Any, t: Any) -> Any:
        other, received = 1 - dist.get_rank(), torch.empty_like(t)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, t, other), dist.P2POp(dist.irecv, received, other)]):
            work.wait()
        dist.all_reduce(t)
        return dist.get_backend(), received.tolist()

    assert run(body, backend) == [(backend, [1.0] * 4)] * 2


def deprecated(call: Any, *args: Any) -> Any:
    """The answer of a function that warns of its own end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return call(*args)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_what_no_simulated_group_does_is_refused_by_name(backend: str) -> None:
    """Hooks, gather_single and members that change."""

    def body(pg: Any, t: Any) -> Any:
        errors = []
        for call in (
            lambda: dist.gather_single(t, torch.empty(8, device=t.device) if dist.get_rank() == 0 else None, dst=0),
            lambda: deprecated(dist.gather_into_tensor, t, None if dist.get_rank() else t.repeat(2)),
            lambda: pg.get_reconfigure_handle(),
            lambda: pg.register_pre_hook(1, print),
        ):
            with pytest.raises(distsim.NotSimulated) as raised:
                call()
            errors.append(str(raised.value))
        return errors, pg.supports_window, pg.supports_reconfigure

    errors, *supported = run(body, backend)[0]
    assert supported == [backend == "nccl", False]
    named = ("gather_", "gather_", "get_reconfigure_handle", "register_pre_hook")
    assert all(name in text for name, text in zip(named, errors, strict=True))


def test_a_timeout_that_was_set_is_the_works() -> None:
    """`torch.distributed.set_timeout` changes what a handle says."""
    from datetime import timedelta

    def body(pg: Any, t: Any) -> Any:
        dist.set_timeout(timedelta(seconds=33))
        work = dist.all_reduce(t, async_op=True)
        work.wait()
        return work.timeout.total_seconds()

    assert run(body) == [33.0] * 2


def test_a_group_answers_for_its_backend() -> None:
    """`get_backend_impl` gives what rank and size can be asked of, and asks for a device where there are two."""

    def body(pg: Any, t: Any) -> Any:
        impl = dist.get_backend_impl(device=torch.device("cpu"))
        with pytest.raises(ValueError, match="pass the device"):
            dist.get_backend_impl()
        return impl.rank(), impl.size()

    assert run(body, "cpu:gloo,cuda:nccl") == [(0, 2), (1, 2)]


@pytest.mark.skipif(not hasattr(DeviceMesh, "abort"), reason="torch has no DeviceMesh.abort (2.15)")
def test_a_mesh_is_aborted() -> None:
    """Its groups are gone, and torch refuses what is asked of them."""

    def body(pg: Any, t: Any) -> Any:
        mesh = init_device_mesh("cuda", (2,))
        group = mesh.get_group()
        mesh.abort()
        with pytest.raises(ValueError, match=r"[Pp]rocess group"):
            dist.get_backend(group)
        return True

    assert run(body, "nccl") == [True, True]


def test_a_recorder_that_torch_attaches_itself_is_not_noted() -> None:
    """From 2.15 on every group of NCCL has torch's Flight Recorder: only a program that asks for it reads of it."""

    def main() -> None:
        dist.init_process_group("nccl")

    assert "FlightRecorder" not in "".join(distsim.simulate(main, nproc_per_node=1).notes)


def test_torchs_nan_check_is_named_in_a_note() -> None:
    """TORCH_DIST_NAN_CHECK attaches a hook that a simulation never calls: the report says so."""

    def main() -> None:
        os.environ["TORCH_DIST_NAN_CHECK"] = "1"
        dist.init_process_group("gloo")

    outcome = distsim.simulate(main, nproc_per_node=1)
    assert any("NanCheckHook" in note for note in outcome.notes)


def test_a_profilers_event_answers_what_a_newer_torch_asks() -> None:
    """A question of torch's own event class that the simulator does not know has an empty answer, any other none."""
    event = ProfilerEvent(1, "aten::add", 0.0, 1.0)
    assert all(not callable(getattr(event, name)()) for name in dir(torch._C._autograd._KinetoEvent) if name[0] != "_")
    with pytest.raises(AttributeError):
        _ = event.no_such_question


@pytest.mark.skipif(torch.__version__ < (2, 15), reason="gloo splits from torch 2.15 on")
def test_splitting_is_refused_by_name() -> None:
    """torch would say that gloo does not support it."""

    def body(pg: Any, t: Any) -> str:
        with pytest.raises(distsim.NotSimulated, match="split_group"):
            dist.split_group(split_ranks=[[0], [1]])
        return "refused"

    assert run(body) == ["refused", "refused"]
