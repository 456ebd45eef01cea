"""Functional collectives: they are counted and priced, and a result that is read too early is reported."""

from __future__ import annotations

import pytest
from sim.running import HEAD, Scripts

BEGIN = (
    HEAD
    + """
import torch.distributed._functional_collectives as funcol
world = dist.group.WORLD
raw = torch.ops._c10d_functional
right = 0
for _ in range(5):
    x = torch.full((1 << 20,), float(rank + 1))
    {call}
    right += int(bool((y == 3).all()))
print(right)
dist.destroy_process_group()
"""
)
UNWAITED = {
    "all_reduce": 'y = raw.all_reduce(x, "sum", world.group_name)',
    "all_reduce_": 'y = raw.all_reduce_(x, "sum", world.group_name)',
    "broadcast": "y = raw.broadcast(x + 2 * (rank == 0), 0, world.group_name)",
}
HEALTHY = {
    "wait_tensor": 'y = raw.wait_tensor(raw.all_reduce(x, "sum", world.group_name))',
    "the result waits when it is read": 'y = funcol.all_reduce(x, "sum", world)',
    "only rank 0 reads it": 'y = funcol.all_reduce(x, "sum", world); y = y if rank == 0 else x + 1',
    "its own wait": 'y = funcol.all_reduce(x, "sum", world).wait()',
    "wait_tensor of the module": 'y = funcol.wait_tensor(funcol.all_reduce(x, "sum", world))',
}
DTENSOR = (
    HEAD
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (size,))
parts = DTensor.from_local(torch.ones(8), mesh, [Partial()])
unused = parts.redistribute(mesh, [Replicate()])
print(parts.redistribute(mesh, [Shard(0)]).full_tensor().sum().item())
model = torch.nn.Linear(8, 8)
fully_shard(model, mesh=mesh)
model(torch.ones(2, 8)).sum().backward()
"""
)


@pytest.mark.parametrize("call", UNWAITED)
def test_result_that_is_not_waited_for(script: Scripts, call: str) -> None:
    """The values are not there, the calls are counted with their time, and the cure is wait_tensor."""
    ran = script(BEGIN.replace("{call}", UNWAITED[call]))
    assert ran.of(1) == ["0"]
    assert ran.kinds == ["async_never_waited"]
    assert "wait_tensor()" in ran.outcome.diagnoses[0].suggestion
    assert "async_op" not in ran.outcome.diagnoses[0].suggestion
    usage = [row for row in ran.outcome.collectives if row.op != "barrier"]
    assert [row.count for row in usage] == [5]
    assert usage[0].time_s > 0
    assert ran.outcome.exit_code == 0


@pytest.mark.parametrize("call", HEALTHY)
def test_result_that_is_waited_for(script: Scripts, call: str) -> None:
    """A program that waits in any of the ways is not warned."""
    ran = script(BEGIN.replace("{call}", HEALTHY[call]))
    assert (ran.of(0), ran.kinds) == (["5"], [])


def test_results_that_torch_drops(script: Scripts) -> None:
    """DTensor and FSDP2 wait for what is read, and a result that no one reads is theirs to drop."""
    ran = script(DTENSOR)
    assert (ran.of(0), ran.kinds) == (["16.0"], [])


def test_handle_in_a_file_with_functional_calls(script: Scripts) -> None:
    """A handle that is left alone has its own cure, also beside functional collectives."""
    ran = script(
        HEAD
        + """
import torch.distributed._functional_collectives as funcol
print(funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD).sum().item())
dist.all_reduce(
    torch.ones(2),
    async_op=True,
)
"""
    )
    assert ran.kinds == ["async_never_waited"]
    assert "Keep the handle" in ran.outcome.diagnoses[0].suggestion
