"""Flags of the commands that vary settings of a script or a scenario, and what they mean."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.cli.inputs.pool import add_pool_flags
from distsim.cli.run import add_fault_flag, price_of
from distsim.cluster.files.load import kind_of
from distsim.errors import UsageError
from distsim.options import add_flags, default_of
from distsim.text.output_files import output_file, page_file
from distsim.text.units import plural
from distsim.text.untrusted_input import digits

if TYPE_CHECKING:
    from distsim.planning.points import KeptPoints
    from distsim.planning.variations import Variation
    from distsim.scenario.expect.result import Result
    from distsim.scenario.file.load import Scenario
    from distsim.scenario.pool import PointPool

AFTER_SCRIPT = ("--on", "--vary", "--budget", "--objective", "--price", "--csv", "--html", "--plot")
"""Flags that are distsim's even after the script, unless the script has one of that name."""
OF_SCRIPT = ("nnodes", "nproc_per_node", "routing", "lengths", "fuse", "gpu_libraries", "fidelity")


@dataclass(frozen=True)
class Space:
    """What a command varies: a scenario, and the values of its settings."""

    scenario: Scenario
    variations: list[Variation]
    prices: Mapping[str, float]
    """Price of one GPU hour by kind of machine; the key "" stands for all kinds. See `prices_of`."""
    pool: PointPool | None
    """Where points run; None: here, one by one."""

    @property
    def size(self) -> int:
        """Return the number of points."""
        return math.prod(len(variation.values) for variation in self.variations)

    def priced(self, settings: Mapping[str, Any], result: Result) -> Result:
        """Return the result of the point with *settings*, whose price is that of --price if one was given for its
        kind of machine.
        """
        if not self.prices:
            return result
        kind = kind_of(str(settings.get("on", self.scenario.spec.on)))
        price = self.prices.get(kind, self.prices.get(""))
        if price is None:
            return result
        return replace(result, figures=result.figures | {"price": price})

    def kept(self) -> KeptPoints:
        """Return where points are kept for a day, and say so if some were kept before."""
        from distsim.planning.points import KeptPoints

        kept = KeptPoints(self.scenario)
        kept.discard_old()
        if len(kept):
            print(
                f"distsim: {plural(len(kept), 'result')} of this script kept from before, of any search; what is asked "
                f"for again does not run again; to run it again, delete {kept.folder}",
                file=sys.stderr,
            )
        return kept


def script_parser(subparsers: Any, name: str, description: str) -> argparse.ArgumentParser:
    """Add a command that takes a script with its arguments, as torchrun does."""
    usage = f"distsim {name} [flags] [-m] training_script [script's own arguments]"
    parser: argparse.ArgumentParser = subparsers.add_parser(name, description=description, usage=usage)
    parser.add_argument("training_script", metavar="SCRIPT", help="the script, or a module's name with -m")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="of the script")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    return parser


def add_point_flags(parser: argparse.ArgumentParser, vary: str, page: str) -> None:
    """Add the flags that these commands share. *vary* is an example of `--vary`, *page* what `--html` shows."""
    name = parser.prog.rpartition(" ")[2]
    parser.add_argument("--vary", action="append", default=[], metavar=vary, help="may be given several times")
    add_pool_flags(parser, os.cpu_count() or 1)
    parser.add_argument(
        "--price",
        metavar="AMOUNT",
        help="price of one GPU hour, for the cost of tokens; by kind of machine: dgx-h100=2.5,dgx-b200=4 (default: "
        "price in the cluster file; presets of public machines have a list price)",
    )
    for flag, text in (("csv", "all figures of all points"), ("json", f"the same as JSON (schema distsim.{name}/1)")):
        checked = output_file(f"--{flag}", f"{name}.{flag}")
        parser.add_argument(f"--{flag}", metavar="FILE", type=checked, help=text)
    parser.add_argument("--html", metavar="FILE", type=page_file, help=f"{page} (extra: html)")
    of_script = parser.add_argument_group("where a script runs")
    of_script.add_argument("--on", metavar="CLUSTER,...", help="clusters, as a further setting that varies")
    add_flags(of_script, *OF_SCRIPT)
    add_fault_flag(of_script)
    of_script.add_argument("--script-arguments", help=argparse.SUPPRESS)


def prices_of(text: str, kinds: Sequence[str]) -> dict[str, float]:
    """Return the prices of a GPU hour that *text* gives, such as `2.5` or `dgx-h100=2.5,dgx-b200=4`.

    Args:
        text: The value of --price.
        kinds: The kinds of machine that there are.

    Returns:
        Prices by kind of machine; a price without a kind has the key "".

    Raises:
        UsageError: An amount is not a number, or there is no such kind.
    """
    prices: dict[str, float] = {}
    for part in text.split(","):
        kind, equals, amount = part.strip().rpartition("=")
        if equals and kind not in kinds:
            raise UsageError(f"--price {part.strip()}: expected one of {', '.join(kinds)} before =, got {kind}")
        price = price_of(amount)
        assert price is not None
        prices[kind] = price
    return prices


def rewritten(argv: Sequence[str]) -> list[str]:
    """Return *argv* in a form that argparse accepts: `--vary --tp=1,2` becomes one word, and arguments after a
    script belong to the script.
    """
    words, rest = [], list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--vary" and rest and rest[0].startswith("-") and "=" in rest[0]:
            word += f"={rest.pop(0)}"
        words.append(word)
        if word.endswith(".py") and not word.startswith("-"):
            return [*words, f"--script-arguments={shlex.join(rest)}"]
    return words


def node_range(text: str) -> tuple[int, int]:
    """Return the fewest and the most nodes that `1..64`, or `8` alone, stands for.

    Raises:
        UsageError: It is not a range.
    """
    first, dots, last = text.partition("..")
    least, most = digits(first.strip()), digits((last if dots else first).strip())
    if not least or not most or least > most:
        raise UsageError(f"--nodes: expected a range of numbers of nodes such as 1..64, got {text!r}")
    return least, most


def space_of(args: argparse.Namespace, example: str | None) -> Space:
    """Return what the flags ask for. *example* is a `--vary` for the message where nothing varies; None: nothing needs
    to vary.

    Raises:
        UsageError: A flag has a wrong value, or nothing varies.
    """
    from distsim.planning.variations import checked, parse_variation
    from distsim.scenario.pool import pool_of

    variations = [parse_variation(text) for text in args.vary]
    scenario = _scenario(args)
    if args.on is not None and "," in args.on:
        variations.insert(0, parse_variation(f"on={args.on}"))
    if not variations and example is not None:
        raise UsageError(f"nothing to vary: expected --vary {example}, or several clusters after --on")
    variations = [checked(variation, scenario) for variation in variations]
    prices = {}
    if args.price is not None:
        clusters = [str(value) for one in variations if one.path == "on" for value in one.values] or [scenario.spec.on]
        prices = prices_of(args.price, list(dict.fromkeys(map(kind_of, clusters))))
    return Space(scenario, variations, prices, pool_of(args))


def _scenario(args: argparse.Namespace) -> Scenario:
    from distsim.planning.variations import script
    from distsim.scenario import load_scenario

    given = {name: getattr(args, name) for name in OF_SCRIPT if getattr(args, name) != default_of(name)}
    if args.fault:
        from distsim.scenario.file.fault_words import fault_of

        given["faults"] = [fault_of(text) for text in args.fault]
    if args.scenario.endswith(".py"):
        if args.on is not None:
            given["on"] = args.on.split(",")[0]
        return script(Path(args.scenario), shlex.split(args.script_arguments or ""), **given)
    if given or args.on is not None:
        name = "on" if args.on is not None else next(iter(given)).removesuffix("s")
        raise UsageError(f"--{name.replace('_', '-')}: a scenario file contains it; vary it with --vary {name}=A,B")
    return load_scenario(args.scenario)
