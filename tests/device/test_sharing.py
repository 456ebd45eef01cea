"""What kernels take from each other on one GPU, and the order of a communicator's kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import simpy
import torch

import distsim
from distsim.kernels import Gpu
from distsim.sim import RunRequest, run_program
from distsim.sim.c10d.communicator import Communicator
from distsim.sim.device.timeline import Comm, Kernel, Load, Timeline


def took_s(
    load: Load | None, *, memory_bound: bool, peers_come_s: float = 0.0, kind: str = "", gpu: str = "a100-80gb"
) -> float:
    """What a kernel of one second takes beside a communication kernel that is there all the time."""
    env = simpy.Environment()
    timeline = Timeline(env, persistent_products=Gpu.named(gpu).spec.gemm.persistent)
    if load is not None:
        comm = Comm(0.0, load, lambda _: None, waits=peers_come_s > 0.0)
        timeline.put(timeline.stream("nccl"), comm)
        env.timeout(peers_come_s).callbacks.append(lambda _: timeline.meet(comm))  # type: ignore[union-attr]
    kernel = Kernel(1.0, 0.0, memory_bound, kind=kind)
    stream = timeline.stream("default")
    timeline.put(stream, kernel)
    timeline.when_reached(timeline.mark(stream, 0.0), lambda: None)
    env.run()
    assert kernel.begun_s is not None
    assert kernel.ended_s is not None
    return kernel.ended_s - kernel.begun_s


@pytest.mark.parametrize(
    ("kinds", "seconds"),
    [
        (("gemm", "h2d"), (1.0, 1.0)),
        (("gemm", "d2h", "h2d"), (1.0, 1.0, 1.0)),
        (("h2d", "h2d"), (2.0, 2.0)),
        (("gemm", "elementwise", "d2h"), (2.0, 2.0, 1.0)),
        (("gemm", "peer"), (1.0, 1.0)),
        (("peer", "peer", "h2d"), (1.0, 1.0, 1.0)),
    ],
    ids=str,
)
def test_a_copy_over_pcie_runs_on_the_engine_of_its_direction(kinds: Any, seconds: tuple[float, ...]) -> None:
    """Copies of one direction share the link, and kernels share the SMs; neither slows the other. Copies of a peer's
    memory slow nothing."""
    env = simpy.Environment()
    timeline = Timeline(env)
    kernels = [Kernel(1.0, 0.0, kind=kind) for kind in kinds]
    for kernel in kernels:
        timeline.put(timeline.stream(kernel.kind), kernel)
    timeline.catch_up()
    timeline.close()
    assert tuple(kernel.ended_s for kernel in kernels) == pytest.approx(seconds)


def test_communication_takes_multiprocessors_and_bandwidth() -> None:
    """A kernel that memory limits is slowed by all of the bandwidth that is taken, one that computes by less of it,
    both by the multiprocessors; alone neither is."""
    load = Load(multiprocessors=0.25, memory_bandwidth=0.4)
    assert took_s(None, memory_bound=True) == pytest.approx(1.0)
    assert took_s(load, memory_bound=True) == pytest.approx(1 / (0.75 * 0.6))
    assert 1 / 0.75 < took_s(load, memory_bound=False) < took_s(load, memory_bound=True)


def test_communication_that_waits_takes_multiprocessors_only() -> None:
    """Until its peers come it polls flags: from then on it takes bandwidth as well."""
    load = Load(multiprocessors=0.25, memory_bandwidth=0.4)
    assert took_s(load, memory_bound=True, peers_come_s=2.0) == pytest.approx(1 / 0.75)
    # Three quarters are done after a second, the last quarter at 0.75 * 0.6 of the speed.
    assert took_s(load, memory_bound=True, peers_come_s=1.0) == pytest.approx(1.0 + 0.25 / (0.75 * 0.6))


def test_kernels_beside_an_all_gather_on_an_a100() -> None:
    """NVIDIA/nccl issue 1428: beside an all_gather at 300 GB/s a product takes 1.76 times as long, attention 1.83,
    elementwise kernels 2.5 times."""
    load = Load(*Gpu.named("a100-80gb").comm_load(24, 300e9))
    assert took_s(load, memory_bound=False) == pytest.approx(1.8, rel=0.1)
    assert took_s(load, memory_bound=True) == pytest.approx(2.5, rel=0.1)


@pytest.mark.parametrize(("gpu", "times"), [("h100", 2.0), ("a100-80gb", 1 / (1 - 16 / 108))])
def test_a_persistent_product_takes_twice_as_long_beside_a_collective(gpu: str, times: float) -> None:
    """Its blocks that find no SM begin when the others have ended. A product with a block for each tile loses what is
    taken, as other kernels do, and as products do beside messages."""
    model = Gpu.named(gpu)
    taken = model.comm_load(16, 0.0)
    collective, messages = Load(*taken, of_collective=True), Load(*taken)
    lost = pytest.approx(1 / (1 - 16 / model.multiprocessors))
    assert took_s(collective, memory_bound=False, kind="gemm", gpu=gpu) == pytest.approx(times)
    assert took_s(messages, memory_bound=False, kind="gemm", gpu=gpu) == lost
    assert took_s(collective, memory_bound=False, kind="attention", gpu=gpu) == lost
    assert took_s(collective, memory_bound=True, kind="gemm", gpu=gpu) == lost


def rate(hosts: str, nic: float = 50.0, num_nics: int = 4, nvlink: float = 450.0) -> float:
    """Of a group with a rank on each host named, a letter each."""
    node = SimpleNamespace(nvlink_bytes_per_s=nvlink, pcie_bytes_per_s=55.0, nic_bytes_per_s=nic, num_nics=num_nics)
    world: Any = SimpleNamespace(
        slot_of=lambda rank: SimpleNamespace(host=hosts[rank]),
        facts=SimpleNamespace(cluster=SimpleNamespace(node=node)),
        traced=SimpleNamespace(standing_for=lambda group: None),
    )
    group: Any = SimpleNamespace(name="0", ranks=tuple(range(len(hosts))))
    return Communicator(world, group, "nccl").rate_bytes_per_s


def test_between_nodes_a_gpu_moves_what_the_nics_bring() -> None:
    """Inside a node NVLink is the limit, PCIe where there is none; between nodes all NICs that the group's GPUs of a
    node use, but no more than goes over NVLink."""
    assert rate("aaaa") == 450.0
    assert rate("aa", nvlink=0.0) == 55.0
    assert rate("ab") == 50.0
    assert rate("aabb") == 100.0
    assert rate("aaaaaaaabbbbbbbb") == 200.0
    assert rate("aaaaaaaabbbbbbbb", num_nics=16, nic=100.0) == 450.0


def orders(second_group: bool) -> list[float]:
    """Milliseconds after which two all_reduces have ended: one behind a long product, then one of another stream."""

    def body() -> Any:
        import torch.distributed as dist

        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        other = dist.new_group() if second_group else dist.group.WORLD
        long, small = torch.ones(16384, 16384, device="cuda"), torch.ones(1024, device="cuda")
        begin, ends = torch.cuda.Event(enable_timing=True), []
        begin.record()
        for tensor, group in ((long, dist.group.WORLD), (small, other)):
            stream = torch.cuda.Stream()
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                if tensor is long:
                    long @ long
                dist.all_reduce(tensor, group=group)
                end = torch.cuda.Event(enable_timing=True)
                end.record()
                ends.append(end)
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for end in ends]

    found: list[float] = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2).results[0]
    return found


def test_kernels_of_a_communicator_run_in_the_order_of_their_launch() -> None:
    """An all_reduce in a stream of its own waits for the one that was launched before it on the same communicator, as
    in NCCL; one of another group does not."""
    first, second = orders(second_group=False)
    assert second > first
    first, second = orders(second_group=True)
    assert second < first / 2


PIPELINE = """
import os
import sys
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

rank, chunks = int(os.environ["RANK"]), int(sys.argv[1])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
stages = []
for chunk in range(chunks):
    with device:  # on the host each rank would draw half a billion numbers
        layers = [nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16) for _ in range(8 // chunks)]
    module = nn.Sequential(*layers)
    stages.append(PipelineStage(module, chunk * 4 + rank, 4 * chunks, device))
schedule = Schedule1F1B if chunks == 1 else ScheduleInterleaved1F1B
pipeline = schedule(stages[0] if chunks == 1 else stages, 8, loss_fn=lambda y, _: y.sum())
x = torch.empty(8 * 4096, 8192, device=device, dtype=torch.bfloat16)
for _ in range(2):
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    pipeline.step(*([x] if rank == 0 else []), **({"target": x} if rank == 3 else {}))
    torch.cuda.synchronize()
if rank == 3:
    print("seconds of a step:", time.perf_counter() - began_s)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own
def test_an_interleaved_pipeline_is_quicker(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Four stages, eight micro-batches, torch's schedules: 3/11 of 1F1B is a bubble, 3/19 of two chunks a rank, so that
    the step takes 0.86 of the time; messages, of which there are twice as many, take some of the gain."""
    program = tmp_path / "program.py"
    program.write_text(PIPELINE)
    steps_s = []
    for chunks in ("1", "2"):
        request = RunRequest(program=str(program), args=(chunks,), on="dgx-h100:1", nproc_per_node=4)
        assert run_program(request).exit_code == 0
        (line,) = [line for line in capfd.readouterr().out.splitlines() if "seconds of a step:" in line]
        steps_s.append(float(line.rpartition(" ")[2]))
    assert 0.84 < steps_s[1] / steps_s[0] < 0.92
