"""What lay on the host and was moved to simulated GPUs is given back to the machine."""

from __future__ import annotations

import pytest

from distsim.sim.device.allocator import host_memory


def test_memory_is_asked_for_once_much_was_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at each of a model's weights."""
    asked: list[int] = []
    monkeypatch.setattr(host_memory, "_trim", lambda: asked.append)
    monkeypatch.setattr(host_memory, "_moved", 0)
    for _ in range(10):
        host_memory.moved_to_gpu(host_memory.EVERY // 4)
    assert len(asked) == 2


def test_the_c_library_can_be_asked() -> None:
    """malloc_trim, where it has one: whether memory was given back is 0 or 1."""
    assert host_memory._trim()(0) in (0, 1)
