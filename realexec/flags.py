"""Flags of `distsim run` for real runs. They are part of `--help`, so torch is not imported here."""

from __future__ import annotations

import argparse

from distsim.debug.settings import DEFAULT_HANG_AFTER_S, Level, OnHang

__all__ = ["add_real_flags"]


def add_real_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--level`, `--on-hang`, `--hang-after` and the other flags of real runs."""
    group = parser.add_argument_group("a real run (--on gloo, nccl, mpi)")
    group.add_argument(
        "--level",
        choices=[str(level) for level in Level],
        default=None,
        help="how closely it is watched: off; record every call; check them as they arrive (default); strict: "
        "compare before bytes go out, every rank raises at its own line",
    )
    group.add_argument(
        "--on-hang",
        choices=[str(choice) for choice in OnHang],
        default=None,
        help="after the report of a hang: abort the job (default), report only, or wait for a debugger",
    )
    group.add_argument(
        "--hang-after",
        type=float,
        default=None,
        metavar="SECONDS",
        help="time after which a rank that still computes counts as missing, if other ranks wait for it (default: "
        f"{DEFAULT_HANG_AFTER_S:g}). A job in which no rank waits in a call counts as hung if no rank has moved for "
        "this long or, if you set this flag, has made a call. Proven deadlocks are reported at once",
    )
    group.add_argument(
        "--rings",
        metavar="DIR",
        default=None,
        help="keep the flight records here, for distsim diagnose and watch",
    )
    group.add_argument("--nan", action="store_true", help="report the first rank and call with NaN")
    group.add_argument("--checksum", action="store_true", help="report buffers that are written while a call uses them")
    group.add_argument(
        "--verbose", action="store_true", help="let every rank print where its flight records and the report are"
    )
