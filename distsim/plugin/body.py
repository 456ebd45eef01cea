"""A test's body on every rank: what pytest calls instead of it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from distsim.plugin.markers import marker_of, sizes_of
from distsim.plugin.on_rank.fixtures import refuse_shared, sub_tests_of
from distsim.plugin.options import Options, WorldOfAll
from distsim.plugin.tools.hypothesis import refuse_draws
from distsim.plugin.verdict import Verdict, fail_at, judge

__all__ = ["everywhere", "import_for"]


def import_for(items: Iterable[pytest.Item]) -> None:
    """Import what the tests among *items* that run on ranks need."""
    for arms in {str(marker.kwargs.get("on", "sim")) for item in items if (marker := marker_of(item)) is not None}:
        for on in ("sim", "gloo"):
            if on in arms:
                _arm(on)


def everywhere(item: pytest.Function, body: Callable[..., Any], marker: pytest.Mark) -> Callable[..., None]:
    """What pytest calls instead of *body*."""

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
            told = mistake
        else:
            return
        file, line, _ = item.reportinfo()
        fail_at((os.fspath(file), (line or 0) + 1), pytest.fail.Exception(str(told), pytrace=False))

    return run


def _hand_over(item: pytest.Function, results: list[Any]) -> None:
    """What the ranks returned, to the fixture `world`."""
    world = item.funcargs.get("world")
    if isinstance(world, WorldOfAll):
        vars(world)["returned"] = results


def _options(item: pytest.Function, marker: pytest.Mark) -> list[Options]:
    params: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    sizes = params.get("distsim_world_size", sizes_of(marker))
    arms = params.get("distsim_on", marker.kwargs.get("on", "sim"))
    # A method of a unittest.TestCase cannot be parametrized: there all combinations run one after the other.
    return [
        Options.read(marker, n, on, item.config)
        for on in (arms if isinstance(arms, list | tuple) and arms else [arms])
        for n in (sizes if isinstance(sizes, list | tuple) and sizes else [sizes])
    ]


def _arm(on: str) -> Callable[..., Verdict]:
    if on == "sim":
        from distsim.plugin.run_sim import run_simulated

        return run_simulated
    from distsim.plugin.run_gloo import run_real

    return run_real
