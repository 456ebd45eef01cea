"""pyproject.toml against the tree."""

from __future__ import annotations

import fnmatch
import os

import pytest

import distsim
from tests.house.tree import CODE, ROOT, files, module_name, project, python_files


def test_the_list_of_packages_is_the_tree() -> None:
    """Every folder with Python files is listed, exactly once, and nothing else is."""
    listed = project()["tool"]["setuptools"]["packages"]
    found = sorted({module_name(path.parent / "__init__.py") for path in python_files(*CODE)})
    assert sorted(listed) == found
    assert all((path.parent / "__init__.py").exists() for path in python_files(*CODE))


def test_debug_and_realexec_are_links_into_the_package() -> None:
    """A bare clone imports distsim.debug through a committed relative link."""
    for name in ("debug", "realexec"):
        assert os.readlink(ROOT / "distsim" / name) == f"../{name}"
        assert project()["tool"]["setuptools"]["package-dir"][f"distsim.{name}"] == name


def test_every_data_file_is_declared() -> None:
    """A preset that the wheel forgets is a preset nobody has."""
    declared = project()["tool"]["setuptools"]["package-data"]
    packages = set(project()["tool"]["setuptools"]["packages"])
    forgotten = []
    for path in files(*CODE):
        if path.suffix == ".py":
            continue
        package = module_name(path.parent / "__init__.py")
        inside = path.name
        while package not in packages:
            package, _, folder = package.rpartition(".")
            inside = f"{folder}/{inside}"
        if not any(fnmatch.fnmatchcase(inside, pattern) for pattern in declared.get(package, ())):
            forgotten.append(str(path.relative_to(ROOT)))
    assert forgotten == []


def test_the_test_extra_is_pinned() -> None:
    """constraints.txt names an exact version of everything the two README commands install."""
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert version, f"{line!r} is no exact version"
            pinned[name.lower().replace("_", "-")] = version
    data = project()["project"]
    for requirement in [*data["dependencies"], *data["optional-dependencies"]["test"]]:
        name = requirement.split(">")[0].split("<")[0].split("=")[0].strip().lower()
        assert name in pinned, f"{requirement} is not in constraints.txt"
    assert pinned["torch"] == "2.13.0"


def test_the_conda_recipe_is_that_of_the_wheel() -> None:
    """It has the version, the requirements and the command of pyproject.toml; pip's torch is conda's pytorch."""
    yaml = pytest.importorskip("yaml")
    recipe, data = yaml.safe_load((ROOT / ".ci/recipe.yaml").read_text(encoding="utf-8")), project()["project"]
    assert recipe["context"]["version"] == distsim.__version__
    python, *needs = (requirement.replace(" ", "") for requirement in recipe["requirements"]["run"])
    assert python == f"python{data['requires-python']}"
    assert [need.replace("pytorch", "torch") for need in needs] == data["dependencies"]
    (command,) = recipe["build"]["python"]["entry_points"]
    assert command.split(" = ") == ["distsim", data["scripts"]["distsim"]]
