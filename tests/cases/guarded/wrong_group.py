"""A group that is none, given by position: the error is torch's.

ranks: 2
kind: healthy
guard: check
"""

from tests.cases.begin import dist, torch
from tests.cases.releases import gather_single, scatter_single

one, two, SUM = torch.ones(1), torch.ones(2), dist.ReduceOp.SUM
for call in (
    lambda: dist.all_reduce(one, SUM, "dp"),
    lambda: dist.barrier("dp"),
    lambda: dist.all_gather([one, one], one, "dp"),
    lambda: gather_single(two, one, "dp"),
    lambda: scatter_single(one, two, SUM, "dp"),
    lambda: dist.all_to_all_single(two, two, None, None, "dp"),
):
    try:
        call()
    except (AttributeError, ValueError) as error:  # and none that comes of noting it in torch's log
        assert "'str'" in str(error), error
    else:
        raise AssertionError("no error")
dist.destroy_process_group()
