"""What is public: the names in each package's `__all__`."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.golden import assert_golden
from tests.house.tree import project

GOLDEN = Path(__file__).parent / "golden" / "public_names.txt"
PACKAGES = sorted(project()["tool"]["setuptools"]["packages"])


def test_the_public_names_are_these() -> None:
    """A name that users import neither vanishes nor appears by accident.

    torch.distributed's own names, which distsim passes on, are torch's to keep.
    """
    import torch.distributed

    lines = []
    for package in PACKAGES:
        names = set(getattr(importlib.import_module(package), "__all__", ()))
        if package == "distsim":
            names -= set(dir(torch.distributed))
        lines.append(f"{package}: {', '.join(sorted(names))}".rstrip())
    assert_golden(GOLDEN, "\n".join(lines) + "\n")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_exists(package: str) -> None:
    """`__all__` promises nothing that is not there."""
    module = importlib.import_module(package)
    assert [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)] == []
