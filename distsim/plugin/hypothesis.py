"""Runs hypothesis tests: one engine draws in pytest's own thread, and all ranks run each example.

As in pytest-asyncio, the replacement of the body is what the engine calls, `hypothesis.inner_test`. Examples are
therefore drawn once, all ranks see the same, and a failure on any rank shrinks. An example that a rank rejects
(`assume`) is rejected.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from distsim.debug.records.frames import Owner, owner

_REJECTED = "hypothesis.errors.UnsatisfiedAssumption"
_OURS = "distsim.pytest_plugin"


def draws(body: object) -> bool:
    """Return whether *body* is decorated with `@given`."""
    return bool(getattr(body, "is_hypothesis_test", False)) and hasattr(body, "hypothesis")


@contextlib.contextmanager
def one_engine(item: pytest.Function, on_ranks: Callable[[Callable[..., Any]], Callable[..., None]]) -> Iterator[None]:
    """Let the hypothesis engine of *item* call what *on_ranks* makes of its test."""
    function: Any = getattr(item.obj, "__func__", item.obj)
    inner, settings = function.hypothesis.inner_test, function._hypothesis_internal_use_settings
    function.hypothesis.inner_test = on_ranks(inner)
    function._hypothesis_internal_use_settings = _for_ranks(item, settings)
    try:
        with _explains_by_users_lines():
            yield
    except pytest.fail.Exception as failure:
        notes, failure.__notes__ = getattr(failure, "__notes__", []), []
        head, _, rest = str(failure.msg).partition("\n")
        failure.msg = "\n".join([head, *notes, rest])
        raise
    finally:
        function.hypothesis.inner_test = inner
        function._hypothesis_internal_use_settings = settings


@contextlib.contextmanager
def _explains_by_users_lines() -> Iterator[None]:
    """Keep hypothesis from listing lines that only failing examples run: in its thread these are lines of distsim
    and pytest.
    """
    from hypothesis.internal import scrutineer

    real: Any = getattr(scrutineer, "should_trace_file", None)
    if real is None:
        yield
        return
    vars(scrutineer)["should_trace_file"] = lambda file: owner(file) is Owner.USER and real(file)
    try:
        yield
    finally:
        vars(scrutineer)["should_trace_file"] = real


def _for_ranks(item: pytest.Function, settings: Any) -> Any:
    """Adjust hypothesis settings: no deadline, because ranks take time to start, and no check for function-scoped
    fixtures such as `rank`."""
    from hypothesis import HealthCheck
    from hypothesis import settings as make

    quiet = set(settings.suppress_health_check)
    changing = {
        fixture.func.__module__
        for name in item._fixtureinfo.argnames
        for fixture in (item._request._get_active_fixturedef(name),)
        if fixture.scope == "function"
    }
    if changing == {_OURS}:
        quiet.add(HealthCheck.function_scoped_fixture)
    return make(settings, deadline=None, suppress_health_check=quiet)


def refuse_draws(arguments: Mapping[str, Any]) -> None:
    """Refuse `st.data()`, which draws inside the body, so that each rank would draw other values."""
    for name, value in arguments.items():
        if type(value).__name__ == "DataObject" and type(value).__module__.startswith("hypothesis."):
            raise pytest.UsageError(
                f"{name}=st.data(): each rank would draw values of its own in a body that runs on all of them; "
                "draw in @given(...), with st.composite where one value depends on another"
            )


def rejected(bases: tuple[str, ...]) -> bool:
    """Return whether an exception with these *bases* rejects the example."""
    return _REJECTED in bases


def in_the_example() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context in which `assume`, `note` and `event` on a rank refer to the example of the calling thread."""
    control = sys.modules.get("hypothesis.control")
    context = None if control is None else control._current_build_context.value
    if control is None or context is None:
        return contextlib.nullcontext
    return lambda: control._current_build_context.with_value(context)
