"""Which calls go the shorter way, and which never: far below a loop, of complex numbers, DDP's; and what is left
of one that was held."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Zygote

from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import RingReader
from tests.cases.releases import SHORT_WAY

pytestmark = pytest.mark.skipif(not SHORT_WAY, reason="torch does not tell a group that a call goes on by itself")

REDUCER = """
import torch
import torch.distributed as dist
from distsim.realexec.guard.handle import Handle
from distsim.realexec.guard.recorder import Recorder
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
begin, long_ways, asked = Recorder.begin, [], []
Recorder.begin = lambda *args: long_ways.append(args) or begin(*args)
for kind in (Handle, *Handle.__subclasses__()):
    if "get_future" in vars(kind):
        kind.get_future = lambda handle, take=kind.get_future: asked.append(handle) or take(handle)
model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
for step in range(6):
    before = len(long_ways), len(asked)
    model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.5 * (step + 1)] * 2], step
    assert step < 3 or before == (len(long_ways), len(asked)), step
model = None
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_reducer_gets_the_work_of_gloo_itself(zygote: Zygote, folder: Path) -> None:
    """DDP takes the future of a call and nothing else: from the fourth step on it has gloo's own, and the record says
    all the same that somebody has it, and when the call ended."""
    program = folder / "program.py"
    program.write_text(REDUCER)
    result = zygote.run(program, 2, directory=folder)
    assert result.codes == {0: 0, 1: 0}, result.outputs
    for path in sorted(folder.glob("rank*.ring")):
        records = [record for record in RingReader(path).since(0)[0] if int(record["flags"]) & rings.FUTURE]
        assert len(records) == 6
        assert len({int(record["flags"]) for record in records}) == 1, [int(record["flags"]) for record in records]
        assert all(int(record["completed"]) >= int(record["issued"]) for record in records)
