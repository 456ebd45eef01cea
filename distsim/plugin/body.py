"""Runs a test's body on every rank: selects our tests, and replaces their bodies.

Ours are tests with `@pytest.mark.ranks(n)`, and with `world_size(n)` unless another harness uses that marker:
composer, streaming, llm-foundry and DeepSpeed have a `world_size` of their own for tests that a launcher starts. So
`world_size` is ours if `distsim_world_size = true` says so, or, without that setting, if nothing else has registered
it: no line of `markers` in the project's configuration, no plugin, no conftest.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from distsim.plugin.fixtures import refuse_shared, sub_tests_of
from distsim.plugin.hypothesis import refuse_draws
from distsim.plugin.options import PluginOptions, WorldOfAll
from distsim.plugin.verdict import Verdict, fail_at, judge
from distsim.text.untrusted_input import digits

_ARGUMENTS = (
    "(n, on='sim', cluster=None, init=True, backend='gloo', mesh=None, mesh_dim_names=None, seed=0, "
    "timeout_s=60, host_timeout_s=10, faults=(), guards=(), silent=None, explore=None, "
    "faults_explored=()): run the body on n ranks, simulated (sim) or as real processes (gloo); n and on may be lists"
)
MARK = f"ranks{_ARGUMENTS}"
SHORT = "world_size(n, ...): the same as distsim's marker ranks, unless another plugin registers the name"

MEANINGS = {
    "distsim_world_size": "whether the marker world_size means distsim's ranks: true or false (default: true unless "
    "another plugin, a conftest.py or the configuration registers it)",
    "distsim_class_world_size": "whether the attribute world_size of a test class, a number or a list of numbers, sets "
    "the number of ranks of its tests: true or false (default: false)",
}
"""Configuration options that decide which tests run on ranks."""

_LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables with the number of processes, of torchrun (composer, deepspeed, accelerate), Open MPI and MPICH."""

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Variables with the number of this process."""


def import_for(items: Iterable[pytest.Item]) -> None:
    """Import the modules that tests on ranks need, if there are any among *items*."""
    for arms in {str(marker.kwargs.get("on", "sim")) for item in items if (marker := marker_of(item)) is not None}:
        for on in ("sim", "gloo"):
            if on in arms:
                _arm(on)


def everywhere(item: pytest.Function, body: Callable[..., Any], marker: pytest.Mark) -> Callable[..., None]:
    """Return the function that pytest calls instead of *body*."""

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        try:
            refuse_shared(item)
            refuse_draws(kwargs)
            with sub_tests_of(body):
                for options in _options(item, marker):
                    verdict = _arm(options.on)(item, functools.partial(body, *args), kwargs, options)
                    _hand_over(item, verdict.results)
                    judge(verdict, item, options)
        except pytest.UsageError as mistake:
            error = mistake
        else:
            return
        file, line, _ = item.reportinfo()
        fail_at((os.fspath(file), (line or 0) + 1), pytest.fail.Exception(str(error), pytrace=False))

    return run


def _hand_over(item: pytest.Function, results: list[Any]) -> None:
    """Give the results of the ranks to the fixture `world`."""
    world = item.funcargs.get("world")
    if isinstance(world, WorldOfAll):
        vars(world)["returned"] = results


def _options(item: pytest.Function, marker: pytest.Mark) -> list[PluginOptions]:
    params: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    sizes = params.get("distsim_world_size", sizes_of(marker))
    arms = params.get("distsim_on", marker.kwargs.get("on", "sim"))
    # A method of a unittest.TestCase cannot be parametrized: there all combinations run one after the other.
    return [
        PluginOptions.read(marker, n, on, item.config)
        for on in (arms if isinstance(arms, list | tuple) and arms else [arms])
        for n in (sizes if isinstance(sizes, list | tuple) and sizes else [sizes])
    ]


def _arm(on: str) -> Callable[..., Verdict]:
    if on == "sim":
        from distsim.plugin.run_sim import run_simulated

        return run_simulated
    from distsim.plugin.run_gloo import run_real

    return run_real


def launched(environ: Mapping[str, str] = os.environ) -> str:
    """Return `WORLD_SIZE=4` if pytest is itself one of several ranks of a launcher, else an empty string."""
    for name in _LAUNCHERS:
        if (number := digits(environ.get(name, "")) or 0) > 1:
            return f"{name}={number}"
    return ""


def is_first(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this is rank 0 of a launcher, or no rank at all."""
    return next((environ[name] for name in _RANKS if name in environ), "0") == "0"


def owns_world_size(config: pytest.Config) -> bool:
    """Return whether the marker `world_size` belongs to this plugin in this project."""
    configured = config.getini("distsim_world_size")
    if configured:
        return _yes(configured, "distsim_world_size")
    others = [line for line in config.getini("markers") if line != SHORT]
    return not any(line.partition("(")[0].partition(":")[0].strip() == "world_size" for line in others)


def marker_of(node: pytest.Item) -> pytest.Mark | None:
    """Return the marker that runs the test *node* on ranks; None for other tests."""
    marker = node.get_closest_marker("ranks")
    if marker is not None or launched():
        return marker
    of_class: pytest.Mark | None = getattr(getattr(node, "cls", None), "distsim_marker", None)
    if of_class is not None:
        return of_class
    config = node.config
    marker = node.get_closest_marker("world_size")
    if marker is not None:
        return marker if owns_world_size(config) else None
    configured = config.getini("distsim_class_world_size")
    if configured and _yes(configured, "distsim_class_world_size"):
        sizes = getattr(getattr(node, "cls", None), "world_size", None)
        if isinstance(sizes, int | list | tuple):
            return pytest.mark.ranks(sizes).mark
    return None


def sizes_of(marker: pytest.Mark) -> Any:
    """Return the number of ranks, or the list of numbers, of *marker*."""
    return marker.args[0] if marker.args else marker.kwargs.get("n")


def _yes(value: str, name: str) -> bool:
    word = value.strip().lower()
    if word not in ("true", "false"):
        raise pytest.UsageError(f"pytest's configuration: {name}: expected true or false, got {value!r}")
    return word == "true"
