"""Level strict: what a refused call says of its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Zygote

SHAPES = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for work in [dist.all_reduce(torch.ones(3)), dist.all_reduce(torch.ones(3 + (rank == size - 1)), async_op=ASYNC)]:
    work and work.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "how"),
    [pytest.param(2, "False", marks=pytest.mark.soak), (5, "True"), pytest.param(8, "False", marks=pytest.mark.soak)],
)
def test_many_ranks_are_ranges(size: int, how: str, zygote: Zygote, folder: Path) -> None:
    """Ranks that called the same are told once, as a range, with the cure that the report has; no list of Python's."""
    script = folder / "shapes.py"
    script.write_text(SHAPES.replace("ASYNC", how))
    result = zygote.run(script, size, directory=folder, level="strict")
    others = {2: "rank 0: ", 5: "ranks 0-3: ", 8: "ranks 0-6: "}[size]
    members = {2: "(ranks 0,1)", 5: "(ranks 0-4)", 8: "(ranks 0-7)"}[size]
    for output in result.outputs.values():
        text = output[output.index("CollectiveMismatch: ") :]
        assert all(part in text for part in (members, others, f"rank {size - 1}: ")), text
        assert result.diagnoses[0].suggestion in text, text
        assert not any(start in text for start in ("[0", "[1")), text
    assert result.diagnoses[0].kind.value == "shape_mismatch", result.report


LINES = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(3):
    dist.all_reduce(torch.ones(16))
    for metric in range(3 if rank == 1 and step == 1 else 2):
        dist.all_reduce(torch.ones(()))
"""


@pytest.mark.slow
def test_calls_of_two_lines_are_no_one_call_of_two_shapes(zygote: Zygote, folder: Path) -> None:
    """The exception says that different calls met, and names the kind and the lines that the report names."""
    script = folder / "lines.py"
    script.write_text(LINES)
    result = zygote.run(script, 3, directory=folder, level="strict")
    (told,) = result.diagnoses
    assert told.kind.value == "uneven_iterations", result.report
    for output in result.outputs.values():
        text = output[output.index("CollectiveMismatch: ") :]
        assert text.startswith("CollectiveMismatch: uneven_iterations: the ranks made different calls as #7 on group")
        assert told.explanation in text
