"""What lay on the host and was moved to simulated GPUs is given back to the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distsim.sim.device.allocator import host_memory


def test_memory_is_asked_for_once_much_was_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at each of a model's weights."""
    asked: list[int] = []
    monkeypatch.setattr(host_memory, "_trim", lambda: asked.append)
    monkeypatch.setattr(host_memory, "_moved", 0)
    for _ in range(10):
        host_memory.moved_to_gpu(host_memory.EVERY // 4)
    assert len(asked) == 2


def _own_bytes() -> int:
    """Of this process, shared with nobody."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty", "Private_Clean"))) << 10


@pytest.mark.parametrize(("number", "dtype"), [(1.0, torch.float32), (0.5, torch.bfloat16), (0, torch.int64)])
def test_large_placeholders_share_their_pages(number: float, dtype: torch.dtype) -> None:
    """They are what torch.full makes, also across pieces, and take no memory where nobody writes."""
    numel = (256 << 20) // dtype.itemsize + 3
    host_memory.filled((numel,), number, dtype)  # makes the pattern
    before = _own_bytes()
    one, other = (host_memory.filled((numel,), number, dtype) for _ in range(2))
    assert bool((one == number).all())
    assert _own_bytes() - before < numel * 3, "the comparison's answer, and not a tensor"
    one[host_memory.PIECE // dtype.itemsize] = 7
    assert int((one != number).sum()) == 1
    assert bool((other == number).all())


def test_placeholders_end_with_their_tensor() -> None:
    """Also where only a view of them is left."""

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("distsim placeholders")

    before = mappings()
    view = host_memory.filled((8, 4 << 20), 1.0, torch.float32)[3:]
    assert mappings() > before
    assert float(view[4, -1]) == 1.0
    del view
    assert mappings() == before


def test_erasing_gives_the_pages_back() -> None:
    """Of memory of this process' own, from the first byte to the last, and no byte beside."""
    around = torch.full(((64 << 20) + 10_007,), 7, dtype=torch.uint8)
    before = _own_bytes()
    host_memory.erase(around[5_003:-5_004])
    assert before - _own_bytes() > 60 << 20
    assert not bool(around[5_003:-5_004].any())
    assert bool((around[:5_003] == 7).all())
    assert bool((around[-5_004:] == 7).all())


def test_erasing_shared_memory_is_seen_by_all(tmp_path: Path) -> None:
    """Where a stager shares it with its process, and where it is a file's."""
    shared = torch.full((8 << 20,), 7, dtype=torch.uint8).share_memory_()
    host_memory.erase(shared)
    assert not bool(shared.any())
    file = tmp_path / "mapped"
    file.write_bytes(b"\7" * (2 << 20))
    for is_shared in (True, False):
        mapped = torch.from_file(str(file), shared=is_shared, size=2 << 20, dtype=torch.uint8)
        host_memory.erase(mapped)
        assert not bool(mapped.any()), "also of pages that would come anew from the file"


def test_erasing_placeholders() -> None:
    """What shares its pages is no zeros once they are given back."""
    ones = host_memory.filled((32 << 20,), 1.0, torch.float32)
    host_memory.erase(ones)
    assert not bool(ones.any())


@pytest.mark.parametrize("written", [None, 0, host_memory.PIECE, host_memory.PIECE + 4])
def test_a_copy_of_unknown_values_is_one_until_it_is_written(written: int | None) -> None:
    """Whichever of its bytes; what was never copied from a GPU is known."""
    held = torch.zeros(host_memory.PIECE + 5, dtype=torch.uint8)
    storage = held.untyped_storage()
    assert not host_memory.still_unknown(storage)
    storage._distsim_unknown = True  # type: ignore[attr-defined]
    if written is not None:
        held[written] = 7
    assert host_memory.still_unknown(storage) == (written is None)


def test_placeholders_that_find_no_memory_are_refused_as_by_torch() -> None:
    """More than the address space has."""
    with pytest.raises(RuntimeError, match="memory"):
        host_memory.filled((1 << 60,), 1.0, torch.float32)
