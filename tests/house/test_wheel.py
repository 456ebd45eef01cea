"""The wheel and the sdist hold every file once."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.house.tree import CODE, ROOT, files

BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


@dataclass(frozen=True)
class Built:
    """A copy of the tree, the sdist made of it, and the wheel made of the sdist."""

    source: Path
    sdist: Path
    wheel: Path


def _build(hook: str, source: Path, target: Path) -> None:
    subprocess.run([sys.executable, "-c", BUILD, hook, target], cwd=source, check=True, capture_output=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built without a network, as an index or `pip install SDIST` would."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc")
    for top in CODE:
        shutil.copytree(ROOT / top, source / top, symlinks=True, ignore=skip)
    wanted = tmp_path_factory.mktemp("wanted")
    shutil.copytree(source, wanted, symlinks=True, dirs_exist_ok=True)
    target = tmp_path_factory.mktemp("built")
    _build("build_sdist", source, target)
    sdist = next(target.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    _build("build_wheel", target / sdist.name.removesuffix(".tar.gz"), target)
    return Built(wanted, sdist, next(target.glob("*.whl")))


def _installed_names(source: Path) -> list[str]:
    """Every shipped file under the name it is installed by."""
    names = []
    for path in files(*CODE, root=source):
        name = path.relative_to(source).as_posix()
        names.append(name if name.startswith("distsim/") else f"distsim/{name}")
    return sorted(names)


@pytest.mark.slow
def test_the_wheel_holds_every_file_once(built: Built) -> None:
    """What is in the tree is in the wheel, under distsim/ alone, and nothing twice."""
    names = zipfile.ZipFile(built.wheel).namelist()
    assert [name for name, count in Counter(names).items() if count > 1] == []
    inside = sorted(name for name in names if ".dist-info/" not in name)
    assert inside == _installed_names(built.source)
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_sdist_holds_every_file_once(built: Built) -> None:
    """The sdist has the sources in their own folders (the links are made by the wheel's mapping)."""
    with tarfile.open(built.sdist) as archive:
        names = [member.name.split("/", 1)[1] for member in archive if member.isfile()]
    wanted = {path.relative_to(built.source).as_posix() for path in files(*CODE, root=built.source)}
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert wanted - set(names) == set()
    assert {"LICENSE", "README.md", "pyproject.toml"} <= set(names)
    assert [name for name in names if name.startswith(("distsim/debug/", "distsim/realexec/"))] == []
