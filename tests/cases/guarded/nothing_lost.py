"""Complex numbers, views, modes, the profiler, torch.compile, non-members and wrong arguments act as in torch.

ranks: 2
kind: caught
guard: check, strict
"""

import atexit
import gc
import threading
import weakref
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed import all_reduce
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode

from tests.cases.releases import ASKS_MODES

dist.init_process_group("gloo")
world = dist.get_world_size()


class Watching(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        called.append(function.__name__)
        return function(*args, **(kwargs or {}))


def all_at_one_line(makers, contexts=()):
    for at, maker in enumerate(makers):
        tensor = maker()
        with contexts[at] if contexts else nullcontext():
            all_reduce(tensor)
        yield tensor


def one():
    return torch.ones(2)


def sums(*makers):
    return [tensor.sum().item() for tensor in all_at_one_line(makers)]


sum_of_a_negated_view = -2  # torch sums up a copy of it

assert sums(one, one, one) == [2 * world] * 3
turned = lambda: torch.ones(2, dtype=torch.complex64) * 1j
assert sums(one, one, turned, turned, turned, one) == [2 * world] * 2 + [2j * world] * 3 + [2 * world]
square, negated = lambda: torch.ones(2, 2), lambda: torch._neg_view(torch.ones(2))
parameter = lambda: torch.nn.Parameter(square(), False)
assert sums(square, square, lambda: square().t(), parameter, square) == [4 * world] * 5
assert sums(one, one, negated, negated) == [2 * world] * 2 + [sum_of_a_negated_view] * 2

counted, called = CommDebugMode(), []
list(all_at_one_line([one] * 4, [nullcontext(), nullcontext(), counted, nullcontext()]))
assert counted.get_total_counts() == 1, counted.get_comm_counts()
list(all_at_one_line([one] * 4, [nullcontext(), nullcontext(), Watching(), nullcontext()]))
assert "all_reduce" in called or not ASKS_MODES, called
profile = torch.profiler.profile()
list(all_at_one_line([one] * 4, [nullcontext(), nullcontext(), profile, nullcontext()]))
assert any(event.name == "c10d::allreduce_" for event in profile.events()), profile.events()

compiled = torch.compile(lambda tensor: (all_reduce(tensor), tensor)[1], backend="eager")
for _ in range(3):
    assert compiled(one()).tolist() == [world, world]


@torch.compile(backend="eager")
def broken(tensor):  # a compiled function that dynamo leaves for each of the calls, and enters again from inside them
    dist.all_reduce(tensor, async_op=True).wait()
    dist.barrier()
    return tensor + 1


for _ in range(3):
    assert broken(one()).tolist() == [world + 1] * 2
group = dist.new_group([0])
for _ in range(3):
    dist.all_reduce(torch.ones(2), group=group)  # on rank 1 a warning, and nothing else
for argument in (torch.ones(2), torch.ones(2), "text"):
    try:
        dist.all_reduce(argument)
    except TypeError as error:
        assert argument == "text" and "tensor" in str(error), error

kept = []
for _ in range(2):
    for gather in (False, False, True):
        tensor = torch.ones(3)
        kept.append(weakref.ref(tensor))
        dist.all_gather([torch.ones(3)] * world, tensor) if gather else dist.all_reduce(tensor)
        del tensor
gc.collect()
assert not any(ref() is not None for ref in kept), "a tensor is kept alive"


def in_turn(number):  # the same line from another thread: a record says which one
    for _ in range(3):
        dist.all_reduce(torch.ones(5))


for number in range(2):
    thread = threading.Thread(target=in_turn, args=(number,))
    thread.start()
    thread.join()
atexit.register(dist.destroy_process_group)
atexit.register(dist.all_reduce, torch.ones(2))  # no frame of Python's calls it
