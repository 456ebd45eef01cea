"""`caplog` of one simulated rank: what this rank has logged, and levels that it alone has set."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from _pytest.logging import LogCaptureHandler, caplog_handler_key, caplog_records_key

__all__ = ["rank_log"]


class _Own:
    """What pytest's fixture asks its test for."""

    def __init__(self) -> None:
        self.stash = pytest.Stash()


def rank_log(everybodys: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """A fixture of its own in the place of *everybodys*; the root logger, which has its handler, is this rank's own."""
    handler, own = LogCaptureHandler(), _Own()
    handler.setLevel(everybodys.handler.level)
    own.stash[caplog_handler_key] = handler
    own.stash[caplog_records_key] = {"call": handler.records}
    logging.root.removeHandler(everybodys.handler)
    logging.root.addHandler(handler)
    mine: Any = pytest.LogCaptureFixture(own, _ispytest=True)  # type: ignore[arg-type]
    return mine  # type: ignore[no-any-return]
