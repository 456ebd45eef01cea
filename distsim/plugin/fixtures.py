"""Handles fixtures of a test whose body runs on every rank: there is one object of each fixture, and many ranks.

Most fixtures simply work (`tmp_path`, the user's own values). These do not: `capsys` and `caplog` would contain the
output of all ranks, `subtests` cannot report from another process, and all simulated ranks would train one shared
model at once. `on_this_rank` decides what is copied and what is shared.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import sys
import unittest
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, NamedTuple

import pytest

_REFUSED = {
    **dict.fromkeys(
        ("capfd", "capfdbinary", "capsysbinary", "capteesys"),
        "captures for all ranks together; capsys is each rank's own",
    ),
    **dict.fromkeys(
        ("record_property", "record_xml_attribute", "doctest_namespace"),
        "belongs to the test, not to a rank; use it in a fixture",
    ),
}


def refuse_shared(item: pytest.Function) -> None:
    """Raise an error for an argument of the body that is a fixture which cannot work on a rank."""
    arguments = item._fixtureinfo.argnames
    for name, why in _REFUSED.items():
        if name in arguments:
            raise pytest.UsageError(f"fixture {name!r} in a body that runs on every rank: it {why}")


class NoCopy(Exception):
    """Raised for a fixture that simulated ranks would have to share and that cannot be copied."""


class Printed(NamedTuple):
    """Result of `capsys.readouterr()`."""

    out: str
    err: str


class RankCapture:
    """`capsys` of one rank."""

    def __init__(self) -> None:
        self._real = sys.stdout, sys.stderr
        self._mine = io.StringIO(), io.StringIO()
        sys.stdout, sys.stderr = self._mine

    def readouterr(self) -> Printed:
        """Return what this rank has printed since the last call."""
        out, err = (stream.getvalue() for stream in self._mine)
        for stream in self._mine:
            stream.seek(0)
            stream.truncate()
        return Printed(out, err)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Return a context in which output goes to the test's output."""
        sys.stdout, sys.stderr = self._real
        try:
            yield
        finally:
            sys.stdout, sys.stderr = self._mine

    def end(self) -> None:
        """Send unread output to the test's output."""
        left = self.readouterr()
        sys.stdout, sys.stderr = self._real
        sys.stdout.write(left.out)
        sys.stderr.write(left.err)


@contextlib.contextmanager
def one_sub_test(msg: object = None, **parameters: object) -> Iterator[None]:
    """Replace `subTest` and `subtests.test`: a sub-test that fails ends its rank, and the error names it."""
    try:
        yield
    except Exception as error:
        description = [f"[{msg}]"] if msg is not None else []
        description += (
            [f"({', '.join(f'{name}={value!r}' for name, value in parameters.items())})"] if parameters else []
        )
        error.add_note(f"in the subtest {' '.join(description)}".rstrip())
        raise


class SubTests:
    """The fixture `subtests` on one rank."""

    test = staticmethod(one_sub_test)


@contextlib.contextmanager
def on_this_rank(
    body: functools.partial[Any], arguments: Mapping[str, Any], instance: object, *, share_memory: bool
) -> Iterator[Callable[[], Any]]:
    """Yield *body* with this rank's own arguments and `self` (*instance*), instead of the objects that pytest
    created for all ranks.

    If ranks *share memory*, these are copied for each rank: tensors, models, optimizers, learning rate schedulers,
    and dicts, lists and tuples that contain one of them, with everything in them; and `self`, with its containers.
    They are copied together, so that an optimizer keeps its model and a scheduler its optimizer. If one cannot be
    copied, the test fails, because all ranks would train the same object. `monkeypatch` and `caplog` are this rank's
    own. All ranks share any other object, even one of a user's class with a model as an attribute. Forked processes
    have copies of everything anyway.
    """
    mine = dict(arguments)
    patch = None
    if share_memory:
        from distsim.plugin.sim_fixtures import RankMonkeyPatch, rank_log

        copies = Copies()
        mine.update({name: copies.of(name, value) for name, value in mine.items() if holds_tensors(value)})
        if instance is not None:
            body, mine = on_own_instance(body, mine, instance, copies.of_attribute)
        copies.take_gradients()
        if isinstance(mine.get("monkeypatch"), pytest.MonkeyPatch):
            patch = mine["monkeypatch"] = RankMonkeyPatch()
        if isinstance(mine.get("caplog"), pytest.LogCaptureFixture):
            mine["caplog"] = rank_log(mine["caplog"])
    if "subtests" in mine:
        mine["subtests"] = SubTests()
    capture = None
    if isinstance(mine.get("capsys"), pytest.CaptureFixture):
        capture = mine["capsys"] = RankCapture()
    try:
        yield functools.partial(body, **mine)
    finally:
        if patch is not None:
            patch.undo()
        if capture is not None:
            capture.end()


_PLAIN = (list, dict, set, tuple, deque)
"""Python's containers."""


class Copies:
    """One rank's copies of the objects that all ranks would otherwise train. References between them are kept."""

    def __init__(self) -> None:
        self._memo: dict[int, Any] = {}

    def of(self, name: str, value: Any) -> Any:
        """Return a copy of *value*. Raises NoCopy with its *name*."""
        try:
            return copy.deepcopy(value, self._memo)
        except Exception as error:
            raise NoCopy(_no_copy(name, value, error)) from None

    def of_attribute(self, name: str, value: Any) -> Any:
        """Return a copy of an attribute of `self` if it is a tensor, model or similar, or a container; else the
        attribute itself.
        """
        if holds_tensors(value):
            return self.of(name, value)
        if type(value) in _PLAIN:
            with contextlib.suppress(Exception):  # a lock inside: shared, as it always was
                return copy.deepcopy(value, self._memo)
        return value

    def take_gradients(self) -> None:
        """Copy the gradients as well, which torch leaves out of a copy."""
        from torch.nn import Parameter

        memo = self._memo
        for original in list(memo.get(id(memo), ())):  # where deepcopy keeps all that it has copied
            if isinstance(original, Parameter) and original.grad is not None:
                memo[id(original)].grad = copy.deepcopy(original.grad, memo)


def _no_copy(name: str, value: object, error: Exception) -> str:
    expected = f"fixture {name!r}: expected a {type(value).__name__} that can be copied for each simulated rank"
    if "graph leaves" in str(error):
        # Its copy would have no way back to what it was computed from, so no gradient of the body would come there.
        return (
            f"{expected}, got a result of tensors that require grad: "
            "compute it in the body, or detach() it in the fixture"
        )
    why = str(error).partition("\n")[0]
    return f"{expected}, got {type(error).__name__}: {why}; make it in the body"


def holds_tensors(value: object) -> bool:
    """Return whether *value* is trainable, or contains something trainable in a dict, list or tuple."""
    import torch
    from torch.optim.lr_scheduler import LRScheduler

    if isinstance(value, torch.Tensor | torch.nn.Module | torch.optim.Optimizer | LRScheduler):
        return True
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(map(holds_tensors, inside))


@contextlib.contextmanager
def sub_tests_of(body: object) -> Iterator[None]:
    """Replace `self.subTest` of a unittest.TestCase while its method runs on ranks."""
    case = getattr(body, "__self__", None)
    if not isinstance(case, unittest.TestCase):
        yield
        return
    vars(case)["subTest"] = one_sub_test
    try:
        yield
    finally:
        del vars(case)["subTest"]


def on_own_instance(
    body: functools.partial[Any], arguments: Mapping[str, Any], instance: object, own: Callable[[str, Any], Any]
) -> tuple[functools.partial[Any], dict[str, Any]]:
    """Return *body* and its *arguments* with a copy of *instance* as `self`.

    Its tensors, models, lists, dicts and sets are copied by *own*, which gets their names; all other objects are
    shared.
    """
    mine = copy.copy(instance)
    for name, value in vars(mine).items():
        if not name.startswith("_"):  # unittest's own
            vars(mine)[name] = own(f"self.{name}", value)
    method: Any = body.func
    if getattr(method, "__self__", None) is instance:
        method = MethodType(method.__func__, mine)
    first = [mine if argument is instance else argument for argument in body.args]
    named = {name: mine if argument is instance else argument for name, argument in arguments.items()}
    return functools.partial(method, *first), named
