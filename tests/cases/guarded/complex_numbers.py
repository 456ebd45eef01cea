"""A conjugate view arrives conjugated; a block of complex numbers is summed up, and refused where torch refuses it.

ranks: 2
kind: healthy
guard: check
"""

from torch.distributed.distributed_c10d import _coalescing_manager

from tests.cases.begin import dist, rank, torch

rank, group = rank, dist.group.WORLD
for number in range(5):  # what the long way sends, the short way sends
    sent, got = (torch.ones(2, dtype=torch.complex64) * (1 + 2j)).conj(), torch.zeros(2, dtype=torch.complex64)
    if rank == 0:
        group.send([sent], 1, 0).wait()
    else:
        group.recv([got], 0, 0).wait()
        assert got.tolist() == [1 - 2j] * 2, (number, got)
for number in range(5):
    one, more = torch.ones(2, dtype=torch.complex64) * 1j, torch.ones(3)
    with _coalescing_manager():
        dist.all_reduce(one)
    with _coalescing_manager():
        dist.all_reduce(more)
    assert one.tolist() == [2j] * 2 and more.tolist() == [2] * 3, (number, one, more)
try:
    with _coalescing_manager():
        dist.all_reduce(one, op=dist.ReduceOp.MAX)  # of complex numbers there is none
except ValueError as error:
    assert "complex" in str(error), error
    dist.distributed_c10d._world.pg_coalesce_state.clear()
else:
    raise AssertionError("no error")
dist.destroy_process_group()
