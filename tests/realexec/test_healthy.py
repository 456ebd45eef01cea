"""Legal programs finish under guard, at every level, and nobody cries wolf."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import HERE, Case, Zygote

CASES = [Case.read(path) for path in sorted((HERE / "healthy").glob("*.py"))]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["record", "check", "strict"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path.stem)
def test_no_alarm(case: Case, level: str, zygote: Zygote, folder: Path) -> None:
    """A legal program runs to its end with exit code 0 and an empty list of diagnoses."""
    result = zygote.run(case.path, case.ranks, directory=folder, level=level)
    assert result.codes == dict.fromkeys(range(case.ranks), 0), result.outputs
    assert result.diagnoses == [], result.report


@pytest.mark.slow
def test_watching_tensors_raises_no_alarm(zygote: Zygote, folder: Path) -> None:
    """NaN watch and checksums find nothing in a program that uses every collective as it should."""
    case = Case.read(HERE / "healthy" / "everything.py")
    result = zygote.run(case.path, case.ranks, directory=folder, nan=True, checksum=True)
    assert result.codes == {0: 0, 1: 0}, result.outputs
    assert result.diagnoses == [], result.report
