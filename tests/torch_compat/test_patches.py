"""Patches of torch keep the kind of what they replace, and are taken back."""

from __future__ import annotations

import types
from typing import Any

import pytest

from distsim.torch_compat.names import Patches, TorchName


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module in the place of one of torch's."""
    import sys

    made = types.ModuleType("torch.distsim_probe")

    def add(a: int, b: int = 1) -> int:
        return a + b

    made.add = add  # type: ignore[attr-defined]
    made.Kind = type("Kind", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.distsim_probe", made)
    return made


ADD = TorchName("torch.distsim_probe.add", "sums")


def test_a_wrapped_function_keeps_its_original(module: Any) -> None:
    """`__wrapped__`, which torch.compile and inspect follow, leads to torch's own."""
    original, patches = module.add, Patches()
    assert patches.wrap(ADD, lambda original, *args, **kwargs: original(*args, **kwargs) * 10)
    assert module.add(1, b=2) == 30
    assert module.add.__wrapped__ is original
    patches.remove()
    assert module.add is original


def test_a_missing_function_is_not_patched(module: Any) -> None:
    """The others still are."""
    patches = Patches()
    assert not patches.wrap(TorchName("torch.distsim_probe.subtract", "differences"), print)
    assert not hasattr(module, "subtract")


def test_a_builtin_name_is_not_hidden_from_torch(module: Any) -> None:
    """torch 2.14 writes `type[BaseException]` where a patch had put a function named type."""
    with pytest.raises(TypeError, match="built-in 'type'"):
        Patches().put(module, "type", lambda thing: type(thing))


def test_a_class_is_replaced_by_a_class(module: Any) -> None:
    """A function in the place of a class breaks isinstance in torch's own code."""
    with pytest.raises(TypeError, match="Kind"):
        Patches().put(module, "Kind", lambda: None)
    patches = Patches()
    patches.put(module, "Kind", type("Other", (module.Kind,), {}))
    patches.remove()
    assert module.Kind.__name__ == "Kind"


def test_what_somebody_else_has_replaced_since_stays(module: Any) -> None:
    """A profiler that wrapped ours is not thrown out."""
    patches = Patches()
    patches.wrap(ADD, lambda original, *args: original(*args))
    module.add = later = lambda a: a
    patches.remove()
    assert module.add is later
