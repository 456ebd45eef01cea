"""The wheel and the sdist hold every file once."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from tests.house.tree import CODE, ROOT, files

BUILD = (
    "import sys; from setuptools import build_meta\n"
    "build_meta.build_wheel(sys.argv[1]); build_meta.build_sdist(sys.argv[1])"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built without a network from a copy of the tree."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for top in CODE:
        shutil.copytree(ROOT / top, source / top, symlinks=True, ignore=skip)
    target = tmp_path_factory.mktemp("built")
    subprocess.run([sys.executable, "-c", BUILD, target], cwd=source, check=True, capture_output=True)
    return target


def _wanted() -> list[str]:
    """Every shipped file under the name it is installed by."""
    names = []
    for path in files(*CODE):
        name = path.relative_to(ROOT).as_posix()
        names.append(name if name.startswith("distsim/") else f"distsim/{name}")
    return sorted(names)


@pytest.mark.slow
def test_the_wheel_holds_every_file_once(built: Path) -> None:
    """What is in the tree is in the wheel, under distsim/ alone, and nothing twice."""
    names = zipfile.ZipFile(next(built.glob("*.whl"))).namelist()
    assert [name for name, count in Counter(names).items() if count > 1] == []
    inside = sorted(name for name in names if ".dist-info/" not in name)
    assert inside == _wanted()
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_sdist_holds_every_file_once(built: Path) -> None:
    """The sdist has the sources in their own folders (the links are made by the wheel's mapping)."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = [member.name.split("/", 1)[1] for member in archive if member.isfile()]
    wanted = {path.relative_to(ROOT).as_posix() for path in files(*CODE)}
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert wanted - set(names) == set()
    assert {"LICENSE", "README.md", "pyproject.toml"} <= set(names)
    assert [name for name in names if name.startswith(("distsim/debug/", "distsim/realexec/"))] == []
