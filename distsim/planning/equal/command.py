"""`distsim equal SCRIPT`: simulates one program in two layouts and compares what they compute."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from distsim.cli.run import check_script
from distsim.errors import UsageError
from distsim.options import add_flags, default_of
from distsim.planning.command import script_parser
from distsim.text.output_files import output_file, write_json

DESCRIPTION = """\
Run a program in two layouts, simulated with real values, and compare what they compute: outputs of modules, gradients,
parameters after each step. For tensor, sequence, context and expert parallelism.

  distsim equal --nproc-per-node 2 train.py                            2 ranks, and the same script on 1
  distsim equal --nproc-per-node 8 --and-nproc-per-node 2 --and-args "--tp 1" train.py --tp 4

The second layout keeps the data-parallel size of the first and leaves the model's axes out: other batches would make
other gradients. Dropout is off. docs/equal.md says how tensors are matched, and what is not compared.

exit codes: 0 equal, 5 it differs, 2 a layout does not run or nothing can be compared
"""
DIFFERS = 5

AFTER_SCRIPT = ("--and-args", "--and-nproc-per-node")


def add_parser(subparsers: Any) -> None:
    """Add `equal`."""
    parser = script_parser(subparsers, "equal", DESCRIPTION)
    add_flags(parser, "on", "nnodes", "nproc_per_node", "seed")
    parser.add_argument(
        "--and-args", metavar="ARGUMENTS", help="of the script in the second layout (default: the same as in the first)"
    )
    parser.add_argument(
        "--and-nproc-per-node", type=int, default=1, metavar="N", help="ranks of the second layout (default: 1)"
    )
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps that are compared (default: 3)")
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="[RANKS:]NAME=NAME",
        help="a module that has another name in the second layout (of RANKS of the first, such as 2,3), such as "
        "1:layers.0=layers.4; may be given several times",
    )
    parser.add_argument(
        "--report",
        metavar="FILE|-",
        type=output_file("--report"),
        help="the comparison as JSON (schema distsim.equal/1)",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Compare; 0 equal, 5 not."""
    from distsim.debug.report.console import Console, piped_width
    from distsim.planning.equal.layouts import compare_layouts
    from distsim.planning.equal.report import lines, to_json

    first, second = _specs(args)

    def say(text: str) -> None:
        print(f"distsim: {text} ...", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="distsim_equal_") as folder:
        comparison = compare_layouts(first, second, Path(folder), say)
    stream = sys.stderr if args.report == "-" else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else piped_width(80))
    for line in lines(comparison):
        for part in line.wrapped(console.width):
            console.print(part, crop=False)
    write_json("--report", args.report, to_json(comparison))
    return DIFFERS if comparison.differs else 0


def _specs(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the two layouts."""
    from distsim.planning.equal.child import Spec

    if not args.module:
        check_script(args.training_script)
    for flag, value in (("--steps", args.steps), ("--and-nproc-per-node", args.and_nproc_per_node)):
        if value < 1:
            raise UsageError(f"{flag}: expected 1 or more, got {value}")
    renamed = dict(_renamed(text) for text in args.map)
    mine = list(args.training_script_args)
    second_words = mine if args.and_args is None else _words(args.and_args)
    program = args.training_script if args.module else os.path.abspath(args.training_script)
    on = default_of("on") if args.on is None else args.on
    first = Spec(
        program, args.module, mine, on, args.nnodes, args.nproc_per_node, args.seed, args.steps, "", renamed=renamed
    )
    second = Spec(program, args.module, second_words, on, 1, args.and_nproc_per_node, args.seed, args.steps, "")
    return first, second


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--and-args: expected arguments as a shell takes them, got {text!r} ({error})") from None


def _renamed(text: str) -> tuple[str, str]:
    here, equals, there = text.partition("=")
    ranks, colon, name = here.rpartition(":")
    if not equals or not name or not there or (colon and not re.fullmatch(r"\d+(,\d+)*", ranks)):
        raise UsageError(f"--map: expected [RANKS:]NAME=NAME, as 1:layers.0=layers.4, got {text!r}")
    return here, there
