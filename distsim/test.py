"""The pytest marker `ranks` as an importable name.

Example:
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
    """Return the marker `pytest.mark.ranks`, which runs a test's body on every rank.

    Args:
        n: Number of ranks. A list makes one test of each number.
        **arguments: The other arguments of the marker, such as `on`, `cluster`, `mesh` and `faults`;
            `pytest --markers` lists them. A wrong argument fails the test when it runs.

    Returns:
        A decorator for a test function or class.
    """
    return pytest.mark.ranks(n, **arguments)
