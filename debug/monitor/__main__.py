"""`python -m distsim.debug.monitor DIR --job JOB`: the monitor of a host, as its ranks start it."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from distsim.debug.monitor.process import Steady, watch_series
from distsim.debug.settings import Settings

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m distsim.debug.monitor DIR --job JOB`; the settings come from the environment."""
    parser = argparse.ArgumentParser(prog="distsim.debug.monitor")
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--job")
    parser.add_argument("--series", action="store_true", help="watch job after job, as standard input names them")
    args = parser.parse_args(argv)
    if args.series == (args.directory is not None):
        parser.error("expected a directory, or --series")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the ranks; the report follows
    with contextlib.suppress(OSError):
        os.nice(5)  # the ranks come first
    if args.series:
        watch_series(sys.stdin, sys.stdout)
        return 0
    settings = Settings.read()
    return Steady(args.directory, settings, args.job or None).run()


if __name__ == "__main__":
    sys.exit(main())
