"""Callbacks that wait for further calls, for a later call's callback, or after a refusal hold up nothing.

ranks: 2
kind: caught
guard: strict
prints: refused True
"""

import faulthandler

from tests.cases.begin import dist, rank, torch

faulthandler.dump_traceback_later(25, exit=True)  # a deadlock is to fail the test, not to hang it


def summed(tensor):
    return dist.all_reduce(tensor, async_op=True).get_future()


def deeper(left):
    def callback(future):
        tensor = future.value()[0]
        return summed(tensor).then(deeper(left - 1)).wait() if left else tensor

    return callback


assert summed(torch.ones(2)).then(deeper(6)).wait()[0] == 2**7

for _ in range(20):
    first, second = summed(torch.ones(2)), summed(torch.ones(3))
    after = second.then(lambda future: future.value()[0])
    assert first.then(lambda _: after.wait()).wait().tolist() == [2, 2, 2]

handle = dist.all_reduce(torch.ones(2 + rank), async_op=True)
refused = handle.get_future().then(lambda future: (summed(torch.ones(1)).wait(), future.value())[1])
try:
    refused.wait()
except RuntimeError as error:
    print("refused", "shape_mismatch" in str(error))
dist.barrier()
dist.destroy_process_group()
