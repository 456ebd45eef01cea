"""Level strict: calls that the backend refuses, which the members had agreed on or never heard of."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Zygote

from tests.cases.releases import SHORT_WAY
from tests.kin import one_in

CALLS = """
import os
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
if REMOTE:  # as if each rank were on a host of its own
    os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
half = dist.new_group([0, 1])
ones, MAX = torch.ones, dist.ReduceOp.MAX
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13's name, or the older one


def coordinates():
    return torch.eye(4).to_sparse()


REFUSED = {
    "csr": lambda how: dist.all_reduce(torch.eye(4).to_sparse_csr(), **how),
    "coordinates": lambda how: dist.broadcast(coordinates(), 0, **how),
    "maximum": lambda how: dist.all_reduce(coordinates(), MAX, **how),
    "list": lambda how: dist.all_gather([ones(3) for _ in range(9)], ones(3), **how),
    "size": lambda how: gather_single(ones(5), ones(4), **how),
    "outputs": lambda how: dist.all_gather_coalesced([[ones(3), ones(5)]] * size, [ones(3), ones(4)], **how),
}


def refused(call, **how):
    try:
        work = call(how)
        work.wait()
    except (NotImplementedError, RuntimeError) as error:
        assert "CollectiveMismatch" not in type(error).__name__, error
    else:
        raise AssertionError("it was not refused")


def good(shape, group, members, later):
    tensor = ones(shape)
    work = dist.all_reduce(tensor, group=group, async_op=later)
    if later:
        work.wait()
    assert tensor.tolist() == [members] * shape, (shape, tensor)
"""

EVERY_RANK = (
    CALLS
    + """
shape = 0
for later in (False, True):
    for name, call in REFUSED.items():
        if later and name == "outputs":
            continue  # deprecated, and long out of use
        for number in range(6):
            for _ in range(1 + number % 2):  # twice in a row, too
                refused(call, async_op=later)
                if rank < 2 and name != "outputs":
                    refused(call, async_op=later, **({} if name == "coordinates" else {"group": half}))
            for after in (False, True, False):
                shape = shape % 50 + 1
                good(shape, None, size, after != later)
                if rank < 2:
                    good(shape + 1, half, 2, after)
before = [dist.all_reduce(ones(7), async_op=True) for _ in range(3)]
refused(REFUSED["size"])
good(9, None, size, False)
[work.wait() for work in before]
dist.destroy_process_group()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "remote"), one_in(3, [pytest.param(2, True), pytest.param(3, False), pytest.param(2, False)])
)
def test_what_every_rank_is_refused_leaves_no_trace(size: int, remote: bool, zygote: Zygote, folder: Path) -> None:
    """The next call takes the number of one that the backend refused, and is not compared with it."""
    script = folder / "calls.py"
    script.write_text(EVERY_RANK.replace("REMOTE", str(remote)))
    result = zygote.run(script, size, directory=folder, level="strict")
    assert set(result.codes.values()) == {0}, (result.outputs, result.report)
    assert not result.diagnoses, result.report


ONE_RANK = (
    CALLS
    + """
def dense(how):
    return dist.all_reduce(ones(4, 4), **how)


def batched(how):  # refused by torch after it was shown
    torch.func.vmap(lambda one: dist.all_reduce(one, **how))(ones(1, 4, 4))


def goes_on(shapes, bad):
    if rank:
        for shape in shapes:
            dist.all_reduce(ones(shape))
    else:
        refused(bad)
        for shape in shapes:
            dist.all_reduce(ones(shape))


for bad in (REFUSED["csr"], batched):
    goes_on([(4, 4), 3, 5], bad)
if rank == 0:
    refused(BAD)
    dist.all_reduce(ones(3))
else:
    dense({})
    dist.all_reduce(ones(3))
"""
)


@pytest.mark.skipif(not SHORT_WAY, reason="each call goes on by itself, and its number is not taken back")
@pytest.mark.slow
@pytest.mark.parametrize("bad", ["REFUSED['csr']", pytest.param("batched", marks=pytest.mark.soak)])
def test_what_one_rank_is_refused_is_missed_by_the_others(bad: str, zygote: Zygote, folder: Path) -> None:
    """A rank that makes the call again as the others did goes on with them; one that makes another is told so."""
    script = folder / "calls.py"
    script.write_text(ONE_RANK.replace("REMOTE", "False").replace("BAD", bad))
    result = zygote.run(script, 2, directory=folder, level="strict")
    assert "CollectiveMismatch: missing_rank: the ranks made different calls" in result.outputs[0], result.outputs
    assert "was refused by torch" in result.outputs[0], result.outputs
    assert result.codes[0] == 1, result.outputs
    assert result.diagnoses[0].culprits == (0,), result.report
    assert "was refused by torch" in result.diagnoses[0].explanation, result.report
