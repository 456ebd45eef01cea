"""Arguments that equal good ones, or cannot be compared: torch refuses them in its own words, known line or not.

ranks: 2
kind: healthy
guard: check, strict
"""

import inspect
import warnings
from datetime import timedelta

import numpy

from tests.cases.begin import dist, rank, torch

warnings.simplefilter("ignore")
rank, ones, SUM = rank, torch.ones, dist.ReduceOp.SUM
ARGUMENTS = "incompatible function arguments"


def split(sizes):
    dist.all_to_all_single(ones(4), ones(4), sizes, sizes)


def sent(tag):
    dist.recv(ones(4), 0, tag=tag) if rank else dist.send(ones(4), 1, tag=tag)


def posted(tag):
    (dist.irecv(ones(4), 0, tag=tag) if rank else dist.isend(ones(4), 1, tag=tag)).wait()


def through_vmap(tensor):
    def summed(one):
        dist.all_reduce(one)
        return one

    summed(tensor) if tensor.dim() == 1 else torch.vmap(summed)(tensor)


many = numpy.array([1, 2])
quantized = torch.quantize_per_tensor(ones(4), 0.1, 0, torch.quint8)
timed = (lambda timeout: dist.barrier(timeout=timeout), timedelta(seconds=60), [many, 5], [None])
for call, good, refused, allowed in (
    (lambda src: dist.broadcast(ones(4), src=src), 0, [0.0, "x"], [False, numpy.int64(0)]),
    (lambda src: dist.broadcast(ones(4), group_src=src), 0, [0.0], []),
    (lambda dst: dist.reduce(ones(4), dst=dst), 0, [0.0, "x"], [False]),
    (lambda dst: dist.reduce(ones(4), group_dst=dst), 0, [0.0], []),
    *([timed] if "timeout" in inspect.signature(dist.barrier).parameters else []),  # torch 2.13 has it, 2.6 does not
    (lambda op: dist.all_reduce(ones(4), op=op), SUM, [many, ones(3)], []),
    (split, [2, 2], [torch.tensor([2, 2])], [(2, 2), many[1:].repeat(2)]),
    (sent, 1, ["x", 1.5, 1 << 40], [True, numpy.int64(3)]),
    (posted, 1, ["x", 1.5], [True]),
    (lambda tensor: dist.all_reduce(tensor), ones(4), [(quantized, "QuantizedCPU")], []),
    (through_vmap, ones(4), [(ones(1, 4), "Batching rule not implemented")], []),
):
    for value in [good] * 6 + refused + allowed + [good]:
        value, words = value if type(value) is tuple and type(value[1]) is str else (value, ARGUMENTS)
        try:
            call(value)
        except (TypeError, NotImplementedError, RuntimeError) as error:
            assert words in str(error), error
            assert value is not good, error
        else:
            assert value is good or any(value is one for one in allowed), value
dist.destroy_process_group()
