"""`caplog` and `monkeypatch` of one simulated rank, as in a process of its own.

They contain the log and the levels of this rank only, and their changes apply to this rank only.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Mapping
from typing import Any

import pytest
from _pytest.logging import LogCaptureHandler, caplog_handler_key, caplog_records_key

from distsim.sim.isolation.torch_state.torch_state import STATE

_NOT_GIVEN: Any = object()


class _Own:
    """Replacement for the attributes that pytest's fixture reads from its test."""

    def __init__(self) -> None:
        self.stash = pytest.Stash()


def rank_log(everybodys: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return a fixture for this rank that replaces the shared *everybodys*; the root logger with its handler is the
    rank's own."""
    handler, own = LogCaptureHandler(), _Own()
    handler.setLevel(everybodys.handler.level)
    own.stash[caplog_handler_key] = handler
    own.stash[caplog_records_key] = {"call": handler.records}
    logging.root.removeHandler(everybodys.handler)
    logging.root.addHandler(handler)
    mine: Any = pytest.LogCaptureFixture(own, _ispytest=True)  # type: ignore[arg-type]
    return mine  # type: ignore[no-any-return]


class RankMonkeyPatch(pytest.MonkeyPatch):  # type: ignore[misc]  # whoever asks for one gets one
    """Attributes of modules, classes and objects, and items of dicts. The environment, the current folder and
    `sys.path` are each simulated rank's own anyway."""

    def setattr(self, target: Any, name: Any, value: Any = _NOT_GIVEN, raising: bool = True) -> None:
        if value is _NOT_GIVEN:  # ("module.attribute", value)
            target, name, value = *_resolved(target), name
        STATE.take_over(target, name)
        super().setattr(target, name, value, raising=raising)

    def delattr(self, target: Any, name: Any = _NOT_GIVEN, raising: bool = True) -> None:
        if name is _NOT_GIVEN:
            target, name = _resolved(target)
        STATE.take_over(target, name)
        super().delattr(target, name, raising=raising)

    def setitem(self, dic: Mapping[Any, Any], name: Any, value: Any) -> None:
        STATE.take_over(dic, name)
        super().setitem(dic, name, value)

    def delitem(self, dic: Mapping[Any, Any], name: Any, raising: bool = True) -> None:
        STATE.take_over(dic, name)
        super().delitem(dic, name, raising=raising)


def _resolved(path: str) -> tuple[Any, str]:
    holder, _, name = path.rpartition(".")
    return pkgutil.resolve_name(holder), name
