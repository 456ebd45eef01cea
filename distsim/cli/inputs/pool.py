"""Flags of commands that run many points: where these run."""

from __future__ import annotations

import argparse


def add_pool_flags(parser: argparse.ArgumentParser, workers: int, script: bool = True, machines: bool = True) -> None:
    """Add the flags that `distsim.scenario.pool.pool_of` reads.

    Args:
        parser: Gets the flags.
        workers: How many points run at a time on this machine without them.
        script: Whether the points are of one script, whose sources can be sent along.
        machines: Whether they may run on other machines.
    """
    parser.add_argument("-n", dest="workers", type=int, metavar="N", help="the same as --pool processes:N")
    parser.add_argument(
        "--pool",
        metavar="ENGINE",
        help=f"where they run: processes[:N] of this machine (default: {workers})"
        + ", ray[:HOST:PORT], dask:HOST:PORT, slurm[:FLAGS], or module:function that returns an Executor" * machines,
    )
    if script:
        parser.add_argument("--ship", action="store_true", help="send the script's sources to the workers")
    parser.set_defaults(usual_workers=workers, **({} if script else {"ship": False}))
