"""A call made again is guessed by the one before it, and looked at before it counts as the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Zygote

from distsim.debug.rings.reader import RingReader

CHANGED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def set_to(other):
    one.data = other


def reduced():
    dist.all_reduce(one)
    assert number > 13 or one.unique().tolist() == [2], (number, one)


def posted():
    dist.send(one, 1) if rank == 0 else dist.recv(one, 0)


def posted_later():
    (dist.isend(one, 1) if rank == 0 else dist.irecv(one, 0)).wait()


changes = {
    6: lambda: one.resize_(6),
    8: lambda: set_to(torch.ones(6, dtype=torch.float64)),
    10: lambda: set_to(torch.ones(2, 3)),
    12: lambda: one.resize_(3, 2),
    14: lambda: set_to(torch._neg_view(-torch.ones(2, 3))),
}
for call in (reduced, posted, posted_later):
    one = torch.ones(4)
    for number in range(16 if call is reduced else 14):
        changes.get(number, lambda: None)()
        one.fill_(1)
        call()
    one = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])  # no backend takes it, and it has no strides
    try:
        call()
    except (NotImplementedError, RuntimeError):
        continue
    raise AssertionError("no error")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_tensor_that_changed_since_the_last_call_is_recorded_as_it_is(zygote: Zygote, folder: Path) -> None:
    """The same tensor at the same line, of another size, dtype or sign than the last time."""
    program = folder / "program.py"
    program.write_text(CHANGED)
    result = zygote.run(program, 2, directory=folder)
    assert result.codes == {0: 0, 1: 0}, result.outputs
    shapes = [(4,)] * 6 + [(6,)] * 4 + [(2, 3)] * 2 + [(3, 2)] * 2 + [(2, 3)] * 2
    dtypes = ["float32"] * 8 + ["float64"] * 2 + ["float32"] * 6
    expected = list(zip(shapes, dtypes, strict=True))
    for path in sorted(folder.glob("rank*.ring")):
        reader = RingReader(path)
        calls = [reader.decode(record, 0) for record in reader.since(0)[0] if record["flags"]]
        found = [((c.input_shapes or c.output_shapes)[0], c.dtypes[0]) for c in calls if c.op in ("send", "recv")]
        assert found == expected[:14] * 2
        assert [(c.input_shapes[0], c.dtypes[0]) for c in calls if c.op == "all_reduce"] == expected
