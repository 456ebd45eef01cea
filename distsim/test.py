"""Names for tests: `from distsim.test import ranks`.

@ranks(4)
def test_sum(rank):
    t = torch.tensor([float(rank)])
    dist.all_reduce(t)
    assert t.item() == 6
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["ranks"]


def ranks(n: int | Sequence[int], **arguments: Any) -> pytest.MarkDecorator:
    """The marker `pytest.mark.ranks`, importable: run the test on *n* ranks, or once for each number in *n*.

    *arguments* are the marker's (`pytest --markers` lists them): `on`, `cluster`, `mesh`, `faults` and others. Mistakes
    are told when the test runs, as its failure.
    """
    return pytest.mark.ranks(n, **arguments)
