"""Finds and reads scenario files: reports every fault at once, each with its path in the file."""

from __future__ import annotations

import ast
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from distsim.cluster import Cluster, load_cluster
from distsim.debug.diagnosis.silent.facts import check_patterns
from distsim.errors import UsageError
from distsim.scenario.explore.budget import Budget
from distsim.scenario.file.schema import FaultSpec, ScenarioSpec
from distsim.sim.faults.fault import Rule
from distsim.sim.faults.link_faults import NetworkRule
from distsim.sim.faults.links import CUTS
from distsim.text.file_tables import complaints
from distsim.text.untrusted_input import brief, faulty, load_toml, read_bytes


def cut_off(cluster: Cluster, rule: NetworkRule, num_hosts: int) -> tuple[int, ...]:
    """Return the hosts that *rule* cuts off in at least one direction.

    Raises `UsageError` if there is none: a real host has one cable for both directions.
    """
    if rule.has_detour():
        raise UsageError("a real run has no second way for the traffic; leave the detour out, or use backend = 'sim'")
    cut = set(rule.links_in(cluster))
    host_of = {vertex.name: vertex.host for vertex in cluster.vertices if vertex.kind == "nic"}
    hosts = []
    for host in range(num_hosts):
        out = [link.index for link in cluster.links if link.kind == "nic" and host_of.get(link.src) == host]
        into = [link.index for link in cluster.links if link.kind == "nic" and host_of.get(link.dst) == host]
        if (out and cut.issuperset(out)) or (into and cut.issuperset(into)):
            hosts.append(host)
    if not hosts:
        raise UsageError(
            "a real run can only cut off whole hosts, but this rule cuts off none; name all NICs of a host "
            "('n0/nic*->*'), or use backend = 'sim'"
        )
    if len(hosts) == num_hosts == 1:
        raise UsageError("a real run on one host has no network to cut; take more nodes (on, nnodes)")
    return tuple(hosts)


_DYNAMIC = {"globals", "vars", "exec", "setattr", "__dict__", "__getattr__"}
"""Names whose use can bind other names dynamically."""


def lacks(source: Path, function: str) -> bool:
    """Return whether *source* certainly binds no *function* at its top level; False if that is not known."""
    try:
        tree = ast.parse(read_bytes(source, LARGEST_FILE))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # the run says so, with the line
        return False
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name) if name in _DYNAMIC:
                return False
            case ast.Global(names=names) if function in names:
                return False
    bound = set(_bound(tree))
    return function not in bound and "*" not in bound


def _bound(node: ast.AST) -> Iterator[str]:
    """Return names that *node* binds, outside of functions and classes."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield child.name
                continue
            case ast.Name(ctx=ast.Store()):
                yield child.id
            case ast.alias():
                yield child.asname or child.name.partition(".")[0]
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name
        yield from _bound(child)


def module_source(name: str, folder: Path) -> Path | None:
    """Return the source of a module that ranks can import beside *folder*; None if there is none to read. Nothing is
    imported, so the packages around it are searched one by one.
    """
    path = [str(folder.resolve()), *sys.path]
    parts, origin = name.split("."), None
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
        origin, path = spec.origin, list(spec.submodule_search_locations or ())
    return Path(origin) if origin is not None and origin.endswith(".py") else None


LARGEST_FILE = 16 << 20
NO_SCHEDULES = 'there are none any more: explore = "all" tries every order, and --replay STRING repeats one'
LONGEST_FAULT = 600


class BadFile(UsageError):
    """A scenario file that cannot run: all its *faults*, each one line with its path in the file."""

    def __init__(self, path: Path, faults: Sequence[str]) -> None:
        self.path, self.faults = path, [brief(fault, LONGEST_FAULT) for fault in faults]
        super().__init__(*faulty(path, self.faults).args)

    def __reduce__(self) -> tuple[type[BadFile], tuple[Path, list[str]]]:
        """Return the parts from which the error is rebuilt in another process."""
        return BadFile, (self.path, self.faults)

    @property
    def name(self) -> str:
        """Return the name of the scenario."""
        return _name(self.path)


def program_text(program: Path) -> str:
    """Return a program's text; empty if it cannot be read (the run then reports the reason)."""
    try:
        return read_bytes(program, LARGEST_FILE).decode("utf-8")
    except (OSError, ValueError):
        return ""


def _name(path: Path) -> str:
    """Return the folder and the file without its suffix, such as hangs/missing_rank."""
    return f"{path.resolve().parent.name}/{path.stem}"


@dataclass(frozen=True)
class Scenario:
    """One checked scenario: its file and its content."""

    path: Path
    spec: ScenarioSpec

    @property
    def name(self) -> str:
        """Return the folder and the file without its suffix, such as hangs/missing_rank."""
        return _name(self.path)

    @property
    def program(self) -> str:
        """Return the file or module part of `program`."""
        head, colon, tail = self.spec.program.rpartition(":")
        return head if colon and tail.isidentifier() else self.spec.program

    @property
    def function(self) -> str | None:
        head, colon, tail = self.spec.program.rpartition(":")
        return tail if colon and head and tail.isidentifier() else None

    @property
    def file(self) -> Path | None:
        """Return the program's file; None for a module."""
        if not self.program.endswith(".py"):
            return None
        return self.path.parent / self.program

    @property
    def on(self) -> str:
        """Return the cluster; a cluster file is searched relative to the scenario."""
        stem = self.spec.on.partition(":")[0]
        beside = self.path.parent / stem
        return str(self.path.parent / self.spec.on) if beside.suffix and beside.is_file() else self.spec.on

    @cached_property
    def cluster(self) -> Cluster:
        return load_cluster(self.on)

    @cached_property
    def world_size(self) -> int:
        return len(self.cluster.place(self.spec.nnodes, self.spec.nproc_per_node))

    @property
    def num_hosts(self) -> int:
        return 1 + max(slot.host for slot in self.cluster.place(self.spec.nnodes, self.spec.nproc_per_node))

    @property
    def rules(self) -> list[Rule]:
        return [fault.rule(f"faults[{i}]") for i, fault in enumerate(self.spec.faults)]

    @property
    def teaches(self) -> str:
        """Return the lesson of the scenario: the key `teaches`, or else the first sentence of its program."""
        if self.spec.teaches is not None:
            return self.spec.teaches
        if self.file is not None and self.file.is_file():
            first = program_text(self.file).lstrip().removeprefix('"""').split('"""')[0]
            return " ".join(first.removeprefix("Teaches:").split())
        return ""

    def marked(self, marker: str) -> list[int]:
        """Return numbers of the program's lines that end with *marker*."""
        if self.file is None or not self.file.is_file():
            return []
        lines = program_text(self.file).splitlines()
        return [number for number, line in enumerate(lines, start=1) if line.rstrip().endswith(marker)]

    @property
    def data(self) -> dict[str, Any]:
        """Return the content of the file as plain data."""
        return self.spec.model_dump(by_alias=True, exclude_unset=True)

    def changed(self, **values: Any) -> Scenario:
        """Return the scenario with some top-level values replaced, checked again."""
        return check({**self.data, **values}, self.path)


def load_scenario(path: str | Path) -> Scenario:
    """Return one scenario; `BadFile` names every fault of the file."""
    path = Path(path)
    try:
        data = load_toml(read_bytes(path, LARGEST_FILE).decode("utf-8"))
    except OSError as error:
        raise BadFile(path, [f"cannot be read ({error.strerror})"]) from None
    except UnicodeDecodeError:
        raise BadFile(path, ["expected UTF-8 text"]) from None
    except ValueError as error:
        raise BadFile(path, [f"expected TOML: {error}"]) from None
    return check(data, path)


def check(data: Mapping[str, Any], path: Path) -> Scenario:
    """Check *data* as the content of the file *path*."""
    data, wrong = dict(data), list[str]()
    if data.pop("schedule", None) is not None:
        wrong.append(f"schedule: {NO_SCHEDULES}")
    numbers: list[int] | None = None
    try:
        spec = ScenarioSpec.model_validate(data)
    except ValidationError as error:
        wrong += complaints(error, ScenarioSpec)
        data, numbers = _without(data, [detail["loc"] for detail in error.errors()])
        try:  # what is left may have faults of another sort
            spec = ScenarioSpec.model_validate(data)
        except ValidationError:
            raise BadFile(path, wrong) from None
    scenario = Scenario(path, spec)
    wrong += _beyond_the_schema(scenario, numbers or range(len(spec.faults)))
    if wrong:
        raise BadFile(path, wrong)
    return scenario


def read_faults(tables: Sequence[Mapping[str, Any]], path: str = "faults") -> list[Rule]:
    """Return rules from the tables of `[[faults]]`, called *path* in messages.

    Raises:
        UsageError: Tables have faults; the message lists all of them.
    """
    try:
        specs = TypeAdapter(list[FaultSpec]).validate_python([dict(table) for table in tables])
    except ValidationError as error:
        raise UsageError("; ".join(complaints(error, FaultSpec, path))) from None
    return [spec.rule(f"{path}[{i}]") for i, spec in enumerate(specs)]


def _without(data: Mapping[str, Any], locations: Sequence[tuple[Any, ...]]) -> tuple[dict[str, Any], list[int]]:
    """Return *data* without invalid keys and faults, and the original numbers of the remaining faults."""
    left = {key: dict(value) if isinstance(value, Mapping) else value for key, value in data.items()}
    faults = left.get("faults", [])
    numbers = list(range(len(faults))) if isinstance(faults, list) else []
    for location in locations:
        key = location[0]
        if key == "faults" and len(location) > 1:
            numbers = [number for number in numbers if number != location[1]]
        elif len(location) > 1 and isinstance(left.get(key), dict):
            left[key].pop(location[1], None)
        else:
            left.pop(key, None)
    if isinstance(faults, list) and faults:
        left["faults"] = [faults[number] for number in numbers]
    return left, numbers


def _beyond_the_schema(scenario: Scenario, numbers: Sequence[int]) -> typing.Iterator[str]:
    """Check the conditions that depend on the program, the cluster and the rules together; *numbers* are the indices of
    the faults."""
    spec = scenario.spec
    yield from _program(scenario)
    if spec.explore is not None:
        if spec.backend == "gloo":
            yield "explore: of simulated runs only; use backend = 'sim'"
        try:
            Budget.read(spec.explore)
        except UsageError as error:
            yield f"explore: {error}"
    try:
        check_patterns(spec.silent_allow)
    except UsageError as error:
        yield str(error)
    if spec.expect.results is not None and scenario.function is None:
        yield "expect.results: a script returns nothing; name a function (program = 'script.py:function')"
    try:
        size = scenario.world_size
    except UsageError as error:
        yield f"on: {error}"
        return
    yield from _ranks(scenario, size)
    if spec.backend == "gloo":
        if "payloads" in spec.guards:
            yield "guards: payloads are watched in simulated runs only; use backend = 'sim'"
        for key in ("results", "step_time", "busbw_above", "utilisation_below", "virtual_time_below_s", "memory_below"):
            if getattr(spec.expect, key) is not None:
                yield f"expect.{key}: known of simulated runs only; use backend = 'sim'"
    for number, rule in zip(numbers, scenario.rules, strict=True):
        try:
            rule.check(scenario.cluster, size)
        except UsageError as error:
            yield f"faults[{number}]: {error}"
    if spec.backend == "gloo":
        yield from _real_faults(scenario, numbers)


def _program(scenario: Scenario) -> typing.Iterator[str]:
    """Yield what is wrong with the program: it is missing, or lacks lines that the expectations name."""
    spec = scenario.spec
    if scenario.file is not None and not scenario.file.is_file():
        yield f"program: no script {brief(scenario.program)} beside the file (looked in {scenario.path.parent})"
        return
    if scenario.file is None and scenario.function is None:
        yield f"program: expected script.py, script.py:function or module:function, got {brief(spec.program)!r}"
        return
    if scenario.function is not None:
        source = scenario.file or module_source(scenario.program, scenario.path.parent)
        if source is not None and lacks(source, scenario.function):
            yield f"program: no function {brief(scenario.function)} in {brief(scenario.program)}"
    markers = {"line": spec.expect.line, "stuck_line": spec.expect.stuck_line}
    if spec.expect.step_time is not None:
        markers["step_time.line"] = spec.expect.step_time.line
    for key, marker in markers.items():
        if marker is not None and not scenario.marked(marker):
            yield f"expect.{key}: no line of {brief(scenario.program)} ends with {brief(marker)!r}"


def _real_faults(scenario: Scenario, numbers: Sequence[int]) -> typing.Iterator[str]:
    """Yield the faults that cannot be injected into real processes or a real network."""
    for number, fault, rule in zip(numbers, scenario.spec.faults, scenario.rules, strict=True):
        if fault.what in CUTS and isinstance(rule, NetworkRule):
            try:
                cut_off(scenario.cluster, rule, scenario.num_hosts)
            except UsageError as error:
                yield f"faults[{number}].what: {fault.what}: {error}"
        elif fault.what not in REAL:
            yield (
                f"faults[{number}].what: {fault.what} cannot be injected into a real gloo run "
                f"(possible: {', '.join((*REAL, *CUTS))}); use backend = 'sim'"
            )
        elif rule.when.call is None:
            yield f"faults[{number}]: a real run needs a call at which the fault strikes (call = 3)"


REAL = ("crash", "freeze", "exit", "exception", "delay")
"""Faults that strike real processes as well."""


def _ranks(scenario: Scenario, size: int) -> typing.Iterator[str]:
    expect = scenario.spec.expect
    for key in ("culprits", "victims", "cycle", "pair"):
        for rank in getattr(expect, key) or ():
            if rank >= size:
                yield f"expect.{key}: no rank {rank}: the world has ranks 0 to {size - 1}"
    for key in ("prints", "results"):
        for rank in getattr(expect, key) or ():
            if rank != "all" and int(rank) >= size:
                yield f"expect.{key}.{rank}: no such rank: the world has ranks 0 to {size - 1}"


_PROGRAM = re.compile(r"^\s*program\s*=", re.MULTILINE)
_MORE = re.compile(r"^\s*\[*\s*(expect|faults|schema)\b", re.MULTILINE)


def is_scenario(path: Path) -> bool:
    """Return whether a TOML file is meant to be a scenario: it has a program and expectations.

    A file that cannot be parsed is searched for these words, so that a typing error does not remove it from the suite
    unnoticed.
    """
    try:
        text = read_bytes(path, LARGEST_FILE).decode(errors="replace")
    except OSError:
        return False
    try:
        data = load_toml(text)
    except ValueError:
        return _PROGRAM.search(text) is not None and _MORE.search(text) is not None
    return "program" in data and ("expect" in data or "faults" in data or data.get("schema", "") != "")


def find_scenarios(paths: Sequence[str | Path]) -> list[Path]:
    """Return the scenario files among *paths*, and those in the folders among *paths*, sorted by path."""
    scenario_paths: dict[Path, None] = {}
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*.toml")) if is_scenario(p)]
            if not inside:
                raise UsageError(f"no scenario in {path}: expected .toml files with program and [expect]")
            scenario_paths.update(dict.fromkeys(inside))
        elif path.exists():
            scenario_paths[path] = None
        else:
            raise UsageError(f"no scenario {path}: no such file or folder")
    return list(scenario_paths)


def load_scenarios(paths: Sequence[str | Path], bad: list[BadFile] | None = None) -> list[Scenario]:
    """Load all scenarios, or raise one UsageError with every fault of every file.

    With a list *bad*, faulty files are appended to it and the others are returned.
    """
    scenarios, wrong = [], list[BadFile]()
    for path in find_scenarios(paths):
        try:
            scenarios.append(load_scenario(path))
        except BadFile as error:
            wrong.append(error)
    if bad is not None:
        bad += wrong
    elif wrong:
        raise UsageError("\n".join(map(str, wrong)))
    return scenarios
