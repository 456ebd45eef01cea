"""The training programs of the corpus under the silent search: each fault is found by its kind, simulated with values,
on simulated GPUs without, and on gloo; repaired, and where a program only looks like it, nothing is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import Zygote

from distsim.debug.diagnosis.silent.facts import Severity, SilentFinding
from distsim.debug.records.kinds import Kind
from tests.cases.arms import on_gloo, simulate, simulate_on_gpus
from tests.cases.corpus import SEARCHED, SEARCHED_HEALTHY, Case
from tests.golden import assert_golden
from tests.kin import one_in

GOLDEN = Path(__file__).parent / "golden" / "silent"

pytestmark = pytest.mark.filterwarnings("ignore:.*broadcast_buffers")


def cases(of: list[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", of, ids=lambda case: case.path.stem)


def whole(finding: SilentFinding) -> str:
    """Return all fields of *finding* that are not empty."""
    distance = "" if finding.distance is None else f", {finding.distance:.2g} apart"
    site = None if finding.site is None else f"{Path(finding.site.file).name}:{finding.site.line}"
    head = f"{finding.kind.value} ({finding.level.value}) of {finding.ranks}, step {finding.step} at {site}{distance}"
    sentences = [", ".join(finding.tensors), finding.evidence, finding.explanation, finding.suggestion]
    return "\n  ".join([head, *filter(None, sentences)]).replace("tests/cases/silent/", "")


@cases(SEARCHED)
def test_a_faulty_program_is_found_by_its_kind(case: Case) -> None:
    """Each planted fault is a finding, and the program still ends with exit code 0; the whole finding is in a table."""
    seen = simulate(case, silent="watch")
    assert seen.exit_code == 0
    assert case.kinds[0] in [finding.kind.value for finding in seen.silent]
    assert_golden(GOLDEN / f"{case.path.stem}.txt", "\n".join(map(whole, seen.silent)) + "\n")


@cases(SEARCHED)
def test_a_repaired_program_is_silent(case: Case) -> None:
    """Without its fault the same program has no finding."""
    seen = simulate(case, "fixed", silent="watch")
    assert (seen.exit_code, seen.silent) == (0, [])


@cases(SEARCHED_HEALTHY)
def test_a_healthy_look_alike_is_silent(case: Case) -> None:
    """What looks like a fault and is none is not accused."""
    seen = simulate(case, silent="watch")
    assert (seen.exit_code, seen.silent) == (0, [])


def test_strict_makes_an_error_an_exit_code_and_off_looks_at_nothing() -> None:
    """Exit code 5: the ranks finished, and the end alone proves nothing."""
    case = Case.named("silent/skip_load")
    assert simulate(case, silent="strict").exit_code == 5
    assert simulate(case, "fixed", silent="strict").exit_code == 0
    assert (simulate(case).exit_code, simulate(case).silent) == (0, [])


def on_gpus(of: list[Case], only: str = "") -> pytest.MarkDecorator:
    """Those that run on GPUs; the suite runs what the cases say, the soak all."""
    return cases(
        [
            pytest.param(case, id=case.path.stem, marks=() if case.always("gpus") else pytest.mark.soak)
            for case in of
            if case.runs("gpus") and (not only or only in case.fields)
        ]
    )


def found_without_values(case: Case, folder: Path, *more: str) -> list[SilentFinding]:
    """Silent findings of a program on simulated GPUs, whose tensors have no values."""
    seen = simulate_on_gpus(case, folder, *more, silent="watch")
    assert seen.exit_code == 0, seen.text
    assert not [note for note in seen.notes if "silent" in note]
    return seen.silent


@pytest.mark.slow
@on_gpus(SEARCHED, "unvalued")
def test_a_faulty_program_is_warned_of_without_values(case: Case, tmp_path: Path) -> None:
    """Never more than a warning: two ranks may compute one value in different ways."""
    (finding,) = found_without_values(case, tmp_path)
    assert (finding.kind.value, finding.level) == (case.fields["unvalued"], Severity.WARNING)
    assert "This compares how values are computed" in finding.explanation
    assert case.fields.get("says", "") in f"{finding.explanation} {finding.suggestion}"


@pytest.mark.slow
@on_gpus(SEARCHED)
def test_a_repaired_program_is_silent_without_values(case: Case, tmp_path: Path) -> None:
    """Values that are computed alike on each rank, or come from one collective, are equal."""
    assert found_without_values(case, tmp_path, "fixed") == []


@pytest.mark.slow
@on_gpus(SEARCHED_HEALTHY)
def test_a_healthy_look_alike_is_silent_without_values(case: Case, tmp_path: Path) -> None:
    """Shards, flat buffers and collectives of parts are followed byte by byte."""
    assert found_without_values(case, tmp_path) == []


def searched_on_gloo(case: Case, zygote: Zygote, *more: str, **settings: Any) -> list[str]:
    """Kinds of the findings of real ranks, which must end well."""
    seen = on_gloo(case, "check", zygote, *more, silent="watch", **settings)
    assert seen.codes == (0,) * case.ranks, seen.text
    assert [one.kind for one in seen.diagnoses if one.kind is not Kind.ALIASED_OUTPUTS] == [], seen.text
    return [finding["kind"] for finding in seen.silent]


@pytest.mark.slow
@cases(one_in(7, SEARCHED))
def test_a_faulty_program_is_found_on_gloo(case: Case, zygote: Zygote) -> None:
    """As in the simulator, and the job ends as without the search."""
    assert case.kinds[0] in searched_on_gloo(case, zygote)


@pytest.mark.slow
@cases(one_in(12, SEARCHED, first=1))
def test_a_repaired_program_is_silent_on_gloo(case: Case, zygote: Zygote) -> None:
    """Without its fault the same program has no finding."""
    assert searched_on_gloo(case, zygote, "fixed") == []


@pytest.mark.slow
@cases(one_in(5, SEARCHED_HEALTHY))
def test_a_healthy_look_alike_is_silent_on_gloo(case: Case, zygote: Zygote) -> None:
    """What looks like a fault and is none is not accused."""
    assert searched_on_gloo(case, zygote) == []


@pytest.mark.slow
def test_what_is_allowed_is_not_reported(zygote: Zygote) -> None:
    """`silent_allow`, as in a simulation."""
    allowed = "replicas_differ_at_start,nothing:else"
    assert searched_on_gloo(Case.named("silent/skip_load"), zygote, silent_allow=allowed) == []
