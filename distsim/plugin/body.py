"""A test's body on every rank: what pytest calls instead of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from distsim.plugin.options import Options
from distsim.plugin.shared_fixtures import refuse_shared, sub_tests_of
from distsim.plugin.verdict import Verdict, judge

__all__ = ["everywhere"]


def everywhere(item: pytest.Function, body: Callable[..., Any], marker: pytest.Mark) -> Callable[..., None]:
    """What pytest calls instead of *body*."""

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        try:
            refuse_shared(item)
            with sub_tests_of(body):
                for options in _options(item, marker):
                    verdict = _arm(options.on)(item, functools.partial(body, *args), kwargs, options)
                    judge(verdict, item, options)
        except pytest.UsageError as mistake:
            raise pytest.fail.Exception(str(mistake), pytrace=False) from None

    if inspect.iscoroutinefunction(body):
        raise pytest.fail.Exception(
            "world_size: expected a plain function, got an async one: call asyncio.run in the body", pytrace=False
        )
    return run


def _options(item: pytest.Function, marker: pytest.Mark) -> list[Options]:
    params: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    sizes = params.get("distsim_world_size", marker.args[0] if marker.args else marker.kwargs.get("n"))
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
