"""Symmetric memory of simulated GPUs: what its operators compute, how long they take, and who is missing in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distsim
from distsim.cluster import load_cluster
from distsim.collectives import SYMMETRIC, Transfer, compiler_of
from distsim.debug.records.kinds import Kind
from distsim.errors import DistsimError

ELEMENTS = 1 << 20


def _begin() -> tuple[Any, Any, str, int]:
    """Return torch's module, its operators, the default group's name, and the rank."""
    from torch.distributed import _symmetric_memory

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return _symmetric_memory, torch.ops.symm_mem, dist.group.WORLD.group_name, rank


def _simulate(body: Any, on: str = "dgx-h100:1", nproc: int = 4) -> Any:
    return distsim.simulate(body, on=on, nproc_per_node=nproc)


def _timed(call: Callable[[], Any]) -> float:
    """Seconds of the second *call*: the first may make a workspace."""
    call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def test_operators_reduce_and_gather_values() -> None:
    """Where few values are known they come out as torch's kernels would write them."""

    def body() -> Any:
        memory, ops, name, rank = _begin()
        shared = memory.empty(4, device="cuda").fill_(float(rank))
        handle = memory.rendezvous(shared, dist.group.WORLD)
        one = ops.one_shot_all_reduce(shared, "sum", name)
        still = shared.tolist()
        copied = ops.one_shot_all_reduce_copy(shared, torch.ones(4, device="cuda"), "sum", name)
        two = ops.two_shot_all_reduce_(shared, "sum", name)
        whole = memory.empty(8, device="cuda")
        ops.multimem_all_gather_out(torch.full((2,), float(rank), device="cuda"), name, whole)
        part = torch.empty(1, device="cuda")
        ops.reduce_scatter_out(shared, name, False, part)
        return (
            (handle.rank, handle.world_size, handle.buffer_size),
            [tensor.tolist() for tensor in (one, copied, two, shared, whole, part)],
            still,
            memory.is_symm_mem_tensor(shared),
            memory.is_symm_mem_tensor(one),
        )

    gathered = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    for rank, (handle, values, still, symmetric, plain) in enumerate(_simulate(body).results):
        assert handle == (rank, 4, 16)
        assert values == [[6.0] * 4, [4.0] * 4, [6.0] * 4, [6.0] * 4, gathered, [24.0]]
        assert (still, symmetric, plain) == ([float(rank)] * 4, True, False)


def test_the_own_buffer_is_the_tensor_and_a_peers_has_no_values() -> None:
    """`get_buffer` of the own rank shares memory; a copy of a peer's takes as long as its bytes on NVLink."""

    def body() -> Any:
        memory, _, _, rank = _begin()
        shared = memory.empty(ELEMENTS, dtype=torch.bfloat16, device="cuda")
        handle = memory.rendezvous(shared, dist.group.WORLD)
        own = handle.get_buffer(rank, (8, 4), torch.bfloat16, 32)
        before = torch.cuda.memory_allocated()
        peer = handle.get_remote_tensor((rank + 1) % 4, shared.shape, shared.dtype)
        same = own.data_ptr() - shared.data_ptr(), torch.cuda.memory_allocated() - before
        target = torch.empty_like(shared)
        return same, _timed(lambda: target.copy_(peer)), _timed(lambda: target.copy_(shared))

    rate = load_cluster("dgx-h100:1").node.nvlink_bytes_per_s
    for same, remote_s, local_s in _simulate(body).results:
        assert same == (64, 0)
        assert 2 * ELEMENTS / rate < remote_s < 2 * ELEMENTS / rate + 20e-6
        assert local_s < remote_s


def test_all_reduce_takes_the_time_of_its_rounds_and_bytes() -> None:
    """One shot moves every peer's whole buffer, two shots a share twice, multimem one copy through the switch."""
    cluster = load_cluster("dgx-h100:1")
    devices = tuple(slot.device for slot in cluster.place(1, 8))
    compiler = compiler_of(cluster)

    def seconds(algo: str, nbytes: int) -> float:
        plan = compiler.compile(Transfer("all_reduce", algo, devices, nbytes))
        return float(plan.alone_s(compiler.links.capacity))

    rate = cluster.node.nvlink_bytes_per_s
    one, two, multimem = (seconds(algo, 1 << 28) for algo in SYMMETRIC)
    assert one == pytest.approx(7 * (1 << 28) / rate, rel=0.02)
    assert two == pytest.approx(2 * 7 / 8 * (1 << 28) / rate, rel=0.02)
    assert multimem < seconds("nccl", 1 << 28) < two  # NCCL's NVLS, too, reduces in the switch
    one, two, multimem = (seconds(algo, 1 << 10) for algo in SYMMETRIC)
    assert one < two < seconds("nccl", 1 << 10)
    assert one < 0.5 * seconds("nccl", 1 << 10)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fused_products_hide_their_communication() -> None:
    """torch's own pipeline runs: nearly as long as the product alone, and never as long as one after the other."""

    def body() -> Any:
        _, ops, name, _ = _begin()
        shard = torch.empty(1024, 8192, dtype=torch.bfloat16, device="cuda")
        whole, weight = shard.new_empty(4096, 8192), shard.new_empty(8192, 7168)
        wide, out = shard.new_empty(8192, 8192), shard.new_empty(1024, 8192)

        def gather() -> Any:
            dist.all_gather_into_tensor(whole, shard)
            return whole @ weight

        def scatter() -> None:
            dist.reduce_scatter_tensor(out, whole @ wide)

        (gathered, (product,)) = ops.fused_all_gather_matmul(shard, [weight], 0, name)
        scattered = ops.fused_matmul_reduce_scatter(whole, wide, "sum", 0, name)
        return (
            [tuple(tensor.shape) for tensor in (gathered, product, scattered)],
            [_timed(call) for call in (lambda: whole @ weight, gather, lambda: whole @ wide, scatter)],
            _timed(lambda: ops.fused_all_gather_matmul(shard, [weight], 0, name)),
            _timed(lambda: ops.fused_matmul_reduce_scatter(whole, wide, "sum", 0, name)),
        )

    outcome = _simulate(body)
    assert not outcome.diagnoses
    for shapes, (alone_s, apart_s, other_alone_s, other_apart_s), fused_s, other_s in outcome.results:
        assert shapes == [(4096, 8192), (4096, 7168), (1024, 8192)]
        assert alone_s < fused_s < 0.95 * apart_s
        assert other_alone_s < other_s < other_apart_s


def test_a_rank_that_leaves_out_a_barrier_is_named() -> None:
    """The barrier of a handle is a call like others; those of another channel are matched apart."""

    def body() -> None:
        memory, _, _, rank = _begin()
        handle = memory.rendezvous(memory.empty(8, device="cuda"), dist.group.WORLD)
        handle.barrier(channel=1)
        if rank != 2:
            handle.barrier(channel=0)
        torch.cuda.synchronize()

    (diagnosis,) = _simulate(body).diagnoses
    assert diagnosis.kind is Kind.MISSING_RANK
    assert diagnosis.culprits == (2,)
    assert "symmetric memory" in diagnosis.group.label


def test_what_torch_refuses_and_what_is_not_simulated_is_one_line() -> None:
    """Memory that is not symmetric, another reduction, signals, pools, NVSHMEM's operators, another backend."""

    def body() -> Any:
        memory, ops, name, _ = _begin()
        shared = memory.empty(8, device="cuda")
        handle = memory.rendezvous(shared, dist.group.WORLD)
        answers = []
        for call in (
            lambda: ops.one_shot_all_reduce(torch.ones(8, device="cuda"), "sum", name),
            lambda: ops.one_shot_all_reduce(shared, "avg", name),
            lambda: handle.get_buffer(0, (9,), torch.float32),
            lambda: handle.get_signal_pad(0),
            lambda: memory.get_mem_pool("cuda"),
            lambda: ops.nvshmem_put(shared, 0),
            lambda: memory.set_backend("NVSHMEM"),
        ):
            with pytest.raises((RuntimeError, DistsimError)) as raised:
                call()
            answers.append(str(raised.value).partition("\n")[0])
        return answers

    for answers in _simulate(body, nproc=2).results:
        assert "must be allocated with empty_strided_p2p" in answers[0]
        assert "only sum is supported" in answers[1]
        assert "exceeds the allocated size (32 bytes)" in answers[2]
        assert all("is not simulated: " in answer for answer in answers[3:]), answers


def test_a_group_across_nodes_is_refused_by_name() -> None:
    """NVLink ends at the node."""

    def body() -> str:
        memory, *_ = _begin()
        with pytest.raises(DistsimError) as raised:
            memory.rendezvous(memory.empty(8, device="cuda"), dist.group.WORLD)
        return str(raised.value)

    for answer in _simulate(body, on="dgx-h100:2", nproc=1).results:
        assert "several NVLink domains" in answer


def test_async_tp_of_the_compiler_is_said_not_to_be_simulated() -> None:
    """Inductor's pass would replace collectives by fused operators; here they stay, and a note says so."""

    def body(pipelined: bool) -> None:
        from torch._inductor import config

        _begin()
        config._micro_pipeline_tp = pipelined
        torch.compile(torch.nn.Linear(8, 8).cuda())(torch.ones(8, 8, device="cuda"))

    for pipelined in (False, True):
        notes = _simulate(lambda p=pipelined: body(p), nproc=2).notes
        assert any("fused_all_gather_matmul" in note for note in notes) == pipelined
