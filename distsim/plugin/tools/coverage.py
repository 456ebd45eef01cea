"""Coverage of what forked ranks run: each hands its data to pytest's process, which has the only file.

Nobody writes a line of configuration for it. Simulated ranks need nothing: their threads take up the trace function of
`threading`, as every thread does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["measured_apart", "take_in"]

_OPTIONS = (
    *("branch", "source", "source_pkgs", "source_dirs", "include", "omit", "context", "dynamic_context"),
    *("plugins", "relative_files", "cover_pylib", "core", "timid", "concurrency"),
)
"""Of its section `run`: what is measured, and how."""


def _current() -> Any:
    module = sys.modules.get("coverage")
    return None if module is None else module.Coverage.current()


@contextlib.contextmanager
def measured_apart(file: Path) -> Iterator[None]:
    """In a process forked from one that measures: measure as it does, and leave what was found in *file*."""
    inherited = _current()
    if inherited is None:
        yield
        return
    import coverage

    inherited.stop()
    own = coverage.Coverage(data_file=None, config_file=False)
    for name in _OPTIONS:
        with contextlib.suppress(coverage.CoverageException):  # one that this release does not know
            own.set_option(f"run:{name}", inherited.get_option(f"run:{name}"))
    own._warn_no_data = own._warn_unimported_source = own._warn_preimported_source = False
    own.start()
    try:
        yield
    finally:
        own.stop()
        file.write_bytes(own.get_data().dumps())


def take_in(directory: Path) -> None:
    """Add what ranks have left in *directory* to what is measured here."""
    cov = _current()
    if cov is None:
        return
    import coverage

    for file in sorted(directory.glob("coverage.*")):
        found = coverage.CoverageData(no_disk=True)
        found.loads(file.read_bytes())
        if found:
            cov.get_data().update(found)
