"""torch's own wrappers and strategies run on simulated GPUs as they are."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distsim

PROGRAMS: dict[str, Callable[[int, str], Any]] = {}


def program(fn: Callable[[int, str], Any]) -> Callable[[int, str], Any]:
    PROGRAMS[fn.__name__] = fn
    return fn


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()


def batch() -> torch.Tensor:
    return torch.randn(4, 64, device="cuda")


@program
def fsdp1(rank: int, folder: str) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    wrapped = FullyShardedDataParallel(model(), device_id=rank, mixed_precision=low, use_orig_params=True)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    for _ in range(2):
        wrapped(batch()).sum().backward()
        wrapped.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


@program
def fsdp2_and_a_checkpoint(rank: int, folder: str) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    sharded = model()
    fully_shard(sharded)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    sharded(batch()).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(sharded, optimizer)
    dcp.save({"weights": weights, "moments": moments}, checkpoint_id=f"{folder}/now")
    dcp.load({"weights": weights, "moments": moments}, checkpoint_id=f"{folder}/now")
    set_state_dict(sharded, optimizer, model_state_dict=weights, optim_state_dict=moments)
    dcp.async_save({"weights": model().state_dict()}, checkpoint_id=f"{folder}/later").result()


@program
def synchronized_batch_norm(rank: int, folder: str) -> Any:
    net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).cuda()
    ddp = nn.parallel.DistributedDataParallel(net, device_ids=[rank])
    ddp(torch.randn(2, 3, 8, 8, device="cuda")).sum().backward()


@program
def default_device(rank: int, folder: str) -> Any:
    """torch.set_default_device also stands over what torch's own code, and ours, makes within a call."""
    torch.set_default_device("cuda")
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    torch.nn.functional.cross_entropy(ddp(torch.randn(3, 8)), torch.randint(0, 4, (3,))).backward()
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, rank)
    assert everyone == [0, 1]


@program
def tensors_in_objects(rank: int, folder: str) -> Any:
    """A pickled CUDA tensor arrives with its values, and on the GPU that it left."""
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, {"mine": torch.arange(3, device="cuda") + rank})
    assert [one["mine"].tolist() for one in everyone] == [[0, 1, 2], [1, 2, 3]]
    assert [one["mine"].device.index for one in everyone] == [0, 1]


@program
def zero_redundancy(rank: int, folder: str) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = nn.parallel.DistributedDataParallel(model(), device_ids=[rank])
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.1)
    ddp(batch()).sum().backward()
    optimizer.step()


@program
def compressed_gradients(rank: int, folder: str) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    ddp = nn.parallel.DistributedDataParallel(
        model(), device_ids=[rank], static_graph=True, gradient_as_bucket_view=True
    )
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    for _ in range(3):
        ddp(batch()).sum().backward()


@program
def tensor_parallel(rank: int, folder: str) -> Any:
    from torch.distributed import tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (2,))
    cut = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    cut(batch()).sum().backward()
    drawn = tensor.rand(4, 4, device_mesh=mesh, placements=[tensor.Shard(0)]).full_tensor()
    numbers = tensor.distribute_tensor(torch.arange(8.0, device="cuda"), mesh, [tensor.Shard(0)])
    return tuple(drawn.shape), numbers.full_tensor().tolist(), numbers.to_local().tolist()


@program
def own_generator(rank: int, folder: str) -> Any:
    """A generator that a program hands to the draws of a DTensor, as OLMo-core does for its weights."""
    from torch.distributed import tensor
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda", (2,))
    weight = tensor.distribute_tensor(torch.zeros(4, 4, device="cuda"), mesh, [tensor.Shard(0)])
    generator = torch.Generator("cuda").manual_seed(3)
    weight.normal_(generator=generator)
    return generator.initial_seed(), int(generator.get_state()[8:].view(torch.int64))


@program
def pipeline(rank: int, folder: str) -> Any:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(nn.Linear(64, 64).cuda(), rank, 2, torch.device("cuda", rank))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).pow(2).mean())
    x = torch.randn(8, 64, device="cuda")
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x, losses=[])


@program
def context_parallel(rank: int, folder: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as cut

    mesh = init_device_mesh("cuda", (2,))
    q, k, v = (torch.randn(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with cut(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2], no_restore_buffers={q, k, v}):
        return tuple(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).shape)


@program
def objects(rank: int, folder: str) -> Any:
    import torch.distributed as dist

    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": rank})
    return found


EXPECTED = {
    "tensor_parallel": [((4, 4), [float(i) for i in range(8)], [float(4 * r + i) for i in range(4)]) for r in range(2)],
    "own_generator": [(3, 16)] * 2,
    "context_parallel": [(1, 4, 128, 64)] * 2,
    "objects": [[{"rank": 0}, {"rank": 1}]] * 2,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every program returned at each of two ranks, in one simulated job."""
    folder: Path = tmp_path_factory.mktemp("checkpoints")

    def body() -> dict[str, Any]:
        import torch.distributed as dist

        dist.init_process_group("cpu:gloo,cuda:nccl")
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        results: dict[str, Any] = {}
        for name, run in PROGRAMS.items():
            try:
                results[name] = run(rank, str(folder))
            except Exception:
                results[name] = traceback.format_exc()
        dist.destroy_process_group()
        return results

    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2)
    assert not outcome.diagnoses
    return list(outcome.results)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_strategy(found: list[dict[str, Any]], name: str) -> None:
    """It runs to its end on both ranks, and what is known of its values is right."""
    assert [one[name] for one in found] == EXPECTED.get(name, [None, None])
