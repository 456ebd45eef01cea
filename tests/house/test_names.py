"""What is public: the names in each package's `__all__`."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from pathlib import Path

import pytest

from tests.golden import assert_golden
from tests.house.tree import modules, project

GOLDEN = Path(__file__).parent / "golden" / "public_names.txt"
PACKAGES = sorted(project()["tool"]["setuptools"]["packages"])


def test_the_public_names_are_these() -> None:
    """A name that users import neither vanishes nor appears by accident.

    torch.distributed's own names, which distsim passes on, are torch's to keep.
    """
    import torch.distributed.run  # a name of its own once anything has imported it

    lines = []
    for package in PACKAGES:
        names = {name for name in _listed(package) if not _is_module(package, name)}
        if package == "distsim":
            names -= set(dir(torch.distributed))
        if names or package.count(".") == 1:
            lines.append(f"{package}: {', '.join(sorted(names))}".rstrip())
    assert_golden(GOLDEN, "\n".join(lines) + "\n")


FACES = {f"distsim.{name}" for name in ("errors", "pytest_plugin", "test", "deprecated.multigpu")}
"""Modules from which users import names, or all names."""


def test_only_a_public_face_lists_its_names() -> None:
    """Within distsim a name without an underscore is enough: a list of names per module would be read by nobody."""
    listing = {
        module
        for module, path in modules().items()
        if path.name != "__init__.py" and any("__all__ = " in line for line in path.read_text().splitlines())
    }
    assert listing <= FACES


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_exists(package: str) -> None:
    """`__all__` promises nothing that is not there, and lists every module where it lists modules."""
    module = importlib.import_module(package)
    listed = _listed(package)
    assert [name for name in listed if not hasattr(module, name) and not _is_module(package, name)] == []
    if listed and all(_is_module(package, name) for name in listed):
        there = {found.name for found in pkgutil.iter_modules(module.__path__) if not found.name.startswith("__")}
        assert set(listed) == there


def _listed(package: str) -> list[str]:
    return list(getattr(importlib.import_module(package), "__all__", ()))


def _is_module(package: str, name: str) -> bool:
    """Whether a listed name is a module of the package: a guide, and nothing to import from it."""
    return package != "distsim" and importlib.util.find_spec(f"{package}.{name}") is not None
