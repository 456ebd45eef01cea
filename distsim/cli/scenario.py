"""`distsim scenario run | new | from | schema`: scenario files from the command line."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.cli.inputs.pool import add_pool_flags
from distsim.errors import DistsimError, UsageError
from distsim.text.output_files import output_file, page_file
from distsim.text.untrusted_input import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distsim.scenario import Result, Scenario
    from distsim.scenario.explore.search import Explored
    from distsim.scenario.file.load import BadFile
    from distsim.scenario.pool import PointPool

USAGE = 2
EXPECTATION_FAILED = 5


def add_parser(subparsers: Any) -> None:
    """Add the command `scenario` and its subcommands."""
    parser = subparsers.add_parser("scenario", description=__doc__)
    commands = parser.add_subparsers(dest="action", metavar="run | new | from | schema", required=True)
    _add_run(commands)
    new = commands.add_parser("new", help="write a first scenario and its program")
    new.add_argument("path", help="the .toml file to write")
    new.add_argument("--program", metavar="SCRIPT", help="a script that exists (path from the new file)")
    new.set_defaults(func=_new)
    origin = commands.add_parser("from", help="turn the flight records of a hung run into a minimal scenario")
    origin.add_argument("directory", metavar="DIR", help="rings of a guarded run, or Flight Recorder dumps")
    origin.add_argument("-o", "--output", metavar="FILE", default="reproduced.toml", help="(default: reproduced.toml)")
    origin.add_argument("--no-shrink", action="store_true", help="keep every rank and call")
    origin.set_defaults(func=_from)
    commands.add_parser("schema", help="print the JSON schema of scenario files").set_defaults(func=_schema)


def _add_run(commands: Any) -> None:
    run = commands.add_parser("run", help="run scenarios and check what they expect (exit code 5 where one fails)")
    run.add_argument("paths", nargs="+", metavar="PATH", help="scenario files and folders of them")
    run.add_argument("--junit", metavar="FILE", type=output_file("--junit", "junit.xml"), help="also write JUnit XML")
    run.add_argument(
        "--html", metavar="FILE", type=page_file, help="a page of all scenarios, each with its report (extra: html)"
    )
    run.add_argument(
        "-k", dest="expression", metavar="EXPR", help="only scenarios whose name matches: 'hang and not slow'"
    )
    add_pool_flags(run, 1, script=False)
    run.add_argument("--update-baselines", action="store_true", help="store the current step times")
    run.add_argument("--seed", type=int, metavar="N", help="instead of the file's")
    run.add_argument("--schedule", help=argparse.SUPPRESS)
    run.add_argument(
        "--explore", metavar="all|N|Ns", help="run in every order of operations, in N runs or for N seconds"
    )
    run.add_argument(
        "--explore-faults", metavar="KINDS", help="what else to try, with commas: kill, store-loss, timeout, buffered"
    )
    run.add_argument("--replay", metavar="STRING", help="run in the order that --explore has printed")
    run.add_argument("--backend", choices=["sim", "gloo"], help="instead of the file's")
    run.add_argument("-v", "--verbose", action="store_true", help="also show reports and output of scenarios that pass")
    run.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    from distsim.scenario.expect.result import NOT_RUN, Result
    from distsim.scenario.pool import opened, pool_of
    from distsim.scenario.suite import run_suite

    pool = pool_of(args)
    _check_orders(args)
    scenarios, bad = _chosen(args)
    results = [Result(file.name, str(file.path), list(file.faults), kind=NOT_RUN) for file in bad]
    if not scenarios:  # nothing runs, so nothing is reported but the files' own faults
        if not bad:
            raise UsageError(f"no scenario matches -k {args.expression!r}")
        _write(results, args.junit)
        raise UsageError("\n".join(map(str, bad)))
    for result in results:
        _show(result, args.verbose)
    began = time.perf_counter()
    explored = [scenario for scenario in scenarios if _is_explored(scenario, args)]
    others = [scenario for scenario in scenarios if not _is_explored(scenario, args)]
    results += _explore(explored, args, pool)
    if others and args.replay is not None:
        for scenario in others:
            results.append(_replay(scenario, args.replay))
            _show(results[-1], args.verbose)
    elif others:
        with opened(pool):
            for result in run_suite(others, pool, args.update_baselines, picture=args.html is not None):
                results.append(result)
                _show(result, args.verbose)
    if others or len(results) > 1:
        print(f"{_count(results)} in {time.perf_counter() - began:.1f} s")
    _write(results, args.junit)
    if args.html is not None:
        from distsim.report.html.page import suite_page, write_page
        from distsim.scenario.expect.result import entry

        write_page(suite_page([entry(result) for result in results], _count(results)), args.html)
    if any(result.ran and not result.passed for result in results):
        return EXPECTATION_FAILED  # what was found wrong with a program weighs more than a file that could not run
    return 0 if all(result.ran for result in results) else USAGE


def _chosen(args: argparse.Namespace) -> tuple[list[Scenario], list[BadFile]]:
    """Return the scenarios that the flags mean, as the flags change them, and the files that cannot run."""
    from distsim.scenario import load_scenarios
    from distsim.scenario.file.load import BadFile
    from distsim.scenario.suite import matching

    meant = matching(args.expression)
    changes = {name: getattr(args, name) for name in ("seed", "backend") if getattr(args, name) is not None}
    bad: list[BadFile] = []
    scenarios = []
    for scenario in filter(meant, load_scenarios(args.paths, bad)):
        try:
            scenarios.append(scenario.changed(**changes) if changes else scenario)
        except BadFile as error:
            bad.append(error)
    return scenarios, list(filter(meant, bad))


def _write(results: Sequence[Result], junit: str | None) -> None:
    if junit is not None:
        from distsim.scenario.expect.result import write_junit

        write_junit(results, junit)


def _count(results: Sequence[Result]) -> str:
    passed = sum(result.passed for result in results)
    left_out = sum(not result.ran for result in results)
    more = f", {left_out} not run" if left_out else ""
    return f"{passed} passed, {len(results) - passed - left_out} failed{more}"


def _show(result: Result, verbose: bool) -> None:
    from distsim.scenario.expect.result import annotation
    from distsim.text.github import on_github

    word = "ok    " if result.passed else "FAILED" if result.ran else "ERROR "
    facts = ", ".join(filter(None, (result.verdict, result.step_time, f"{result.wall_s:.2f} s")))
    print(f"{word} {printable(result.name)}  ({facts})", flush=True)
    if not result.passed or verbose:
        print(
            "\n".join(f"    {line}" if line else "" for line in printable(result.text).splitlines()) + "\n", flush=True
        )
    if not result.passed and on_github(os.environ):
        print(annotation(result), flush=True)


def _check_orders(args: argparse.Namespace) -> None:
    """Check the flags about orders.

    Raises:
        UsageError: One of them is wrong, or two exclude each other.
    """
    from distsim.scenario.explore.budget import Budget, check_kinds
    from distsim.scenario.file.load import NO_SCHEDULES

    if args.schedule is not None:
        raise UsageError(f"--schedule: {NO_SCHEDULES}")
    if args.explore is not None and args.replay is not None:
        raise UsageError("--explore tries many orders, --replay repeats one; give one of the two")
    checks = (("--explore", args.explore, Budget.read), ("--explore-faults", args.explore_faults, check_kinds))
    for flag, value, check in checks:
        try:
            if value is not None:
                check(value)
        except UsageError as error:
            raise UsageError(f"{flag}: {error}") from None


def _is_explored(scenario: Scenario, args: argparse.Namespace) -> bool:
    return args.replay is None and (args.explore is not None or scenario.spec.explore is not None)


def _replay(scenario: Scenario, text: str) -> Result:
    """Run *scenario* in one order."""
    from distsim.scenario.explore.scenarios import replayed
    from distsim.scenario.run import observe, simulate_scenario

    began = time.perf_counter()
    string = replayed(scenario, text)
    orders = string.orders()
    outcome, output, conditions = simulate_scenario(scenario, orders)
    string.check_reached(orders.trace)
    result = observe(scenario, outcome, output, conditions, replay=text)
    result.wall_s = time.perf_counter() - began
    return result


def _explore(scenarios: list[Scenario], args: argparse.Namespace, pool: PointPool | None) -> Iterator[Result]:
    from distsim.scenario.expect.result import NOT_RUN, Result, annotation
    from distsim.scenario.explore.budget import Budget, check_kinds
    from distsim.scenario.explore.scenarios import explore_scenario
    from distsim.scenario.explore.workers import warmed
    from distsim.text.github import on_github

    with warmed(pool, scenarios) as workers:
        for scenario in scenarios:
            explore = args.explore or scenario.spec.explore or "all"
            kinds = scenario.spec.explore_faults if args.explore_faults is None else check_kinds(args.explore_faults)
            try:
                explored = explore_scenario(scenario, Budget.read(explore), tuple(kinds), _progress, workers)
            except DistsimError as error:
                refused = Result(scenario.name, str(scenario.path), [str(error)], kind=NOT_RUN)
                _show(refused, verbose=True)
                yield refused
                continue
            if sys.stderr.isatty():
                print("\r\033[K", end="", file=sys.stderr, flush=True)
            print(printable(explored.text), flush=True)
            if not explored.result.passed and on_github(os.environ):
                print(annotation(explored.result), flush=True)
            yield explored.result


def _progress(explored: Explored) -> None:
    """Show on a terminal how far an exploration is."""
    if sys.stderr.isatty() and not explored.runs % 20:
        text = f"\r{explored.runs:,} runs, {explored.classes:,} classes, {explored.failing_classes:,} fail"
        print(text, end="", file=sys.stderr, flush=True)


def _new(args: argparse.Namespace) -> int:
    from distsim.scenario.file.new import new_scenario

    written = new_scenario(Path(args.path), args.program)
    for path in written:
        print(f"wrote {path}")
    print(f"run it: distsim scenario run {written[0]}")
    return 0


def _from(args: argparse.Namespace) -> int:
    from distsim.scenario.reproduce.reproduce import reproduce

    for line in reproduce(Path(args.directory), Path(args.output), shrink=not args.no_shrink):
        print(printable(line))
    return 0


def _schema(args: argparse.Namespace) -> int:
    from distsim.scenario.file.schema import json_schema

    print(json_schema())
    return 0
