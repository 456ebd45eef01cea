"""The command line `distsim`.

A subcommand is a module of this package, named in `distsim.cli.dispatch.COMMANDS`, with one function
`add_parser(subparsers) -> None`: it calls `subparsers.add_parser(name, ...)` and
`parser.set_defaults(func=handler)`, where `handler(args: argparse.Namespace) -> int` answers the
exit code. It is imported only when the user chose it. A user's mistake raises `UsageError`.
"""

from __future__ import annotations

from distsim.cli.dispatch import main

__all__ = ["main"]
