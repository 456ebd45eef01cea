"""`distsim scenario from DIR`: turns flight records of a hung run into the smallest scenario that hangs equally."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from distsim.debug.postmortem import Found, examine
from distsim.debug.records import Phase
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.errors import UsageError
from distsim.scenario.file.load import check
from distsim.scenario.reproduce.calls import SPIN, Calls, calls_of
from distsim.scenario.reproduce.write_program import write_program
from distsim.scenario.run import simulate_scenario
from distsim.scenario.shrink import shrink
from distsim.text.output_files import check_writable
from distsim.text.ranks import of_ranks

GPUS_PER_NODE = 8
MAX_TRIES = 400
SPIN_S = 3.0
"""Seconds after which a spinning rank counts as stuck: more than torch's first imports take on a busy machine."""
MAX_SPINS = 4
"""Candidates with a spinning rank that the search for a start runs: each costs SPIN_S of CPU."""
SIBLINGS = {Kind.MISSING_RANK: Kind.UNEVEN_ITERATIONS, Kind.UNEVEN_ITERATIONS: Kind.MISSING_RANK}
"""Kinds that count as equal, because they differ only by the loop around the call, and records contain no loops."""
STYLES = ("merged", "exact", "looped", "looped, and after", "apart")
"""Routes to write the calls down as a program; the first that gives the diagnosis is taken."""


@dataclass(slots=True)
class Attempt:
    """Result of a candidate in the simulator."""

    diagnosis: Diagnosis | None

    def same(self, kinds: Sequence[Kind], culprits: Sequence[int]) -> bool:
        diagnosis = self.diagnosis
        return diagnosis is not None and diagnosis.kind in kinds and tuple(diagnosis.culprits) == tuple(culprits)


def reproduce(directory: Path, output: Path, shrink: bool = True) -> Iterator[str]:
    """Write the scenario *output* (.toml) and its program, and yield lines for people.

    Raises:
        UsageError: *directory* contains no fault, or the simulator does not reach the same diagnosis.
    """
    check_writable(str(output), "-o", "reproduced.toml")
    output = output if output.suffix == ".toml" else output.with_suffix(".toml")
    script = output.with_suffix(".py")
    for path in (output, script):
        if path.exists():
            raise UsageError(f"{path} exists already; choose another name (-o FILE)")
        check_writable(str(path), "-o")
    examined = examine(directory)
    yield from (f"note: {complaint}" for complaint in examined.complaints)
    first = next((d for d in examined.diagnoses if not d.is_warning), None)
    if first is None and examined.inconclusive is not None:
        raise UsageError(f"{directory}: inconclusive: {examined.inconclusive} {examined.inconclusive.suggestion}")
    if first is None:
        raise UsageError(f"{directory}: nothing is wrong in these records, so there is nothing to reproduce")
    yield f"{first.kind.label}: {first.explanation}"
    folder = Path(tempfile.mkdtemp(prefix="distsim-reproduce-"))
    try:
        calls, style, number = _find(examined, first, folder, shrink)
        last = _attempt(calls, folder, style).diagnosis
        assert last is not None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    culprits = [calls.ranks.index(rank) for rank in first.culprits]
    attempt_folder = output.absolute().parent
    teaches = (
        f"{first.kind.label.capitalize()}, reproduced from the flight records of {examined.evidence.world_size} ranks."
    )
    script.write_text(write_program(calls, teaches, style), encoding="utf-8")
    output.write_text(_toml(calls, script.name, last, culprits, teaches), encoding="utf-8")
    if last.kind is not first.kind:
        yield (
            f"note: simulated it is called {last.kind.label}: which of the two it is depends on the program's loop, "
            "and records have calls only"
        )
    num_calls = sum(len(num_calls) for num_calls in calls.calls.values())
    before = sum(len(num_calls) for num_calls in calls_of(examined.evidence).calls.values())
    yield (
        f"wrote {output} and {script.name}: {len(calls.ranks)} of {examined.evidence.world_size} ranks, "
        f"{num_calls} of {before} calls ({number} runs)"
    )
    yield f"run it: distsim scenario run {output if output.is_absolute() else attempt_folder / output.name}"


def _find(examined: Found, first: Diagnosis, folder: Path, small: bool) -> tuple[Calls, str, int]:
    tries = 0
    style = "merged"
    kinds: tuple[Kind, ...] = (first.kind,)

    def fails_alike(calls: Calls) -> bool:
        nonlocal tries
        if tries >= MAX_TRIES or not set(first.culprits) <= set(calls.ranks):
            return False
        tries += 1
        culprits = [calls.ranks.index(rank) for rank in first.culprits]
        return _attempt(calls, folder, style).same(kinds, culprits)

    whole = calls_of(examined.evidence, new_groups=first.kind is Kind.GROUP_CREATION_ORDER)
    # Who was stuck was ended from outside, later: by the launcher, by a signal, by its peers' end.
    own = {rank: e for rank, e in whole.endings.items() if rank not in first.stuck and rank not in first.victims}
    whole = replace(whole, endings=own)
    # So, mostly, was who raised because another was gone.
    alone = replace(whole, endings={rank: e for rank, e in own.items() if rank in first.culprits})
    starts = [*([alone] if alone.endings != own else ()), whole, *_other_endings(whole, examined, first)]
    starts += [calls.blocking() for calls in starts]
    starts = [calls for at, calls in enumerate(starts) if calls not in starts[:at]]
    spins = 0
    calls = None
    wider = (first.kind, SIBLINGS[first.kind]) if first.kind in SIBLINGS else (first.kind,)
    for kinds, style in product(dict.fromkeys(((first.kind,), wider)), STYLES):  # noqa: B007  # fails_alike reads them
        for candidate in starts:
            spins += _spins(candidate)
            if (spins <= MAX_SPINS or not _spins(candidate)) and fails_alike(candidate):
                calls = candidate
                break
        if calls is not None:
            break
    if calls is None:
        got = _attempt(whole, folder, STYLES[0]).diagnosis
        outcome = "nothing wrong" if got is None else f"{got.kind.value} of {of_ranks(got.culprits)}: {got.explanation}"
        raise UsageError(
            f"the records say {first.kind.value} of {of_ranks(first.culprits)}; simulated, the same calls give "
            f"{outcome} "
            "(what made the run hang is not in its calls alone)"
        )
    return _shrunk(calls, first, fails_alike) if small else calls, style, tries


def _shrunk(calls: Calls, first: Diagnosis, fails_alike: Callable[[Calls], bool]) -> Calls:
    """Shrink ranks before calls, because calls of an unneeded rank may keep the diagnosis alive once others are
    gone."""
    for _ in range(2):
        calls = _fewest_ranks(calls, first, fails_alike)
        calls = _fewest_calls(calls, fails_alike)
    return _fewest_endings(calls, fails_alike)


def _other_endings(calls: Calls, examined: Found, first: Diagnosis) -> Iterator[Calls]:
    """Yield records do not tell a rank that computes from one that has ended: try both."""
    for ending in ("", SPIN, "threading.Event().wait()"):
        endings = dict(calls.endings)
        for rank in first.culprits:
            state = examined.evidence.ranks.get(rank)
            if state is None or state.phase in (Phase.RUNNING, Phase.HOST_STUCK, Phase.KILLED, Phase.FROZEN):
                endings[rank] = ending
        yield replace(calls, endings=endings)


def _fewest_calls(calls: Calls, fails_alike: Callable[[Calls], bool]) -> Calls:
    return calls.only(shrink(calls.keys, lambda keys: fails_alike(calls.only(keys))))


def _fewest_ranks(calls: Calls, first: Diagnosis, fails_alike: Callable[[Calls], bool]) -> Calls:
    """Keep only the culprits and the ranks that are needed for the hang, but at least two ranks."""

    def only(others: Sequence[int]) -> Calls:
        fewer = calls
        for rank in calls.ranks:
            if rank not in first.culprits and rank not in others:
                fewer = fewer.without(rank)
        return fewer

    others = [rank for rank in reversed(calls.ranks) if rank not in first.culprits]
    return only(shrink(others, lambda some: len(first.culprits) + len(some) > 1 and fails_alike(only(some))))


def _fewest_endings(calls: Calls, fails_alike: Callable[[Calls], bool]) -> Calls:
    """Remove what ranks did after the other ranks were already blocked."""

    def only(ranks: Sequence[int]) -> Calls:
        return replace(calls, endings={rank: calls.endings[rank] for rank in ranks})

    return only(shrink(list(calls.endings), lambda ranks: fails_alike(only(ranks)), singly=True))


def _attempt(calls: Calls, folder: Path, style: str) -> Attempt:
    # Texts of programs are kept by their path, so each has its own.
    script = folder / f"candidate_{len(list(folder.iterdir()))}.py"
    script.write_text(write_program(calls, "A candidate.", style), encoding="utf-8")
    scenario = check(_settings(calls, script.name), folder / "candidate.toml")
    outcome, _, _ = simulate_scenario(scenario)
    return Attempt(next((d for d in outcome.diagnoses if not d.is_warning), None))


def _spins(calls: Calls) -> bool:
    return SPIN in calls.endings.values()


def _settings(calls: Calls, program: str) -> dict[str, object]:
    n = len(calls.ranks)
    per_node = max(k for k in range(1, GPUS_PER_NODE + 1) if n % k == 0)
    settings: dict[str, object] = {
        "program": program,
        "on": f"dgx-h100:{n // per_node}",
        "nproc_per_node": per_node,
        "limits": {"wall_time_s": 30.0},
    }
    if _spins(calls):
        settings["limits"] = {"host_timeout_s": SPIN_S, "wall_time_s": 30.0}
    frozen = [calls.ranks.index(r) for r, ending in calls.endings.items() if "stopped here" in ending]
    if frozen:
        settings["faults"] = [{"what": "freeze", "ranks": frozen, "at_s": 5e3}]
    return settings


def _toml(calls: Calls, program: str, first: Diagnosis, culprits: Sequence[int], teaches: str) -> str:
    settings = _settings(calls, program)
    lines = ['schema = "distsim.scenario/1"', f"teaches = {json.dumps(teaches)}"]
    lines += [f"{key} = {json.dumps(settings[key])}" for key in ("program", "on", "nproc_per_node")]
    limits = settings["limits"]
    assert isinstance(limits, dict)
    lines += ["", "[limits]", *(f"{key} = {value}" for key, value in limits.items())]
    faults = settings.get("faults", [])
    assert isinstance(faults, list)
    for fault in faults:
        lines += ["", "[[faults]]", *(f"{key} = {json.dumps(value)}" for key, value in fault.items())]
    lines += ["", "[expect]", f'kind = "{first.kind.value}"', f"culprits = {list(culprits)}"]
    if first.call is not None:
        lines.append(f'call = {{ op = "{first.call.op}" }}')
    return "\n".join(lines) + "\n"
