"""The table of a live job: as wide as asked for, with nothing left out."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from distsim.debug.records.signature import Signature
from distsim.debug.report.console import Console
from distsim.debug.report.live import live_table
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import ring_path
from distsim.debug.rings.reader import RingReader
from distsim.debug.rings.writer import RingWriter

NAME = "data_parallel_ranks_of_the_mesh"


def ring(folder: Path, rank: int) -> RingReader:
    """The ring of a rank whose process is gone, with one call on every second rank's group."""
    path = ring_path(folder, rank, 0, "job")
    writer = RingWriter(path, rank=rank, world_size=64, local_rank=rank, job="job", attempt=0)
    group = writer.group("7", NAME, list(range(0, 64, 2)))
    signature, print_ = writer.signature("k", lambda _: (Signature("all_gather_into_tensor", ((4,),)), False))
    writer.issue(rings.ISSUED, group, 0, 1, signature, 0, print_, 9, -1, 0)
    return RingReader(path)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_is_wrapped_and_never_cut(tmp_path: Path, width: int) -> None:
    """Every rank, the whole name and the whole operation are there, no line is too long, no number is split."""
    console = Console(file=io.StringIO(), width=width)
    console.print(live_table([ring(tmp_path, rank) for rank in range(0, 64, 2)]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text
    first = lines[next(i for i, line in enumerate(lines) if "group" in line)]
    start = first.index("ranks")
    assert set(map(str, range(0, 64, 2))) <= set(re.findall(r"\b\d+\b", text))
    column = "".join(line[: start - 2].strip() for line in lines)
    assert NAME in column
