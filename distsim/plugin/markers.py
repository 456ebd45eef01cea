"""Which tests are ours: `@pytest.mark.ranks(n)`, and `world_size(n)` where no other harness means something by it.

composer, streaming, llm-foundry and DeepSpeed have a marker `world_size` of their own, for tests that a launcher runs.
So `world_size` is ours where `distsim_world_size = true` says so, or, if nothing is said, where nobody but us has
registered it: no line of `markers` in the project's configuration, no plugin, no conftest.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

__all__ = ["MARK", "MEANINGS", "SHORT", "is_first", "launched", "marker_of", "owns_world_size", "sizes_of"]

_ARGUMENTS = (
    "(n, on='sim', cluster=None, init=True, backend='gloo', mesh=None, mesh_dim_names=None, seed=0, "
    "timeout_s=60, host_timeout_s=10, faults=(), guards=(), silent=None): run the body on n ranks, "
    "simulated (sim) or as real processes (gloo); n and on may be lists"
)
MARK = f"ranks{_ARGUMENTS}"
SHORT = "world_size(n, ...): distsim's marker ranks, where no other harness has one of this name"

MEANINGS = {
    "distsim_world_size": "whether the marker world_size is distsim's: true or false (default: where no other plugin, "
    "conftest.py or line of the configuration registers it)",
    "distsim_class_world_size": "whether the attribute world_size of a test class, a number or a list of numbers, has "
    "its tests run on so many ranks: true or false (default: false)",
}
"""pytest's options that say which tests are ours."""

_LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""How many processes it has started, as torchrun (and composer, deepspeed, accelerate), Open MPI and MPICH say it."""

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Which of them this one is."""


def launched(environ: Mapping[str, str] = os.environ) -> str:
    """`WORLD_SIZE=4` where pytest is itself one of several ranks that a launcher has started; else nothing."""
    for name in _LAUNCHERS:
        number = environ.get(name, "")
        if number.isdecimal() and int(number) > 1:
            return f"{name}={number}"
    return ""


def is_first(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the process of rank 0, or nothing says which rank it is."""
    return next((environ[name] for name in _RANKS if name in environ), "0") == "0"


def owns_world_size(config: pytest.Config) -> bool:
    """Whether `world_size` means ours in this project."""
    said = config.getini("distsim_world_size")
    if said:
        return _yes(said, "distsim_world_size")
    return not any(line.partition("(")[0].partition(":")[0].strip() == "world_size" for line in _others(config))


def marker_of(node: pytest.Item) -> pytest.Mark | None:
    """The marker that sends the test *node* to ranks; None for everybody else's tests."""
    marker = node.get_closest_marker("ranks")
    if marker is not None or launched():
        return marker
    config = node.config
    marker = node.get_closest_marker("world_size")
    if marker is not None:
        return marker if owns_world_size(config) else None
    said = config.getini("distsim_class_world_size")
    if said and _yes(said, "distsim_class_world_size"):
        sizes = getattr(getattr(node, "cls", None), "world_size", None)
        if isinstance(sizes, int | list | tuple):
            return pytest.mark.ranks(sizes).mark
    return None


def sizes_of(marker: pytest.Mark) -> Any:
    """The number of ranks that *marker* asks for, or a list of numbers."""
    return marker.args[0] if marker.args else marker.kwargs.get("n")


def _others(config: pytest.Config) -> list[str]:
    return [line for line in config.getini("markers") if line != SHORT]


def _yes(said: str, name: str) -> bool:
    word = said.strip().lower()
    if word not in ("true", "false"):
        raise pytest.UsageError(f"pytest's configuration: {name}: expected true or false, got {said!r}")
    return word == "true"
