"""Entries that a test makes up leave nothing behind."""

from __future__ import annotations

import pytest

from distsim.torch_compat import names


@pytest.fixture(autouse=True)
def _nothing_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a later test would say what is left out."""
    monkeypatch.setattr(names, "left_out", {})
