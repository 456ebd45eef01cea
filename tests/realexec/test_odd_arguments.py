"""Arguments that equal good ones, or cannot be compared: torch refuses them in its own words, known line or not."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Zygote

ODD = """
import warnings
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
rank, ones, SUM = dist.get_rank(), torch.ones, dist.ReduceOp.SUM
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
for call, good, refused, allowed in (
    (lambda src: dist.broadcast(ones(4), src=src), 0, [0.0, "x"], [False, numpy.int64(0)]),
    (lambda src: dist.broadcast(ones(4), group_src=src), 0, [0.0], []),
    (lambda dst: dist.reduce(ones(4), dst=dst), 0, [0.0, "x"], [False]),
    (lambda dst: dist.reduce(ones(4), group_dst=dst), 0, [0.0], []),
    (lambda timeout: dist.barrier(timeout=timeout), timedelta(seconds=60), [many, 5], [None]),
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
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["check", "strict"])
def test_what_the_guard_does_not_understand_is_for_torch(level: str, zygote: Zygote, folder: Path) -> None:
    """After good calls at the same line, too; and the next good one is made."""
    script = folder / "odd.py"
    script.write_text(ODD)
    result = zygote.run(script, 2, directory=folder, level=level)
    assert result.codes == {0: 0, 1: 0}, result.outputs
    assert not result.diagnoses, result.report
