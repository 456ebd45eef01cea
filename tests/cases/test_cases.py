"""Every case of the corpus in its arms: what is planted is named, what is healthy is not accused (see `corpus.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import Zygote

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records.kinds import INCONSISTENT, Kind
from tests.cases.arms import aspects, on_gloo, simulate, simulate_on_gpus, simulate_scenario_of, verdict_of, whole
from tests.cases.as_on_gloo import endings
from tests.cases.corpus import ARMS, CASES, FAULTS, FIELDS, OF_SCENARIOS, Case
from tests.golden import assert_golden

GOLDEN = Path(__file__).parent / "golden"
pytestmark = pytest.mark.filterwarnings("ignore")  # a program's warnings are its own

ELSEWHERE = {
    Kind.JOB_ENDED: "launch/test_interrupt",
    Kind.NETWORK_FAULT: "launch/test_hosts",
    Kind.DEVICE_MISMATCH: "device/test_two_backends",  # it needs GPUs
}
"""Kinds whose real jobs are in another file."""


EVERY_RANK_RAISES = {
    *(Kind.OP_MISMATCH, Kind.SHAPE_MISMATCH, Kind.DTYPE_MISMATCH, Kind.REDUCE_OP_MISMATCH),
    *(Kind.ROOT_MISMATCH, Kind.SPLITS_MISMATCH),
}
"""Kinds that strict refuses before the call, on every rank of the group, none of which is ended by a signal."""


def cases(arm: str, of: list[Case], always: set[str] | None = None) -> pytest.MarkDecorator:
    """Those that run in the *arm*; where *always* is given, the soak alone runs the others."""
    params = []
    for case in of:
        if not case.runs(arm):
            continue
        marks: list[Any] = [pytest.mark.xdist_group(f"cases of {case.family}")]
        if always is not None and case.name not in always and not case.always(arm):
            marks.append(pytest.mark.soak)
        elif case.always("smoke") or (always is None and case.always("smoke")):
            marks.append(pytest.mark.smoke)
        if arm not in ("simulated", "records") or "host_stuck" in case.kinds:
            marks.append(pytest.mark.slow)
        params.append(pytest.param(case, id=case.name, marks=marks))
    return pytest.mark.parametrize("case", params)


def first_of_each_kind(every: int = 1, kinds: Any = tuple(Kind)) -> set[str]:
    """Names of the first case of each kind, or of one in so many kinds."""
    names = {case.kinds[0]: case.name for case in reversed(FAULTS) if case.runs("check")}
    return {name for number, (kind, name) in enumerate(sorted(names.items())) if kind in kinds and number % every == 0}


@cases("simulated", FAULTS)
def test_simulated(case: Case) -> None:
    """The first diagnosis is what the case declares, at a marked line, with the words of the cure."""
    if case.scenario is not None:
        seen, wrong = simulate_scenario_of(case)
        assert not wrong, wrong
    else:
        seen = simulate(case)
    if case.runs("lines"):
        assert not verdict_of(seen, case), seen.text


@cases("records", [case for case in FAULTS if case.runs("simulated")])
def test_records_of_real_ends(case: Case) -> None:
    """The diagnosis is the same where the same ranks have been ended by their launcher, are on their way out, or have
    lost the connection to who is gone."""
    seen = simulate(case)
    if not seen.diagnoses:
        return
    assert seen.evidence is not None
    told = seen.diagnoses[0]
    for how, evidence in endings(seen.evidence):
        first = diagnose(evidence)[0]
        assert (how, first.kind, first.culprits) == (how, told.kind, told.culprits), first.explanation


@cases("simulated", [case for case in FAULTS if case.has_fixed_form])
def test_its_fixed_form_is_healthy(case: Case) -> None:
    """Without what is planted the same program comes to its end."""
    seen = simulate(case, "fixed")
    assert (seen.diagnoses, seen.exit_code) == ([], 0), seen.text


@cases("gpus", [case for case in FAULTS if case.runs("simulated")], always=set())
def test_on_simulated_gpus(case: Case, tmp_path: Path) -> None:
    """With CUDA tensors and NCCL the diagnosis is that of CPU tensors: kind, culprits, group, line."""
    seen = simulate_on_gpus(case, tmp_path)
    assert seen.diagnoses, seen.text
    assert aspects(seen, case) == aspects(simulate(case), case), seen.text


@cases("check", FAULTS, always=first_of_each_kind())
def test_on_gloo(case: Case, zygote: Zygote) -> None:
    """Real ranks are told what the case declares, and what its simulation is told, to the first line of the report."""
    seen = on_gloo(case, "check", zygote)
    assert not verdict_of(seen, case), seen.text
    if case.runs("simulated") and not case.is_healthy:
        virtual = simulate(case)
        assert aspects(seen, case) == aspects(virtual, case), f"{virtual.text}\nreal: {seen.text}"


@cases("strict", FAULTS, always=first_of_each_kind(3, INCONSISTENT))
def test_on_gloo_at_strict(case: Case, zygote: Zygote) -> None:
    """Strict has the same verdict; its exceptions name the kind."""
    seen = on_gloo(case, "strict", zygote)
    assert not verdict_of(seen, case, words=False), seen.text
    if case.kinds[0] in INCONSISTENT:
        assert seen.refusals <= set(case.kinds), seen.text
    group = seen.diagnoses[0].group
    if case.kinds[0] in EVERY_RANK_RAISES and group is not None and len(group.ranks) == case.ranks:
        assert set(seen.codes) == {1}, seen.text
        assert all("CollectiveMismatch" in printed for printed in seen.outputs), seen.text


@pytest.mark.soak
@cases("check", [case for case in FAULTS if case.has_fixed_form])
@pytest.mark.parametrize("level", ["check", "strict"])
def test_its_fixed_form_is_healthy_on_gloo(case: Case, level: str, zygote: Zygote) -> None:
    """At check and at strict, too."""
    seen = on_gloo(case, level, zygote, "fixed")
    assert (seen.diagnoses, seen.exit_code) == ([], 0), seen.text


@pytest.mark.parametrize("family", sorted({case.family for case in FAULTS if case.scenario is None}))
def test_whole_diagnoses(family: str) -> None:
    """All that a diagnosis says, as a table: a change of any field is seen by whoever reviews it."""
    text = []
    for case in FAULTS:
        if case.family == family and case.runs("simulated") and "host_stuck" not in case.kinds:
            text += [case.name, *(line for diagnosis in simulate(case).diagnoses for line in whole(diagnosis))]
    assert_golden(GOLDEN / f"{family}.txt", "\n".join(text) + "\n")


def test_every_kind_has_a_program_and_every_field_is_known() -> None:
    """No kind of diagnosis is without a real job, and no field is misspelt."""
    planted = {kind for case in FAULTS if case.runs("check") for kind in case.kinds}
    assert {kind.value for kind in Kind} == {*planted, "healthy", *(kind.value for kind in ELSEWHERE)}
    known = {*FIELDS, *ARMS}
    assert [case.name for case in (*FAULTS, *CASES) if not case.fields.keys() <= known] == []
    scenarios = {case.path.stem for case in FAULTS if case.scenario is not None}
    assert OF_SCENARIOS.keys() <= scenarios
