"""Legal programs finish under guard, at every level, and nobody cries wolf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import HERE, Case, Zygote

from distsim.sim.run import RunRequest, run_program
from tests.kin import one_in

SCENARIOS = HERE.parents[1] / "scenarios" / "healthy"
STARTS_ITS_OWN_RANKS = {"ddp_two_layers", "distributed_sgd", "point_to_point"}
"""Programs of one process that call mp.spawn: see `test_spawn.py`."""

CASES = [Case.read(path) for path in sorted((HERE / "healthy").glob("*.py"))]
CASES += [
    Case(path, {"ranks": "4"}) for path in sorted(SCENARIOS.glob("*.py")) if path.stem not in STARTS_ITS_OWN_RANKS
]
WAYS: dict[str, dict[str, Any]] = {
    "record": {"level": "record"},
    "check": {"level": "check"},
    "strict": {"level": "strict"},
    "watching": {"level": "check", "nan": True, "checksum": True},
}


def programs(every: int, first: int = 0) -> pytest.MarkDecorator:
    """Every program; one in *every* runs always."""
    return pytest.mark.parametrize("case", one_in(every, CASES, first=first), ids=lambda case: case.path.stem)


@pytest.mark.slow
@programs(9)
def test_no_alarm(case: Case, zygote: Zygote, folder: Path) -> None:
    """A legal program runs to its end with exit code 0 and an empty list of diagnoses."""
    runs_without_an_alarm(case, "check", zygote, folder)


@pytest.mark.slow
@programs(15, first=1)
def test_no_alarm_where_collectives_are_held(case: Case, zygote: Zygote, folder: Path) -> None:
    """At level strict, too."""
    runs_without_an_alarm(case, "strict", zygote, folder)


@pytest.mark.slow
@programs(30, first=2)
def test_no_alarm_where_tensors_are_looked_at(case: Case, zygote: Zygote, folder: Path) -> None:
    """With the checks for NaN and for buffers written in flight."""
    runs_without_an_alarm(case, "watching", zygote, folder)


def runs_without_an_alarm(case: Case, way: str, zygote: Zygote, folder: Path) -> None:
    result = zygote.run(case.path, case.ranks, directory=folder, **WAYS[way])
    assert result.codes == dict.fromkeys(range(case.ranks), 0), result.outputs
    assert result.diagnoses == [], result.report


@pytest.mark.slow
@programs(20, first=3)
def test_no_alarm_where_calls_are_recorded_only(case: Case, zygote: Zygote, folder: Path) -> None:
    """At level record, too."""
    runs_without_an_alarm(case, "record", zygote, folder)


@pytest.mark.slow
@programs(20, first=4)
def test_level_off_leaves_nothing(case: Case, zygote: Zygote, folder: Path) -> None:
    """At level off the program runs as it does without a guard, and writes no ring."""
    result = zygote.run(case.path, case.ranks, directory=folder, level="off")
    assert result.codes == dict.fromkeys(range(case.ranks), 0), result.outputs
    assert list(folder.glob("*.ring")) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["check", "strict"])
def test_each_backend_of_a_group_has_its_own_calls(way: str, zygote: Zygote, folder: Path) -> None:
    """Neither a thread race nor calls in the wrong order: neither knows of the other."""
    runs_without_an_alarm(Case.read(HERE / "healthy" / "two_backends.py"), way, zygote, folder)


NOT_SIMULATED = {
    "two_backends": "torch's fake backend is refused by its name; tests/device/test_two_backends.py has NCCL's",
    "replaces_itself": "os.execv would replace all ranks at once, and is refused by its name",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # a program's warnings are its own
@pytest.mark.parametrize(
    "case",
    one_in(8, [case for case in CASES if case.path.parent.parent == HERE and case.path.stem not in NOT_SIMULATED]),
    ids=lambda case: case.path.stem,
)
def test_no_alarm_in_a_simulation(case: Case) -> None:
    """Simulated, too, it runs to its end and nobody is accused of anything."""
    outcome = run_program(RunRequest(str(case.path), on="ethernet-cpu:1", nproc_per_node=case.ranks))
    assert (outcome.exit_code, outcome.diagnoses) == (0, []), (outcome.failures, outcome.diagnoses)
