"""How the command line starts: what it switches off meanwhile is on again before a program runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from distsim.cli.dispatch import many_imports


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_the_collector_rests_while_our_own_process_imports() -> None:
    """Afterwards it runs again, and passes over what came meanwhile."""
    frozen = gc.get_freeze_count()
    with many_imports(own_process=True):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen


@pytest.mark.parametrize(("own_process", "enabled"), [(False, True), (True, False)])
def test_a_collector_that_is_not_ours_is_left_alone(own_process: bool, enabled: bool) -> None:
    """Of a Python program that calls the command line, and one that somebody has switched off."""
    frozen = gc.get_freeze_count()
    if not enabled:
        gc.disable()
    with many_imports(own_process):
        assert gc.isenabled() is enabled
    assert gc.isenabled() is enabled
    assert gc.get_freeze_count() == frozen
